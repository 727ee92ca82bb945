"""Predicts each rank's variables from a layout: the inverse of `resolve`, from the same rows.

For any launcher and layout, resolving the predicted environment gives the layout back; a test says so for all of them.
"""

from __future__ import annotations

from itertools import groupby

from hpcddp.errors import RequestError, nearest
from hpcddp.ranks.launcher import NUMBERS
from hpcddp.ranks.launchers import LAUNCHER_NAMES, LAUNCHERS
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def predict_environment(
    launcher: str, nodes: int | Sequence[str], ranks_per_node: int | Sequence[int], rank: int
) -> dict[str, str]:
    """The variables by which this launcher will tell this rank its place, with ranks filled node by node.

    `nodes`: how many, or their host names (without names, no variable that holds one). `ranks_per_node`: one number for
    all, or one per node; at least 1. RequestError on an unknown launcher. `none` sets nothing.
    """
    hosts = () if isinstance(nodes, int) else tuple(nodes)
    count = nodes if isinstance(nodes, int) else len(hosts)
    tasks = [ranks_per_node] * count if isinstance(ranks_per_node, int) else list(ranks_per_node)
    if launcher not in LAUNCHER_NAMES:
        raise RequestError(
            f"{launcher!r} is not a launcher{nearest(launcher, list(LAUNCHER_NAMES))}",
            f"one of: {' '.join(LAUNCHER_NAMES)}",
        )
    if launcher == "none":
        return {}
    node = next(i for i in range(count) if rank < sum(tasks[: i + 1]))
    first = sum(tasks[:node])
    row = LAUNCHERS[launcher]
    values = (rank, sum(tasks), rank - first, tasks[node], node, count)
    variables = [getattr(row, number) for number in NUMBERS]
    predicted = {name: str(value) for name, value in zip(variables, values, strict=True) if name}
    if hosts:
        predicted |= dict.fromkeys(row.host, hosts[node])
    # What tells the row from others, and Slurm's account of all nodes.
    ranks = ",".join(str(first + i) for i in range(tasks[node]))
    texts = {"node": node, "ranks": ranks, "tasks": _run_lengths(tasks), "hosts": ",".join(hosts)}
    return predicted | {name: value for name, form in row.also_sets if (value := form.format(**texts))}


def _run_lengths(counts: Sequence[int]) -> str:
    """Format counts as Slurm does: 2, 2, 2, 1 is `2(x3),1`."""
    runs = ((count, len([*equal])) for count, equal in groupby(counts))
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
