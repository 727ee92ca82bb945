"""Errors: two lines, and a guess at what was meant."""

from hpcddp.errors import RequestError, nearest


def test_an_error_is_what_is_so_and_something_to_type() -> None:
    assert str(RequestError("nodes 0 is no count", "--nodes 1")) == "nodes 0 is no count\nhint: --nodes 1"


def test_a_word_that_is_near_is_guessed() -> None:
    assert nearest("nodez", ["nodes", "name"]) == " (did you mean 'nodes'?)"


def test_no_guess_where_nothing_is_near() -> None:
    assert nearest("banana", ["rt_HF", "workq"]) == ""
    assert nearest("numactl", ["slurmctld", "numastat"]) == ""  # another program
