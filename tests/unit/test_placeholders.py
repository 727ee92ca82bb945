"""Placeholders in a command: what they stand for, and that a wrong global batch is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.sweep import batch_numbers, fill_placeholders, find_placeholders

BATCH = ["python", "train.py", "--micro={micro_batch}", "--steps", "{accumulation}"]


def test_known_names_are_filled_and_others_are_the_programs() -> None:
    command = ["python", "t.py", "--name={run_dir}/x-{rank}", "{epoch}", "{}", '{"a": {rank}}', "{{rank}}"]
    filled = fill_placeholders(command, {"rank": 3, "run_dir": "runs/t"})
    assert filled == ["python", "t.py", "--name=runs/t/x-3", "{epoch}", "{}", '{"a": 3}', "{rank}"]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["bash", "-c", "echo ${rank} {rank}"], 2),
        (["env", "A=1", "bash", "-lc", "echo {rank}"], 4),
        (["python3", "-c", "f'{rank}'"], 2),
    ],
)
def test_the_text_of_a_program_is_not_filled(command: list[str], code: int) -> None:
    assert find_placeholders([*command, "{run_dir}"]) == ("run_dir",)
    filled = fill_placeholders([*command, "{run_dir}"], {"run_dir": "runs/t"})
    assert (filled[code], filled[-1]) == (command[code], "runs/t")


def test_a_programs_own_c_is_an_option_like_others() -> None:
    assert find_placeholders(["python", "t.py", "-c", "{rank}"]) == ("rank",)
    assert find_placeholders(["t.sh", "${rank}"]) == ()


@pytest.mark.parametrize("name", ["micro_batch_size", "node_name"])
def test_a_name_that_only_resembles_one_is_the_programs(name: str) -> None:
    assert find_placeholders([f"{{{name}}}"]) == ()


@pytest.mark.parametrize(
    ("name", "what"), [("local_rank", "the launcher does not say it"), ("run_dir", "HPCDDP_RUN_DIR is not set")]
)
def test_a_value_that_nothing_says_is_an_error(name: str, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        fill_placeholders([f"{{{name}}}"], {"local_rank": None})


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 40))
def test_the_numbers_multiply_to_the_global_batch(world: int, share: int, most: int) -> None:
    found = batch_numbers([*BATCH, "{global_batch}"], world, world * share, most)
    assert found["micro_batch"] * found["accumulation"] * world == found["global_batch"] == world * share
    assert found["micro_batch"] <= most
    assert found["per_rank_batch"] == share


def test_only_what_the_command_uses_is_asked_for() -> None:
    assert batch_numbers(["python", "{world_size}"], 3, None, None) == {}
    assert batch_numbers(["{global_batch}"], 3, 100, None) == {"global_batch": 100}


@pytest.mark.parametrize(
    ("word", "global_batch", "most", "what", "hint"),
    [
        ("{per_rank_batch}", None, None, "there is no global batch", "--global-batch"),
        ("{per_rank_batch}", 100, None, "not the same share for each of 8 ranks", "--global-batch 96 or 104"),
        ("{per_rank_batch}", 3, None, "not the same share", "--global-batch 8;"),
        ("{per_rank_batch}", 64, 4, "its share of 8 in 2 passes", "{micro_batch} and {accumulation}"),
        ("{per_rank_batch} {accumulation}", 64, 4, "its share of 8 in 2 passes", "no {per_rank_batch}"),
        ("{micro_batch}", 64, 4, "its share of 8 in 2 passes", "{accumulation}"),
    ],
)
def test_what_would_train_on_another_global_batch_is_refused(
    word: str, global_batch: int | None, most: int | None, what: str, hint: str
) -> None:
    with pytest.raises(RequestError) as caught:
        batch_numbers(word.split(), 8, global_batch, most)
    assert what in caught.value.message
    assert hint in caught.value.hint
