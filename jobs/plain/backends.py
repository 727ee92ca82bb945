"""Which of torch's backends this installation can use: a sum over the ranks by each, or why not."""

import torch

import hpcddp

for backend in ("nccl", "gloo", "mpi", "ucc"):
    try:
        with hpcddp.init(backend=backend) as group:
            total = torch.tensor([group.rank + 1.0], device=group.device)
            torch.distributed.all_reduce(total)
            said = f"the sum over {group.world_size} ranks on {group.device.type} is {total.item():.0f}"
    except hpcddp.errors.HpcddpError as error:
        said = str(error)
    if hpcddp.env().rank == 0:
        print(f"{backend}: {said}")
