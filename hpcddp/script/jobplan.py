"""A decided job: every value that a template may print. `plan_job` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpcddp.script.container import Container
from hpcddp.script.handling import Handling
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec
from hpcddp.units import format_walltime


class Starter(NamedTuple):
    """What starts processes on the nodes: its program, where an MPI brings it and not the scheduler, and the signal
    that it survives and hands to all ranks (seen with each; for PALS it is its manual's word)."""

    program: str
    passes_on: str


STARTERS = {
    "openmpi": Starter("mpirun", "USR1"),  # TERM: the ranks are dead half a second later
    "mpich": Starter("mpiexec", "USR1"),  # USR2 kills it
    "intelmpi": Starter("mpiexec.hydra", "USR1"),  # its mpirun is a script that dies of any, and leaves the ranks
    "pals": Starter("mpiexec", "USR1"),
    "srun": Starter("", "USR1"),  # TERM: the ranks are killed at once
}


class Origin(NamedTuple):
    """The process that plans, as far as its script needs it. `cpus` are this machine's: the node of the local site."""

    python: str
    version: str
    created_by: str
    source_root: str | None = None
    cpus: int = 1


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One decided job. Templates print these values as they stand; `remarks` are for stderr."""

    site: Site
    spec: JobSpec
    origin: Origin
    name: str
    queue: str
    account: str
    account_option: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_node: int
    cpus_per_rank: int
    threads_per_rank: int
    mem_gb: int
    walltime_s: int
    launcher: str
    starter: str
    modules: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    pythonpath: tuple[str, ...]
    python: str
    run_dir: str
    global_batch: int | None
    command: tuple[str, ...]
    words: Mapping[str, str]
    chunk: tuple[str, ...]
    handling: Handling
    container: Container
    gpu_order: str
    bind: str
    directives: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def walltime(self) -> str:
        """`HH:MM:SS`."""
        return format_walltime(self.walltime_s)

    @property
    def torchrun(self) -> bool:
        """Whether torchrun makes the ranks, so that the starter starts one process per node."""
        return self.launcher == "torchrun"

    @property
    def processes_per_node(self) -> int:
        """What the starter starts on each node."""
        return 1 if self.torchrun else self.ranks_per_node

    @property
    def processes(self) -> int:
        """What the starter starts in all."""
        return self.nodes * self.processes_per_node

    @property
    def cpus_per_process(self) -> int:
        """CPUs of each process that the starter starts."""
        return self.cpus_per_rank * self.ranks_per_node if self.torchrun else self.cpus_per_rank

    @property
    def starter_program(self) -> str:
        """The program that starts the processes, where an MPI brings it and not the scheduler; else empty."""
        return STARTERS[self.starter].program if self.starter else ""

    @property
    def passes_on(self) -> str:
        """The signal that the script gives the launcher when one came to it; "" where none would reach the ranks alive.

        torchrun ends at every signal: at TERM after its ranks, to which it leaves 30 seconds, at others before them.
        """
        if self.torchrun:
            return "" if self.starter else "TERM"
        return STARTERS[self.starter].passes_on

    @property
    def starter_template(self) -> str:
        """The partial that prints the starter's line."""
        return f"launchers/{self.starter}.j2"

    @property
    def queue_word(self) -> str:
        """What stands where the queue's name goes; "" where none is printed. A PBS reservation is a queue."""
        if self.site.scheduler == "pbs" and self.handling.reservation:
            return self.handling.reservation.partition(".")[0]
        return "" if self.site.queue_option == "none" else self.queue

    @property
    def total_cpus(self) -> int:
        """CPUs of all nodes, where a job is asked for as a whole."""
        return self.nodes * self.cpus_per_node

    @property
    def total_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def total_mem_gb(self) -> int:
        """Memory of all nodes."""
        return self.nodes * self.mem_gb

    @property
    def hostfile(self) -> str:
        """The variable with the name of the launcher's host file; "" where the launcher asks the scheduler itself."""
        if self.site.scheduler == "gridengine":
            return "hostfile" if self.nodes > 1 else ""
        return "PBS_NODEFILE" if self.site.scheduler == "pbs" else ""

    @property
    def warn_after_s(self) -> int:
        """When the script itself warns the ranks, seconds after its start; 0: never, or Slurm does it."""
        return self.walltime_s - self.handling.signal_s if self.handling.signal_s and self.starter != "srun" else 0

    @property
    def master_addr(self) -> bool:
        """Whether the script looks for the first host: where the scheduler lists it, where torchrun has to be told, and
        where ranks meet on another network than that of the hosts' names."""
        listed = self.site.scheduler == "pbs" or (self.site.scheduler == "gridengine" and self.nodes > 1)
        wanted = listed or (self.nodes > 1 and (self.torchrun or self.site.rendezvous.suffix != ""))
        return wanted and "MASTER_ADDR" not in dict(self.env)

    @property
    def prepend(self) -> tuple[tuple[str, str], ...]:
        """Folders that go before what a variable holds."""
        return tuple(self.site.prepend.items())

    @property
    def exported(self) -> tuple[str, ...]:
        """What the job's script exports beside PATH and HPCDDP_*: a launcher that forwards nothing has to name it."""
        names = ["PYTHONPATH"] if self.pythonpath else []
        names += [*self.site.prepend, "OMP_NUM_THREADS", *(name for name, _ in self.env if name != "OMP_NUM_THREADS")]
        if self.gpu_order:
            names.append("CUDA_VISIBLE_DEVICES")
        if self.master_addr:
            names.append("MASTER_ADDR")
        names += [name for name, _ in self.site.rendezvous.variables] if self.nodes > 1 else []
        if self.spec.stage_in:
            names.append("HPCDDP_STAGED")
        if self.container.runtime in {"apptainer", "singularity"}:
            names += ["APPTAINERENV_PREPEND_PATH", "SINGULARITYENV_PREPEND_PATH"]
        return tuple(names)

    @property
    def exported_if_set(self) -> tuple[str, ...]:
        """Variables that modules may have set."""
        return tuple(n for n in ("LD_LIBRARY_PATH", *self.site.launcher.forward) if n not in self.exported)

    def single(self) -> JobPlan:
        """One process on one node, in the same container: what asks about the run does so."""
        plain = replace(self.handling, signal_s=0)
        return replace(self, launcher="srun", nodes=1, ranks_per_node=1, cpus_per_rank=1, bind="", handling=plain)

    def per_node(self) -> JobPlan:
        """The same nodes with one process each and no container: what prepares a node runs so."""
        plain = replace(self.handling, signal_s=0)
        cpus = self.cpus_per_rank * self.ranks_per_node
        return replace(
            self,
            launcher=self.starter,
            ranks_per_node=1,
            cpus_per_rank=cpus,
            bind="",
            container=Container(),
            handling=plain,
        )
