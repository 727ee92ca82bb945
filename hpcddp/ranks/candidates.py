"""Finds the candidates in an environment: every launcher's row that stands there, whole or refused.

Nothing is decided here; `innermost` does that. A row is read as one tuple from one launcher, never variable by
variable.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.ranks.launcher import NUMBERS, Candidate, Launcher, is_present
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.allocation import expand_counts
from hpcddp.units import format_count, read_number, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping


# The form of PALS' layout file, `$PALS_APINFO`.
_HEADER = "@iNNNiNNiNNiNNiNNiNNN"  # 160 bytes, 20 fields
_VERSION, _PE_SIZE, _PE_OFFSET, _NPES, _NODE_SIZE, _NODE_OFFSET, _NNODES = 0, 8, 9, 10, 11, 12, 13
_PE = "@iii"  # local index, command index, node index
_NODE = "@i64s"  # nid, host name


class ApInfo(Record):
    """The layout of one launch by Cray PALS: host names in node order; for each rank its node's index and its index
    there."""

    hosts: tuple[str, ...]
    node_of: tuple[int, ...]
    local_of: tuple[int, ...]


def read_apinfo(path: str) -> ApInfo | None:
    """The layout in this file; None if it cannot be read here, is not version 5, or is cut short or garbled."""
    import struct  # only a PALS launch pays for it

    try:
        with open(path, "rb") as file:
            data = file.read()
        head = struct.unpack_from(_HEADER, data)
        if head[_VERSION] != 5:
            return None
        nodes = [
            struct.unpack_from(_NODE, data, head[_NODE_OFFSET] + i * head[_NODE_SIZE])[1].split(b"\0")[0].decode()
            for i in range(head[_NNODES])
        ]
        ranks = [struct.unpack_from(_PE, data, head[_PE_OFFSET] + i * head[_PE_SIZE]) for i in range(head[_NPES])]
    except (OSError, struct.error, OverflowError, UnicodeDecodeError):
        return None
    if any(not 0 <= node < len(nodes) or local < 0 for local, _, node in ranks):
        return None
    return ApInfo(tuple(nodes), tuple(r[2] for r in ranks), tuple(r[0] for r in ranks))


def find_candidates(env: Mapping[str, str]) -> list[Candidate]:
    """Every launcher whose row stands in `env`. LaunchError on half a row or a value that is no number."""
    return [read_row(key, env) for key, row in LAUNCHERS.items() if stands(row, env)]


def stands(row: Launcher, env: Mapping[str, str]) -> bool:
    """Whether this row is to be read."""
    if not is_present(row, env) or (row.step is not None and not row.step.is_task(env)):
        return False
    # a rank or a size alone, set by hand, is something to compare a launcher's row with
    return not row.by_hand or (row.rank in env and row.world_size in env)


def read_row(key: str, env: Mapping[str, str]) -> Candidate:
    """Read this launcher's row. LaunchError if half of it is missing or a value is no number."""
    row = LAUNCHERS[key]
    variables = {number: getattr(row, number) for number in NUMBERS}
    missing = [v for number, v in variables.items() if v and v not in env and number not in row.optional]
    if missing:
        found = [v for v in dict.fromkeys((*variables.values(), *row.marks)) if v in env]
        shown = ", ".join(f"{v}={shorten(env[v])}" for v in found)
        raise LaunchError(
            f"half a row from {row.name}: {shown}, but {' and '.join(missing)} not set",
            f"start the program with `{_command(row)}`, or unset {' '.join(found)} if it is a leftover",
        )
    source = {number: v for number, v in variables.items() if v in env}
    numbers: dict[str, int | None] = dict.fromkeys(NUMBERS)
    numbers |= {number: _parse(row, number, v, env) for number, v in source.items()}
    if row.layout_file:
        _read_layout(row, numbers, source, env)
    return Candidate(key, row, numbers, source)


def _parse(row: Launcher, number: str, variable: str, env: Mapping[str, str]) -> int:
    text = env[variable]
    if variable == row.local_world_size and row.step is not None:  # a run-length list for all nodes
        counts = expand_counts(text, variable)
        node = read_number(env.get(row.node_rank, ""))
        if node is None or node >= len(counts):
            raise LaunchError(
                f"{row.node_rank}={env.get(row.node_rank)} is none of the {format_count(len(counts), 'node')}"
                f" of {variable}={text}",
                f"start the program with {row.name}; if these are leftovers of another step, unset {row.marks[0]}",
            )
        return counts[node]
    value = read_number(text)
    if value is None:
        raise LaunchError(
            f"{variable}={shorten(text)!r} is not a whole number of 0 or more, so {row.name}'s {number} is unknown",
            f"unset {variable}",
        )
    return value


def _read_layout(row: Launcher, numbers: dict[str, int | None], source: dict[str, str], env: Mapping[str, str]) -> None:
    """World size, nodes and local size from the file that the launcher writes, where it can be read."""
    variable = row.layout_file
    path, rank = env.get(variable, ""), numbers["rank"]
    info = read_apinfo(path) if path else None
    if info is None or rank is None or rank >= len(info.node_of):
        return
    node = info.node_of[rank]
    layout = {
        "world_size": len(info.node_of),
        "num_nodes": len(info.hosts),
        "node_rank": node,
        "local_rank": info.local_of[rank],
        "local_world_size": info.node_of.count(node),
    }
    for number, value in layout.items():
        if numbers[number] is None:
            numbers[number], source[number] = value, f"{variable} ({path})"
        elif numbers[number] != value:
            raise LaunchError(
                f"{source[number]}={numbers[number]}, but {variable} ({path}) says {number} {value}",
                f"start the program with `{_command(row)}`; one of the two is a leftover of another launch",
            )


def _command(row: Launcher) -> str:
    return (row.command or LAUNCHERS[row.name].command).format(n="N") or row.name
