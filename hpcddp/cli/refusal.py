"""Text that every reader of a job script refuses.

`false | qsub` exits 0 and queues an empty job: qsub takes an empty standard input for a script. So a failed render, a
mistyped verb and a help text on a pipe must leave something that every reader of a job script refuses. The schedulers'
rows have a line for each, which does it without a `#!` line before it (Slurm 22.05 wants that first: exit 1); `exit 2`
is for bash.
"""

from __future__ import annotations

from hpcddp.schedulers.registry import refused_lines


def refusal() -> str:
    """What a failed render and a mistyped verb leave on a pipe."""
    return refused_lines("hpcddp-render-failed") + "echo 'hpcddp: render failed, so there is no job here' >&2\nexit 2\n"


def no_job() -> str:
    """The first lines of a text for people that goes into a pipe or a file. In `less` they can be read past."""
    why = "exit 2  # the lines above keep schedulers from taking this text for a job, and this line bash"
    return f"{refused_lines('hpcddp-this-is-no-job-script')}{why}\n\n"
