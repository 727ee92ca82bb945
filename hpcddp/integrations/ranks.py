"""The ranks of a training that a framework has started: they agree on a stop, and wait for each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpcddp.errors import LaunchError, RequestError
from hpcddp.training.activity import waiting
from hpcddp.training.rendezvous.failure import Failure, claim_first
from hpcddp.training.rendezvous.group import settle_interface
from hpcddp.training.steps import Agreement
from hpcddp.training.torch_compat import PrefixStore, default_store

# The name by which the guard (guard/hpcddp_guard.py) knows this group: that the ranks agree is no sign of training.
DESCRIPTION = "hpcddp"
_LEFT = -1  # in place of a step
_LONGEST_STEP = timedelta(days=1)  # a rank that evaluates alone lets the others wait; one that has died does not
#: Keeps each group until the process ends. Torch 2.6 removes it with Python's lock held and waits for its thread,
#: which needs the lock to give the last collective's tensors back: in 2 of 11 runs, with load, a rank hung at its end.
_GROUPS: list[Any] = []


class Ranks:
    """This rank among all. Its methods are called on every rank alike."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: Any = None
        if world_size > 1:
            self._store = PrefixStore("hpcddp", default_store())
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_STEP, group_desc=DESCRIPTION)
            _GROUPS.append(self._group)
        self.agreement = Agreement(world_size, self._group)
        self._sums: torch.Tensor | None = None  # of the exchange under way
        self._work: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes."""
        return self.rank == 0

    def exchange(self, step: int, flags: Sequence[str]) -> str | None:
        """Start the exchange of this step's flags; returns the reason to stop that a rank had in the one before.

        It runs beside the training: on several ranks its result is there at the next one, and a rank that is alone has
        it at once. RequestError if the ranks were at different steps.
        """
        votes = self.agreement.encode(flags)
        if self._group is None:
            return self.agreement.decode(votes)
        reason = self._end_exchange()
        self._sums = torch.tensor([*votes, step, -step], dtype=torch.float64)
        self._work = dist.all_reduce(self._sums, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return reason

    def _end_exchange(self) -> str | None:
        if self._sums is None:
            return None
        with waiting():
            self._work.wait()
        *votes, most, least = self._sums.tolist()
        self._sums = None
        if most != -least:
            first = "one has left the loop" if -least == _LEFT else f"one is at step {-least:.0f}"
            raise RequestError(
                f"the ranks count different steps: {first}, another is at step {most:.0f}",
                "the same steps on every rank, each with run.after_step(step, save)",
            )
        return self.agreement.decode(votes)

    def leave(self) -> None:
        """Check that the loop has ended after the same step on every rank. RequestError if not."""
        self.exchange(_LEFT, ())
        self._end_exchange()

    def wait(self) -> None:
        """Wait until all ranks are here (collective)."""
        if self._group is not None:
            dist.all_reduce(torch.zeros(1), group=self._group)

    def is_first_to_fail(self, what: str) -> bool:
        """Whether no other rank has failed before; of this one it is kept. For one rank, not for all."""
        mine = Failure(self.rank, os.uname().nodename, what)
        return self._group is None or claim_first(self._store, mine, "").rank == self.rank


def check_all_ranks(env: Mapping[str, str], owner: str, world_size: int, hint: str) -> None:
    """LaunchError if the owner, such as a trainer, has fewer ranks than the launcher has started."""
    started = _count_started(env)
    if world_size < started:
        raise LaunchError(f"{owner} has {world_size} of the {started} ranks that were started", hint)


def _count_started(env: Mapping[str, str]) -> int:
    return int(env["WORLD_SIZE"]) if env.get("WORLD_SIZE", "").isdecimal() else 1


def join_ranks(env: MutableMapping[str, str], opened_by: str) -> Ranks:
    """Take the ranks of torch's default process group. LaunchError if there is none, or if it lacks some ranks.

    Where gloo would take a network interface that the other hosts cannot reach, its variable is written into `env`.
    """
    if dist.is_available() and dist.is_initialized():
        hint = "let the framework use all ranks (docs/frameworks.md)"
        check_all_ranks(env, "the process group", dist.get_world_size(), hint)
        _settle_network(env, dist.get_rank(), dist.get_world_size())
        return Ranks(dist.get_rank(), dist.get_world_size())
    if (size := _count_started(env)) > 1:
        raise LaunchError(
            f"{opened_by} was called in one of {size} ranks before their process group was there",
            "call it after Accelerator(), fabric.launch(), deepspeed.init_distributed() or init_process_group()",
        )
    return Ranks(0, 1)


def _settle_network(env: MutableMapping[str, str], rank: int, world_size: int) -> None:
    """Choose gloo's network interface as the runtime does. Another host is that of the first rank or of the last."""
    store = default_store()  # a collective would count as training
    mine = os.uname().nodename
    store.set(f"hpcddp-host-{rank}", mine)
    hosts = [store.get(f"hpcddp-host-{one}").decode() for one in (0, world_size - 1)]
    settle_interface(env, "gloo", mine, hosts, prints=rank == 0)
