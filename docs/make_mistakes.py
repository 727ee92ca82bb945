"""Writes docs/mistakes.md: a row for each mistake that a loop is refused, from hpcddp/training/mistakes.py.

Run it after changing a row.
"""

from __future__ import annotations

from pathlib import Path

from hpcddp.training.mistakes import MISTAKES, Mistake

_HEAD = """\
# Mistakes in a training loop

<!-- made by docs/make_mistakes.py from hpcddp/training/mistakes.py -->

This page lists what ends a run with an error while it trains, and what to write instead.

```console slow
$ cat > twice.py <<'END'
> import torch, hpcddp
> from torch.utils.data import DataLoader, TensorDataset
> model = torch.nn.Linear(4, 1)
> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
> loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=8)
> with hpcddp.runtime() as rt:
>     model, optimizer, loader = rt.prepare(model, optimizer, loader)
>     for (x,) in loader:
>         rt.backward(model(x).mean())
>         optimizer.step()
>         optimizer.step()
> END
$ python twice.py
…
{said}
```

Each of these checks is exact: it never ends a loop that trains rightly. Together they take a few comparisons per step.
What can only be guessed from a running loop, such as a loss that is a sum or a learning rate that depends on the rank,
is found by an experiment: `hpcddp verify`.

| mistake | when | what to write |
|---|---|---|
"""
_BEHIND = """
The ranks are also compared with each other: options, lengths and samples of the data when a run begins, the weights in
the first steps and at each checkpoint, and the number of loops over evaluation data: [training.md](training.md).
"""
# what stands in a remedy that is made where the mistake happens
_EXAMPLE = {
    "hint": "model, optimizer, loader = rt.prepare(model, optimizer, loader), with all optimizers",
    "more": 4,
    "count": 2,
}


def row(mistake: Mistake) -> str:
    remedy = mistake.remedy.format(**_EXAMPLE)
    code = f"`` {remedy} ``" if "`" in remedy else f"`{remedy}`"
    cells = (f"`{mistake.name}`", mistake.condition, code)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def page() -> str:
    said = f"hpcddp: twice.py:11: {next(one for one in MISTAKES if one.name == 'step-again').error(kind='SGD')}"
    return _HEAD.format(said=said) + "".join(map(row, MISTAKES)) + _BEHIND


if __name__ == "__main__":
    (Path(__file__).parent / "mistakes.md").write_text(page(), encoding="utf-8")
