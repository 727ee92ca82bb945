"""What a request's checks may see of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcddp.script.preflight import Here


def look_here(env: Mapping[str, str]) -> Here:
    """This machine's files, from this folder and with this PATH."""
    path = tuple(filter(None, env.get("PATH", "").split(":")))
    return Here(os.getcwd(), _exists, _can_run, _start_of, _names, path, _can_write)


def _exists(path: str) -> bool:
    """UnicodeEncodeError for a name that Python cannot encode, with an answer of its own: it would be "not there"."""
    os.fsencode(path)
    return os.path.exists(path)


def _can_run(path: str) -> bool:
    return os.access(path, os.X_OK)


def _can_write(path: str) -> bool:
    return os.access(path, os.W_OK | os.X_OK)


def _start_of(path: str) -> bytes:
    """Nothing of a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4096)
    except OSError:
        return b""


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
