"""Cray PALS: the world size and the nodes stand in a binary file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.launch import Launch

from .captured import resolve

HEADER = "@iNNNiNNiNNiNNiNNiNNN"
HOSTS = ["x1000c0s0b0n0", "x1000c0s1b0n0"]
RANKS = [(0, 1), (1, 1), (0, 0)]  # (index on its node, node): rank 0 is on the second node


def write_apinfo(path: Path, version: int = 5) -> str:
    """A file as apinfo5.h lays it out."""
    nodes = b"".join(struct.pack("@i64s", i, host.encode()) for i, host in enumerate(HOSTS))
    ranks = b"".join(struct.pack("@iii", local, 0, node) for local, node in RANKS)
    fields = [0] * 20
    fields[0] = version
    fields[8:11] = [12, 160, len(RANKS)]
    fields[11:14] = [68, 160 + len(ranks), len(HOSTS)]
    path.write_bytes(struct.pack(HEADER, *fields) + ranks + nodes)
    return str(path)


def pals(rank: int, **more: str) -> dict[str, str]:
    local, node = RANKS[rank]
    return {"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(local), "PALS_NODEID": str(node), **more}


def test_world_size_nodes_and_master_come_from_the_file(tmp_path: Path) -> None:
    path = write_apinfo(tmp_path / "apinfo")
    for rank, (local, node) in enumerate(RANKS):
        env = pals(rank, PALS_APINFO=path)
        info = resolve(env)
        assert info[:7] == ("pals", rank, 3, local, 2 if node == 1 else 1, node, 2)
        assert info.source["world_size"] == f"PALS_APINFO ({path})"
        assert Launch(env, None, live=False).rendezvous.master_addr == HOSTS[1]


@pytest.mark.parametrize("path", ["/does/not/exist", "other-version", "cut-short"])
def test_without_the_file_the_world_size_is_unknown_and_not_guessed(path: str, tmp_path: Path) -> None:
    (tmp_path / "cut-short").write_bytes(b"\5\0\0\0")
    write_apinfo(tmp_path / "other-version", version=4)
    env = pals(2, PALS_LOCAL_SIZE="1", PALS_APINFO=str(tmp_path / path))
    assert Launch(env, None, live=False).place.numbers["world_size"] is None
    with pytest.raises(LaunchError, match="not of how many"):
        resolve(env)


def test_two_world_sizes_are_an_error_that_names_both(tmp_path: Path) -> None:
    path = write_apinfo(tmp_path / "apinfo")
    with pytest.raises(LaunchError, match=r"PMI_SIZE=4, but PALS_APINFO .* says world_size 3"):
        resolve(pals(2, PMI_RANK="2", PMI_SIZE="4", PALS_APINFO=path))


def test_under_srun_with_cray_shasta_the_launcher_is_srun() -> None:
    step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1,2"}
    assert resolve(step | pals(2, PMI_RANK="2", PMI_SIZE="3")).launcher == "srun"
