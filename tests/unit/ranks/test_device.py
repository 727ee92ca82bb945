"""A local rank is not a device index, and a mask is the scheduler's."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli.exec import refuse_missing_gpus
from hpcddp.errors import LaunchError
from hpcddp.ranks.device import (
    choose_devices,
    visible_devices,
    why_no_accelerator,
)
from hpcddp.ranks.launch import Launch

from .captured import load, resolve


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_world_size", "each", "devices"),
    [
        (1, 3, 4, 1, (0,)),  # one that is visible is number 0
        (4, 3, 4, 1, (3,)),  # enough for all are by local rank
        (8, 3, 4, 1, (3,)),
        (1, None, None, 1, (0,)),
        (2, 3, 4, 2, (0, 1)),  # all that it sees
        (8, 0, 4, 2, (0, 1)),
        (8, 3, 4, 2, (6, 7)),
        (2, None, None, 2, (0, 1)),
        (3, 0, 4, 1, "4 ranks on this node are to have one device each, and see 3"),  # and no remainder
        (2, None, None, 1, "does not say which rank of its node"),
        (4, 0, 4, 2, "4 ranks on this node are to have 2 devices each, and see 4"),
        (1, 0, 4, 2, "this rank sees 1 device, and it is to have 2"),
    ],
)
def test_a_rank_takes_its_own_devices_or_it_is_an_error(
    visible: int, local_rank: int | None, local_world_size: int | None, each: int, devices: tuple[int, ...] | str
) -> None:
    if isinstance(devices, str):
        with pytest.raises(LaunchError, match=re.escape(devices)):
            choose_devices(visible, local_rank, local_world_size, each)
    else:
        assert choose_devices(visible, local_rank, local_world_size, each) == devices


@pytest.mark.parametrize(
    ("capture", "devices"),
    [
        ("gpn", [(0, 1), (2, 3), (0, 1), (2, 3)]),  # 2 ranks on each node see its 8 GPUs
        ("salloc", [(0, 1)] * 4),  # 2 ranks on each node see its 2 GPUs: the roll call finds that they share them
        ("gpt", [LaunchError] * 4),  # --gpus-per-task=1
    ],
)
def test_in_environments_that_slurm_made_a_rank_finds_its_two_devices_or_an_error(
    capture: str, devices: list[Any]
) -> None:
    found: list[Any] = []
    for process in load(f"ranks/slurm-22.05-{capture}-srun")["processes"]:
        info, visible = resolve(process["env"]), visible_devices(process["env"]) or ()
        try:
            found.append(choose_devices(len(visible), info.local_rank, info.local_world_size, 2))
        except LaunchError as error:
            found.append(type(error))
    assert found == devices


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


@pytest.mark.parametrize(
    ("names", "env", "why"),
    [
        ([], {"CUDA_VISIBLE_DEVICES": "0"}, "this host has no GPU"),
        (["dri/card0"], {}, "this host has no GPU"),  # a screen's
        (["nvidiactl"], {}, ""),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "CUDA_VISIBLE_DEVICES='NoDevFiles' hides all"),
        (["nvidia0"], {"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, ""),  # as Slurm sets both
        (["kfd"], {"CUDA_VISIBLE_DEVICES": "1"}, ""),
        (["kfd"], {"ROCR_VISIBLE_DEVICES": ""}, "ROCR_VISIBLE_DEVICES='' hides all"),
        (["kfd"], {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "3"}, ""),  # the second is not read
        (["dri/renderD128"], {"CUDA_VISIBLE_DEVICES": ""}, ""),  # another vendor's mask
        (["dri/renderD128"], {"ZE_AFFINITY_MASK": ""}, "ZE_AFFINITY_MASK='' hides all"),
    ],
)
def test_what_hides_all_gpus_is_named(tmp_path: Path, names: list[str], env: dict[str, str], why: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = why_no_accelerator(env, str(tmp_path))
    assert (why in found, bool(found)) == (True, bool(why)), found


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("python train.py", True),
        ("numactl -l /opt/py/bin/python3.11 -m train", True),
        ("./train.py", True),
        ("torchrun --nproc-per-node 2 -m train", True),
        ("hostname", False),
        ("hpcddp env", False),
    ],
)
def test_a_command_that_starts_neither_python_nor_ranks_needs_no_gpu(command: str, refused: bool) -> None:
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "")
    info = Launch({**hidden, "RANK": "0", "WORLD_SIZE": "1"}, "n0", live=False).info
    with pytest.raises(LaunchError) if refused else nullcontext():
        assert refuse_missing_gpus(command.split(), hidden, info, "n0", 2) == {"HPCDDP_GPUS_PER_NODE": "2"}
    assert refuse_missing_gpus(command.split(), hidden | {"ACCELERATE_USE_CPU": "true"}, info, "n0", 2) == {}
