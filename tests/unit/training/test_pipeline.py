"""A model whose stages are on different ranks trains as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batchplan import plan_batch
from hpcddp.errors import RequestError
from hpcddp.training.parallel.staged import SCHEDULES, ShapesApart, plan_turns
from hpcddp.training.remarks import warn_of_idle_stages

pytestmark = pytest.mark.xdist_group("pipeline")  # one worker trains what the tests of this file share

RunRanks = Callable[..., Any]

BODY = "pipeline_bodies:train_all"
# 23 samples in global batches of 10: the micro batches differ in size, and the last step of an epoch has 3
CASES: dict[str, dict[str, Any]] = {
    "layers": {"by_hand": False},
    "chain": {"model": "chain", "before": True, "global_batch": 7},
}
MORE: dict[str, dict[str, Any]] = {
    "gpipe": {"model": "chain", "schedule": "gpipe"},
    "counted": {"model": "chain", "count": True, "max_micro_batch": 1},
    "one micro batch": {"max_micro_batch": None},
}
SPLITS: dict[str, tuple[int, dict[str, int]]] = {
    "pipeline": (2, {"pipeline": 2}),
    "four stages": (4, {"pipeline": 4}),
    "data": (4, {"data": -1, "pipeline": 2}),
    "shard": (4, {"shard": -1, "pipeline": 2}),
    "tensor": (4, {"tensor": 2, "pipeline": 2}),
    "all": (8, {"shard": 2, "tensor": 2, "pipeline": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


def _train(
    run_ranks: RunRanks, folder: Path, name: str, world_size: int, parallel: Any, cases: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The results by case. The first test that asks for a split trains it."""
    out = {case: folder / f"{name}.{case}" for case in cases}
    if not all(path.exists() for path in out.values()):
        arguments = [{**cases[case], "parallel": parallel, "out": str(path)} for case, path in out.items()]
        run_ranks(BODY, world_size, arguments).check()
    return {
        case: {**torch.load(path), "saved": torch.load(f"{path}.pt", weights_only=True)} for case, path in out.items()
    }


def _compare(ours: dict[str, Any], theirs: dict[str, Any], case: str) -> None:
    assert ours["steps"] == theirs["steps"] > 0
    assert list(ours["saved"]) == list(theirs["saved"]), case
    for name, tensor in theirs["saved"].items():
        assert float((ours["saved"][name] - tensor).abs().max()) < 1e-12, (case, name)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-12), case
    assert ours["total"] == pytest.approx(theirs["total"], rel=1e-12), case


def test_weights_norms_evaluation_and_saved_model_are_those_of_one_process(run_ranks: RunRanks, folder: Path) -> None:
    """Also where the optimizer was made before `rt.prepare` from the whole model."""
    one = _train(run_ranks, folder, "one", 1, "ddp", CASES)
    split = _train(run_ranks, folder, "data", *SPLITS["data"], CASES)
    for case in CASES:
        _compare(split[case], one[case], case)
    assert max(one["chain"]["norms"]) > 0.1, "it was clipped"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SPLITS])
def test_every_split_with_stages_has_the_result_of_one_process(run_ranks: RunRanks, folder: Path, name: str) -> None:
    cases = CASES | MORE
    if "tensor" in SPLITS[name][1]:  # the chain divides its layers by a plan of its own
        cases = {case: {**argument, "before": False} for case, argument in cases.items()}
    if "shard" in SPLITS[name][1]:  # a sharded model cannot take a mean over nothing out again
        del cases["counted"]
    one, split = (
        _train(run_ranks, folder, whole, *how, cases) for whole, how in (("one more", (1, "ddp")), (name, SPLITS[name]))
    )
    for case in cases:
        _compare(split[case], one[case], case)
    assert max(one["chain"]["norms"]) > 0.1, "it was clipped"


_SHARDED = {"shard": 2, "pipeline": 2}
# each part: ranks, split, form of its checkpoint; together they are as long as the undisturbed run
CHAINS: dict[str, list[tuple[int, Any, str | None]]] = {
    "to stages and back": [(2, "ddp", None), (2, {"pipeline": 2}, None), (1, "ddp", None)],
    "one file": [(4, {"data": 2, "pipeline": 2}, "single"), (2, "zero1", "single"), (4, {"pipeline": 4}, "single")],
    "beside the training": [
        (2, {"pipeline": 2}, "async"),
        (2, "fsdp", None),
        (4, {"shard": 2, "pipeline": 2}, "async"),
    ],
    "other stages": [
        (4, {"shard": 2, "pipeline": 2}, "single"),
        (4, {"pipeline": 4}, None),
        (2, {"pipeline": 2}, None),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("chain", [*CHAINS])
def test_a_chain_of_splits_follows_one_undisturbed_run(run_ranks: RunRanks, tmp_path: Path, chain: str) -> None:
    common = {"model": "chain"}
    run_ranks(BODY, 1, [{**common, "parallel": "ddp", "out": str(tmp_path / "whole")}]).check()
    for stop_at, (world_size, parallel, form) in zip((2, 4, None), CHAINS[chain], strict=True):
        argument = {"parallel": parallel, "checkpoint": form, "stop_at": stop_at, "run_dir": str(tmp_path / "run")}
        out, env = tmp_path / f"part-{stop_at}", {"HPCDDP_ATTEMPT": str(stop_at)}
        run_ranks(BODY, world_size, [{**common, **argument, "out": str(out)}], env=env).check()
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("part-None", "whole"))
    assert max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items()) < 1e-12
    [*manifests] = (tmp_path / "run" / "checkpoints").glob("*/manifest.json")
    for manifest in manifests:
        facts = json.loads(manifest.read_text())["objects"]["model"]
        assert facts["parameters"] == sum(tensor.numel() for name, tensor in theirs.items() if name != "scale")


def test_what_cannot_be_cut_is_refused(run_ranks: RunRanks) -> None:
    expected = {
        "none": "nothing says where each begins | rt.wrap(model, stages=",
        "name": "stages has 'secnd', and the Crossing has no such module",
        "count": "cuts the Crossing into 3 stages, and there are 2",
        "untrained": "stage 1 of the pipeline, from 1 on, has no parameter that is trained",
        "tied": "first.weight and third.weight are one parameter, and belong to two stages",
        "schedule": "schedule='zigzag' is none of a pipeline | one of 1f1b, gpipe",
        "ddp": "parallel ddp takes no stages",
        "exact": "exact mode needs all layers, each of them whole, and pipeline=2 divides them over 2 ranks",
        "second": "a pipeline has the stages of one trained model, and this is the second",
        "scaler": "a gradient scaler does not go with a pipeline",
        "average": "averages a whole model, and each rank has a stage of it only",
        "lbfgs": "steps all parameters together, as by a norm or a mean over them, and each rank has those of a stage",
        "ordinary": "was called outside of rt.train_step, and the ranks have a stage of it each",
    }
    told = run_ranks("pipeline_bodies:cut_wrongly", 2, list(expected)).check().outputs[0]
    for case, words in expected.items():
        [line] = [line for line in told.splitlines() if line.startswith(f"{case}: ")]
        assert words in line


ONE_RANK = {
    "skip": "takes what this stage of the pipeline computes together with what another one has",
    "numbers": "needs what another stage of the pipeline has",
    "order": "takes what this stage of the pipeline computes together with what another one has",
    "twice": "loss_of(batch) called the Crossing twice",
    "penalty": "takes what this stage of the pipeline computes together with what another one has",
    "no call": "loss_of(batch) did not call the Crossing",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ONE_RANK])
def test_a_forward_pass_that_is_no_chain_of_stages_is_refused_by_the_rank_that_finds_it(
    run_ranks: RunRanks, case: str
) -> None:
    outcome = run_ranks("pipeline_bodies:cut_wrongly", 2, [case])
    assert all(status not in (0, None) for status in outcome.statuses), outcome.outputs
    lines = [line for output in outcome.outputs for line in output.splitlines()]
    assert any(line.startswith(f"{case}: ") and ONE_RANK[case] in line for line in lines), lines


@pytest.mark.slow
def test_stages_draw_their_own_random_numbers_and_what_loss_of_draws_is_alike(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks("pipeline_bodies:draw", 2, {"out": str(tmp_path / "seen")}).check()
    first, last = (torch.load(tmp_path / f"seen-{rank}") for rank in range(2))
    for mine, others in zip(first["noise"], last["noise"], strict=True):
        assert torch.equal(mine, others)
    for mine, others in zip(first["mask"], last["mask"], strict=True):
        assert not torch.equal(mine, others)


@given(st.sampled_from(SCHEDULES), st.integers(2, 6), st.integers(0, 9))
def test_every_stage_takes_every_micro_batch_forward_and_back_in_order(schedule: str, stages: int, count: int) -> None:
    """A pipeline of queues goes through them without a stage that waits for ever."""
    plans = [plan_turns(schedule, stage, stages, count) for stage in range(stages)]
    done: list[list[tuple[bool, int]]] = [[] for _ in plans]
    for _ in range(2 * stages * count + 1):
        for stage, plan in enumerate(plans):
            turn = plan[len(done[stage])] if len(done[stage]) < len(plan) else None
            source = stage - 1 if turn and turn[0] else stage + 1
            if turn and (not 0 <= source < stages or turn in done[source]):
                done[stage].append(turn)
    for stage, plan in enumerate(plans):
        assert done[stage] == plan
        assert [nth for is_forward, nth in plan if is_forward] == list(range(count))
        assert [nth for is_forward, nth in plan if not is_forward] == list(range(count))
        held = [sum(1 if forward else -1 for forward, _ in plan[: n + 1]) for n in range(len(plan))]
        assert max(held, default=0) <= (count if schedule == "gpipe" else min(count, stages - stage))


def test_a_step_with_fewer_micro_batches_than_stages_is_said() -> None:
    plan = plan_batch(32, 2, 8)
    assert plan.accumulation_steps == 2
    assert warn_of_idle_stages(plan, 2) is None
    warning = warn_of_idle_stages(plan, 4)
    assert warning is not None
    assert "2 micro batches for 4 stages" in warning
    assert "idle for 60%" in warning
    assert "max_micro_batch=4" in warning


def test_shapes_and_numbers_stay_apart() -> None:
    """Torch itself would give numbers that mean nothing for the first of them."""
    real, shapes = torch.ones(4, 4), torch.ones(4, 4, device="meta")
    with ShapesApart() as apart:
        with pytest.raises(RequestError, match="linear takes what this stage"):
            torch.nn.functional.linear(real, shapes)
        apart.passes_over = True
        assert torch.nn.functional.linear(real, shapes).is_meta
        for write in (lambda: real.copy_(shapes), lambda: real.__setitem__(0, shapes[0])):
            with pytest.raises(RequestError):
                write()
        assert torch.cat([real, real]).sum() == 32
