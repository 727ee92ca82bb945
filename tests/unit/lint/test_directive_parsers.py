"""The directive parsers agree with real schedulers: recorded answers of OpenPBS, and rules run on a real sbatch."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hpcddp.lint.directives import chunks, read_pbs, read_slurm

CAPTURES = Path(__file__).parents[2] / "captures/pbs"
# qsub's own options in these runs change what it looks for, and one was given no script file.
RUNS = [
    case
    for case in json.loads((CAPTURES / "directives.json").read_text())["cases"]
    if case.get("command") == "qsub -h job.sh" and "pre" not in case
]
NAME = re.compile(r"[A-Za-z0-9._+-]{1,230}")  # refused when the name is checked, after parsing


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case["what"])
def test_a_pbs_script_is_read_as_openpbs_read_it(case):
    found = read_pbs(case["script"])
    name = found.get("-N")
    refused = bool(found.refusals) or not NAME.fullmatch(name.value if name else "job.sh")
    assert refused == (case["rc"] != 0), (found, case["stderr"])
    if refused:
        return
    assert (name.value if name else "job.sh") == case["job"]["Job_Name"]
    queue = found.get("-q")
    assert (queue.value if queue else "workq") == case["job"]["queue"]
    select = found.get("-l select")
    assert (select.value if select else "1:ncpus=1") == str(case["job"]["Resource_List"]["select"])
    walltime = found.get("-l walltime")
    assert bool(walltime) == ("walltime" in case["job"]["Resource_List"])
    assert walltime is None or walltime.value == "60"  # of two the first, as recorded: 00:01:00


def test_enough_recorded_runs_are_compared():
    assert len(RUNS) >= 30


OPTIONS = [
    case
    for case in json.loads((CAPTURES / "errors_options.json").read_text())["cases"]
    if re.search(r"-l '?select=", case["command"]) and case["what"].startswith("select")
]


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: case["what"])
def test_a_select_is_a_list_of_chunks_if_openpbs_takes_it(case):
    """What needs the server's list of resources, or their types, is not decided here."""
    words = shlex.split(case["command"])
    text = next(w for w in words if w.startswith("select=")).removeprefix("select=")
    if case["rc"] == 0 and "," not in text:
        assert chunks(text)
    elif "Illegal attribute or resource value Resource_List.select" in case["stderr"]:
        assert not chunks(text)


def options(text: str) -> list[tuple[str, str]]:
    return [(o.name, o.value) for o in read_slurm(f"#!/bin/bash\n{text}\n").options]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("#SBATCH --job-name=a#b", [("--job-name", "a")]),
        ("#SBATCH --job-name='a#b' # note", [("--job-name", "a#b")]),
        ("#SBATCH --job-name='fr\\ob'", [("--job-name", "frob")]),
        ('#SBATCH --job-name="a\\ b"c', [("--job-name", "a bc")]),
        ("#SBATCH -N4 -n 8 -t1:00:00", [("--nodes", "4"), ("--ntasks", "8"), ("--time", "1:00:00")]),
        ("#SBATCH --exclusive --nodes 2", [("--exclusive", ""), ("--nodes", "2")]),
        ("#SBATCH-N2", [("--nodes", "2")]),
        ("  #SBATCH -N2", []),
        ("#sbatch -N2", []),
        (": x\n#SBATCH -N2", []),
        ("\n  # note\n#SBATCH -N2", [("--nodes", "2")]),
        ("#SBATCH hetjob\n#SBATCH -N2", [("--nodes", "2")]),
    ],
)
def test_an_sbatch_line_is_read_by_the_measured_rules(line, found):
    assert options(line) == found
    assert not read_slurm(f"#!/bin/bash\n{line}\n").refusals


@pytest.mark.parametrize("line", ["#SBATCH --job-name='a", "#SBATCH -N 2 two", "#SBATCH -N 2\r"])
def test_sbatch_refuses_what_it_cannot_split(line):
    assert read_slurm(f"#!/bin/bash\n{line}\necho\n").refusals


def test_sbatch_wants_an_interpreter_line_first():
    assert read_slurm("\n#!/bin/bash\n").refusals
    assert not read_pbs("\n#!/bin/bash\n").refusals


def test_lines_that_are_not_read_are_known():
    assert read_slurm("#!/bin/sh\n  #SBATCH -N2\necho\n#SBATCH -n2\n").unread == (2, 4)
    assert read_pbs("#!/bin/sh\n  #PBS -N x\necho\n#PBS -q y\n").unread == (4,)
