"""What the ranks of the tests of agreement run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import RequestError


def _call(rt: Any, what: str) -> None:
    if what == "save":
        rt.save()
    elif what == "save_best":
        rt.save_best(1.0)
    elif what == "save_model":
        rt.save_model(f"{rt.folder.run.path}/model.pt")
    elif what == "signal":
        rt._saves._watch._signals.received = signal.SIGTERM
    elif what == "no time for a tail":
        rt._saves._watch.flags = lambda steps=2, *, tail=False: ("deadline",) if tail else ()
    else:
        getattr(rt, what)("because")


def call_on_ranks(argument: dict[str, Any]) -> None:
    """Each case of [what, where, ranks]: `what` in this step, after this epoch ("epoch"), or after the loop ("after")
    on these ranks. Each rank writes what came of each: steps, why it stopped, why it finished; or the error."""
    found: list[Any] = []
    with hpcddp.init() as group:
        for nth, case in enumerate(argument["cases"]):
            try:
                found.append(_train(group, f"{argument['folder']}/{nth}", *case))
            except RequestError as error:
                found.append(str(error))
    Path(argument["folder"], f"{group.rank}.json").write_text(json.dumps(found))


def _train(group: Any, folder: str, what: str, where: Any, ranks: list[int]) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 4, dtype=torch.float64), torch.randint(2, (24,)))
    with hpcddp.runtime(group=group, run_dir=folder, save_every=5, keep_checkpoints=100) as rt:
        mine = group.rank in ranks
        model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(data, batch_size=2))
        for epoch in rt.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(cross_entropy(model(x), y))
                optimizer.step()
                if rt.steps == where and mine:
                    _call(rt, what)
            if where == "epoch" and epoch == 0 and mine:
                if what == "break":
                    break
                _call(rt, what)
        if where == "after" and mine:
            _call(rt, what)
        if where == "epoch" and what == "break" and 0 in ranks:
            rt.sum(1)
    return [rt.steps, rt.stop_reason, None if rt.stop_reason else rt._saves.finish_reason]
