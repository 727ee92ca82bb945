"""Durations and counts as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.units import format_walltime, parse_count, parse_walltime


@given(st.integers(1, 10**7))
def test_a_walltime_survives_being_written_and_read(seconds: int) -> None:
    assert parse_walltime(format_walltime(seconds)) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "banana", "1:30", "00:3:00:00", "1:60:00", "0:0:0", "-1:00:00", "1:00:0x", "१:00:00", "90", " 1:0 0:00"],
)
def test_other_forms_of_a_walltime_are_refused_with_the_right_one(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_walltime(text, "--walltime")
    assert "--walltime" in refused.value.message
    assert repr(text) in refused.value.message
    assert "1:30:00" in refused.value.hint


@pytest.mark.parametrize("text", ["0", "-3", "four", "1.5", "", "²", "1_0"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not a whole number"):
        parse_count(text, "--nodes")


def test_a_count_may_stand_between_blanks() -> None:
    assert parse_count(" 4 ", "--nodes") == 4


@pytest.mark.parametrize(
    "read", [lambda text: parse_walltime(f"{text}:00:00"), lambda text: parse_count(text, "--nodes")]
)
def test_thousands_of_digits_are_refused_in_a_short_line(read: object) -> None:
    with pytest.raises(RequestError) as refused:
        read("9" * 5000)
    assert len(refused.value.message) < 120
