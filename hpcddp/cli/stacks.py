"""`hpcddp stacks`: where the ranks of a running job stand, as Python stacks."""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_answer
from hpcddp.errors import RequestError
from hpcddp.login.find_run import find_run, format_run
from hpcddp.login.judge import find_status
from hpcddp.login.on_disk import read_on_disk
from hpcddp.runs.folder import AttemptFolder, RunFolder, cannot_write
from hpcddp.runs.stacks import RankStacks, format_group, group_ranks, read_answer, request_stacks

_DESCRIPTION = """\
Say where each rank of a running job stands: its Python stack, outermost function first, ranks with the same stack once.
Each rank writes it at a signal (SIGURG), also one that computes or waits, and runs on. For any Python program that
hpcddp started, with hpcddp.runtime() or without, also inside torchrun.

RUN is a name below runs/, a run's folder, or the id of its job. The question goes through the run's folder, which the
job looks at every few seconds: no port is open for it."""
_PATIENCE_S = 60.0
_POLL_S = 0.2


def build_parser() -> VerbParser:
    parser = VerbParser("stacks", _DESCRIPTION, example="hpcddp stacks train", exits=(2,))
    parser.usage = "hpcddp stacks RUN [--threads] [--json]"
    parser.add_argument("run", metavar="RUN", help="a name, a folder or a job id")
    parser.add_argument("--threads", action="store_true", help="the stacks of all threads, not of the first alone")
    parser.add_argument("--json", action="store_true", help="print the groups as one JSON object")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    run = find_run(args.run)
    attempt = _find_attempt(run, env)
    groups = group_ranks(_ask(attempt), threads=args.threads)
    paths = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    libraries = [path + os.sep for path in (*paths, os.getcwd())]
    record = {"run": run.path, "attempt": attempt.name, "groups": groups}
    print_answer(record, "\n".join(format_group(one, libraries) for one in groups), as_json=args.json)
    return 0


def _find_attempt(run: RunFolder, env: Mapping[str, str]) -> AttemptFolder:
    """The one that runs. RequestError if none does."""
    found = find_status([run], env).runs[0]
    on_disk = read_on_disk(run)
    if on_disk.holder is None or on_disk.ended or found.state not in {"running", "unknown"}:
        hint = f"hpcddp {'status' if found.lives else 'diagnose'} {format_run(run)}"
        raise RequestError(f"no rank of {run.path} runs: it is {found.state}", hint)
    return run.attempt(on_disk.holder.attempt)


def _ask(attempt: AttemptFolder) -> list[RankStacks]:
    try:
        request = request_stacks(attempt)
    except OSError as error:
        raise cannot_write(attempt.run, error) from error
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        if (ranks := read_answer(attempt, request)) is not None:
            return ranks
        time.sleep(_POLL_S)
    raise RequestError(
        f"the job of {attempt.run.path} has not answered in {_PATIENCE_S:.0f} s (attempt {attempt.name})",
        f"hpcddp status {format_run(attempt.run)}; again, where its file system shows new files late",
    )
