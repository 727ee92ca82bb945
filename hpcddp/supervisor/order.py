"""What a job script tells the supervisor, as one quoted argument: the request, the plan, and what a launcher needs."""

from __future__ import annotations

import json

from hpcddp.errors import RequestError
from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

#: Between the command that copies data to the nodes and the launcher's.
THEN = "--then"
_NOTHING: Mapping[str, Any] = {}
_WHOLE = ("walltime_s", "warns_s", "chain")


class Recover(Record):
    """How a job goes on without what it has lost. `restarts`: how often the ranks may be started again. `fits`: the
    numbers of nodes on which the request works out. `spares`: nodes of the job beyond those that it trains on.
    `limit_s`: how long ranks may be silent or make no step. `health`: what a node has to run without an error, for a
    shell; "": nothing. `request`: the LaunchRequest of the script's launcher, as far as it is not as usual; `stage`:
    that of what copies data to the nodes.
    """

    restarts: int
    fits: tuple[int, ...]
    spares: int = 0
    limit_s: float = 60
    health: str = ""
    request: Mapping[str, Any] = _NOTHING
    stage: Mapping[str, Any] = _NOTHING


class Order(Record):
    """`request`: the text of job.yaml. `plan`: what plan.json holds. `makes_ranks`: the launcher, or what makes the
    ranks in its place, for people. `walltime_s`: None where nothing ends the job.
    `warns_s`: seconds before the end at which the ranks are warned; 0: never, or the scheduler does it. `chain`: how
    many attempts there may be; 0: no chain. `follow_options`: further options of the command that queues the next one.
    `recover`: None: the job ends with the first rank that does. `calls`: the launcher that starts what makes the ranks.
    `made`: the name of the run that `hpcddp submit` made for the job; `resumes`: that of one that the job was submitted
    to resume.
    `stages`: whether a command that copies data to the nodes goes before the launcher's.
    `sweep`: the axes, name -> values, where the job is a point of one, or all points as an array.
    """

    request: str
    plan: dict[str, Any]
    makes_ranks: str
    walltime_s: int | None = None
    warns_s: int = 0
    chain: int = 0
    follow_options: tuple[str, ...] = ()
    fresh: bool = False
    resume: str | None = None
    recover: Recover | None = None
    calls: str = ""
    made: str = ""
    resumes: str = ""
    stages: bool = False
    sweep: Mapping[str, Any] = _NOTHING

    @property
    def launcher(self) -> str:
        """The row of the launcher that the script calls."""
        return self.calls or str(self.plan.get("launcher", ""))

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
    told = leave_out_usual(order)
    if order.recover is not None:
        told["recover"] = leave_out_usual(order.recover)
    return json.dumps(told)


def leave_out_usual(record: Any) -> dict[str, Any]:
    """The fields of a Record that are not as their defaults."""
    usual = record._field_defaults
    return {name: value for name, value in record._asdict().items() if name not in usual or value != usual[name]}


def read_order(text: str) -> Order:
    """RequestError if the text is none that this hpcddp writes."""
    try:
        told = json.loads(text)
        order = Order(**{**told, "follow_options": tuple(told.get("follow_options", ()))})
        if order.recover is not None:
            order = order._replace(recover=Recover(**{**told["recover"], "fits": tuple(told["recover"]["fits"])}))
        _check(order)
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError(
            "the job script's order to hpcddp supervise cannot be read: it was changed, or another hpcddp made it",
            "render the script again: hpcddp render",
        ) from error
    return order


def _check(order: Order) -> None:
    """TypeError or KeyError for what people change in a script and hpcddp does not write."""
    plan = order.plan
    whole = [getattr(order, name) for name in _WHOLE] + [plan["nodes"], plan["ranks_per_node"], plan["world_size"]]
    if order.recover is not None:
        whole += [*order.recover.fits, order.recover.restarts, order.recover.spares]
    texts = [order.request, order.makes_ranks, plan["name"], order.scheduler, *plan["command"]]
    if not (all(isinstance(one, int | None) for one in whole) and all(isinstance(one, str) for one in texts)):
        raise TypeError


def split_stage(order: Order, words: list[str]) -> tuple[list[str], list[str]]:
    """The command that copies data to the nodes, empty if there is none, and the launcher's."""
    if not order.stages:
        return [], words  # a program may have an argument of this name
    cut = words.index(THEN)
    return words[:cut], words[cut + 1 :]
