"""Whether a run is free for another job: two jobs cannot write one run, and the second would cost node-hours first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpcddp.errors import RequestError, SchedulerError
from hpcddp.login.background import find_jobs
from hpcddp.login.find_run import is_same_job
from hpcddp.login.found_jobs import index_jobs, jobs_of
from hpcddp.login.run_facts import RunFacts, owners_of, read_facts
from hpcddp.login.run_status import LIVE, WAITS
from hpcddp.runs.folder import RunFolder, show_path
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.run import ask_jobs
from hpcddp.script.plan import JobPlan


def check_free(run: RunFolder, plan: JobPlan, waited: Sequence[str], env: Mapping[str, str]) -> None:
    """RequestError if a job that has not ended writes this run, or will, and the new one does not wait for it; of an
    array's folder: its runs. `waited`: the jobs that the new one waits for. SchedulerError if nobody says whether one
    has ended."""
    fact = read_facts(run)
    of_it = dict.fromkeys((*fact.open_jobs, *fact.again))
    asked = [(scheduler, job) for scheduler, job in of_it if not any(is_same_job(job, one) for one in waited)]
    states = _find_states(fact, asked, plan.site.scheduler, env)
    own = f"runs of its own: --name {plan.name}-2" if os.path.exists(run.sweep) else "a run of its own: --fresh"
    for one, state in states.items():
        if state in (WAITS if one in fact.again else LIVE):
            raise RequestError(
                f"job {one[1]} ({state}) has {show_path(run.path)}, and two jobs cannot write one run",
                f"--after afterany:{one[1]} to resume it then; or {own}",
            )


def _find_states(
    fact: RunFacts, asked: Sequence[tuple[str, str]], scheduler: str, env: Mapping[str, str]
) -> dict[tuple[str, str], str]:
    """Each job's state, as far as it has one still. Jobs of another scheduler than the new job's are not asked about:
    it need not be one of this machine."""
    states: dict[tuple[str, str], str] = {}
    here = {one.job: one for one in fact.submissions if find_scheduler(one.scheduler).this_machine}
    for one in find_jobs([here[job] for _, job in asked if job in here]):
        states[here[one.id].scheduler, one.id] = one.state
    ids = [job for name, job in asked if name == scheduler and job not in here]
    if not ids:
        return states
    found = ask_jobs(scheduler, ids, env, owners_of([fact]))
    index = {scheduler: index_jobs(found.jobs)}
    for job in ids:
        shown = [one.state for one in jobs_of(index, scheduler, job)]
        if not shown and found.problem:
            raise SchedulerError(
                f"{found.problem}: whether job {job} of {fact.run.path} has ended is not known",
                "again in a while; or a run of its own: --fresh",
            )
        live = next((state for state in shown if state in LIVE), None)
        if live is not None:
            states[scheduler, job] = live
    return states
