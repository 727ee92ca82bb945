"""Writes the tables of the manual that are made from the code, each between its two marks. Run it after a change:
python docs/make_tables.py
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

from hpcddp.checks.node import ERRORS, NODE_CHECKS
from hpcddp.cli.verbs import EXITS, VERBS
from hpcddp.diagnose.rows import CLASSES, LOST, ROWS
from hpcddp.training.mistakes import MISTAKES, Mistake

DOCS = Path(__file__).parent
BEGIN, END = "<!-- made by docs/make_tables.py: {} -->\n", "<!-- end -->\n"


# The verbs, and what their exit statuses say.

# verb -> the page on it
PAGES = {
    "init": "job-file.md",
    "render": "job-file.md",
    "submit": "jobs.md",
    "layout": "job-file.md#the-layout",
    "advise": "advise.md",
    "lint": "lint.md",
    "check": "checks.md",
    "sites": "sites.md",
    "env": "ranks.md",
    "exec": "ranks.md",
    "launch": "#hpcddp-launch",
    "supervise": "signals.md#what-the-job-script-becomes",
    "logs": "jobs.md#what-it-prints",
    "cancel": "jobs.md#the-end",
    "status": "jobs.md#what-became-of-it",
    "diagnose": "troubleshooting.md",
    "stacks": "hangs.md",
    "watch": "jobs.md#a-live-screen",
    "efficiency": "efficiency.md",
    "train": "#hpcddp-train",
    "verify": "verify.md",
    "compare": "exactness.md#comparing-two-runs",
    "completion": "#completion",
}
# Statuses that no verb has of its own.
_OF_ALL = {
    6: "of a rank: another rank failed first, and this one ended with it",
    130: "interrupted (Ctrl-C)",
    141: "the reader of the pipe has gone (`hpcddp layout … \\| head`)",
}


def list_verbs() -> str:
    rows = ["| verb | what it does | page |", "|---|---|---|"]
    for verb, text in VERBS.items():
        page = PAGES[verb]
        rows.append(f"| `hpcddp {verb}` | {text} | {_link(page)} |")
    return "\n".join(rows) + "\n"


def _link(page: str) -> str:
    name = "below" if page.startswith("#") else page.partition("#")[0]
    return f"[{name}]({page})" if page else ""


def list_statuses() -> str:
    """A row for each exit status: what it means for all verbs, and what for single ones."""
    own: dict[int, dict[str, list[str]]] = {}
    for verb in VERBS:
        for status, text in importlib.import_module(f"hpcddp.cli.{verb}").build_parser().exits.items():
            if text:
                own.setdefault(status, {}).setdefault(text, []).append(f"`{verb}`")
    rows = ["| status | meaning |", "|---|---|"]
    for status in sorted({*EXITS, *own, *_OF_ALL}):
        meanings = [text for text in (EXITS.get(status), _OF_ALL.get(status)) if text]
        meanings += [f"{', '.join(verbs)}: {text}" for text, verbs in own.get(status, {}).items()]
        rows.append(f"| {status} | {'; '.join(meanings)} |")
    return "\n".join(rows) + "\n"


# The mistakes that a training loop is refused.

# what stands in a remedy that is made where the mistake happens
_EXAMPLE = {
    "unit": "epochs",
    "more": 4,
    "count": 2,
}


def list_mistakes() -> str:
    rows = (_mistake(name, row) for name, row in MISTAKES.items())
    return "| mistake | when | what to write |\n|---|---|---|\n" + "".join(rows)


def _mistake(name: str, mistake: Mistake) -> str:
    remedy = mistake.remedy.format(**_EXAMPLE)
    code = f"`` {remedy} ``" if "`" in remedy else f"`{remedy}`"
    cells = (f"`{name}`", mistake.condition, code)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


# What a check of a node finds.

# of the launch and of links, which are no rows
_OTHERS = {
    "answer": "A host of the job that has not said what it is in 30 s.",
    "launcher": "A launcher that starts nothing.",
    "ranks": "A rank that is missing or there twice, half a launch.",
    "slow host": "A host all of whose links are slow.",
    "slow link": "A link between two hosts that are not slow themselves.",
    "all-reduce": "A sum over all hosts that does not come about.",
}


def list_checks() -> str:
    """A line for each check: its name, and what it finds, by the first sentence of its docstring."""
    found = {row.name: str(row.find.__doc__) for row in NODE_CHECKS}
    found |= {name: what for name, (what, _) in ERRORS.items()} | _OTHERS
    width = max(map(len, found))
    lines = [
        f"{name:{width}}  {' '.join(text.split()).replace(': ', '. ').partition('. ')[0].rstrip('.')}"
        for name, text in found.items()
    ]
    return "```text\n" + "\n".join(lines) + "\n```\n"


# Why a job ended.


def list_causes() -> str:
    """A section for each class: what the log says, and what to type; and what is never a cause."""
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
            "| the log says | what to do |",
            "|---|---|",
        ]
        said: dict[str, list[str]] = {}
        for row in rows:
            said.setdefault(row.remedy, []).append(row.shows)
        for remedy, shown in said.items():
            lines.append(f"| {', '.join(map(_shown, dict.fromkeys(shown)))} | {_cell(remedy)} |")
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


# table -> its page, and what makes it
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "verbs": ("command-line.md", list_verbs),
    "exit statuses": ("command-line.md", list_statuses),
    "mistakes": ("mistakes.md", list_mistakes),
    "checks": ("checks.md", list_checks),
    "causes": ("troubleshooting.md", list_causes),
}


def put_tables(name: str, page: str) -> str:
    """The text of this page with the tables of today."""
    for table, (of_page, make) in TABLES.items():
        if of_page == name:
            before, begin, rest = page.partition(BEGIN.format(table))
            assert begin, f"{name} has no table of {table}"
            page = f"{before}{begin}\n{make()}\n{END}{rest.partition(END)[2]}"
    return page


if __name__ == "__main__":
    for name in sorted({page for page, _ in TABLES.values()}):
        file = DOCS / name
        file.write_text(put_tables(name, file.read_text(encoding="utf-8")), encoding="utf-8")
