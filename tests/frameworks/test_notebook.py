"""A run in the cells of a notebook, with a kernel of Jupyter's: killed, restarted, and run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

MODEL = """
import os, signal, torch, hpcddp
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2)
"""
TRAIN = """
made = 0
with hpcddp.runtime(run_dir="runs/notebook", save_every=1) as rt:
    model, optimizer, loader = rt.prepare(model, optimizer, data)
    for epoch in rt.epochs(1):
        for x, in loader:
            if os.path.exists("killed") and rt.steps == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            made += 1
            optimizer.zero_grad()
            rt.backward(model(x).mean())
            optimizer.step()
print("made", made, "of", rt.steps)
"""


@contextmanager
def open_kernel(folder: Path) -> Iterator[Any]:
    """What runs a cell in a new kernel, and gives what that prints."""
    notebook = nbformat.v4.new_notebook()
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": folder}}
    )

    def run(text: str) -> str:
        notebook.cells.append(nbformat.v4.new_code_cell(text))
        cell = client.execute_cell(notebook.cells[-1], len(notebook.cells) - 1)
        return "".join(one.get("text", "") for one in cell.outputs)

    with client.setup_kernel():
        yield run


def test_a_kernel_that_was_killed_and_restarted_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    (tmp_path / "killed").touch()
    with open_kernel(tmp_path) as run, pytest.raises(nbclient.exceptions.DeadKernelError):
        run(MODEL + TRAIN)
    (tmp_path / "killed").unlink()
    more = TRAIN.replace("epochs(1)", "epochs(2)")
    with open_kernel(tmp_path) as run:
        run(MODEL)
        told = run(TRAIN)
        assert "run runs/notebook: resumes from step 2\n" in told
        assert told.endswith("made 4 of 6\n")
        told = run(MODEL + TRAIN)  # its own run, once it is closed
        assert "run runs/notebook: finished at step 6 " in told
        assert told.endswith("made 0 of 6\n")
        assert run(MODEL + more).endswith("made 6 of 12\n")
