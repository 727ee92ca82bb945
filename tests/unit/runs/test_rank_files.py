"""What a rank leaves in the attempt's folder."""

from pathlib import Path

import pytest

from hpcddp.errors import LaunchError
from hpcddp.runs import rank_files
from hpcddp.runs.rank_files import record_rank


def test_the_record_holds_launch_variables_and_no_secret(tmp_path: Path) -> None:
    env = {"HPCDDP_RUN_DIR": str(tmp_path), "HPCDDP_ATTEMPT": "47.pbs1", "PMI_RANK": "3"}
    others = {"PBS_JOBCOOKIE": "c0ffee", "HF_TOKEN": "x", "SLURM_JWT": "y", "EDITOR": "vi", "HPCDDP_COMMAND": "a"}
    record_rank(env | others, 3, "node3.cluster")
    record = (tmp_path / "attempts" / "47.pbs1" / "env" / "rank-0003.env").read_text().split("\0")
    assert "PMI_RANK=3" in record
    assert not [line for line in record if line.startswith(tuple(others))]


def test_a_host_that_does_not_see_the_supervisors_folder_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rank_files, "_NFS_DELAY_S", -1.0)
    env = {"HPCDDP_RUN_DIR": str(tmp_path / "own"), "HPCDDP_ATTEMPT": "47.pbs1.1"}
    with pytest.raises(LaunchError, match=r"rank 3 on node3 does not see the run folder of this job") as refused:
        record_rank(env, 3, "node3.cluster")
    assert "on a file system that every node shares" in refused.value.hint
    assert not (tmp_path / "own").exists()
    (tmp_path / "own/attempts/47.pbs1.1").mkdir(parents=True)
    record_rank(env, 3, "node3.cluster")
    assert (tmp_path / "own/attempts/47.pbs1.1/env/rank-0003.env").exists()
