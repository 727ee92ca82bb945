"""The options that `render` and `layout` share, and the way from them to a plan."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from hpcddp import __version__
from hpcddp.cli.parser import VerbParser
from hpcddp.errors import RequestError
from hpcddp.script.choose import Choice, chosen_site, open_site, site_of_host, site_of_scheduler
from hpcddp.script.folders import find_folder, source_root
from hpcddp.script.loading import load_yaml
from hpcddp.script.plan import JobPlan, Origin, plan_job
from hpcddp.script.spec import read_spec
from hpcddp.script.words import quote_words

DEFAULT_JOB_FILE = "hpcddp.yaml"

# option -> (job-file key, placeholder, help)
_OPTIONS = {
    "--site": ("site", "S", "a site's name, or the path of its YAML file (see hpcddp sites)"),
    "--nodes": ("nodes", "N", "nodes (1)"),
    "--ranks-per-node": ("ranks_per_node", "R", "processes per node (one per GPU)"),
    "--gpus-per-node": ("gpus_per_node", "G", "GPUs of each node (what the site says)"),
    "--cpus-per-rank": ("cpus_per_rank", "C", "CPUs of each rank (its share of the node)"),
    "--walltime": ("walltime", "H:M:S", "run-time limit (the site's default)"),
    "--queue": ("queue", "Q", "PBS queue, Slurm partition or resource type"),
    "--account": ("account", "A", "what the job is charged to"),
    "--name": ("name", "X", "the job's name (its script's)"),
    "--launcher": ("launcher", "L", "openmpi, mpich, intelmpi, pals, srun or torchrun (the site's)"),
    "--global-batch": ("global_batch", "B", "samples per optimizer step, over all ranks"),
}


def request_parser(verb: str, description: str) -> VerbParser:
    """A parser with the request's options. Values stay text: the job file's readers check them."""
    parser = VerbParser(verb, description)
    parser.usage = f"hpcddp {verb} [JOB.yaml] [options] [-- command ...]"
    parser.add_argument(
        "job", nargs="?", metavar="JOB.yaml", help=f"job file ({DEFAULT_JOB_FILE}, else the built-in training job)"
    )
    for option, (key, placeholder, text) in _OPTIONS.items():
        parser.add_argument(option, dest=key, metavar=placeholder, help=text)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of a job file, such as env.NCCL_DEBUG=INFO",
    )
    return parser


def read_plan(args: argparse.Namespace, env: Mapping[str, str]) -> JobPlan:
    """Options, job file and site to a plan; which site and why, and what the plan remarks, go to stderr."""
    asked, job_file = read_asked(args)
    in_file = asked.get("site", ("", ""))[0] if job_file else None
    choice = chosen_site(_option(args, "site"), str(in_file or "") or None, job_file or "", env) or _found_site(env)
    site = open_site(choice, env)
    if os.path.basename(choice.site) != site.name:  # a file: job.yaml has to lead to it again, from any folder
        asked["site"] = (os.path.abspath(choice.site), choice.reason)
    plan = plan_job(read_spec(asked, site.variables), site, origin())
    for remark in (f"site {site.name} ({choice.reason})", *plan.remarks):
        print(f"hpcddp: {remark}", file=sys.stderr)
    return plan


def read_asked(args: argparse.Namespace) -> tuple[dict[str, tuple[object, str]], str | None]:
    """Every value asked for with its source, options over job file; and the job file."""
    path = _job_file(args)
    asked: dict[str, tuple[object, str]] = {}
    if path:
        asked = {key: (value, f"{key} in {path}") for key, value in load_yaml(path)[0].items()}
    for item in args.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise RequestError(f"--set {item!r} has no value", "--set KEY=VALUE")
        asked[key] = (value, f"--set {key}")
    for option, (key, _, _) in _OPTIONS.items():
        if getattr(args, key) is not None:
            asked[key] = (getattr(args, key), option)
    if args.command:
        asked["command"] = (args.command, "the command after --")
    return asked, path


def _job_file(args: argparse.Namespace) -> str | None:
    if args.job:
        return str(args.job)
    if os.path.isfile(DEFAULT_JOB_FILE):
        return DEFAULT_JOB_FILE
    return None if args.command else os.path.join(find_folder("jobs"), "digits.yaml")


def _option(args: argparse.Namespace, key: str) -> str | None:
    sets = [item.partition("=")[2] for item in args.set if item.startswith(f"{key}=")]
    return getattr(args, key) or (sets[-1] if sets else None)


def _found_site(env: Mapping[str, str]) -> Choice:
    """What the machine shows: its name, then its scheduler. Starts `qsub --version` only where there is a qsub."""
    by_host = site_of_host(os.uname().nodename, env)
    if by_host:
        return by_host
    qsub = on_path("qsub", env)
    version = None
    if qsub:
        import subprocess

        try:
            answer = subprocess.run([qsub, "--version"], capture_output=True, timeout=10, check=False)
            version = (answer.stdout + answer.stderr).decode(errors="replace")
        except (OSError, subprocess.TimeoutExpired):
            version = ""
    return site_of_scheduler(version, bool(on_path("sbatch", env)))


def on_path(program: str, env: Mapping[str, str]) -> str | None:
    """The whole path of a program on PATH, or None."""
    paths = (os.path.join(folder, program) for folder in env.get("PATH", "").split(":") if folder)
    return next((p for p in paths if os.access(p, os.X_OK)), None)


def origin() -> Origin:
    """This process, as far as the script it makes needs it."""
    return Origin(
        python=sys.executable,
        version=__version__,
        created_by=quote_words(["hpcddp", *sys.argv[1:]]),
        source_root=source_root(),
        cpus=len(os.sched_getaffinity(0)),
    )
