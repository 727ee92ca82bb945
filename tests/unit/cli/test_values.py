"""Values that contradict each other on one command line, and values that look like options: two lines, no guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.cli.main import main

SITE = ("--site", "local")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--set nodes=2 --nodes 1", "nodes is given twice: --set nodes=2 and --nodes 1\nhint: leave out one of them"),
        ("--set nodes=2 --set nodes=3", "nodes is given twice: --set nodes=2 and --set nodes=3"),
        (
            "--nodes 1 --nodes=2",
            "--nodes stands twice: --nodes 1 and --nodes 2\nhint: leave out one of them, as --nodes",
        ),
        ("--walltime -1h", "hpcddp layout: --walltime -1h begins with a dash\nhint: --walltime TIME"),
        ("-N2", "has no option -N; it is called --nodes here\nhint: --nodes 2"),
    ],
)
def test_a_contradiction_or_a_value_like_an_option_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", *SITE, *words.split(), "--", "python", "train.py"]) == 2
    assert said in capsys.readouterr().err


def test_options_stand_over_the_job_file_and_may_repeat_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("site: local\nnodes: 2\nranks_per_node: 3\n")
    words = ["--nodes", "1", "--nodes=1", "--set", "nodes=1", "--set", "env.A=1", "--set", "env.B=2"]
    assert main(["layout", str(job), *words, "--set", "ranks_per_node=2", "--", "python", "train.py"]) == 0
    assert "1 x 2 = 2 ranks" in capsys.readouterr().out


def test_launch_knows_a_number_of_ranks_that_is_joined_to_its_letter(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["-n2"], ["-n", "2"]):
        assert main(["launch", "--here", *words, "--", "python", "train.py"]) == 2
        assert capsys.readouterr().err.endswith("\nhint: --ranks-per-node 2\n")
