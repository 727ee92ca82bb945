"""One rank of an env:// program that knows nothing of hpcddp: DDP's gradients, and the same by one process.

Writes to the folder argv[1] the largest difference between the two, in double precision, and a sum over the ranks.
The global batch does not divide by the number of ranks, so that the shares are uneven.
"""

import copy
import gc
import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it later, and its functions would keep the group as a default

from hpcddp.batchplan import plan_batch

GLOBAL_BATCH = 13

dist.init_process_group("gloo", init_method="env://")
rank, world_size = dist.get_rank(), dist.get_world_size()
total = torch.tensor(float(rank + 1))
dist.all_reduce(total)

torch.manual_seed(0)  # every rank makes the same model and the same global batch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()
x, y = torch.randn(GLOBAL_BATCH, 8).double(), torch.randint(4, (GLOBAL_BATCH,))
alone = copy.deepcopy(model)
torch.nn.functional.cross_entropy(alone(x), y).backward()

plan = plan_batch(GLOBAL_BATCH, world_size)
shares = [plan.share(number) for number in range(world_size)]
mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
parallel = torch.nn.parallel.DistributedDataParallel(model)
# DDP takes the mean over ranks of the ranks' means: with uneven shares each must be weighted to make the global mean.
loss = torch.nn.functional.cross_entropy(parallel(x[mine]), y[mine]) * shares[rank] * world_size / GLOBAL_BATCH
loss.backward()

pairs = zip(model.parameters(), alone.parameters(), strict=True)
difference = max(float((one.grad - other.grad).abs().max()) for one, other in pairs)
with open(f"{sys.argv[1]}/rank-{rank}.json", "w", encoding="utf-8") as out:
    json.dump({"world_size": world_size, "sum": float(total), "difference": difference}, out)
# Torch aborts at exit in one of some 20 runs where a DDP wrapper on gloo outlives the process group.
del parallel, loss
gc.collect()
dist.barrier()
dist.destroy_process_group()
