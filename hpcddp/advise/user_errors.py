"""What goes wrong in the user's own code, as errors of two lines; and code that must not read our command line."""

from __future__ import annotations

import sys
from contextlib import contextmanager

from hpcddp.errors import HpcddpError, RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_SPOKEN = 160  # characters of somebody else's error


def describe(error: BaseException) -> str:
    """Kind and text, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_SPOKEN]}{'…' if len(text) > _SPOKEN else ''}"


@contextmanager
def said_of(what: str, hint: str | Callable[[BaseException], str]) -> Iterator[None]:
    """An error of the user's code, or of torch about it, as two lines; also where it ends the program."""
    try:
        yield
    except HpcddpError:
        raise
    except (Exception, SystemExit) as error:
        if str(error).startswith("Expected more than 1 value per channel"):  # torch's BatchNorm
            hint = "--max-micro-batch 2: BatchNorm takes its statistics over several samples"
        told = hint if isinstance(hint, str) else hint(error)
        raise RequestError(f"{what} {describe(error)}", told) from error


@contextmanager
def without_command_line(file: str, name: str) -> Iterator[None]:
    """The words of `hpcddp advise` are not those of the script: argparse refuses to read them, and others see none."""
    import argparse

    words, parse = sys.argv, argparse.ArgumentParser.parse_known_args

    def refuse(parser: Any, args: Any = None, namespace: Any = None) -> Any:
        if args is None:
            raise RequestError(
                f"{name} in {file} reads the command line, which here is that of hpcddp",
                f"add: def make_model(): … with the values written out, and advise {file}:make_model",
            )
        return parse(parser, args, namespace)

    sys.argv = [file]
    argparse.ArgumentParser.parse_known_args = refuse  # type: ignore[method-assign,assignment]  # until the model is made
    try:
        yield
    finally:
        sys.argv = words
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]  # as above
