"""The exchange of `hpcddp check` between two devices, by gloo."""

from __future__ import annotations

import os
from pathlib import Path


def exchange(fifo: str) -> None:
    """Rank 0 lets rank 1 know the port, as the checker does."""
    from hpcddp.checks import device

    rank = int(os.environ["RANK"])
    for is_sum, names in ((False, {"ms", "gbps"}), (True, {"all_reduce_gbps"})):
        port = device.open_store(60.0)["port"] if rank == 0 else 0
        with open(fifo, "w" if rank == 0 else "r", encoding="ascii") as file:
            port = file.write(f"{port}") and port if rank == 0 else int(file.read())
        found = device.exchange(rank, 2, "127.0.0.1", port, "gloo", 60.0, is_sum)
        assert found.keys() == names
        assert all(value > 0 for value in found.values()), found


def test_two_hosts_exchange_data_and_sum_it_up_one_after_the_other(run_ranks, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "port")
    run_ranks("test_check_device:exchange", 2, str(tmp_path / "port"), env={"GLOO_SOCKET_IFNAME": "lo"}).check()
