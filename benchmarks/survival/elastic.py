"""Plain DDP as PyTorch's own tutorial on fault tolerance has it, for torchrun: a snapshot every few steps, loaded at
each start. Beside it: tests/multirank/programs/struck.py, the same training with hpcddp.

Arguments: steps, kind of fault, host, step, seconds per step. Files: `made`, one line per step of rank 0; `again`, its
first step after the fault; `weights`, their SHA-256 at the end.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/multirank/programs"))
from faults import strike

steps, kind, struck, at, step_s = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
mark, snapshot = Path(f"struck-{at}"), Path("snapshot.pt")
had_struck = mark.exists()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(8 * steps, 2), torch.randn(8 * steps, 1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
if snapshot.exists():
    state = torch.load(snapshot)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))  # 8 on 4 ranks, as the tutorial's is per rank
for x, y in loader:
    if step >= steps:
        break
    if os.uname().nodename.partition(".")[0] == struck and step == at and not mark.exists():
        mark.touch()
        strike(kind)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    step += 1
    if rank == 0:
        with Path("made").open("a") as made:
            made.write(f"{step}\n")
        if had_struck:
            Path("again").touch()
            had_struck = False
        if step % 3 == 0:
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "new.pt"
            )
            os.replace("new.pt", snapshot)
    time.sleep(step_s)
if rank == 0:
    numbers = b"".join(tensor.detach().numpy().tobytes() for tensor in model.module.state_dict().values())
    Path("weights").write_text(f"{hashlib.sha256(numbers).hexdigest()} {step}\n")
dist.destroy_process_group()
