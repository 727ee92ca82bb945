"""The start of a site's file: what the scheduler says of its queues and nodes, and comments for what only people know.

The scheduler's own module parses what its commands print: see `parse_survey` in its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpcddp.ranks.launchers import launchers_under
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import Directives, QueueFound


def format_start(name: str, scheduler: str, date: str, queues: Iterable[QueueFound], asked: str) -> str:
    """The file's text. What was not found is a comment to fill in."""
    row = find_scheduler(scheduler)
    lines = [
        "# https://docs.example.org/  <- the address of the user guide: change it",
        "schema: 1",
        f"summary: {name}",
        f"scheduler: {scheduler}",
        "standing: practice         # documented, once each fact below names a page of the guide",
        f"verified: {date}",
        "sources:",
        f"  scheduler: {asked or 'nothing was asked'}",
        "#  jobs: https://docs.example.org/jobs",
        "",
        f"# account: {{required: true, source: jobs}}{_other_options(row.directives)}",
        "# walltime: 1:00:00                          # if a job says none",
        *_queue_lines(list(queues)),
        "# modules: {load: [cuda, mpi], source: jobs}",
        f"launcher: {{name: {launchers_under(scheduler)[0]}}}",
        "# env: {NCCL_SOCKET_IFNAME: ib0}",
        "# All keys: docs/sites.md. Leave out what you do not know: hpcddp asks for it.",
        *row.commands.site_lines,
    ]
    return "\n".join(lines) + "\n"


def _other_options(rules: Directives) -> str:
    """The options that carry the account on some sites, beside the usual one."""
    others = [option for option in rules.site_words.get("account", ()) if option != rules.account]
    return f"    # option: {' or '.join(others)}, where it is not {rules.account}" if others else ""


def _queue_lines(queues: list[QueueFound]) -> Iterator[str]:
    if not queues:
        yield "# queue: gpu"
        yield "# queues:"
        yield "#   gpu: {gpus: 4, gpu: A100, cpus: 64, mem_gb: 512, source: jobs,"
        yield "#         limits: [{nodes: 1-8, walltime: 24:00:00}]}"
        return
    yield f"queue: {max(queues, key=lambda q: q.gpus or 0).name}"
    yield "queues:"
    for queue in queues:
        known = {"gpus": queue.gpus, "gpu": queue.gpu, "cpus": queue.cpus, "mem_gb": queue.mem_gb}
        facts = [f"{key}: {value}" for key, value in known.items() if value is not None]
        nodes = f"nodes: 1-{queue.nodes}" if (queue.nodes or 0) > 1 else "nodes: 1"
        rule = f"{nodes}, walltime: {queue.walltime}" if queue.walltime else nodes
        yield f"  {queue.name}: {{{', '.join([*facts, f'limits: [{{{rule}}}]', 'source: scheduler'])}}}"
