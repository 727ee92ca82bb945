"""What a job script tells the supervisor, as one quoted argument: the request, the plan, and what a launcher needs."""

from __future__ import annotations

import json

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from typing import Any

#: Between the command that copies data to the nodes and the launcher's.
THEN = "--then"


class Order(Record):
    """`request`: the text of job.yaml. `plan`: what plan.json holds. `makes_ranks`: the launcher, or what makes the
    ranks in its place, for people. `walltime_s`: None where nothing ends the job. `passes_on`: the signal that
    it hands to the ranks alive; "": none does so. `grace_s`: seconds that it leaves them then; 0: as many as they need.
    `warns_s`: seconds before the end at which the ranks are warned; 0: never, or the scheduler does it. `chain`: how
    many attempts there may be; 0: no chain. `follow_options`: further options of the command that queues the next one.
    """

    request: str
    plan: dict[str, Any]
    makes_ranks: str
    walltime_s: int | None = None
    passes_on: str = ""
    grace_s: int = 0
    warns_s: int = 0
    chain: int = 0
    follow_options: tuple[str, ...] = ()
    fresh: bool = False
    resume: str | None = None

    @property
    def scheduler(self) -> str:
        """The name of its row."""
        return str(self.plan["scheduler"])

    @property
    def command(self) -> tuple[str, ...]:
        """What each rank runs."""
        return tuple(map(str, self.plan["command"]))


def format_order(order: Order) -> str:
    """One line of ASCII; what is as usual is left out."""
    usual = Order._field_defaults
    told = {name: value for name, value in order._asdict().items() if name not in usual or value != usual[name]}
    return json.dumps(told)


def read_order(text: str) -> Order:
    """RequestError if the text is none that this hpcddp writes."""
    try:
        told = json.loads(text)
        order = Order(**{**told, "follow_options": tuple(told.get("follow_options", ()))})
        known = (order.scheduler, order.command)
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError(
            "the job script's order to hpcddp supervise cannot be read: it was changed, or another hpcddp made it",
            "render the script again: hpcddp render",
        ) from error
    assert known
    return order


def split_stage(words: list[str]) -> tuple[list[str], list[str]]:
    """The command that copies data to the nodes, empty if there is none, and the launcher's."""
    if THEN not in words:
        return [], words
    cut = words.index(THEN)
    return words[:cut], words[cut + 1 :]
