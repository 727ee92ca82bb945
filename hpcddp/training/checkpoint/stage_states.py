"""States of a model whose stages are on different ranks, in checkpoints that have it whole.

The model's names are those of the whole one. An optimizer counts its parameters: in a checkpoint those of each
parameter group are numbered through all stages, which is the order of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.errors import RequestError
from hpcddp.training.checkpoint.state_tree import map_tensors, module_state
from hpcddp.training.checkpoint.tracked import OwnedStates
from hpcddp.training.parallel.staged import StageLinks


class StageStates(OwnedStates):
    """What the stages hold of the tracked objects. A collective over the stages, as most of its methods are."""

    is_partial = True

    def __init__(self, objects: Mapping[str, Any], staged: nn.Module, links: StageLinks) -> None:
        super().__init__({})
        self._links = links
        self._model = next((name for name, thing in objects.items() if thing is staged), None)
        optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, Optimizer)}
        mine: dict[str, Any] = {
            "names": [*module_state(staged)],
            "numel": sum(parameter.numel() for parameter in staged.parameters()),
            "counts": {name: [len(group["params"]) for group in one.param_groups] for name, one in optimizers.items()},
        }
        stages = exchange(mine, links)
        self._parameters = sum(stage["numel"] for stage in stages)
        own = set(mine["names"])
        self._others = {name for stage in stages for name in stage["names"]} - own
        self._numbers = {
            name: _number([stage["counts"][name] for stage in stages], links.stage, name) for name in optimizers
        }

    def keeps(self, *, is_first: bool) -> bool:
        """Whether whole tensors have to be there: on every stage of rank 0's pipeline."""
        return is_first or self._links.is_beside_first

    def number(self, name: str, nth: int) -> int:
        return self._numbers[name][nth] if name in self._numbers else nth

    def lift(self, tree: dict[str, Any]) -> dict[str, Any]:
        return {
            key: _renumber(value, dict(enumerate(self._numbers[key]))) if key in self._numbers else value
            for key, value in tree.items()
        }

    def lower(self, tree: dict[str, Any]) -> dict[str, Any]:
        back = {name: {number: nth for nth, number in enumerate(found)} for name, found in self._numbers.items()}
        return {key: _renumber(value, back[key]) if key in back else value for key, value in tree.items()}

    def join(self, groups: list[list[str | None]]) -> list[list[str | None]]:
        stages: list[list[list[str | None]]] = exchange(groups, self._links)
        return [[path for stage in stages for path in stage[nth]] for nth in range(len(groups))]

    def complete(self, described: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Facts of the objects, with the model's parameters in all stages."""
        if self._model in described:
            described[self._model] = {**described[self._model], "parameters": self._parameters}
        return described

    def drop_others(self, tree: dict[str, Any]) -> dict[str, Any]:
        dropped = dict(tree)
        if self._model is not None:
            whole = tree[self._model]
            dropped[self._model] = {key: value for key, value in whole.items() if key not in self._others}
        for name, numbers in self._numbers.items():
            dropped[name] = _keep_numbers(tree[name], set(numbers))
        return dropped

    def merge_outlines(self, outline: dict[str, Any]) -> dict[str, Any]:
        merged, stages = dict(outline), exchange({name: outline[name] for name in self._split}, self._links)
        for name in self._split:
            parts = [stage[name] for stage in stages]
            merged[name] = _merge(parts) if name in self._numbers else _join(parts)
        return merged

    def gather(self, tree: dict[str, Any], outline: dict[str, Any], *, keep: bool) -> dict[str, Any]:
        if not self.keeps(is_first=keep):
            return tree
        whole = dict(tree)
        for name in self._split:
            if name not in self._numbers:
                whole[name] = gather_stages(tree[name], self._links)
            elif "state" in tree[name]:
                states = gather_stages(tree[name]["state"], self._links)
                ordered = {key: states[key] for key in outline[name]["state"] if key in states}
                whole[name] = {**tree[name], "state": ordered, "param_groups": outline[name]["param_groups"]}
        return whole

    @property
    def _split(self) -> list[str]:
        return [*([self._model] if self._model is not None else []), *self._numbers]


def exchange(mine: Any, links: StageLinks) -> list[Any]:
    """What each stage of the pipeline has. A collective."""
    found: list[Any] = [None] * links.stages
    dist.all_gather_object(found, mine, group=links.group)
    return found


def gather_stages(mine: Mapping[Any, Any], links: StageLinks) -> dict[Any, Any]:
    """The stages' states as one, on the first stage and on the CPU; a key of several is the first one's. A collective.

    Only one tensor at a time is on the device.
    """
    shapes = map_tensors(dict(mine), lambda _, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    whole: dict[Any, Any] = map_tensors(dict(mine), lambda _, tensor: tensor.cpu()) if links.is_first else {}
    seen: set[Any] = set()
    for stage, outline in enumerate(exchange(shapes, links)):
        new = {key: value for key, value in outline.items() if key not in seen}
        seen |= new.keys()
        if stage == 0:
            continue
        if links.is_first:
            whole |= map_tensors(new, partial(_take, links, stage))
        elif links.stage == stage:
            map_tensors({key: mine[key] for key in new}, lambda _, tensor: links.give(tensor))
    return whole


def _take(links: StageLinks, stage: int, _path: Any, empty: Tensor) -> Tensor:
    return links.take(empty, stage).cpu()


def _number(counts: list[list[int]], stage: int, name: str) -> list[int]:
    """The number in the whole optimizer of each parameter of this stage, by its number here."""
    if len({len(groups) for groups in counts}) > 1:
        raise RequestError(
            f"{name} has {len(counts[stage])} parameter groups in stage {stage} of the pipeline, and another number in"
            " another",
            "the same groups in each stage, of which some may be empty",
        )
    totals = [sum(stage[nth] for stage in counts) for nth in range(len(counts[0]))]
    numbers: list[int] = []
    for nth, start in enumerate([0, *accumulate(totals)][: len(totals)]):
        first = start + sum(before[nth] for before in counts[:stage])
        numbers += range(first, first + counts[stage][nth])
    return numbers


def _renumber(state: Any, numbers: Mapping[int, int]) -> Any:
    """An optimizer's state with other numbers of its parameters; those that have none are left out of the groups."""
    if not isinstance(state, dict) or "state" not in state or "param_groups" not in state:
        return state
    groups = [
        {**group, "params": [numbers[n] for n in group["params"] if n in numbers]} for group in state["param_groups"]
    ]
    return {**state, "state": {numbers.get(k, k): v for k, v in state["state"].items()}, "param_groups": groups}


def _keep_numbers(state: Any, mine: set[int]) -> Any:
    if not isinstance(state, dict) or "state" not in state or "param_groups" not in state:
        return state
    groups = [{**group, "params": [n for n in group["params"] if n in mine]} for group in state["param_groups"]]
    kept = {key: value for key, value in state["state"].items() if key in mine or not isinstance(key, int)}
    return {**state, "state": kept, "param_groups": groups}


def _join(parts: list[dict[Any, Any]]) -> dict[Any, Any]:
    """In the order of the stages; a key of several is the first one's."""
    joined: dict[Any, Any] = {}
    for part in parts:
        joined |= {key: value for key, value in part.items() if key not in joined}
    return joined


def _merge(parts: list[Any]) -> Any:
    """The states of one optimizer in all stages, as one."""
    first = parts[0]
    if not isinstance(first, dict) or "state" not in first or "param_groups" not in first:
        return first
    states = _join([part["state"] for part in parts])
    groups = [
        {**group, "params": [n for part in parts for n in part["param_groups"][nth]["params"]]}
        for nth, group in enumerate(first["param_groups"])
    ]
    ordered = dict(sorted(states.items(), key=lambda item: str(item[0]).zfill(9)))
    return {**first, "state": ordered, "param_groups": groups}
