"""Which scripts `hpcddp verify` has run, for `hpcddp submit`: an empty file for each in the user's cache."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def record_verified(script: str, env: Mapping[str, str]) -> None:
    """Remember this script, or that it was mentioned. A home that cannot be written is no error."""
    path = _mark(script, env)
    if path:
        with suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            open(path, "a").close()


def is_verified(script: str, env: Mapping[str, str]) -> bool:
    """Whether it was remembered, or could not be."""
    path = _mark(script, env)
    return not path or os.path.exists(path)


def _mark(script: str, env: Mapping[str, str]) -> str:
    base = env.get("XDG_CACHE_HOME") or (f"{env['HOME']}/.cache" if "HOME" in env else "")
    digest = hashlib.sha256(os.fsencode(os.path.realpath(script))).hexdigest()[:20]
    return f"{base}/hpcddp/verified/{digest}" if base else ""
