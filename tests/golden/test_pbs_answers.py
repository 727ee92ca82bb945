"""PBS directives of the goldens against what a real OpenPBS 23.06 said to hundreds of others (tests/captures/pbs).

RULES are the forms that hpcddp prints. Each is held to the recorded answers: what a rule takes, the server took.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hpcddp.lint.directives import read_pbs

HERE = Path(__file__).parent
RECORDED = [
    case
    for name in ("directives", "errors_options", "arrays")
    for case in json.loads((HERE.parent / f"captures/pbs/{name}.json").read_text())["cases"]
    if "rc" in case and case.get("command", "").startswith("qsub ")
]
_COUNT, _WORD = r"[1-9]\d*", r"[A-Za-z0-9_.+:@/=,%-]+"
# Resources that a site has defined for itself; another PBS calls them unknown.
OWN_CHUNK = r"system=polaris|gpu_type=(L40S|A100|RTX6000)"
OWN = {"-l filesystems", "-l storage", "-l job_priority", "-l jobfs", "-l wd"}
RULES = {
    "-N": r"[A-Za-z][A-Za-z0-9_.+-]{0,229}",
    "-l walltime": r"\d{2,}:[0-5]\d:[0-5]\d",
    "-l select": rf"{_COUNT}(:(ncpus|mpiprocs|ngpus|ompthreads)={_COUNT}|:mem={_COUNT}GB|:({OWN_CHUNK}))*",
    "-l place": r"(scatter|free|pack)(:excl)?|excl",
    "-l nodes": rf"{_COUNT}:ppn={_COUNT}(:gpus={_COUNT})?",
    "-l ncpus": _COUNT,
    "-l ngpus": _COUNT,
    "-l mem": rf"{_COUNT}GB",
    "-J": rf"\d+-{_COUNT}(:{_COUNT})?(%{_COUNT})?",
    "-q": r"[A-Za-z_][\w-]*",
    "-P": r"[A-Za-z0-9]\w*",
    "-A": r"[A-Za-z0-9]\w*",
    "-W group_list": r"\w+",
    "-j": "oe",
    "-r": "[yn]",
    "-k": "oe|doe|eod",
    "-o": r"[\w./^-]+",
    "-m": "[abe]+",
    "-M": r"[\w.@-]+",
    "-h": "",
    "-v": r"\w+=\w+(,\w+=\w+)*",
    "-W depend": r"after(ok|any|notok)?:\d[\w.]*(,after(ok|any|notok)?:\d[\w.]*)*",
}
_TOO_MANY = 3  # an array beyond the limit of that server


def single(case: dict) -> tuple[str, str] | None:
    """The one option beside -h that a recorded command has, as (name, value); None if it has others, or directives."""
    words = shlex.split(case["command"])
    if "#PBS" in case.get("script", "") or words[1] != "-h" or len(words) != 5 or words[4] != "job.sh":
        return None
    option, value = words[2], words[3]
    resource, equals, rest = value.partition("=")
    if option in {"-l", "-W"} and equals and "," not in resource:
        return f"{option} {resource}", rest
    return option, value


def fits(name: str, value: str) -> bool:
    ascending = name != "-J" or int(re.split(r"[-:%]", value)[0]) < int(re.split(r"[-:%]", value)[1])
    resources = re.findall(r":(\w+)=", value)
    return ascending and len(resources) == len(set(resources))


@pytest.mark.parametrize("name", ["-N", "-l walltime", "-l select", "-J", "-q", "-P"])
def test_a_rule_takes_nothing_that_the_server_refused(name):
    known = {"workq", "short", "stopped", "route"}  # the recorded server's open queues
    cases = [(one[1], case["rc"]) for case in RECORDED if (one := single(case)) and one[0] == name]
    taken = [(v, rc) for v, rc in cases if re.fullmatch(RULES[name], v) and fits(name, v)]
    taken = [(v, rc) for v, rc in taken if not re.search(OWN_CHUNK, v) and (name != "-q" or v in known)]
    assert {rc for _, rc in taken} <= {0, _TOO_MANY}, taken
    assert taken, f"nothing recorded for {name}"


GOLDENS = [path for path in sorted(HERE.glob("*.sh")) if "\n#PBS " in path.read_text()]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)
def test_every_directive_is_of_a_form_that_the_server_takes(golden):
    read = read_pbs(golden.read_text())
    assert not read.refusals
    assert not read.unread
    for option in read.options:
        name, value = option.name, option.value
        rule = _WORD if name in OWN else RULES.get(name)
        assert rule is not None or name == "-W umask", f"no rule for {name}"
        assert rule is None or (re.fullmatch(rule, value or "") and fits(name, value)) or name == "-l wd", (name, value)
    names = [option.name for option in read.options]
    assert len(names) == len(set(names)), "PBS takes the first of two, without a word"
    sizes = [n for n in names if n in {"-l select", "-l nodes", "-l ncpus"}]
    assert len(sizes) == 1, "rc 5 and 6: select, nodes and ncpus exclude each other"
    assert "-l place" not in names or sizes == ["-l select"], "rc 7: place goes with select"


def test_an_array_is_one_that_may_start_again():
    said = [c for c in RECORDED if "-r n" in c["command"] and "-J" in c["command"]]
    assert said
    assert all(c["rc"] == 2 for c in said)
