"""One process: write to the folder argv[1] what `hpcddp env --json` says here and, if argv[2] is `mpi`, what MPI says.

Prints the name of the file it wrote, which `srun --label` prefixes with what Slurm itself holds for this task's rank.
"""

import contextlib
import io
import json
import os
import socket
import sys
from pathlib import Path

from hpcddp.cli.main import main
from hpcddp.errors import LaunchError
from hpcddp.ranks.device import choose_devices, read_gpus_per_rank, visible_devices
from hpcddp.ranks.launch import Launch

out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = main(["env", "--json"])  # before MPI_Init, which may change the environment
place = {
    "status": status,
    "found": json.loads(out.getvalue()) if status == 0 else None,
    "error": err.getvalue(),
    "host": socket.gethostname(),
    "environment": {name: value for name, value in os.environ.items() if name.startswith(("SLURM", "CUDA_"))},
}
visible = visible_devices(os.environ)
if status == 0 and visible:
    try:
        info = Launch(os.environ, place["host"]).info
        each = read_gpus_per_rank(os.environ)
        taken = choose_devices(len(visible), info.local_rank, info.local_world_size, each)
        place["device"] = list(taken) if each > 1 else taken[0]
    except LaunchError as error:
        place["device"] = str(error)
if sys.argv[2:3] == ["mpi"]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    place["library"] = MPI.Get_library_version()
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    place["mpi"] = {
        "rank": world.rank,
        "world_size": world.size,
        "local_rank": node.rank,
        "local_world_size": node.size,
    }
file = Path(sys.argv[1]) / f"{place['host']}-{os.getpid()}.json"
file.write_text(json.dumps(place))
print(f"wrote {file.name}", flush=True)
