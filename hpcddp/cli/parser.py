"""argparse with this project's error form."""

from __future__ import annotations

import argparse
import os

from hpcddp.errors import RequestError


class VerbParser(argparse.ArgumentParser):
    """Raises RequestError instead of printing usage and leaving, so that every error has the same two lines."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(
            prog=f"hpcddp {verb}",
            description=description,
            formatter_class=_formatter,
            allow_abbrev=False,  # an abbreviation that works today is ambiguous tomorrow, inside somebody's job script
        )

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn; raising is not returning
        from hpcddp.errors import nearest

        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        guess = nearest(unknown.split("=")[0], list(self._option_string_actions)) if unknown.startswith("-") else ""
        raise RequestError(f"{self.prog}: {message}{guess}", f"{self.prog} --help")


def _formatter(prog: str) -> argparse.HelpFormatter:
    """argparse makes a formatter for every option, and left alone would import shutil (2 ms) for the width."""
    try:
        width = os.get_terminal_size().columns
    except OSError:  # not a terminal
        width = 100
    return argparse.RawDescriptionHelpFormatter(prog, width=width - 2)
