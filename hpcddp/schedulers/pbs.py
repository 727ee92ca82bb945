"""PBS Pro, OpenPBS, and scripts for Torque where a site's size is `nodes`. Recorded answers: tests/captures/pbs."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.schedulers.allocation import read_word_lines
from hpcddp.schedulers.job_id import parse_id
from hpcddp.schedulers.row import (
    CommandAnswer,
    Commands,
    Directives,
    JobFound,
    JobsFound,
    QueueFound,
    RemoteShell,
    Scheduler,
    Variables,
    read_time,
)
from hpcddp.units import printable, read_number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


# qstat's exit status where jobs are unknown, and where they have ended and -x was not asked for: it shows the others.
_SOME_UNKNOWN = {0, 35, 153}
_BY_QDEL = 91  # substate
_BY_QRERUN = range(60, 64)  # substates of a job that is started again, until it is queued (job.h of OpenPBS)
_SIZES = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}  # PBS Reference Guide, size


# ---- jobs


def parse_jobs(answer: CommandAnswer, states: Mapping[str, str]) -> JobsFound:
    """The jobs of `qstat -x -f -F json` (OpenPBS 23.06). `states`: its letter -> our word."""
    found = _read_json(answer.stdout)
    problem = "qstat: its answer cannot be read" if found is None else ""
    if answer.status not in _SOME_UNKNOWN:  # it may show some, and not those of the server that did not answer
        problem = answer.why("qstat")
    jobs = (found or {}).items()
    return JobsFound(tuple(_describe(job, about, states) for job, about in jobs if job[:1].isdigit()), problem)


def _read_json(text: str) -> dict[str, Mapping[str, Any]] | None:
    """The attributes of each job; None if the text is not what qstat prints."""
    import json

    if not text.strip():
        return {}
    try:
        content = json.loads(_mend(text), strict=False)
    except (ValueError, RecursionError):
        return None
    jobs = content.get("Jobs", {}) if isinstance(content, dict) else None
    return {job: about for job, about in jobs.items() if isinstance(about, dict)} if isinstance(jobs, dict) else None


def _mend(text: str) -> str:
    """Turn what qstat prints into JSON. OpenPBS leaves a backslash before any character as it was (`\\'`,
    `a\\,b`), and writes text that looks like a number without quotes, such as 005."""
    import re

    def escape(found: re.Match[str]) -> str:
        return found[0] if re.fullmatch(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})', found[0]) else "\\" + found[0]

    text = re.sub(r"\\(u[0-9a-fA-F]{4}|.)", escape, text, flags=re.DOTALL)
    return re.sub(r'^(\t+"[^"\n]*":\t)([^"{\[\n]*?)(,?)$', r'\1"\2"\3', text, flags=re.MULTILINE)


def _describe(job: str, about: Mapping[str, Any], states: Mapping[str, str]) -> JobFound:
    state = states.get(str(about.get("job_state", "")), "unknown")
    after = _read_after(about.get("depend"))
    status = _number(about.get("Exit_status"))
    comment = printable(str(about.get("comment") or "")).strip()
    starts, ends = _time(about.get("stime")), None
    if state == "finished":
        state, ends = _judge_end(about, status, comment, is_array="[]" in job), _time(about.get("obittime"))
        if status is None and not comment and about.get("depend"):
            comment = "deleted by the server: its dependency can never be met"
    elif starts is not None:
        limit = about.get("Resource_List")
        seconds = _duration(limit.get("walltime")) if isinstance(limit, dict) else None
        ends = starts + seconds if seconds is not None else None
    else:
        estimated = about.get("estimated")
        starts = _time(estimated.get("start_time")) if isinstance(estimated, dict) else None
    is_taken = _number(about.get("substate")) in _BY_QRERUN
    if state == "exiting" and is_taken:
        state, comment, starts, ends = "queued", "it is started again", None, None
    if state == "held" and after and str(about.get("Hold_Types", "s")) == "s":  # by nobody else
        state, comment = "queued", f"waits for {after}"
    reason = "" if _is_usual(comment) else comment
    return JobFound(parse_id(job), state, reason, starts, ends, status, is_taken, _read_vnodes(about))


def _read_vnodes(about: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Hosts and vnodes of a job that runs: each entry of exec_host belongs to one chunk of exec_vnode,
    `(node4[0]:ncpus=4+node4[1]:ncpus=4)+(node5:ncpus=8)`."""
    entries = str(about.get("exec_host", "")).split("+")
    chunks = str(about.get("exec_vnode", "")).strip("()").split(")+(")
    pairs = [(entry, part) for entry, chunk in zip(entries, chunks, strict=False) for part in chunk.split("+") if part]
    return tuple((entry.partition("/")[0], part.partition(":")[0]) for entry, part in pairs)


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


def _time(value: object) -> int | None:
    """`Sat Nov 21 01:12:37 2026` in this host's time, or seconds since 1970."""
    text = str(value or "").strip()
    return int(text) if text.isdecimal() else read_time(text, "%a %b %d %H:%M:%S %Y")


def _duration(value: object) -> int | None:
    import re

    found = re.fullmatch(r"(\d{1,6}):(\d\d):(\d\d)", str(value or ""))
    return int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3]) if found else None


# ---- queues and nodes


class _Node(Record):
    """Resources of one host, or of one chunk; None: not shown."""

    cpus: int | None = None
    mem: int | None = None  # in bytes
    gpus: int | None = None


def parse_queues(queues: str, nodes: str) -> list[QueueFound]:
    """Queues with what a chunk gets by default, else with the host, if all hosts of the server are alike: nothing says
    which hosts a queue has. ValueError for a text that shows no queue, AttributeError for another structure.

    `queues`: what `qstat -Q -f -F json` prints; `nodes`: what `pbsnodes -a -F json` prints.
    """
    import json

    named = json.loads(queues).get("Queue")
    if not named:
        raise ValueError("it shows no queue")
    hosts = _hosts(json.loads(nodes).get("nodes", {}))
    host = _alike(hosts)
    found = []
    for name, queue in named.items():
        most = queue.get("resources_max", {})
        most_nodes = _count(most.get("nodect")) or None
        chunk = _node(queue.get("default_chunk", {}))
        node = chunk
        if chunk == _Node() or (chunk.cpus is not None and chunk.cpus == host.cpus):  # a chunk is a whole host
            node = _Node(host.cpus, chunk.mem or host.mem, host.gpus if chunk.gpus is None else chunk.gpus)
        given = {"cpus": chunk.cpus, "mem_gb": chunk.mem, "gpus": chunk.gpus}
        found.append(
            QueueFound(
                name,
                most_nodes or len(hosts) or None,
                node.cpus or None,
                (node.mem or 0) // _SIZES["gb"] or None,
                node.gpus,
                walltime=_walltime(most.get("walltime")),
                most_nodes=most_nodes,
                is_open=queue.get("enabled") == queue.get("started") == "True",
                defaults=tuple(key for key, value in given.items() if value is not None),
            )
        )
    return found


def _hosts(nodes: Mapping[str, Any]) -> list[_Node]:
    """Hosts with CPUs. One may be several vnodes, each with a part of it, beside one of its own name that has nothing:
    seen with OpenPBS 23.06."""
    parts: dict[str, list[_Node]] = {}
    for name, node in nodes.items():
        has = node.get("resources_available", {})
        parts.setdefault(str(has.get("host", name)), []).append(_node(has))
    counted = any(node.gpus is not None for vnodes in parts.values() for node in vnodes)
    hosts = [
        _Node(
            sum(node.cpus or 0 for node in vnodes),
            sum(node.mem or 0 for node in vnodes),
            sum(node.gpus or 0 for node in vnodes) if counted else None,
        )
        for vnodes in parts.values()
    ]
    return [host for host in hosts if host.cpus]


def _alike(hosts: list[_Node]) -> _Node:
    """The host that all are, with the least memory of any; nothing if they differ."""
    if len({(host.cpus, host.gpus) for host in hosts}) != 1:
        return _Node()
    return hosts[0]._replace(mem=min(host.mem or 0 for host in hosts) or None)


def _node(resources: Mapping[str, Any]) -> _Node:
    return _Node(_count(resources.get("ncpus")), _bytes(resources.get("mem")), _count(resources.get("ngpus")))


def _count(value: object) -> int | None:
    return read_number(str(value))


def _bytes(value: object) -> int | None:
    import re

    found = re.fullmatch(r"(\d{1,18})([kmgt]?b)", str(value).lower(), re.ASCII)
    return int(found[1]) * _SIZES[found[2]] if found else None


def _walltime(value: object) -> str | None:
    """`168:00:00`; None for another form, and for no time at all."""
    import re

    text = str(value)
    return text if re.fullmatch(r"\d{1,9}:[0-5]\d:[0-5]\d", text, re.ASCII) and text.strip("0:") else None


# `pbs_tmrsh` has no shell, refuses ssh's options, and wants a host just as the job's list has it, while Open MPI leaves
# out the domain. This was seen to work with OpenPBS 23.06 and Open MPI 4 and 5 and MPICH.
TMRSH = RemoteShell(
    "pbs_tmrsh",
    home_variable="PBS_EXEC",
    home="/opt/pbs",
    script="""\
#!/bin/sh
# Written by hpcddp: what the launcher takes for ssh, as ssh does not reach the hosts of this job.
while :; do
    case ${{1-}} in
    -l) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
host=$1
shift
case $host in
*[!0-9.]*) # a name, perhaps without its domain
    while read -r line; do
        [ "${{line%%.*}}" != "${{host%%.*}}" ] || host=$line
    done <"$PBS_NODEFILE"
    ;;
esac
exec {program} "$host" /bin/sh -c "$*"
""",
)


def find_hostfile_copy(env: Mapping[str, str]) -> str | None:
    """PBS's own copy of the node file, on every host of the job; tasks on the first host are not told where it is."""
    if not env.get("PBS_JOBID") or env.get("PBS_NODEFILE"):
        return None
    settings = dict(words[0].partition("=")[::2] for words in read_word_lines("/etc/pbs.conf") or [])
    path = f"{settings.get('PBS_HOME', '/var/spool/pbs')}/aux/{env['PBS_JOBID']}"
    return path if read_word_lines(path) else None


# Resources of a chunk: beside a select they are refused. ngpus is the name that sites with GPUs have for theirs.
OF_CHUNK = (
    *("mem", "vmem", "hbmem", "ncpus", "mpiprocs", "ompthreads", "naccelerators", "arch", "vntype", "host", "vnode"),
    *("aoe", "eoe", "accelerator", "accelerator_model", "accelerator_memory", "accelerator_group", "ngpus"),
)

SCHEDULER = Scheduler(
    name="pbs",
    title="PBS",
    order=20,
    generic_site="generic-pbs",
    directives=Directives(
        prefix="#PBS",
        walltime=r"-l *(?:\S*,)?walltime=([\d:]+)",
        refused="#PBS {}",  # OpenPBS 23.06: "directive error", exit 1
        options={
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
        typed={
            "-q": "--queue",
            **dict.fromkeys(("-A", "-P"), "--account"),
            "-N": "--name",
            "-J": "--set array=",
            "-l": "--nodes N --walltime TIME",
            "-o": "--set output=",
        },
        account="-A",
        site_words={"account": ("-P", "-A", "-W group_list"), "size": ("totals", "nodes")},
        # PBS keeps the first of two `-l`, and the last of other options, without a word.
        printed=(
            *("-N", "-q", "-P", "-A", "-r", "-j", "-J", "-t"),
            *(f"-l {name}" for name in ("select", "place", "walltime", "nodes", "ncpus", "mpiprocs", "ngpus")),
        ),
        listed=("-l", "-W"),
        several=("-v",),
        alternatives=tuple(
            (owner, f"-l {name}") for owner in ("-l select", "-l place") for name in ("nodes", *OF_CHUNK)
        ),
        no_submit=("-I", "-z", "-W block", "-W interactive"),
        attached=True,
        outputs=("-o", "-e"),
        output=r"[\w.+/^-]+",  # ^array_index^
        constraint=r"\w+=[\w.+-]+(:\w+=[\w.+-]+)*",
        mail={"begin": "b", "end": "e", "fail": "a"},
        array_limit="%{}",
        array_reruns=True,
        name_limits={"": 230, "nodes": 15},  # measured on OpenPBS 23.06; Torque's limit is 15
        joined="-v",  # PBS keeps the last of several
        chunks=True,
        reservation_is_queue=True,
        home_output=r"-k *[oe]{1,2}",  # with a d it is written where it belongs
    ),
    variables=Variables(
        prefixes=("PBS_",),
        job_id=("PBS_JOBID",),
        of_job=("PBS_JOBID", "PBS_NODEFILE", "PBS_ENVIRONMENT"),
        array_index=("PBS_ARRAY_INDEX", "PBS_ARRAYID"),  # the second is Torque's
        folder="PBS_O_WORKDIR",
        nodefile="PBS_NODEFILE",
        hostfile="PBS_NODEFILE",
        interactive={"PBS_ENVIRONMENT": "PBS_INTERACTIVE"},
        settings=("PBS_CONF_FILE", "PBS_DEFAULT", "PBS_SERVER", "PBS_PRIMARY", "PBS_SECONDARY", "PBS_EXEC", "PBS_HOME"),
    ),
    daemons=("pbs_mom",),
    commands=Commands(
        submit=("qsub",),
        cancel=("qdel",),
        over=("Unknown Job Id", "has finished"),
        follow=("qsub", "-W", "depend=afterany:{job}", "{script}"),
        interactive=("qsub", "-I"),
        version="pbs_version",  # Grid Engine and Torque have a qsub, too
        hand_in=("qsub", "{options}", "{script}"),
        # errno 15008 is a server's name that no host has
        down=r"cannot connect to server \S* ?\(errno=(?!15008\b|0\b)|Connection refused|Communication failure",
        submitted=r"(\d+(?:\[\])?(?:\.\S+)?)",
        parse_jobs=parse_jobs,
        jobs=("qstat", "-t", "-x", "-f", "-F", "json", "{ids}"),  # -x: also jobs that have ended
        live_jobs=("qstat", "-t", "-f", "-F", "json", "{ids}"),
        keeps_none="not configured to maintain job history",
        starter=("pbs_tmrsh", "{host}"),
        remote_shell=TMRSH,
        drop=("pbs_release_nodes", "-j", "{job}", "{host}"),
        list_queues="qstat -Q",
        survey=(("qstat", "-Q", "-f", "-F", "json"), ("pbsnodes", "-a", "-F", "json")),
        parse_survey=parse_queues,
        site_lines=("chunk: [ncpus, ngpus]      # what a chunk of select has to name", "placement: scatter"),
    ),
    # OpenPBS 23.06: `qstat -f -F json`, job_state
    states={
        "Q": "queued",
        "W": "queued",  # until a time that was asked for
        "H": "held",
        "T": "queued",  # on its way to another server
        "R": "running",
        "B": "running",  # an array that has begun
        "S": "suspended",
        "U": "suspended",
        "E": "exiting",
        "X": "finished",  # one job of an array
        "F": "finished",
        "M": "moved",
    },
    find_hostfile_copy=find_hostfile_copy,
)
