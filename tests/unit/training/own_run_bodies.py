"""What the ranks of a job do whose script opens a run of its own in each start, one start after the other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import HpcddpError
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.lock import Holder, take_run

#: (learning rate, data) of each start: the same training twice, and two others.
STARTS = ((0.1, 1.0), (0.1, 1.0), (0.1, 2.0), (0.4, 1.0))


def start_four_times(folder: str) -> None:
    job, rank, said = RunFolder(f"{folder}/t"), int(os.environ["RANK"]), []
    for number, (lr, number_in_data) in enumerate(STARTS, 1):
        attempt = f"7.{number}"
        if not rank:  # as the supervisor does
            holder = Holder(attempt, "login", "another", 8, "8", "slurm", "7")
            take_run(job, holder, lambda *_: "gone", before=f"7.{number - 1}")
            os.makedirs(job.attempt(attempt).path)
        os.environ |= {"HPCDDP_RUN_DIR": job.path, "HPCDDP_ATTEMPT": attempt, "SLURM_JOB_ID": "7"}
        try:
            said.append(_train(f"{folder}/fold", lr, number_in_data))
        except HpcddpError as error:
            said.append(str(error))
    Path(f"{folder}/{rank}.json").write_text(json.dumps(said))


def _train(run_dir: str, lr: float, number: float) -> list[float]:
    """Steps, how many of them in this start, and a sum over the ranks behind the loop."""
    made = 0
    data = DataLoader(TensorDataset(torch.full((8, 2), number)), batch_size=4)
    with hpcddp.runtime(run_dir=run_dir) as rt:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model, optimizer, loader, test = rt.prepare(model, optimizer, data, DataLoader(data.dataset, batch_size=4))
        for _ in rt.epochs(1):
            for (x,) in loader:
                made += 1
                rt.backward(model(x).sum())
                rt.step(optimizer)
        return [rt.steps, made, rt.sum(sum(len(x) for (x,) in test))]
