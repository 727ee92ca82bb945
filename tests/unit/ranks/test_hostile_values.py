"""Whatever stands in an environment: a place or a LaunchError, in little time and memory. Never another exception."""

from __future__ import annotations

import contextlib

import pytest

from hpcddp.cli.env import read_environment
from hpcddp.errors import LaunchError, RequestError
from hpcddp.ranks.launch import Launch

from .captured import env_of, resolve
from .test_rows import WHOLE

HOSTILE = ["", "-1", "²", "1_0", "1e3", "9" * 19, "9" * 5000, "\udcff", "[", "a[1-"]
BOMBS = ["n[1-99999999999]", "n[1-9999][1-9999][1-9999]", "2(x9999999999999)", "2()", "n[2-1]"]
SHELL = env_of("ranks/slurm-22.05-batch-plain", 0)


@pytest.mark.parametrize("name", sorted(WHOLE))
@pytest.mark.parametrize("value", HOSTILE + BOMBS, ids=lambda value: ascii(value[:24]))
def test_a_hostile_value_in_any_variable_is_an_error_of_ours_or_harmless(name: str, value: str) -> None:
    extra = ("SLURM_HET_SIZE", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "MASTER_PORT", "RANK", "LOCAL_RANK")
    for variable in (*WHOLE[name], *extra):
        env = WHOLE[name] | {variable: value}
        with contextlib.suppress(LaunchError):
            assert Launch(env, "node1", live=False).rendezvous


@pytest.mark.parametrize("value", [*HOSTILE, *BOMBS, "999999999"], ids=lambda value: ascii(value[:24]))
def test_a_hostile_value_in_a_shells_environment_makes_no_rank_of_it(value: str) -> None:
    for variable in (*(name for name in SHELL if name.startswith("SLURM")), "SLURM_HET_SIZE", "SLURM_STEP_ID"):
        if variable.startswith(("SLURM_JOB_ID", "SLURM_JOBID")):
            continue
        with pytest.raises(LaunchError):
            resolve(SHELL | {variable: value})


@pytest.mark.parametrize("env", [{"SLURM_PROCID": "3"}, {"SLURM_PROCID": "0"}, {"LOCAL_RANK": "1"}, {"RANK": "0"}])
def test_what_only_a_rank_has_makes_no_single_process(env: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="half a row"):
        resolve(env)


def test_a_local_rank_is_below_the_world_size() -> None:
    with pytest.raises(LaunchError, match="LOCAL_RANK says local_rank 1, but WORLD_SIZE says world_size 1"):
        resolve({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"})


@pytest.mark.parametrize("record", [b"\x01\xff=1\0\x03=\0", b"\0"])
def test_a_record_that_is_no_environment_is_refused(tmp_path: object, record: bytes) -> None:
    path = f"{tmp_path}/env"
    with open(path, "wb") as file:
        file.write(record)
    with pytest.raises(RequestError):
        read_environment(path)
