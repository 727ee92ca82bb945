"""Rows of schedulers. A field that a row leaves out means that the scheduler has no such thing.

Patterns are regular expressions for whole ASCII values, kept as text: programs of a rank never compile them.
"""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcddp.schedulers.allocation import HostsFound
    from hpcddp.schedulers.job_id import JobId

#: The longest job name, in characters, where a row does not give one: file names of job and output stay below 255.
LONGEST_NAME = 230


class Directives(Record):
    """How a job script asks for things, and which values a directive can carry."""

    prefix: str = ""
    refused: str = ""  # a first line, with a word in place of {}, for which its submit command refuses any text
    #: Job-file key -> the option that carries it; `signal` where the scheduler itself sends a warning.
    options: Mapping[str, str] = {}
    typed: Mapping[str, str] = {}  # an option of its commands -> ours, where people type theirs
    letters: Mapping[str, str] = {}  # `p` -> `partition`, where the submit command has both
    #: Groups of options of which the submit command takes one.
    alternatives: tuple[tuple[str, ...], ...] = ()
    #: Groups of options that set one thing: the submit command takes the last of two, without a word.
    last_wins: tuple[tuple[str, ...], ...] = ()
    #: Options that count GPUs, as N or TYPE:N, with what stands before that; a job has a type in all of them or in none
    gpu_counts: Mapping[str, str] = {}
    walltime: str = ""  # pattern of the directive that asks for it
    account: str = "none"  # the option that carries the account where the site does not say otherwise
    #: A key of site files whose words this scheduler's template reads -> those words: account (its option), size,
    #: queue_option, gpus_option.
    site_words: Mapping[str, tuple[str, ...]] = {}
    #: Those that the template prints, or that hpcddp itself has to know of: no job may add them.
    printed: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = {}  # another name of an option -> the one that the other tables here have
    listed: tuple[str, ...] = ()  # whose value is a list of NAME=VALUE, each an option of its own: `-l select`
    several: tuple[str, ...] = ()  # that may stand more than once
    needs: Mapping[str, tuple[str, ...]] = {}  # an option, or OPTION=VALUE -> those of which it needs one
    one_of: tuple[str, ...] = ()  # options of `gpu_counts` that say the same in other words, so that one is enough
    no_submit: tuple[str, ...] = ()  # with which the submit command queues nothing, or waits for the job's end
    attached: bool = False  # whether `-ofile` means `-o file`
    outputs: tuple[str, ...] = ()  # the options with the job's output files
    output: str = r"[\w.+/-]+"  # with what the scheduler itself puts in
    constraint: str = r"\w+=[\w.+,=-]+"
    both_constraints: str = "{}:{}"  # the site's and the job's: a node has to have both
    mail: Mapping[str, str] = {}  # begin, end, fail -> its word
    mail_separator: str = ""
    array_first: int = 0  # the lowest index
    array_limit: str = ""  # what limits the jobs that run at once, behind the indices; "": an option of its own does
    array_reruns: bool = False  # whether each job of an array must be allowed to start again
    dependencies: tuple[str, ...] = ("afterok", "afterany", "afternotok", "after")
    bare_dependency: bool = False  # whether job ids stand there without their kind
    name_limits: Mapping[str, int] = {}  # a site's `size` -> the longest job name; "": any other size
    joined: str = ""  # the option that may stand once only, so that its values become one list with commas
    chunks: bool = False  # whether constraints and the site's own words are part of the size, as in PBS's select
    reservation_is_queue: bool = False
    output_name: str = "{name}.o{number}"  # of the output of a job that names no file
    home_output: str = ""  # pattern of a directive with which the output lies in the home folder


class Variables(Record):
    """The variables of a job, by what they say."""

    prefixes: tuple[str, ...] = ()  # all that the scheduler sets
    job_id: tuple[str, ...] = ()  # the job's id, by the names that releases give it
    of_job: tuple[str, ...] = ()  # those that only a job's processes have; (): the id is one
    restarts: str = ""  # whether, or how often, the job has started before
    array_index: tuple[str, ...] = ()  # a job's index in its array, by the names that releases give it
    array_id: str = ""  # the array's own id, where a job of it has another one
    folder: str = ""  # the folder that the job was submitted from
    host: str = ""  # this node's name, as the scheduler knows it
    nodefile: str = ""  # names the file with the job's hosts, where the row has no `find_hosts`
    hostfile: str = ""  # in the job script, the name of the launcher's host file
    hostfile_alone: bool = True  # whether a job of one node has it
    cpus: str = ""  # the job's CPUs on this node
    cpus_of_nodes: str = ""  # on each of its nodes, as `8(x2),4`
    end: str = ""  # when the job ends, in seconds since 1970
    interactive: Mapping[str, str] = {}  # a variable of a person's shell in the job -> what its value contains
    settings: tuple[str, ...] = ()  # those that begin as a job's and are a person's or the site's: how to reach it


class QueueFound(Record):
    """A queue as the scheduler shows it; None: it does not say. `nodes`: how many it has. `mixed`: its nodes differ,
    and the values are of the largest. `defaults`: those of `cpus`, `mem_gb` and `gpus` that a request gets which names
    none, instead of what a node has."""

    name: str
    nodes: int | None = None
    cpus: int | None = None
    mem_gb: int | None = None
    gpus: int | None = None
    gpu: str | None = None
    walltime: str | None = None
    most_nodes: int | None = None  # of one job
    is_open: bool = True  # whether it takes jobs
    mixed: bool = False
    defaults: tuple[str, ...] = ()


class JobFound(Record):
    """A job as its scheduler shows it, or several of an array that wait together. `state`: one of the words that all
    schedulers share, `unknown`, or `gone`. `reason`: why it waits, or why it ended, in the scheduler's words. `starts`:
    also an estimate. `ends`: the end of a running job's walltime, or when it ended. Times are seconds since 1970; None:
    it does not say. `is_taken`: whether the scheduler takes the nodes away itself: by preemption, because one failed,
    or to start the job again. `vnodes`: a host of its list, and the scheduler's own name of a part of it."""

    id: JobId
    state: str
    reason: str = ""
    starts: int | None = None
    ends: int | None = None
    status: int | None = None
    is_taken: bool = False
    vnodes: tuple[tuple[str, str], ...] = ()

    @property
    def runs_until(self) -> int | None:
        """The end of a job that runs."""
        return self.ends if self.state == "running" else None


class JobsFound(Record):
    """`problem`: one line, if the scheduler has not answered, or not all could be understood."""

    jobs: tuple[JobFound, ...] = ()
    problem: str = ""


class CommandAnswer(Record):
    status: int
    stdout: str
    stderr: str

    def why(self, program: str) -> str:
        """Why it has failed: the last line of its errors, which sums them up."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return f"{program}: {lines[-1][:200]}" if lines else f"{program} ended with {self.status}"


def read_time(text: str, form: str = "%Y-%m-%dT%H:%M:%S") -> int | None:
    """A time of this host as seconds since 1970; None for another form, such as N/A."""
    import time

    try:
        return int(time.mktime(time.strptime(text, form)))
    except (ValueError, OverflowError):
        return None


class RemoteShell(Record):
    """A program that starts a command on a host, for launchers that know only ssh. `program`: on PATH, or in the
    folder `bin` of that in `home_variable`, else of `home`. `script`: what a launcher calls as it calls ssh."""

    program: str
    home_variable: str
    home: str
    script: str


class Commands(Record):
    """Commands of a scheduler on a login node, and the meaning of their answers."""

    submit: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    over: tuple[str, ...] = ()  # parts of what `cancel` and `stop` say of a job that has ended
    cancelled: tuple[str, ...] = ()  # parts of what `cancel` says of a job that it has cancelled
    #: Submits the script {script} again, to start when the job {job} has ended, whatever its status.
    follow: tuple[str, ...] = ()
    #: Submits the script {script}; further options of the site's go in place of {options}.
    hand_in: tuple[str, ...] = ()
    down: str = ""  # pattern of what it says where its server does not answer
    submitted: str = ""  # pattern of the line in which it says the job's id, the pattern's first group
    of_index: str = "{job}_{index}"  # the id of one job of an array, where the array's own has no `[]` for the index
    stop: tuple[str, ...] = ()  # asks the job {job}, which runs, to end by itself; (): only the run folder can
    interactive: tuple[str, ...] = ()  # asks for a shell in an allocation
    version: str = ""  # what `SUBMIT --version` says, where several schedulers have a command of that name
    identified: bool = True  # whether the submit command on PATH shows this scheduler
    state: tuple[str, ...] = ()  # asks for one job, whose id goes in place of {}; (): `jobs` does
    #: The job, its answer, the row's `states`, and the job's environment -> the job; None: no answer.
    parse_job: Callable[[JobId, CommandAnswer, Mapping[str, str], Mapping[str, str]], JobFound | None] = (
        lambda _job, _answer, _states, _env: None
    )
    #: Shows the jobs {ids}, or all of the users {user}; `live_jobs` is asked where the scheduler keeps no word of jobs
    #: that have ended. `parse_jobs`: their answers, by the row's `states`.
    jobs: tuple[str, ...] = ()
    parse_jobs: Callable[[CommandAnswer, Mapping[str, str]], JobsFound] = lambda _answer, _states: JobsFound()
    live_jobs: tuple[str, ...] = ()
    keeps_none: str = ""  # a part of what it says then
    ended: tuple[str, ...] = ()  # shows one job {} that `jobs` has forgotten
    parse_ended: Callable[[CommandAnswer, Mapping[str, str]], JobsFound] = lambda _answer, _states: JobsFound()
    ask_env: Mapping[str, str] = {}  # what the commands that ask need in their environment
    #: Starts a command on the host {host} of the job, where others run.
    starter: tuple[str, ...] = ()
    remote_shell: RemoteShell | None = None
    #: Takes the host {host}, which is gone, out of the running job {job}, so that the job lives on {others}.
    drop: tuple[str, ...] = ()
    list_queues: str = ""  # lists the queues with their limits, for people
    survey: tuple[tuple[str, ...], ...] = ()  # commands that list queues and nodes
    parse_survey: Callable[..., list[QueueFound]] = lambda *_answers: []  # their outputs -> the queues
    accounts: tuple[str, ...] = ()  # lists the accounts that the user {user} may charge, one in a line
    site_lines: tuple[str, ...] = ()  # what a new site's file needs beside the queues


class Scheduler(Record):
    name: str  # of its module, its template, and in site files
    title: str  # as people write it
    order: int = 100  # where an environment or PATH shows several, the lowest goes first
    generic_site: str = ""  # the site for any cluster that has it; "": hpcddp writes no job scripts for it
    fits_allocation: bool = True  # whether an allocation says all that a script of the generic site needs
    this_machine: bool = False  # whether jobs run here and now, without a queue
    directives: Directives = Directives()
    variables: Variables = Variables()
    gpus_per_rank_option: str = ""  # shows each rank so many GPUs of its node
    daemons: tuple[str, ...] = ()  # names in /proc/<pid>/comm of what signals every process of a job on its host
    commands: Commands = Commands()
    states: Mapping[str, str] = {}  # its own word for a job's state -> queued, held, running, finished, …
    find_hosts: Callable[[Mapping[str, str], str | None], HostsFound] | None = None
    find_hostfile_copy: Callable[[Mapping[str, str]], str | None] = lambda _env: None
    #: Variables that a launch needs while another launch of the same job has not ended.
    overlap: Mapping[str, str] = {}
    #: (slots, environment) -> how many ranks a job was asked for; None: it does not say.
    count_ranks: Callable[[int | None, Mapping[str, str]], int | None] = lambda slots, _env: slots
