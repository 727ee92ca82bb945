"""Tensor parallel: the ranks of a mesh's dimension "tensor" compute each layer of the user's plan together.

Torch's `parallelize_module` divides the layers of the plan. All other layers have their parameters whole on each of
these ranks, as DTensors too: torch's optimizers and `clip_grad_norm_` take the parameters of one mesh only. Those
layers compute with plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from torch import Tensor, nn

from hpcddp.errors import RequestError, nearest

#: module name (`*` stands for one part of it) -> "colwise", "rowwise", or one of torch's styles
TensorPlan = Mapping[str, Any]

_EXAMPLE = '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}'


def find_plan(model: nn.Module, given: TensorPlan | None) -> TensorPlan:
    """The plan that was given, or the model's attribute `tensor_plan`. RequestError for none, or one that fits no layer
    of the model."""
    plan = getattr(model, "tensor_plan", None) if given is None else given
    kind = type(model).__name__
    if not isinstance(plan, Mapping):
        raise RequestError(
            f"the ranks are to compute the layers of this {kind} together, and it has no tensor plan",
            f"rt.wrap(model, tensor_plan={_EXAMPLE}), or this as the model's attribute tensor_plan",
        )
    names = [name for name, _ in model.named_modules()]
    for key, style in plan.items():
        if not any(_fits(name, key) for name in names):
            hint = f"names of model.named_modules(){nearest(key, names)}, with * for one part of a name"
            raise RequestError(f"tensor_plan has {key!r}, and the {kind} has no such module", hint)
        if isinstance(style, str) and style not in {"colwise", "rowwise"}:
            hint = '"colwise", "rowwise", or a style of torch.distributed.tensor.parallel'
            raise RequestError(f"tensor_plan has {style!r} for {key!r}, which is no style", hint)
    return plan


def _fits(name: str, key: str) -> bool:
    """Whether a plan's key stands for the module of this name."""
    parts, patterns = name.split("."), key.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch, parts, patterns))


def check_untied(model: nn.Module) -> None:
    """RequestError for a parameter that two layers share: each would get another one."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise RequestError(
                f"{first} and {name} are one parameter, which tensor parallel would make two",
                'hpcddp.runtime(parallel="fsdp"), or a model whose layers share no parameter',
            )


def divide_layers(model: nn.Module, mesh: Any, plan: TensorPlan) -> None:
    """Divide the layers of the plan over the mesh, in place, and keep the others whole. A collective.

    All ranks start from the weights of the mesh's first rank.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    words = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    styles = {key: words[style]() if isinstance(style, str) else style for key, style in plan.items()}
    if styles:
        parallelize_module(model, mesh, styles)
    for module in model.modules():
        whole = {name: p for name, p in module.named_parameters(recurse=False) if not hasattr(p, "device_mesh")}
        for name, parameter in whole.items():
            divided = nn.Parameter(
                distribute_tensor(parameter.detach(), mesh, [Replicate()]), requires_grad=parameter.requires_grad
            )
            module.register_parameter(name, divided)
        if whole:
            _compute_plainly(module)


def _compute_plainly(module: nn.Module) -> None:
    """Replace, in a forward pass, the whole DTensors of a module, and of those in it, by plain tensors.

    The instance's own attribute comes before the parameter of that name. FSDP has gathered the parameters by then;
    those of a block inside, which it gathers later, are that block's to make plain.
    """
    set_now: list[list[tuple[nn.Module, str]]] = []

    def enter(module: nn.Module, _inputs: Any) -> None:  # not that of the outer function: a copy has the hook too
        mine = []
        for part in module.modules():
            for name, local in _list_whole(part).items():
                if name not in vars(part):
                    vars(part)[name] = local
                    mine.append((part, name))
        set_now.append(mine)

    def leave(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        for part, name in set_now.pop() if set_now else ():
            vars(part).pop(name, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _list_whole(module: nn.Module) -> dict[str, Tensor]:
    """This rank's numbers of the module's own DTensors; none if one is divided, as the weight beside a whole bias."""
    held: dict[str, Any] = {
        name: p for name, p in module.named_parameters(recurse=False) if getattr(p, "placements", None)
    }
    if not all(placement.is_replicate() for divided in held.values() for placement in divided.placements):
        return {}
    return {name: divided.to_local() for name, divided in held.items()}


def replicate(tensor: Tensor, mesh: Any) -> Any:
    """A tensor that is the same on all ranks of a mesh, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def check_even(model: nn.Module, shards: int, tensor: int) -> None:
    """RequestError for a parameter whose rows both dimensions divide, and not evenly: torch would mix them up."""
    for name, parameter in model.named_parameters():
        placements = getattr(parameter, "placements", ())
        rows = parameter.shape[0] if parameter.dim() else 1
        if any(placement.is_shard(0) for placement in placements) and rows % (shards * tensor):
            raise RequestError(
                f"{name} has {rows} rows, which {tensor} tensor ranks x {shards} shards cannot divide evenly",
                f"a layer with a multiple of {shards * tensor} rows, or another mesh",
            )
