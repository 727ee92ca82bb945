"""What the ranks of the tests of agreement run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training import saves


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


def call_on_ranks(argument: list[Any]) -> None:
    """`what` in this step, after this epoch ("epoch"), or after the loop ("after") on these ranks."""
    folder, what, where, ranks, sharing = argument
    saves._TOGETHER_S = 600.0 if len(ranks) == 2 else 0.1  # nobody else will ask
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 4, dtype=torch.float64), torch.randint(2, (24,)))
    with hpcddp.runtime(run_dir=f"{folder}/run", save_every=5, keep_checkpoints=100) as rt:
        mine = rt.group.rank in ranks
        model, optimizer, loader = rt.prepare(model, optimizer, DataLoader(data, batch_size=2))
        if sharing:
            rt._record.sums.steps_shared = 4
            rt._record.sums._propose = lambda: 4
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
    found = [rt.steps, rt.stop_reason, None if rt.stopping else rt._saves.finish_reason]
    Path(folder, f"{rt.group.rank}.json").write_text(json.dumps(found))


class Rows(IterableDataset):
    """A stream that says how many samples it has."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Any:
        return (torch.full((1,), float(number)) for number in range(self.samples))


class Unlike(TensorDataset):
    """Its samples are not the same on two ranks: nobody looks."""


def _give(what: str, rank: int) -> Dataset[Any] | DataLoader[Any]:
    whole = TensorDataset(torch.arange(8.0))
    return {
        "length": lambda: TensorDataset(torch.arange(8.0 - rank)),
        "subset": lambda: Subset(whole, range(4 * rank, 4 * rank + 4)),
        "subset of a subset": lambda: Subset(Subset(whole, range(4 * rank, 4 * rank + 4)), [0, 1]),
        "stream": lambda: Rows(8 + rank),
        "batch": lambda: DataLoader(whole, batch_size=2 + rank),
        "order": lambda: DataLoader(whole, batch_size=2, shuffle=rank == 0),
        "alike": lambda: DataLoader(Subset(Unlike(torch.arange(8.0) + rank), [3, 1]), batch_size=2, num_workers=rank),
    }[what]()


def give_other_data(argument: dict[str, Any]) -> None:
    """Each case in the same processes; every rank writes how it was refused, and nothing where it was not."""
    told = {}
    with hpcddp.init() as group:
        for case in argument["cases"]:
            with hpcddp.runtime(None if case in ("batch", "order", "alike") else 4, group=group) as rt:
                try:
                    rt.loader(_give(case, group.rank))
                    told[case] = ""
                except RequestError as error:
                    told[case] = error.message
    Path(argument["folder"], f"{group.rank}.json").write_text(json.dumps(told))
