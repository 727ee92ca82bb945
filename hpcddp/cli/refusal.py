"""What `render` leaves on a pipe when it fails.

`false | qsub` exits 0 and queues an empty job: qsub takes an empty standard input for a script. So a failed render
must leave something that every reader of a job script refuses. An invalid directive without a `#!` line does it:
OpenPBS 23.06 says "directive error" (exit 1), Slurm 22.05 wants `#!` first (exit 1), Grid Engine 8.1.9 says "invalid
option argument" (exit 2). The last line is for bash.
"""

from __future__ import annotations

REFUSAL = """\
#PBS hpcddp-render-failed
#$ -hpcddp-render-failed
echo 'hpcddp: render failed, so there is no job here' >&2
exit 2
"""
