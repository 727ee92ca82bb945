"""One rank of a process group: the sum over all ranks of rank + 1, by gloo, through `hpcddp.init()`."""

import torch
import torch.distributed as dist

import hpcddp

with hpcddp.init(arrival_timeout_s=10) as group:
    one = torch.tensor([float(group.rank + 1)])
    dist.all_reduce(one)
    if group.rank == 0:
        print("sum:", one.item(), flush=True)
