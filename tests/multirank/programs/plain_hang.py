"""Plain DDP, without hpcddp: rank 1 never comes to the collective, comes late from one long call, or goes first."""

from __future__ import annotations

import datetime
import hashlib
import sys
import threading

import torch
import torch.distributed as dist


def other_work(kind: str) -> None:
    if kind == "waits":
        threading.Event().wait()
    elif kind == "computes":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 8_000_000)


def main(kind: str, timeout_s: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=int(timeout_s)))
    dist.barrier()
    if dist.get_rank() == 1:
        other_work(kind)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


main(*sys.argv[1:])
