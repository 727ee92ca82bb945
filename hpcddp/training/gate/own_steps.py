"""Objects of the user's own classes with a `step()`: it acts in each micro batch, where an optimizer's does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hpcddp.training.gate.loop_view import LoopView
from hpcddp.training.gate.replaced import replace_in_class
from hpcddp.training.remarks import print_warning


def watch_steps(thing: object, loop: LoopView, *, is_first: bool) -> Callable[[], None]:
    """From now on the first `step()` before a last micro batch is a warning on rank 0. Returns what undoes that."""
    has_warned = False
    kind = type(thing).__name__

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        if not (has_warned or loop.acts or loop.is_left):
            has_warned = True
            print_warning(
                f"{kind}.step() is called in each micro batch, and a global batch has several here: only an"
                " Optimizer, an LRScheduler and an AveragedModel wait for the last one\nhint: if"
                f" rt.is_last_micro_batch: … around the step of the {kind}",
                is_first=is_first,
            )
        return original(*args, **kwargs)

    with suppress(TypeError):  # an object with __slots__ cannot get another class
        return replace_in_class(thing, "step", step)
    return lambda: None
