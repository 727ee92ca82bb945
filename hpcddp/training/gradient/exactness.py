"""What a run that is to be repeated bit for bit needs: the switches that are set for it, and what is checked at its
start.

The same numbers come only from the same kernels. So exact runs compute with deterministic ones, on the same hardware
and software on every rank; and what they ran on is recorded, since the promise holds only where that is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpcddp.errors import LaunchError, RequestError
from hpcddp.training.bringup.group import Group
from hpcddp.training.keeping.versions import list_numerics, list_versions
from hpcddp.training.options import EXACT_METHODS

DEFAULT_SLICES = 8
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")
# what may differ between runs and ranks without changing a number
_HARMLESS = {"hpcddp", "python", "machine"}


class Exactness(NamedTuple):
    """How an exact run adds up, and how many fixed slices its global batches have. Both are part of the result."""

    method: str
    slices: int


class Warrant(NamedTuple):
    """What an exact result rests on. A checkpoint's manifest carries it from attempt to attempt."""

    method: str
    slices: int
    global_batch: int
    conditions: dict[str, Any]
    deviations: tuple[str, ...]  # why the result is not what an undisturbed run gives; hopefully none


def choose_exactness(exact: bool | str, slices: int | None) -> Exactness | None:
    """None if the run is not to be exact. RequestError for an unknown method, and for slices without it."""
    if not exact:
        if slices is not None:
            raise RequestError(f"slices={slices} means nothing without exact", "exact=True, or leave out slices")
        return None
    method = EXACT_METHODS[0] if exact is True else exact
    if method not in EXACT_METHODS:
        raise RequestError(f"exact={exact!r} is no way to sum", "exact='tree', or exact='integer'")
    return Exactness(method, DEFAULT_SLICES if slices is None else slices)


@contextmanager
def deterministic_kernels(env: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, torch takes kernels that give the same numbers each time, or raises where it has none.

    LaunchError if the environment tells cuBLAS otherwise. On CPUs a kernel cuts its sums by threads, so there is one.
    """
    if env.setdefault(_WORKSPACE, _WORKSPACES[0]) not in _WORKSPACES:
        raise LaunchError(
            f"{_WORKSPACE}={env[_WORKSPACE]!r} lets cuBLAS add in any order, which exact mode cannot use",
            f"unset {_WORKSPACE}, or export {_WORKSPACE}={_WORKSPACES[0]}",
        )
    threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    memory.fill_uninitialized_memory = False  # costs time, and hides nothing here
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
        memory.fill_uninitialized_memory = fills


def list_conditions(device: torch.device) -> dict[str, Any]:
    """What an exact result depends on, beside the program and its data."""
    facts = {**list_versions(), **list_numerics(device)}
    return {name: value for name, value in facts.items() if name not in _HARMLESS}


def check_alike(group: Group) -> None:
    """A collective. LaunchError if ranks compute with different hardware or software."""
    if group.world_size == 1:
        return
    conditions: list[Any] = [None] * group.world_size
    dist.all_gather_object(conditions, list_conditions(group.device))
    for rank, theirs in enumerate(conditions):
        if differs := name_differences(conditions[0], theirs):
            host = group.members[rank].host
            raise LaunchError(
                "exact mode needs the same hardware and software on every rank;"
                f" on rank {rank} ({host}) {differs[0]} as on rank 0",
                "ask for nodes of one kind (a constraint in the job file), and use one environment for all ranks",
            )


def make_warrant(exactness: Exactness, global_batch: int, device: torch.device) -> Warrant:
    """For a run that begins here."""
    return Warrant(exactness.method, exactness.slices, global_batch, list_conditions(device), ())


def carry_on(mine: Warrant, manifest: Mapping[str, Any], step: int) -> Warrant:
    """This attempt's warrant, going on from a checkpoint with this manifest.

    RequestError if the sums would be others by choice. What differs by circumstance becomes a deviation.
    """
    if "exact" not in manifest:
        return mine._replace(deviations=(f"steps 1 to {step} were not exact",))
    theirs = Warrant(**manifest["exact"])
    for name in ("method", "slices", "global_batch"):
        if getattr(mine, name) != getattr(theirs, name):
            words = name.replace("_", " ")
            raise RequestError(
                f"this exact run has {words} {getattr(mine, name)}, its checkpoint of step {step} has"
                f" {getattr(theirs, name)}: it would not be the same training",
                f"go on with {words} {getattr(theirs, name)}, or start anew: --no-resume, or another run folder",
            )
    new = [f"after step {step}, {words}" for words in name_differences(theirs.conditions, mine.conditions)]
    return mine._replace(deviations=(*theirs.deviations, *new))


def name_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """`torch is 2.15.0, not 2.13.0` for each condition that both know and that is not ours on their side."""
    both = [name for name in ours if name in theirs]
    return [f"{name} is {theirs[name]}, not {ours[name]}" for name in both if ours[name] != theirs[name]]
