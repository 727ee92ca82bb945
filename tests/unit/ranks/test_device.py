"""A local rank is not a device index, and a mask is the scheduler's."""

from __future__ import annotations

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.device import device_index, visible_devices
from hpcddp.ranks.predict import predict_environment
from hpcddp.ranks.resolve import resolve

RANK_3_OF_4_HERE = resolve(predict_environment("openmpi", ["a", "b"], [4, 4], 7))


@pytest.mark.parametrize(("visible", "index"), [(0, None), (1, 0), (4, 3), (8, 3)])
def test_one_visible_device_is_number_0_and_enough_are_by_local_rank(visible: int, index: int | None) -> None:
    assert device_index(RANK_3_OF_4_HERE, visible) == index


@pytest.mark.parametrize("visible", [2, 3])
def test_fewer_devices_than_ranks_is_an_error_and_no_remainder(visible: int) -> None:
    with pytest.raises(LaunchError, match=f"4 ranks are on this node .* {visible} devices"):
        device_index(RANK_3_OF_4_HERE, visible)


def test_an_unknown_local_rank_with_several_devices_is_an_error() -> None:
    info = resolve({"RANK": "1", "WORLD_SIZE": "2"})
    assert device_index(info, 1) == 0
    with pytest.raises(LaunchError, match="does not say which rank of its node"):
        device_index(info, 2)


@pytest.mark.parametrize(
    ("mask", "entries"),
    [
        (None, None),
        ("", ()),
        ("0,1", ("0", "1")),
        (" 2 , 3 ", ("2", "3")),
        ("GPU-4a1b,GPU-77", ("GPU-4a1b", "GPU-77")),
        ("MIG-GPU-4a/1/0", ("MIG-GPU-4a/1/0",)),
        ("0,-1,1", ("0",)),
        ("NoDevFiles", ()),
    ],
)
def test_a_mask_is_read_as_cuda_reads_it(mask: str | None, entries: tuple[str, ...] | None) -> None:
    assert visible_devices({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}) == entries


def test_a_device_that_is_named_twice_is_an_error() -> None:
    with pytest.raises(LaunchError, match="names 1 twice"):
        visible_devices({"CUDA_VISIBLE_DEVICES": "1,1"})
