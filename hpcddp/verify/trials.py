"""The short runs of a training script, on one and on several ranks, stopped and resumed, and what differs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from hpcddp.errors import LaunchError, RequestError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.units import format_count
from hpcddp.verify.compare import (
    Mismatch,
    TrialRecord,
    compare_bits,
    compare_ranks,
    compare_whole,
    find_alone,
    find_failure,
    list_other_numbers,
    read_events,
)

_WHOLE = 3  # batches of the shortened data that have the whole global batch, at least
_PATIENCE_S = 30.0  # without a word of any rank, and ten times the longest silence of the first run
_COPIED, _COPIED_IN_ALL = 2**20, 2**25  # bytes: a larger file is a link
_MOST_FILES = 5000
_SERVE = "import sys; sys.path.pop(0); from hpcddp.verify.ranks import serve; serve()"


class Plan(NamedTuple):
    """Plan of the short runs, and how long they take."""

    folder: str  # the working folder; the script runs in copies of it
    command: tuple[str, ...]  # `python train.py --lr 0.1`
    steps: int
    limit_s: float
    global_batch: int | None = None


class Verification(NamedTuple):
    """The result of the runs. `whole`: whether one process could be compared with several; `resumes`: the steps after
    which the script was stopped."""

    steps: int
    trials: tuple[TrialRecord, ...]
    differences: tuple[Mismatch, ...]
    whole: bool
    resumes: tuple[int, ...] = ()
    numbers: tuple[str, str] | None = None  # a printed line of one and of two ranks
    definition: tuple[str, ...] = ()  # what in the loss depends on the batch as a whole

    @property
    def in_parts(self) -> bool:
        """Whether no rank has all of a model."""
        return any(event["in_parts"] for trial in self.trials for event in trial.of_kind("weights"))


def verify(plan: Plan, python: Sequence[str], env: Mapping[str, str], say: Callable[[str], None]) -> Verification:
    """Run the script and compare. LaunchError where its Python has no torch, or no hpcddp."""
    scratch = tempfile.TemporaryDirectory(prefix="hpcddp-verify-", ignore_cleanup_errors=True)
    with scratch as folder, hosting(python, folder, env) as host:
        return compare(plan, folder, host, say)


class _Runs:
    """The runs of one script, each in a folder of its own."""

    def __init__(self, plan: Plan, folder: str, host: subprocess.Popen[str], say: Callable[[str], None]) -> None:
        self._plan, self._folder, self._host, self._say = plan, folder, host, say
        self._patience_s, self._left_s = _PATIENCE_S, plan.limit_s
        self.trials: list[TrialRecord] = []

    def run(self, name: str, ranks: int, title: str, *, reference: str = "", **task: Any) -> TrialRecord:
        """Run the script once; a run of the same name continues it."""
        folder = f"{self._folder}/{name}"
        workdir = f"{folder}/work"
        if not os.path.exists(workdir):
            copy_folder(self._plan.folder, workdir)
        reference = f"{self._folder}/{reference}" if reference else ""
        if reference:
            os.makedirs(reference, exist_ok=True)
        plan = self._plan
        task |= {"ranks": ranks, "folder": folder, "workdir": workdir, "reference": reference}
        task = {"steps": plan.steps, "global_batch": plan.global_batch, **task}
        patience_s = self._patience_s if ranks > 1 else plan.limit_s  # one rank waits for no other
        request = {"task": task, "command": plan.command, "patience_s": patience_s, "limit_s": self._left_s}
        answer = _ask(self._host, request)
        if answer["why"] == "limit":
            raise RequestError(
                f"the runs took longer than their limit of {plan.limit_s:g} s ({title})",
                f"hpcddp verify --global-batch 12 --limit {2 * plan.limit_s:g}s -- {shlex.join(plan.command)}",
            )
        self._patience_s = max(self._patience_s, 10 * answer["gap_s"])
        self._left_s = max(self._left_s - answer["took_s"], 1.0)
        stacks = tuple(find_line_of_stack(_read(f"{folder}/rank-{rank}.stack")) for rank in answer["stuck"])
        events, output = read_events(folder, ranks), _read(f"{folder}/rank-0.out")
        trial = TrialRecord(title, ranks, events, tuple(answer["stuck"]), answer["took_s"], stacks, output)
        self._say(f"{title}: {format_count(len(trial.steps()), 'step')}, {answer['took_s']:.1f} s")
        self.trials.append(trial)
        return trial


def compare(plan: Plan, folder: str, host: subprocess.Popen[str], say: Callable[[str], None]) -> Verification:
    """All runs of one script, and what differs between them."""
    runs = _Runs(plan, folder, host, say)
    one = runs.run("one", 1, "1 rank", reference="of-one", writes=True, by_sample=True)
    opened = one.of_kind("opened")
    if (failed := find_failure(one)) is not None:
        return _conclude(runs, one, [failed], whole=bool(opened))
    if not opened:
        two = runs.run("two", 2, "2 ranks")
        return _conclude(runs, two, [find_failure(two) or find_alone(two) or compare_ranks(two)], whole=False)
    found: list[Mismatch | None] = []
    several = (2,) if opened[0]["exact"] in {True, "tree"} else (2, 3)  # a tree takes powers of two
    for ranks in several:
        many = runs.run(f"many-{ranks}", ranks, f"{ranks} ranks", reference="of-one", by_sample=True)
        found.append(_first(compare_ranks(many), compare_whole(one, many), find_failure(many)))
        if found[-1] is not None:
            break
    if found[-1] is not None and found[-1].kind == "hang":  # which would cost as long again
        return _conclude(runs, one, found, whole=True)
    batch = one.of_kind("batch")[0]["total"] if one.of_kind("batch") else 0
    if opened[0]["exact"] or opened[0]["micro"]:
        micro = None if opened[0]["exact"] else -(-batch // 2)
        how = "exact" if opened[0]["exact"] else "2 micro batches"
        # an epoch's smaller last batch is cut into other micro batches on one rank than on two: only before it
        steps = plan.steps if micro is None else min(plan.steps, _WHOLE)
        alone = runs.run("alone", 1, f"1 rank, {how}", reference="of-alone", writes=True, micro=micro, steps=steps)
        both = runs.run("both", 2, f"2 ranks, {how}", reference="of-alone", micro=micro, steps=steps)
        are_whole = micro is None or {event["total"] for event in alone.of_kind("batch")} == {batch}
        same = compare_bits(alone, both, same_ranks=False) if are_whole else None
        found.append(find_failure(alone) or _first(None, same, find_failure(both)))
    straight = runs.run("straight", 2, "2 ranks", reference="of-straight", writes=True, run="run")
    problem = _first(compare_ranks(straight), None, find_failure(straight))
    stops = _choose_stops(straight)
    found.append(problem)
    for stop in (*stops, None) if problem is None and stops else ():
        resumed = runs.run("resumed", 2, "2 ranks, stopped and resumed", reference="of-straight", run="run", stop=stop)
        if (failed := find_failure(resumed)) is not None:
            found.append(failed)
            break
    else:
        if problem is None and stops:
            found.append(compare_bits(straight, resumed, same_ranks=True))
    return _conclude(runs, one, found, whole=True, resumes=stops)


def _first(ranks: Mismatch | None, runs: Mismatch | None, failure: Mismatch | None) -> Mismatch | None:
    """The earliest of these: between the ranks of a run, between two runs, and how one failed. Of one step the one that
    says most."""
    if failure is not None and runs is not None and runs.kind == "steps":
        runs = None  # they are missing since it failed
    order = (runs, ranks) if ranks is not None and ranks.kind in {"gradients", "weights"} else (ranks, runs)
    known = [one for one in (*order, failure) if one is not None]
    return min(known, key=lambda one: (one.place is None, one.place or (0, 0))) if known else None


def _choose_stops(straight: TrialRecord) -> tuple[int, ...]:
    """Steps after which the script is stopped: within an epoch, at its end, and within the next."""
    steps = [event for event in straight.of_kind("batch") if event["opening"] == 0]
    made = len({event["step"] for event in steps})
    epoch = len({event["step"] for event in steps if event["epoch"] == 0})
    half = max(epoch // 2, 1)
    return tuple(stop for stop in sorted({half, epoch, epoch + half}) if stop < made)


def _conclude(
    runs: _Runs, one: TrialRecord, found: Sequence[Mismatch | None], *, whole: bool, resumes: tuple[int, ...] = ()
) -> Verification:
    two = next((trial for trial in runs.trials if trial.ranks == 2), None)
    numbers = next(list_other_numbers(one.output, two.output), None) if two is not None and whole else None
    whole_batch = next((tuple(event.get("whole_batch", ())) for event in one.of_kind("end")), ())
    differences = tuple(difference for difference in found if difference is not None)
    return Verification(len(one.steps()), tuple(runs.trials), differences, whole, resumes, numbers, whole_batch)


# The process that forks the ranks.


@contextmanager
def hosting(python: Sequence[str], folder: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The process that forks the ranks, of this interpreter with its options. It ends with the body."""
    of_launchers = set[str]().union(*(row.all_reads for row in LAUNCHERS.values()))
    clean = {name: v for name, v in env.items() if name not in of_launchers and not name.startswith("HPCDDP_")}
    temporary = f"{folder}/temporary"
    os.makedirs(temporary)
    clean |= {"TMPDIR": temporary, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    clean |= {"HPCDDP_PROGRESS": "off", "PYTHONUNBUFFERED": "1", "WANDB_MODE": "disabled"}
    clean |= {"ACCELERATE_USE_CPU": "true"}  # else Accelerate, and Trainer, open no process group without a GPU
    with open(f"{folder}/host.err", "w+", encoding="utf-8") as errors:
        try:
            host = subprocess.Popen(
                [*python, "-c", _SERVE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=clean,
            )
        except OSError as error:
            raise LaunchError(f"{python[0]} cannot be started: {error.strerror}", "which python") from error
        with host:
            assert host.stdin is not None
            assert host.stdout is not None
            try:
                if not host.stdout.readline():
                    errors.seek(0)
                    why = (errors.read().strip().splitlines() or ["no word"])[-1]
                    raise LaunchError(
                        f"{python[0]} cannot load torch and hpcddp: {why}", f"{python[0]} -m pip install hpcddp"
                    )
                yield host
            finally:
                with suppress(OSError):
                    host.stdin.close()


def _ask(host: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    assert host.stdin is not None
    assert host.stdout is not None
    print(json.dumps(request), file=host.stdin, flush=True)
    answer = host.stdout.readline()
    if not answer:
        raise LaunchError("the process that starts the ranks of hpcddp verify is gone", "hpcddp verify once more")
    found: dict[str, Any] = json.loads(answer)
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def find_line_of_stack(stack: str) -> str:
    """Find the innermost line of the script, in no package, in a stack as faulthandler prints it."""
    found = re.findall(r'File "(.+)", line (\d+) in', stack)
    own = [f"{os.path.basename(file)}:{line}" for file, line in found if not re.search(r"/lib/|/hpcddp/|<frozen", file)]
    return own[0] if own else ""


def copy_folder(source: str, target: str) -> None:
    """The files of a folder, for a script that may write to them: small ones as copies, larger ones as links, and links
    to whole folders where they are too many."""
    left, size = _MOST_FILES, _COPIED_IN_ALL
    folders = [(source, target)]
    while folders:
        there, here = folders.pop(0)
        os.makedirs(here)
        for entry in os.scandir(there):
            left -= 1
            path = os.path.join(here, entry.name)
            if left > 0 and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                folders.append((entry.path, path))
            elif entry.is_file() and left > 0 and entry.stat().st_size <= min(_COPIED, size):
                shutil.copy2(entry.path, path)
                size -= entry.stat().st_size
            else:
                os.symlink(entry.path, path)
