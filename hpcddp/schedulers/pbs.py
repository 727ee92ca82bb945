"""PBS Pro, OpenPBS, and Torque where a site's size is `nodes`. Recorded answers: tests/captures/pbs."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.allocation import read_lines
from hpcddp.schedulers.host_names import is_address, same_host
from hpcddp.schedulers.row import Answer, Commands, Directives, QueueFound, RemoteShell, Scheduler, Variables

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def find_kept_hostfile(env: Mapping[str, str]) -> str | None:
    """PBS's own copy of the node file, on every host of the job; tasks on the first host are not told where it is."""
    if not env.get("PBS_JOBID") or env.get("PBS_NODEFILE"):
        return None
    home = "/var/spool/pbs"
    for key, _, value in (words[0].partition("=") for words in read_lines("/etc/pbs.conf") or []):
        home = value if key == "PBS_HOME" else home
    path = f"{home}/aux/{env['PBS_JOBID']}"
    return path if read_lines(path) else None


def parse_queues(queues: str, nodes: str) -> list[QueueFound]:
    """See pbs_queues.py, which no rank needs."""
    from hpcddp.schedulers.pbs_queues import parse_queues as parse

    return parse(queues, nodes)


def parse_state(answer: Answer) -> str | None:
    """`job_state = R` of `qstat -x -f`; Torque's `-x` prints XML."""
    import re

    said = re.search(r"\bjob_state(?: = |>)([A-Z])", answer.stdout)
    if said:
        return said[1]
    return "gone" if re.search("Unknown Job", answer.stderr, re.IGNORECASE) else None


def parse_end(answer: Answer) -> int | None:
    """When the job ends: `stime = Sat Nov 21 01:12:37 2026`, in this host's time, and the walltime that it has."""
    import re
    import time

    started = re.search(r"^ *stime = (.+)$", answer.stdout, re.MULTILINE)
    limit = re.search(r"^ *Resource_List\.walltime = (\d+):(\d+):(\d+)$", answer.stdout, re.MULTILINE)
    if not started or not limit:
        return None
    hours, minutes, seconds = map(int, limit.groups())
    try:
        since = time.mktime(time.strptime(started[1], "%a %b %d %H:%M:%S %Y"))
    except ValueError:
        return None
    return int(since) + hours * 3600 + minutes * 60 + seconds


def parse_taken(answer: Answer, _env: Mapping[str, str]) -> bool:
    """A job that is run again (`qrerun`) has one of four substates (OpenPBS, src/include/job.h, JOB_SUBSTATE_RERUN)."""
    import re

    return re.search(r"^ *substate = 6[0-3]$", answer.stdout, re.MULTILINE) is not None


def parse_vnodes(answer: Answer, host: str) -> tuple[str, ...]:
    """The vnodes that a job has on a host, by what `qstat -f` prints: the list of hosts may have names with a domain,
    which `pbs_release_nodes` refuses, and a host may have several vnodes. Without an answer, the name's first label.

    Each entry of exec_host belongs to one chunk of exec_vnode, `(node4[0]:ncpus=4+node4[1]:ncpus=4)+(node5:ncpus=8)`.
    """
    import re

    text = answer.stdout.replace("\n\t", "")
    found = [re.search(rf"^ *{name} = (.+)$", text, re.MULTILINE) for name in ("exec_host", "exec_vnode")]
    entries, chunks = (
        match[1].strip("()").split(by) if match else [] for match, by in zip(found, ("+", ")+("), strict=True)
    )
    names = [
        part.partition(":")[0]
        for entry, chunk in zip(entries, chunks, strict=False)
        if same_host(entry.partition("/")[0], host)
        for part in chunk.split("+")
    ]
    return tuple(dict.fromkeys(names)) or (host if is_address(host) else host.partition(".")[0],)


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
    generic_by_size={"nodes": "generic-torque"},
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
        batch_only=r"-[jorkhJmM]\b",
        chunks=True,
        reservation_is_queue=True,
        home_output=r"-k *[oe]{1,2}",  # with a d it is written where it belongs
        overwrites_output=True,
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
        follow=("qsub", "-W", "depend=afterany:{job}", "{script}"),
        interactive=("qsub", "-I"),
        version="pbs_version",  # Grid Engine and Torque have a qsub, too
        hand_in=("qsub", "{options}", "{script}"),
        # errno 15008 is a server's name that no host has
        down=r"cannot connect to server \S* ?\(errno=(?!15008\b|0\b)|Connection refused|Communication failure",
        submitted=r"(\d+(?:\[\])?(?:\.\S+)?)",
        question=("qsub", "-h"),  # there is no dry run: the job is submitted held, and deleted
        queued=r"\d+(?:\[\])?\.\S+",
        state=("qstat", "-x", "-f", "{}"),  # -x: also a job that has ended
        live_state=("qstat", "-f", "{}"),
        parse_state=parse_state,
        parse_end=parse_end,
        parse_taken=parse_taken,
        jobs=("qstat", "-t", "-x", "-f", "-F", "json", "{ids}"),
        live_jobs=("qstat", "-t", "-f", "-F", "json", "{ids}"),
        older_jobs=("qstat", "-t", "-x", "{ids}"),  # Torque's
        keeps_none="not configured to maintain job history",
        starter=("pbs_tmrsh", "{host}"),
        remote_shell=TMRSH,
        drop=("pbs_release_nodes", "-j", "{job}", "{host}"),
        parse_names=parse_vnodes,
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
        "C": "finished",  # Torque's
        "M": "moved",
    },
    find_kept_hostfile=find_kept_hostfile,
    no_slots="mpiprocs=0",
    owns_bare_hostfile=True,
)
