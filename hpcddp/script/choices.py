"""What a request may choose on a site: queue, account, launcher, and the words that only this site asks for."""

from __future__ import annotations

import re

from hpcddp.errors import RequestError, SiteError, nearest
from hpcddp.script.directives import directive_word
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec

# Which launchers can start processes under which scheduler; srun is Slurm's own.
_STARTERS = {
    "pbs": ("openmpi", "mpich", "intelmpi", "pals"),
    "slurm": ("srun", "openmpi", "mpich", "intelmpi"),
    "gridengine": ("openmpi", "mpich", "intelmpi"),
    "local": ("openmpi", "mpich", "intelmpi"),
}
# The option that carries the account where a site does not say otherwise.
_ACCOUNT = {"pbs": "-A", "slurm": "--account", "gridengine": "-A", "local": "none"}


def plan_queue(spec: JobSpec, site: Site) -> str:
    """The queue asked for, else the site's default; "" where the site's queues are not known and the server decides."""
    queue = spec.queue or site.queue
    if site.queues and queue not in site.queues:
        known = list(site.queues)
        if not queue:
            raise RequestError(f"site {site.name} has no default queue", f"--queue {known[0]} (of {', '.join(known)})")
        raise RequestError(
            f"queue {queue!r} is not one of site {site.name}'s{nearest(queue, known)}",
            f"--queue one of {', '.join(known)}",
        )
    return directive_word(queue, "queue") if queue else ""


def plan_account(spec: JobSpec, site: Site) -> tuple[str, str, tuple[str, ...]]:
    """The account asked for and the option that carries it ("" for none), and what to say about it."""
    rule = site.account
    option = rule.option or _ACCOUNT[site.scheduler]
    if spec.account is None:
        if rule.required:
            raise RequestError(
                f"site {site.name} takes no job without an account ({site.source(rule.source)})", "--account NAME"
            )
        return "", "", (rule.without,) if rule.without else ()
    if option == "none":
        raise RequestError(
            f"site {site.name} knows no accounts, but account {spec.account!r} was given", "leave out --account"
        )
    account = directive_word(spec.account, "account")
    if rule.pattern and not re.fullmatch(rule.pattern, account):
        raise RequestError(
            f"account {account!r} is none of site {site.name} ({site.source(rule.source)})",
            f"an account matches {rule.pattern}",
        )
    if rule.command_line:
        return account, "", (f"the script cannot carry the account: submit it with qsub {option} {account}",)
    return account, option, ()


def plan_launcher(spec: JobSpec, site: Site, nodes: int) -> tuple[str, str]:
    """The launcher that makes the ranks, and what starts it on the nodes ("" for torchrun on one node)."""
    starters = _STARTERS[site.scheduler]
    launcher = spec.launcher or site.launcher.name
    if not launcher:
        raise SiteError(
            f"site {site.name} does not say which launcher starts ranks", f"--launcher one of {', '.join(starters)}"
        )
    if launcher == "torchrun":
        own = site.launcher.name
        return launcher, "" if nodes == 1 else own if own in starters else starters[0]
    if launcher not in starters:
        raise RequestError(
            f"launcher {launcher} does not work on site {site.name}, whose scheduler is {site.scheduler}",
            f"--launcher one of {', '.join(starters)}, torchrun",
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
        if not value and rule.required:
            raise SiteError(
                f"site {site.name} takes no job without {name} ({site.source(rule.source)})",
                f"--set {name}={rule.example or 'VALUE'}",
            )
        if value and not re.fullmatch(rule.pattern or r"[\w.+:,@=%/-]+", value, re.ASCII):
            raise RequestError(
                f"{name} {value!r} is nothing that site {site.name} takes ({site.source(rule.source)})",
                f"--set {name}={rule.example or rule.default or 'VALUE'}",
            )
        if value:
            values[name] = value
    return values
