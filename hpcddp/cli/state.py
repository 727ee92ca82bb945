"""`hpcddp state`: how far a run is, for the job scripts of hpcddp 0.1, which ask it; people ask `hpcddp status`."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import tell, write_exactly
from hpcddp.errors import LaunchError, RequestError
from hpcddp.runs.chain import is_unfinished, start_attempt
from hpcddp.runs.folder import AttemptFolder, RunFolder, find_attempt
from hpcddp.runs.state import correct_killed, read_state
from hpcddp.units import parse_count

_DESCRIPTION = """\
For the job scripts of hpcddp 0.1, of which a chain may be queued: they ask about their own attempt, $HPCDDP_ATTEMPT.
People ask: hpcddp status RUN."""


def build_parser() -> VerbParser:
    """The options of `hpcddp state`."""
    parser = VerbParser(
        "state",
        _DESCRIPTION,
        example="hpcddp status runs/train",
        exits=(2, 4),
        also={1: "with --unfinished: it is not unfinished; with --chain: the chain ends here"},
    )
    parser.usage = "hpcddp state [RUN_DIR] --unfinished | --chain N"
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="the run folder ($HPCDDP_RUN_DIR)")
    asked = parser.add_argument_group("what is asked").add_mutually_exclusive_group()
    asked.add_argument(
        "--unfinished", action="store_true", help="exit with 0 if this attempt left the run unfinished, else 1"
    )
    asked.add_argument("--continues", dest="unfinished", action="store_true", help=argparse.SUPPRESS)
    asked.add_argument("--chain", metavar="N", help="print how many of N attempts are left; with 1 if it ends here")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The answer on stdout, what a person should know on stderr."""
    run_dir = args.run_dir or env.get("HPCDDP_RUN_DIR")
    if not args.unfinished and args.chain is None:
        raise RequestError(
            "hpcddp state is hpcddp status now", f"hpcddp status {shlex.quote(run_dir) if run_dir else 'RUN'}"
        )
    if not run_dir:
        raise RequestError("no run folder was given", "hpcddp status runs/NAME")
    if args.chain is not None:
        return _start(find_own_attempt(env, run_dir), parse_count(args.chain, "--chain"))
    folder = RunFolder(run_dir)
    state = read_state(folder)
    if state is not None:
        state = correct_killed(folder, state, lambda: _is_held(folder))
    if state is None or not is_unfinished(state, env.get("HPCDDP_ATTEMPT")):
        return 1
    tell(f"unfinished: step {state.step} ({state.reason})")
    return 0


def _is_held(run: RunFolder) -> bool:
    """Whether an attempt holds the run, or may: hpcddp 0.1 did not say who does."""
    from hpcddp.runs.holder import describe_process
    from hpcddp.runs.lock import find_live_holder, read_holders

    mine = describe_process("", os.getpid(), {}, ())
    return not read_holders(run) or find_live_holder(run, mine, lambda _scheduler, _job: None) is not None


def find_own_attempt(env: Mapping[str, str], run_dir: str) -> AttemptFolder:
    """This attempt. LaunchError outside of one."""
    attempt = find_attempt(env, run_dir)
    if attempt is None:
        raise LaunchError("HPCDDP_ATTEMPT is not set: this is no attempt of a job", "hpcddp status runs/NAME")
    return attempt


def _start(attempt: AttemptFolder, most: int) -> int:
    """Nothing on stdout and status 0: the run is finished. Else how many attempts may follow this one."""
    decision, link, left, _ = start_attempt(attempt, most)
    if not decision.starts:
        tell(f"the chain ends here: {decision.reason}")
        return 1 if decision.is_failure else 0
    tell(f"attempt {link.turn} of at most {most}, from step {link.step}")
    write_exactly(f"{left}\n")
    return 0
