"""`hpcddp layout`: where each rank will be, before anything is queued."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.request import listed, read_plan, request_parser
from hpcddp.ranks.launcher import NUMBERS
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.ranks.predict import predict_environment
from hpcddp.script.jobplan import SOME_COMMAND, JobPlan, Placement, list_placements, plan_placement, plan_record
from hpcddp.units import format_count

_DESCRIPTION = """\
Show where each rank of a request will be: node, local rank, GPU and CPUs, and the variables that its launcher sets.
Takes the same job file and options as `hpcddp render`; nothing is queued."""


def build_parser() -> VerbParser:
    parser = request_parser(
        "layout",
        _DESCRIPTION,
        example="hpcddp layout --site abci3 --account GROUP --nodes 4 -- python train.py",
        exits=(2, 3),
    )
    printed = parser.add_argument_group("what is printed")
    printed.add_argument("--json", action="store_true", help="every rank as one JSON object, with the plan")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints the table, or JSON: `plan`, and one object per rank with its `environment`."""
    plan = read_plan(args, env)
    if args.json:
        ranks = [{**place._asdict(), "environment": _variables(plan, place)} for place in list_placements(plan)]
        print(json.dumps({"plan": plan_record(plan), "ranks": ranks}))
    else:
        sys.stdout.write(format_layout(plan))
    return 0


def format_layout(plan: JobPlan) -> str:
    """The table of ranks, and below it what the launcher sets for the last one."""
    rows: list[tuple[str, ...]] = [("rank", "node", "local rank", "GPU" if plan.gpus_per_rank == 1 else "GPUs", "CPUs")]
    for p in list_placements(plan):
        gpus = ",".join(map(str, p.gpus)) or "-"
        rows.append((str(p.rank), str(p.node_rank), str(p.local_rank), gpus, str(p.cpus)))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    unit = "hardware threads" if plan.threads_per_rank < plan.cpus_per_rank else "CPUs"
    last = plan_placement(plan, plan.world_size - 1)
    return "\n".join(
        [
            f"{plan.name} on {plan.site.name}: {plan.nodes} x {plan.ranks_per_node} ="
            f" {format_count(plan.world_size, 'rank')}"
            f" for {plan.walltime}, {plan.cpus_per_rank} {unit} each, started by {plan.makes_ranks}",
            "",
            *lines,
            *_variable_lines(plan, last),
        ]
    )


def _variable_lines(plan: JobPlan, place: Placement) -> list[str]:
    """Format what a rank's launcher sets for it; nothing if an unknown command makes the ranks."""
    if plan.rank_maker == SOME_COMMAND:
        return [""]
    if calls := LAUNCHERS[plan.launcher].calls:
        return [
            "",
            f"{plan.makes_ranks} calls {listed(calls)}, whose variables the ranks have: hpcddp env shows them",
            "",
        ]
    variables = (f"  {name}={value}" for name, value in _variables(plan, place).items())
    return ["", f"{plan.makes_ranks} sets for rank {place.rank}:", *variables, ""]


def _variables(plan: JobPlan, place: Placement) -> dict[str, str]:
    """The numbers that the launcher sets: identifiers and host names are not known before the job runs."""
    row = LAUNCHERS[plan.launcher]
    if row.calls:
        return {}
    numbers = {getattr(row, number) for number in NUMBERS}
    return {name: value for name, value in predict_rank(plan, place).items() if name in numbers}


def predict_rank(plan: JobPlan, place: Placement) -> dict[str, str]:
    """All that the launcher will set, as far as it can be foreseen; nodes are called node0, node1, …"""
    hosts = [f"node{i}" for i in range(plan.nodes)]
    return predict_environment(plan.launcher, hosts, [plan.ranks_per_node] * plan.nodes, place.rank)
