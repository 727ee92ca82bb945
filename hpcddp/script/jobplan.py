"""A decided job: every value that a template may print, also as JSON, and rank by rank. `plan_job` makes it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hpcddp.ranks.launcher import EXPORTED_ALWAYS, FromShell, Launcher, LaunchRequest
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.ranks.rendezvous import port_in_shell
from hpcddp.record import Record
from hpcddp.runs.command import NAME, identify_command
from hpcddp.runs.folder import RUNS
from hpcddp.runs.jsonfile import SCHEMA
from hpcddp.runs.start import RunRequest
from hpcddp.runs.state import PlanFile
from hpcddp.schedulers.job_id import parse_id
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import LONGEST_NAME
from hpcddp.script.container import Container
from hpcddp.script.fields import module_lines
from hpcddp.script.scheduler_options import SchedulerOptions, job_name
from hpcddp.script.site import Queue, Site
from hpcddp.script.spec import JobSpec
from hpcddp.sweep import OF_BATCH, find_placeholders
from hpcddp.units import format_walltime

if TYPE_CHECKING:
    from hpcddp.ranks.launcher import Words

#: `JobPlan.rank_maker` of a command that makes ranks and is no known agent.
SOME_COMMAND = "the command"
#: The signal that `signal` of a job file asks for.
WARNING_SIGNAL = "USR1"


class PlannedBy(Record):
    """The process that plans, as far as its script needs it. `cpus` are this machine's: the node of the local site.
    `stamp`: of a --fresh that is typed now."""

    python: str
    version: str
    created_by: str
    source_root: str | None = None
    cpus: int = 1
    stamp: str = ""


class JobPlan(Record):
    """A decided job. Templates print these values as they stand; `remarks` are for stderr.

    `allocated_nodes`: with spare ones. `rank_maker`: what makes the ranks of each node, if the command itself does.
    `data_size`: ranks that see different samples. `slots`: places
    on each node of an allocation; None: those of the request. `needs_gpus`: ranks that see no GPU are refused.
    `by_hand`: a person starts the script in an allocation. `scratch`: the run is removed at its end. `fewer_nodes`: the
    numbers of nodes on which ranks may be started again.
    """

    site: Site
    spec: JobSpec
    planned_by: PlannedBy
    name: str
    queue: str
    queue_profile: Queue
    account: str
    account_option: str
    nodes: int
    allocated_nodes: int
    ranks_per_node: int
    gpus_per_node: int
    gpus_per_rank: int
    cpus_per_node: int
    cpus_per_rank: int
    threads_per_rank: int
    mem_gb: int
    walltime_s: int
    launcher: str
    outer_launcher: str
    modules: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    pythonpath: tuple[str, ...]
    python: str
    run_dir: str
    global_batch: int | None
    data_size: int
    command: tuple[str, ...]
    words: Mapping[str, str]
    chunk: tuple[str, ...]
    options: SchedulerOptions
    container: Container
    gpu_order: str
    bind: str
    directives: tuple[str, ...]
    remarks: tuple[str, ...]
    rank_maker: str = ""
    slots: int | None = None
    needs_gpus: bool = True
    by_hand: bool = False
    scratch: bool = False
    fewer_nodes: tuple[int, ...] = ()

    @property
    def name_limit(self) -> int:
        """The longest job name that the scheduler takes, in characters."""
        limits = find_scheduler(self.site.scheduler).directives.name_limits
        return limits.get(self.site.size) or limits.get("") or LONGEST_NAME

    @property
    def job_name(self) -> str:
        """The job's name for the scheduler: the run's name, if the scheduler takes that."""
        return job_name(self.name, self.name_limit)

    @property
    def home_output(self) -> str | None:
        """The directive by which the job's output lies in the home folder."""
        pattern = find_scheduler(self.site.scheduler).directives.home_output
        return next((text for text in self.directives if pattern and re.fullmatch(pattern, text)), None)

    def name_output(self, job: str, folder: str, home: str) -> str:
        """The file with the output of this job, submitted from `folder`; "" where the scheduler fills in its name."""
        name = self.options.output or find_scheduler(self.site.scheduler).directives.output_name.format(
            name=self.job_name, number=parse_id(job).number
        )
        if self.options.array or not re.fullmatch(r"[\w.+/-]+", name, re.ASCII):
            return ""
        return os.path.join(home if self.home_output and not self.options.output else folder, name)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def agent_port(self) -> str:
        """The port where the agents of several nodes meet, made of the script's `launch_number`."""
        return port_in_shell("launch_number")

    @property
    def request(self) -> RunRequest:
        """The request of the run at the start of the job."""
        fresh = self.planned_by.stamp if self.spec.fresh else ""
        return RunRequest(self.run_dir, identify_command(self.command), fresh, self.spec.resume is not None)

    @property
    def walltime(self) -> str:
        """`HH:MM:SS`."""
        return format_walltime(self.walltime_s)

    @property
    def by_node_agents(self) -> bool:
        """Node agents make the ranks; the outer launcher starts one process per node."""
        return LAUNCHERS[self.launcher].is_node_agent

    @property
    def makes_ranks(self) -> str:
        """The maker of the ranks, for people: the launcher, or the command itself."""
        return self.rank_maker or self.launcher

    @property
    def exec_options(self) -> tuple[str, ...]:
        """The options of `hpcddp exec`: what only the plan knows."""
        options = ["--nodes", str(self.nodes), "--ranks-per-node", str(self.ranks_per_node)] if self.rank_maker else []
        if self.global_batch:
            options += ["--global-batch", str(self.global_batch)]
            if self.spec.max_micro_batch and not set(OF_BATCH).isdisjoint(find_placeholders(self.command)):
                options += ["--max-micro-batch", str(self.spec.max_micro_batch)]
        if self.gpus_per_node and self.needs_gpus:
            options += ["--gpus-per-node", str(self.gpus_per_node)]
        return tuple(options)

    @property
    def outer(self) -> Launcher | None:
        """The row of the launcher that the script calls; None if the script starts the one node agent itself."""
        return LAUNCHERS[self.outer_launcher] if self.outer_launcher else None

    @property
    def processes_per_node(self) -> int:
        """Processes that the outer launcher starts on each node."""
        return 1 if self.by_node_agents else self.ranks_per_node

    @property
    def processes(self) -> int:
        """Processes that the outer launcher starts in all."""
        return self.nodes * self.processes_per_node

    @property
    def cpus_per_process(self) -> int:
        """CPUs of each process that the outer launcher starts."""
        return self.cpus_per_rank * self.ranks_per_node if self.by_node_agents else self.cpus_per_rank

    @property
    def outer_program(self) -> str:
        """The outer launcher's program where an MPI brings it, so that the script has to find it; else empty."""
        return "" if self.outer is None or self.outer.of_scheduler else self.outer.program

    @property
    def host_line(self) -> str:
        """A line of the launcher's file of hosts, for the script's `$host`."""
        return self.outer.hosts[0].format(host="$host", each=self.processes_per_node) if self.outer else ""

    @property
    def launch_line(self) -> Iterator[Words]:
        """The outer launcher's command up to what it starts: words, grouped as the script's lines are."""
        if self.outer and self.outer.line:
            yield from filter(None, self.outer.line(self._as_request()))

    @property
    def node_agent_line(self) -> Iterator[Words]:
        """The node agent's command up to the ranks' command; nothing where no node agents make the ranks."""
        row = LAUNCHERS[self.launcher]
        if row.is_node_agent and row.line and not self.rank_maker:
            yield from filter(None, row.line(self._as_request()))

    @property
    def start_line(self) -> Iterator[Words]:
        """All that stands before `hpcddp exec`, in the same form: launcher, container, node agent."""
        yield from self.launch_line
        yield from self.container.line
        yield from self.node_agent_line

    def _as_request(self) -> LaunchRequest:
        """The LaunchRequest of this plan, which has all of its names."""
        return cast("LaunchRequest", self)

    @property
    def module_lines(self) -> list[tuple[str, ...]]:
        """The arguments of each call of `module`."""
        return module_lines(self.modules)

    @property
    def oversubscribe(self) -> bool:
        """There may be more processes than slots: on this machine, and in an allocation that has fewer."""
        few = self.slots is not None and self.slots < self.processes_per_node
        return few or find_scheduler(self.site.scheduler).this_machine

    @property
    def launcher_options(self) -> tuple[str, ...]:
        """The site's own options of the launcher; that which shows each rank one GPU shows it all of its own."""
        one, each = f"{find_scheduler(self.site.scheduler).gpus_per_rank_option}=", self.gpus_per_rank
        return tuple(f"{one}{each}" if word == f"{one}1" else word for word in self.site.launcher.options)

    @property
    def container_options(self) -> tuple[Words, ...]:
        """The options with which the launcher itself starts each process in the container."""
        return self.container.launcher_options

    @property
    def supervised(self) -> bool:
        """The script ends in the supervisor, which starts the launcher; else in the bare launcher line."""
        return self.spec.supervise is not False

    @property
    def supervisor(self) -> Words:
        """The Python of the supervisor: the ranks' own, but outside of a container."""
        return (self.planned_by.python if self.container.runtime else FromShell("$HPCDDP_PYTHON"),)

    @property
    def supervisor_line(self) -> Iterator[Words]:
        """The options of `hpcddp supervise`, which has no other word for them, grouped as the script's lines are."""
        spec, row = self.spec, find_scheduler(self.site.scheduler)
        launcher = self.outer_launcher or self.launcher
        yield (*self.run_option, "--scheduler", row.name, "--launcher", launcher, "--site", self.site.name)
        has_walltime = self.by_hand or (row.this_machine and spec.walltime_s is not None)
        signal = _option("--signal", self.warns_s and format_walltime(self.warns_s))
        yield _option("--walltime", self.walltime if has_walltime else "") + signal
        yield _option("--chain", self.options.chain)
        yield tuple(f"--submit-option={word}" for word in self.submit_options if self.options.chain)
        flags = {"--resume": self.request.takes_words, "--scratch": self.scratch}
        yield _option("--fresh", self.request.fresh) + tuple(word for word, is_so in flags.items() if is_so)
        yield _option("--max-restarts", spec.max_restarts) + _option("--fewer-nodes", _list_nodes(self.fewer_nodes))
        stall_limit = _option("--stall-limit", spec.stall_limit_s and format_walltime(spec.stall_limit_s))
        yield stall_limit + _option("--preflight", spec.preflight)
        yield _option("--notify", spec.notify and spec.notify.to_json())
        for name, values in (spec.sweep or {}).items():
            yield tuple(word for value in values for word in ("--sweep", f"{name}={value}"))

    @property
    def run_option(self) -> Words:
        """The run, which the script names once: by its name, or by the folder where that is not below `runs/`."""
        folder, name = os.path.split(self.run_dir)
        return (
            _option("--name", name) if folder == RUNS and NAME.fullmatch(name) else _option("--run-dir", self.run_dir)
        )

    @property
    def runs_folder(self) -> str:
        """The folder of the run's own."""
        return os.path.dirname(self.run_dir) or "."

    @property
    def submit_options(self) -> tuple[str, ...]:
        """Options of the submit command itself: an account that no directive carries."""
        return (self.site.account.option, self.account) if self.account and not self.account_option else ()

    @property
    def stage_line(self) -> Iterator[Words]:
        """The launcher's command up to what copies data to each node: one process per node, in no container."""
        if self.outer and self.outer.line:
            yield from filter(None, self.outer.line(self.per_node()._as_request()))

    @property
    def queue_word(self) -> str:
        """The word where the queue's name goes, which is another word where the site has one; "" where none is
        printed. To PBS a reservation is a queue."""
        if self.options.reservation and find_scheduler(self.site.scheduler).directives.reservation_is_queue:
            return self.options.reservation.partition(".")[0]
        return self.queue_profile.partition or ("" if self.site.queue_option else self.queue)

    @property
    def qos(self) -> str:
        """The quality of service; "" where none is printed."""
        return self.queue_profile.qos or ("" if self.site.queue_option in {"", "none"} else self.queue)

    @property
    def gpu_type(self) -> str:
        """The scheduler's word for the GPUs, the job's or the queue's; "" where any will do."""
        return self.spec.gpu_type or self.queue_profile.gpu_type

    @property
    def total_cpus(self) -> int:
        """CPUs of all nodes, where a job is asked for as a whole."""
        return self.allocated_nodes * self.cpus_per_node

    @property
    def total_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.allocated_nodes * self.gpus_per_node

    @property
    def total_mem_gb(self) -> int:
        """Memory of all nodes."""
        return self.allocated_nodes * self.mem_gb

    @property
    def hostfile(self) -> str:
        """The variable with the name of the launcher's host file; "" where the launcher asks the scheduler itself."""
        variables = find_scheduler(self.site.scheduler).variables
        return variables.hostfile if self.nodes > 1 or variables.hostfile_alone else ""

    @property
    def warns_s(self) -> int:
        """When the supervisor warns the ranks, seconds before the end; 0: never, or the scheduler does it. That would
        signal node agents as well, which end at it."""
        by_scheduler = self.outer is not None and self.outer.of_scheduler and not self.by_node_agents
        return 0 if by_scheduler else self.options.signal_s

    @property
    def master_addr(self) -> bool:
        """The script looks for the first host: the scheduler lists it, node agents need it, or ranks meet on another
        network than that of the hosts' names."""
        wanted = self.hostfile or (self.nodes > 1 and (self.by_node_agents or self.site.rendezvous.suffix != ""))
        return bool(wanted) and "MASTER_ADDR" not in dict(self.env)

    @property
    def prepend(self) -> tuple[tuple[str, str], ...]:
        """Folders that go before what a variable holds."""
        return tuple(self.site.prepend.items())

    @property
    def exported(self) -> tuple[str, ...]:
        """Variables that the script exports besides PATH and HPCDDP_*: a launcher that forwards nothing names them."""
        names = ["PYTHONPATH"] if self.pythonpath else []
        names += [*self.site.prepend, "OMP_NUM_THREADS", *(name for name, _ in self.env if name != "OMP_NUM_THREADS")]
        if self.gpu_order:
            names.append("CUDA_VISIBLE_DEVICES")
        if self.master_addr:
            names.append("MASTER_ADDR")
        names += [name for name, _ in self.site.rendezvous.variables] if self.nodes > 1 else []
        if self.spec.stage_in:
            names.append("HPCDDP_STAGED")
        return (*names, *self.container.path_variables)

    @property
    def exported_always(self) -> tuple[str, ...]:
        """Variables that the supervisor sets for the ranks."""
        fresh = ("HPCDDP_FRESH",) if self.request.fresh else ()
        return (*EXPORTED_ALWAYS, *fresh) if self.supervised else ("HPCDDP_PYTHON", "HPCDDP_RUN_DIR")

    @property
    def exported_if_set(self) -> tuple[str, ...]:
        """Variables that modules may have set."""
        return tuple(n for n in ("LD_LIBRARY_PATH", *self.site.launcher.forward) if n not in self.exported)

    def per_node(self) -> JobPlan:
        """The same nodes with one process each and no container: what prepares a node runs so."""
        cpus = self.cpus_per_rank * self.ranks_per_node
        one = self._replace(launcher=self.outer_launcher, ranks_per_node=1, cpus_per_rank=cpus)
        return one._replace(bind="", container=Container())


def _option(name: str, value: object) -> Words:
    """An option with its value; nothing without one."""
    text = str(value or "")
    return (f"{name}={text}",) if text.startswith("-") else (name, text) if text else ()


def _list_nodes(numbers: tuple[int, ...]) -> str:
    """`2-4` of numbers without a gap, else `2,4`."""
    whole = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers))


# ---- the plan as JSON


def make_plan_file(plan: JobPlan) -> PlanFile:
    """The `plan.json` of a job that waits."""
    return PlanFile(
        site=plan.site.name,
        scheduler=plan.site.scheduler,
        launcher=plan.launcher,
        nodes=plan.nodes,
        ranks_per_node=plan.ranks_per_node,
        world_size=plan.world_size,
        gpus_per_node=plan.gpus_per_node,
        global_batch=plan.global_batch,
        command=list(plan.command),
    )


def plan_record(plan: JobPlan) -> dict[str, Any]:
    """The whole decision."""
    known = make_plan_file(plan)._asdict()
    del known["point"]
    return {
        "schema": SCHEMA,
        **known,
        "name": plan.name,
        "cpus_per_rank": plan.cpus_per_rank,
        "threads_per_rank": plan.threads_per_rank,
        "walltime_s": plan.walltime_s,
        "queue": plan.queue or None,
        "account": plan.account or None,
        "run_dir": plan.run_dir,
        "created_by": plan.planned_by.created_by,
        **({"gpus_per_rank": plan.gpus_per_rank} if plan.gpus_per_rank > 1 else {}),
        **({"parallel": plan.spec.parallel} if plan.spec.parallel else {}),
    }


# ---- the place of each rank


class Placement(NamedTuple):
    """A rank's place. Ranks fill a node before the next one, as every rendered launch line asks for.

    `gpu` is the device that the rank takes if it sees all of its node's; None where the job has no GPUs. `gpus` are all
    that it takes, of which that is the first.
    """

    rank: int
    node_rank: int
    local_rank: int
    gpu: int | None
    cpus: int
    gpus: tuple[int, ...] = ()


def list_placements(plan: JobPlan) -> Iterator[Placement]:
    """Every rank of the job, in order."""
    for rank in range(plan.world_size):
        yield plan_placement(plan, rank)


def plan_placement(plan: JobPlan, rank: int) -> Placement:
    """The place of one rank."""
    node_rank, local_rank = divmod(rank, plan.ranks_per_node)
    order = [int(gpu) for gpu in plan.gpu_order.split(",")] if plan.gpu_order else range(plan.gpus_per_node)
    first = local_rank * plan.gpus_per_rank
    gpus = tuple(order[n % len(order)] for n in range(first, first + plan.gpus_per_rank)) if order else ()
    return Placement(rank, node_rank, local_rank, gpus[0] if gpus else None, plan.cpus_per_rank, gpus)
