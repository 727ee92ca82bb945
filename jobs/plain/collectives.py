"""Checks and times each collective among all ranks, each node's ranks, and pairs: python collectives.py MIB REPEAT"""

import sys
import time
from itertools import combinations

import torch
import torch.distributed as dist

import hpcddp

MIB, REPEAT = float(sys.argv[1]), int(sys.argv[2])  # size of one rank's tensor, how often


def calls(group, ranks, me, device):
    """Name -> call, the tensor it writes to, what that holds then, and where (me: on all ranks). Rank i sends i + 1."""
    n, first, last = len(ranks), ranks[0], ranks[-1]
    own = torch.full((int(MIB * 2**18),), me + 1.0, device=device)
    ramp = torch.arange(1.0, n + 1, device=device).repeat_interleave(len(own))
    out, many, mine = own.clone(), torch.empty_like(ramp), own.repeat(n)
    to, parts = list(many.chunk(n)), list(ramp.chunk(n))
    exchange = {0: lambda: dist.send(own, last), n - 1: lambda: dist.recv(out, first)}.get(me, lambda: None)
    return {
        "broadcast": (lambda: dist.broadcast(out, first, group), out, 1, me),
        "reduce": (lambda: dist.reduce(out, first, group=group), out, n * (n + 1) / 2, 0),
        "all_reduce": (lambda: dist.all_reduce(out, group=group), out, n * (n + 1) / 2, me),
        "gather": (lambda: dist.gather(own, to if me == 0 else None, first, group), many, ramp, 0),
        "scatter": (lambda: dist.scatter(out, parts if me == 0 else None, first, group), out, me + 1, me),
        "all_gather": (lambda: dist.all_gather(to, own, group), many, ramp, me),
        "reduce_scatter": (lambda: dist.reduce_scatter(out, parts, group=group), out, n * (me + 1), me),
        "all_to_all": (lambda: dist.all_to_all_single(many, mine, group=group), many, ramp, me),
        "send_recv": (exchange, out, 1, n - 1),
        "barrier": (lambda: dist.barrier(group), out, me + 1, me),
    }


with hpcddp.init() as world:
    names, mistakes, groups = [], 0, {"all": list(range(world.world_size))}
    groups |= {host: [m.rank for m in world.members if m.host == host] for host in world.hosts}
    groups |= {f"{a}-{b}": [a, b] for a, b in combinations(range(min(8, world.world_size)), 2)}
    for name, ranks in groups.items():
        group, found = dist.new_group(ranks), torch.zeros(10, 2, dtype=torch.float64)
        me = ranks.index(world.rank) if world.rank in ranks else None
        table = {} if me is None or len(ranks) == 1 else calls(group, ranks, me, world.device)
        for row, (call, written, expected, where) in zip(found, table.values(), strict=False):
            row[0] = float("inf")
            for _ in range(REPEAT):
                written.fill_(me + 1)
                dist.barrier(group)
                begin = time.perf_counter()
                call()
                world.device.type == "cuda" and torch.cuda.synchronize()
                row[0] = min(row[0].item(), time.perf_counter() - begin)
                row[1] += me == where and bool((written != expected).any())
        dist.all_reduce(found := found.to(world.device), dist.ReduceOp.MAX)  # the slowest rank's time
        names = names or list(table)
        for what, (seconds, wrong) in zip(names, found.tolist(), strict=False):
            mistakes += wrong
            world.is_first and print(f"{name:10} {what:14} {'WRONG' if wrong else 'right'} {seconds * 1000:9.3f} ms")
sys.exit(mistakes > 0)
