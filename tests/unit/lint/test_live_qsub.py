"""lint finds in a script what a live qsub refused it for, and no refusal where that qsub took it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.lint.directives import ListError, Option, split_attributes, split_resources, split_select
from hpcddp.lint.pbs_values import refused_resources, refused_values
from hpcddp.lint.rules import lint_script
from hpcddp.lint.script import Finding, read_script

CAPTURES = Path(__file__).parents[2] / "captures"
SCRIPTS = CAPTURES / "pbs-lint"
VERDICTS = [row.split("\t")[:2] for row in (SCRIPTS / "VERDICTS.tsv").read_text().splitlines()[1:]]
# What depends on the queues, limits, groups and resources of that one server: no text of a script shows it.
OF_THE_SERVER = {3, 159, 160, 170, 173, 188, 197}
OWN_RESOURCES = ("foo", "gpu_type", "gb", "mpiproc")


def lint(text: str) -> list[Finding]:
    return lint_script("job.sh", read_script(text, None, lambda path: True))


def refusals(text: str) -> list[str]:
    return [f.what for f in lint(text) if f.kind == "mistake" and "qsub refuses the script" in f.what]


@pytest.mark.parametrize(("script", "status"), VERDICTS, ids=[script for script, _ in VERDICTS])
def test_a_script_is_refused_where_a_live_qsub_refused_it(script, status):
    text = (SCRIPTS / script).read_bytes().decode()
    if int(status) in OF_THE_SERVER:
        assert script == "w-noqueue.sh"
        assert "M9" in {finding.rule for finding in lint(text)}  # two queues: lint cannot know which are there
    else:
        assert bool(refusals(text)) == (status != "0"), lint(text)


def test_every_script_has_its_verdict():
    assert sorted(script for script, _ in VERDICTS) == sorted(path.name for path in SCRIPTS.glob("*.sh"))


def directives() -> list[tuple[str, str, bool]]:
    """Options that were given to qsub on its command line, as a directive, and whether they were refused."""
    found = []
    for file in ("errors_options", "arrays", "depend"):
        for case in json.loads((CAPTURES / f"pbs/{file}.json").read_text())["cases"]:
            words = shlex.split(str(case.get("command")))
            if words[:1] != ["qsub"] or words[-1] != "job.sh" or case["rc"] in OF_THE_SERVER:
                continue
            options = [word for word in words[1:-1] if word != "-h"]
            quotes = any("'" in word and '"' in word for word in options)
            server = case["rc"] == 187 and any(word in case["stderr"] for word in OWN_RESOURCES)
            if options and not quotes and not server and not case["what"].startswith(("cli", "dup")):
                text = " ".join(f'"{w}"' if "'" in w or '"' not in w else f"'{w}'" for w in options)
                found.append((case["what"], f"#!/bin/bash\n#PBS {text}\ntrue\n", case["rc"] != 0))
    return found


@pytest.mark.parametrize(("what", "text", "refused"), directives(), ids=[what for what, _, _ in directives()])
def test_an_options_value_is_refused_where_a_live_qsub_refused_it(what, text, refused):
    assert bool(refusals(text)) == refused, lint(text)


def test_enough_recorded_values_are_compared():
    assert len(directives()) >= 100


PARSERS = json.loads((CAPTURES / "pbs/parsers.json").read_text())["functions"]
OPTIONS = {"range": "-J", "depend": "-W depend", "prio": "-p", "keep": "-k", "points": "-m"}
RESOURCES = {"select": "select", "time": "cput", "size": "pmem", "long": "nice", "count": "ncpus"}


def taken(what: str, value: str) -> bool:
    option = Option(OPTIONS.get(what) or f"-l {RESOURCES[what]}", value, 1)
    array = [Option("-J", "1-2", 1)] * (what == "points")
    return not [*refused_values([*array, option]), *refused_resources([option])]


@pytest.mark.parametrize("what", [*OPTIONS, *RESOURCES])
def test_a_value_is_taken_where_openpbs_own_function_takes_it(what):
    if what != "select":  # whose function does not look at the names and values in it
        assert [value for value in PARSERS[what]["accepted"] if not taken(what, value)] == []
    assert [value for value in PARSERS[what]["refused"] if taken(what, value)] == []
    assert len(PARSERS[what]["accepted"]) + len(PARSERS[what]["refused"]) >= 30


@pytest.mark.parametrize(("what", "split"), [("reslist", split_resources), ("attrs", split_attributes)])
def test_a_list_is_split_as_openpbs_own_function_splits_it(what, split):
    plain = re.compile(r"[\w=,: ]*\w").fullmatch  # recorded were wild ones, too
    taken = [(value, parts) for value, parts in PARSERS[what]["accepted"] if plain(value) and ",," not in value]
    assert [value for value, parts in taken if split(value) != [tuple(part) for part in parts]] == []
    for value in filter(plain, PARSERS[what]["refused"]):
        with pytest.raises(ListError):
            split(value)


def test_a_select_has_chunks_where_openpbs_own_function_takes_it():
    assert [value for value in PARSERS["select"]["accepted"] if not split_select(value)] == []


WORDS = st.sampled_from(
    [*"abcehIjJklmMNopPqrRSuvVWXz", *" =,:+#'\"@%/-\\&", "select=", "nodes=", "place=", "depend=", "9" * 5000]
)


@given(st.lists(WORDS | st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12).map("".join))
def test_no_directive_stops_the_reader(text):
    lint(f"#!/bin/bash\n#PBS -{text}\nmpirun python train.py | tee log\n")
