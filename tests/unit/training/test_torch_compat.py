"""What is private to torch or depends on its version works with the version that is installed.

`make test-all` runs this file with the oldest supported torch and with the newest.
"""

from __future__ import annotations

import pickle
import socket
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import RequestError
from hpcddp.training import torch_compat

pytestmark = pytest.mark.torch_compat


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=torch_compat.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        torch_compat.destroy_process_group()


@pytest.mark.slow  # torch.compile imports for seconds
def test_the_model_that_was_compiled_is_found_inside() -> None:
    model = nn.Linear(1, 1)
    assert torch_compat.uncompiled(torch.compile(model, backend="eager")) is model
    assert torch_compat.uncompiled(model) is model


@pytest.mark.parametrize(
    ("options", "averaged"), [({}, False), ({"find_unused_parameters": True}, True), ({"static_graph": True}, True)]
)
def test_a_parameter_without_a_gradient_keeps_ddp_from_averaging(group: None, options: Any, averaged: bool) -> None:
    model = DistributedDataParallel(nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)}), **options)
    model.module.forward = model.module["used"].forward
    assert torch_compat.has_averaged(model)
    model(torch.ones(1, 2)).sum().backward()
    assert torch_compat.has_averaged(model) is averaged


def test_every_layer_with_running_statistics_is_of_the_one_class() -> None:
    batch = (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm1d())
    each = (nn.InstanceNorm1d(2), nn.InstanceNorm2d(2), nn.LazyInstanceNorm2d())
    assert all(isinstance(layer, torch_compat.NormWithStatistics) for layer in (*batch, *each))
    assert not isinstance(nn.LayerNorm(2), torch_compat.NormWithStatistics)


def test_the_option_of_ddp_switches_the_broadcast_of_buffers_off(group: None) -> None:
    model = nn.BatchNorm1d(2)
    assert not DistributedDataParallel(model, **torch_compat.NO_BUFFER_BROADCAST).will_sync_module_buffers()
    assert DistributedDataParallel(model).will_sync_module_buffers(), "torch's default"


def test_an_optimizer_tells_that_it_has_a_scheduler() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert not torch_compat.has_scheduler(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert torch_compat.has_scheduler(optimizer)


def test_the_scheduler_of_an_optimizer_that_has_stepped_before_may_step_first() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch_compat.note_steps(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_a_store_answers_the_greeting_and_a_program_that_is_silent_or_says_else_is_an_error() -> None:
    store = torch_compat.host_tcp_store(0, timedelta(minutes=10))
    with socket.create_connection(("localhost", store.port), timeout=60) as connection:
        torch_compat.greet_store(connection)
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"HTTP/1.1 400")
        with pytest.raises(ConnectionError, match="no store"):
            torch_compat.greet_store(near)
    with socket.create_server(("", 0)) as silent:
        port = silent.getsockname()[1]
        with socket.create_connection(("localhost", port), timeout=60) as connection:
            connection.settimeout(0.01)  # nobody answers, however long it waits
            with pytest.raises(TimeoutError):
                torch_compat.greet_store(connection)


def test_a_second_connection_is_to_the_same_store_with_the_same_prefix() -> None:
    first = torch_compat.PrefixStore("a", torch_compat.host_tcp_store(0, timedelta(minutes=10)))
    first.set("key", "value")
    assert torch_compat.second_connection(first).get("key") == b"value"


def test_a_port_that_is_in_use_is_an_error_of_one_kind() -> None:
    store = torch_compat.host_tcp_store(0, timedelta(minutes=10))
    with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
        torch_compat.host_tcp_store(store.port, timedelta(minutes=10))


def test_vectors_are_gathered_without_a_warning(group: None) -> None:
    whole = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_compat.all_gather_flat(whole, torch.arange(3.0), None)
    assert whole.tolist() == [0, 1, 2]


def test_an_aborted_group_is_gone(group: None) -> None:
    torch_compat.abort_process_group()
    assert not dist.is_initialized()


def test_a_released_wrapper_holds_no_group_and_its_module_still_computes(group: None) -> None:
    wrapper = DistributedDataParallel(nn.Linear(2, 1))
    assert {"reducer", "logger", "process_group"} <= wrapper.__dict__.keys()
    torch_compat.release_wrapper(wrapper)
    assert not {"reducer", "logger", "process_group"} & wrapper.__dict__.keys()
    assert wrapper.module(torch.ones(1, 2)).shape == (1, 1)


def test_lists_of_tensors_are_added_in_place_and_have_largest_magnitudes() -> None:
    sums, values = [torch.ones(2), torch.ones(1, 3)], [torch.tensor([2.0, -5.0]), torch.ones(1, 3)]
    torch_compat.add_to_each(sums, values)
    torch_compat.add_to_each(sums, 0.5)
    assert [tensor.tolist() for tensor in sums] == [[3.5, -3.5], [[2.5, 2.5, 2.5]]]
    assert torch_compat.largest_magnitudes([*sums, torch.tensor([float("-inf")])]).tolist() == [3.5, 2.5, float("inf")]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.6 warns of its own code
def test_a_checkpoint_beside_the_training_is_a_plain_future(group: None, tmp_path: Path) -> None:
    """`async_save` returns another type since torch 2.9."""
    from hpcddp.training.checkpoint import sharded

    ranks = dist.new_group(backend="gloo")
    sharded.start_writing(tmp_path, {"weights": torch.arange(4.0)}, ranks).result(timeout=600)
    room = {"weights": torch.zeros(4)}
    sharded.read_tensors(tmp_path, room)
    assert room["weights"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.6 warns of its own code
def test_a_checkpoint_in_parts_that_this_torch_cannot_read_is_refused_in_two_lines(group: None, tmp_path: Path) -> None:
    from hpcddp.training.checkpoint import sharded

    sharded.write_tensors(tmp_path, {"weights": torch.arange(4.0)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Path).replace(b"pathlib", b"futures"))
    with pytest.raises(RequestError) as refused:
        sharded.read_tensors(tmp_path, {"weights": torch.zeros(4)})
    message, hint = str(refused.value).split("\n")
    assert message.startswith(f"checkpoint {tmp_path} could not be read with torch {torch.__version__}: rank 0")
    assert "futures" in message
    assert hint.startswith("hint: if another torch wrote it, use that one")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.6 warns of its own code
@pytest.mark.parametrize("size", [4, 60000])  # of the larger one, torch does not pass the OSError on
def test_a_checkpoint_in_parts_that_cannot_be_written_is_an_error_with_files(
    group: None, tmp_path: Path, size: int
) -> None:
    from hpcddp.training.checkpoint import sharded

    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(CheckpointException) as failed:
        sharded.write_tensors(tmp_path, {"weights": torch.zeros(size)})
    assert sharded.is_about_files(failed.value)


@pytest.mark.parametrize("size", [4, 60000])
def test_a_file_of_torch_that_cannot_be_written_is_an_error_with_files(size: int) -> None:
    with pytest.raises((OSError, RuntimeError)) as failed, open("/dev/full", "wb", buffering=0) as file:
        torch.save(torch.zeros(size), file)
    assert isinstance(failed.value, OSError) or torch_compat.is_failed_write(failed.value)
    assert not torch_compat.is_failed_write(RuntimeError("Connection closed by peer"))


def test_the_default_store_is_that_of_the_process_group(group: None) -> None:
    torch_compat.default_store().set("asked", "1")
    assert torch_compat.default_store().get("asked") == b"1"


@pytest.mark.slow  # it starts loader processes
def test_a_dataloader_that_keeps_its_workers_makes_them_anew() -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=3, num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert [batch.tolist() for batch in first] == [[1, 2, 3]]
    assert iter(loader) is first
    torch_compat.drop_iterator(loader)
    assert iter(loader) is not first


def test_a_look_at_a_gradient_says_whether_it_is_another_or_was_changed_in_place() -> None:
    weight = nn.Parameter(torch.ones(3))
    for change in (
        lambda: weight.sum().backward(),  # torch's first tensor
        lambda: weight.sum().backward(),
        lambda: nn.utils.clip_grad_norm_([weight], 1.0),
        lambda: weight.grad.zero_(),
        lambda: setattr(weight, "grad", None),
    ):
        before = torch_compat.gradient_version(weight)
        assert torch_compat.is_as_before(weight, before)
        change()
        assert not torch_compat.is_as_before(weight, before)


def test_the_step_of_an_optimizers_class_runs_without_torchs_hooks() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer, heard = torch.optim.SGD([weight], lr=0.5), []
    optimizer.register_step_pre_hook(lambda *_: heard.append("step"))
    torch_compat.bare_step(torch.optim.SGD)(optimizer)
    assert (weight.item(), heard) == (0.5, [])
    optimizer.step()
    assert (weight.item(), heard) == (0.0, ["step"])
