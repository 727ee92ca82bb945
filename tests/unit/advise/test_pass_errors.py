"""The hint for a failed forward pass says what the model was given, where it failed, and how to give another input."""

from __future__ import annotations

from hpcddp.advise.measure import hint_of_pass


def test_the_hint_has_the_input_and_both_options() -> None:
    hint = hint_of_pass(RuntimeError("expected input[1, 1, 8, 8] to have 3 channels"), (2, 1, 8), tokens=False)
    assert hint.startswith("its input was --input 1,8, numbers of shape (2, 1, 8); ")
    assert hint.endswith("; token numbers: --sequence 1024; others: --input 3,224,224")


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
