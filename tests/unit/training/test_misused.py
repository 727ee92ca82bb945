"""Wrong words for the runtime, its methods and its model are answered in two lines with the right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

import hpcddp
from hpcddp.errors import RequestError
from hpcddp.training.opening import explain_loading

from .toy_loop import make_data, make_model, prepare_toy

RunRanks = Callable[..., Any]
MODEL = make_model()
SAID: list[tuple[Callable[[Any], Any], str]] = [
    (lambda rt: rt.stop(), "rt.stop() missing 1 required positional argument: 'reason'\nhint: rt.stop(reason)"),
    (lambda rt: rt.finish_early(), "required positional argument: 'reason'\nhint: rt.finish_early(reason)"),
    (
        lambda rt: rt.backward(torch.ones(1), retain_graph=True),
        "rt.backward() got an unexpected keyword argument 'retain_graph'\nhint: rt.backward(loss_a + loss_b)",
    ),
    (lambda rt: rt.loader(make_data(), batch_size=8), "'batch_size'\nhint: hpcddp.runtime(global_batch=256"),
    (lambda rt: rt.prepare(MODEL, find_unused_parameters=True), "\nhint: model = rt.wrap(model, find_unused_para"),
    (lambda rt: rt.prepare(model=MODEL), "'model'\nhint: rt.prepare(*objects)"),
    (lambda rt: rt.is_main_process, "the runtime has no 'is_main_process'\nhint: rt.is_main"),
    (lambda rt: rt.boadcast(3), "the runtime has no 'boadcast'\nhint: rt.broadcast"),
    (lambda rt: rt.wrap(MODEL).module, "this Sequential itself, which has no 'module'\nhint: rt.unwrap(model)"),
    (lambda rt: rt.unwrap(None), "rt.unwrap(None): None is no model\nhint: rt.unwrap(model)"),
    (lambda rt: rt.step(None), "the runtime has no 'step'\nhint: optimizer.step(); scheduler.step()"),
    (lambda rt: rt.is_last_micro_batch, "no 'is_last_micro_batch'\nhint: for x, y in rt.micro_batches(batch): …"),
]


@pytest.mark.parametrize(("wrong", "says"), SAID)
def test_a_wrong_word_for_the_runtime_is_said_in_two_lines(wrong: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(RequestError) as told, hpcddp.runtime(6) as rt:
        wrong(rt)
    assert says in str(told.value)


def test_errors_of_the_users_own_objects_stay_as_they_are() -> None:
    class Mine:
        def stop(self, reason: str) -> None: ...

    for kind, wrong in ((TypeError, lambda: Mine().stop()), (AttributeError, lambda: Mine().go)):  # type: ignore[call-arg, attr-defined]
        with pytest.raises(kind), hpcddp.runtime(6):
            wrong()
    with pytest.raises(RuntimeError, match="size mismatch"), hpcddp.runtime(6):
        MODEL.load_state_dict(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 3)).state_dict())


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("batch_size", "hpcddp.runtime(global_batch=256)"),
        ("accumulate", "hpcddp.runtime(global_batch=256, max_micro_batch=32)"),
        ("globalbatch", "hpcddp.runtime(global_batch=…)"),
    ],
)
def test_another_word_for_an_option_of_the_runtime_is_answered_with_ours(word: str, hint: str) -> None:
    with pytest.raises(RequestError, match=f"hpcddp.runtime takes no '{word}'") as told:
        hpcddp.runtime(**{word: 8})  # type: ignore[arg-type]
    assert told.value.hint == hint


def test_the_loader_and_the_runtime_say_what_a_script_asks_of_a_data_loader_and_a_group() -> None:
    with hpcddp.runtime(max_micro_batch=2) as rt:
        loader = prepare_toy(rt).loader
        assert (loader.batch_size, loader.num_workers, loader.collate_fn) == (6, 0, default_collate)
        assert (rt.rank, rt.world_size) == (0, 1)
    with hpcddp.runtime(6) as rt:
        assert rt.loader(make_data()).batch_size == 6


def test_a_loop_over_another_loader_than_the_first_says_that_the_first_is_the_training_data() -> None:
    model = make_model()
    test, train = (DataLoader(make_data(), batch_size=6) for _ in range(2))

    def run(model: nn.Module, train: Any) -> None:
        with hpcddp.runtime() as rt:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, _, train = rt.prepare(model, optimizer, test, train)
            for _ in rt.epochs(1):
                for x, _ in train:
                    rt.backward(model(x).sum())

    with pytest.raises(RequestError, match=r"the loader that rt\.prepare returned for its first"):
        run(model, train)


def test_a_metric_that_is_no_number_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with hpcddp.runtime() as rt:
        toy = prepare_toy(rt)
        for _ in rt.epochs(1):
            for x, y in toy.loader:
                toy.step(rt, x, y)
            assert not rt.save_best(float("nan"))
    assert "warning: rt.save_best(value) got NaN on rank 0" in capsys.readouterr().err


def test_the_state_of_a_plain_model_that_is_loaded_into_ddp_is_answered_with_unwrap() -> None:
    torchs = f"Error(s) in loading state_dict for {DistributedDataParallel.__name__}:\n\tMissing key(s)"
    said = explain_loading(RuntimeError(torchs))
    assert said is not None
    assert said.hint.startswith("rt.unwrap(model).load_state_dict")
    assert explain_loading(RuntimeError("out of memory")) is None


class PutsBackward(torch.autograd.Function):
    """Its backward pass has no deterministic kernel, on a CPU neither."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # of one gradient
        return put(grad)


def put(x: torch.Tensor) -> torch.Tensor:
    return x.clone().put_(torch.tensor([0, 1]), torch.ones(2, dtype=x.dtype))


POOL = (
    "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set"
    " 'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation, …"
)  # torch 2.11 on an H100


def raise_error(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("wrong", "says", "hint"),
    [
        (lambda _rt, x: put(x), "torch has no deterministic kernel for put_ on cpu, so exact", "another layer or"),
        (
            lambda rt, x: rt.backward(PutsBackward.apply(x).sum()),
            "for put_ on cpu",
            "another layer or function; or hpc",
        ),
        (lambda _rt, x: PutsBackward.apply(x).sum().backward(), "for put_ on cpu", "another layer or function; or"),
        (
            lambda _rt, _x: raise_error(RuntimeError(POOL)),
            "for adaptive_avg_pool2d_backward_cuda on",
            "AvgPool2d in pl",
        ),
    ],
)
def test_what_an_exact_run_cannot_compute_is_named_forward_and_backward(
    wrong: Callable[[Any, torch.Tensor], Any], says: str, hint: str
) -> None:
    def train() -> None:
        with hpcddp.runtime(exact=True, slices=2) as rt:
            toy = prepare_toy(rt)
            for _ in rt.epochs(1):
                for batch in toy.loader:
                    for x, _ in rt.micro_batches(batch):
                        wrong(rt, toy.model(x))

    with pytest.raises(RequestError, match=says) as told:
        train()
    assert told.value.hint.startswith(hint)


def test_determinism_that_the_script_has_asked_for_is_answered_by_torch() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match=r"^put_ does not have"), hpcddp.runtime(6):
            put(torch.zeros(4))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_averaged_weights_of_a_sharded_model_are_refused_with_the_way_that_works(run_ranks: RunRanks) -> None:
    outputs = run_ranks("misused_bodies:average_sharded", 2).check().outputs
    assert "an AveragedModel with parallel fsdp: it has whole weights" in outputs[0] + outputs[1]
