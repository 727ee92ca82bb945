"""What a rank leaves in the attempt's folder."""

from pathlib import Path

from hpcddp.runs.attempt import record_rank


def test_the_record_holds_launch_variables_and_no_secret(tmp_path: Path) -> None:
    env = {"HPCDDP_RUN_DIR": str(tmp_path), "HPCDDP_ATTEMPT": "47.pbs1", "PMI_RANK": "3"}
    record_rank(
        env | {"PBS_JOBCOOKIE": "c0ffee", "HF_TOKEN": "x", "SLURM_JWT": "y", "EDITOR": "vi"}, 3, "node3.cluster"
    )
    record = (tmp_path / "attempts" / "47.pbs1" / "env" / "rank-0003.env").read_text().split("\0")
    assert "PMI_RANK=3" in record
    assert not [line for line in record if line.startswith(("PBS_JOBCOOKIE", "HF_TOKEN", "SLURM_JWT", "EDITOR"))]
