"""Errors of Python and torch that come of a wrong word for the runtime or its model, in two lines."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import RequestError, find_nearest
from hpcddp.training.runtime import Runtime

_CALL = re.compile(r"(\w+)\.(\w+)\(\) (?:missing|got|takes) ")
_LOADING = f"Error(s) in loading state_dict for {DistributedDataParallel.__name__}"  # torch's
# what scripts give to a method that does not take it: the hint
_MEANT = {
    ("backward", "retain_graph"): "rt.backward(loss_a + loss_b): one backward pass from the sum of the losses",
    ("loader", "batch_size"): "hpcddp.runtime(global_batch=256, max_micro_batch=32), then rt.loader(dataset)",
    ("prepare", "find_unused_parameters"): "model = rt.wrap(model, find_unused_parameters=True), then rt.prepare(…)",
}
# the same for names of other libraries
_NAMES = {
    "accumulate": "hpcddp.runtime(global_batch=256, max_micro_batch=32), and the loop as it is",
    "clip_grad_norm_": "rt.step(optimizer, clip_norm=1.0)",
    "clip_gradients": "rt.step(optimizer, clip_norm=1.0)",
    "is_main_process": "rt.is_main",
}


def explain_call(error: TypeError, rt: Runtime) -> RequestError | None:
    """A method of the runtime was called with arguments that it does not take; None if that is not it."""
    found = _CALL.match(str(error))
    if found is None or found[1] not in {kind.__name__ for kind in type(rt).__mro__}:
        return None
    name = found[2]
    given = re.search(r"argument '(\w+)'", str(error))
    taken = ", ".join(map(_show, list(inspect.signature(getattr(rt, name)).parameters.values())))
    hint = _MEANT.get((name, given[1])) if given else None
    return RequestError(f"rt.{str(error)[found.start(2) :]}", hint or f"rt.{name}({taken})")


def explain_name(error: AttributeError, rt: Runtime) -> RequestError | None:
    """The runtime, or a model that is not in DDP, was asked for what it has not."""
    name = error.name or ""
    if error.obj is rt and not name.startswith("_"):
        near = find_nearest(name, [one for one in dir(rt) if not one.startswith("_")])
        return RequestError(f"the runtime has no {name!r}", _NAMES.get(name) or (f"rt.{near}" if near else "help(rt)"))
    if name == "module" and isinstance(error.obj, nn.Module) and rt.group.world_size == 1:
        return RequestError(
            f"on one rank the model of rt.prepare is this {type(error.obj).__name__} itself, which has no 'module'",
            "rt.unwrap(model), on any number of ranks",
        )
    return None


def explain_loading(error: RuntimeError) -> RequestError | None:
    """The state of the plain model was given to the one inside DDP."""
    if not str(error).startswith(_LOADING):
        return None
    return RequestError(
        "on several ranks the model of rt.prepare is in a DistributedDataParallel, whose names begin with `module.`",
        "rt.unwrap(model).load_state_dict(…), or load it before rt.prepare",
    )


def _show(parameter: inspect.Parameter) -> str:
    default: Any = parameter.default
    return str(parameter.replace(annotation=parameter.empty)) if default is parameter.empty else f"{parameter.name}=…"
