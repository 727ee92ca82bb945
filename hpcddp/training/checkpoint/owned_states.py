"""Optimizer states of which each data rank has its own parameters' only (ZeRO-1), in checkpoints that have them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.training.checkpoint.state_tree import map_tensors
from hpcddp.training.parallel.spread import as_bytes
from hpcddp.training.parallel.zero import OwnSteps


class OwnedStates:
    """The states of these optimizers, by their names in the checkpoint. Without any its methods do nothing."""

    is_partial = False  # whether a rank has a part of the model only

    def __init__(self, steps: Mapping[str, OwnSteps]) -> None:
        self._steps = steps

    def keeps(self, *, is_first: bool) -> bool:
        """Whether this rank needs whole tensors to gather a tree for one file."""
        return is_first

    def number(self, name: str, nth: int) -> int:  # noqa: ARG002
        """The number in a checkpoint of an optimizer's nth parameter."""
        return nth

    def lift(self, tree: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a checkpoint's tree, from its objects' own states."""
        return tree

    def lower(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `lift`."""
        return tree

    def join(self, groups: list[list[str | None]]) -> list[list[str | None]]:
        """The names of an optimizer's parameters in all parts of the model, by parameter group."""
        return groups

    def complete(self, described: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Facts of the objects, of which this rank may have a part only."""
        return described

    def drop_others(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's tree, of the states only this rank's."""
        dropped = dict(tree)
        for name, steps in self._steps.items():
            owners, me = _Owners(steps), steps.layout.data_rank
            state = {key: value for key, value in tree[name]["state"].items() if owners.find(key) == me}
            dropped[name] = {**tree[name], "state": state}
        return dropped

    def merge_outlines(self, outline: dict[str, Any]) -> dict[str, Any]:
        """The outline with all ranks' states, from that of each. A collective."""
        merged = dict(outline)
        for name, steps in self._steps.items():
            parts: list[Any] = [None] * steps.layout.data_size
            dist.all_gather_object(parts, outline[name]["state"], group=steps.layout.data_group)
            states = {key: value for part in parts for key, value in part.items()}
            merged[name] = {
                **outline[name],
                "state": dict(sorted(states.items(), key=lambda item: str(item[0]).zfill(9))),
            }
        return merged

    def gather(self, tree: dict[str, Any], outline: dict[str, Any], *, keep: bool) -> dict[str, Any]:
        """The tree with all ranks' states, on the CPU, from a merged outline. A collective; only `keep` needs the
        result, and only one tensor at a time is on the device."""
        whole = dict(tree)
        for name, steps in self._steps.items():
            owners, mine = _Owners(steps), tree[name]["state"]
            states = {
                key: _gather_one(mine.get(key), empty, owners.find(key), steps, keep=keep)
                for key, empty in outline[name]["state"].items()
            }
            whole[name] = {**tree[name], "state": states}
        return whole


class _Owners:
    """Which data rank has the state of a key: of a parameter's number, or of what else an optimizer keeps there."""

    def __init__(self, steps: OwnSteps) -> None:
        self._by_number = steps.list_owners()

    def find(self, key: Any) -> int:
        return self._by_number[key] if isinstance(key, int) and key < len(self._by_number) else 0


def _gather_one(mine: Any, outline: Any, owner: int, steps: OwnSteps, *, keep: bool) -> Any:
    """The state of one key, from its owner."""
    own: dict[Any, Tensor] = {}
    if owner == steps.layout.data_rank:
        map_tensors(mine, own.__setitem__)

    def bring(path: Any, empty: Tensor) -> Any:
        there = own[path] if own else torch.empty(empty.shape, dtype=empty.dtype)
        there = there.to(steps.device).contiguous()
        if there.numel():
            dist.broadcast(as_bytes(there), src=steps.layout.data_ranks[owner], group=steps.layout.data_group)
        return there.cpu() if keep else None

    return map_tensors(outline, bring)
