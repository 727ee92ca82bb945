"""Grid Engine (Son of Grid Engine 8.1.9, Univa). Its qsub has the name of PBS's."""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING
from hpcddp.schedulers.job_id import JobId
from hpcddp.schedulers.row import (
    CommandAnswer,
    Commands,
    Directives,
    JobFound,
    JobsFound,
    Scheduler,
    Variables,
    read_time,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


def parse_jobs(answer: CommandAnswer, states: Mapping[str, str]) -> JobsFound:
    """The jobs of `qstat -u USER -xml`, which shows none that has ended. `states`: its letters -> our word."""
    from xml.etree import ElementTree  # the scheduler's own answer; expat refuses entities that explode

    try:
        root = ElementTree.fromstring(answer.stdout.strip())  # noqa: S314  # the same
    except ElementTree.ParseError:
        return JobsFound((), answer.why("qstat"))
    if root.tag != "job_info":
        return JobsFound((), "qstat's answer cannot be read")
    jobs = []
    for one in root.iter("job_list"):  # newer releases add milliseconds to times
        fields = {field.tag: (field.text or "").strip() for field in one}
        job, letters = fields.get("JB_job_number", ""), fields.get("state", "")
        if not job.isdecimal():
            continue
        state = next((word for letter, word in states.items() if letter in letters), "unknown")
        why = "an error came before it started: qstat -j says which" if letters.startswith("E") else ""
        for index in fields.get("tasks", "").split(","):  # `3`, `4-6:1`, `2-4:1,6`
            job_id = JobId(f"{job}.{index}" if index else job, job, index)
            jobs.append(JobFound(job_id, state, why, read_time(fields.get("JAT_start_time", "").partition(".")[0])))
    return JobsFound(tuple(jobs))


SCHEDULER = Scheduler(
    name="gridengine",
    title="Grid Engine",
    order=30,
    generic_site="generic-gridengine",
    fits_allocation=False,  # which parallel environment the job has is not among its variables everywhere
    directives=Directives(
        prefix="#$",
        walltime=r"-l *(?:\S*,)?h_rt=([\d:]+)",
        refused="#$ -{}",  # Grid Engine 8.1.9: "invalid option argument", exit 2
        options={
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
        typed={
            "-q": "--queue",
            **dict.fromkeys(("-A", "-P", "-g"), "--account"),
            "-N": "--name",
            "-l": "--nodes N --walltime TIME",
            "-o": "--set output=",
        },
        account="-A",
        site_words={"account": ("-P", "-A", "-g"), "size": ("type", "pe")},
        printed=("-N", "-r", "-j", "-g", "-A", "-cwd", "-pe", "-l h_rt", "-t"),
        listed=("-l",),
        several=("-v", "-hard", "-soft", "-q"),
        alternatives=(("-cwd", "-wd"),),
        no_submit=("-sync", "-verify", "-clear"),
        outputs=("-o", "-e"),
        mail={"begin": "b", "end": "e", "fail": "a"},
        array_first=1,
        dependencies=("afterany",),  # -hold_jid waits for a job's end, whatever its status
        bare_dependency=True,
        joined="-v",
    ),
    variables=Variables(
        prefixes=("SGE_", "PE_HOSTFILE", "NSLOTS", "NHOSTS", "JOB_ID"),
        job_id=("JOB_ID",),
        # SGE_ROOT alone is any machine where its commands work, and JOB_ID may be a program's own
        of_job=("SGE_TASK_ID", "PE_HOSTFILE", "SGE_JOB_SPOOL_DIR"),
        restarts="RESTARTED",
        array_index=("SGE_TASK_ID",),
        folder="SGE_O_WORKDIR",
        nodefile="PE_HOSTFILE",  # lines of: host slots queue processors
        hostfile="hostfile",  # which the script makes from PE_HOSTFILE
        hostfile_alone=False,
        settings=(
            *("SGE_ROOT", "SGE_CELL", "SGE_CLUSTER_NAME", "SGE_QMASTER_PORT", "SGE_EXECD_PORT", "SGE_ENABLE_COREDUMP"),
            "SGE_LONG_QNAMES",
        ),
    ),
    daemons=("sge_shepherd",),
    commands=Commands(
        submit=("qsub",),
        cancel=("qdel",),
        over=("does not exist",),
        cancelled=("has registered the job", "has deleted job"),
        follow=("qsub", "-terse", "{options}", "-hold_jid", "{job}", "{script}"),
        hand_in=("qsub", "-terse", "{options}", "{script}"),
        down=r"commlib error|unable to (send message to|contact) qmaster",
        submitted=r"(\d+)(?:\.\d+-\d+:\d+)?",  # an array's with its indices
        interactive=("qrsh",),
        identified=False,
        of_index="{job}.{index}",
        parse_jobs=parse_jobs,
        jobs=("qstat", "-u", "{user}", "-xml"),
    ),
    # qstat(1), column state: letters stand together, such as hqw, and the first of these that is there counts
    states={
        "d": "exiting",
        "E": "held",  # an error came before the job started
        "h": "held",
        "s": "suspended",
        "S": "suspended",
        "T": "suspended",
        "r": "running",
        "t": "running",
        "q": "queued",
    },
)
