"""Rank 0's address over MPI itself, for launchers whose environment does not give it. Only imported when asked for by
name.

Importing mpi4py.MPI calls MPI_Init, also on a login node, which is why nothing here does it by itself.
"""

from __future__ import annotations

import socket

from hpcddp.errors import LaunchError
from hpcddp.ranks.rankinfo import RankInfo


def ask_mpi(info: RankInfo, port: int) -> tuple[str, int]:
    """Rank 0's address and its `port`, broadcast by MPI. LaunchError if MPI counts the ranks otherwise."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py cannot be imported: {error}", "pip install mpi4py, built for the MPI that launches"
        ) from error
    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) != (info.rank, info.world_size):
        raise LaunchError(
            f"MPI says rank {comm.rank} of {comm.size}, {info.launcher} says {info.rank} of {info.world_size}",
            "use the launcher of the MPI that mpi4py was built with; hpcddp env --explain",
        )
    hosts = comm.allgather(socket.gethostname())
    mine = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    address, port = comm.bcast((mine, port), root=0)
    return address, port
