"""What a process knows about its place among the ranks."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The numbers of a place, in the order in which people are shown them.
NUMBERS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")


class RankInfo(Record):
    """One process's place. `None` where its launcher does not say, never a guess.

    rank in 0 … world_size-1 over all nodes; local_rank in 0 … local_world_size-1 on this node; node_rank in 0 …
    num_nodes-1. All numbers come from one launcher. `source` names, for each number and for `launcher`, the variable
    or file it came from.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    source: Mapping[str, str]
