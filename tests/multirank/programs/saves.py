"""A program without hpcddp that saves at a signal, for two seconds. Arguments: the signals that it catches; `0:USR1`:
on rank 0 alone.

`here-RANK`: it waits for one. `log-RANK`: the signals that it got, one a line, and `saved` once it has saved; `left` if
it still waits when its launcher has ended, and there is a file `over`.
"""

import os
import signal
import sys
import time
from pathlib import Path

variables = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
rank = next(os.environ[name] for name in variables if name in os.environ)
log = os.open(f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
came = []


def note(number: int, _frame: object) -> None:
    os.write(log, f"{signal.Signals(number).name[3:]}\n".encode())
    came.append(number)


for name in sys.argv[1:]:
    only, _, name = name.rpartition(":")
    if only in {"", rank}:
        signal.signal(getattr(signal, f"SIG{name}"), note)
Path(f"here-{rank}").touch()
while not came:
    if Path("over").exists():
        os.write(log, b"left\n")
        sys.exit()
    time.sleep(0.05)
for _ in range(40):
    time.sleep(0.05)
os.write(log, b"saved\n")
os.close(log)
