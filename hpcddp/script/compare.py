"""What changes when the same request goes to another site."""

from __future__ import annotations

import difflib
from typing import Any

from hpcddp.script.explain import no_script
from hpcddp.script.plan import JobPlan
from hpcddp.script.record import plan_record


def compare_plans(first: tuple[JobPlan, str], second: tuple[JobPlan, str]) -> str:
    """Two plans and their scripts: the decisions that differ, then a unified diff. No scheduler takes it for a job."""
    record = comparison_record(first, second)
    differing = [(name, *map(_text, values)) for name, values in record["differing"].items()]
    widths = [max((len(row[i]) for row in differing), default=0) for i in (0, 1)]
    table = "".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}\n" for a, b, c in differing)
    return no_script() + table + "\n" + "".join(f"{line}\n" for line in record["script_diff"])


def comparison_record(first: tuple[JobPlan, str], second: tuple[JobPlan, str]) -> dict[str, Any]:
    """The same as JSON values; in `differing` the first plan's value and the second's."""
    (one, one_script), (two, two_script) = first, second
    records = plan_record(one), plan_record(two)
    pairs = {name: [record.get(name) for record in records] for name in dict.fromkeys([*records[0], *records[1]])}
    lines = difflib.unified_diff(
        one_script.splitlines(), two_script.splitlines(), one.site.name, two.site.name, lineterm="", n=1
    )
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name != "created_by"}
    return {"sites": [one.site.name, two.site.name], "differing": differing, "script_diff": list(lines)}


def _text(value: object) -> str:
    return "-" if value is None else str(value)
