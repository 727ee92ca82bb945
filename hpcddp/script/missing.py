"""What a request leaves open and its site does not decide, all of it at once."""

from __future__ import annotations

from collections.abc import Iterator

from hpcddp.errors import RequestError, SiteError
from hpcddp.ranks.launchers import JOB_LAUNCHERS
from hpcddp.record import Record
from hpcddp.script.site import Queue, Site
from hpcddp.script.spec import JobSpec


class Missing(Record):
    """One open value: its name in a sentence, the option that gives it and an example. `of_site`: site files usually
    say it."""

    what: str
    option: str
    example: str
    of_site: bool


def list_missing(spec: JobSpec, site: Site, cpus_known: bool) -> list[Missing]:
    """Everything that is open but the command, in the order in which people think of it. `cpus_known`: the node is
    this machine."""
    return list(_missing(spec, site, cpus_known))


def _missing(spec: JobSpec, site: Site, cpus_known: bool) -> Iterator[Missing]:
    queue = site.queues.get(spec.queue or site.queue, Queue())
    rule = site.account_of(spec.queue or site.queue)
    if spec.account is None and rule.required:
        yield Missing(f"an account ({site.source(rule.source)})", "--account", rule.example or "NAME", False)
    if not (spec.queue or site.queue) and site.queues:
        yield Missing(f"a queue (one of {', '.join(site.queues)})", "--queue", next(iter(site.queues)), False)
    rules = () if spec.reservation else queue.limits
    least = min((rule.nodes[0] if rule.nodes else 1 for rule in rules), default=1)
    if spec.nodes is None and least > 1:
        name = spec.queue or site.queue
        yield Missing(
            f"nodes ({least} at least in queue {name}; {site.source(queue.source)})", "--nodes", f"{least}", False
        )
    gpus = queue.gpus if spec.gpus_per_node is None else spec.gpus_per_node
    if gpus is None:
        yield Missing("GPUs per node (0 for none)", "--gpus-per-node", "4", True)
    has_cpus = spec.cpus_per_rank or spec.cpus_per_node or queue.cpus or (queue.cpus_per_gpu and gpus) or cpus_known
    if not has_cpus:
        yield Missing("CPUs per rank", "--cpus-per-rank", "8", True)
    if "mem" in site.chunk and not spec.mem_gb and queue.mem_gb is None:
        yield Missing("memory per node", "--set", "mem_gb=90", True)
    if spec.walltime_s is None and site.walltime_s is None:
        yield Missing("a walltime", "--walltime", "1:00:00", True)
    if not (spec.launcher or site.launcher.name):
        yield Missing("a launcher", "--launcher", JOB_LAUNCHERS[0], True)
    for name, variable in site.variables.items():
        if variable.required and not variable.default and not (spec.variables or {}).get(name):
            what = f"{name} ({site.source(variable.source)})"
            yield Missing(what, "--set", f"{name}={variable.example or 'VALUE'}", True)


def known(value: int | None) -> int:
    """A value that `check_complete` has seen to be there, by the request or by the site."""
    if value is None:
        raise AssertionError("plan_job calls check_complete first")
    return value


def check_complete(spec: JobSpec, site: Site, cpus_known: bool) -> None:
    """Raises one error for all that is missing, with a hint that can be typed as it stands.

    SiteError if a fact is among it that site files usually have, else RequestError.
    """
    if spec.queue and site.queues and spec.queue not in site.queues:
        return  # whose node is it? The queue is refused first
    found = list_missing(spec, site, cpus_known)
    names = [one.what for one in found] + ([] if spec.command else ["a command"])
    if not names:
        return
    if not found:
        raise RequestError(
            "the request has no command", "put it last: -- python train.py; or --demo for the built-in training job"
        )
    typed = " ".join(f"{one.option} {one.example}" for one in found)
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    error = SiteError if any(one.of_site for one in found) else RequestError
    raise error(
        f"a job on site {site.name} still needs {listed}", typed if spec.command else f"{typed} -- python train.py"
    )
