"""The one place that runs a scheduler's programs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from hpcddp.errors import SchedulerError
from hpcddp.scheduler.commands import Answer, check_deleted, deletion, question, verdict

_TIMEOUT_S = 60


def run_program(argv: list[str], env: Mapping[str, str], stdin: str = "") -> Answer:
    """One program to its end. Raises SchedulerError when it is not there, or does not answer in a minute."""
    try:
        done = subprocess.run(
            argv,
            input=stdin.encode(errors="surrogateescape"),
            env=dict(env),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except OSError as e:
        raise SchedulerError(f"{argv[0]} cannot be run: {e.strerror}", f"which {argv[0]}") from e
    except subprocess.TimeoutExpired as e:
        raise SchedulerError(f"{argv[0]} has not answered in {_TIMEOUT_S} s", "try again, or leave out =live") from e
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def ask_scheduler(scheduler: str, script: str, env: Mapping[str, str]) -> str:
    """What the live scheduler says of a script. Nothing runs, and nothing stays queued.

    Raises SchedulerError with the scheduler's own words if it refuses the script.
    """
    version = run_program(["qsub", "--version"], env) if scheduler == "pbs" else None
    answer = run_program(question(scheduler, version and version.stdout + version.stderr), env, script)
    delete = deletion(scheduler, answer)
    if delete:
        check_deleted(delete, run_program(delete, env))
    return verdict(scheduler, answer)
