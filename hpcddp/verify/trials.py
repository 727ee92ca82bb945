"""The short runs of a training script, on one and on several ranks, stopped and resumed, and what differs."""

from __future__ import annotations

import json
import os
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
    ROUNDING,
    SAME_BITS,
    SAME_SUMS,
    Mismatch,
    TrialRecord,
    compare_ranks,
    compare_trials,
    find_alone,
    find_failure,
    find_other_numbers,
    read_trial,
)

_WHOLE = 3  # batches of the shortened data that have the whole global batch, at least
_PATIENCE_S = 30.0  # without a word of any rank, beside twice the time of the whole first run
_COPIED = 2**20  # bytes: a larger file is a link
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

    trials: tuple[TrialRecord, ...]
    differences: tuple[Mismatch, ...]
    whole: bool
    resumes: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps of the first run; of a script without a runtime, of the last one."""
        return len(self.trials[0 if self.whole else -1].steps())

    @property
    def in_parts(self) -> bool:
        """No rank has all of a model."""
        return any(event["in_parts"] for trial in self.trials for event in trial.of_kind("gradients"))

    @property
    def numbers(self) -> tuple[str, str] | None:
        """A line that is printed with other numbers on two ranks than on one."""
        two = next((trial for trial in self.trials if trial.ranks == 2), None)
        return find_other_numbers(self.trials[0].output, two.output) if two is not None and self.whole else None

    @property
    def definition(self) -> tuple[str, ...]:
        """What in the loss depends on the batch as a whole."""
        return tuple(name for event in self.trials[0].of_kind("end") for name in event["whole_batch"])


def verify(plan: Plan, python: Sequence[str], env: Mapping[str, str], report: Callable[[str], None]) -> Verification:
    """Run the script and compare. LaunchError where its Python has no torch, or no hpcddp."""
    scratch = tempfile.TemporaryDirectory(prefix="hpcddp-verify-", ignore_cleanup_errors=True)
    with scratch as folder, hosting(python, folder, env) as host:
        return compare(plan, folder, host, report)


class _Runs:
    """The runs of one script, each in a folder of its own."""

    def __init__(self, plan: Plan, folder: str, host: subprocess.Popen[str], report: Callable[[str], None]) -> None:
        self._plan, self._folder, self._host, self._report = plan, folder, host, report
        self._left_s = plan.limit_s
        self.trials: list[TrialRecord] = []

    def run(self, name: str, ranks: int, title: str, *, reference: str = "", **task: Any) -> TrialRecord:
        """Run the script once; a run of the same name continues it."""
        plan, folder = self._plan, f"{self._folder}/{name}"
        if not os.path.exists(f"{folder}/work"):
            copy_folder(plan.folder, f"{folder}/work")
        if reference:
            reference = f"{self._folder}/{reference}"
            os.makedirs(reference, exist_ok=True)
        task = {"steps": plan.steps, "global_batch": plan.global_batch, **task}
        task |= {"ranks": ranks, "folder": folder, "workdir": f"{folder}/work", "reference": reference}
        # the first run has one rank, which waits for no other
        patience_s = _PATIENCE_S + 2 * self.trials[0].took_s if self.trials else plan.limit_s
        request = {"task": task, "command": plan.command, "patience_s": patience_s, "limit_s": self._left_s}
        answer = _request(self._host, request)
        if answer["why"] == "limit":
            raise RequestError(
                f"the runs took longer than their limit of {plan.limit_s:g} s ({title})",
                f"hpcddp verify --global-batch 12 --limit {2 * plan.limit_s:g}s -- {shlex.join(plan.command)}",
            )
        self._left_s = max(self._left_s - answer["took_s"], 1.0)
        trial = read_trial(title, ranks, folder, answer["stuck"], answer["took_s"])
        self._report(f"{title}: {format_count(len(trial.steps()), 'step')}, {trial.took_s:.1f} s")
        self.trials.append(trial)
        return trial


def compare(plan: Plan, folder: str, host: subprocess.Popen[str], report: Callable[[str], None]) -> Verification:
    """All runs of one script, and what differs between them."""
    runs = _Runs(plan, folder, host, report)
    found: list[Mismatch | None] = []

    def conclude(*, whole: bool, resumes: tuple[int, ...] = ()) -> Verification:
        return Verification(tuple(runs.trials), tuple(filter(None, found)), whole, resumes)

    one = runs.run("one", 1, "1 rank", reference="of-one", writes=True, by_sample=True)
    opened = one.of_kind("opened")
    found.append(find_failure(one))
    if found[0] is not None:
        return conclude(whole=bool(opened))
    if not opened:
        two = runs.run("two", 2, "2 ranks")
        found.append(find_failure(two) or find_alone(two) or compare_ranks(two))
        return conclude(whole=False)
    for ranks in (2,) if opened[0]["exact"] in {True, "tree"} else (2, 3):  # a tree takes powers of two
        many = runs.run(f"many-{ranks}", ranks, f"{ranks} ranks", reference="of-one", by_sample=True)
        found.append(_first(compare_ranks(many), compare_trials(one, many, ROUNDING), find_failure(many)))
        if found[-1] is not None:
            break
    if found[-1] is not None and found[-1].kind == "hang":  # which would cost as long again
        return conclude(whole=True)
    if opened[0]["exact"] or opened[0]["micro"]:
        found.append(_compare_micro_batches(runs, plan, one, is_exact=bool(opened[0]["exact"])))
    straight = runs.run("straight", 2, "2 ranks", reference="of-straight", writes=True, run="run")
    found.append(_first(compare_ranks(straight), None, find_failure(straight)))
    stops = _choose_stops(straight)
    if found[-1] is None and stops:
        for stop in (*stops, None):
            title = "2 ranks, stopped and resumed"
            resumed = runs.run("resumed", 2, title, reference="of-straight", run="run", stop=stop)
            found.append(find_failure(resumed))
            if found[-1] is not None:
                return conclude(whole=True, resumes=stops)
        found.append(compare_trials(straight, resumed, SAME_BITS))
    return conclude(whole=True, resumes=stops)


def _compare_micro_batches(runs: _Runs, plan: Plan, one: TrialRecord, *, is_exact: bool) -> Mismatch | None:
    """One rank and two with the same micro batches, to the bit."""
    batch = one.of_kind("batch")[0]["total"] if one.of_kind("batch") else 0
    micro, how, steps = None, "exact", plan.steps
    if not is_exact:
        # an epoch's smaller last batch is cut into other micro batches on one rank than on two: only before it
        micro, how, steps = -(-batch // 2), "2 micro batches", min(plan.steps, _WHOLE)
    alone = runs.run("alone", 1, f"1 rank, {how}", reference="of-alone", writes=True, micro=micro, steps=steps)
    both = runs.run("both", 2, f"2 ranks, {how}", reference="of-alone", micro=micro, steps=steps)
    are_whole = is_exact or {event["total"] for event in alone.of_kind("batch")} == {batch}
    same = compare_trials(alone, both, SAME_SUMS) if are_whole else None
    return find_failure(alone) or _first(None, same, find_failure(both))


def _first(ranks: Mismatch | None, runs: Mismatch | None, failure: Mismatch | None) -> Mismatch | None:
    """The earliest of these: between the ranks of a run, between two runs, and how one failed. Of one step the one that
    says most."""
    if failure is not None and runs is not None and runs.name == "steps":
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


# ---- the process that forks the ranks


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
    words, pipe = [*python, "-c", _SERVE], subprocess.PIPE
    with (
        open(f"{folder}/host.err", "w+", encoding="utf-8") as errors,
        subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=clean) as host,
    ):
        assert host.stdin is not None
        assert host.stdout is not None
        try:
            if not host.stdout.readline():
                errors.seek(0)
                why = (errors.read().strip().splitlines() or ["no word"])[-1]
                what = f"{python[0]} cannot load torch and hpcddp: {why}"
                raise LaunchError(what, f"{python[0]} -m pip install hpcddp")
            yield host
        finally:
            with suppress(OSError):
                host.stdin.close()


def _request(host: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    assert host.stdin is not None
    assert host.stdout is not None
    print(json.dumps(request), file=host.stdin, flush=True)
    answer = host.stdout.readline()
    if not answer:
        raise LaunchError("the process that starts the ranks of hpcddp verify is gone", "hpcddp verify once more")
    found: dict[str, Any] = json.loads(answer)
    return found


def copy_folder(source: str, target: str) -> None:
    """The files of a folder, for a script that may write to them: small ones as copies, larger ones as links, and links
    to whole folders where they are too many."""
    left = _MOST_FILES
    folders = [(source, target)]
    while folders:
        there, here = folders.pop(0)
        os.makedirs(here)
        for entry in os.scandir(there):
            left -= 1
            path = os.path.join(here, entry.name)
            if left > 0 and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                folders.append((entry.path, path))
            elif left > 0 and entry.is_file() and entry.stat().st_size <= _COPIED:
                shutil.copy(entry.path, path)
            else:
                os.symlink(entry.path, path)
