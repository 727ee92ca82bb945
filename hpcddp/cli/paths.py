"""What is said of a path that somebody gave and that the system refuses. Loaded only once it has."""

from __future__ import annotations

import os

from hpcddp.errors import RequestError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def explain_path(error: OSError) -> RequestError | None:
    """The error in two lines, for every path that no verb has looked at before; None if it is of no path, or of a file
    of hpcddp itself."""
    if not isinstance(error.errno, int) or not error.strerror:  # of a network, or made by a library
        return None
    if not _has_folder():
        return RequestError("the folder that this shell is in has been deleted", "cd ~")
    if error.filename is None or isinstance(error.filename, int):
        return None
    path = os.fsdecode(error.filename)
    if os.path.abspath(path).startswith(f"{_PACKAGE}/"):
        return None
    return RequestError(f"{path} cannot be used: {error.strerror.lower()}", f"ls -ld {os.path.dirname(path) or '.'}")


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
