"""Reading a recorded environment: the output of `env`, or of `env -0`, which is exact."""

from __future__ import annotations

from hpcddp.errors import RequestError


def read_environment(path: str) -> dict[str, str]:
    """The variables in this file. RequestError if it cannot be read, holds none, or has one of two values.

    Of a value of several lines `env` gives the first one here, which is all of what a launcher sets: further lines have
    no name, or show that they are none by saying another variable's value anew.
    """
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {(error.strerror or str(error)).lower()}", f"ls -l {path}"
        ) from None
    again = f"record it in another file: env -0 > {path}.new"  # this one may be no record at all
    env: dict[str, str] = {}
    for entry in text.split("\0" if "\0" in text else "\n"):
        name, equals, value = entry.partition("=")
        if not (name and equals and name.isprintable()) or " " in name:
            continue
        if env.setdefault(name, value) != value:
            raise RequestError(f"{path} has {name} twice: one may be a line of another variable's value", again)
    if not env:
        raise RequestError(f"{path} holds no variable", again)
    return env
