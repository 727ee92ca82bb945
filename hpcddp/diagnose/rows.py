"""The table: the words by which a log says why a job ended, what that means, whose turn it is and what to type.

The first row that fits a line counts. docs/troubleshooting.md is made from the rows.
"""

from __future__ import annotations

import re

from hpcddp.record import Record

#: How much a line says. CAUSE: why, wherever it stands. RAISED: why, as the exception that a traceback ends with; a
#: program may print the same and go on. END: which rank ended first, and how. RECORD: the scheduler's record says it.
#: LATE: a wait for other ranks was too long. LOST: a wait ended, since another rank had. WEAK: why, if nothing else is
#: there. RESTART: the ranks are started again, and what stands above is over.
CAUSE, RAISED, END, RECORD = "cause", "raised", "end", "record"
LATE, LOST, WEAK, RESTART = "late", "lost", "weak", "restart"

PROGRAM, ENVIRONMENT, SCRIPT, DATA = "the program", "the environment", "the job script", "paths and data"
MACHINE, CLUSTER, REQUEST, SENDER = "the node", "the cluster", "the request", "who sent the signal"
NOBODY = "nobody"

#: Class -> what it means.
CLASSES = {
    "exception": "an error that the program, or a library in it, raised",
    "exit-status": "a rank ended itself with a status, after a message of its own",
    "early-exit": "a rank ended with status 0 before the others",
    "import": "a Python module is not there or hidden, or the wrong Python runs",
    "library": "a shared library, a symbol or a version of one is missing, or does not fit the driver",
    "command": "the command, script or launcher does not exist",
    "arguments": "wrong options of the program or the launcher",
    "file-missing": "a file or folder is not there",
    "permission": "a file may not be read or written",
    "disk-full": "no space, or a limit on file sizes",
    "host-memory": "out of the host's memory",
    "shm": "/dev/shm is too small",
    "limits": "open files, threads, locked memory",
    "crash": "native code crashed",
    "killed": "a signal from outside ended a rank, the launcher or the job",
    "interrupted": "Ctrl-C",
    "walltime": "the time of the job was over",
    "hang": "a rank did not come to a collective, and the others waited until the timeout",
    "collective-mismatch": "ranks in different collectives, or with different shapes",
    "rendezvous": "the ranks did not find each other",
    "singletons": "the ranks ran as programs of one rank each",
    "launcher": "the launcher could not start the ranks",
    "unfit": "a node failed its check before the ranks were started",
    "checkpoint": "a checkpoint does not fit or is broken",
    "network": "a download failed",
    "unknown": "nothing says why",
    "none": "nothing failed",
}


class Row(Record):
    """`key`: words, split by `|`, of which a line has one, so that few lines are compared with `pattern`. Its groups may
    be `rank`, `host`, `signal` (a number or words), `status`. `remedy` may name other groups. `shows`: the words for
    people."""

    cause: str
    level: str
    whose: str
    shows: str
    key: str
    pattern: str
    remedy: str = ""

    def match(self, line: str) -> re.Match[str] | None:
        """Where the row fits this line."""
        return re.search(self.pattern, line) if any(key in line for key in self.key.split("|")) else None


_MEMORY = "ask for more: --set mem_gb=N; fewer or smaller DataLoader workers and caches on each node"
_SPACE = "df -h . /tmp; df -i .; quota -s, or lfs quota -h $HOME; then another folder, or fewer checkpoints"
_OPEN_FILES = "ulimit -n 65536 in the job script; torch.multiprocessing.set_sharing_strategy('file_system')"
_NATIVE = "run it once more with PYTHONFAULTHANDLER=1, and look at the innermost extension in the stack"
_SLOTS = "make processes and slots agree: hpcddp layout JOBFILE, hpcddp lint job.sh"
_SSH = "ssh {host} true from the job's first node"
_FIND_EACH = "hpcddp env in the job; MASTER_ADDR has to be the first rank's node, MASTER_PORT free and the same on all"
_LOAD = "torch.load(path, map_location='cpu') in a Python on the login node; resume from the checkpoint before it"
_KEYS = "compare list(torch.load(path)['model']) with list(model.state_dict()): DDP's keys begin with module."
_DRIVER = "nvidia-smi; python -m torch.utils.collect_env: torch's CUDA must not be newer than the driver's"
_GPU = "CUDA_LAUNCH_BLOCKING=1 in the job's environment shows the line; then compute-sanitizer"
_GPU_MEMORY = "a smaller batch on each GPU: max_micro_batch, activation checkpointing, or hpcddp advise"
_WHO_CAME_LATE = "hpcddp verify -- COMMAND; TORCH_DISTRIBUTED_DEBUG=DETAIL in the job names the collective"
_TIME = "a longer walltime, or checkpoints and chain: N in the job file"
_AGAIN = "type the command again: a run resumes from its newest checkpoint"
_LDD = "ldd FILE.so | grep 'not found' on a compute node; load the modules that it was built with"
_OFFLINE = "download on the login node first, then HF_HUB_OFFLINE=1 in the job; or set the site's proxy"
_ARGUMENTS = "the command with --help on the login node; hpcddp lint job.sh"
_LOST_NODE = "submit it again; max_restarts: N and spares: 1 in the job file go on without the node"
_MPI_CALL = "sizes, types and ranks of that MPI call have to fit on both sides"
_WHO_KILLED = "ask the scheduler: hpcddp status RUN, sacct -j JOB or qstat -xf JOB; without a word there, memory"

ROWS = (
    # The scheduler, and the kernel
    Row("none", RESTART, NOBODY, "CANCELLED … DUE TO JOB REQUEUE", "JOB REQUEUE", r"DUE TO JOB REQUEUE"),
    Row("walltime", CAUSE, REQUEST, "CANCELLED … DUE TO TIME LIMIT", "TIME LIMIT", r"DUE TO TIME LIMIT", _TIME),
    Row("walltime", CAUSE, REQUEST, "PBS: job killed: walltime … exceeded limit", "walltime", r"job killed: walltime", _TIME),
    Row("walltime", RAISED, REQUEST, "time limit reached (a script's own)", "ime limit|ime-limit|alltime", r"(?i)\b(time.?limit|wall.?time)\b.*\b(reached|exceeded|expired|over)\b", _TIME),
    Row("walltime", CAUSE, REQUEST, "timeout: sending signal TERM to command", "sending signal", r"^timeout: sending signal", _TIME),
    Row("walltime", CAUSE, REQUEST, "TERM_RUNLIMIT (LSF)", "TERM_RUNLIMIT", r"TERM_RUNLIMIT", _TIME),
    Row("limits", CAUSE, REQUEST, "PBS: job killed: ncpus … exceeded limit", "job killed", r"job killed: (cput|cpupercent|ncpus|file|nprocs) \S+ exceeded limit", "ask for what the job uses: cpus_per_rank in the job file; OMP_NUM_THREADS in the job"),
    Row("killed", CAUSE, CLUSTER, "CANCELLED … DUE TO PREEMPTION", "PREEMPTION", r"DUE TO PREEMPTION", "submit it again: a run resumes from its newest checkpoint; --requeue, or a queue that is not preempted"),
    Row("killed", CAUSE, CLUSTER, "Node failure on node4, DUE TO NODE FAILURE", "FAIL|ode failure|SISTER|requested job die", r"DUE TO NODE FAILURE|Node failure on (?P<host>[\w.-]+)|job killed: node \d+ \((?P<host_too>[\w.-]+)\) requested job (die|terminate)", _LOST_NODE),
    Row("host-memory", CAUSE, REQUEST, "Detected 1 oom_kill event (Slurm)", "oom", r"Detected \d+ oom[-_ ]kill event|oom_kill_process|invoked oom-killer", _MEMORY),
    Row("host-memory", CAUSE, REQUEST, "task 3: Out Of Memory (srun)", "Out Of Memory", r"error: (?P<host>[\w.-]+): tasks? (?P<rank>\d+)[\d,-]*: Out Of Memory", _MEMORY),
    Row("host-memory", CAUSE, REQUEST, "Out of memory: Killed process (kernel)", "ut of memory", r"(Memory cgroup o|\bO)ut of memory: Kill(ed)? process", _MEMORY),
    Row("host-memory", CAUSE, REQUEST, "StepId=5.0 exceeded memory limit (Slurm)", "exceeded memory limit", r"slurmstepd(-(?P<host>[\w.-]+))?: error: (Step|Job)\S*( \S+)? exceeded memory limit", _MEMORY),
    Row("host-memory", CAUSE, REQUEST, "Exceeded job memory limit", "xceeded", r"(?i)exceeded (job|step) memory limit|job killed: \w*mem \S+ exceeded limit|Cgroup memsw? limit exceeded|TERM_MEMLIMIT|mem\w* limit exceeded", _MEMORY),
    Row("host-memory", CAUSE, REQUEST, "killed by the cgroup out-of-memory handler", "out-of-memory handler", r"cgroup out-of-memory handler", _MEMORY),
    Row("killed", CAUSE, SENDER, "JOB … CANCELLED AT (Slurm)", "CANCELLED AT", r"\*\*\* JOB \S+ ON (?P<host>\S+) CANCELLED AT ", "sacct -j JOB --format=JobID,State,ExitCode,Comment: somebody ended it with scancel"),
    Row("killed", LOST, SENDER, "STEP … CANCELLED AT (Slurm)", "CANCELLED AT", r"CANCELLED AT "),
    Row("none", LOST, NOBODY, "Job step aborted (srun)", "srun: |slurmstepd: ", r"srun: (Job step aborted|Terminating|Force Terminated|launch/slurm: _step_signal|forcing job termination)"),
    Row("walltime", RECORD, REQUEST, "TIMEOUT (sacct), exceeded resource walltime (qstat)", "TIMEOUT|TimeLimit|DEADLINE|walltime|status -29", r"TIMEOUT|TimeLimit|DEADLINE|exceeded resource walltime|exit status -29\b", _TIME),
    Row("host-memory", RECORD, REQUEST, "OUT_OF_MEMORY (sacct), exceeded resource mem (qstat)", "OUT_OF_MEMORY|OutOfMemory|exceeded resource|status -2", r"OUT_OF_MEMORY|OutOfMemory|exceeded resource \w*mem|exit status -2[67]\b", _MEMORY),
    Row("killed", RECORD, CLUSTER, "NODE_FAIL, PREEMPTED, BOOT_FAIL (sacct)", "NODE_FAIL|NodeDown|BOOT_FAIL|PREEMPT|status -20", r"NODE_FAIL|NodeDown|BOOT_FAIL|PREEMPT|exit status -20\b", _LOST_NODE),
    Row("walltime", RECORD, REQUEST, "deadline, SIGUSR1 (a run's state)", "deadline|SIGUSR", r"\bdeadline\b|^SIGUSR[12](; checkpoint|; exit|$)", _TIME),
    Row("killed", RECORD, SENDER, "CANCELLED (sacct), terminated by (qstat), SIGTERM (a run's state)", "CANCELLED|terminated by|status 271|SIG|job was cancelled", r"CANCELLED|terminated by|exit status 271\b|^SIG(TERM|HUP)(; checkpoint|; exit|$)|^its job was cancelled", "submit it again: a run resumes from its newest checkpoint"),
    # The supervisor
    Row("killed", CAUSE, CLUSTER, "hpcddp: node2 is silent, vanished without a word", "hpcddp: ", r"^hpcddp: (?:the first cause: )?(?:(?P<host>[\w.-]+) is silent.*\(rank (?P<rank>\d+)\)|rank (?P<rank_too>\d+) on (?P<host_too>[\w.-]+) vanished)", _LOST_NODE),
    Row("unfit", CAUSE, MACHINE, "hpcddp: no rank was started: node3 is unfit", "is unfit", r"^hpcddp: (?:no rank was started: )?(?:the launch|(?P<host>[\w.-]+)) is unfit", "tell the site; spares: 1 and max_restarts: N in the job file start without the node"),
    Row("walltime", CAUSE, REQUEST, "hpcddp: … the run stopped (deadline)", "(deadline)", r"^hpcddp: (?:unfinished: |stopped after |run \S+: unfinished |.*the (?:run|job) stopped ).*\(deadline\)", _TIME),
    Row("early-exit", CAUSE, PROGRAM, "hpcddp: rank 1 … ended with status 0 while others still trained", "while ", r"^hpcddp: (?:the first cause: )?rank (?P<rank>\d+) on (?P<host>[\w.-]+) ended with status 0 while ", "all ranks have to take the same number of steps: drop_last=True, or a sampler that pads"),
    Row("hang", CAUSE, PROGRAM, "hpcddp: no rank gets on; rank 1 …", "no rank gets on", r"^hpcddp: .*no rank gets on.*; rank (?P<rank>\d+) on (?P<host>[\w.-]+)", _WHO_CAME_LATE),
    Row("hang", CAUSE, PROGRAM, "hpcddp: the ranks have waited for each other for 600 s, …: rank 1 at …", "waited for each other", r"^hpcddp: the ranks have waited for each other for [^:]*: ranks? (?P<rank>\d+)", _WHO_CAME_LATE),
    Row("none", RESTART, NOBODY, "hpcddp: start 2 of at most 4", "hpcddp: start", r"^hpcddp: start \d+ of at most"),
    Row("none", RESTART, NOBODY, "will restart worker group (torchrun)", "orker group", r"will restart worker group|Restarting worker group"),
    # Launchers: what they could not start
    Row("launcher", CAUSE, SCRIPT, "not enough slots available (Open MPI)", "not enough slots|binding more processes", r"There are not enough slots available|binding more processes than cpus", _SLOTS),
    Row("launcher", CAUSE, SCRIPT, "attempt to run as root (Open MPI)", "run as root", r"detected an attempt to run as root", "run it as yourself; in a container mpirun --allow-run-as-root"),
    Row("command", CAUSE, SCRIPT, "execvp error on file (MPICH, Intel MPI)", "execvp error", r"execvp error on file (?P<what>\S+)", "ls -l {what} on a compute node; which python in the job script"),
    Row("command", CAUSE, SCRIPT, "unable to find or launch the executable (Open MPI)", "unable to|could not", r"was unable to (find|launch) the specified (executable|application)|could not access or execute an executable|Executable: ", "which COMMAND in the job script; load the module or activate the environment before the launcher"),
    Row("command", CAUSE, SCRIPT, "execve(): … No such file (srun)", "execve()", r"execve\(\): (?P<what>.+): (No such file|Exec format error)", "ls -l {what} on a compute node; which python in the job script"),
    Row("permission", CAUSE, SCRIPT, "execve(): … Permission denied (srun)", "execve()", r"execve\(\): (?P<what>.+): Permission denied", "chmod +x {what}"),
    Row("command", CAUSE, SCRIPT, "python: can't open file", "can't open file", r"can't (open|find) (file|'__main__')", "cd to the project in the job script, or give the script's whole path"),
    Row("import", CAUSE, ENVIRONMENT, "python: No module named", "No module named", r"python[\d.]*: No module named", "which python in the job script: activate the environment before the launcher"),
    Row("launcher", CAUSE, CLUSTER, "Unable to run bstrap_proxy (Intel MPI)", "bstrap_proxy|bootstrap prox", r"Unable to run bstrap_proxy on (?P<host>[\w.-]+)|Error setting up the bootstrap proxies", _SSH),
    Row("launcher", CAUSE, CLUSTER, "ssh: … refused, not resolved, not allowed", "ssh: |publickey|ost key verification", r"ssh: (connect to host|Could not resolve hostname) (?P<host>[\w.-]+)|Permission denied \(publickey|Host key verification failed", _SSH),
    Row("launcher", CAUSE, CLUSTER, "unable to reliably start one or more daemons (Open MPI)", "reliably start|daemon", r"A daemon failed to report back|unable to reliably start one or more daemons|daemon has unexpectedly failed|An? (ORTE|PRTE) daemon .*failed to|tcp_peer_send_blocking|could not be (located|contacted) .*daemon", _SSH),
    Row("launcher", CAUSE, CLUSTER, "The PMIx server's listener thread failed to start (Open MPI)", "listener thread", r"PMIx server's listener thread failed to start", "export TMPDIR=$(mktemp -d) and start again: a killed mpirun has left a folder of its number in TMPDIR"),
    Row("killed", CAUSE, CLUSTER, "lost communication with a remote daemon (Open MPI)", "lost communication", r"(ORTE|PRTE) has lost communication with a remote daemon", _LOST_NODE),
    Row("launcher", CAUSE, CLUSTER, "MPI processes are unable to reach each other (Open MPI)", "unable to reach each other", r"MPI processes are unable to reach each other", "the interfaces that MPI may use: env | grep OMPI_MCA; hpcddp check in the job"),
    Row("launcher", CAUSE, CLUSTER, "unable to resolve host, or to connect (MPICH)", "HYD|proxy|resolve|launch", r"HYD\w*.*(unable to (connect|get host address|resolve)|error (launching|executing) )|unable to launch (the )?(remote )?(prox|node)|Launch proxy failed", _SSH),
    Row("launcher", CAUSE, SCRIPT, "Invalid account, partition or QOS (Slurm)", "nvalid account|nvalid partition|nvalid qos|nvalid QOS", r"Invalid (account|partition|qos|QOS)", "sacctmgr show associations user=$USER format=account,partition,qos; hpcddp check on the login node"),
    Row("launcher", CAUSE, SCRIPT, "srun: error: Unable to create step", "srun: ", r"srun: (error|fatal): (Unable to (create step|allocate|confirm)|.*(Requested node configuration|More processors requested|Invalid generic resource|task launch|Task launch|Job step creation|CPU count per node can not))", "hpcddp layout JOBFILE; srun --overlap inside an interactive step"),
    Row("launcher", WEAK, SCRIPT, "srun: Job step creation temporarily disabled", "temporarily disabled", r"Job step creation temporarily disabled", "srun --overlap"),
    Row("launcher", WEAK, SCRIPT, "srun: error: …", "srun: error|srun: fatal", r"^srun: (error|fatal): (?!\S+: tasks?\b)", "hpcddp layout JOBFILE: nodes and tasks of srun have to fit into those of the job"),
    Row("singletons", CAUSE, ENVIRONMENT, "OMPI was not built with SLURM's PMI support", "PMI", r"OMPI was not built with SLURM's PMI|not built with .*PMI support", "srun --mpi=list; srun --mpi=pmix, or mpirun in place of srun"),
    Row("launcher", CAUSE, ENVIRONMENT, "MPI_Init failed", "MPI_I|ompi_mpi_init|_Init", r"MPI_INIT(_THREAD)? has failed|An error occurred in MPI_Init|ompi_mpi_init: |Fatal error in (internal_|PMPI_|MPI_)Init|(?<!\w)PMI[2x]?_Init\w* .*(fail|return)", "launcher and MPI library have to be the same one: which mpirun; python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'"),
    # Wrong words
    Row("arguments", CAUSE, SCRIPT, "error: unrecognized arguments, the following arguments are required", "rror: ", r"^(?:\S+(?: \S+)?: )?[Ee]rror: ([Uu]nrecognized arguments|argument |[Ii]nvalid value for |Parser key |Got unexpected extra |the following arguments|one of the arguments|invalid choice|ambiguous option|expected |too few)", _ARGUMENTS),
    Row("arguments", CAUSE, SCRIPT, "an unknown option of the launcher", "nrecogni|nknown option|nvalid option|llegal option|such option|Missing option|nknown command line flag|consume arg|No command given|nvalid numeric value", r"[Uu]nknown command line flag|Could not consume arg|srun: fatal: No command given|[Ii]nvalid numeric value|[Uu]nrecogni[sz]ed (option|argument)|[Uu]nknown option|[Ii](nvalid|llegal) option|No such option|Missing option", _ARGUMENTS),
    Row("arguments", CAUSE, SCRIPT, "train.py: error: … (argparse)", ".py: error: ", r"^\S+\.py: error: ", _ARGUMENTS),
    Row("arguments", RAISED, SCRIPT, "arguments that the program does not know", "ArgumentParser|ArgumentError|UsageError|ConfigAttributeError|OverrideParse|Could not override|not in struct", r"is not in struct|not used by the HfArgumentParser|argparse\.ArgumentError|UsageError|Could not override|OverrideParse", _ARGUMENTS),
    Row("collective-mismatch", CAUSE, PROGRAM, "Detected mismatch between collectives on ranks", "mismatch|op.preamble|inconsistent|expects same model|appears not to match", r"[Dd]etected mismatch between collectives|op\.preamble\.length <= op\.nbytes|[Cc]ollective\w* mismatch|expects same model across all ranks, but [Rr]ank (?P<rank>\d+)|params\[\d+\] in this process.*not to match|Mismatched? .*collective", "hpcddp verify -- COMMAND; TORCH_DISTRIBUTED_DEBUG=DETAIL in the job names both collectives"),
    Row("exception", CAUSE, PROGRAM, "Fatal error in internal_Recv: Message truncated (MPICH)", "Fatal error in", r"(?:\(rank (?P<rank>\d+) in comm \S+\): )?Fatal error in (?:internal_|PMPI_|MPI_)?(?!Init)\w+: ", _MPI_CALL),
    Row("exception", CAUSE, PROGRAM, "An error occurred in MPI_Recv (Open MPI)", "An error occurred in MPI_", r"\*\*\* An error occurred in MPI_(?!Init)", _MPI_CALL),
    # GPUs and NCCL
    Row("exception", RAISED, PROGRAM, "CUDA out of memory", "out of memory|OUT_OF_MEMORY|ALLOC_FAILED", r"(CUDA|HIP|XPU|MPS\w*|Cuda failure.*)\W.*out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY", _GPU_MEMORY),
    Row("library", RAISED, ENVIRONMENT, "no kernel image is available", "no kernel image|too old|insufficient|with CUDA enabled|PTX was compiled|forward compatibility|version mismatch|driver initialization failed", r"Driver/library version mismatch|CUDA driver initialization failed|no kernel image is available|driver .*(is )?too old|driver version is insufficient|not compiled with CUDA enabled|unsupported PTX|PTX was compiled with an unsupported|forward compatibility was attempted", _DRIVER),
    Row("crash", CAUSE, MACHINE, "uncorrectable ECC error, Xid 79, GPU has fallen off the bus", "ECC|Xid|fallen off|nrecoverable|nspecified launch|GPU is lost", r"[Uu]ncorrectable ECC|NVRM: Xid|fallen off the bus|GPU is lost|hardware (error|fault)", "leave the node out, and tell the site: sbatch --exclude, max_restarts: N with spares: 1"),
    Row("hang", LATE, PROGRAM, "Watchdog caught collective operation timeout (NCCL)", "collective operation timeout|Watchdog caught|eartbeat", r"caught collective operation timeout|Watchdog .*(timed out|timeout)|monitoring thread.*(unable|failed) to", _WHO_CAME_LATE),
    Row("crash", CAUSE, PROGRAM, "an illegal memory access, device-side assert", "illegal|misaligned|device-side assert|unspecified launch|CUBLAS_STATUS_EXEC|CUDNN_STATUS_EXEC", r"illegal (memory access|instruction|address)|misaligned address|device-side assert|unspecified launch failure|(CUBLAS|CUDNN)_STATUS_EXECUTION_FAILED", _GPU),
    Row("exception", RAISED, SCRIPT, "invalid device ordinal, Duplicate GPU detected", "invalid device ordinal|Duplicate GPU|no NVIDIA driver|same GPU|No CUDA GPUs|no GPUs found|no CUDA-capable|busy or unavailable|invalid device", r"no GPUs found|Found no NVIDIA driver|invalid device ordinal|Duplicate GPU detected ?: ?rank (?P<rank>\d+)|using the same GPU|No CUDA GPUs are available|no CUDA-capable device|devices? is/are busy or unavailable", "torch.cuda.set_device(LOCAL_RANK) before init_process_group; hpcddp env shows each rank's GPU"),
    Row("limits", RAISED, MACHINE, "ibv_reg_mr, ibv_create_cq: Cannot allocate memory", "ibv_|memlock|RLIMIT_MEMLOCK", r"ibv_\w+.*(Cannot allocate memory|failed)|(?i:memlock)", "ulimit -l has to be unlimited on the nodes: the site sets it (Slurm: PropagateResourceLimits)"),
    Row("shm", RAISED, MACHINE, "NCCL: Error while creating shared memory segment", "shared memory|shm|/dev/shm", r"unable to (allocate|mmap|open|write|resize)\b.*shared memory|shared memory segment|/dev/shm.*No space|No space.*/dev/shm", "df -h /dev/shm; a container needs --shm-size; fewer DataLoader workers"),
    # Crashes
    Row("none", LOST, NOBODY, "terminate called, of NCCL's watchdog", "instance of|watchdog|Some NCCL operations|taking the entire process", r"instance of 'c10::|[Ww]atchdog thread terminated|Some NCCL operations have failed|taking the entire process down|detected by watchdog"),
    Row("shm", CAUSE, MACHINE, "DataLoader worker … Bus error, out of shared memory", "Bus error|shared memory", r"killed by signal: Bus error|out of shared memory", "df -h /dev/shm; fewer workers, or torch.multiprocessing.set_sharing_strategy('file_system')"),
    Row("host-memory", CAUSE, REQUEST, "DataLoader worker … killed by signal: Killed", "killed by signal", r"DataLoader worker .*killed by signal: Killed", _MEMORY),
    Row("host-memory", CAUSE, REQUEST, "std::bad_alloc", "bad_alloc", r"std::bad_alloc", _MEMORY),
    Row("crash", CAUSE, PROGRAM, "DataLoader worker … killed by signal: Segmentation fault", "killed by signal", r"DataLoader worker .*killed by signal: (Segmentation|Abort|Illegal|Floating)", _NATIVE),
    Row("crash", CAUSE, PROGRAM, "Fatal Python error: Segmentation fault", "Fatal Python error", r"Fatal Python error: ", _NATIVE),
    Row("crash", CAUSE, PROGRAM, "terminate called, what():", "terminate called|what():", r"terminate called (after throwing|without)|^what\(\): ", _NATIVE),
    Row("crash", CAUSE, PROGRAM, "free(): invalid pointer", "(): |corrupt|smashing|pure virtual|Segfault encountered", r"(free|malloc|realloc|munmap_chunk|unlink_chunk|malloc_consolidate)\(\): |double free or corruption|corrupted (size|double-linked)|stack smashing detected|pure virtual method called|Segfault encountered", _NATIVE),
    Row("crash", CAUSE, PROGRAM, "Assertion … failed", "ssertion|heck failed|HECK failed", r"^\S+: .*Assertion [`'\"].*failed|\b(C|c)heck failed: |\bCHECK failed: ", _NATIVE),
    Row("crash", CAUSE, PROGRAM, "…, aborting", "bort", r"^(?!.*\b(srun|slurm|mpirun|prterun|mpiexec|ERROR|CRITICAL|FATAL|WARN\w*)).*[,:;.] ?abort(ing|ed)?[.!]*$", _NATIVE),
    # The ranks and each other
    Row("hang", LATE, PROGRAM, "Rank 1 failed to pass monitoredBarrier", "monitoredBarrier", r"[Rr]anks? (?P<rank>\d+)(?P<more>(?:, ?\d+)*) failed to pass monitoredBarrier", _WHO_CAME_LATE),
    Row("hang", LATE, PROGRAM, "reached monitoredBarrier, but received errors", "monitoredBarrier", r"successfully reached monitoredBarrier, but", _WHO_CAME_LATE),
    Row("hang", LATE, PROGRAM, "Timed out waiting …ms for recv operation (gloo)", "imed out waiting|caused pair closure|pplication timeout", r"Timed out waiting \d+\s?ms for \w+ operation|Application timeout caused pair closure", _WHO_CAME_LATE),
    Row("singletons", WEAK, ENVIRONMENT, "rank 0 of 1, more than once", "0 of 1|0/1|1/1|size 1|size=1|size: 1|size = 1", r"\b[Rr](?i:ank)\W{0,3}0\s?(?:of|/|out of|,? ?\(?(?:world.)?size\W{0,2})\W{0,2}1\b(?![./]\d)|\b0 of 1\b|MEMBER: 1/1\b|\bworld.?size\W{0,3}1\b(?![./\d])", "launcher and MPI library have to be the same one: which mpirun; python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'; hpcddp env under the launcher"),
    Row("singletons", WEAK, ENVIRONMENT, "suspicious MPI execution environment (mpi4py)", "suspicious MPI", r"suspicious MPI execution environment", "which mpirun has to be of the MPI that mpi4py was built with"),
    Row("rendezvous", RAISED, CLUSTER, "address already in use (EADDRINUSE)", "ddress already in use|EADDRINUSE|failed to listen|failed to bind", r"[Aa]ddress already in use|EADDRINUSE|server socket has failed to (listen|bind)", "ss -ltnp on the first node: another job, or a second rank 0; another MASTER_PORT, hpcddp env"),
    Row("rendezvous", LATE, SCRIPT, "Timed out … waiting for clients, 1/2 clients joined", "Socket Timeout|clients joined|waiting for clients|wait timeout|endezvous|roll call|did not arrive", r"^(\w+\.)*(RuntimeError|DistBackendError)?:? ?Socket Timeout$|\d+/\d+ clients joined|waiting for clients|wait timeout after \d+\s?ms, keys: \S*?/?(?P<rank>\d+)?$|Rendezvous(Timeout|Connection|Closed|GracefulExit)?Error|[Rr]endezvous .*(timed out|failed|closed)|ranks did not arrive in", _FIND_EACH),
    Row("rendezvous", RAISED, CLUSTER, "network addresses of … cannot be retrieved (gai error)", "cannot be retrieved|gai error|gaierror|resolve hostname|retrieve hostname", r"(?<!client socket )cannot be retrieved \(gai|gai error: |(?<!requests)(?<!urllib3)\bUnable to resolve hostname|failed to (resolve|retrieve) hostname", "getent hosts $MASTER_ADDR on each node; take an address that nodes know: hpcddp env"),
    Row("rendezvous", LATE, CLUSTER, "client socket has failed to connect", "client socket|failed to connect|onnectFullMesh|ocketStartConnect|onnect to", r"client socket has (failed to connect|timed out)|failed to connect to (any of the|the) (addresses|network|server)|connectFullMesh failed|[Ss]ocket(Start|Poll)Connect.*(fail|refused|timed out)|No route to host", _FIND_EACH),
    Row("rendezvous", RAISED, SCRIPT, "environment variable RANK expected, but not set", "expected, but not set|rank < size|nable to find address|no socket interface|invalid MASTER|makeDeviceFor|no interface|bad rank", r"environment variable \w+ expected, but not set|rank < size|Unable to find address for|no socket interface found|[Ii]nvalid (MASTER_PORT|rank|world_size)|makeDeviceFor(Hostname|Interface)", _FIND_EACH),
    # Ends of other ranks. A cause never stands here
    Row("none", LOST, NOBODY, "Connection closed by peer (gloo)", "gloo/transport|closed by peer|closed by remote|pair.cc|onnection reset|roken pipe|ocket closed|software caused", r"gloo/transport|Connection (closed|reset) by (remote )?peer|Connection closed by|Broken pipe|[Ss]ocket closed|ConnectionResetError|BrokenPipeError"),
    Row("none", LOST, NOBODY, "Connection was likely closed (TCPStore)", "ncclUniqueId|failed to shutdown|likely closed|failed to recv|failed to send|sendBytes failed|recvV|TCPStore|roken socket", r"retrieving ncclUniqueId from .*(reset|closed|Broken)|has failed to shutdown the rendezvous|Connection was likely closed|[Ff]ailed to recv|sendBytes failed|recv(Vector|Value|Bytes)? failed|failed to (recv|send), got|Broken socket"),
    Row("none", LOST, NOBODY, "NCCL: unhandled system error, remote process exited", "NCCL|nccl|ProcessGroupNCCL", r"ncclRemoteError|ncclSystemError|ncclInternalError|unhandled (system|cuda|internal) error|remote process exited|NCCL communicator (was|encountered)|NCCL error|ProcessGroupNCCL.*(abort|taking the entire process down|[Ss]ome NCCL operations|exception)|Some NCCL operations have failed"),
    Row("none", LOST, NOBODY, "ChildFailedError, CalledProcessError (torchrun, accelerate)", "ChildFailedError|CalledProcessError|PeerFailedError|ProcessRaisedException|ActorDiedError", r"ChildFailedError|CalledProcessError|PeerFailedError|ProcessRaisedException"),
    Row("exception", RAISED, PROGRAM, "DataLoader worker exited unexpectedly with exit code 1", "exited unexpectedly", r"DataLoader worker .*exited unexpectedly with exit code [1-9]", "num_workers=0 shows the worker's own error"),
    Row("none", LOST, NOBODY, "DataLoader worker exited unexpectedly", "exited unexpectedly|in DataLoader worker|in replica|in pin memory", r"DataLoader worker .*exited unexpectedly|Caught \w+ in (DataLoader worker|replica|pin memory)"),
    # The shell, if nothing else says why
    Row("command", CAUSE, SCRIPT, "hpcddp: cannot run COMMAND", "cannot run", r"^hpcddp: .*cannot run '(?P<what>[^']+)': No such file", "ls -l {what} on a compute node: the job script starts in the folder that it was submitted from"),
    Row("command", WEAK, SCRIPT, "command not found, No such file or directory (bash, sh, env)", "not found|such file or directory|bad interpreter|cannot execute|non-PBS mpiexec", r"no non-PBS mpiexec|^\S+: (?:line )?\d+: (?:exec: )?(?P<what>[^:]+): (command not found|not found|No such file or directory|cannot execute)|^(?:-?bash|z?sh|ksh): (?P<what_too>[^:]+): (command not found|No such file|not found)|bad interpreter|^(?:\S*/)?(?:env|nohup|nice|exec|time|timeout|setsid|taskset|numactl|xargs|stdbuf)(?:: failed to (?:run command|execute)| \S+)?:? ['\u2018\"]?(?P<what_more>[^:'\u2019\"]+)['\u2019\"]?: No such file", "which {what} in the job script: load its module before"),
    Row("command", WEAK, SCRIPT, "syntax error near unexpected token (bash)", "syntax error|unexpected end|unexpected EOF|bad substitution|ambiguous redirect", r"^\S+: (?:line )?\d+: .*(syntax error|unexpected end of file|unexpected EOF|bad substitution|ambiguous redirect)", "bash -n SCRIPT; hpcddp lint SCRIPT"),
    Row("arguments", WEAK, SCRIPT, "NAME: unbound variable (bash)", "unbound variable|parameter not set|parameter null", r"^\S+: (?:line )?\d+: (?P<what>[^:]+): (unbound variable|parameter (null or )?not set)", "the scheduler may not pass the variable on: export it in the job script, or env: in the job file"),
    Row("command", WEAK, SCRIPT, "modules are unknown (Lmod), Unable to locate a modulefile", "modulefile|are unknown|not a modulefile", r"Unable to locate a modulefile|module\(s\) are unknown|modules? are unknown", "module spider NAME, or module avail, on a node of that kind"),
    Row("import", WEAK, ENVIRONMENT, "No matching distribution found (pip), PackagesNotFoundError (conda)", "matching distribution|satisfies the requirement|PackagesNotFound|EnvironmentNameNotFound|EnvironmentLocationNotFound|onda init|ResolutionImpossible|installation candidate", r"No matching distribution found|that satisfies the requirement|PackagesNotFoundError|Environment(Name|Location)NotFound|Run 'conda init'|ResolutionImpossible|has no installation candidate", "make the environment on the login node, before the job; conda info --envs"),
    Row("permission", WEAK, SCRIPT, "Permission denied (bash)", "ermission denied", r"^\S+: line \d+: (?P<what>[^:]+): Permission denied", "ls -l {what}"),
    Row("exit-status", WEAK, PROGRAM, "hpcddp: …, with a hint", "hpcddp: ", r"^hpcddp: (?!warning)(?P<what>.+)\nhint: (?P<hint>.+)", "{hint}"),
    # What Python raises
    Row("checkpoint", RAISED, DATA, "Error(s) in loading state_dict", "state_dict|size mismatch for|parameter group|a valid checkpoint", r"Can't find a valid checkpoint|Error\(s\) in loading state_dict|size mismatch for|(Missing|Unexpected) key\(?s?\)? in|loaded state dict (contains|has a different)|doesn't match the size of optimizer", _KEYS),
    Row("checkpoint", RAISED, DATA, "Weights only load failed, UnpicklingError", "Weights only|npickling|invalid load key|Ran out of input|pickle data was truncated|StreamReader|central directory|zip archive|ZIP archive|SafetensorError|deserializing header|CheckpointException|nexpected EOF", r"Weights only load failed|UnpicklingError|invalid load key|Ran out of input|pickle data was truncated|PytorchStreamReader failed|failed finding central directory|not a (ZIP|zip) archive|SafetensorError|deserializing header|CheckpointException|unexpected EOF.*corrupt", _LOAD),
    Row("host-memory", RAISED, REQUEST, "MemoryError, Cannot allocate memory", "MemoryError|llocate memory|map segment|nable to allocate|DefaultCPUAllocator|not enough memory", r"\bMemoryError|[Cc]an(not|'t) allocate memory(?! in static TLS)|failed to map segment|\[Errno 12\]|Unable to allocate .*(array|[KMGT]iB)|DefaultCPUAllocator|not enough memory: you tried", _MEMORY),
    Row("library", CAUSE, ENVIRONMENT, "PROGRAM: error while loading shared libraries", "while loading shared", r"error while loading shared libraries: ", _LDD),
    Row("library", RAISED, ENVIRONMENT, "cannot open shared object file", "shared object|static TLS|undefined symbol|not found (required|symbol lookup|cannot load MPI|ELF|multiarray|binary incompatibility|compiled using NumPy|_ARRAY_API", r"cannot open shared object file|in static TLS block|undefined symbol|version `[^']+' not found|symbol lookup error|wrong ELF class|file too short|invalid ELF|multiarray failed to import|may indicate binary incompatibility|compiled using NumPy 1|_ARRAY_API not found", _LDD),
    Row("library", RAISED, ENVIRONMENT, "cannot load MPI library (mpi4py)", "cannot load", r"cannot load MPI library|[Cc]annot load (lib)?\w+ (library|backend)", "module list; python -c 'from mpi4py import MPI' on a compute node"),
    Row("import", RAISED, ENVIRONMENT, "ModuleNotFoundError, cannot import name", "No module named|cannot import name|partially initialized|ModuleNotFoundError", r"(ModuleNotFoundError: )?No module named '?(?P<module>[\w.]+)|ModuleNotFoundError|ImportError: cannot import name|partially initialized module", "which python; python -m pip show {module} in the job's environment; no file of yours may have the module's name"),
    Row("import", RAISED, ENVIRONMENT, "ImportError", "ImportError", r"^ImportError: ", "python -c 'import …' in the job's environment, on a compute node"),
    Row("disk-full", RAISED, DATA, "No space left on device, Disk quota exceeded", "o space left|uota exceeded|File too large|ile size limit", r"No space left on device|[Qq]uota exceeded|\[Errno (28|122|27)\]|File too large|[Ff]ile size limit exceeded", _SPACE),
    Row("disk-full", RAISED, DATA, "basic_ios::clear: iostream error, unexpected pos (torch.save), 9 requested and 4 written (NumPy)", "iostream error|unexpected pos|StreamWriter|requested and|ENOSPC|EDQUOT|write failed", r"ENOSPC|EDQUOT|\d+ requested and \d+ written|\bwrite failed.*(errno = (28|122)|No space)|basic_ios::clear|unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing", f"it does not say why: a full disk, a quota or ulimit -f. {_SPACE}"),
    Row("limits", RAISED, MACHINE, "Too many open files", "oo many open files|ancdata|EMFILE", r"[Tt]oo many open files|\[Errno 24\]|received \d+ items of ancdata|EMFILE", _OPEN_FILES),
    Row("limits", RAISED, MACHINE, "can't start new thread, Resource temporarily unavailable", "start new thread|pthread_create|temporarily unavailable", r"can't start new thread|pthread_create.*failed|^(?!.*(BlockingIO|lock)).*Resource temporarily unavailable", "ulimit -u on the nodes; OMP_NUM_THREADS=1, fewer DataLoader workers"),
    Row("permission", RAISED, DATA, "PermissionError, Read-only file system", "ermission denied|PermissionError|ead-only file|not permitted", r"PermissionError|[Pp]ermission denied|\[Errno (13|30|1)\]|Read-only file system|Operation not permitted", "ls -ld FILE and its folder on a compute node; id"),
    Row("network", RAISED, CLUSTER, "Max retries exceeded, couldn't connect to huggingface.co", "retries exceeded|ConnectionPool|couldn't connect|ouldn't reach|URLError|HTTPError|HTTP Error|resolve host|Network is unreachable|ould not resolve|service not known|ailed to connect to|ConnectTimeout|ConnectError|LocalEntryNotFound|OfflineMode|name resolution|SSLError|ProxyError|ReadTimeout|gaierror|.exceptions.|connect to 'http|outgoing traffic", r"[Cc]ould not resolve (host|proxy)|unable to resolve host|Network is unreachable|Name or service not known|Failed to connect to \S+ port|Max retries exceeded|HTTPS?ConnectionPool|[Cc]ould ?n[o']t (connect|reach)|couldn't connect|URLError|HTTPError|HTTP Error \d|Connect(Timeout|Error)\b|LocalEntryNotFoundError|OfflineMode|name resolution|SSLError|ProxyError|ReadTimeout|socket\.gaierror|(requests|urllib3)\.exceptions\.\w*(Connect|Timeout)\w*|outgoing traffic has been disabled", _OFFLINE),
    Row("file-missing", RAISED, DATA, "FileNotFoundError: No such file or directory, Parent directory … does not exist (torch.save)", "FileNotFound|such file or directory|NotADirectoryError|IsADirectoryError|not exist|file named|ile not found|annot find", r"(?i:\b(directory|folder|file|path|checkpoint|dataset)\b.* do(es)? not exist)|not appear to have a file named|[Ff]ile not found|[Cc]annot find (the )?(file|directory|path)|FileNotFoundError|\[Errno (2|20|21)\]|No such file or directory|NotADirectoryError|errno = 2\b", "ls -l FILE on a compute node: /tmp and scratch are each node's own there"),
    Row("interrupted", CAUSE, NOBODY, "srun: interrupt, srun: sending Ctrl-C", "srun: interrupt|sending Ctrl-C", r"^srun: (interrupt \(|sending Ctrl-C to )", _AGAIN),
    Row("interrupted", RAISED, NOBODY, "KeyboardInterrupt", "KeyboardInterrupt", r"^KeyboardInterrupt", _AGAIN),
    Row("exception", CAUSE, PROGRAM, "SyntaxError, IndentationError", "SyntaxError|IndentationError|TabError", r"^(SyntaxError|IndentationError|TabError): ", "python -m py_compile FILE, with the job's Python: python --version"),
    Row("exception", RAISED, PROGRAM, "Expected to have finished reduction (DDP)", "finished reduction|find_unused_parameters|marked as ready|mark a variable ready", r"Expected to have finished reduction|[Mm]ark(ed)? (a variable|as) ready", "DistributedDataParallel(model, find_unused_parameters=True), or let each forward use all parameters"),
    Row("checkpoint", RAISED, DATA, "EOFError, and all else that torch.load raises", "(torch.load)", r"\(torch\.load\)$", _LOAD),
    # Which rank ended, and how
    Row("none", END, NOBODY, "process rank 2 … exited on signal 11 (Open MPI)", "noticed that process rank", r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on(?: signal (?P<signal>\d+))?"),
    Row("none", END, NOBODY, "MPI_ABORT was invoked on rank 1", "MPI_ABORT was invoked|application called MPI_Abort", r"MPI_ABORT was invoked on rank (?P<rank>\d+)|application called MPI_Abort\(.*?(?P<status>\d+)\) - process (?P<rank_too>\d+)"),
    Row("none", END, NOBODY, "EXIT STRING: Killed (signal 9) (MPICH)", "EXIT STRING", r"EXIT STRING: .*\(signal (?P<signal>\d+)\)"),
    Row("none", END, NOBODY, "RANK 1 PID … KILLED BY SIGNAL: 9 (Intel MPI)", "KILLED BY SIGNAL|EXIT CODE", r"KILLED BY SIGNAL: (?P<signal>\d+)|EXIT (CODE|STATUS): (?P<status>\d+)"),
    Row("none", END, NOBODY, "task 2: Segmentation fault (srun)", ": task", r"error: (?P<host>[\w.-]+): tasks? (?P<rank>\d+)(?P<more>[\d,-]*): (?:Exited with exit code (?P<status>\d+)|(?P<signal>[A-Z][\w ]+?)(?: \(core dumped\))?$)"),
    Row("none", END, NOBODY, "failed (exitcode: -9) local_rank: 2 (torchrun)", "exitcode", r"failed \(exitcode: (?P<status>-?\d+)\) local_rank: (?P<rank>\d+)"),
    Row("none", END, NOBODY, "exitcode  : -15 (torchrun's list)", "exitcode", r"^exitcode +: (?P<status>-?\d+) "),
    Row("none", END, NOBODY, "The first process to do so was (Open MPI)", "Process name:", r"Process name: \[.*,(?P<rank>\d+)\]"),
    Row("none", END, NOBODY, "process 1 terminated with signal SIGKILL (torch.multiprocessing)", "terminated with", r"[Pp]rocess (?P<rank>\d+) terminated with (?:signal (?P<signal>\w+)|exit code (?P<status>\d+))"),
    Row("none", END, NOBODY, "hpcddp: rank 1 on node1 was killed by SIGKILL", "hpcddp: ", r"^hpcddp: (?:the first cause: )?rank (?P<rank>\d+) on (?P<host>[\w.-]+?)(?: was killed by (?P<signal>SIG\w+)| ended with status (?P<status>\d+)|:? )"),
    Row("killed", END, SENDER, "Received 15 death signal (torchrun)", "death signal|got signal", r"Received (?:Signals\.)?(?P<signal>\w+) death signal|got signal: (?P<signal_too>\d+)", _WHO_KILLED),
    Row("killed", END, SENDER, "Abort is in progress (Open MPI)", "Abort is in progress", r"Abort is in progress", _WHO_KILLED),
    Row("killed", END, SENDER, "hpcddp: SIGTERM came", "came", r"^hpcddp: (?P<signal>SIG\w+) came", _WHO_KILLED),
    Row("killed", END, SENDER, "hpcddp: … the run stopped (SIGTERM)", "stopped", r"^hpcddp: (?:stopped after .*|.*the (?:run|job) stopped )\((?P<signal>SIG\w+)\)", "submit it again: a run resumes from its newest checkpoint"),
    Row("interrupted", END, NOBODY, "Ctrl-C", "trl-C|ctrl-c|Aborted!", r"hpcddp: Ctrl-C|Sending Ctrl-C to processes|Press Ctrl-C again|^Aborted!$", _AGAIN),
    Row("none", END, NOBODY, "line 9: 4711 Killed (bash)", "Killed|Segmentation fault|Aborted|Bus error|Illegal instruction|Terminated|loating point exception|loating exception", r"^(?:\S+: line \d+: +\d+ +)?(?P<signal>Killed|Segmentation fault|Aborted|Bus error|Illegal instruction|Terminated|Floating point exception)(?: +\(core dumped\))?(?: {2,}.*)?$"),
)  # fmt: skip

#: Class -> whose turn it is, and what to type, where a signal alone says so.
OF_SIGNALS = {
    "crash": (PROGRAM, _NATIVE),
    "host-memory": (REQUEST, _MEMORY),
    "killed": (SENDER, _WHO_KILLED),
    "disk-full": (DATA, _SPACE),
    "limits": (MACHINE, "ulimit -a on the node: the limit of CPU time"),
    "walltime": (
        REQUEST,
        "the warning before the end (signal in the job file, --signal of Slurm) ends a program that does not catch it: hpcddp.runtime does, or a handler of your own",
    ),
    "interrupted": (NOBODY, _AGAIN),
}

#: A signal that ended a rank -> the class.
CLASS_OF_SIGNAL = {
    2: "interrupted",
    **dict.fromkeys((4, 6, 7, 8, 11), "crash"),
    9: "host-memory",
    **dict.fromkeys((10, 12), "walltime"),
    24: "limits",
    25: "disk-full",
}
#: What to type where a rank ended with a status, and nothing says why.
NO_WORD = "its log has no word of why: print the reason before the exit"

#: A line that no row is compared with: it may hold any row's words, and nothing is wrong.
NOISE = re.compile(
    r"\bNCCL (INFO|TRACE)\b|\[c10d\] The hostname of the client socket"
    r"|FutureWarning|UserWarning|DeprecationWarning|error_file: <N/A>|Sending process \d+ closing signal"
)
