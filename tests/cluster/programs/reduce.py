"""One rank of a process group: the sum over all ranks of rank + 1, by gloo, through `hpcddp.init()`.

With the ranks that come in argv, the time to wait for the others is 1 s, and begins when those have come. With
`nobody`, whoever waits does it in vain and for 3 s.
"""

import sys

import torch
import torch.distributed as dist

import hpcddp
from hpcddp.training.rendezvous import process_group
from hpcddp.training.rendezvous.store import wait_until

come = sys.argv[1:]
call_roll = process_group.call_roll


def call(store, me, world_size, timeout_s):
    if me.rank > 0:
        return call_roll(store, me, world_size, timeout_s)
    wait_until(lambda: store.check([f"member/{rank}" for rank in come]), timeout_s)
    return call_roll(store, me, world_size, 1.0)


if come and come != ["nobody"]:
    process_group.call_roll = call
with hpcddp.init(arrival_timeout_s=3 if come == ["nobody"] else 600) as group:
    one = torch.tensor([float(group.rank + 1)])
    dist.all_reduce(one)
    if group.rank == 0:
        print("sum:", one.item(), flush=True)
