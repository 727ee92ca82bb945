"""Reading a recorded environment: the output of `env`, or of `env -0`, which is exact."""

from __future__ import annotations

from hpcddp.errors import RequestError


def read_environment(path: str) -> dict[str, str]:
    """The variables in this file. RequestError if it cannot be read, holds none, or can be read in two ways."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {(error.strerror or str(error)).lower()}", f"ls -l {path}"
        ) from None
    text = data.decode("utf-8", "surrogateescape")
    env = _parse_exact(text, path) if "\0" in text else _parse_lines(text, path)
    if not env:
        raise RequestError(f"{path} holds no variable", _recorded_anew(path))
    return env


def _parse_exact(text: str, path: str) -> dict[str, str]:
    env: dict[str, str] = {}
    for entry in text.split("\0"):
        name, equals, value = entry.partition("=")
        if equals and name.isprintable() and name:
            if env.get(name, value) != value:
                raise RequestError(f"{path} has {name} twice, with different values", _recorded_anew(path))
            env[name] = value
        elif entry.strip():
            raise _no_environment(entry, path)
    return env


def _parse_lines(text: str, path: str) -> dict[str, str]:
    """`env`'s own output, where a value may go on over the next lines.

    A line that begins with a name and `=` begins a variable, except inside an exported shell function, which ends
    with a line `}`. A name that comes twice with different values shows that one of the two was part of another
    value: nobody can tell which.
    """
    env: dict[str, str] = {}
    name, in_function = "", False
    for line in text.split("\n"):
        before, equals, after = line.partition("=")
        if equals and not in_function and _is_name(before):
            if env.get(before, after) != after:
                raise RequestError(
                    f"{path} has {before} twice: one of the two may be a line of another variable's value",
                    _recorded_anew(path),
                )
            name, env[before] = before, after
            in_function = (
                before.startswith("BASH_FUNC_") and after.startswith("()") and not after.rstrip().endswith("}")
            )
        elif name:
            env[name] += "\n" + line
            in_function = in_function and line != "}"
        elif line.strip():
            raise _no_environment(line, path)
    if name:
        env[name] = env[name].removesuffix("\n")  # the file's last newline, which is not the variable's
    return env


def _recorded_anew(path: str) -> str:
    """Not into this file, which may be no record at all."""
    return f"record it in another file: env -0 > {path}.new"


def _is_name(text: str) -> bool:
    return text.isidentifier() or (text.startswith("BASH_FUNC_") and not any(c.isspace() for c in text))


def _no_environment(line: str, path: str) -> RequestError:
    # The line itself is not shown: it may be a secret.
    return RequestError(
        f"{path} is not an environment: a line of {len(line)} characters has no NAME=",
        _recorded_anew(path),
    )
