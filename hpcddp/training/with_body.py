"""The `with` body of a runtime: what is used without it, and what ends it, in two lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pickle import PicklingError
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import RequestError
from hpcddp.training.misused import explain_call, explain_loading, explain_name
from hpcddp.training.parallel.calls import ForwardCalls
from hpcddp.training.runtime import Runtime
from hpcddp.uncaught import Opening
from hpcddp.units import format_count

_SINGLE = "Expected more than 1 value per channel when training"  # torch's BatchNorm


class UnopenedRuntime(Opening[Runtime]):
    """What `hpcddp.runtime(…)` gives: `with` opens it."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Runtime, name):
            raise RequestError(
                f"rt.{name} was used, and no `with` has opened the runtime", "with hpcddp.runtime(…) as rt: …"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)


@contextmanager
def explained(rt: Runtime) -> Iterator[None]:
    """Around the body. RequestError for an exit that looks like success, for what only the model inside DDP has or can,
    for a wrong word, and for BatchNorm's refusal of a single sample."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        raise RequestError(
            f"the script left the `with` body by sys.exit() after step {rt.steps}, and the run is not finished",
            'rt.finish_early("reason") or rt.stop("reason") in the loop; sys.exit() after the body',
        ) from error
    except (AttributeError, PicklingError) as error:
        if ForwardCalls.watch.__qualname__ in str(error):  # the hook that it puts into the model
            raise RequestError(
                "on several ranks the model of rt.prepare is in a DistributedDataParallel, which cannot be pickled",
                "rt.save_model(path, model), or torch.save(rt.unwrap(model), path) under if rt.is_main:",
            ) from error
        if not isinstance(error, AttributeError):
            raise
        if (refused := explain_name(error, rt)) is not None:
            raise refused from error
        model, name = error.obj, error.name
        if not isinstance(model, DistributedDataParallel) or name is None or not hasattr(model.module, name):
            raise
        raise _only_inside(
            f"has no attribute {name!r}: the {type(model.module).__name__} inside it has", f".{name}"
        ) from error
    except RuntimeError as error:
        if (refused := explain_loading(error)) is None:
            raise
        raise refused from error
    except TypeError as error:  # of model[0], len(model)
        if (refused := explain_call(error, rt)) is not None:
            raise refused from error
        if f"{DistributedDataParallel.__name__!r} object" not in str(error):
            raise
        raise _only_inside(f"cannot do all that the model inside it can ({error})", "") from error
    except ValueError as error:
        if not str(error).startswith(_SINGLE):
            raise
        refused = _explain_single(rt)
        if refused is None:
            raise
        raise refused from error


def _explain_single(rt: Runtime) -> RequestError | None:
    """What BatchNorm's refusal of a single sample comes from; None if it is not known."""
    try:
        samples = rt.micro_batch_samples
    except RequestError:  # outside of the loop over the training loader
        return RequestError(
            "BatchNorm got a single sample outside of the training loop, and the model is in training mode there",
            "model.eval() before the evaluation, model.train() after it",
        )
    if any(name == "pipeline" for name, _ in rt.layout.mesh):  # all of a step's micro batches go through at once
        samples = 1
    if samples > 1:
        return None
    always = any(piece.samples == 1 for piece in rt.plan.pieces(rt.layout.data_rank))
    whose = "a micro batch" if always else "a micro batch of the epoch's last, smaller global batch"
    return RequestError(
        f"BatchNorm takes its statistics over a micro batch and needs two samples: {whose} has"
        f" {format_count(samples, 'sample')} on rank {rt.group.rank}, in step {rt.steps + 1}",
        "a larger global batch or max_micro_batch, fewer ranks or slices, or GroupNorm in place of BatchNorm"
        if always
        else "DataLoader(data, drop_last=True), another global batch, or GroupNorm in place of BatchNorm",
    )


def _only_inside(what: str, name: str) -> RequestError:
    return RequestError(
        f"on several ranks the model of rt.prepare is in a DistributedDataParallel, which {what}",
        f"rt.unwrap(model){name}; what computes the loss belongs into the model's forward",
    )
