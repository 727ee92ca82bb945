"""What lint reads in a script is what sbatch reads in it, and a live Slurm is asked before a job is queued."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from livecluster import Cluster

from hpcddp.lint.directives import read_slurm
from hpcddp.schedulers.registry import find_scheduler

pytestmark = pytest.mark.cluster

LINES = [
    "#SBATCH --job-name=a#b --comment=c",
    "#SBATCH --job-name='a#b' # note",
    "#SBATCH --job-name='fr\\ob'",
    '#SBATCH --job-name="a\\ b"c',
    "#SBATCH-Jx -tbanana",
    "  #SBATCH -Jx",
    "#sbatch -Jx",
    ": x\n#SBATCH -Jx",
    "\n  # note\n#SBATCH -Jx",
    "#SBATCH -J\n#SBATCH y",
    "#SBATCH -Jx '' lost",
    "#SBATCH --job-name='a",
    "#SBATCH -J x two",
]


def odd_lines(seed: int) -> list[str]:
    """Directives of letters that mean something to a parser."""
    dice = random.Random(seed)  # not for secrets
    starts = ["#SBATCH ", "#SBATCH\t", " #SBATCH ", "##SBATCH ", "echo ", ""]
    options = ["--job-name=", "--comment=", "-J", "--comment "]

    def word() -> str:
        return dice.choice(options) + "".join(dice.choice("ab1'\"\\# \t=") for _ in range(dice.randint(0, 6)))

    return ["\n".join(dice.choice(starts) + word() for _ in range(dice.randint(1, 3))) for _ in range(40)]


def test_an_option_that_needs_another_one_is_refused_by_sbatch_without_it(cluster: Cluster, shared: Path) -> None:
    for option in find_scheduler("slurm").directives.needs:
        done = cluster.sh(["sbatch", "--test-only", f"{option}=2", "--wrap=true"], cwd=shared)
        assert (done.returncode != 0, "sbatch: error" in done.stderr) == (True, True), done.stderr


@pytest.mark.parametrize("lines", [LINES, odd_lines(1), odd_lines(2)], ids=["measured", "odd 1", "odd 2"])
def test_sbatch_reads_a_script_as_lint_does(cluster: Cluster, shared: Path, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        (shared / f"{number}.sh").write_text(f"#!/bin/bash\n{line}\necho\n")
    ask = "ls *.sh | xargs --max-procs=8 -I{} sh -c 'sbatch -vv --test-only < {} 2> {}.said || true'"
    cluster.ok(["sh", "-c", ask], cwd=shared)  # each waits for the controller: side by side
    for number, line in enumerate(lines):
        text, said = ((shared / f"{number}.sh{end}").read_text() for end in ("", ".said"))
        found = read_slurm(text)
        refused = re.search(r"Unmatched|Invalid directive", said) is not None
        assert refused == bool(found.refusals), (line, said)
        if refused or "requires an argument" in said or "Invalid" in said:
            continue
        read = dict(re.findall(r"^sbatch: (job-name|comment) +: (.*)$", said, re.MULTILINE))
        for name in ("job-name", "comment"):
            option = found.get(f"--{name}")
            assert read.get(name, "") == (option.value if option else ""), (line, said)
