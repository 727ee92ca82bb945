"""A file tells where rank 0 is: whole or not at all, and only to its own launch."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hpcddp.errors import LaunchError
from hpcddp.runs.rank_0 import address_path, publish_address, read_address, wait_for_address, withdraw_address


def test_what_rank_0_publishes_the_others_find(tmp_path: Path) -> None:
    folder = str(tmp_path / "attempts")
    threading.Timer(0.1, publish_address, (folder, "job 7", "node1", 12345)).start()
    assert wait_for_address(folder, "job 7", 600) == ("node1", 12345)
    assert [path.suffix for path in (tmp_path / "attempts").iterdir()] == [".json"]
    withdraw_address(folder, "job 7")
    withdraw_address(folder, "job 7")
    assert read_address(folder, "job 7") is None


def test_another_launchs_file_is_not_taken(tmp_path: Path) -> None:
    publish_address(str(tmp_path), "job 7", "node1", 12345)
    assert read_address(str(tmp_path), "job 8") is None
    Path(address_path(str(tmp_path), "job 8")).write_bytes(Path(address_path(str(tmp_path), "job 7")).read_bytes())
    assert read_address(str(tmp_path), "job 8") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "job 7"}', '{"key": "job 7", "master_addr": "n"}'])
def test_half_a_file_is_no_file(tmp_path: Path, content: str) -> None:
    Path(address_path(str(tmp_path), "job 7")).write_text(content)
    assert read_address(str(tmp_path), "job 7") is None


def test_waiting_ends_with_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"rank 0 has not written {tmp_path}"):
        wait_for_address(str(tmp_path), "job 7", 0.05)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="rank 0 cannot write"):
        publish_address(str(tmp_path / "file" / "folder"), "job 7", "node1", 12345)
