"""`hpcddp check`: what would stop a job, found before it trains; here, or on each node of an allocation."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpcddp.checks.environment import FAILED, NOT_CHECKED, OK, WARNING, Check
from hpcddp.checks.job import Checker, CheckReport, CheckRequest, format_report, report_record
from hpcddp.checks.node import judge_disk
from hpcddp.checks.process import probe_disk
from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import named_site, read_keys
from hpcddp.cli.sites_check import SiteFound, compare_site, survey_site
from hpcddp.cli.streams import print_answer, print_message
from hpcddp.errors import LaunchError, RequestError, SchedulerError
from hpcddp.login.planning import choose_site
from hpcddp.ranks.gpus import find_gpu_type
from hpcddp.ranks.launcher import EXPORTED_ALWAYS
from hpcddp.ranks.remote_shell import replace_ssh
from hpcddp.runs.jsonfile import write_object
from hpcddp.schedulers.allocation import Allocation
from hpcddp.schedulers.registry import find_allocation, find_scheduler
from hpcddp.schedulers.row import QueueFound
from hpcddp.schedulers.run import run_program
from hpcddp.script.plan import plan_queue
from hpcddp.script.site import Queue, Site
from hpcddp.script.site_check import ModulesCompared
from hpcddp.script.site_file import open_site
from hpcddp.script.spec import JobSpec, quote_line, quote_word, read_spec
from hpcddp.supervisor.order import split_check
from hpcddp.units import parse_count, read_number

_DESCRIPTION = """\
Say what would stop a job before it trains.

On a login node: the scheduler, queue, account and modules of the site, the folder of the runs, disk and quota, and
whether the job's Python imports a torch that fits the site's GPUs. In an allocation, and behind -- by the launcher's
words that are given there: each node looks at itself, its GPUs, limits, disks, clock, versions and names; then pairs of
hosts exchange data, and slow hosts and links are named. A job file's `preflight: true` does so before the ranks."""
_FAILED = 1
_IMPORT_S = 60.0
_TORCH = """\
import json, sys, torch
flags = getattr(torch._C, "_cuda_getArchFlags", lambda: "")()
versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
print(json.dumps({**versions, "archs": flags or ""}))
"""


def build_parser() -> VerbParser:
    example = "hpcddp check\nhpcddp check --site abci3 --account gaa50000\nhpcddp check --fast --hosts node1,node2"
    also = {_FAILED: "something has failed"}
    parser = VerbParser("check", _DESCRIPTION, example=example, exits=(2, 3, 4), also=also, takes_command=True)
    parser.set_defaults(job=None, demo=False, fresh=False, set=[])  # which `render` has, and `read_keys` looks at
    parser.usage = "hpcddp check [options] [-- launcher [argument ...]]"
    add = parser.add_argument_group("on a login node").add_argument
    add("--site", metavar="S", help="a site's name, or the path of its YAML file (what this machine shows)")
    add("--queue", metavar="Q", help="the queue of the job (that of ./hpcddp.yaml, or the site's)")
    add("--account", metavar="A", help="the account of the job")
    add = parser.add_argument_group("in a job").add_argument
    add("--fast", action="store_true", help="neither torch, nor GPUs' speed, nor links: some seconds")
    add("--hosts", metavar="A,B", help="the hosts that should answer (those of the allocation)")
    add("--gpus-per-node", metavar="G", help="how many GPUs each node should have (0)")
    add("--line", metavar="LINE", help="what each node has to run without an error, for a shell")
    add("--patience", metavar="N", help="wait N times as long for everything, as where torch loads slowly (1)")
    add("--report", metavar="FILE", help="write the JSON there, too")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """1 if something has failed."""
    allocation = find_allocation(env, live=True)
    if args.command or allocation is not None:
        report = check_job(plan_check(args, allocation, env), env)
        record, text = report_record(report), format_report(report)
    else:
        checks = list(check_login(args, env))
        well = all(check.state != FAILED for check in checks)
        record, text = {"ok": well, "checks": [check._asdict() for check in checks]}, format_checks(checks)
    print_answer(record, text, as_json=args.json)
    if args.report:
        write_object(args.report, record)
    return 0 if record["ok"] else _FAILED


# ---- in a job


def check_job(request: CheckRequest, env: Mapping[str, str]) -> CheckReport:
    """Check the nodes by this launch. What the launcher prints goes to stderr."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)  # so that the launcher does not outlive this process
    try:
        return Checker(request, {**env, **request.variables}).check()
    except OSError as error:
        what = request.words[0] if request.words else request.python
        raise LaunchError(f"{what} cannot be run: {error.strerror}", f"which {what}") from error


def plan_check(args: argparse.Namespace, allocation: Allocation | None, env: Mapping[str, str]) -> CheckRequest:
    """Plan the processes to start, and the hosts to reach. Without words the allocation's launcher starts one process
    on each node, as `hpcddp launch` would."""
    python, variables = sys.executable, dict[str, str]()
    if args.command:
        words, python = split_check(args.command, python)
    else:
        words, variables = _plan_launch(allocation, env)
    hosts = args.hosts.split(",") if args.hosts else []
    if not hosts and allocation is not None:
        hosts = [name for name, _ in allocation.hosts or ()]
    gpus = read_number(args.gpus_per_node or "0")
    if gpus is None:
        raise RequestError(f"--gpus-per-node {args.gpus_per_node!r} is no number", "--gpus-per-node 8")
    patience = parse_count(args.patience or "1", "--patience")
    run_dir = env.get("HPCDDP_RUN_DIR", "")
    folder = run_dir if os.path.isdir(run_dir) else os.getcwd()
    variables = {name: env.get(name, "") for name in EXPORTED_ALWAYS} | {"HPCDDP_PYTHON": python, **variables}
    line = args.line or ""
    return CheckRequest(tuple(words), python, tuple(hosts), gpus, folder, line, args.fast, patience, variables)


def _plan_launch(allocation: Allocation | None, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The launcher's words for one process on each host, and its variables, as in the script of `hpcddp launch`."""
    from hpcddp.cli import launch

    options = launch.build_parser().parse_args(["--ranks-per-node", "1", "--walltime", "1:00:00", "--scratch"])
    options.command = ["python", "-c", "pass"]
    plan = launch.plan_here(options, allocation, env)
    line = " ".join(map(quote_line, plan.stage_line))
    words = ["bash", "-c", f'launcher={quote_word(plan.outer_program)}; exec {line} "$@"', "bash"] if line else []
    if not line and plan.nodes > 1:
        what = f"no launcher on PATH starts processes on the {plan.nodes} hosts of this job"
        raise LaunchError(what, "load the module of an MPI, or: hpcddp check -- LAUNCHER …")
    variables = {name: env.get(name, "") for name in plan.exported} | {"OMP_NUM_THREADS": str(plan.threads_per_rank)}
    if allocation is not None:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        variables |= replace_ssh(allocation.scheduler, plan.outer_launcher, folder, env, print_message)
    return words, variables


# ---- on a login node


def check_login(args: argparse.Namespace, env: Mapping[str, str]) -> Iterator[Check]:
    """Every row, also of what is well, for the site, queue and account that `hpcddp render` would take here."""
    given, job_file = read_keys(args)
    choice = choose_site(given, named_site(args), job_file, env)
    site = open_site(choice, env)
    spec = read_spec(given, site.vars)
    yield Check("site", f"{site.name} ({choice.reason})", state=OK)
    if not find_scheduler(site.scheduler).this_machine:
        try:
            found = compare_site(site, env)
            if not found.queues and find_scheduler(site.scheduler).commands.survey:
                found = found._replace(queues=tuple(survey_site(site, env)))  # of a file without queues
            yield from check_site_rows(site, found, spec, f"hpcddp sites check {quote_word(choice.site)}")
        except SchedulerError as error:
            yield Check("scheduler", error.message, error.hint, FAILED)
    yield from check_folder(os.getcwd(), site)
    yield from check_python(site, spec.queue or site.queue, sys.executable, env)


def check_site_rows(site: Site, found: SiteFound, spec: JobSpec, hint: str) -> Iterator[Check]:
    """The scheduler, its queue and account, and the modules, as `hpcddp sites check` finds them. `hint`: that line."""
    name = find_scheduler(site.scheduler).title
    live = {one.name: one for one in found.queues}
    if live:
        yield Check("scheduler", f"{name} answers, and has {', '.join(sorted(live)[:8])}", state=OK)
    else:
        yield Check("scheduler", f"{name}: {'; '.join(found.unasked)}", hint, NOT_CHECKED)
    try:
        queue = plan_queue(spec, site)
    except RequestError as error:
        yield Check("queue", error.message, error.hint, FAILED)
    else:
        if live:
            yield check_queue(site, live, queue, hint)
    accounts = ", ".join(found.accounts[:8])
    if not accounts:
        yield from (Check("account", why, state=NOT_CHECKED) for why in found.accounts_unasked)
    elif spec.account and spec.account not in found.accounts:
        message = f"{spec.account} is none that you may charge"
        yield Check("account", message, f"--account with one of {accounts}", FAILED)
    else:
        yield Check("account", f"you may charge {accounts}", state=OK)
    if site.modules.load:
        yield check_modules(site, found.modules, hint)


def check_queue(site: Site, live: Mapping[str, QueueFound], queue: str, hint: str) -> Check:
    """The queue of a request among those of the scheduler. `hint`: what shows how the site's file and these differ."""
    called = {name: one.partition or name for name, one in site.queues.items()} or {name: name for name in live}
    others = [name for name, partition in called.items() if partition in live and live[partition].is_open]
    remedy = f"--queue one of {', '.join(others)}" if others else hint
    if not queue:
        return Check("queue", "the site has none that is chosen by itself", remedy, NOT_CHECKED)
    node = site.queues.get(queue, Queue())
    if site.queue_option == "--qos" or (node.qos and not node.partition):  # which is in no list of partitions
        return Check("queue", f"{queue} is a QOS: not asked (sacctmgr show qos)", hint, NOT_CHECKED)
    if queue in others:
        return Check("queue", f"{queue} takes jobs", state=OK)
    why = "takes no jobs now" if called.get(queue, queue) in live else "is none of the scheduler's"
    return Check("queue", f"{queue} {why}", remedy, FAILED)


def check_modules(site: Site, found: ModulesCompared, hint: str) -> Check:
    """The site's modules, all of which a login shell has to find."""
    if found.differences:
        return Check("modules", "; ".join(found.differences), hint, FAILED)
    if not found.has_command:
        remedy = f"modules: {{init: source FILE}} in {site.file}, with the file that defines it"
        return Check("modules", "; ".join(found.unasked), remedy, FAILED)
    if found.unasked:
        return Check("modules", "; ".join(found.unasked), hint, NOT_CHECKED)
    return Check("modules", ", ".join(site.modules.load), state=OK)


def check_folder(folder: str, site: Site, mounts: str = "/proc/mounts") -> Iterator[Check]:
    """The folder that a job's runs are in: seen from the nodes, with room, and can be written."""
    source, kind = find_file_system(folder, mounts)
    place = f"{folder} is on {source} ({kind})"
    if kind in {"tmpfs", "ramfs"} and not find_scheduler(site.scheduler).this_machine:
        yield Check("folder", f"{place}: this host's memory", "cd to a folder that all nodes see", FAILED)
    elif find_scheduler(site.scheduler).this_machine or ":" in source:  # another host's
        yield Check("folder", place, state=OK)
    else:
        yield Check("folder", f"{place}: hpcddp check in a job shows whether the nodes see it", state=NOT_CHECKED)
    disk = probe_disk(folder)
    found = judge_disk(folder, *disk)
    yield Check("disk", *found, FAILED) if found else Check("disk", f"{disk[0] // 1024} GiB free", state=OK)


def find_file_system(folder: str, mounts: str = "/proc/mounts") -> tuple[str, str]:
    """Source (`/dev/sda1`, `server:/home`) and type of the file system that holds this folder."""
    path, found, longest = os.path.realpath(folder), ("an unknown one", "unknown"), ""
    with suppress(OSError), open(mounts, encoding="utf-8", errors="replace") as file:
        for line in file:
            source, where, kind, *_ = (field.replace("\\040", " ") for field in line.split())
            if os.path.commonpath([path, where]) == where and len(where) >= len(longest):
                found, longest = (source, kind), where
    return found


def check_python(site: Site, queue: str, python: str, env: Mapping[str, str]) -> Iterator[Check]:
    """Whether this Python imports torch, and whether that was built for the GPUs of the site's queue."""
    try:
        answer = run_program([python, "-c", _TORCH], env, patience_s=_IMPORT_S)
    except SchedulerError as error:  # it is no scheduler's
        yield Check("torch", error.message, error.hint, FAILED)
        return
    if answer.status:
        why = (answer.stderr.strip().splitlines() or [f"status {answer.status}"])[-1]
        remedy = f"{python} -m pip install 'hpcddp[train]', or hpcddp check by the job's Python"
        yield Check("torch", f"{python} does not import it: {why}", remedy, FAILED)
        return
    found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    built = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPUs alone"
    yield Check("torch", f"{found['torch']}, for {built}, {platform.machine()}", state=OK)
    yield from check_fit(site, queue, found)


def check_fit(site: Site, queue: str, found: Mapping[str, Any]) -> Iterator[Check]:
    """A torch that was built for other GPUs than those of the site's queue."""
    node = site.queues.get(queue, Queue())
    gpu = node.gpu or ""
    if not node.gpus or not gpu:
        return
    wanted = "hip" if node.vendor == "amd" else "cuda" if node.vendor == "nvidia" else ""
    row = find_gpu_type(gpu)
    arch = row.arch if row is not None else ""
    archs = str(found["archs"]).split()
    # code for an older chip of the same generation runs, and the driver compiles what is for any
    runs = any(one.startswith("compute_") or (one[:-1] == arch[:-1] and one <= arch) for one in archs)
    message, state = f"{gpu} of queue {queue}", OK if arch and archs else NOT_CHECKED
    if wanted and not found[wanted]:
        message, state = f"queue {queue} has {gpu}, and this torch was built without it", FAILED
    elif arch and archs and not runs:
        message = f"queue {queue} has {gpu} ({arch}), and this torch was built for {', '.join(archs)}"
        state = FAILED
    yield Check("torch's GPUs", message, "install the build for it: https://pytorch.org/get-started/locally/", state)


def format_checks(checks: Sequence[Check]) -> str:
    """A line for each row, with what to do below it where it is not well."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:9}  {check.name:{width}}  {check.message}")
        if check.remedy and check.state in {FAILED, WARNING}:
            lines.append(f"{'':{width + 13}}hint: {check.remedy}")
    return "".join(f"{line}\n" for line in lines)
