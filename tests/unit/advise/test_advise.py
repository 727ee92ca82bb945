"""`hpcddp advise`: the arithmetic by hand, what is chosen, what is printed, and what is refused."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from hpcddp.advise.choice import Target, choose_split, estimate_splits, list_splits
from hpcddp.advise.memory import (
    PRECISIONS,
    Activations,
    Model,
    ParallelDims,
    Parameter,
    Stages,
    Work,
    checkpoint_bytes,
    peak,
    shard_elements,
    zero_share,
)
from hpcddp.advise.transformer import Numbers, make_transformer
from hpcddp.cli.main import main

SEVEN = "advise --params 7e9 --layers 32 --hidden 4096 --sequence 4096"
NONE = Stages(0, 0, 0, 0, 0)
ADAM = Work(PRECISIONS["fp32"], "adamw", 1)


def flat(elements: int, activation: float = 0.0) -> Model:
    """A model of one parameter."""
    known = Activations(NONE, Stages(*[activation] * 4, piled=activation))
    return Model("flat", (), (Parameter(elements, elements),), whole=known, gathered=known)


def test_ddp_holds_weights_gradients_and_two_states_of_adam_in_32_bit() -> None:
    found = peak(flat(1000, 5000), ParallelDims(2), ADAM)
    assert (found.weights, found.gradients, found.optimizer, found.activations) == (4000, 4000, 8000, 5000)
    assert found.total == 21000


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adamw", 2)])
def test_an_optimizer_holds_its_states(optimizer: str, states: int) -> None:
    found = peak(flat(1000, 50000), ParallelDims(2), ADAM._replace(optimizer=optimizer))
    assert found.optimizer == 4000 * states


def test_zero1_deals_whole_parameters_to_the_rank_that_has_least() -> None:
    parameters = [Parameter(n, n) for n in (50, 30, 30, 10)]
    assert zero_share(parameters, 2) == 60  # 50 + 10, 30 + 30
    assert zero_share(parameters, 4) == 50


def test_fsdp_deals_rows_and_pads_to_equal_shards() -> None:
    assert shard_elements([Parameter(10 * 7, 10)], 4) == 3 * 7
    assert shard_elements([Parameter(5, 5)], 8) == 1


def test_only_one_process_lets_go_of_gradients_between_steps() -> None:
    model = make_transformer(Numbers(10_000_000, 4, 256, 512, 4000), "fp32")
    work = ADAM._replace(micro_batch=8)
    assert peak(model, ParallelDims(2), work).total - peak(model, ParallelDims(1), work).total == 4 * model.elements


def test_a_layer_of_the_formula_holds_34_bytes_less_the_masks_of_dropout() -> None:
    few, more = (make_transformer(Numbers(10**9, layers, 1024, 2048, 1000), "bf16") for layers in (10, 11))
    assert few.whole is not None
    assert more.whole is not None
    assert (more.whole.at(1).forward - few.whole.at(1).forward) / (1024 * 2048) == 34 - 2


def test_tensor_parallelism_is_for_models_of_blocks_and_stays_in_a_node() -> None:
    words = [parallel for parallel, _ in list_splits(flat(9), 2, 4)]
    assert words == ["ddp", "zero1", "hsdp", "fsdp"]
    blocks = make_transformer(Numbers(7 * 10**9, 32, 4092, 4096, heads=12), "bf16")
    pairs = [parallel for parallel, _ in list_splits(blocks, 2, 8) if isinstance(parallel, dict)]
    assert pairs == [{"shard": 8, "tensor": 2}, {"shard": 4, "tensor": 4}]  # 8 do not divide 12 heads
    assert list_splits(blocks, 1, 1) == [("ddp", ParallelDims(1))]


@pytest.mark.parametrize(("memory", "chosen"), [(18_401, "ddp"), (18_399, "zero1"), (16_101, "zero1"), (16_099, None)])
def test_the_simplest_split_that_fits_with_15_percent_is_chosen(memory: float, chosen: str | None) -> None:
    # 4000 each for weights, gradients, states and two copies of a parameter in the step; zero1 has half of the states
    model = Model("two", (), (Parameter(500, 500), Parameter(500, 500)), whole=Activations(NONE, NONE))
    work = ADAM._replace(loops=True, optimizer="momentum")
    assert peak(model, ParallelDims(2), work).total == 16000
    found = choose_split(estimate_splits(model, 1, Target(memory, 2, 1), work))
    assert (found.parallel if found else None) == chosen


def test_a_global_batch_of_fewer_samples_than_data_ranks_leaves_tensor_parallelism() -> None:
    model = make_transformer(Numbers(7 * 10**9, 32, 4096, 4096), "bf16")
    rows = estimate_splits(model, 2, Target(80e9, 8, 1, global_batch=8), ADAM)
    assert [row.parallel for row in rows] == [{"shard": n, "tensor": 16 // n} for n in (8, 4, 2)]


def test_a_checkpoint_gathers_one_tensor_where_the_model_is_sharded() -> None:
    model = Model("two", (), (Parameter(500, 500), Parameter(300, 300)))
    assert checkpoint_bytes(model, ParallelDims(4, shard=4), ADAM) == 2 * 4 * 500
    assert checkpoint_bytes(model, ParallelDims(4), ADAM) == 0
    zero = ParallelDims(4, zero=True)
    assert checkpoint_bytes(model, zero, ADAM) == 2 * 4 * 2 * 500  # the states of one rank, and a copy


def test_the_table_says_what_fits_and_what_to_paste(capsys) -> None:
    assert main(f"{SEVEN} --site abci3 --nodes 1,2".split()) == 0
    text = capsys.readouterr().out
    assert "141 GB = 131.3 GiB each (H200 of queue rt_HF at abci3); 8 ranks per node" in text
    assert "hpcddp render --site abci3 --nodes 1 --parallel zero1 -- python train.py\n" in text


def test_json_has_the_numbers_of_the_table_in_bytes(capsys) -> None:
    assert main(f"{SEVEN} --gpu-memory 80GB --ranks-per-node 8 --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu_memory_bytes"] == 80_000_000_000
    by_word = {row["parallel"]: row for row in found["splits"] if isinstance(row["parallel"], str)}
    row = by_word["fsdp"]
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    assert abs(sum(row[f"{part}_bytes"] for part in parts) - row["peak_bytes"]) <= 5
    assert not by_word["ddp"]["fits"]
    assert found["recommended"][0]["parallel"] == "fsdp"


def test_where_nothing_fits_activation_checkpointing_is_named_and_then_more_nodes(capsys) -> None:
    big = "advise --params 200e9 --layers 80 --hidden 8192 --sequence 4096 --site abci3"
    for more, cure in (([], "; --activation-checkpointing, or"), (["--activation-checkpointing"], "; take more nodes")):
        assert main([*big.split(), *more]) == 0
        assert cure in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ("advise", "there is no model to advise on", "hpcddp advise train.py:make_model"),
        (
            "advise --params 7e9 --gpu-memory 80GB",
            "still needs --layers and --hidden and --sequence",
            "--layers 32 --hi",
        ),
        (f"{SEVEN} --site delta", "does not say which GPUs a node of queue", "--gpu-memory 80GB"),
        (f"{SEVEN} --site abci3 --queue rt_HC", "which GPUs a node of queue rt_HC has", "--queue with one of rt_HF"),
        (f"{SEVEN} --gpu-memory 80", "--gpu-memory '80' is no size of memory", "--gpu-memory 80GB"),
        (f"{SEVEN} --gpu-memory 80GB --input 3,4", "--input goes with FILE.py", "leave out --input"),
        ("advise --params x --layers 2 --hidden 8 --sequence 8 --gpu-memory 80GB", "--params 'x' is no count", "7e9"),
        ("advise --params 9 --layers 2 --hidden 8 --sequence 8 --gpu-memory 80GB", "parameters alone", "--vocabulary"),
        (f"{SEVEN} --heads 7 --gpu-memory 80GB", "--heads 7 do not divide --hidden 4096", "--heads 8"),
        ("advise train.py --gpu-memory 80GB", "'train.py' is no file and function", "train.py:make_model"),
    ],
)
def test_a_wrong_request_is_refused_in_two_lines(
    line: str, what: str, hint: str, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(line.split()) in {2, 3}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert what in said[0]
    assert hint in said[1]


def test_numbers_need_neither_torch_nor_what_makes_scripts(run) -> None:
    line = f"{SEVEN} --gpu-memory 80GB --ranks-per-node 8".split()
    program = "import sys\nfrom hpcddp.cli.main import main\nmain(sys.argv[1:])\nprint(*sys.modules, file=sys.stderr)"
    done = run([sys.executable, "-c", program, *line])
    assert not {"torch", "numpy", "yaml", "jinja2", "dataclasses", "inspect"} & set(
        done.stderr.splitlines()[-1].split()
    )


def test_what_to_paste_for_tensor_parallelism_has_its_plan_and_is_accepted(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(f"{SEVEN} --site abci3 --global-batch 3".split()) == 0
    text = capsys.readouterr().out
    assert 'tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}' in text
    [line] = [line for line in text.splitlines() if line.startswith("  hpcddp render")]
    assert "--parallel tensor=8" in line
    words = [*shlex.split(line)[1:], "--set", "account=gaa50000", "--set", "walltime=1:00:00"]
    end = words.index("--")
    assert main([*words[:end], *words[-4:], *words[end:-4]]) == 0
    assert "export HPCDDP_PARALLEL=tensor=8" in capsys.readouterr().out
