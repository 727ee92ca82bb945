"""What is asked of the scheduler beside size, queue and account, in that scheduler's own words.

All schedulers share one vocabulary: a job file says `array: 1-10`, and the script prints `-J`, `--array` or `-t`. A key
that the scheduler has no option for, or that the site refuses, is an error; nothing is left out silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcddp.errors import RequestError
from hpcddp.record import Record
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import Directives, Scheduler
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec

#: The keys of a job file that not every scheduler has an option for. Not `signal`: a script can warn its ranks itself.
KEYS = (
    *(
        "mem_gb",
        "gpu_type",
        "reservation",
        "constraint",
        "exclusive",
        "output",
        "mail",
        "mail_to",
        "array",
        "array_limit",
    ),
    *("dependency", "hold", "requeue", "chain"),
)
_AFTER = re.compile(r"(afterok|afterany|afternotok|after)((?::[0-9][A-Za-z0-9_.\[\]-]*)+)").fullmatch


class SchedulerOptions(Record):
    """Values as the scheduler's directive takes them; empty or False: the directive is not printed."""

    reservation: str = ""
    constraint: str = ""
    exclusive: bool = False
    output: str = ""
    mail: str = ""
    mail_to: str = ""
    array: str = ""
    array_limit: int = 0
    dependency: str = ""
    hold: bool = False
    requeue: bool = False
    signal_s: int = 0
    chain: int = 0


def asked_options(spec: JobSpec, site: Site, *, warned_by_scheduler: bool) -> dict[str, str]:
    """The options that the script prints for what the job asks: job-file key -> option."""
    options = find_scheduler(site.scheduler).directives.options
    asked = {key: option for key, option in options.items() if spec.asks_for(key)}
    return asked if warned_by_scheduler else {key: option for key, option in asked.items() if key != "signal"}


def plan_scheduler_options(spec: JobSpec, site: Site, asked: Mapping[str, str]) -> SchedulerOptions:
    """Raises RequestError for what the scheduler or the site cannot do, and for a value that no directive can carry.

    `asked`: what `asked_options` found.
    """
    scheduler = find_scheduler(site.scheduler)
    rules = scheduler.directives
    _check_known(spec, site, rules, asked)
    if spec.mail_to and not spec.mail:
        raise RequestError(f"mail_to {spec.mail_to!r} without mail", "--set 'mail=end fail'")
    if (spec.gpu_type or "").isdecimal():
        what = f"gpu_type {spec.gpu_type} is a number, which would be read as the number of GPUs"
        raise RequestError(what, f"gpu_type: a100, or gpus_per_node: {spec.gpu_type}")
    _word("gpu_type", spec.gpu_type, r"\w[\w.-]*")
    if spec.gpu_type and site.gpus_option == "none":
        what = (
            f"site {site.name} asks for GPUs by its queue alone, so that gpu_type {spec.gpu_type} cannot be asked for"
        )
        raise RequestError(what, "leave out gpu_type, or --queue with one that has these GPUs")
    if spec.gpu_type and spec.gpus_per_node == 0:
        raise RequestError(f"gpu_type {spec.gpu_type}, and no GPUs are asked for", "leave out gpu_type")
    array, requeue = _plan_array(spec, scheduler)
    return SchedulerOptions(
        reservation=_word("reservation", spec.reservation, r"\w[\w.+-]*"),
        constraint=_plan_constraint(spec, site, rules),
        exclusive=bool(spec.exclusive),
        output=_word("output", spec.output, rules.output),
        mail=_plan_mail(spec, scheduler),
        mail_to=_word("mail_to", spec.mail_to, r"[\w.+-]+@[\w.-]+(,[\w.+-]+@[\w.-]+)*"),
        array=array,
        array_limit=spec.array_limit or 0,
        dependency=_plan_dependency(spec, scheduler),
        hold=bool(spec.hold),
        requeue=requeue,
        signal_s=spec.signal_s or 0,
        chain=_plan_chain(spec),
    )


def _check_known(spec: JobSpec, site: Site, rules: Directives, asked: Mapping[str, str]) -> None:
    for key in KEYS:
        if spec.asks_for(key) and key not in rules.options:
            raise RequestError(
                f"site {site.name} cannot take {key}: its scheduler, {site.scheduler}, has no option for it",
                f"leave out {key}",
            )
    for key, option in asked.items():
        if option in site.rejects:
            raise RequestError(
                f"site {site.name} refuses {option}, so that {key} cannot be asked for"
                f" ({site.source(site.cited.get('rejects', ''))})",
                f"leave out {key}",
            )


def _word(key: str, value: str | None, pattern: str) -> str:
    if value is not None and not re.fullmatch(pattern, value, re.ASCII):
        raise RequestError(f"no directive of this scheduler can carry {key} {value!r}", f"it has to match {pattern}")
    return value or ""


def _plan_constraint(spec: JobSpec, site: Site, rules: Directives) -> str:
    """The site's and the job's; a node has to have both."""
    asked = _word("constraint", spec.constraint, rules.constraint)
    _word(f"constraint of site {site.name}", site.constraint or None, rules.constraint)
    if site.constraint and asked:
        one = f"({asked})" if "|" in asked and asked[0] not in "[(" else asked
        return rules.both_constraints.format(site.constraint, one)
    return site.constraint or asked


def _plan_mail(spec: JobSpec, scheduler: Scheduler) -> str:
    rules = scheduler.directives
    if spec.mail and not rules.mail:
        raise RequestError(f"hpcddp does not know for which events {scheduler.title} sends mail", "leave out mail")
    for word in spec.mail or ():
        if word not in rules.mail:
            raise RequestError(f"mail {word!r} is no event", f"any of {' '.join(rules.mail)}: --set 'mail=end fail'")
    return rules.mail_separator.join(rules.mail[word] for word in spec.mail or ())


def _plan_array(spec: JobSpec, scheduler: Scheduler) -> tuple[str, bool]:
    """The indices, and whether the job may start again: some schedulers take an array only if it may."""
    rules = scheduler.directives
    if spec.array is None:
        if spec.array_limit:
            raise RequestError(f"array_limit {spec.array_limit} without array", "--set array=1-10")
        return "", bool(spec.requeue)
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})(:[1-9]\d{0,8})?", spec.array, re.ASCII)
    if not found and re.fullmatch(r"\d+-\d+(:\d+)?", spec.array, re.ASCII):
        raise RequestError(f"array {spec.array!r} has a number above 999999999", f"--set array={rules.array_first}-9")
    if not found or int(found[1]) >= int(found[2]) or int(found[1]) < rules.array_first:
        example = f"--set array={rules.array_first}-9"
        if limited := re.fullmatch(r"(\d+-\d+(?::\d+)?)%(\d+)", spec.array, re.ASCII):
            example = f"--set array={limited[1]} --set array_limit={limited[2]}"
        raise RequestError(f"array {spec.array!r} is not FIRST-LAST or FIRST-LAST:STEP", example)
    if rules.array_reruns and spec.requeue is False:
        raise RequestError(
            f"{scheduler.title} takes an array only if its jobs may start again, and requeue is false",
            "leave out requeue",
        )
    limit = rules.array_limit.format(spec.array_limit) if spec.array_limit else ""
    return spec.array + limit, bool(spec.requeue) or rules.array_reruns


def _plan_dependency(spec: JobSpec, scheduler: Scheduler) -> str:
    rules = scheduler.directives
    ids: list[str] = []
    for word in spec.dependency or ():
        found = _AFTER(word)
        if not found:
            raise RequestError(f"dependency {word!r} is not KIND:JOBID", "--set dependency=afterok:1234")
        if found[1] not in rules.dependencies:
            raise RequestError(
                f"dependency {word!r}: {scheduler.title} has {' and '.join(rules.dependencies)} only",
                f"--set dependency={rules.dependencies[0]}{found[2]}",
            )
        ids += found[2][1:].split(":")
    return ",".join(ids if rules.bare_dependency else spec.dependency or ())


def _plan_chain(spec: JobSpec) -> int:
    """Attempts in all, each of which queues a copy of the script behind itself."""
    if spec.chain == 1:
        raise RequestError("chain 1 is no chain: it is how many attempts there may be in all", "--set chain=5")
    excluded = {
        "array": (spec.array, "each index would queue the whole array again"),
        "hold": (spec.hold, "every attempt would wait until somebody releases it"),
        "requeue": (spec.requeue, "both would start the run again after a node failure"),
    }
    for key, (asked, why) in excluded.items():
        if spec.chain and asked:
            raise RequestError(f"chain {spec.chain} beside {key}: {why}", f"leave out {key}, or chain")
    return spec.chain or 0
