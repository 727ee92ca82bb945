"""The help of the command line as a whole, and what it says to a word that is no verb or a path that cannot be used."""

from __future__ import annotations

import errno
import os

from hpcddp.cli.main import VERBS
from hpcddp.errors import RequestError, nearest

TYPE_CHECKING = False  # mypy knows the name; importing typing would cost `--help` a quarter of its time
if TYPE_CHECKING:
    from collections.abc import Mapping

#: What an exit status of hpcddp itself means, whatever the verb.
EXITS = {
    0: "done",
    2: "the request is wrong: an option, a job file, a value",
    3: "the site or its file is wrong, or does not say what is needed",
    4: "the launch environment contradicts itself, or lacks something",
    5: "the scheduler refused, or did not answer",
}
_DESCRIPTION = "From a PyTorch training script to a correct multi-node run on PBS and Slurm clusters."
_EXAMPLE = "hpcddp render --site abci3 --account GROUP --nodes 4 -- python train.py | qsub"


def unknown_verb(argv: list[str]) -> RequestError:
    """The error for a first word that is no verb: a verb was forgotten, or misspelt."""
    word = argv[0]
    if word.startswith("-"):
        verb = next((w for w in argv if w in VERBS), "VERB")
        return RequestError(f"{word!r} stands before the verb", f"hpcddp {verb} {word} …, or hpcddp --help")
    return RequestError(f"{word!r} is not a verb of hpcddp{nearest(word, list(VERBS))}", "hpcddp --help")


def format_verbs() -> str:
    """The text that `hpcddp --help` prints."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {text}" for verb, text in VERBS.items())
    return (
        "usage: hpcddp VERB [options] [-- command ...]\n\n"
        f"{_DESCRIPTION}\n\n"
        f"{verbs}\n\n"
        "  hpcddp help VERB          the options of one verb, also hpcddp VERB --help\n"
        "  hpcddp -V, --version\n\n"
        f"{format_example(_EXAMPLE)}\n"
        f"{format_exits(EXITS)}"
    )


def format_example(lines: str) -> str:
    """Lines to type, indented."""
    return "example:\n" + "".join(f"  {line}\n" for line in lines.splitlines())


def format_exits(statuses: Mapping[int, str]) -> str:
    """A table of exit statuses, in order."""
    return "exit status:\n" + "".join(f"  {status:<3} {statuses[status]}\n" for status in sorted(statuses))


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def explain_os_error(error: OSError) -> RequestError | None:
    """The error of a path that the user named, or of the output; None: of a file of hpcddp itself, or of no file."""
    reason = (error.strerror or "").lower()
    if isinstance(error.filename, (str, bytes)):
        path = os.fsdecode(error.filename)
        if os.path.abspath(path).startswith(f"{_PACKAGE}/"):
            return None
        return RequestError(f"{path} cannot be used: {reason}", f"ls -ld {os.path.dirname(path) or '.'}")
    if error.errno in _FULL:
        return RequestError(f"the output cannot be written: {reason}", "df -h .")
    if error.errno == errno.ENOENT:  # os.getcwd() has no file's name
        return RequestError("the folder that this shell is in has been deleted", "cd ~")
    return None
