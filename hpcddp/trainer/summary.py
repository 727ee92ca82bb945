"""The trainer's own lines of the summary at the end of a run."""

from __future__ import annotations

from hpcddp.training.rendezvous.group import Group
from hpcddp.training.rendezvous.roll_call import local_rank_of
from hpcddp.training.runtime import Runtime

_SHOWN_RANKS = 16


def format_places(group: Group) -> list[str]:
    """One text per rank: where it was. Many ranks are cut short."""
    places = [
        f"rank {rank:<4} {member.host}  local rank {local_rank_of(group.members, rank)}  {group.device_name(rank)}"
        for rank, member in enumerate(group.members[:_SHOWN_RANKS])
    ]
    more = group.world_size - len(places)
    return places + ([f"… and {more} more: versions.json has them all"] if more else [])


def describe(rt: Runtime, what: str, accuracy: float | None) -> dict[str, str]:
    """The trainer's lines of the summary, by name. `accuracy` None: no epoch was tested in this attempt."""
    lines = {"model": what}
    lines["accuracy"] = f"{accuracy:.2%} on the test images" if accuracy is not None else "not tested"
    lines["batch"] = str(rt.plan)
    lines["ranks"] = "\n            ".join([rt.group.describe(), *format_places(rt.group)])
    return lines
