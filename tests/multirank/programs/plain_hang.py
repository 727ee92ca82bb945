"""Plain DDP, without hpcddp: rank 1 never comes to the collective, or comes late from long work; or nobody sends."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

PHASES = r'"phases": \[\d'  # in a line on the use of the node


def other_work(kind: str) -> None:
    if kind == "waits":
        threading.Event().wait()
    elif kind == "thread":
        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("a thread keeps this process alive")
    elif kind == "loops":
        while True:
            pass
    elif kind == "computes":
        attempt = Path(os.environ["HPCDDP_RUN_DIR"], "attempts", os.environ["HPCDDP_ATTEMPT"])
        looks = 0
        while looks < 320 or not any(re.search(PHASES, file.read_text()) for file in attempt.glob("usage-*")):
            hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)
            print("hashed", flush=True)
            looks += 1


def main(kind: str, timeout_s: str) -> None:
    if kind == "before" and os.environ["RANK"] == "1":
        threading.Event().wait()
    dist.init_process_group("gloo")
    dist.barrier()  # with torch's own limit: on a busy machine one of them comes late
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=int(timeout_s)))
    if dist.get_rank() == 1:
        other_work(kind)
    if kind == "ring":
        dist.recv(torch.ones(1), 1 - dist.get_rank())
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


main(*sys.argv[1:])
