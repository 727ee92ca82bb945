"""Slurm's host lists and run lengths."""

from __future__ import annotations

import pytest

from hpcddp.errors import LaunchError
from hpcddp.schedulers.allocation import expand_counts, expand_nodelist

LISTED = {
    "node001": "node001",
    "n1,n2": "n1 n2",
    "node[001-003]": "node001 node002 node003",
    "node[1,3-4]": "node1 node3 node4",
    "node[08-11]": "node08 node09 node10 node11",
    "node[098-101]": "node098 node099 node100 node101",
    "a[1-2],b[3-4]": "a1 a2 b3 b4",
    "a1,b[2-3]": "a1 b2 b3",
    "a[1-2],b7": "a1 a2 b7",
    "rack[1-2]n[1-2]": "rack1n1 rack1n2 rack2n1 rack2n2",
    "node[1-2]-ib": "node1-ib node2-ib",
    "c1-[3-4].cluster": "c1-3.cluster c1-4.cluster",
    "x[5,3]": "x5 x3",
    "nid[002048-002049,002052]": "nid002048 nid002049 nid002052",
    "[1-2]": "1 2",
}


@pytest.mark.parametrize("text", LISTED)
def test_every_form_of_a_host_list_expands(text: str) -> None:
    assert expand_nodelist(text) == LISTED[text].split()


@pytest.mark.parametrize(
    "text",
    [
        *("", "n[1-2", "n1]", "n[]", "n[2-1]", "n[a-b]", "n[1-]", "n[-2]", "n[1,,2]", "a,,b", "n[[1]]", "a b", ",a"),
        *("]n[", "n]x[1]", "a],b["),
    ],
)
def test_what_is_no_host_list_is_an_error_that_names_its_source(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST"):
        expand_nodelist(text, "SLURM_STEP_NODELIST")


def test_run_lengths_expand_to_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]


@pytest.mark.parametrize("text", ["", "2(3)", "2(x)", "2(x3", "x", "2,,1", "-1", "2(x-1)"])
def test_what_is_no_list_of_counts_is_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match="is not a list of counts"):
        expand_counts(text)
