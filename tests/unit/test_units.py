"""Durations and counts as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.units import (
    format_count,
    format_duration,
    format_walltime,
    parse_count,
    parse_walltime,
    printable,
)


@given(st.integers(1, 10**7))
def test_a_walltime_survives_being_written_and_read(seconds: int) -> None:
    assert parse_walltime(format_walltime(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00:00"), (86399.9, "23:59:59"), (200000, "55:33:20"), (-1, "00:00:00")]
)
def test_a_duration_is_shown_as_a_walltime(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_units_add_up(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    parts = [f"{n}{unit}" for n, unit in ((days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")) if n]
    if total:
        assert parse_walltime("".join(parts)) == total


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("90m", 5400),
        ("1d12h", 129600),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1d", 86400),
        ("2h30m", 9000),
        ("2-00:00:00", 172800),
        ("1-2:03:04", 93784),
        ("0:10:00", 600),
        (" 1:2:3 ", 3723),
    ],
)
def test_the_usual_forms_of_a_walltime_are_read(text: str, seconds: int) -> None:
    assert parse_walltime(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "90", "10:00", "00:3:00:00", "1:60:00", "0:0:0", "-1:00:00", "१:00:00", "1h1d", "2 h 3", "0s"],
)
def test_other_forms_of_a_walltime_are_refused_with_the_right_ones(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_walltime(text, "--walltime")
    assert "--walltime" in refused.value.message
    assert repr(text) in refused.value.message
    assert "1:30:00" in refused.value.hint


@pytest.mark.parametrize("text", ["four", "1.5", "0", "-1", "", "²", "9" * 20])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not a whole number of 1 or more"):
        parse_count(text, "--nodes")


@pytest.mark.parametrize(
    "read", [lambda text: parse_walltime(f"{text}:00:00"), lambda text: parse_count(text, "--nodes")]
)
def test_thousands_of_digits_are_refused_in_a_short_line(read: object) -> None:
    with pytest.raises(RequestError) as refused:
        read("9" * 5000)
    assert len(refused.value.message) < 120


def test_one_of_a_thing_is_no_plural() -> None:
    assert [format_count(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [format_count(n, "micro batch") for n in (1, 2)] == ["1 micro batch", "2 micro batches"]
    assert [format_count(n, "loader process") for n in (1, 2)] == ["1 loader process", "2 loader processes"]


def test_a_text_from_elsewhere_is_one_short_line_without_colours() -> None:
    assert printable("\x1b[31mno\x1b[0m disk\n\x07") == "no disk  "
    assert printable("see \x1b]8;;http://a/b\x07this\x1b]8;;\x07\x1b[?25h") == "see this"
    assert len(printable("x" * 1000)) == 400
