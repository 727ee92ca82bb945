"""The roll call: every rank's record is read before the process group is made, within a short and known time.

Without it a missing rank shows as a timeout of 10 or 30 minutes, a doubled one as another rank's timeout, and two ranks
on one GPU as an NCCL error that does not name them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import DistNetworkError

from hpcddp.errors import LaunchError
from hpcddp.training.activity import waiting
from hpcddp.training.rendezvous.failure import Failure, PeerFailedError
from hpcddp.training.torch_compat import Store

_GOOD = "all here"
_SILENT_HINT = "look into the logs of those ranks; `hpcddp env` in the same launch line shows what each process sees"


class Member(NamedTuple):
    """One rank, described by itself."""

    rank: int
    host: str
    pid: int
    local_rank: int | None  # None: the launcher does not say
    cpus: str  # the CPUs it may run on, as text: equal text means that they are shared
    gpus: tuple[str, ...]  # the labels of the devices it can see
    no_gpu: str = ""  # why it sees none, for people


def call_roll(store: Store, me: Member, world_size: int, timeout_s: float) -> tuple[Member, ...]:
    """Every rank's record, by rank.

    If one is missing or two claim the same rank, rank 0 raises LaunchError and the others PeerFailedError.
    """
    claims = store.add(f"claim/{me.rank}", 1)
    if claims > 1:
        _tell_outcome(store, f"rank {me.rank} exists {claims} times; one of them is process {me.pid} on {me.host}")
    store.set(f"member/{me.rank}", json.dumps(me))
    keys = [f"member/{rank}" for rank in range(world_size)]
    if me.rank == 0:
        if wait_until(lambda: store.check(keys) or store.check(["outcome"]), timeout_s, world_size):
            _tell_outcome(store, _GOOD)
        else:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
            _tell_outcome(
                store, f"{len(missing)} of {world_size} ranks did not arrive in {timeout_s:.0f} s: rank {shown}"
            )
    try:
        if not wait_until(lambda: store.check(["outcome"]), timeout_s + 30, world_size):
            raise LaunchError("rank 0 did not say whether all ranks arrived", "look into the log of rank 0")
        outcome = store.get("outcome").decode()
    except DistNetworkError as error:
        raise LaunchError(
            f"rank 0 left before all ranks had arrived: {error}", "look into the log of rank 0"
        ) from error
    if outcome != _GOOD and me.rank == 0:
        raise LaunchError(outcome, _SILENT_HINT)
    if outcome != _GOOD:
        raise PeerFailedError(Failure(0, "the first node", outcome))
    return tuple(_parse_member(record) for record in store.multi_get(keys))


@waiting()
def wait_until(is_so: Callable[[], bool], timeout_s: float, askers: int | None = None) -> bool:
    """Ask at growing intervals up to 0.2 s; False when the time is up. (A store's own wait logs its timeouts.)

    `askers` is how many ranks ask the same host, where somebody waits for the answer: a few may ask more often.
    """
    longest_s = 0.2 if askers is None else min(0.2, 0.02 + askers * 1e-4)
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)
    return True


def _tell_outcome(store: Store, text: str) -> None:
    """The first outcome stays."""
    store.compare_set("outcome", "", text)


def _parse_member(record: bytes) -> Member:
    me = Member(*json.loads(record))
    return me._replace(gpus=tuple(me.gpus))


def local_rank_of(members: tuple[Member, ...], rank: int) -> int:
    """The launcher's number, or else the number of lower ranks on the same host."""
    me = members[rank]
    return me.local_rank if me.local_rank is not None else sum(m.host == me.host for m in members[:rank])


def ranks_on_host(members: tuple[Member, ...], rank: int) -> int:
    """How many ranks share this rank's host."""
    return Counter(m.host for m in members)[members[rank].host]
