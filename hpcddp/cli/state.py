"""`hpcddp state`: how far a run is, by the state.json in its run folder; for people, and for job scripts.

Standard library only: it runs on a compute node between the launcher's end and the job's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from hpcddp.cli.attempt import attempt_folder
from hpcddp.cli.parser import VerbParser
from hpcddp.errors import LaunchError, RequestError
from hpcddp.script.chain import Link, judge, step_of
from hpcddp.units import parse_count

_DESCRIPTION = """\
Say how far a run is: finished, failed, or to be continued, with step and reason.

Job scripts ask with the options below, about the attempt that they are."""


def build_parser() -> VerbParser:
    """The options of `hpcddp state`."""
    parser = VerbParser("state", _DESCRIPTION)
    parser.usage = "hpcddp state [RUN_DIR] [--continues | --chain N]"
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="the run folder ($HPCDDP_RUN_DIR)")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--continues", action="store_true", help="exit with 0 if this attempt is to be continued, else 1"
    )
    asked.add_argument("--chain", metavar="N", help="print how many of N attempts are left; with 1 if it ends here")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The answer on stdout, what a person should know on stderr."""
    run_dir = args.run_dir or env.get("HPCDDP_RUN_DIR")
    if not run_dir:
        raise RequestError("no run folder was given", "hpcddp state runs/NAME")
    state = read_state(run_dir)
    if args.chain is not None:
        return _begin(run_dir, state, parse_count(args.chain, "--chain"), env)
    if args.continues:
        return _end(state, env)
    if state is None:
        raise RequestError(f"{run_dir} has no state.json that can be read", "hpcddp state runs/NAME")
    print(describe(state))
    return 0


def read_state(run_dir: str) -> dict[str, Any] | None:
    """What the ranks wrote last; None if they did not, or something else is there."""
    return _read_json(os.path.join(run_dir, "state.json"))


def describe(state: Mapping[str, Any]) -> str:
    """One line, such as `continue at step 300 (deadline), attempt 1234.pbs1`."""
    return f"{state.get('status')} at step {step_of(state)} ({state.get('reason')}), attempt {state.get('attempt')}"


def _end(state: Mapping[str, Any] | None, env: Mapping[str, str]) -> int:
    own = state is not None and state.get("attempt") == env.get("HPCDDP_ATTEMPT")  # any program may run without one
    if state is None or not own or state.get("status") != "continue":
        return 1
    print(f"hpcddp: to be continued: step {step_of(state)} ({state.get('reason')})", file=sys.stderr)
    return 0


def _begin(run_dir: str, state: dict[str, Any] | None, most: int, env: Mapping[str, str]) -> int:
    """Nothing on stdout and status 0: the run is finished. Else the number of attempts left behind this one."""
    folder = attempt_folder({**env, "HPCDDP_RUN_DIR": run_dir})
    if folder is None:
        raise LaunchError("HPCDDP_ATTEMPT is not set: this is no attempt of a job", "hpcddp state runs/NAME")
    attempt = os.path.basename(folder)
    before = _find_before(os.path.dirname(folder), attempt)
    verdict = judge(state, before)
    if verdict.goes_on:
        turn = before.turn + 1 if before else 1
        _write_json(os.path.join(folder, "chain.json"), {"turn": turn, "of": most, "step": step_of(state)})
        print(f"hpcddp: attempt {turn} of at most {most}, from step {step_of(state)}", file=sys.stderr)
        print(max(most - turn, 0))
        return 0
    print(f"hpcddp: the chain ends here: {verdict.reason}", file=sys.stderr)
    if not verdict.is_failure:
        return 0
    stopped = {"status": "failed", "reason": f"the chain stopped: {verdict.reason}", "attempt": attempt}
    _write_json(os.path.join(run_dir, "state.json"), {"step": 0, "epoch": 0, **(state or {}), **stopped})
    return 1


def _find_before(attempts: str, attempt: str) -> Link | None:
    """The attempt that queued this one: it wrote down the id that its scheduler gave."""
    for name in sorted(os.listdir(attempts)):
        try:
            with open(os.path.join(attempts, name, "next"), encoding="utf-8") as file:
                queued = file.read()
        except OSError:
            continue
        begun = _read_json(os.path.join(attempts, name, "chain.json"))
        if name != attempt and begun is not None and _job_number(queued) == _job_number(attempt):
            return Link(name, int(begun["turn"]), int(begun["step"]))
    return None


def _job_number(text: str) -> str:
    """`1234` of PBS's `1234.pbs1`, of sbatch's `1234;cluster` and of what qsub says around it."""
    found = re.search(r"\d+", text)
    return found[0] if found else text


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _write_json(path: str, content: Mapping[str, Any]) -> None:
    """Replaced as a whole, so that a reader never sees half of it."""
    partial = f"{path}.tmp-{os.getpid()}"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)
