"""The row of a sweep, or of an array: what its jobs do, and which of its runs is the best."""

from __future__ import annotations

from collections.abc import Sequence

from hpcddp.login.found_jobs import FoundJobs, jobs_of
from hpcddp.login.run_facts import RunFacts
from hpcddp.login.run_status import LIVE, WAITS, RunStatus
from hpcddp.runs.sweep_folder import read_span

# Of a sweep's jobs, what its own state is called after.
_BY_WEIGHT = (
    *("running", "suspended", "exiting", "queued", "held", "moved", "unknown"),
    *("failed", "unfinished", "cancelled", "ended", "finished"),
)


def judge_sweep(
    base: RunStatus,
    fact: RunFacts,
    jobs: FoundJobs,
    sweep: tuple[dict[str, list[str]], str],
) -> RunStatus:
    """The folder of a sweep or an array: what its jobs do. Its runs are shown below it."""
    axes, indices = sweep
    told = " ".join(f"{name}={','.join(values)}" for name, values in axes.items()) or f"array {indices}"
    found = [job for scheduler, one in fact.open_jobs for job in jobs_of(jobs, scheduler, one)]
    counts: dict[str, int] = {}
    for job in found:
        if job.state in LIVE:
            counts[job.state] = counts.get(job.state, 0) + _count(job.array_index)
    waits = next((job for job in found if job.state in WAITS), None)
    return base._replace(
        is_sweep=True,
        job=fact.submissions[-1].job if fact.submissions else "",
        point=told,
        jobs=counts,
        size=_count(indices.partition("%")[0]),
        starts=waits.starts if waits is not None else None,
    )


def complete_sweeps(runs: list[RunStatus]) -> list[RunStatus]:
    """The same; in each sweep's row how many of its jobs and runs are in which state, and its best run."""
    for at, sweep in enumerate(runs):
        if sweep.is_sweep:
            of_it = [run for run in runs if run.sweep == sweep.path]
            counts = dict(sweep.jobs)
            for run in of_it:
                if not sweep.job or run.state not in LIVE:  # those of an array are counted as its jobs
                    counts[run.state] = counts.get(run.state, 0) + 1
            lost = sweep.size - sum(counts.values())
            if lost > 0 and "unknown" not in counts:  # they have no run, and no scheduler knows them any more
                counts["cancelled"] = counts.get("cancelled", 0) + lost
            state = next((word for word in _BY_WEIGHT if word in counts), "unknown")
            best, said = _find_best(of_it)
            told = ", ".join(f"{number} {word}" for word, number in counts.items())
            why = "; ".join(filter(None, [told, said]))
            runs[at] = sweep._replace(state=state, why=why, jobs=counts, best_run=best)
    return runs


def _find_best(runs: Sequence[RunStatus]) -> tuple[str, str]:
    """The best run's name, and what to say of it: by what the runs named best, else by their last loss."""
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


def _count(index: str) -> int:
    """How many `5-9999` are, or `1,3,7-9:2`."""
    spans = map(read_span, index.split(","))
    return sum(1 if span is None else len(span) for span in spans)
