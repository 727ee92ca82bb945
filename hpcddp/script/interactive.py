"""The command for a shell on the nodes that a script asks for: its directives, without those of batch jobs."""

from __future__ import annotations

import re

from hpcddp.errors import RequestError
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.spec import quote_words


def interactive_command(name: str, script: str) -> str:
    """One line to type, for the scheduler of that name. Raises RequestError where there are no interactive jobs."""
    scheduler = find_scheduler(name)
    program, left_out = scheduler.commands.interactive, scheduler.directives.batch_only
    if not program:
        raise RequestError(f"{scheduler.title} has no interactive jobs", "run the command itself")
    prefix = f"{scheduler.directives.prefix} "
    options = [line.removeprefix(prefix) for line in script.splitlines() if line.startswith(prefix)]
    kept = [option for option in options if not (left_out and re.match(left_out, option))]
    return quote_words([*program, *(word for option in kept for word in option.split(" "))])
