"""How many of the mistakes in tests/verify/scripts.py `hpcddp verify` finds, and for how many right scripts it raises
an alarm. `python benchmarks/verify.py NAME …` runs these scripts alone, and prints what was found.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from hpcddp.verify.report import format_verification, list_causes
from hpcddp.verify.trials import Plan, Verification, compare, hosting

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "verify"))
from scripts import MISTAKES, RIGHT


def main(wanted: list[str]) -> None:
    """Run the scripts, one after the other."""
    with tempfile.TemporaryDirectory() as folder, hosting([sys.executable], folder, os.environ) as host:
        for kind, scripts in (("mistake", MISTAKES), ("right", RIGHT)):
            found = 0
            for nth, (name, script) in enumerate(scripts.items()):
                if wanted and name not in wanted:
                    continue
                home = Path(folder, f"{kind}-{nth}", "home")
                home.mkdir(parents=True)
                (home / "train.py").write_text(script.text(), encoding="utf-8")
                began = time.perf_counter()
                plan = Plan(str(home), ("python", "train.py"), 8, 600)
                result = compare(plan, str(home.parent), host, lambda _: None)
                found += bool(result.differences)
                print(f"| {kind} | {name} | {describe(result)} | {time.perf_counter() - began:.1f} s |", flush=True)
                if wanted:
                    print(format_verification("train.py", result))
            print(f"| {kind} | found | {found} of {len(scripts)} | |", flush=True)


def describe(result: Verification) -> str:
    """What was found first."""
    if not result.differences:
        return "-"
    one = result.differences[0]
    step = f"step {one.place[1] + 1}, " if one.place else ""
    return f"{step}{one.kind} {' and '.join(one.runs)}; {len(list_causes(one))} causes"


if __name__ == "__main__":
    main(sys.argv[1:])
