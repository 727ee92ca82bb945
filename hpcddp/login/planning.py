"""From what was asked on this machine to a plan: the site is found, the command looked at, and the job planned."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial

from hpcddp import __version__
from hpcddp.errors import SchedulerError
from hpcddp.login.spawning import see_spawn
from hpcddp.script.find_site import SiteChoice, asked_site, open_site, site_of_host, site_of_scheduler
from hpcddp.script.folders import source_root
from hpcddp.script.plan import JobPlan, PlannedBy, plan_job
from hpcddp.script.site import Site
from hpcddp.script.site_age import remark_age
from hpcddp.script.spec import JobSpec, read_spec
from hpcddp.script.words import quote_words

#: What was asked: job-file key -> its value and where it was given.
Asked = Mapping[str, tuple[object, str]]


def read_request(
    asked: Asked, named: str | None, job_file: str | None, env: Mapping[str, str]
) -> tuple[JobSpec, Site, tuple[str, ...]]:
    """The spec, its site, and what to say of both. `named`: the site of an option, which wins over the file's."""
    in_file = asked.get("site", ("", ""))[0] if job_file else None
    choice = asked_site(named, str(in_file or "") or None, job_file or "", env) or find_site_here(env)
    site = open_site(choice, env)
    if os.path.basename(choice.site) != site.name:  # a file: job.yaml has to lead to it again, from any folder
        asked = {**asked, "site": (os.path.abspath(choice.site), choice.reason)}
    spec, remarks = see_spawn(read_spec(asked, site.variables))
    remarks = (*remarks, *remark_age(site, today(env)))
    corrected = f", corrected by {site.overlay}" if site.overlay else ""
    return spec, site, (*remarks, f"site {site.name} ({choice.reason}){corrected}")


def today(env: Mapping[str, str]) -> float:
    """Seconds since 1970, or what SOURCE_DATE_EPOCH says (https://reproducible-builds.org/specs/source-date-epoch/):
    the same request then says the same on any day."""
    said = env.get("SOURCE_DATE_EPOCH", "")
    return float(said) if said.isdecimal() else time.time()


def plan_request(asked: Asked, named: str | None, job_file: str | None, env: Mapping[str, str]) -> JobPlan:
    """The plan; its remarks also say which site it is for, and why."""
    spec, site, remarks = read_request(asked, named, job_file, env)
    plan = plan_spec(spec, site)
    return plan._replace(remarks=(*remarks, *plan.remarks))


def plan_spec(spec: JobSpec, site: Site, created_by: str = "") -> JobPlan:
    """The plan of this process, which `created_by` names if it is no verb."""
    return plan_job(spec, site, this_process(created_by))


def on_path(program: str, env: Mapping[str, str]) -> str | None:
    """The whole path of a program on PATH, or None."""
    paths = (os.path.join(folder, program) for folder in env.get("PATH", "").split(":") if folder)
    return next((p for p in paths if os.access(p, os.X_OK)), None)


def this_process(created_by: str = "") -> PlannedBy:
    """This process, as far as the script it makes needs it. `created_by`: what it does, if that is no verb of hpcddp's
    command line."""
    return PlannedBy(
        python=sys.executable,
        version=__version__,
        created_by=created_by or quote_words(["hpcddp", *sys.argv[1:]]),
        source_root=source_root(),
        cpus=len(os.sched_getaffinity(0)),
    )


def find_site_here(env: Mapping[str, str]) -> SiteChoice:
    """What the machine shows: its name, then its scheduler. A program is started only where its name does not tell."""
    by_host = site_of_host(os.uname().nodename, env)
    if by_host:
        return by_host
    return site_of_scheduler(lambda program: bool(on_path(program, env)), partial(_version_of, env))


def _version_of(env: Mapping[str, str], program: str) -> str:
    """What `program --version` prints; "" where it does not answer."""
    from hpcddp.schedulers.run import run_program

    try:
        answer = run_program([on_path(program, env) or program, "--version"], env)
    except SchedulerError:
        return ""
    return answer.stdout + answer.stderr
