"""What a request may choose on a site: queue, account, launcher, and the words that only this site asks for."""

from __future__ import annotations

import re

from hpcddp.errors import RequestError, nearest
from hpcddp.ranks.launchers import AGENTS, LAUNCHERS, launchers_under
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.directives import directive_word
from hpcddp.script.site import Queue, Site
from hpcddp.script.spec import JobSpec
from hpcddp.units import format_count


def plan_queue(spec: JobSpec, site: Site) -> str:
    """The queue asked for, else the site's default; "" where the site's queues are not known and the server decides."""
    queue = spec.queue or site.queue
    if site.queues and queue not in site.queues:
        known = list(site.queues)
        raise RequestError(
            f"queue {queue!r} is not one of site {site.name}'s{nearest(queue, known)}",
            f"--queue one of {', '.join(known)}",
        )
    facts = site.queues.get(queue, Queue())
    for key, word in (("partition", facts.partition), ("qos", facts.qos), ("gpu_type", facts.gpu_type)):
        if word:
            directive_word(word, f"{key} of queue {queue} in {site.file}")
    if spec.gpu_type and facts.gpu_type and spec.gpu_type != facts.gpu_type:
        others = [name for name, other in site.queues.items() if other.gpu_type == spec.gpu_type]
        another = f"--queue {others[0]}, or " if others else ""
        what = f"gpu_type {spec.gpu_type}, but queue {queue} of site {site.name} has GPUs of the type {facts.gpu_type}"
        raise RequestError(what, f"{another}leave out gpu_type")
    return directive_word(queue, "queue") if queue else ""


def check_gpu_chunks(spec: JobSpec, site: Site, queue: str, ranks: int, gpus: int) -> None:
    """RequestError for what a request of one chunk for each GPU cannot carry: `ranks` and `gpus` are a node's."""
    if not site.queues.get(queue, Queue()).gpu_chunks:
        return
    what = f"queue {queue} of site {site.name} deals out GPUs, each with its share of the node"
    if not gpus:
        others = [name for name, other in site.queues.items() if not other.gpu_chunks]
        another = f", or --queue {others[0]}" if others else ""
        raise RequestError(f"{what}, and 0 GPUs were asked for", f"--gpus-per-node 1{another}")
    if ranks > gpus:
        raise RequestError(
            f"{what}: {ranks} ranks do not go on {format_count(gpus, 'GPU')}", "leave out ranks_per_node"
        )
    if spec.mem_gb:
        raise RequestError(f"{what}: mem_gb {spec.mem_gb} cannot be asked for", "leave out mem_gb")


def plan_account(spec: JobSpec, site: Site) -> tuple[str, str, tuple[str, ...]]:
    """The account asked for and the option that carries it ("" for none), and what to say about it."""
    rule = site.account
    option = rule.option or find_scheduler(site.scheduler).directives.account
    if spec.account is None:
        return "", "", (rule.without,) if rule.without else ()
    if option == "none":
        raise RequestError(
            f"site {site.name} knows no accounts, but account {spec.account!r} was given", "leave out --account"
        )
    account = directive_word(spec.account, "account")
    if rule.pattern and not re.fullmatch(rule.pattern, account):
        raise RequestError(
            f"account {account!r} is none of site {site.name}: an account matches {rule.pattern}"
            f" ({site.source(rule.source)})",
            f"--account {rule.example or 'NAME'}",
        )
    if rule.command_line:
        submit = " ".join(find_scheduler(site.scheduler).commands.submit)
        return account, "", (f"the script cannot carry the account: submit it with {submit} {option} {account}",)
    return account, option, ()


def plan_launcher(spec: JobSpec, site: Site, nodes: int, by_command: str = "") -> tuple[str, str]:
    """The launcher that makes the ranks, and the outer one, which the script calls ("" for an agent on one node).

    `by_command`: the agent as which the command makes the ranks.
    """
    known = launchers_under(site.scheduler)
    launcher = spec.launcher or site.launcher.name
    if by_command and launcher in known:
        return by_command, "" if nodes == 1 else launcher
    if LAUNCHERS[launcher].is_agent:
        own = site.launcher.name
        return launcher, "" if nodes == 1 else own if own in known else known[0]
    if launcher not in known:
        raise RequestError(
            f"launcher {launcher} does not work on site {site.name}, whose scheduler is {site.scheduler}",
            f"--launcher one of {', '.join((*known, *AGENTS))}",
        )
    return launcher, launcher


def plan_site_words(spec: JobSpec, site: Site) -> dict[str, str]:
    """The words that only this site asks for: what the job gives, else the site's default; without either, none."""
    given = spec.variables or {}
    for name in given:
        if name not in site.variables:
            known = ", ".join(site.variables) or "none"
            raise RequestError(f"site {site.name} has no key {name!r}", f"leave out {name}; its own keys: {known}")
    values = {}
    for name, rule in site.variables.items():
        value = given.get(name) or rule.default
        if value and not re.fullmatch(rule.pattern or r"[\w.+:,@=%/-]+", value, re.ASCII):
            raise RequestError(
                f"{name} {value!r} is nothing that site {site.name} takes ({site.source(rule.source)})",
                f"--set {name}={rule.example or rule.default or 'VALUE'}",
            )
        if value:
            values[name] = value
    return values
