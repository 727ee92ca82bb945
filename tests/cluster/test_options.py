"""Which of sbatch's options exclude each other: the table of the row against a real `sbatch --test-only`."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from livecluster import Cluster

from hpcddp.schedulers.directive_rules import find_clashes, parse_directive, refused_together
from hpcddp.schedulers.registry import find_scheduler

pytestmark = pytest.mark.cluster

DIRECTIVES = find_scheduler("slurm").directives
# Values with which each is taken by itself; two nodes of 16 CPUs and 8 GPUs.
VALUES = {
    "--mem": "1G", "--mem-per-cpu": "100M", "--mem-per-gpu": "1G", "--ntasks-per-gpu": "1", "--gpus-per-task": "1",
    "--gpus-per-socket": "2", "--ntasks-per-node": "4", "--cpus-per-task": "2", "--cpus-per-gpu": "2",
    "--core-spec": "1", "--thread-spec": "1", "--gres": "gpu:4", "--gpus-per-node": "4", "--gpus": "8",
    "--exclusive": "", "--oversubscribe": "", "--requeue": "", "--no-requeue": "", "--hold": "", "--time-min": "1",
    "--ntasks-per-socket": "2", "--nodelist": "node1,node2", "--overcommit": "",
    "--contiguous": "", "--switches": "1", "--gpu-bind": "closest", "--signal": "B:USR1@60", "--array": "0-1",
    "--bb": "x", "--bbf": "buffer",
}  # fmt: skip
WITH = {"--mem-per-gpu": ["--gpus=8"], "--ntasks-per-gpu": ["--gpus=8"], "--gpus-per-task": ["--ntasks=8"],
        "--gpus-per-socket": ["--sockets-per-node=2"]}  # fmt: skip


@pytest.fixture(scope="module")
def said(cluster: Cluster):
    """What sbatch says to each pair: all in one call, since a process start in a host costs most."""
    folder = cluster.state / "work" / "options"
    folder.mkdir()
    (folder / "buffer").touch()
    for first, second in combinations(VALUES, 2):
        words = [f"{n}={VALUES[n]}" if VALUES[n] else n for n in (first, second)]
        words += [w for n in (first, second) for w in WITH.get(n, ()) if w.partition("=")[0] not in (first, second)]
        lines = "".join(f"#SBATCH {word}\n" for word in ["--nodes=2", *words])
        (folder / f"{first[2:]}+{second[2:]}").write_text(f"#!/bin/bash\n{lines}true\n")
    cluster.ok(["sh", "-c", "for f in *+*; do sbatch --test-only < $f 2> $f.said; done; true"], cwd=folder)
    return {tuple(p.stem.split("+")): p.read_text() for p in folder.glob("*.said")}


def test_the_options_that_exclude_each_other_are_those_that_a_real_sbatch_refuses(said):
    refused = {pair for pair, text in said.items() if re.search("mutually exclusive|Cannot specify both", text)}
    table = {
        (first[2:], second[2:])
        for first, second in combinations(VALUES, 2)
        if refused_together(DIRECTIVES, [(first, VALUES[first]), (second, VALUES[second])])
    }
    assert len(said) == len(VALUES) * (len(VALUES) - 1) // 2
    assert table == refused
    assert {option for group in DIRECTIVES.alternatives for option in group} <= set(VALUES)


@pytest.mark.parametrize(
    ("words", "is_taken"),
    [
        (["--ntasks-per-tres=1", "--gpus=8"], True),
        (["--ntasks-per-tres=1", "--ntasks-per-node=1"], False),
        (["-m arbitrary"], False),
        (["--distribution=arbitrary", "-w node1,node2"], True),
        (["--gpus-per-socket=2", "--extra-node-info=1:4"], True),
        (["--gpus-per-socket=2"], False),
        (["--gpus-per-task=1", "--gres=gpu:2"], False),
        (["--gpus-per-task=1", "--nodes=2"], True),
        (["--ntasks-per-gpu=1"], False),
        (["--ntasks-per-gpu=1", "--gres=gpu:2"], True),
    ],
)
def test_synonyms_and_needs_are_those_of_a_real_sbatch(cluster: Cluster, shared, words: list[str], is_taken: bool):
    script = "".join(f"#SBATCH {word}\n" for word in words)
    answer = cluster.sh(["sbatch", "--test-only"], cwd=shared, stdin=f"#!/bin/bash\n{script}true\n")
    assert (answer.returncode == 0) is is_taken, answer
    asked = [option for word in words for option in parse_directive(DIRECTIVES, word)]
    assert (not list(find_clashes(DIRECTIVES, asked))) is is_taken


def test_of_exclusive_and_oversubscribe_sbatch_keeps_the_last_one(cluster: Cluster, shared):
    script = "#!/bin/bash\n#SBATCH --exclusive\n#SBATCH --oversubscribe\n#SBATCH --hold\ntrue\n"
    job = cluster.submit(script, cwd=shared)
    assert "OverSubscribe=YES" in cluster.ok(["scontrol", "show", "job", job], cwd=shared)
    asked = [option for word in ("--exclusive", "-s") for option in parse_directive(DIRECTIVES, word)]
    assert [clash.why for clash in find_clashes(DIRECTIVES, asked)] == ["would read only one of them"]
