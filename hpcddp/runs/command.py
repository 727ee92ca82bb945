"""Which command a run was made for: its program and arguments, and the name that a run gets from them.

Two commands are the same if their words are, but for the path of the interpreter or program and the interpreter's own
options: `/opt/env/bin/python3.12 -u train.py --lr 1` is `python train.py --lr 1`. Nodes, walltime and the content of
the script are no part of it: a script that was corrected resumes its run.
"""

from __future__ import annotations

import os
import re

from hpcddp.record import TYPE_CHECKING
from hpcddp.runs.folder import job_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_NAME = 3  # characters: a shorter job id may be any number
# As `mktemp` and Python's tempfile name them. What a person calls a file in /tmp may tell two trainings apart.
_TEMPORARY = r"(?:^|(?<=[\s,:;=]))/(?:var/)?tmp/tmp(?:\.\w{10}|[a-z0-9_]{8})(?![^\s,:;=/])[^\s,:;=]*"
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python whose value is a word of its own


def identify_command(words: Sequence[str]) -> tuple[str, ...]:
    """The words that make a command what it is."""
    if not words:
        return ()
    program, rest = os.path.basename(words[0]), list(words[1:])
    if not re.fullmatch(r"python[\d.]*", program):
        return (program, *rest)
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "-m", "-c"}:
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    if rest and not rest[0].startswith("-"):
        rest[0] = os.path.normpath(rest[0])
    return ("python", *rest)


def identify_program(command: tuple[str, ...]) -> tuple[str, ...]:
    """What `identify_command` gave, without the arguments of the script or module."""
    return command[: 3 if command[:2] == ("python", "-m") else 2]


def leave_out_start(command: tuple[str, ...], attempt: str, job: str) -> tuple[str, ...]:
    """The command without what each start of a job has otherwise: the attempt's name, or that of the job's first one,
    which `$HPCDDP_STAGED` has, the job's id, temporary files."""
    known = {re.escape(name) for name in (job_of(attempt), job) if len(name) >= _LEAST_NAME}
    names = [rf"\b{name}(?:\.\d+)?\b" for name in known] or [rf"\b{re.escape(attempt)}\b"]
    changing = re.compile("|".join([*names, _TEMPORARY]))
    return tuple(changing.sub("…", word) for word in command)


def name_command(words: Sequence[str]) -> str:
    """A run without a name is called after its module or script, else after its program; `job` if nothing is left."""
    known = identify_command(words)
    if known[:2] == ("python", "-m") and len(known) > 2:
        return known[2]
    script = next((word for word in words if word.endswith((".py", ".sh"))), words[0])
    return script.rsplit("/", 1)[-1].removesuffix(".py").removesuffix(".sh") or "job"
