"""What a rank leaves in the attempt's folder."""

from pathlib import Path

import pytest

from hpcddp.cli.attempt import attempt_folder, record_rank
from hpcddp.errors import LaunchError


@pytest.mark.parametrize("name", ["../../../y", "a/b", "..", "."])
def test_an_attempt_does_not_lead_out_of_the_run_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no name of a folder"):
        attempt_folder({"HPCDDP_RUN_DIR": str(tmp_path), "HPCDDP_ATTEMPT": name})


def test_the_record_holds_launch_variables_and_no_secret(tmp_path: Path) -> None:
    env = {"HPCDDP_RUN_DIR": str(tmp_path), "HPCDDP_ATTEMPT": "47.pbs1", "PMI_RANK": "3"}
    record_rank(
        env | {"PBS_JOBCOOKIE": "c0ffee", "HF_TOKEN": "x", "SLURM_JWT": "y", "EDITOR": "vi"}, 3, "node3.cluster"
    )
    record = (tmp_path / "attempts" / "47.pbs1" / "env" / "rank-0003.env").read_text().split("\0")
    assert "PMI_RANK=3" in record
    assert not [line for line in record if line.startswith(("PBS_JOBCOOKIE", "HF_TOKEN", "SLURM_JWT", "EDITOR"))]
