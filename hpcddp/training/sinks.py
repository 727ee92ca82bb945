"""Where the numbers of `rt.log` go besides metrics.jsonl: TensorBoard, MLflow, W&B, each if asked for.

Only what was asked for is imported. A resumed run continues the same run of the sink: TensorBoard by its folder, MLflow
by a tag, W&B by an id; tag and id are made from the run folder's path.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from hpcddp.errors import RequestError, nearest


class Sink(Protocol):
    """One place for numbers; only rank 0 has one."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers after `step` steps."""

    def close(self, status: str) -> None:
        """The attempt is over; `status` is finished, unfinished or failed."""


class SinkRequest(NamedTuple):
    """What a sink is opened for. `folder` is the run folder's absolute path, `step` the one that it resumes from."""

    folder: str
    step: int

    @property
    def name(self) -> str:
        return os.path.basename(os.path.normpath(self.folder))

    @property
    def id(self) -> str:
        """The same for each attempt of a run."""
        return hashlib.sha256(os.path.realpath(self.folder).encode()).hexdigest()[:16]


class _TensorBoard:
    def __init__(self, request: SinkRequest) -> None:
        module = import_module("torch.utils.tensorboard")
        # a resumed run makes the steps after its checkpoint again: TensorBoard drops those of the attempt before
        folder = os.path.join(request.folder, "tensorboard")
        self._writer: Any = module.SummaryWriter(folder, purge_step=request.step + 1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        del status  # TensorBoard has no word for it
        self._writer.close()


class _MLflow:
    def __init__(self, request: SinkRequest) -> None:
        self._mlflow: Any = import_module("mlflow")
        same = f"tags.hpcddp_run = '{request.id}'"
        found = self._mlflow.search_runs(filter_string=same, max_results=1, output_format="list")
        if found:
            self._mlflow.start_run(run_id=found[0].info.run_id)
        else:
            self._mlflow.start_run(run_name=request.name, tags={"hpcddp_run": request.id})

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self, status: str) -> None:
        self._mlflow.end_run({"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


class _WandB:
    def __init__(self, request: SinkRequest) -> None:
        wandb: Any = import_module("wandb")
        self._run = wandb.init(id=request.id, name=request.name, dir=request.folder, resume="allow")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


class _Kind(NamedTuple):
    package: str  # what is imported, and what pip installs
    open: Callable[[SinkRequest], Sink]


_KINDS = {
    "tensorboard": _Kind("tensorboard", _TensorBoard),
    "mlflow": _Kind("mlflow", _MLflow),
    "wandb": _Kind("wandb", _WandB),
}


def choose_sinks(given: Sequence[str] | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """The sinks that were asked for: `log_to`, else HPCDDP_LOG_TO with commas between the names.

    RequestError for an unknown one and one whose package is not installed; nothing is imported for the others.
    """
    where = "HPCDDP_LOG_TO" if given is None else "log_to"
    if isinstance(given, str):
        given = [given]
    names = given if given is not None else [name.strip() for name in env.get("HPCDDP_LOG_TO", "").split(",")]
    chosen = tuple(dict.fromkeys(name for name in names if name))
    for name in chosen:
        if name not in _KINDS:
            raise RequestError(
                f"{where}: {name!r} is unknown{nearest(name, list(_KINDS))}", f"one of {', '.join(_KINDS)}"
            )
        package = _KINDS[name].package
        if find_spec(package) is None:
            raise RequestError(
                f"{where}: {name} was asked for, but {package} is not installed for {sys.executable}",
                f"{sys.executable} -m pip install {package}",
            )
    return chosen


class Sinks:
    """All sinks of a run. A sink that fails is named once and left out: no training ends for it."""

    def __init__(self, names: Sequence[str], request: SinkRequest | None) -> None:
        """`request` None opens nothing: on every rank but the first, and without a run folder."""
        self._open: dict[str, Sink] = {}
        if request is not None:
            for name in names:
                self._try(name, partial(self._add, name, request))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers after `step` steps, as `runs.metrics.check_numbers` gives them."""
        for name, sink in list(self._open.items()):
            self._try(name, partial(sink.write, step, numbers))

    def close(self, status: str) -> None:
        """The attempt is over; `status` is finished, unfinished or failed."""
        for name, sink in list(self._open.items()):
            self._try(name, partial(sink.close, status))
        self._open.clear()

    def _add(self, name: str, request: SinkRequest) -> None:
        self._open[name] = _KINDS[name].open(request)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"hpcddp: warning: {name} failed and gets no more numbers ({reason})", file=sys.stderr, flush=True)
