"""The ways to bring up a process group that PyTorch has, from one launch: python init.py env|tcp|file

There is no init_method="mpi://": mpirun starts the ranks, and hpcddp exec translates what mpirun told them.
"""

import os
import sys

import torch
import torch.distributed as dist

import hpcddp

place = hpcddp.env()  # from what the launcher set; RANK, WORLD_SIZE and the others are in os.environ, too
if sys.argv[1] == "env":  # MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
    dist.init_process_group(init_method="env://")
elif sys.argv[1] == "tcp":
    address = f"tcp://{place.master_addr}:{place.master_port}"
    dist.init_process_group(init_method=address, rank=place.rank, world_size=place.world_size)
else:  # a file that all ranks see, with a new name in each attempt: an old one would join ranks that are gone
    file = os.path.abspath(os.path.join(os.environ["HPCDDP_RUN_DIR"], f"init-{os.environ['HPCDDP_ATTEMPT']}"))
    dist.init_process_group(init_method=f"file://{file}", rank=place.rank, world_size=place.world_size)

device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
total = torch.tensor([place.rank], device=device)
dist.all_reduce(total)
assert total.item() == sum(range(place.world_size))
if place.rank == 0:
    print(f"{sys.argv[1]}: {place.world_size} ranks met")
dist.destroy_process_group()
