"""The launch of a process: its place, its allocation, the key of the launch and rank 0's address, each read once."""

from __future__ import annotations

from functools import cached_property

from hpcddp.ranks.rendezvous import find_key, find_parent_key, find_rendezvous
from hpcddp.ranks.resolve import find_rank, require_info
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.registry import find_allocation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.launcher import RankInfo
    from hpcddp.ranks.rendezvous import Rendezvous
    from hpcddp.ranks.resolve import FoundRank
    from hpcddp.schedulers.allocation import Allocation


class Launch:
    """An environment's launch. Each property is read when it is first used, and cached.

    `hostname` is this host's name if known. `nodefile` stands in for the file that the scheduler's variables name. With
    `live` the environment is this process's own, so that its parents and sockets tell as well. `strict`: see
    `find_rendezvous`. LaunchError from a property if the environment contradicts itself.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        hostname: str | None,
        nodefile: str | None = None,
        *,
        live: bool = True,
        strict: bool = True,
    ) -> None:
        self.env = env
        self.hostname = hostname
        self.nodefile = nodefile
        self.live = live
        self.strict = strict

    @cached_property
    def allocation(self) -> Allocation | None:
        return find_allocation(self.env, self.nodefile, live=self.live)

    @cached_property
    def place(self) -> FoundRank:
        """The place of this rank; its world size may be unknown."""
        return find_rank(self)

    @cached_property
    def info(self) -> RankInfo:
        return require_info(self.place)

    @cached_property
    def key(self) -> tuple[str, str]:
        """A text that only the ranks of this launch have, and its source; both empty if nothing gives one."""
        return find_key(self)

    @cached_property
    def local_key(self) -> tuple[str, str]:
        """The `key`; without one, the process that started the ranks, if all of them are on this node."""
        return self.key if self.key[0] or not self.live else find_parent_key(self.info)

    @cached_property
    def rendezvous(self) -> Rendezvous:
        return find_rendezvous(self)
