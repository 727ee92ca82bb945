"""What is asked of the scheduler beside size, queue and account, in that scheduler's own words.

One vocabulary for all: a job file says `array: 1-10`, and `-J`, `--array` or `-t` is printed. What a scheduler has no
option for, or a site refuses, is an error; nothing is left out silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcddp.errors import RequestError
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec

# job-file key -> the option that carries it, by scheduler
OPTIONS: dict[str, dict[str, str]] = {
    "pbs": {
        "mem_gb": "mem",
        "reservation": "-q",
        "constraint": "select",
        "exclusive": "place",
        "output": "-o",
        "mail": "-m",
        "mail_to": "-M",
        "array": "-J",
        "array_limit": "-J",
        "dependency": "-W depend",
        "hold": "-h",
        "requeue": "-r",
        "chain": "-W depend",
    },
    "slurm": {
        "mem_gb": "--mem",
        "reservation": "--reservation",
        "constraint": "--constraint",
        "exclusive": "--exclusive",
        "output": "--output",
        "mail": "--mail-type",
        "mail_to": "--mail-user",
        "array": "--array",
        "array_limit": "--array",
        "dependency": "--dependency",
        "hold": "--hold",
        "requeue": "--requeue",
        "chain": "--dependency",
    },
    "gridengine": {
        "reservation": "-ar",
        "constraint": "-l",
        "output": "-o",
        "mail": "-m",
        "mail_to": "-M",
        "array": "-t",
        "array_limit": "-tc",
        "dependency": "-hold_jid",
        "hold": "-h",
        "requeue": "-r",
        "chain": "-hold_jid",
    },
    "local": {},
}
_MAIL = {"begin": ("b", "BEGIN"), "end": ("e", "END"), "fail": ("a", "FAIL")}
_AFTER = re.compile(r"(afterok|afterany|afternotok|after)((?::[0-9][A-Za-z0-9_.\[\]-]*)+)").fullmatch
# What each scheduler puts in by itself: Slurm %x and %j, PBS the index of an array.
_OUTPUT = {"pbs": r"[\w.+/^-]+", "slurm": r"[\w.+/%-]+", "gridengine": r"[\w.+/-]+"}
_CONSTRAINT = {"pbs": r"\w+=[\w.+-]+(:\w+=[\w.+-]+)*", "slurm": r"[\w.&|*()\[\]-]+", "gridengine": r"\w+=[\w.+,=-]+"}


@dataclass(frozen=True, slots=True)
class Handling:
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


def plan_handling(spec: JobSpec, site: Site) -> Handling:
    """Raises RequestError for what the scheduler or the site cannot do, and for a value that no directive can carry."""
    _check_known(spec, site)
    scheduler = site.scheduler
    if spec.mail_to and not spec.mail:
        raise RequestError(f"mail_to {spec.mail_to!r} without mail", "--set 'mail=end fail'")
    array, requeue = _plan_array(spec, scheduler)
    return Handling(
        reservation=_word("reservation", spec.reservation, r"\w[\w.+-]*"),
        constraint=_plan_constraint(spec, site),
        exclusive=bool(spec.exclusive),
        output=_word("output", spec.output, _OUTPUT.get(scheduler, "")),
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


def _check_known(spec: JobSpec, site: Site) -> None:
    options = OPTIONS[site.scheduler]
    for key in OPTIONS["slurm"]:
        if getattr(spec, key) is None:
            continue
        if key not in options:
            raise RequestError(
                f"{key} means nothing to site {site.name}, whose scheduler is {site.scheduler}", f"leave out {key}"
            )
        if options[key] in site.rejects:
            raise RequestError(
                f"site {site.name} refuses {options[key]}, so that {key} cannot be asked for"
                f" ({site.source(site.cited.get('rejects', ''))})",
                f"leave out {key}",
            )


def _word(key: str, value: str | None, pattern: str) -> str:
    if value is not None and not re.fullmatch(pattern, value, re.ASCII):
        raise RequestError(f"{key} {value!r} is nothing that this scheduler's directive can carry", f"it is {pattern}")
    return value or ""


def _plan_constraint(spec: JobSpec, site: Site) -> str:
    """The site's and the job's; a node has to have both."""
    asked = _word("constraint", spec.constraint, _CONSTRAINT.get(site.scheduler, ""))
    if site.constraint and asked:
        both = f"({asked})" if "|" in asked and asked[0] not in "[(" else asked
        return f"{site.constraint}&{both}" if site.scheduler == "slurm" else f"{site.constraint}:{asked}"
    return site.constraint or asked


def _plan_mail(spec: JobSpec, scheduler: str) -> str:
    for word in spec.mail or ():
        if word not in _MAIL:
            raise RequestError(f"mail {word!r} is no event", f"any of {' '.join(_MAIL)}: --set 'mail=end fail'")
    events = [_MAIL[word] for word in spec.mail or ()]
    return ",".join(long for _, long in events) if scheduler == "slurm" else "".join(short for short, _ in events)


def _plan_array(spec: JobSpec, scheduler: str) -> tuple[str, bool]:
    """The indices, and whether the job may start again: PBS takes an array only if it may."""
    if spec.array is None:
        if spec.array_limit:
            raise RequestError(f"array_limit {spec.array_limit} without array", "--set array=1-10")
        return "", bool(spec.requeue)
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})(:[1-9]\d{0,8})?", spec.array, re.ASCII)
    if not found or int(found[1]) >= int(found[2]) or (scheduler == "gridengine" and int(found[1]) == 0):
        least = "1" if scheduler == "gridengine" else "0"
        raise RequestError(f"array {spec.array!r} is not FIRST-LAST or FIRST-LAST:STEP", f"--set array={least}-9")
    if scheduler == "pbs" and spec.requeue is False:
        raise RequestError("PBS takes no array of jobs that must not start again", "leave out requeue")
    limited = spec.array_limit and scheduler != "gridengine"
    return spec.array + (f"%{spec.array_limit}" if limited else ""), bool(spec.requeue) or scheduler == "pbs"


def _plan_dependency(spec: JobSpec, scheduler: str) -> str:
    ids: list[str] = []
    for word in spec.dependency or ():
        found = _AFTER(word)
        if not found:
            raise RequestError(f"dependency {word!r} is not KIND:JOBID", "--set dependency=afterok:1234")
        if scheduler == "gridengine" and found[1] != "afterany":
            raise RequestError(
                f"dependency {word!r}: Grid Engine waits for a job's end, however it ends",
                f"--set dependency=afterany{found[2]}",
            )
        ids += found[2][1:].split(":")
    return ",".join(ids if scheduler == "gridengine" else spec.dependency or ())


def _plan_chain(spec: JobSpec) -> int:
    """Attempts in all, each of which queues a copy of the script behind itself."""
    if spec.chain == 1:
        raise RequestError("chain 1 is no chain: it is how many attempts there may be in all", "--set chain=5")
    excluded = {
        "array": (spec.array, "each job of the array would continue the same run"),
        "hold": (spec.hold, "every attempt would wait until somebody releases it"),
        "requeue": (spec.requeue, "both would go on with the run; a chain goes on after a failed node, too"),
    }
    for key, (asked, why) in excluded.items():
        if spec.chain and asked:
            raise RequestError(f"chain {spec.chain} beside {key}: {why}", f"leave out {key}, or chain")
    return spec.chain or 0
