"""Every row of the table names its class by a real line, and no line of a consequence, or of noise, is a cause."""

from __future__ import annotations

import re

import pytest

from hpcddp.diagnose.job_record import judge_record
from hpcddp.diagnose.rows import CLASSES, LOST, NOISE, RECORD, ROWS, Row

LINES = {
    "walltime": [
        "slurmstepd: error: *** JOB 3 ON node1 CANCELLED AT 2026-11-26T06:44:49 DUE TO TIME LIMIT ***",
        "=>> PBS: job killed: walltime 26 exceeded limit 10",
        "timeout: sending signal TERM to command 'mpirun'",
        "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
        "time limit of 25 s reached",
        "hpcddp: unfinished: step 900 (deadline)",
        "hpcddp: the script ends here: the run stopped (deadline)",
    ],
    "killed": [
        "=>> PBS: job killed: node 1 (node2) requested job die, code 15009",
        "slurmstepd: error: *** JOB 9 ON node3 CANCELLED AT 2026-11-26T06:46:19 DUE TO PREEMPTION ***",
        "srun: error: Node failure on node4",
        "slurmstepd: error: *** JOB 8 ON node1 CANCELLED AT 2026-11-26T06:46:18 ***",
        "hpcddp: the first cause: node3 is silent since step 6 (rank 2)",
        "PRTE has lost communication with a remote daemon.",
        "W1125 18:55:19.846000 1851 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal, shutting down",
        "Abort is in progress...hit ctrl-c again to forcibly terminate",
        "hpcddp: SIGTERM came: each rank gets it",
        "hpcddp: the script ends here: the run stopped (SIGTERM)",
    ],
    "host-memory": [
        "slurmstepd-node2: error: StepId=8.0 exceeded memory limit (990330880 > 943718400), being killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.",
        "srun: error: node2: task 3: Out Of Memory",
        "[12345.6] Memory cgroup out of memory: Killed process 4711 (python) total-vm:12345kB",
        "slurmstepd: error: Exceeded job memory limit",
        "Some of your processes may have been killed by the cgroup out-of-memory handler.",
        "RuntimeError: DataLoader worker (pid 123) is killed by signal: Killed. ",
        "  what():  std::bad_alloc",
        "ImportError: libtorch_cpu.so: failed to map segment from shared object",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 128. TiB for an array with shape (17592186044416,)",
    ],
    "unfit": [
        "hpcddp: no rank was started: node3 is unfit, full shared memory: /dev/shm has room for 1 MiB",
        "hpcddp: no rank was started: the launch is unfit: rank 2 of 4 did not come",
    ],
    "launcher": [
        "At least one pair of MPI processes are unable to reach each other for",
        "srun: error: Unable to allocate resources: Invalid account or account/partition combination specified",
        "[mpiexec@login] ui_cmd_cb (mpiexec/pmiserv_pmci.c:51): Launch proxy failed.",
        "There are not enough slots available in the system to satisfy the 4",
        "prterun has detected an attempt to run as root.",
        "[mpiexec@node1] Error: Unable to run bstrap_proxy on node7 (pid 2353, exit code 65280)",
        "ssh: connect to host node7 port 22: Connection refused",
        "ORTE was unable to reliably start one or more daemons.",
        "The PMIx server's listener thread failed to start. We cannot",
        "[mpiexec@node1] HYDU_sock_connect (lib/utils/sock.c:110): unable to get host address for node7 (1)",
        "srun: error: Unable to create step for job 7: More processors requested than permitted",
        "srun: Job step creation temporarily disabled, retrying (Requested nodes are busy)",
        "srun: error: Only allocated 2 nodes asked for 8",
        "Abort(1090831) on node 0 (rank 0 in comm 0): Fatal error in internal_Init: Other MPI error, error stack:",
    ],
    "command": [
        "hpcddp: rank 0 on node1: cannot run './run_train.sh': No such file or directory",
        "sh: 1: orted: not found",
        "env: 'pyhton3.12': No such file or directory",
        "job.sh: line 12: syntax error: unexpected end of file",
        "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for 'cuda/99'",
        "-bash: ./train.sh: /bin/bash^M: bad interpreter: No such file or directory",
        "[proxy:0@node1] HYDU_create_process (lib/utils/launch.c:73): execvp error on file /x/python (No such file or directory)",
        "prterun was unable to launch the specified application as it could not",
        "slurmstepd: error: execve(): /apps/envs/dl/bin/python: No such file or directory",
        "/opt/venv/bin/python3: can't open file '/home/user/trian.py': [Errno 2] No such file or directory",
        "job.sh: line 9: mpirun: command not found",
        "job.sh: line 9: /opt/dl/bin/python: No such file or directory",
    ],
    "permission": [
        "slurmstepd: error: execve(): ./train.sh: Permission denied",
        "PermissionError: [Errno 13] Permission denied: '/scratch/x'",
        "job.sh: line 9: ./train.sh: Permission denied",
    ],
    "import": [
        "ERROR: No matching distribution found for einops-ext==9.9",
        "/usr/bin/python3: No module named train",
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: Using `low_cpu_mem_usage=True` requires Accelerate",
    ],
    "singletons": [
        'The application appears to have been direct launched using "srun", but OMPI was not built with SLURM\'s PMI support',
        "rank 0 of 1",
        "<frozen importlib._bootstrap>:241: RuntimeWarning: suspicious MPI execution environment",
    ],
    "arguments": [
        "work.py: error: --mode needs --bad",
        "job.sh: line 8: LEARNING_RATE: unbound variable",
        "Error: No such option: --learning-rate",
        "FATAL Flags parsing error: Unknown command line flag 'lrr'. Did you mean: lr ?",
        "train.py: error: unrecognized arguments: --lrr 0.1",
        '[mpiexec@node1] match_arg (lib/utils/args.c:166): unrecognized argument "foo"',
        "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--lrr', '0.1']",
    ],
    "shm": [
        "ERROR: Unexpected bus error encountered in worker. This might be caused by out of shared memory (shm).",
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1376_0>: No space left on device (28)",
        "Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888)",
    ],
    "crash": [
        "RuntimeError: DataLoader worker (pid 123) is killed by signal: Segmentation fault. ",
        "Fatal Python error: Segmentation fault",
        "terminate called after throwing an instance of 'std::runtime_error'",
        "what():  bad magic in block 12 of index file",
        "free(): invalid pointer",
        "python: kernel.cpp:12: void run(int): Assertion `n > 0' failed.",
        "fastops: check_rows: n=1024 is not a multiple of 48, aborting",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    ],
    "exception": [
        "Abort(604125710) on node 1 (rank 1 in comm 0): Fatal error in internal_Recv: Message truncated, error stack:",
        "[node1:00071] *** An error occurred in MPI_Recv",
        "SyntaxError: invalid syntax",
        "RuntimeError: DataLoader worker (pid 1459) exited unexpectedly with exit code 12. Details are lost",
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: invalid device ordinal",
        "RuntimeError: Found no NVIDIA driver on your system.",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000",
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    ],
    "library": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "./halo: error while loading shared libraries: libmpi.so.40: cannot open shared object file: No such file",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "ImportError: /lib/libc.so.6: version `GLIBC_2.38' not found (required by /x/textio.so)",
        "RuntimeError: cannot load MPI library",
    ],
    "limits": [
        "=>> PBS: job killed: ncpus 3.87 exceeded limit 1 (sum)",
        "node1:12:12 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
        "OSError: [Errno 24] Too many open files: '/data/part17'",
        "RuntimeError: can't start new thread",
    ],
    "collective-mismatch": [
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(…)",
        "RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:454] op.preamble.length <= op.nbytes. 4000 vs 28",
    ],
    "hang": [
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 12000 ms",
        "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0",
        "[Rank 4] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE) ran for 600067 ms",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete",
        "hpcddp: the first cause: no rank gets on since step 6; rank 1 on node2 stands at train.py:41",
        "hpcddp: the ranks have waited for each other for 600 s, at different lines: rank 1, after 25 collectives, at a.py:9",
    ],
    "early-exit": ["hpcddp: the first cause: rank 1 on node2 ended with status 0 while others still trained"],
    "rendezvous": [
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500,"
        " code: -98, name: EADDRINUSE, message: address already in use",
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
        "[c10d] The IPv6 network addresses of (gpu-a012, 29500) cannot be retrieved (gai error: -3 - Temporary failure)",
        "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (node1, 29500).",
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set",
    ],
    "checkpoint": [
        "RuntimeError: Error(s) in loading state_dict for DistributedDataParallel:",
        "EOFError (torch.load)",
        "_pickle.UnpicklingError: Weights only load failed.",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    ],
    "disk-full": [
        "OSError: 2000000 requested and 262128 written",
        "OSError: [Errno 28] No space left on device",
        "OSError: [Errno 122] Disk quota exceeded",
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 9450560 vs 9450452",
    ],
    "network": [
        "fatal: unable to access 'https://example.org/models.git/': Could not resolve host: example.org",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
        "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
    ],
    "file-missing": [
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.npy'",
        "RuntimeError: Parent directory /scratch/u123/ckpt does not exist.",
    ],
    "exit-status": ["hpcddp: this shell is in no allocation\nhint: hpcddp launch --here -- COMMAND"],
    "interrupted": [
        "KeyboardInterrupt",
        "srun: sending Ctrl-C to StepId=18.0",
        "[mpiexec@node1] Sending Ctrl-C to processes as requested",
    ],
}
#: What schedulers' records, and a run's state, say.
RECORDS = [
    ("walltime", "Job run at Sat Nov 21 at 01:44 on (node001:ncpus=1) and exceeded resource walltime; exit status -29"),
    ("walltime", "TIMEOUT: TimeLimit"),
    ("walltime", "deadline; checkpoint at step 40"),
    ("killed", "NODE_FAIL: NodeDown"),
    ("killed", "CANCELLED by 1000 on node1"),
    ("killed", "Job run at Sat Nov 21 at 02:15 on (node001:ncpus=2) and terminated by alice@pbs1; exit status 271"),
    ("host-memory", "OUT_OF_MEMORY on node1"),
]
FOLLOWS = [
    "RuntimeError: [/gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.1.0.1]:4495. This is typically caused by",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:1970, remote process exited or there was a network error",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.",
    "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly",
    "KeyError: Caught KeyError in DataLoader worker process 1.",
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "slurmstepd: error: *** STEP 5.0 ON node1 CANCELLED AT 2026-11-26T06:45:29 ***",
    "srun: Job step aborted: Waiting up to 12 seconds for job step to finish.",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
]
NOTHING = [
    "node1:1254:1254 [0] NCCL INFO ncclOsDlopen(libnccl-env.so) failed: libnccl-env.so: cannot open shared object file",
    "[W1125 18:47:19.4 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
    "W1125 18:47:07.8 1197 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 1203 closing signal SIGTERM",
]


def first(line: str) -> Row | None:
    return next((row for row in ROWS if row.level != RECORD and row.match(line)), None)


@pytest.mark.parametrize(("cause", "line"), RECORDS)
def test_a_record_has_the_class_of_its_row(cause, line):
    assert judge_record(line, None).class_ == cause


@pytest.mark.parametrize(("cause", "line"), [(cause, line) for cause, lines in LINES.items() for line in lines])
def test_a_line_has_the_class_of_the_first_row_that_fits_it(cause, line):
    assert first(line).cause == cause


def test_every_row_that_is_a_cause_fits_a_line_here_first_and_has_a_remedy():
    seen = {first(line) for lines in LINES.values() for line in lines}
    seen |= {row for row in ROWS if row.level == RECORD and any(row.match(line) for _, line in RECORDS)}
    causes = [row for row in ROWS if row.cause != "none"]
    assert [row.shows for row in causes if row not in seen and row.level != LOST] == []
    assert [row.shows for row in causes if not row.remedy and row.level != LOST] == []
    assert {row.cause for row in ROWS} <= {*CLASSES}


@pytest.mark.parametrize("line", FOLLOWS)
def test_what_follows_from_another_rank_is_no_cause(line):
    assert first(line).level == LOST


@pytest.mark.parametrize("line", NOTHING)
def test_noise_says_nothing(line):
    assert NOISE.search(line)


def test_words_that_lines_are_chosen_by_have_no_digits_but_where_a_number_is_the_message():
    """The reader compares lines without their digits."""
    assert {row.cause for row in ROWS if row.level != RECORD and re.search(r"\d", row.key)} == {"singletons"}
