"""Optimizers that make another one step, such as those for sharpness-aware minimization (SAM)."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch.optim import Optimizer


def find_outer(inner: Optimizer, optimizers: Iterable[Optimizer]) -> tuple[str, str] | None:
    """The class of the one among `optimizers` that has `inner` as an attribute, and the attribute's name."""
    return next(
        ((type(outer).__name__, name) for outer in optimizers for name, thing in vars(outer).items() if thing is inner),
        None,
    )


def keep_groups_shared(one: Optimizer, other: Optimizer) -> None:
    """They have one list of parameter groups, also when one has loaded its state, which makes a list of its own."""
    one.register_load_state_dict_post_hook(functools.partial(_follow, other))
    other.register_load_state_dict_post_hook(functools.partial(_follow, one))


def _follow(follower: Optimizer, loaded: Optimizer) -> None:
    follower.param_groups = loaded.param_groups
