"""A rank that opens hpcddp's process group; one line of JSON says what it saw.

argv: the channel, and what the rank does: `ends-late` (when rank 0 has ended), `mpi-after`.
"""

import json
import os
import socket
import sys
from contextlib import suppress

import torch
import torch.distributed as dist

import hpcddp
from hpcddp.ranks.launch import Launch
from hpcddp.training.rendezvous import store

channel, ending = sys.argv[1], sys.argv[2]
seen = {"channel": store.choose_channel(Launch(os.environ, socket.gethostname()), channel), "address": "localhost"}
reach = store.reach_store


def watch(address, *args):
    seen.update(address=address)
    return reach(address, *args)


store.reach_store = watch
both = socket.has_dualstack_ipv6()
server = socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
for _ in range(2):  # a process may open one group after another
    with hpcddp.init(rendezvous=channel, backend="gloo") as group:
        addresses = [seen["address"]]
        dist.broadcast_object_list(addresses, src=group.world_size - 1)
        seen["address"] = addresses[0]
        total = torch.tensor([group.rank + 1.0])
        dist.all_reduce(total)
        port = torch.tensor(server.getsockname()[1])
        dist.broadcast(port, src=0)
        to_rank_0 = socket.create_connection((seen["address"], int(port)))  # lasts as long as rank 0
        dist.barrier()
seen.update(host=socket.gethostname(), gloo=os.environ.get("GLOO_SOCKET_IFNAME"))
if ending == "mpi-after":
    from mpi4py import MPI

    seen["mpi"] = [MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size]
if ending == "ends-late" and group.rank > 0:
    with suppress(ConnectionResetError):
        to_rank_0.recv(1)  # returns when rank 0 has ended
print(json.dumps({"rank": group.rank, "world": group.world_size, "total": total.item(), **seen}), flush=True)
if channel == "mpi4py":
    server.close()  # MPI's own end waits for all ranks
