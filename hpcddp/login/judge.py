"""What became of a run, decided in one function for every verb: by its folder, its scheduler and this machine.

The folder says which jobs may write the run, and the scheduler, in one question, which of them live. A job whose hold
is over counts again once its scheduler starts it again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from hpcddp.errors import UNFINISHED, HpcddpError
from hpcddp.login.background import find_job
from hpcddp.login.on_disk import OnDisk, RunJob, read_lost, read_on_disk
from hpcddp.record import Record
from hpcddp.runs.folder import AttemptFolder, RunFolder, show_path
from hpcddp.runs.lock import Holder
from hpcddp.runs.state import AT_ITS_END, RunState, correct_killed
from hpcddp.runs.submitted import Sweep, list_sweep_runs, read_sweep
from hpcddp.schedulers.job_id import list_indices
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import JobFound
from hpcddp.schedulers.run import ask_jobs

#: A job in one of these states has not ended.
LIVE = ("queued", "held", "running", "suspended", "exiting", "moved", "unknown")
#: Of these, one that has not begun.
WAITING = ("queued", "held")
#: The state of a sweep is the first of these that one of its runs has.
_BY_WEIGHT = (
    *("running", "suspended", "exiting", "queued", "held", "moved", "unknown"),
    *("failed", "unfinished", "cancelled", "ended", "finished"),
)
# Exit statuses of programs that a signal has ended which is sent to a job: 128 + its number.
_ENDED_BY = {129: "SIGHUP", 130: "SIGINT", 138: "SIGUSR1", 140: "SIGUSR2", 143: "SIGTERM"}
_NO_ANSWER = "the scheduler does not answer"


class RunStatus(Record):
    """One run. `state`: one of LIVE, or unfinished, finished, failed, cancelled, ended (however: nobody says). `links`:
    its number in a chain, and the most. `starts`, `ends`: of its job, in seconds since 1970. `left_s`: to the end of
    the training. `point`: its values in a sweep, whose folder is `sweep`. Of a sweep: `best_run`, `jobs` by state, and
    `size`. `why`: why it waits, or ended. `cause`: the first cause in its logs. `used`: of what it had."""

    name: str
    path: str
    state: str
    job: str = ""
    links: tuple[int, int] = (0, 0)
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    starts: int | None = None
    ends: int | None = None
    why: str = ""
    log: str = ""
    point: str = ""
    is_sweep: bool = False
    best: float | None = None
    best_mode: str = ""
    best_run: str = ""
    jobs: Mapping[str, int] = MappingProxyType({})
    size: int = 0
    sweep: str = ""
    exit_status: int | None = None
    weights_sha256: str | None = None
    exact: Mapping[str, object] | None = None
    cause: str = ""
    used: str = ""

    @property
    def lives(self) -> bool:
        return self.state in LIVE


class Statuses(Record):
    """`problems`: what could not be found out. `is_damaged`: a run's own files are the reason."""

    runs: tuple[RunStatus, ...]
    problems: tuple[str, ...] = ()
    is_damaged: bool = False


class RunVerdict(Record):
    """`live`: the jobs of the run that have not ended; the one that `status` names is the first."""

    status: RunStatus
    live: tuple[tuple[RunJob, JobFound], ...]


# ---- what schedulers and this machine say


class Answers:
    """Answers of schedulers on the runs' jobs. `problems`: of schedulers that do not answer, by their name."""

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}
        self._found: dict[tuple[str, str], list[JobFound]] = {}  # by scheduler and number

    def add(self, scheduler: str, found: Sequence[JobFound], problem: str = "") -> None:
        """Add the answer of one scheduler: ids as it prints them, with or without the server and the index."""
        arrays = {job.id.number for job in found if job.id.array_index}
        for job in found:
            if not job.id.array_index and job.id.number in arrays:  # an array as a whole, beside its jobs
                continue
            for number in {job.id.number, job.id.raw or job.id.number}:
                self._found.setdefault((scheduler, number), []).append(job)
        if problem:
            self.problems[scheduler] = problem

    def of(self, job: RunJob) -> list[JobFound]:
        """What is known of a job: of an array, each of its jobs; of one index of an array, also the entry that a
        scheduler has for several indices that wait."""
        holder = job.holder if job.holds else None
        found = [one for one in self._found.get((job.scheduler, job.id.number), []) if job.id.matches(one.id)]
        if job.is_here and job.submission is not None:
            found = [one for one in [find_job(job.submission)] if one is not None]
        elif job.id.array_index:
            same = [one for one in found if job.id.is_same(one.id)]
            found = same or [one._replace(id=job.id) for one in found]
        if not any(one.state in LIVE for one in found):
            if holder is not None and job.is_alive:
                return [JobFound(job.id, "running")]
            if job.is_here and holder is not None and not found:
                return [JobFound(job.id, "unknown", reason=f"it runs on {holder.host}, and only there can it be seen")]
        if not found and job.scheduler in self.problems:
            return [JobFound(job.id, "unknown", reason=_NO_ANSWER)]
        return found


def ask_schedulers(runs: Sequence[OnDisk], env: Mapping[str, str]) -> Answers:
    answers, owners = Answers(), set[int]()
    questions: dict[str, dict[str, bool]] = {}
    for one in runs:
        with suppress(OSError):
            owners.add(os.stat(one.run.path).st_uid)  # whose jobs they are
        for at, job in enumerate(one.jobs):
            if not job.is_here:
                is_well = one.end.status == 0 and not one.end.signal  # one of very many, perhaps
                surely = job.holds or job.holder is None or (at == 0 and not is_well)
                questions.setdefault(job.scheduler, {})[str(job.id)] = surely
    for scheduler, ids in questions.items():
        found = ask_jobs(scheduler, list(ids), env, owners, one_by_one=[job for job, surely in ids.items() if surely])
        answers.add(scheduler, found.jobs, found.problem)
    return answers


# ---- one run


def judge(one: OnDisk, answers: Answers) -> RunVerdict:
    """Decide what became of a run, and which of its jobs live."""
    found = [(job, each) for job in one.jobs for each in answers.of(job)]
    live = [(job, _with_reason(job, each, one.jobs)) for job, each in found if _lives(job, each)]
    live.sort(key=lambda pair: (pair[1].state in WAITING, pair[0].holder is None, pair[0].before != ""))
    base = _with_progress(one)
    if live and live[0][1].state not in WAITING:
        status = _judge_running(base, one, *live[0])
    elif live and not one.is_finished:
        each = live[0][1]
        status = base._replace(state=each.state, job=str(each.id), starts=each.starts, why=each.reason, left_s=None)
    else:
        status = _judge_ended(base, one, [each for _, each in found if each.state not in LIVE])
    return RunVerdict(status, tuple(live))


def _lives(job: RunJob, found: JobFound) -> bool:
    """Whether it may write the run, now or later. One whose hold is over counts once it is started again."""
    if found.state not in LIVE:
        return False
    if job.holder is None or job.holds or found.state in WAITING:
        return True
    return found.state in {"running", "suspended"} and _has_started_since(found, job.holder)


def _has_started_since(found: JobFound, holder: Holder) -> bool:
    return found.starts is not None and holder.since_s is not None and found.starts > holder.since_s


def _with_reason(job: RunJob, found: JobFound, others: Sequence[RunJob]) -> JobFound:
    """A chain's next job waits for the one before, which not every scheduler tells from a hold."""
    waits_for = job.before and any(str(one.id) == job.before for one in others)
    if found.state in WAITING and waits_for and not found.reason:
        return found._replace(state="queued", reason=f"waits for {job.before}")
    return found


def _judge_running(base: RunStatus, one: OnDisk, job: RunJob, found: JobFound) -> RunStatus:
    why = found.reason if found.state == "unknown" else ""
    has_taken = job.holds and job.holder is not None and not _has_started_since(found, job.holder)
    if not has_taken and found.state == "running":  # it has started, and its supervisor has not yet
        why = "it starts" if job.submission is None or job.submission.supervised else ""
        base = base._replace(left_s=None)
    ends = found.ends
    if ends is None and has_taken and one.job_end is not None:
        ends = one.job_end.ends
    return base._replace(state=found.state, job=str(found.id), ends=ends, why=why)


def _judge_ended(base: RunStatus, one: OnDisk, found: Sequence[JobFound]) -> RunStatus:
    last = one.holder.id if one.holder is not None else None
    base = base._replace(job=str(last or ""), left_s=None, exit_status=one.end.status)
    its = [each for each in found if last is None or last.matches(each.id)]  # not of a next one that never began
    job = next(iter(its), None)
    if one.left:
        return base._replace(state="unfinished", why=one.left)
    if one.holder is None and one.state is None:
        return _judge_waiting(base, one, job)
    end = _describe_end(one, job)
    state = None if one.state is None else correct_killed(one.run, one.state)
    word, why = (end.state, end.why) if state is None else _judge_state(one, state, end)
    log = one.attempt.log if one.attempt is not None and word == "failed" else ""
    base = base._replace(state=word, why=why, log=show_path(log) if os.path.exists(log) else "")
    if state is None:
        return base if one.end.status is not None or job is None else base._replace(exit_status=job.status or None)
    return base._replace(step=state.step, epoch=state.epoch, weights_sha256=state.weights_sha256, exact=state.exact)


class _End(Record):
    state: str
    why: str
    cause: str  # the first; "": nothing names it


def _describe_end(one: OnDisk, job: JobFound | None) -> _End:
    """Describe the last job's end by its supervisor's record, else the scheduler's."""
    status, reason = one.end.status, job.reason if job is not None else ""
    is_taken = job is not None and job.state == "cancelled"
    signal = one.end.signal or ("" if one.end.cause else _ENDED_BY.get(status or 0, ""))
    cause = one.end.cause or one.lost
    if signal or (is_taken and status):
        if is_taken or not reason:  # what a job says that was taken back is why it waited once
            why = "; ".join(filter(None, [signal, one.end.cause])) or "its job was cancelled"
            return _End("cancelled", why, signal)
        return _End("unfinished", "; ".join(filter(None, [signal, one.end.cause, reason])), signal or reason)
    if status is None:
        if job is not None and job.state != "finished":
            return _End(job.state, cause or reason, cause or reason)
        # a PBS whose login shell was killed calls that finished, with status 0
        return _End("failed", cause or "it was killed: it left no exit status, and no state", cause)
    if not status:
        return _End("finished", "", "")
    return _End("failed", "; ".join(filter(None, [cause or f"exit status {status}", reason])), cause or reason)


def _judge_state(one: OnDisk, state: RunState, end: _End) -> tuple[str, str]:
    """The state and why: what the ranks wrote last, unless their attempt has ended otherwise since."""
    if state.status == "finished":
        return "finished", "" if state.reason == AT_ITS_END else state.reason
    is_signal = end.state in {"cancelled", "unfinished"}
    if state.status == "failed":
        ended = "unfinished" if state.step else "cancelled"
        return (ended, end.why) if is_signal and one.end.signal else ("failed", one.end.cause or state.reason)
    ranks_ended = one.state == state and (one.holder is None or state.attempt == one.holder.attempt)
    if ranks_ended and not (one.end.cause and state.reason.startswith("SIG")):  # the launcher's, which ends the others
        return "unfinished", state.reason
    has_failed = end.state == "failed" and one.end.status not in {None, UNFINISHED} and not one.lost
    why = end.why if has_failed else end.cause
    saved = f"checkpoint at step {state.step}" if state.step else ""
    return "failed" if has_failed else "unfinished", "; ".join(filter(None, [why, saved])) if why else state.reason


def _judge_waiting(base: RunStatus, one: OnDisk, job: JobFound | None) -> RunStatus:
    if not one.submissions and not one.jobs:
        return base._replace(state="unknown", why="no job of this run is known")
    queued = one.submissions[-1] if one.submissions else None
    base = base._replace(job=queued.job if queued is not None else str(one.jobs[0].id))
    supervised = queued is None or queued.supervised
    early = "it ended before its ranks were started: its output says why"
    if job is not None:
        has_started = supervised and job.state != "cancelled"
        log = queued.output if queued is not None and has_started else ""
        state = "ended" if has_started and job.state == "finished" else job.state  # that is for the ranks to say
        why = job.reason or (early if has_started else "")
        return base._replace(state=state, why=why, exit_status=job.status, log=log)
    if not supervised:
        return base._replace(state="ended", why="supervise: false leaves no word of how")
    if queued is not None and find_scheduler(queued.scheduler).this_machine and queued.process:
        if not os.path.exists(queued.output) or not os.path.getsize(queued.output):
            return base._replace(state="cancelled")
        return base._replace(state="failed", why=early, log=queued.output)
    return base._replace(state="cancelled", why="its scheduler does not know it any more, and it has not started")


def _with_progress(one: OnDisk) -> RunStatus:
    latest, state, best = one.latest, one.state, one.best
    return RunStatus(
        os.path.basename(os.path.abspath(one.run.path)),
        one.run.path,
        "unknown",
        links=one.links,
        step=latest.step if latest.step is not None else state.step if state is not None else None,
        total_steps=latest.total,
        epoch=latest.epoch,
        loss=latest.loss,
        samples_per_s=latest.samples_per_s,
        left_s=latest.left_s,
        point=one.point,
        best=best.value if best is not None else None,
        best_mode=best.mode if best is not None else "",
    )


def explain_end(one: OnDisk, attempt: AttemptFolder, status: RunStatus) -> str:
    """Why this attempt of the run has ended; "" while it runs."""
    if one.attempt == attempt:
        return status.why if not status.lives or status.state in WAITING else ""
    end = next((hold.end for hold in one.holds if hold.holder.attempt == attempt.name), None)
    return read_lost(attempt) or (end.cause if end is not None else "") or "ended"


# ---- several runs, and sweeps


def find_status(runs: Sequence[RunFolder], env: Mapping[str, str]) -> Statuses:
    """The status of each run, in this order; a sweep is followed by its runs."""
    problems, sweeps = list[str](), dict[str, Sweep]()  # by their folders
    found = dict[str, tuple[RunFolder, str]]()  # each run, and the folder of its sweep
    for one in runs:
        found.setdefault(os.path.abspath(one.path), (one, ""))
        try:
            if (sweep := read_sweep(one)) is not None:
                sweeps[one.path] = sweep
                found |= {os.path.abspath(run.path): (run, one.path) for run in list_sweep_runs(one)}
        except HpcddpError as error:
            problems.append(str(error))
    read = [read_on_disk(run) for run, _ in found.values()]
    problems += [one.problem for one in read if one.problem]
    is_damaged = bool(problems)
    answers = ask_schedulers(read, env)
    problems += [f"{problem}; what the run folders say is shown" for problem in answers.problems.values()]
    judged = [_judge_read(one, answers) for one in read]
    shown = [one.status._replace(sweep=folder) for one, (_, folder) in zip(judged, found.values(), strict=True)]
    for at, one_read in enumerate(read):
        if (sweep := sweeps.get(one_read.run.path)) is not None:
            of_sweep = [run for run in shown if run.sweep == one_read.run.path]
            shown[at] = _judge_sweep(one_read, judged[at], sweep, of_sweep)
    return Statuses(tuple(shown), tuple(problems), is_damaged)


def _judge_read(one: OnDisk, answers: Answers) -> RunVerdict:
    """Judge, and read the folder once more where no job lives: one may have begun or ended meanwhile."""
    verdict = judge(one, answers)
    if verdict.live or (one.holder is not None and one.ended):
        return verdict
    return judge(read_on_disk(one.run), answers)


def has_live_job(run: RunFolder, env: Mapping[str, str]) -> bool:
    return any(one.lives for one in find_status([run], env).runs)


def _judge_sweep(one: OnDisk, verdict: RunVerdict, about: Sweep, runs: Sequence[RunStatus]) -> RunStatus:
    point = " ".join(f"{name}={','.join(values)}" for name, values in about.axes.items()) or f"array {about.array}"
    indices = list_indices(about.array)
    left = indices - {int(RunFolder(run.path).array_index) for run in runs}
    counts = Counter(run.state for run in runs)
    for _, found in verdict.live:  # of those that have no folder yet
        its = list_indices(found.id.array_index) & left if found.id.array_index else left
        if its:
            counts[found.state] += len(its)
            left = left - its
    if left:  # they have no run, and no scheduler knows them any more
        counts["cancelled"] += len(left)
    order = sorted(counts, key=_BY_WEIGHT.index)
    best, in_words = _find_best(runs)
    why = "; ".join(filter(None, [", ".join(f"{counts[state]} {state}" for state in order), in_words]))
    waits = next((found for _, found in verdict.live if found.state in WAITING), None)
    return RunStatus(
        verdict.status.name,
        verdict.status.path,
        next(iter(order), "unknown"),
        job=one.submissions[-1].job if one.submissions else "",
        point=point,
        why=why,
        is_sweep=True,
        jobs=counts,
        size=len(indices),
        best_run=best,
        starts=waits.starts if waits is not None else None,
    )


def _find_best(runs: Sequence[RunStatus]) -> tuple[str, str]:
    named = [run for run in runs if run.best is not None]
    modes = {run.best_mode for run in named}
    losses = [run for run in runs if run.loss is not None]
    if named and len(modes) == 1:
        best = (max if modes == {"max"} else min)(named, key=lambda run: run.best or 0.0)
        return best.name, f"best {best.name}: {best.best:.6g}"
    if losses:
        best = min(losses, key=lambda run: run.loss or 0.0)
        return best.name, f"best {best.name}: loss {best.loss:.4g}"
    return "", ""
