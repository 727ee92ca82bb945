"""A rank that opens hpcddp's process group; one line of JSON says what it saw.

argv: what the rank does: `ends-late` (when rank 0 has ended), `fails` (the last rank, with status 3), `mpi-after`.
"""

import json
import os
import socket
import sys
from contextlib import suppress

import torch
import torch.distributed as dist

import hpcddp
from hpcddp.training.rendezvous import process_group

ending = sys.argv[1]
seen = {}
arrange = process_group.agree_on_store_address


def watch(*args):
    address = arrange(*args)
    seen.update(channel=address.channel, address=address.address, held=address.listener is not None)
    return address


process_group.agree_on_store_address = watch
both = socket.has_dualstack_ipv6()
server = socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
for _ in range(2):  # a process may open one group after another
    with hpcddp.init(backend="gloo") as group:
        total = torch.tensor([group.rank + 1.0])
        dist.all_reduce(total)
        port = torch.tensor(server.getsockname()[1])
        dist.broadcast(port, src=0)
        to_rank_0 = socket.create_connection((seen["address"], int(port)))  # lasts as long as rank 0
        dist.barrier()
seen.update(host=socket.gethostname(), gloo=os.environ.get("GLOO_SOCKET_IFNAME"))
if ending == "fails" and group.rank == group.world_size - 1:
    sys.exit(3)
if ending == "mpi-after":
    from mpi4py import MPI

    seen["mpi"] = [MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size]
if ending == "ends-late" and group.rank > 0:
    with suppress(ConnectionResetError):
        to_rank_0.recv(1)  # returns when rank 0 has ended
print(json.dumps({"rank": group.rank, "world": group.world_size, "total": total.item(), **seen}), flush=True)
