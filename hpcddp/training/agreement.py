"""Points of the script where all ranks agree, and what one may ask of all: to stop, to finish early, to save.

A rank that asks inside a step raises a flag in the step's sums. If all ranks ask at one step, it is granted at this
step; else at the step where all of them have heard of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hpcddp.errors import RequestError
from hpcddp.runs.hang import name_ranks
from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.roll_call import wait_until
from hpcddp.training.same_options import refuse_others
from hpcddp.training.steps import StepSum

_TOGETHER_S = 20.0  # ranks that ask at one step arrive within it: the sums of the step before have just come together
_HINT = (
    "call it on every rank alike, as by if rt.broadcast(is_enough): break. rt.finish_early(reason), rt.stop(reason) and"
    " rt.save() may be called on one rank in the loop"
)

_runtimes = itertools.count()  # one group may have several, one after the other


class Agreement:
    """This rank's requests, and where all ranks agree on them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.requests: dict[str, str] = {}  # with their reasons; they go with a step's sums
        self._evaluations: list[dict[str, Any]] = []  # the options of the evaluation loaders since the last agreement
        self._is_new = False  # whether one came since the last step
        self._name = f"requests-{next(_runtimes)}"

    def ask(self, request: str, reason: str, *, alone: bool = False) -> None:
        """Ask all ranks for one of REQUESTS. The first reason stays. `alone`: no other rank asks at this step."""
        self.requests.setdefault(request, reason)
        self._is_new |= not alone

    def note_evaluation(self, **options: Any) -> None:
        """This rank has made an evaluation loader, with options that have to be the same on every rank."""
        self._evaluations.append(options)

    def agree(self, point: str, mine: Any) -> tuple[dict[str, str], list[Any]]:
        """A collective: the requests of all ranks, and what each of them has as `mine`.

        RequestError, on every rank, if they call it at different points of the script.
        """
        requests, self.requests, self._is_new = self.requests, {}, False
        evaluations, self._evaluations = self._evaluations, []
        everyones: list[Any] = [(point, requests, mine, evaluations)] * self._group.world_size
        if self._group.world_size > 1:
            dist.all_gather_object(everyones, everyones[0])
        points = [theirs[0] for theirs in everyones]
        if len(set(points)) > 1:
            raise RequestError(_describe_points(points), _HINT)
        granted: dict[str, str] = {}
        for _, theirs, _, _ in everyones:
            granted = theirs | granted
        for options in zip(*(theirs[3] for theirs in everyones), strict=False):  # one rank may have one more, to look
            refuse_others(options, "evaluation data: the same DataLoader(…, {}), over the whole data set,")
        return granted, [theirs[2] for theirs in everyones]

    def is_due(self, step: int, sums: StepSum, exchanged: bool) -> bool:
        """After a step: whether all ranks have to agree now. The same on every rank.

        `exchanged`: whether the ranks' flags of this step are on their way.
        """
        if sums.take_heard():
            return True
        is_new, self._is_new = self._is_new, False
        if exchanged:
            return bool(self.requests) and self._group.world_size in sums.peek().values()
        return is_new and self._all_ask(step)

    def _all_ask(self, step: int) -> bool:
        """Whether all ranks ask after this step, of which there is no exchange. Waits for them; not for ever, because
        those that do not ask train on, and wait for this one."""
        store, key, everyone = self._group.store, f"{self._name}-{step}", self._group.world_size
        store.add(key, 1)
        all_ask = wait_until(lambda: store.add(key, 0) == everyone, _TOGETHER_S, everyone)
        store.compare_set(f"{key}-all", "", "yes" if all_ask else "no")  # the first word holds
        return bool(store.get(f"{key}-all") == b"yes")


def _describe_points(points: Sequence[str]) -> str:
    ranks_at = {point: [rank for rank, theirs in enumerate(points) if theirs == point] for point in points}
    return "the ranks went different ways: " + ", ".join(
        f"{name_ranks(ranks)} {point}" for point, ranks in ranks_at.items()
    )
