"""Which point of its sweep a job is, by its index in the array: its values go into the command."""

from __future__ import annotations

from hpcddp.errors import LaunchError, RequestError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.registry import find_current_job
from hpcddp.sweep import count_points, fill_point, find_point, format_point

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcddp.supervisor.order import Order


def take_point(
    order: Order, words: list[str], env: Mapping[str, str], tell: Callable[[str], None]
) -> tuple[Order, list[str]]:
    """The order and the launcher's words of this index. LaunchError outside of an array, RequestError for words that
    were changed after they were rendered."""
    if not order.sweep:
        return order, words
    points = count_points(order.sweep)
    job = find_current_job(env) if points > 1 else None
    index = (job.array_index if job is not None else "") if points > 1 else "1"
    if not index:
        raise LaunchError(
            f"this script is an array of {points} jobs, one for each point of a sweep, and this job has no index",
            "submit it: hpcddp submit, or to the scheduler as it is",
        )
    point = find_point(order.sweep, int(index))
    filled = fill_point(order.command, point)
    row = LAUNCHERS.get(str(order.plan.get("launcher")))
    is_own = row is None or order.makes_ranks != row.name  # the command makes its ranks itself
    as_told = list if is_own or row is None else row.as_arguments
    command = as_told(order.command)
    if words[-len(command) :] != command:
        raise RequestError("the command was changed after it was rendered", "render the script again")
    tell(f"point {index} of {points}: {format_point(point)}" if points > 1 else f"sweep: {format_point(point)}")
    plan = {**order.plan, "command": filled, "point": point}
    return order._replace(plan=plan), [*words[: -len(command)], *as_told(filled)]
