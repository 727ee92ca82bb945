"""Scheduler options besides size, queue and account, in each scheduler's own words.

All schedulers share one vocabulary: a job file says `array: 1-10`, and the script prints `-J`, `--array` or `-t`. A key
that the scheduler has no option for, or that the site refuses, is an error; nothing is left out silently.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from itertools import takewhile

from hpcddp.errors import RequestError, SiteError
from hpcddp.record import Record
from hpcddp.schedulers.directive_rules import find_clashes, full_name, parse_directive
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import Directives, Scheduler
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec

#: The keys of a job file that not every scheduler has an option for. Not `signal`: a script can warn its ranks itself.
_KEYS = ("mem_gb", "gpu_type", "reservation", "constraint", "exclusive", "output", "mail", "mail_to", "array",
        "array_limit", "dependency", "hold", "requeue", "chain")  # fmt: skip
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


def requested_options(spec: JobSpec, site: Site, *, warned_by_scheduler: bool) -> dict[str, str]:
    """The options that the script prints for what the job asks: job-file key -> option."""
    options = find_scheduler(site.scheduler).directives.options
    requested = {key: option for key, option in options.items() if spec.asks_for(key)}
    return requested if warned_by_scheduler else {key: option for key, option in requested.items() if key != "signal"}


def plan_scheduler_options(spec: JobSpec, site: Site, requested: Mapping[str, str]) -> SchedulerOptions:
    """Raises RequestError for what the scheduler or the site cannot do, and for a value that no directive can carry.

    `requested`: what `requested_options` found.
    """
    scheduler = find_scheduler(site.scheduler)
    rules = scheduler.directives
    _check_known(spec, site, rules, requested)
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


def _check_known(spec: JobSpec, site: Site, rules: Directives, requested: Mapping[str, str]) -> None:
    for key in _KEYS:
        if spec.asks_for(key) and key not in rules.options:
            what = f"site {site.name} cannot take {key}: its scheduler, {site.scheduler}, has no option for it"
            raise RequestError(what, f"leave out {key}")
    for key, option in requested.items():
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
    requested = _word("constraint", spec.constraint, rules.constraint)
    _word(f"constraint of site {site.name}", site.constraint or None, rules.constraint)
    if site.constraint and requested:
        one = f"({requested})" if "|" in requested and requested[0] not in "[(" else requested
        return rules.both_constraints.format(site.constraint, one)
    return site.constraint or requested


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
    if not found or int(found[1]) >= int(found[2]) or int(found[1]) < rules.array_first:
        example = f"--set array={rules.array_first}-9; for few at once: --set array_limit=2"
        raise RequestError(f"array {spec.array!r} is not FIRST-LAST or FIRST-LAST:STEP", example)
    if rules.array_reruns and spec.requeue is False:
        what = f"{scheduler.title} takes an array only if its jobs may start again, and requeue is false"
        raise RequestError(what, "leave out requeue")
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
            what = f"dependency {word!r}: {scheduler.title} has {' and '.join(rules.dependencies)} only"
            raise RequestError(what, f"--set dependency={rules.dependencies[0]}{found[2]}")
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
    for key, (requested, why) in excluded.items():
        if spec.chain and requested:
            raise RequestError(f"chain {spec.chain} beside {key}: {why}", f"leave out {key}, or chain")
    return spec.chain or 0


# ---- words that every directive parser reads as they stand

_VALUE = r"[A-Za-z0-9_.+:,@=%/^&|()\[\]*-]+"
_LINE = re.compile(rf"-[A-Za-z][a-z_]*( ?{_VALUE})?|--[a-z][a-z0-9-]*(={_VALUE})?").fullmatch


def directive_word(text: str, where: str) -> str:
    """`text` if every scheduler reads it as one word as it stands (queue, account), else RequestError."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+:,@=%-]*", text):
        what = f"{where} {text!r} is not a word that a scheduler's directive can carry"
        raise RequestError(what, "use ASCII letters, digits and _ . + : , @ = % -")
    return text


def plan_directives(
    spec: JobSpec, site: Site, queue: str, values: Mapping[str, str], further: Iterable[str], requested: Iterable[str]
) -> tuple[str, ...]:
    """The site's further directives, those of its variables and of what was chosen (`further`), and the job's own.

    Each is one option such as `-v USE_SSH=1`, without the prefix. Where an option may stand once only, it has all
    values: two `-v` become one. Raises RequestError for what a directive cannot carry, and for an option that the
    script prints; `requested` are those for what the job asks.
    """
    wanted, rules = spec.directives or (), find_scheduler(site.scheduler).directives
    if wanted and not rules.prefix:
        raise RequestError(f"directive {wanted[0]!r}: this site has no scheduler to read it", "leave out directives")
    _check_wanted(site, wanted, tuple(requested))
    reserved = [text.replace("{queue}", queue) for text in site.reservation] if spec.reservation else []
    printed = ((v.directive, values[name]) for name, v in site.vars.items() if v.directive and name in values)
    of_variables = [directive.replace("{}", value) for directive, value in printed]
    lines = (*site.directives, *of_variables, *reserved, *further, *wanted)
    for text in lines:
        if not _LINE(text):
            raise RequestError(
                f"directive {text!r} is not one option that a directive can carry",
                "one option per item: ['-v USE_SSH=1', '--constraint=gpu']; no blanks, quotes, # or \\ in values",
            )
    return _joined(lines, rules.joined)


def _check_wanted(site: Site, wanted: Iterable[str], requested: tuple[str, ...]) -> None:
    rules = find_scheduler(site.scheduler).directives
    keys = {option: key for key, option in [*rules.options.items()][::-1]}
    for option in (option for text in wanted for option in parse_directive(rules, text)):
        if option.name in (*rules.printed, *requested):
            raise RequestError(
                f"directive {option.text!r} is printed by the script itself",
                f"use the job key {keys[option.name]}" if option.name in keys else "use the option or job key for it",
            )
        if option.name in rules.no_submit:
            what = f"directive {option.text!r}: the submit command would queue no job, or wait for its end"
            raise RequestError(what, f"leave out {option.text!r}")
        refused = next((one for one in site.rejects if full_name(rules, one) in option.name.split()), None)
        if refused:
            what = f"site {site.name} refuses {refused} ({site.source(site.cited.get('rejects', ''))})"
            raise RequestError(what, f"leave out {option.text!r}")


def check_script(spec: JobSpec, site: Site, script: str) -> None:
    """RequestError where the script would ask for one thing twice, or for what its scheduler refuses together;
    SiteError where nobody but the site's file says so."""
    scheduler = find_scheduler(site.scheduler)
    rules = scheduler.directives
    if not rules.prefix:
        return
    head = takewhile(lambda line: line.startswith("#"), script.splitlines()[1:])
    texts = [line.removeprefix(f"{rules.prefix} ") for line in head if line.startswith(f"{rules.prefix} ")]
    options = [option for text in texts for option in parse_directive(rules, text)]
    clash = next(find_clashes(rules, options), None)
    if clash is None:
        return
    both = clash.options
    what = f"the script would have {' and '.join(repr(option.text) for option in both)}: {scheduler.title} {clash.why}"
    typed = [repr(option.text) for option in both if option.text in (spec.directives or ())]
    keys = [key for key, name in rules.options.items() if spec.asks_for(key) and name in {one.name for one in both}]
    clashing = {option.text for option in both}
    for name, value in (spec.variables or {}).items():
        if name in site.vars and site.vars[name].directive.replace("{}", value) in clashing:
            keys.append(name)
    if not typed and not keys:
        raise SiteError(f"{what}, and both are from {site.file}", "leave one of them out of the site's file")
    instead = "; gpus_per_node and gpu_type ask for GPUs" if {one.name for one in both} & {*rules.one_of} else ""
    raise RequestError(what, f"leave out {' or '.join([*typed[-1:], *keys])}{instead}")


def _joined(lines: Iterable[str], option: str) -> tuple[str, ...]:
    """`lines`, where all values of `option` stand in its first line, with commas; "" for no such option."""
    joined: dict[str, str] = {}
    for text in lines:
        name, _, value = text.partition(" ")
        if name == option and value and name in joined:
            joined[name] += f",{value}"
        else:
            joined[name if name == option and value else text] = text
    return tuple(joined.values())


def job_name(run: str, limit: int) -> str:
    """A run's name under the strictest rule for job names: a letter first, at most `limit` characters.

    OpenPBS 23.06 takes digits and `_` in first place, too (measured); a letter is for older releases. A name that is
    cut ends in a mark of the whole. The caller says so when the result differs.
    """
    name = run if run[:1].isalpha() else f"job{run}" if run[:1] == "_" else f"job_{run}"
    if len(name) <= limit:
        return name
    mark = f"_{zlib.crc32(run.encode()) & 0xFFFFFF:06x}"
    return f"{name[: limit - len(mark)]}{mark}"
