"""Whether this Python has what the reference trainer imports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from hpcddp.errors import LaunchError

_LIBRARIES = ("torch", "torchvision", "numpy")  # what the extra `train` installs


def find_missing_library(program: str, names: Sequence[str] = _LIBRARIES) -> LaunchError | None:
    """The error of `program`, as a person types it, for the first library that is missing. Imports none of them."""
    for name in names:
        if find_spec(name) is None:
            return LaunchError(
                f"{program} needs {name}, which {sys.executable} does not have", "pip install 'hpcddp[train]'"
            )
    return None
