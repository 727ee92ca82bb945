"""The directive parsers agree with real schedulers: recorded answers of OpenPBS, and rules run on a real sbatch."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.lint.directives import ListError, chunks, read_pbs, read_slurm, split_attributes, split_resources
from hpcddp.lint.rules import lint_script
from hpcddp.lint.script import read_script

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


PARSERS = json.loads((CAPTURES / "parsers.json").read_text())["functions"]


@pytest.mark.parametrize(("what", "split"), [("reslist", split_resources), ("attrs", split_attributes)])
def test_a_list_is_split_as_openpbs_own_function_splits_it(what, split):
    plain = re.compile(r"[\w=,: ]*\w").fullmatch  # recorded were wild ones, too
    taken = [(value, parts) for value, parts in PARSERS[what]["accepted"] if plain(value) and ",," not in value]
    assert [value for value, parts in taken if split(value) != [tuple(part) for part in parts]] == []
    for value in filter(plain, PARSERS[what]["refused"]):
        with pytest.raises(ListError):
            split(value)


def test_a_select_has_chunks_where_openpbs_own_function_takes_it():
    assert [value for value in PARSERS["select"]["accepted"] if not chunks(value)] == []


SCRIPTS = CAPTURES.parent / "pbs-lint"
VERDICTS = [row.split("\t")[:2] for row in (SCRIPTS / "VERDICTS.tsv").read_text().splitlines()[1:]]
BY_VALUE = {"2", "154", "166", "170", "241"}  # of an option, or by the server: qsub says it itself, at once


@pytest.mark.parametrize(("script", "status"), VERDICTS, ids=[script for script, _ in VERDICTS])
def test_a_script_is_refused_where_a_live_qsub_refused_it(script, status):
    found = lint_script("job.sh", read_script((SCRIPTS / script).read_bytes().decode(), None, lambda path: True))
    refused = any("qsub refuses the script" in finding.what for finding in found if finding.rule != "M33")
    assert refused == (status not in {"0", *BY_VALUE} and script not in {"zg-array1.sh", "zk-I.sh"}), found


WORDS = st.sampled_from(
    [*"abcehIjJklmMNopPqrRSuvVWXz", *" =,:+#'\"@%/-\\&", "select=", "nodes=", "place=", "depend=", "9" * 5000]
)


@given(st.lists(WORDS | st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12).map("".join))
def test_no_directive_stops_the_reader(text):
    lint_script("job.sh", read_script(f"#!/bin/bash\n#PBS -{text}\nmpirun python t.py\n", None, lambda path: True))


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
