"""The command for a shell on the nodes a script asks for: its directives, without those of batch jobs alone."""

from __future__ import annotations

import re

from hpcddp.errors import RequestError
from hpcddp.script.words import quote_words

# scheduler -> prefix, program, options of batch jobs alone
_FORMS = {
    "pbs": ("#PBS ", ("qsub", "-I"), r"-[jorkhJmM]\b"),
    "slurm": ("#SBATCH ", ("salloc",), r"--(output|requeue|no-requeue|array|hold|signal)\b"),
    "gridengine": ("#$ ", ("qrsh",), r"-([jorhtS]|tc|cwd)\b"),
}


def interactive_command(scheduler: str, script: str) -> str:
    """One line to type. Raises RequestError where there is no scheduler to ask."""
    if scheduler not in _FORMS:
        raise RequestError("there is no scheduler here to ask for an interactive job", "run the command itself")
    prefix, program, left_out = _FORMS[scheduler]
    options = [line.removeprefix(prefix) for line in script.splitlines() if line.startswith(prefix)]
    words = [word for option in options if not re.match(left_out, option) for word in option.split(" ")]
    return quote_words([*program, *words])
