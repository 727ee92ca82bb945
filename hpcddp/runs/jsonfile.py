"""Read and write the JSON files of a run folder: replaced as a whole, with a schema version, two-line errors.

`schema` is each file's first key, one number for all files of the folder. Whoever changes what a key means counts it
up; a key that may be absent needs no new number.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from hpcddp.errors import RequestError

R = TypeVar("R", bound=tuple[Any, ...])
SCHEMA = 1  # the version that this hpcddp writes, and the only one that it reads
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"


class DamagedFileError(RequestError):
    """A file of the run folder does not hold what hpcddp writes."""


class UnreadableFileError(DamagedFileError):
    """The system does not let the file be read, so nobody knows what it holds."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(f"{path} cannot be read: {(error.strerror or str(error)).lower()}", f"ls -l {path}")


class SchemaError(RequestError):
    """A file of the run folder has another schema version than the one that this hpcddp reads."""


def format_now() -> str:
    """The time as the files have it: ISO 8601, with the zone."""
    return time.strftime(TIME_FORMAT)


def read_record(path: str, record: type[R]) -> R | None:
    """The object in the file as this Record, each field with a value of its annotation; other keys are left out. None
    if there is no such file. SchemaError; DamagedFileError."""
    content = read_object(path)
    if content is None:
        return None
    kinds, defaults = record.__annotations__, getattr(record, "_field_defaults", {})
    for name, kind in kinds.items():
        if name not in content and name not in defaults:
            raise make_damaged(path, f"it has no {name}")
        if name in content and not _fits(content[name], kind):
            raise make_damaged(path, f"its {name} is {content[name]!r}")
        if name in content and kind.startswith("tuple["):
            content[name] = tuple(content[name])
    return record(**{name: content[name] for name in kinds if name in content})


def make_damaged(path: str, fault: str) -> DamagedFileError:
    return DamagedFileError(f"{path} does not hold what hpcddp writes: {fault}", _hint(path))


def _hint(path: str) -> str:
    return f"look at it: head {path}; then restore it, or remove it"


def _fits(value: object, kind: str) -> bool:
    """Whether a value of JSON can have this annotation."""
    outer, _, inner = kind.partition("[")
    inner = inner.removesuffix("]").removesuffix(", ...").removeprefix("str, ")
    if " | " in kind:
        return any(_fits(value, one) for one in kind.split(" | "))
    if outer in {"tuple", "list"}:
        return isinstance(value, list) and all(_fits(one, inner) for one in value)
    if outer in {"dict", "Mapping"}:
        return isinstance(value, dict) and all(_fits(one, inner) for one in value.values())
    if kind == "float":
        return type(value) in {int, float} and value == value  # no NaN
    return kind == "Any" or type(value).__name__ == {"None": "NoneType"}.get(kind, kind)


def read_object(path: str) -> dict[str, Any] | None:
    """The object in the file, without `schema`; None if there is no such file. The errors of `read_record`."""
    try:
        content = json.loads(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:  # the second: brackets in brackets, by the thousand
        raise DamagedFileError(f"{path} cannot be read: {str(error).lower()}", _hint(path)) from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} holds no JSON object", _hint(path))
    check_schema(path, content)
    return {name: value for name, value in content.items() if name != "schema"}


def write_object(path: str, content: Mapping[str, Any], *, durable: bool = False) -> None:
    """Replace the file as a whole, and make its folder. `durable`: on the disk at the end. OSError."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.tmp-{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(json.dumps({"schema": SCHEMA, **content}, indent=1) + "\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise


def read_file(path: str) -> str:
    """The whole file; what is no UTF-8 is replaced. FileNotFoundError, NotADirectoryError, UnreadableFileError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UnreadableFileError(path, error) from error


def read_first_line(path: str) -> str:
    """The first line of a file; "" if there is no such file. UnreadableFileError."""
    try:
        return read_file(path).strip().partition("\n")[0]
    except (FileNotFoundError, NotADirectoryError):
        return ""


def check_schema(path: str, content: Mapping[str, Any]) -> None:
    """SchemaError if the content has another version than this hpcddp reads. A file without one was written by hand."""
    schema = content.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise SchemaError(
            f"{path} has schema {schema!r}, and this hpcddp reads schema {SCHEMA}",
            "use the hpcddp that wrote it: python -m pip install --upgrade hpcddp",
        )
