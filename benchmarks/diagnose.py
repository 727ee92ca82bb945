"""How often `hpcddp diagnose` names the first cause, by class, line and rank, and how often a wrong one.

    python benchmarks/diagnose.py FOLDER [--held | --shown] [-v]

FOLDER holds a folder for each job, with its logs and a `meta.json`: `cause`, `cause_also`, `rank`, `proof`,
`proof_also`, `group`. grep, the first and the last traceback stand beside it. A third of the jobs, by group, was held back while the rows were written (SEED): `--held` are those.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp.diagnose.judge import Cause, diagnose
from hpcddp.diagnose.reading import find_logs

SEED = 37
_PREFIX = re.compile(r"^(?:\[rank\d+\]:? ?|\[\d+\]:? ?)+")


class Answer(NamedTuple):
    """What a method says of one job. `class_`: None of a method that names none."""

    text: str | None
    rank: int | str | None
    class_: str | None = None


def split(jobs: list[dict[str, Any]]) -> set[str]:
    """The names of the jobs that were held back: whole groups, until they are a third."""
    groups: dict[str, list[str]] = {}
    for job in jobs:
        groups.setdefault(job["group"], []).append(job["name"])
    order = sorted(groups)
    random.Random(SEED).shuffle(order)
    held: list[str] = []
    for group in order:
        if len(held) >= len(jobs) / 3:
            break
        held += groups[group]
    return set(held)


def read_jobs(folder: Path) -> list[dict[str, Any]]:
    """The labels, in the order of the names."""
    metas = sorted(folder.glob("*/meta.json"))
    return [{**json.loads(meta.read_text()), "name": meta.parent.name, "folder": meta.parent} for meta in metas]


def _lines(folder: Path) -> list[tuple[str, str]]:
    files = sorted((f for f in folder.iterdir() if f.suffix in {".out", ".log"}), key=lambda f: f.name != "job.out")
    return [(f.name, line) for f in files for line in f.read_bytes().decode(errors="replace").split("\n")]


def _rank(file: str, line: str) -> int | None:
    found = re.search(r"\[rank ?(\d+)\]", line) or re.match(r"\[(\d+)\]", line) or re.match(r"rank-0*(\d+)\b", file)
    return int(found[1]) if found else None


def _grep(folder: Path) -> Answer:
    for file, line in _lines(folder):
        if re.search("error|exception", line, re.IGNORECASE):
            return Answer(line, _rank(file, line))
    return Answer(None, None)


def _traceback(last: bool) -> Callable[[Path], Answer]:
    def find(folder: Path) -> Answer:
        lines, found = _lines(folder), []
        for at, (file, line) in enumerate(lines):
            if (begin := re.search(r"((?:\[rank\d+\]:? ?)?)Traceback \(most recent call last\)", line)) is None:
                continue
            for other, below in lines[at + 1 :]:
                text = below.split("\r")[-1]
                if other == file and text.startswith(begin[1].strip()):
                    body = _PREFIX.sub("", text) if begin[1] else text
                    if body.strip() and not body.startswith(" "):
                        found.append((file, text))
                        break
        return Answer(found[-1 if last else 0][1], _rank(*found[-1 if last else 0])) if found else Answer(None, None)

    return find


def _diagnose(folder: Path) -> Answer:
    cause: Cause = diagnose(find_logs([str(folder)]))
    return Answer(cause.text or None, cause.rank, cause.class_)


METHODS: dict[str, Callable[[Path], Answer]] = {
    "hpcddp diagnose": _diagnose,
    "grep -m1 -iE 'error|exception'": _grep,
    "first traceback": _traceback(last=False),
    "last traceback": _traceback(last=True),
}


def _plain(text: str) -> str:
    return _PREFIX.sub("", text.split("\r")[-1].strip()).strip()


def judge(job: dict[str, Any], answer: Answer) -> tuple[bool, bool, bool, bool]:
    """Whether class, line and rank are right, and whether the cause is a wrong one."""
    if job["cause"] == "none":
        well = answer.class_ == "none" or answer.text is None
        return well, well, well, not well
    classes = {job["cause"], *job.get("cause_also", ())} | (set() if job.get("provable", True) else {"unknown"})
    class_ = answer.class_ in classes
    line = answer.text is not None and _plain(answer.text) in {
        _plain(one) for one in [job["proof"] or "", *job["proof_also"]]
    }
    if not job.get("provable", True):
        line = answer.text is None
    rank = (
        line
        if job["rank"] == "all"
        else (line and answer.rank is None)
        if job["rank"] is None
        else answer.rank == job["rank"]
    )
    is_wrong = answer.class_ not in {*classes, "unknown"} if answer.class_ else answer.text is not None and not line
    return class_, line, rank, is_wrong


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--held", action="store_true", help="only what was held back")
    part.add_argument("--shown", action="store_true", help="only the others")
    parser.add_argument("-v", action="store_true", dest="each", help="each job that is not right")
    args = parser.parse_args()
    jobs = read_jobs(args.folder)
    held = split(jobs)
    jobs = [
        job for job in jobs if not (args.held and job["name"] not in held) and not (args.shown and job["name"] in held)
    ]
    one = [job for job in jobs if isinstance(job["rank"], int)]
    print(f"{len(jobs)} jobs, {len(one)} of them with one rank at fault; held back with seed {SEED}: {len(held)}")
    print("| method | class | line | rank | rank, one at fault | wrong cause |\n|---|---|---|---|---|---|")
    for name, method in METHODS.items():
        answers = [(job, answer, judge(job, answer)) for job in jobs for answer in [method(job["folder"])]]
        sums = [sum(right[at] for _, _, right in answers) for at in range(4)]
        of_one = sum(right[2] for job, _, right in answers if isinstance(job["rank"], int))
        class_ = str(sums[0]) if name.startswith("hpcddp") else "-"
        print(f"| {name} | {class_} | {sums[1]} | {sums[2]} | {of_one} of {len(one)} | {sums[3]} |")
        if args.each and name.startswith("hpcddp"):
            for job, answer, right in answers:
                if not all(right[:3]):
                    print(
                        f"  {job['name']}: {right} {job['cause']}/{job['rank']} {job['proof']!r}\n    but {answer.class_}/{answer.rank} {answer.text!r}"
                    )
    _measure(jobs)


def _measure(jobs: list[dict[str, Any]]) -> None:
    """CPU time for each MB, as the ratio to counting the same bytes' lines."""
    sources = [find_logs([str(job["folder"])]) for job in jobs]
    size = sum(Path(one.path).stat().st_size for each in sources for one in each) / 1e6
    began = time.process_time()
    for each in sources:
        diagnose(each)
    took = time.process_time() - began
    print(f"\n{size:.2f} MB of logs: {took / size * 1e3:.0f} ms of CPU for each MB")


if __name__ == "__main__":
    main()
