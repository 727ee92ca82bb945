"""Plans a request on this machine: the site is found, the command looked at, and the job planned."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from hpcddp import __version__
from hpcddp.errors import RequestError, SchedulerError
from hpcddp.ranks.launch_commands import find_node_agent
from hpcddp.runs.start import NEW, RunRequest, inspect_run, make_stamp
from hpcddp.script.plan import JobPlan, PlannedBy, plan_job
from hpcddp.script.site import Site
from hpcddp.script.site_file import (
    SiteChoice,
    chosen_site,
    config_folder,
    load_yaml,
    open_site,
    site_of_host,
    site_of_scheduler,
    source_root,
)
from hpcddp.script.spec import JobSpec, quote_words, read_spec
from hpcddp.supervisor.notice import check_notify

#: Job-file key -> its value and where it was given.
GivenKeys = Mapping[str, tuple[object, str]]
# What starts the ranks of a node in a training script.
_CALLS = (b"spawn(", b"notebook_launcher(", b"Process(")
_RANKS = (b'"RANK"', b"'RANK'", b'"LOCAL_RANK"', b"'LOCAL_RANK'", b"env://")  # the script can be a rank, too
_MOST_BYTES = 2**20


def detect_spawn(spec: JobSpec) -> tuple[JobSpec, tuple[str, ...]]:
    """The spec, with `ranks: node` if the command's script starts a node's ranks (mp.spawn, notebook_launcher), and a
    remark on that. RequestError on several nodes: the script gives its ranks the numbers of one node."""
    if spec.ranks is not None or not spec.command or find_node_agent(spec.command):
        return spec, ()
    path = find_python_file(spec.command, spec.workdir or "")
    line = _spawning_line(os.path.join(spec.workdir or "", path))
    if not line:
        return spec, ()
    what = f"{path}:{line} starts a node's ranks itself"
    if (spec.nodes or 1) > 1:
        raise RequestError(
            f"{what}, and numbers them from 0 on each of {spec.nodes} nodes",
            "leave that to the launcher (hpcddp lint says how), or count from int(os.environ['NODE_RANK']) * ranks,"
            " with the world of all nodes and MASTER_ADDR as it is set, and say --set ranks=node; for actors"
            " that are no ranks: --set ranks=each",
        )
    remark = f"{what}: the job starts it once (ranks: node); --set ranks=each starts it in each rank"
    sources = MappingProxyType({**spec.sources, "ranks": f"{path}:{line}"})
    return spec._replace(ranks="node", sources=sources), (remark,)


def find_python_file(command: tuple[str, ...], folder: str) -> str:
    """The first file of Python among the words, or that of the module behind -m; "" if there is none here."""
    for before, word in pairwise(("", *command)):
        path = f"{word.replace('.', '/')}.py" if before == "-m" else word
        if path.endswith(".py") and os.path.isfile(os.path.join(folder, path)):
            return path
    return ""


def _spawning_line(path: str) -> int:
    """The line that starts ranks in any case; 0: none, or the file cannot be read, or reads its rank."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return 0
    if not any(call in text for call in _CALLS) or any(word in text for word in _RANKS):
        return 0
    from hpcddp.lint.rules import find_spawning_line  # parses the file: only for the few that may call it

    return find_spawning_line(text)


def choose_site(given: GivenKeys, named: str | None, job_file: str | None, env: Mapping[str, str]) -> SiteChoice:
    """The site of a request. `named`: that of an option, which wins over the file's."""
    in_file = given.get("site", ("", ""))[0] if job_file else None
    return chosen_site(named, str(in_file or "") or None, job_file or "", env) or find_site_here(env)


def read_request(given: GivenKeys, choice: SiteChoice, env: Mapping[str, str]) -> tuple[JobSpec, Site, tuple[str, ...]]:
    """The spec, its site, and what to say of both."""
    site = open_site(choice, env)
    if os.path.basename(choice.site) != site.name:  # a file: job.yaml has to lead to it again, from any folder
        given = {**given, "site": (os.path.abspath(choice.site), choice.reason)}
    spec, remarks = detect_spawn(read_spec_here(given, site.vars, env))
    corrected = f", corrected by {site.overlay}" if site.overlay else ""
    return spec, site, (*remarks, f"site {site.name} ({choice.reason}){corrected}")


def read_spec_here(given: GivenKeys, site_keys: Iterable[str], env: Mapping[str, str]) -> JobSpec:
    """The spec, with the notices of the user's own `notify.yaml` where it says nothing of them. RequestError."""
    path = os.path.join(config_folder(env), "notify.yaml")
    if not {"notify", "supervise"} & {*given} and os.path.exists(path):
        given = {**given, "notify": (load_yaml(path)[0], path)}
    spec = read_spec(given, site_keys)
    if spec.notify is not None:
        check_notify(spec.notify, env)
    return spec


def plan_request(given: GivenKeys, choice: SiteChoice, env: Mapping[str, str]) -> JobPlan:
    """The plan; its remarks also say which site it is for, and why."""
    spec, site, remarks = read_request(given, choice, env)
    plan = plan_job(spec, site, this_process(stamp=stamp_of_day(env)))
    return plan._replace(remarks=(*remarks, *plan.remarks))


def request_of(plan: JobPlan) -> RunRequest:
    """The request of the plan's job at its start; the folder as seen from this one."""
    return plan.request._replace(folder=os.path.join(os.getcwd(), plan.spec.workdir or "", plan.run_dir))


def remark_start(plan: JobPlan) -> list[str]:
    """A line on what a start of the plan's job would do now; none for a new run, and for an array."""
    if plan.options.array:
        return []
    outlook = inspect_run(request_of(plan))
    return [] if outlook.kind == NEW and outlook.unfinished is None else [str(outlook)]


def on_path(program: str, env: Mapping[str, str]) -> str | None:
    """The whole path of a program on PATH, or None."""
    return shutil.which(program, path=env.get("PATH", ""))


def this_process(created_by: str = "", stamp: str = "") -> PlannedBy:
    """Describe this process for its script. `created_by`: what it does, if that is no verb."""
    return PlannedBy(
        stamp=stamp or make_stamp(),
        python=sys.executable,
        version=__version__,
        created_by=created_by or quote_words(["hpcddp", *sys.argv[1:]]),
        source_root=source_root(),
        cpus=len(os.sched_getaffinity(0)),
    )


def stamp_of_day(env: Mapping[str, str]) -> str:
    """The stamp of --fresh where SOURCE_DATE_EPOCH says the day (https://reproducible-builds.org); else ""."""
    seconds = env.get("SOURCE_DATE_EPOCH", "")
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(int(seconds))) if seconds.isdecimal() else ""


def find_site_here(env: Mapping[str, str]) -> SiteChoice:
    """Find the site by the machine's name, then by its scheduler, which is asked only if the name does not tell."""
    by_host = site_of_host(os.uname().nodename, env)
    if by_host:
        return by_host
    return site_of_scheduler(lambda program: bool(on_path(program, env)), partial(_version_of, env))


def _version_of(env: Mapping[str, str], program: str) -> str:
    from hpcddp.schedulers.run import run_program

    try:
        answer = run_program([on_path(program, env) or program, "--version"], env)
    except SchedulerError:
        return ""
    return answer.stdout + answer.stderr
