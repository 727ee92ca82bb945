"""The options that `render` and `layout` share, and the way from them to a plan."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_messages
from hpcddp.errors import RequestError
from hpcddp.login.planning import choose_site, plan_request
from hpcddp.ranks.launchers import JOB_LAUNCHERS, LAUNCHERS
from hpcddp.schedulers.registry import scripted_schedulers
from hpcddp.script.plan import JobPlan
from hpcddp.script.site_file import find_data_folder, load_yaml
from hpcddp.script.spec import KEYS

DEFAULT_JOB_FILE = "hpcddp.yaml"


def listed(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# group of options -> option -> (job-file key, placeholder, help)
_GROUPS = {
    "where it runs": {
        "--site": ("site", "S", "a site's name, or the path of its YAML file (see hpcddp sites)"),
        "--queue": ("queue", "Q", "queue, partition, QOS or resource type"),
        "--account": ("account", "A", "what the job is charged to"),
        "--launcher": ("launcher", "L", f"{listed(JOB_LAUNCHERS)} (the site's, or what is found)"),
    },
    "how large it is": {
        "--nodes": ("nodes", "N", "nodes (1)"),
        "--ranks-per-node": ("ranks_per_node", "R", "processes per node (one per GPU, or what the allocation has)"),
        "--gpus-per-node": ("gpus_per_node", "G", "GPUs of each node (what the site says)"),
        "--gpus-per-rank": ("gpus_per_rank", "G", "GPUs of each rank, for a model that is split over them (1)"),
        "--cpus-per-rank": ("cpus_per_rank", "C", "CPUs of each rank (its share of the node)"),
        "--walltime": (
            "walltime",
            "TIME",
            "run-time limit: 2:30:00, 90m, 1d (the site's, or what is left of the allocation)",
        ),
    },
    "what it runs": {
        "--name": ("name", "X", "the run's name: its folder is runs/X, its job is called so (made from the command)"),
        "--global-batch": ("global_batch", "B", "samples per optimizer step, over all ranks"),
        "--parallel": ("parallel", "P", "how the ranks split the model: ddp, zero1, fsdp, hsdp, data=-1,shard=8"),
        "--resume": ("resume", "RUN", "resume this run, and take the new command"),
        "--accept": ("accept", "NAMES", "take other settings than the recorded ones, such as lr,seed"),
        "--keep": ("keep", "NAMES", "keep the recorded settings, such as lr"),
    },
}
_OPTIONS = {option: row for group in _GROUPS.values() for option, row in group.items()}
# What options of no scheduler or launcher in particular are called here: of sites' guides, trainers and containers.
_OTHERS = {
    **dict.fromkeys(("--project", "--group"), "--account"),
    "--time-limit": "--walltime",
    "--num-nodes": "--nodes",
    "--image": "--set container=",
}


def request_parser(verb: str, description: str, *, example: str, exits: tuple[int, ...]) -> VerbParser:
    """A parser with the request's options. Values stay text: the job file's readers check them."""
    parser = VerbParser(verb, description, example=example, exits=exits, takes_command=True)
    parser.usage = f"hpcddp {verb} [JOB.yaml] [options] [-- command ...]"
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help=f"job file ({DEFAULT_JOB_FILE}, if it is there)")
    group = add_options(parser, "any key of a job file, such as env.NCCL_DEBUG=INFO")
    group.add_argument("--demo", action="store_true", help="the built-in training job: handwritten digits")
    return parser


def add_options(parser: VerbParser, settable: str) -> argparse._ArgumentGroup:
    """The request's options, without those that the verb has `elsewhere`; the last group of them. `settable`: what
    `--set` takes."""
    parser.find_equivalent = find_equivalent
    for title, options in _GROUPS.items():
        group = parser.add_argument_group(title)
        for option, (key, placeholder, text) in options.items():
            if option not in parser.elsewhere:
                group.add_argument(option, dest=key, metavar=placeholder, help=text)
    group.add_argument(
        "--fresh", action="store_true", help="begin anew; an old run in the folder is set aside, as RUN.old1"
    )
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=settable)
    return group


def read_plan(args: argparse.Namespace, env: Mapping[str, str]) -> JobPlan:
    """Options, job file and site to a plan; which site and why, and what the plan remarks, go to stderr."""
    given, job_file = read_keys(args)
    plan = plan_request(given, choose_site(given, named_site(args), job_file, env), env)
    print_messages(plan.remarks)
    return plan


def read_keys(args: argparse.Namespace) -> tuple[dict[str, tuple[object, str]], str | None]:
    """Every value asked for with its source, options over job file; and the job file."""
    given = read_given(args)
    path = _job_file(args)
    in_file = {key: (value, f"{key} in {path}") for key, value in load_yaml(path)[0].items()} if path else {}
    return {**in_file, **given}, path


def read_given(args: argparse.Namespace) -> dict[str, tuple[object, str]]:
    """The keys that the command line gives; an option wins over `--set`."""
    given: dict[str, tuple[object, str]] = {}
    for key, equals, value in (item.partition("=") for item in args.set):
        if not equals:
            raise RequestError(f"--set {key!r} has no value", f"--set {key}=VALUE")
        given[key] = (value, f"--set {key}")
    for option, (key, _, _) in _OPTIONS.items():
        value = getattr(args, key, None)
        if value is not None:
            given[key] = (value, option)
    if args.fresh:
        given["fresh"] = ("true", "--fresh")
    if args.command:
        given["command"] = (args.command, "the command after --")
    return given


def _job_file(args: argparse.Namespace) -> str | None:
    if args.demo:
        other = args.job or (args.command and args.command[0])
        if other:
            raise RequestError(f"--demo brings its own job file and command, but {other!r} was given", "leave out one")
        return os.path.join(find_data_folder("jobs"), "digits.yaml")
    if args.job:
        if args.job.endswith((".py", ".sh")):
            raise RequestError(f"{args.job} is a script, not a job file", "put -- before it: -- python train.py")
        return str(args.job)
    if os.path.isfile(DEFAULT_JOB_FILE):
        return DEFAULT_JOB_FILE
    return None


def named_site(args: argparse.Namespace) -> str | None:
    sets = [item.partition("=")[2] for item in args.set if item.startswith("site=")]
    return args.site or (sets[-1] if sets else None)


def find_equivalent(option: str, value: str) -> str | None:
    """Find hpcddp's words for an option of another program, with its value; None if it means nothing known."""
    key = option.removeprefix("--").replace("-", "_")
    meanings: dict[str, list[str]] = {}
    for title, typed in each_table():
        if option in typed:
            meanings.setdefault(typed[option], []).append(title)
    if not meanings and option.startswith("--") and key in KEYS:
        meanings = {f"--set {key}=": []}
    if len(meanings) < 2:
        return next((_with_value(meaning, value) for meaning in meanings), None)
    return ", or ".join(f"{_with_value(meaning, value)} ({', '.join(who)})" for meaning, who in meanings.items())


def each_table() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Whose options they are, and what each is called here. A job file's key stands behind `--set`."""
    for scheduler in scripted_schedulers():
        yield scheduler.title, scheduler.directives.typed
    for launcher in LAUNCHERS.values():
        yield launcher.name, launcher.typed
    yield "others", _OTHERS


def _with_value(meaning: str, value: str) -> str:
    if " " in meaning and not meaning.endswith("="):  # a whole line to type, with other numbers than the option's
        return meaning
    return f"{meaning}{'' if meaning.endswith('=') else ' '}{value or 'VALUE'}"
