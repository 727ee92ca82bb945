"""The `hpcddp render` line for the job of a script that is there already."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.lint.launches import torchrun_words
from hpcddp.lint.script import Script
from hpcddp.record import Record
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.jobplan import PlannedBy
from hpcddp.script.loading import load_text
from hpcddp.script.missing import list_missing
from hpcddp.script.plan import plan_job
from hpcddp.script.site import Site
from hpcddp.script.site_file import load_site
from hpcddp.script.spec import read_spec
from hpcddp.script.words import quote_words
from hpcddp.units import format_walltime, parse_walltime

_KEYS = {"--nodes": "nodes", "--gpus-per-node": "gpus_per_node", "--cpus-per-rank": "cpus_per_rank",
         "--walltime": "walltime", "--queue": "queue", "--account": "account", "--launcher": "launcher"}  # fmt: skip
# Queues that many clusters have: that one known site has such a queue says nothing about another's script.
_COMMON = {"ai", "batch", "booster", "debug", "dev", "develop", "extended", "gpu", "gpus", "h100", "a100", "v100",
           "low", "long", "main", "normal", "preempt", "prod", "regular", "short", "standard", "workq"}  # fmt: skip


class SameJob(Record):
    """A line that `hpcddp render` takes ("": the script starts no program), those of its options whose values are
    examples, and what the script asks for and the site refuses. `queue`: the script's, by which the site was found."""

    line: str = ""
    examples: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    site: str = ""
    queue: str = ""


def same_job_where_the_queue_is(script: Script, files: Mapping[str, str]) -> SameJob | None:
    """The line for the one of these sites that has the script's queue. None if several have it, or many other
    clusters."""
    site = _site_of_queue(script, files)
    same = same_job(script, site) if site else SameJob()
    return same._replace(queue=_queue(script, site)) if site and same.line else None


def _site_of_queue(script: Script, files: Mapping[str, str]) -> Site | None:
    words = {o.value for o in script.directives.options} | {o.name[3:] for o in script.directives.options}
    names = "|".join(re.escape(word) for word in words - _COMMON if re.fullmatch(r"[\w-]+", word))
    if not names:
        return None
    found = []
    for name, path in files.items():
        text = load_text(path, HpcddpError)  # a whole profile takes longer to read
        has_it = re.search(rf"^\s+({names}):", text, re.MULTILINE)
        if has_it and re.search(rf"^scheduler: {script.scheduler}\b", text, re.MULTILINE):
            site = load_site(name, path)
            found += [site] if _queue(script, site) in site.queues else []
    return found[0] if len(found) == 1 else None


def same_job(script: Script, site: Site) -> SameJob:
    """The line, with an example for what neither the script nor the site says, without what the site refuses."""
    command = _command(script)
    if not command:
        return SameJob()
    request = script.request_on(site)
    said = {
        "--nodes": request.nodes,
        "--gpus-per-node": request.gpus_per_node,
        "--cpus-per-rank": request.cpus_per_task,
        "--walltime": request.walltime and _walltime(request.walltime.value),
        "--queue": _queue(script, site),
        "--account": request.account and request.account.value,
    }
    options = [(name, str(value)) for name, value in said.items() if value]
    refused: list[str] = []
    while True:
        examples = _examples(options, site, bool(request.walltime))
        why = _refusal([*options, *examples], command, site)
        if not why:
            break
        if not options:
            return SameJob()
        left = {option: _refusal(_rest(options, option, site), command, site) for option in options}
        cures = [option for option in options if not left[option]] or [o for o in options if left[o] != why]
        left_out = (cures or options)[0]
        options.remove(left_out)
        refused.append(f"{' '.join(left_out)} ({why})")
    words = [word for option in [("--site", site.name), *options, *examples] for word in option]
    line = quote_words(["hpcddp", "render", *words, "--", *command])
    return SameJob(line, tuple(" ".join(example) for example in examples), tuple(refused), site.name)


def _rest(options: list[tuple[str, str]], without: tuple[str, str], site: Site) -> list[tuple[str, str]]:
    rest = [option for option in options if option != without]
    return [*rest, *_examples(rest, site, without[0] == "--walltime")]


def _examples(options: list[tuple[str, str]], site: Site, walltime: bool) -> list[tuple[str, str]]:
    """What is still missing; a walltime also where the script asks for one that nobody can read."""
    spec = read_spec({_KEYS[name]: (value, name) for name, value in options if name == "--queue"}, site.variables)
    this_machine = find_scheduler(site.scheduler).this_machine
    missing = [(one.option, one.example) for one in list_missing(spec, site, cpus_known=this_machine)]
    missing += [("--walltime", "1:00:00")] if walltime else []
    names = {name for name, _ in options}
    return [one for one in dict.fromkeys(missing) if one[0] not in names]


def _refusal(options: list[tuple[str, str]], command: tuple[str, ...], site: Site) -> str:
    """Why `hpcddp render` would not take them; "" if it would."""
    asked: dict[str, tuple[object, str]] = {"command": (list(command), "the command")}
    for name, value in options:
        key, _, given = value.partition("=") if name == "--set" else (_KEYS[name], "", value)
        asked[key] = (given, name)
    try:
        plan_job(read_spec(asked, site.variables), site, PlannedBy("/usr/bin/python3", "", ""))
    except HpcddpError as e:
        return e.message
    return ""


def _queue(script: Script, site: Site) -> str:
    """The queue that the script says, in the site's way of saying it; "" where it says none."""
    if site.queue_option == "none":
        return ""
    if script.scheduler == "gridengine" and script.request.size and script.request.size.name[3:] in site.queues:
        return script.request.size.name[3:]  # a resource type
    return script.named_queue(site)


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
