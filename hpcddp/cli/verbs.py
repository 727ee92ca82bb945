"""The help of the command line as a whole: the verbs, what people type for them, what an exit status means.

No verb that does its work loads this.
"""

from __future__ import annotations

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
# Word that is no verb -> what to type for it.
_MEANT = {
    **dict.fromkeys(("show", "info", "describe"), "hpcddp sites show NAME"),
    **dict.fromkeys(("list", "ls", "site", "clusters"), "hpcddp sites"),
    **dict.fromkeys(("run", "start"), "hpcddp launch -- python train.py"),
    **dict.fromkeys(("generate", "template", "script"), "hpcddp render --nodes 4 -- python train.py > job.sh"),
    "validate": "hpcddp lint job.sh",
    **dict.fromkeys(("preflight", "health", "doctor"), "hpcddp check"),
    **dict.fromkeys(("progress", "jobs", "queue"), "hpcddp status"),
    **dict.fromkeys(("kill", "stop", "delete"), "hpcddp cancel RUN"),
    **dict.fromkeys(("tail", "log", "output"), "hpcddp logs RUN -f"),
    **dict.fromkeys(("rank", "whoami"), "hpcddp env"),
    **dict.fromkeys(("why", "explain", "debug", "cause"), "hpcddp diagnose RUN"),
    "diff": "hpcddp compare runs/ONE runs/TWO",
    "new": "hpcddp sites new NAME",
    "schema": "hpcddp sites schema",
    "version": "hpcddp --version",
}


def unknown_verb(argv: list[str]) -> RequestError:
    """The error for a first word that is no verb, with what was meant by it."""
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
    from hpcddp.ranks.launch_commands import PROGRAMS
    from hpcddp.schedulers.registry import submit_commands

    submits = [program for program, _ in submit_commands()]
    if word in submits:
        meant: str | None = f"hpcddp submit --nodes 4 -- python train.py, or hpcddp render … | {word}"
    else:
        meant = "hpcddp launch -- python train.py" if word in PROGRAMS else _MEANT.get(word.lower()) or _of_row(word)
    guess = "" if meant else nearest(word, list(VERBS))
    return RequestError(f"{word!r} is not a verb of hpcddp{guess}", meant or "hpcddp --help")


def _of_row(word: str) -> str | None:
    """What stands for a scheduler's own command here."""
    from hpcddp.schedulers.registry import scripted_schedulers

    for row in scripted_schedulers():
        if word in row.commands.cancel[:1]:
            return "hpcddp cancel RUN"
        if word in row.commands.jobs[:1]:
            return "hpcddp status"
    return None


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
