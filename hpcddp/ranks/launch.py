"""The launch of this process: its place, its allocation, the key of the launch and rank 0's address, each read once."""

from __future__ import annotations

from functools import cached_property

from hpcddp.ranks.allocation import find_allocation
from hpcddp.ranks.rendezvous import find_rendezvous, launch_key, parent_key
from hpcddp.ranks.resolve import resolve
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.ranks.allocation import Allocation
    from hpcddp.ranks.rankinfo import RankInfo
    from hpcddp.ranks.rendezvous import Rendezvous


class Launch:
    """What the environment of this very process tells. Each property is read when it is first used, and kept.

    LaunchError from a property if the environment contradicts itself.
    """

    def __init__(self, env: Mapping[str, str], hostname: str) -> None:
        self.env = env
        self.hostname = hostname

    @cached_property
    def allocation(self) -> Allocation | None:
        return find_allocation(self.env, live=True)

    @cached_property
    def info(self) -> RankInfo:
        return resolve(self.env, live=True, allocation=lambda: self.allocation)

    @cached_property
    def key(self) -> tuple[str, str]:
        """A text that only the ranks of this launch have, and its source; both empty if no variable gives one."""
        return launch_key(self.env, self.info, allocation=lambda: self.allocation)

    @cached_property
    def local_key(self) -> tuple[str, str]:
        """As `key`; without one, the process that started the ranks, if all of them are on this node."""
        return self.key if self.key[0] else parent_key(self.info)

    @cached_property
    def rendezvous(self) -> Rendezvous:
        return find_rendezvous(
            self.env,
            self.info,
            hostname=self.hostname,
            live=True,
            allocation=lambda: self.allocation,
            key=lambda: self.local_key,
        )
