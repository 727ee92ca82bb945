"""How often `hpcddp diagnose` names the first cause, by class, line and rank, and how often a wrong one.

    python benchmarks/diagnose.py FOLDER [--held | --shown] [-v]

FOLDER holds a folder for each job, with its logs and a `meta.json`: `cause`, `cause_also`, `rank`, `proof`,
`proof_also`, `group`. grep, the first and the last traceback stand beside it. A third of the jobs, by group, was held
back while the rows were written (SEED): `--held` are those.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp.diagnose.cause import Cause
from hpcddp.diagnose.judge import diagnose
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
    proofs = {_plain(one) for one in (job["proof"] or "", *job["proof_also"])}
    line = answer.text is not None and _plain(answer.text) in proofs
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
                    print(f"  {job['name']}: {right} {job['cause']}/{job['rank']} {job['proof']!r}")
                    print(f"    but {answer.class_}/{answer.rank} {answer.text!r}")
    print("\n| 8 MB of | CPU for each MB | times that of reading its lines |\n|---|---|---|")
    for kind, write in LOGS.items():
        took, alone = measure(write)
        print(f"| {kind} | {took * 1e3:.0f} ms | {took / alone:.0f} |")


def _steps(at: int) -> str:
    return (
        f"2026-11-25 18:55:{at % 60:02d},344 [rank {at % 8}] INFO train: step {at} loss {1 / (at + 1):.4f} lr 0.001\n"
    )


def _bars(at: int) -> str:
    bars = (
        f"epoch {at}: {done}0%|{'█' * done:10}| {done}/10 [00:00<00:01, {at % 40}.{done}it/s]" for done in range(10)
    )
    return "\r".join(bars) + "\n"


def _caught(at: int) -> str:
    return (
        f"2026-11-25 19:09:02,494 [rank {at % 8}] ERROR store: reading {at} failed (attempt 1 of 3), will retry\n"
        'Traceback (most recent call last):\n  File "/u/retry_io.py", line 11, in read\n    raise error\n'
        "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    )


#: What a log is full of -> its lines.
LOGS = {"lines of progress": _steps, "progress bars": _bars, "tracebacks that were caught": _caught}


def measure(write: Callable[[int], str]) -> tuple[float, float]:
    """Seconds of CPU time for each MB of such a log, and those of reading its lines alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.out"
        with path.open("w", encoding="utf-8") as file:
            at = size = 0
            while size < 8e6:
                size += file.write(write(at))
                at += 1
        mb = path.stat().st_size / 1e6
        took = []
        for _ in range(3):
            began = time.process_time()
            diagnose(find_logs([str(path)]))
            took.append((time.process_time() - began) / mb)
        began = time.process_time()
        path.read_bytes().split(b"\n")
        alone = (time.process_time() - began) / mb
        return min(took), alone


if __name__ == "__main__":
    main()
