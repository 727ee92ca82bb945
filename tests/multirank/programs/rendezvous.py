"""A rank that opens hpcddp's process group and leaves it at its own pace; one line of JSON says what it saw.

argv: the channel, and what the rank does: `ends-late`, `fails` (the last rank, with status 3), `mpi-after`.
"""

import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist

import hpcddp
from hpcddp.training.rendezvous import process_group

channel, ending = sys.argv[1], sys.argv[2]
seen = {}
arrange = process_group.agree_on_store_address


def watch(*args):
    address = arrange(*args)
    seen.update(channel=address.channel, address=address.address, held=address.listener is not None)
    return address


process_group.agree_on_store_address = watch
for _ in range(2):  # a process may open one group after another
    with hpcddp.init(rendezvous=channel, backend="gloo") as group:
        total = torch.tensor([group.rank + 1.0])
        dist.all_reduce(total)
seen.update(host=socket.gethostname(), gloo=os.environ.get("GLOO_SOCKET_IFNAME"))
if ending == "fails" and group.rank == group.world_size - 1:
    sys.exit(3)
if ending == "mpi-after":
    from mpi4py import MPI

    seen["mpi"] = [MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size]
time.sleep(group.rank / group.world_size)  # rank 0 ends long before the others
print(json.dumps({"rank": group.rank, "world": group.world_size, "total": total.item(), **seen}), flush=True)
