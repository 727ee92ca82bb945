"""The table of signals in docs/signals.md, which tests/multirank and tests/cluster run row by row."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

REPO = Path(__file__).parents[1]
SAVES = str(REPO / "tests/multirank/programs/saves.py")


def read_table(sent: Collection[str]) -> list[tuple[str, str, str, str]]:
    """The rows of the table of docs/signals.md with one of these in their second column, one for each launcher."""
    page = (REPO / "docs/signals.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [(name, *row[1:]) for row in rows if len(row) == 4 and row[1] in sent for name in row[0].split(", ")]


#: In what was sent: how the program catches the signal on rank 0 alone.
ALONE = ", rank 0 alone catches it"


def outcome(folder: Path, ranks: int = 2) -> str:
    """What these ranks of programs/saves.py got, in the table's words."""
    words = {(): "is killed", ("left",): "is left behind"}
    ends = set()
    for rank in range(ranks):
        got = (folder / f"log-{rank}").read_text().split()
        end = "saves" if got[-1:] == ["saved"] else "killed while it saves"
        ends.add(words.get(tuple(got)) or ", ".join([*(name for name in got if name != "saved"), end]))
    return " / ".join(sorted(ends))
