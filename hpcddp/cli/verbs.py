"""The help of the command line as a whole: the verbs, what people type for them, what an exit status means; and what is
said of a path that the system refuses.

No verb that does its work loads this.
"""

from __future__ import annotations

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
    import re  # with shlex a quarter of the time of --help
    import shlex

    word = argv[0]
    if word.startswith("-"):
        verb = next((w for w in argv if w in VERBS), "VERB")
        return RequestError(f"{word!r} stands before the verb", f"hpcddp {verb} {word} …, or hpcddp --help")
    if word.endswith((".yaml", ".yml")):
        return RequestError(f"there is no verb before {word!r}", f"hpcddp render {word}")
    if len(argv) > 1 and re.fullmatch(r"(.*/)?python[\d.]*", word):
        return RequestError(f"there is no verb before {word!r}", f"hpcddp launch -- {shlex.join(argv)}")
    if word.endswith(".py"):
        return RequestError(f"there is no verb before {word!r}", f"hpcddp launch -- python {word}")
    return RequestError(f"{word!r} is not a verb of hpcddp{nearest(word, list(VERBS))}", "hpcddp --help")


def format_verbs() -> str:
    """What `hpcddp --help` prints."""
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
    """What to type, indented."""
    return "example:\n" + "".join(f"  {line}\n" for line in lines.splitlines())


def format_exits(statuses: Mapping[int, str]) -> str:
    """A table of exit statuses, in order."""
    return "exit status:\n" + "".join(f"  {status:<3} {statuses[status]}\n" for status in sorted(statuses))


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
