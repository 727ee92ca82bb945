"""What the environment tells of a launch is read once, whoever asks for it."""

from __future__ import annotations

from pathlib import Path

from hpcddp.ranks.launch import Launch


class Counted(dict[str, str]):
    """An environment that counts how often its node file is asked for."""

    reads = 0

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        self.reads += name == "PBS_NODEFILE"
        return super().get(name, default)


def test_the_allocation_is_looked_for_once(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    # Open MPI's rank by ssh: the key of the launch and the address of rank 0 are the allocation's
    env = Counted(
        OMPI_COMM_WORLD_RANK="1",
        OMPI_COMM_WORLD_SIZE="4",
        OMPI_COMM_WORLD_LOCAL_RANK="1",
        OMPI_COMM_WORLD_LOCAL_SIZE="2",
        PBS_JOBID="7.pbs1",
        PBS_NODEFILE=str(tmp_path / "nodes"),
    )
    launch = Launch(env, "a", live=False)
    assert launch.allocation is not None
    once = env.reads
    assert launch.info.world_size == 4
    assert launch.rendezvous.master_addr == "a"
    assert launch.local_key == launch.key == ("pbs|7.pbs1|", "PBS_JOBID")
    assert launch.rendezvous.source["master_port"] == "PBS_JOBID (a port derived from it)"
    assert env.reads == once > 0


def test_without_live_evidence_the_process_that_started_the_ranks_is_no_key() -> None:
    env = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert Launch(env, None, live=False).local_key == ("", "")
    assert Launch(env, None, live=False).rendezvous.master_port is None
