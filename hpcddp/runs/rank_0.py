"""The last resort for finding rank 0: a small file in the run folder, which all nodes see.

Its name and its content hold the launch's key, so that a file of another job, step or attempt is never taken.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from hpcddp.errors import LaunchError, RequestError
from hpcddp.runs.jsonfile import read_object, write_object


def address_path(folder: str, key: str) -> str:
    """The file of the launch with this key (`ranks.rendezvous.find_key`)."""
    from hashlib import sha256

    return os.path.join(folder, f"rank0-{sha256(key.encode(errors='surrogateescape')).hexdigest()[:16]}.json")


def publish_address(folder: str, key: str, address: str, port: int) -> None:
    """Rank 0: say where it is. LaunchError if the folder cannot be written."""
    path = address_path(folder, key)
    try:
        write_object(path, {"key": key, "master_addr": address, "master_port": port}, durable=True)
    except OSError as error:
        raise LaunchError(f"rank 0 cannot write {path}: {error.strerror}", f"ls -ld {folder}") from error


def read_address(folder: str, key: str) -> tuple[str, int] | None:
    """Address and port that rank 0 of this launch has published, or None if it has not (yet)."""
    with suppress(OSError, RequestError, KeyError, TypeError, ValueError):
        os.listdir(folder)  # makes NFS look again instead of remembering that the file was not there
        content = read_object(address_path(folder, key)) or {}
        return (str(content["master_addr"]), int(content["master_port"])) if content["key"] == key else None
    return None


def wait_for_address(folder: str, key: str, timeout_s: float = 120.0) -> tuple[str, int]:
    """As `read_address`, after waiting for rank 0. LaunchError after the time limit, with the file's name."""
    deadline = time.monotonic() + timeout_s
    pause = 0.02
    while (found := read_address(folder, key)) is None:
        if time.monotonic() >= deadline:
            path = address_path(folder, key)
            raise LaunchError(
                f"rank 0 has not written {path} within {timeout_s:g} s",
                "see whether rank 0 has started, and whether all nodes see that folder",
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)  # thousands of ranks may be asking one file server
    return found


def withdraw_address(folder: str, key: str) -> None:
    """Rank 0, when all have come: take the file away. No error if it is gone."""
    with suppress(OSError):
        os.unlink(address_path(folder, key))
