"""The verbs, the help of the command line as a whole, and errors of a word that is no verb or of an unusable path."""

from __future__ import annotations

import errno
import os

from hpcddp.errors import RequestError, nearest

TYPE_CHECKING = False  # mypy knows the name; importing typing would cost `--help` a quarter of its time
if TYPE_CHECKING:
    from collections.abc import Mapping

#: verb -> what it does. The module is hpcddp.cli.<verb>.
VERBS = {
    "init": "ask which site, account and script, and write ./hpcddp.yaml",
    "render": "print the job script for a request (pipe it to qsub, sbatch or bash)",
    "submit": "queue a job: its run's folder is made, its id printed",
    "layout": "show where each rank will be, before anything is queued",
    "advise": "say which ways to split a model fit into the memory of the GPUs",
    "lint": "find known mistakes in a job script or a training script",
    "check": "say what would stop a job: here, and on each node of an allocation before it trains",
    "sites": "list the known sites, or show one",
    "env": "say which rank this process is, and how that is known",
    "exec": "run a command as a rank, with RANK, WORLD_SIZE, … set",
    "launch": "run a command on every rank of the allocation this shell is in",
    "supervise": "start a job's launcher and stay beside it; job scripts end in it",
    "logs": "print what the ranks of a run have printed, and follow it",
    "cancel": "end a run with all its jobs: it saves and stops",
    "status": "say what became of runs: queued, running, ended, and why",
    "diagnose": "say why a job ended: the first cause, its rank and line, what to type",
    "stacks": "say where each rank of a running job stands, by its Python stack",
    "efficiency": "say what a run has used of what it had, and what to ask for next time",
    "watch": "show one run on a live screen: loss curve, speed, checkpoint, deadline, log",
    "train": "train on handwritten digits: the reference trainer",
    "verify": "say whether a training script trains the same on any number of ranks",
    "compare": "say whether two runs are the same to the last bit, or where they differ first",
    "completion": "print the completion of verbs and options for bash, zsh, fish or tcsh",
}
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
