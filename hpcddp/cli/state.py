"""`hpcddp state`: how far a run is, by the state.json in its run folder; for people, and for job scripts.

Standard library only: it runs on a compute node between the launcher's end and the job's.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import tell, write_exactly
from hpcddp.errors import HpcddpError, LaunchError, RequestError
from hpcddp.runs.chain import is_unfinished, start_attempt
from hpcddp.runs.folder import AttemptFolder, RunFolder, find_attempt
from hpcddp.runs.state import correct_killed, read_state
from hpcddp.units import parse_count

_DESCRIPTION = """\
Say how far a run is: finished, failed, or unfinished, with step and reason.

The options below are for job scripts: they ask about their own attempt, $HPCDDP_ATTEMPT."""


def build_parser() -> VerbParser:
    """The options of `hpcddp state`."""
    parser = VerbParser(
        "state",
        _DESCRIPTION,
        example="hpcddp state runs/train",
        exits=(2, 4),
        takes_command=True,
        also={1: "with --unfinished and --end: it is not unfinished; with --chain: the chain ends here"},
    )
    parser.command_with = "begin"
    parser.usage = "hpcddp state [RUN_DIR] [--json | --unfinished | --chain N | --begin … -- command | --end]"
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="the run folder ($HPCDDP_RUN_DIR)")
    questions = parser.add_argument_group("what is asked")
    asked = questions.add_mutually_exclusive_group()
    asked.add_argument("--json", action="store_true", help="print the facts as one JSON object")
    asked.add_argument(
        "--unfinished", action="store_true", help="exit with 0 if this attempt left the run unfinished, else 1"
    )
    # what the scripts of hpcddp 0.1 type; a chain of them may be queued
    asked.add_argument("--continues", dest="unfinished", action="store_true", help=argparse.SUPPRESS)
    asked.add_argument("--end", action="store_true", help="as --unfinished, and this attempt leaves the run to others")
    questions.add_argument(
        "--signal", metavar="SIG", help="with --end: what came to the script and went on to the ranks"
    )
    questions.add_argument("--chain", metavar="N", help="print how many of N attempts are left; with 1 if it ends here")
    begin = parser.add_argument_group("the start of an attempt")
    begin.add_argument("--begin", action="store_true", help="choose and take the attempt's run; print its folder")
    begin.add_argument("--process", metavar="PID", help="the process that lives as long as the attempt")
    begin.add_argument("--container", action="store_true", help="this is a container, which may hide that process")
    begin.add_argument("--fresh", action="store_true", help="begin a new run")
    begin.add_argument("--resume", metavar="RUN", help="resume this run")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The answer on stdout, what a person should know on stderr."""
    _refuse_alone(args)
    run_dir = args.run_dir or env.get("HPCDDP_RUN_DIR")
    if not run_dir:
        raise RequestError("no run folder was given", "hpcddp state runs/NAME")
    most = None if args.chain is None else parse_count(args.chain, "--chain")
    if args.begin:
        return _begin(args, run_dir, most, env)
    if most is not None:
        return _start(find_own_attempt(env, run_dir), most)
    if args.end:
        from hpcddp.runs.lock import release_run

        attempt = find_own_attempt(env, run_dir)
        release_run(RunFolder(run_dir), attempt.name)
        if args.signal:
            _end_by_signal(attempt, args.signal)
    folder = RunFolder(run_dir)
    state = read_state(folder)
    if state is not None:
        state = correct_killed(folder, state, lambda: _is_held(folder))
    if args.unfinished or args.end:
        if state is None or not is_unfinished(state, env.get("HPCDDP_ATTEMPT")):
            return 1
        tell(f"unfinished: step {state.step} ({state.reason})")
        return 0
    if state is None:
        raise _no_state(run_dir)
    if args.json:
        import json

        print(json.dumps(state._asdict()))
    else:
        print(state)
        print(f"  epoch    {state.epoch}")
        if state.weights_sha256 is not None:
            print(f"  weights  {state.weights_sha256}")
        if state.exact is not None:
            deviations = state.exact.get("deviations") or ["no deviations"]
            print(f"  exact    {state.exact.get('method')}; {'; '.join(map(str, deviations))}")
    return 0


def _end_by_signal(attempt: AttemptFolder, signal: str) -> None:
    """The launcher may have handed on another signal: the state names the one that was sent, or nobody caught it."""
    from hpcddp.runs.state import name_signal

    if not name_signal(attempt, signal) and not os.path.exists(attempt.metrics):
        tell(
            f"{signal} came before the ranks had opened hpcddp.runtime(), which catches it: no step was made, and"
            " nothing of the run is lost (a program without hpcddp.runtime() has to catch it itself)"
        )


def _is_held(run: RunFolder) -> bool:
    """Whether an attempt holds the run, or may: hpcddp 0.1 did not say who does."""
    from hpcddp.runs.holder import describe_process
    from hpcddp.runs.lock import find_live_holder, read_holders

    mine = describe_process("", os.getpid(), {}, ())
    return not read_holders(run) or find_live_holder(run, mine, lambda _scheduler, _job: None) is not None


def _refuse_alone(args: argparse.Namespace) -> None:
    if args.begin and (args.json or args.unfinished or args.end):
        raise RequestError("--begin asks for something else than --json, --unfinished and --end", "leave out one")
    if args.chain is not None and (args.json or args.unfinished or args.end):
        raise RequestError("--chain goes with --begin, or alone", "leave out the other option")
    if args.signal and not args.end:
        raise RequestError("--signal goes with --end", "leave out --signal")
    of_begin = [name for name in ("fresh", "resume", "process", "container", "command") if getattr(args, name)]
    if of_begin and not args.begin:
        what = "a command" if of_begin[0] == "command" else f"--{of_begin[0]}"
        raise RequestError(f"{what} goes with --begin", "hpcddp state runs/NAME")


def _no_state(run_dir: str) -> RequestError:
    if not os.path.isdir(run_dir):
        of_name = os.path.join("runs", run_dir)  # where a run of this name would be
        hint = f"hpcddp state {shlex.quote(of_name)}" if os.path.isdir(of_name) else "ls runs"
        return RequestError(f"there is no run folder {run_dir}", hint)
    return RequestError(
        f"{run_dir} has no state.json: its program does not use hpcddp.runtime, or has not saved yet",
        f"ls {run_dir}/attempts/*/logs",
    )


def find_own_attempt(env: Mapping[str, str], run_dir: str) -> AttemptFolder:
    """This attempt. LaunchError outside of one."""
    attempt = find_attempt(env, run_dir)
    if attempt is None:
        raise LaunchError("HPCDDP_ATTEMPT is not set: this is no attempt of a job", "hpcddp state runs/NAME")
    return attempt


def _begin(args: argparse.Namespace, base: str, most: int | None, env: Mapping[str, str]) -> int:
    """The run's folder on stdout, and what `_start` prints; nothing if there is nothing to do."""
    from hpcddp.runs.choice import Asked
    from hpcddp.runs.command import identify_command
    from hpcddp.runs.lock import release_run
    from hpcddp.runs.start import start_run

    asked = Asked(base, identify_command(args.command), args.fresh, args.resume)
    name = find_own_attempt(env, base).name
    process = parse_count(args.process or str(os.getppid()), "--process")
    by_hand = "HPCDDP_LAUNCH" in env
    choice = start_run(asked, name, env, process=process, by_hand=by_hand, is_seen=not args.container)
    tell(f"{choice}")
    attempt = choice.run.attempt(name)
    if most is None:
        write_exactly(f"{choice.run.path}\n")
        return 0
    return _start(attempt, most, f"{choice.run.path}\n", lambda: release_run(attempt.run, name))


def _start(attempt: AttemptFolder, most: int, before: str = "", ends: Callable[[], object] = bool) -> int:
    """Nothing on stdout and status 0: the run is finished. Else `before`, and how many attempts may follow this one."""
    try:
        decision, link, left = start_attempt(attempt, most)
    except HpcddpError:
        ends()
        raise
    if not decision.starts:
        ends()
        tell(f"the chain ends here: {decision.reason}")
        return 1 if decision.is_failure else 0
    tell(f"attempt {link.turn} of at most {most}, from step {link.step}")
    write_exactly(f"{before}{left}\n")
    return 0
