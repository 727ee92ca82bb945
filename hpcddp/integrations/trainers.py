"""What attaching to a framework's trainer has in common: its training method resumes, and ends the script at a stop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from hpcddp.errors import LaunchError
from hpcddp.runs.folder import AttemptFolder

_ATTACHED = "_hpcddp_is_attached"


def is_new(trainer: Any, attempt: AttemptFolder | None, env: Mapping[str, str]) -> bool:
    """Whether there is a run to take part in, and this trainer does not yet. Says on rank 0 that there is none."""
    if attempt is None:
        if env.get("RANK", "0") == "0":
            what = "no run folder (HPCDDP_RUN_DIR, HPCDDP_ATTEMPT): nothing stops or resumes this training"
            print(f"hpcddp: {what}\nhint: hpcddp launch -- python train.py", file=sys.stderr, flush=True)
        return False
    was = getattr(trainer, _ATTACHED, False)
    setattr(trainer, _ATTACHED, True)
    return not was


def check_all_ranks(env: Mapping[str, str], world_size: int, hint: str) -> None:
    """LaunchError if the trainer has found fewer ranks than the launcher has started."""
    started = env.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > world_size:
        raise LaunchError(f"the trainer has {world_size} of the {started} ranks that were started", hint)


def replace_method(thing: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(the method)` in its place, for this one object."""
    setattr(thing, name, make(getattr(thing, name)))
