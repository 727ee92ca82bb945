"""When to choose each row of rows.py, and what it sends: as a kind of splits.py, or in words."""

from __future__ import annotations

_OLD = "a script is written like this already"
#: name of the row -> when to choose it, and the split whose bytes it sends
_CHOICES = {
    "the article's job on 1 and 4 nodes of ABCI 3.0": ("images in folders, on ABCI", "ddp"),
    "DDP by `hpcddp.runtime`": ("a new script, and the model fits on one GPU with gradients and optimizer", "ddp"),
    "ZeRO-1 by `hpcddp.runtime`": ("only the optimizer's state is too large", "zero1"),
    "FSDP2 by `hpcddp.runtime`": ("weights or gradients are too large, on one node", "fsdp"),
    "HSDP by `hpcddp.runtime` (here: 2 copies of 2 shards)": ("the same on several nodes, if it fits on one", "hsdp"),
    "FSDP2 over tensor parallel by `hpcddp.runtime`": (
        "a block is too large for one GPU, or there are more ranks than samples",
        "fsdp+tensor",
    ),
    "DDP with a model on two GPUs of each rank (here both halves are on the CPU, a stand-in)": (
        "the model is split by hand already. New ones: FSDP2, where both GPUs compute",
        "two-devices",
    ),
    "DDP": ("you want nothing but torch", "ddp"),
    "the MNIST loop on images from a folder": ("you come from the tutorials", "ddp"),
    "torchrun, one agent per node": (f"{_OLD}, and its command is torchrun", "ddp"),
    "torchrun, elastic inside the allocation (here: a rank fails, and all start again)": (
        "ranks fail now and then, and the job has hours left",
        "ddp",
    ),
    "`torch.distributed.launch`": (f"{_OLD}. It is deprecated: torchrun", "ddp"),
    "`mp.spawn` in a script for one node, unchanged": (f"{_OLD}, and one node is enough", "ddp"),
    "`nn.DataParallel`": ("never: DDP is faster, also on one node", "all through GPU 0"),
    "ZeRO-1 by hand": ("the optimizer's state is too large, in a script of plain torch", "zero1"),
    "FSDP2 by hand": ("weights or gradients are too large, in a script of plain torch", "fsdp"),
    "HSDP by hand": ("FSDP2 by hand waits for the network between nodes", "hsdp"),
    "tensor parallel (2 ranks), FSDP2 with it (4 ranks), by hand": (
        "a block is too large for one GPU, in a script of plain torch",
        "fsdp+tensor",
    ),
    "FSDP1 with size-based wrapping": (f"{_OLD}. New ones: FSDP2", "fsdp"),
    "sequence parallel by torch's styles": ("tensor parallel, and activations are too large", "tensor"),
    "context parallel by hand: keys and values gathered": (
        "one sequence is too long for one GPU",
        "ddp, and keys and values",
    ),
    "pipeline by hand, 1F1B": ("the network is slow, and the layers are many and alike", "pipeline"),
    "pipeline by hand, GPipe": ("you want the simplest schedule; 1F1B keeps fewer activations", "pipeline"),
    "DeviceMesh and DTensor by hand": (
        "you divide a computation that is no layer of torch",
        "as its tensors are placed",
    ),
    "init by environment, TCP, file": ("you want to know how ranks meet", "-"),
    "backends nccl, gloo, mpi, ucc (here: gloo; the others are refused with what they need)": (
        "you want to know what a torch has",
        "-",
    ),
    "all collectives, among all ranks and per pair": ("a network is new, or slow", "-"),
    "Accelerate": (_OLD, "ddp"),
    "`notebook_launcher`, unchanged": ("a notebook is written like this already", "ddp"),
    "HF Trainer": (_OLD, "ddp"),
    "Lightning Trainer": (_OLD, "ddp"),
    "Lightning Fabric": (_OLD, "ddp"),
    "DeepSpeed ZeRO-1": (f"{_OLD}, or state is to go to CPUs or disks", "ddp"),
    "DeepSpeed ZeRO-2": ("the same, and gradients are too large", "ddp"),
    "DeepSpeed ZeRO-3": ("the same, and weights are too large", "fsdp"),
}
NAMES = frozenset(_CHOICES)


def when(name: str) -> str:
    return _CHOICES[name][0]


def sends(name: str) -> str:
    return _CHOICES[name][1]
