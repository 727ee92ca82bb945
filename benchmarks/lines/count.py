"""How many lines of a script change for hpcddp, Accelerate and Fabric, as a table: `count.py`.

The number for a version is the least number of lines to change, add or remove, from plain.py to it. Indentation, blank
lines and lines that are only a comment do not count.
`count.py KIND VERSION` prints those lines instead, as a diff: `count.py classifier with_hpcddp`.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

HERE = Path(__file__).parent
KINDS = {
    "classifier": "image classifier with evaluation",
    "gan": "GAN with two optimizers",
    "language_model": "language model with accumulation, clipping, scheduler",
    "mixed_precision": "mixed precision with GradScaler",
    "metrics": "metrics over all ranks' predictions",
    "stream": "stream (IterableDataset)",
}
VERSIONS = {
    "with_hpcddp": "hpcddp",
    "with_accelerate_full": "Accelerate, with as much",
    "with_accelerate": "Accelerate",
    "with_fabric": "Fabric",
}


def load_lines(kind: str, version: str) -> list[str]:
    """The lines of a script that count, without their indentation."""
    lines = (line.strip() for line in (HERE / kind / f"{version}.py").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def count_changes(before: list[str], after: list[str]) -> int:
    """The least number of lines to change, add or remove to get from one script to the other.

    That is the sum, over the places where they differ, of the larger of removed and added lines.
    """
    costs = list(range(len(after) + 1))  # from none of `before` to so many of `after`
    for removed, old in enumerate(before, start=1):
        diagonal, costs[0] = costs[0], removed
        for column, new in enumerate(after, start=1):
            cheapest = min(diagonal + (old != new), costs[column] + 1, costs[column - 1] + 1)
            diagonal, costs[column] = costs[column], cheapest
    return costs[-1]


def format_table() -> str:
    """Lines changed, one row for each kind of script."""
    rows = [["script (lines)", *VERSIONS.values()]]
    for kind, name in KINDS.items():
        plain = load_lines(kind, "plain")
        counts = [str(count_changes(plain, load_lines(kind, version))) for version in VERSIONS]
        rows.append([f"{name} ({len(plain)})", *counts])
    rows.insert(1, ["---"] * len(rows[0]))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def format_diff(kind: str, version: str) -> str:
    """The lines that differ between plain.py and a version, with their neighbours."""
    diff = list(difflib.unified_diff(load_lines(kind, "plain"), load_lines(kind, version), n=0, lineterm=""))
    return "".join(f"{line}\n" for line in diff[2:] if not line.startswith("@@"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS)
    parser.add_argument("version", nargs="?", choices=VERSIONS, default="with_hpcddp")
    options = parser.parse_args()
    print(format_diff(options.kind, options.version) if options.kind else format_table(), end="")


if __name__ == "__main__":
    main()
