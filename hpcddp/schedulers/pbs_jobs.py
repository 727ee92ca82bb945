"""PBS's jobs as text: what `qstat -x -f -F json` prints of them (OpenPBS 23.06), and Torque's `qstat -x` in XML.

Torque's is from its documentation and not recorded. The other forms of qstat wrap and cut their values.
"""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.job_id import parse_id
from hpcddp.schedulers.row import JobFound, JobsFound

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from hpcddp.schedulers.row import Answer

# qstat's exit status where jobs are unknown, and where they have ended and -x was not asked for: it shows the others.
_SOME_UNKNOWN = {0, 35, 153}
_BY_QDEL = 91  # substate
_BY_QRERUN = range(60, 64)  # substates of a job that is started again, until it is queued (job.h of OpenPBS, Torque)


def parse_jobs(answer: Answer, states: Mapping[str, str]) -> JobsFound:
    """The jobs of an answer. `states`: its letter -> our word."""
    text, problem = answer.stdout.strip(), ""
    if text.startswith("<"):
        found = _read_xml(text)
    else:
        found = _read_json(text) if text else ([] if answer.status in _SOME_UNKNOWN else None)
        found = _read_json(_mend(text)) if found is None and text else found
    if found is None and text.startswith("{"):
        found = _read_each(_mend(text))
        problem = "qstat: a part of its answer cannot be read"
    if answer.status not in _SOME_UNKNOWN:  # it may show some, and not those of the server that did not answer
        said = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        problem = problem or (f"qstat: {said[-1][:200]}" if said else f"qstat ended with {answer.status}")
        found = found or []
    if found is None:
        return JobsFound((), "qstat: its answer cannot be read")
    jobs = [_describe(job, about, states) for job, about in found if job[:1].isdigit()]
    return JobsFound(tuple(jobs), problem)


def _read_json(text: str) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Id and attributes of each job; None if the text is not what qstat prints."""
    import json

    try:
        content = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    jobs = content.get("Jobs", {})
    if not isinstance(jobs, dict):
        return None
    return [(str(job), about) for job, about in jobs.items() if isinstance(about, dict)]


def _mend(text: str) -> str:
    """What qstat prints in JSON's form, as JSON. OpenPBS leaves a backslash before any character as it was (`\\'`,
    `a\\,b`), and writes text that looks like a number without quotes, such as 005."""
    import re

    def escape(found: re.Match[str]) -> str:
        return found[0] if re.fullmatch(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})', found[0]) else "\\" + found[0]

    text = re.sub(r"\\(u[0-9a-fA-F]{4}|.)", escape, text, flags=re.DOTALL)
    return re.sub(r'^(\t+"[^"\n]*":\t)([^"{\[\n]*?)(,?)$', r'\1"\2"\3', text, flags=re.MULTILINE)


def _read_each(text: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The jobs one by one, without their variables: invalid UTF-8 in one job's environment makes all of it no JSON, and
    an answer may be cut off."""
    import re

    found = []
    for job in re.finditer(r'^\t\t"(\d[^"\n]*)":\t\{\n(.*?)^\t\t\}', text, re.MULTILINE | re.DOTALL):
        body = re.sub(r'^\t\t\t"Variable_List":\t\{\n.*?^\t\t\t\},?\n', "", job[2], flags=re.MULTILINE | re.DOTALL)
        whole = _read_json(f'{{"Jobs": {{"{job[1]}": {{{body.rstrip().rstrip(",")}}}}}}}')
        found += whole or []
    return found


def _read_xml(text: str) -> list[tuple[str, Mapping[str, Any]]] | None:
    """The same from `<Data><Job><Job_Id>1.host</Job_Id><job_state>R</job_state>…`."""
    from xml.etree import ElementTree  # the scheduler's own answer; expat refuses entities that explode

    try:
        root = ElementTree.fromstring(text)  # noqa: S314  # the same
    except ElementTree.ParseError:
        return None
    if root.tag != "Data":
        return None
    found: list[tuple[str, Mapping[str, Any]]] = []
    for job in root.iter("Job"):
        about: dict[str, Any] = {}
        for one in job:
            about[one.tag] = {part.tag: part.text for part in one} if len(one) else one.text or ""
        found.append((str(about.get("Job_Id", "")), about))
    return found


def _describe(job: str, about: Mapping[str, Any], states: Mapping[str, str]) -> JobFound:
    state = states.get(str(about.get("job_state", "")), "unknown")
    after = _read_after(about.get("depend"))
    status = _number(about.get("Exit_status", about.get("exit_status")))
    comment = _line(about.get("comment"))
    starts, ends = _time(about.get("stime", about.get("start_time"))), None
    if state == "finished":
        state, ends = (
            _judge_end(about, status, comment, is_array="[]" in job),
            _time(about.get("obittime", about.get("comp_time"))),
        )
        if status is None and not comment and about.get("depend"):
            comment = "deleted by the server: its dependency can never be met"
    elif starts is not None:
        limit = about.get("Resource_List")
        seconds = _duration(limit.get("walltime")) if isinstance(limit, dict) else None
        ends = starts + seconds if seconds is not None else None
    else:
        estimated = about.get("estimated")
        starts = _time(estimated.get("start_time")) if isinstance(estimated, dict) else None
    if state == "exiting" and _number(about.get("substate")) in _BY_QRERUN:
        state, comment, starts, ends = "queued", "it is started again", None, None
    if state == "held" and after and str(about.get("Hold_Types", "s")) == "s":  # by nobody else
        state, comment = "queued", f"waits for {after}"
    return JobFound(parse_id(job), state, "" if _is_usual(comment) else comment, starts, ends, status)


def _is_usual(comment: str) -> bool:
    """Whether it says where a job ran, and no reason: `Job run at Wed Nov 25 at 20:25 on (n1:ncpus=1) and failed`."""
    return comment.startswith("Job run at ") and comment.partition(") and ")[2] in {"", "finished", "failed"}


def _read_after(value: object) -> str:
    """The ids in `afterok:319.pbs1@pbs1:320.pbs1@pbs1,beforeany:…` that the job itself waits for."""
    kinds = [word.split(":") for word in str(value or "").split(",")]
    return ", ".join(job.partition("@")[0] for kind, *jobs in kinds if kind.startswith("after") for job in jobs)


def _judge_end(about: Mapping[str, Any], status: int | None, comment: str, *, is_array: bool) -> str:
    """How a job ended: state, exit status, substate and comment together say it, and none of them alone."""
    if status is None and not is_array:
        return "cancelled" if "substate" in about or about.get("depend") else "finished"
    if _number(about.get("substate")) == _BY_QDEL or "terminated by" in comment:
        return "cancelled"
    return "finished" if status in {0, None} and "failed" not in comment else "failed"


def _number(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None


def _line(value: object) -> str:
    text = "" if value is None else str(value)
    return "".join(c if c.isprintable() else " " for c in text)[:500].strip()


def _time(value: object) -> int | None:
    """`Sat Nov 21 01:12:37 2026` in this host's time, or seconds since 1970."""
    import time

    text = str(value or "").strip()
    if text.isdecimal():
        return int(text)
    try:
        return int(time.mktime(time.strptime(text, "%a %b %d %H:%M:%S %Y")))
    except (ValueError, OverflowError):
        return None


def _duration(value: object) -> int | None:
    import re

    found = re.fullmatch(r"(\d{1,6}):(\d\d):(\d\d)", str(value or ""))
    return int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3]) if found else None
