"""One rank: write to the folder argv[1] what hpcddp found, what `exec` exported, and what MPI itself says."""

import json
import os
import sys

import hpcddp

place = hpcddp.env()  # before MPI_Init, which may change the environment
KEYS = ("rank", "world_size", "local_rank", "local_world_size")
report = {
    "hpcddp": {key: getattr(place, key) for key in ("launcher", *KEYS)},
    "exported": {key: int(os.environ.get(key.upper(), -1)) for key in KEYS},
    "master": [os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")],
}
if sys.argv[2:] == ["torchrun"]:  # its workers are in no MPI world
    rank = int(os.environ["RANK"])
else:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    rank = world.rank
    report["library"] = MPI.Get_library_version()
    report["mpi"] = {"rank": rank, "world_size": world.size, "local_rank": node.rank, "local_world_size": node.size}
with open(f"{sys.argv[1]}/rank-{rank}.json", "w", encoding="utf-8") as out:
    json.dump(report, out)
