"""What changes when the same request goes to another site."""

from __future__ import annotations

import difflib

from hpcddp.script.explain import NO_SCRIPT
from hpcddp.script.plan import JobPlan
from hpcddp.script.record import plan_record


def compare_plans(first: tuple[JobPlan, str], second: tuple[JobPlan, str]) -> str:
    """Two plans and their scripts: the decisions that differ, then a unified diff. No scheduler takes it for a job."""
    (one, one_script), (two, two_script) = first, second
    records = plan_record(one), plan_record(two)
    names = list(dict.fromkeys([*records[0], *records[1]]))
    rows = [(name, *(_text(record.get(name)) for record in records)) for name in names]
    differing = [row for row in rows if row[1] != row[2] and row[0] != "created_by"]
    widths = [max((len(row[i]) for row in differing), default=0) for i in (0, 1)]
    table = "".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}\n" for a, b, c in differing)
    lines = difflib.unified_diff(
        one_script.splitlines(), two_script.splitlines(), one.site.name, two.site.name, lineterm="", n=1
    )
    return NO_SCRIPT + table + "\n" + "".join(f"{line}\n" for line in lines)


def _text(value: object) -> str:
    return "-" if value is None else str(value)
