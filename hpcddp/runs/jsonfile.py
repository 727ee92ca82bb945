"""Read and write the JSON files of a run folder: replaced as a whole, with a schema version, two-line errors.

`schema` is each file's first key. Version 1 is what hpcddp 0.1 wrote, in most files without the key. It counts up when
an older hpcddp would misread the file; a key that may be absent needs no new version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hpcddp.errors import RequestError

# the newest version that this hpcddp reads, and the one that it writes
SCHEMAS = {
    "run.json": 1,
    "plan.json": 1,
    "state.json": 2,
    "chain.json": 1,
    "job.json": 1,
    "holder.json": 1,
    "submission.json": 1,
    "sweep.json": 1,
    "metrics.jsonl": 1,
    "versions.json": 1,
    "data.json": 1,
    "options.json": 1,
    "manifest.json": 1,
    "best.json": 1,
}


class DamagedFileError(RequestError):
    """A file of the run folder does not hold what hpcddp writes."""


class UnreadableFileError(DamagedFileError):
    """The system does not let the file be read, so nobody knows what it holds."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(f"{path} cannot be read: {(error.strerror or str(error)).lower()}", f"ls -l {path}")


class NewerFileError(RequestError):
    """A file of the run folder was written by a newer hpcddp, in a form that this one does not know."""


def read_object(path: str) -> dict[str, Any] | None:
    """The object in the file, without `schema`; None if there is no such file.

    NewerFileError for a schema version above the known one; DamagedFileError if the file cannot be read otherwise.
    """
    try:
        content = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:  # the second: brackets in brackets, by the thousand
        raise DamagedFileError(f"{path} cannot be read: {str(error).lower()}", f"look at it: head {path}") from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} holds no JSON object", f"look at it: head {path}")
    check_schema(path, content)
    return {name: value for name, value in content.items() if name != "schema"}


def write_object(path: str, content: Mapping[str, Any], *, durable: bool = False) -> None:
    """Replace the file, so that a reader never sees half of it; makes its folder. `durable`: on the disk at the end.

    OSError if it cannot be written.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.tmp-{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(json.dumps({"schema": SCHEMAS[name], **content}, indent=1) + "\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise


def read_text(path: str) -> str:
    """The whole file; what is no UTF-8 is replaced. FileNotFoundError, NotADirectoryError, UnreadableFileError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UnreadableFileError(path, error) from error


def check_schema(path: str, content: Mapping[str, Any]) -> None:
    """NewerFileError if the content says a newer version than this hpcddp knows of such a file."""
    known = SCHEMAS[os.path.basename(path)]
    schema = content.get("schema", 1)
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise DamagedFileError(f"{path}: schema {schema!r} is no version number", f"look at it: head {path}")
    if schema > known:
        raise NewerFileError(
            f"{path} was written by a newer hpcddp: its schema version is {schema}, this hpcddp knows {known}",
            "upgrade hpcddp here: python -m pip install --upgrade hpcddp",
        )
