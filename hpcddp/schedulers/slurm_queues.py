"""What sinfo prints of partitions and their nodes."""

from __future__ import annotations

from hpcddp.schedulers.row import QueueFound
from hpcddp.units import read_number

_FIELDS = 8


def parse_partitions(text: str) -> list[QueueFound]:
    """Partitions, of the largest node each has: `gpu|4|16|16000|gpu:a100:8(S:0-1)|1-00:00:00|up|1-4`. ValueError for a
    line of another form, and for none: what is cut off or an error page says nothing of the partitions it lacks."""
    rows = [line.split("|") for line in text.splitlines() if line.strip()]
    odd = next((row for row in rows if len(row) != _FIELDS or not row[0]), None)
    if odd is not None or not rows:
        raise ValueError(f"{'|'.join(odd)[:60]!r} is no partition's line" if odd else "it shows no partition")
    counted = any("gpu:" in row[4] for row in rows)  # else this Slurm does not count GPUs
    lines: dict[str, list[QueueFound]] = {}
    for row in rows:
        lines.setdefault(row[0], []).append(_read_line(row, counted))
    return [_join(each) for each in lines.values()]


def _read_line(row: list[str], counted: bool) -> QueueFound:
    name, nodes, cpus, memory, gres, limit, up, size = row
    gpus, gpu = _read_gpus(gres, counted)
    return QueueFound(
        name,
        read_number(nodes),
        read_number(cpus.rstrip("+")) or None,
        (read_number(memory.rstrip("+")) or 0) // 1024 or None,
        gpus,
        gpu,
        _parse_limit(limit),
        read_number(size.rpartition("-")[2]) or None,  # else it is infinite
        up == "up",
        mixed=cpus.endswith("+"),  # the least of several
    )


def _join(lines: list[QueueFound]) -> QueueFound:
    """One partition of the lines for its kinds of nodes."""
    largest = max(lines, key=lambda line: (line.gpus or 0, line.cpus or 0))
    kinds = {(line.cpus, line.gpus, line.gpu) for line in lines}
    of_it = [line for line in lines if (line.cpus, line.gpus) == (largest.cpus, largest.gpus)]
    return largest._replace(
        nodes=sum(line.nodes or 0 for line in lines) or None,
        mem_gb=max((line.mem_gb for line in of_it if line.mem_gb), default=None),
        mixed=len(kinds) > 1 or any(line.mixed for line in lines),
    )


def _read_gpus(gres: str, counted: bool) -> tuple[int | None, str | None]:
    """`gpu:a100:4(S:0-1),nvme:1`; of several kinds in a node the sum, without a kind."""
    import re

    kinds = re.findall(r"\bgpu:(?:([^:,()]+):)?(\d{1,9})(?=[(,]|$)", gres, re.ASCII)
    if not kinds:
        return (0 if counted and "gpu:" not in gres else None), None
    return sum(int(count) for _, count in kinds), (kinds[0][0] or None) if len(kinds) == 1 else None


def _parse_limit(limit: str) -> str | None:
    """sinfo's `1-00:00:00`, `30:00` (minutes) or `infinite`, as H:M:S."""
    import re

    found = re.fullmatch(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})", limit, re.ASCII)
    if not found:
        return None
    days, hours, minutes, seconds = (int(n or 0) for n in found.groups())
    whole = f"{days * 24 + hours}:{minutes:02d}:{seconds:02d}"
    return whole if whole.strip("0:") else None
