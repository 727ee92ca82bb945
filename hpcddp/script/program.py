"""Whether the program that each rank becomes can be started at all, as far as this machine can tell."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hpcddp.errors import RequestError, nearest
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcddp.script.preflight import Here

# Which interpreter a file without its own is for.
_INTERPRETERS = {".py": "python", ".sh": "bash"}
_STARTS = (b"#!", b"\x7fELF")


def check_program(program: str, folder: str, python: str, here: Here) -> Iterator[str]:
    """Remarks on a program that may be missing. Raises RequestError for one that is here and cannot be started.

    `folder`: where the job runs. `python`: the ranks' interpreter, whose folder is first on the job's PATH.
    """
    first = program.partition(" ")[0]
    if first != program and not here.exists(os.path.join(folder, program)) and _is_program(first, folder, here):
        raise RequestError(f"the command is one word, {program!r}: its blanks are quoted", f"-- {program}")
    if "/" in program:
        path = os.path.join(folder, program)
        if here.exists(path):
            _check_file(program, path, here)
        return
    folders = [*([os.path.dirname(python)] if python else []), *here.path]
    if not here.path or any(here.exists(os.path.join(one, program)) for one in folders):
        return
    interpreter = _INTERPRETERS.get(os.path.splitext(program)[1])
    if interpreter:
        what = f"the command starts with {program}, which is no program on PATH"
        raise RequestError(what, f"-- {interpreter} {program}")
    if here.exists(os.path.join(folder, program)):
        raise RequestError(f"the command's {program} is in {folder}, but not on PATH", f"-- ./{program}")
    guess = nearest(program, sorted({name for one in folders for name in here.names(one)}))
    yield f"{program} is not on this machine's PATH{guess}; the compute nodes must have it"


def _is_program(word: str, folder: str, here: Here) -> bool:
    return any(here.exists(os.path.join(one, word)) for one in (folder, *here.path))


def _check_file(program: str, path: str, here: Here) -> None:
    """A file that is here: `exec` refuses one that is not executable, and one that names no interpreter."""
    interpreter = _INTERPRETERS.get(os.path.splitext(program)[1])
    instead = f"-- {interpreter} {program}" if interpreter else f"file {program}"
    if not here.can_run(path):
        raise RequestError(f"the command's {program} is not executable", f"chmod +x {program}, or {instead}")
    if not here.start_of(path).startswith(_STARTS):
        raise RequestError(f"the command's {program} has no #! line, so the system cannot start it", instead)
