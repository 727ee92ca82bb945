"""The hint for a failed forward pass is about what failed: the numbers, the shape, the arguments or the model."""

from __future__ import annotations

import pytest

from hpcddp.advise.measure import hint_of_pass


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (RuntimeError("Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int"),
         "; --sequence 1024 for a model of token numbers"),
        (RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Double"),
         "; --sequence 1024 for a model of token numbers"),
        (RuntimeError("a and b must have same reduction dim, but got [1, 4] X [5, 4]."), "of one sample that it takes"),
        (RuntimeError("expected input[1, 1, 8, 8] to have 3 channels"), "of one sample that it takes"),
        (ValueError("not enough values to unpack (expected 4, got 3)"), "of one sample that it takes"),
        (TypeError("Net.forward() missing 1 required positional argument: 'mask'"), "makes the other arguments"),
    ],
)  # fmt: skip
def test_the_hint_is_about_what_failed(error: Exception, end: str) -> None:
    hint = hint_of_pass(error, (2, 8), tokens=False)
    assert hint.startswith("its input was --input 8, numbers of shape (2, 8)")
    assert hint.endswith(end)


def test_an_error_of_the_model_names_its_line() -> None:
    error = None
    try:
        object().nope  # type: ignore[attr-defined]  # noqa: B018  # the model's own mistake
    except AttributeError as caught:
        error = caught
    assert error is not None
    hint = hint_of_pass(error, (1, 32), tokens=True)
    assert hint.startswith("its input was --sequence 32, token numbers of shape (1, 32); the error is at ")
    assert "test_pass_errors.py:" in hint
    assert "--input" not in hint
