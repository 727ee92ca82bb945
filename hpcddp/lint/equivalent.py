"""The `hpcddp render` line for the job of a script that is there already."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.lint.launches import torchrun_words
from hpcddp.lint.script import Script
from hpcddp.script.site import Site
from hpcddp.script.site_text import missing_facts
from hpcddp.script.words import quote_words
from hpcddp.units import format_walltime, parse_walltime


def equivalent(script: Script, site: Site) -> tuple[str, list[str]]:
    """A line that `hpcddp render` accepts, and those of its options whose values are examples.

    The examples stand for what neither the script nor the site says. The line is "" if the script starts no program.
    """
    command = _command(script)
    if not command:
        return "", []
    request = script.request
    said = {
        "--nodes": request.nodes,
        "--gpus-per-node": request.gpus_per_node,
        "--cpus-per-rank": request.cpus_per_task,
        "--walltime": request.walltime and _walltime(request.walltime.value),
        "--queue": request.queue and request.queue.value,
        "--account": request.account and request.account.value,
    }
    options = [(name, str(value)) for name, value in said.items() if value]
    unread = [("--walltime", "1:00:00")] if request.walltime and not said["--walltime"] else []
    examples = [(name, value) for name, value in dict.fromkeys(missing_facts(site) + unread) if not said.get(name)]
    words = [word for option in [("--site", site.name), *options, *examples] for word in option]
    return quote_words(["hpcddp", "render", *words, "--", *command]), [" ".join(example) for example in examples]


def _command(script: Script) -> tuple[str, ...]:
    started = next((launch.started for launch in script.launches if launch.started), ())
    torchrun = torchrun_words(started) or next((t for c in script.commands if (t := torchrun_words(c.words))), ())
    return _behind_torchrun(torchrun) if torchrun else started


def _behind_torchrun(words: tuple[str, ...]) -> tuple[str, ...]:
    """What torchrun starts: from the first word that is a script, or behind -m."""
    at = next((i for i, w in enumerate(words[1:], 1) if w.endswith(".py") or w in {"-m", "--module"}), None)
    return ("python", *words[at:]) if at else ()


def _walltime(text: str) -> str:
    """`H:M:S` of a walltime, also of one such as `24h`, which no scheduler reads; "" if hpcddp cannot read it."""
    try:
        return format_walltime(parse_walltime(text))
    except RequestError:
        return ""
