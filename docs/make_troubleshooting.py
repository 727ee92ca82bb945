"""Writes the table of docs/troubleshooting.md from the rows of hpcddp/diagnose/rows.py.

Run it after changing a row: python docs/make_troubleshooting.py
"""

from __future__ import annotations

import re
from pathlib import Path

from hpcddp.diagnose.rows import CLASSES, LOST, NOBODY, ROWS

PAGE = Path(__file__).parent / "troubleshooting.md"
BEGIN, END = "<!-- made by docs/make_troubleshooting.py -->\n", "<!-- end -->\n"


def make_table() -> str:
    """A section for each class: what the log says, whose turn it is, what to type; and what is never a cause."""
    lines = []
    for cause, meaning in CLASSES.items():
        rows = [row for row in ROWS if row.cause == cause and row.remedy]
        if not rows:
            continue
        lines += [
            "",
            f"### {cause}",
            "",
            f"{meaning[0].upper()}{meaning[1:]}.",
            "",
            "| the log says | whose turn | what to do |",
            "|---|---|---|",
        ]
        turns: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            turns.setdefault((row.whose, row.remedy), []).append(row.shows)
        for (whose, remedy), shown in turns.items():
            texts = ", ".join(map(_shown, dict.fromkeys(shown)))
            lines.append(f"| {texts} | {whose if whose != NOBODY else ''} | {_cell(remedy)} |")
    follows = [row.shows for row in ROWS if row.level == LOST]
    lines += [
        "",
        "### Never the cause",
        "",
        "These lines follow from the end of another rank: " + ", ".join(map(_shown, follows)) + ".",
    ]
    return "\n".join(lines).lstrip("\n") + "\n"


def _cell(text: str) -> str:
    named = re.sub(r"\{(\w+)\}", lambda found: found[1].upper(), text)
    return named.replace("|", "\\|").replace("<", "&lt;")


def _shown(text: str) -> str:
    """What stands in a log, as code, with the program that wrote it behind."""
    found = re.fullmatch(r"(.*?)( \(\w[\w ,.]*\))?", text)
    assert found
    return f"`{found[1].replace('|', chr(92) + '|')}`{found[2] or ''}"


def put_table(page: str) -> str:
    """The page with the table of today."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{make_table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(put_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
