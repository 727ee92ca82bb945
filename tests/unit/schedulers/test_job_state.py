"""What became of a job, by the answers that the schedulers' commands were recorded or documented to give."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpcddp.cli import launch, sites
from hpcddp.errors import LaunchError, SchedulerError
from hpcddp.schedulers import run
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import Answer
from hpcddp.schedulers.run import ask_job_end, ask_job_state

SLURM_GONE = "slurm_load_jobs error: Invalid job id specified\n"
SGE_GONE = "Following jobs do not exist: \n41\n"


@pytest.mark.parametrize(
    ("scheduler", "answer", "state"),
    [
        ("pbs", Answer(0, "Job Id: 41.pbs1\n    job_state = R\n    queue = workq\n", ""), "running"),
        ("pbs", Answer(0, "Job Id: 41.pbs1\n    job_state = F\n", ""), "finished"),
        ("pbs", Answer(0, "<Data><Job><job_state>Q</job_state></Job></Data>", ""), "queued"),
        ("pbs", Answer(153, "", "qstat: Unknown Job Id 41.pbs1\n"), "gone"),
        ("pbs", Answer(1, "", "Connection refused\nqstat: cannot connect to server pbs1 (errno=111)\n"), None),
        ("slurm", Answer(0, "JobId=41 JobName=x\n   JobState=COMPLETING Reason=None\n", ""), "exiting"),
        ("slurm", Answer(0, "   JobState=TIMEOUT Reason=TimeLimit\n", ""), "failed"),
        ("slurm", Answer(1, "", SLURM_GONE), "gone"),
        ("slurm", Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"), None),
        ("gridengine", Answer(0, "job_number:                 41\nowner: x\n", ""), "running"),
        ("gridengine", Answer(1, "", SGE_GONE), "gone"),
        ("gridengine", Answer(1, "", "error: unable to contact qmaster\n"), None),
    ],
)
def test_the_answer_says_whether_a_job_has_ended(
    tmp_path: Path, scheduler: str, answer: Answer, state: str | None
) -> None:
    program = tmp_path / find_scheduler(scheduler).commands.state[0]
    (tmp_path / "out").write_text(answer.stdout)
    (tmp_path / "err").write_text(answer.stderr)
    told = f"cat {tmp_path}/out; cat {tmp_path}/err >&2"
    program.write_text(f'#!/bin/bash\n[ "${{!#}}" = 41 ] || exit 9\n{told}; exit {answer.status}\n')
    program.chmod(0o755)
    assert ask_job_state(scheduler, "41", {"PATH": f"{tmp_path}:/usr/bin:/bin"}) == state


def test_what_cannot_be_asked_is_not_known() -> None:
    assert ask_job_state("slurm", "41", {"PATH": "/nowhere"}) is None
    assert ask_job_state("lsf", "41", {}) is None


def test_pbs_was_recorded_to_say_that_it_knows_no_such_job(repo: Path) -> None:
    said = json.dumps(json.loads((repo / "tests/captures/pbs/arrays.json").read_text()))
    parse = find_scheduler("pbs").commands.parse_state
    assert "Unknown Job Id" in said
    assert parse(Answer(153, "", said)) == "gone"


PBS_RUNS = """\
Job Id: 41.pbs1
    job_state = R
    Resource_List.walltime = 30:00:10
    stime = Sat Nov 21 02:00:39 2026
"""


def test_the_end_of_a_pbs_job_is_its_start_and_its_walltime() -> None:
    parse = find_scheduler("pbs").commands.parse_end
    began = time.mktime((2026, 11, 21, 2, 0, 39, 0, 0, -1))
    assert parse(Answer(0, PBS_RUNS, "")) == began + 30 * 3600 + 10
    for line in PBS_RUNS.splitlines()[2:]:
        assert parse(Answer(0, PBS_RUNS.replace(line, ""), "")) is None
    assert parse(Answer(0, PBS_RUNS.replace("Sat Nov", "Sam. nov."), "")) is None


def test_an_end_that_cannot_be_asked_is_not_known() -> None:
    assert ask_job_end("pbs", "41", {"PATH": "/nowhere"}) is None
    assert ask_job_end("lsf", "41", {}) is None


def test_no_other_module_asks_a_program() -> None:
    """`hpcddp verify` starts the script's own Python, and talks with it."""
    package = Path(run.__file__).parents[1]
    asking = {
        str(path.relative_to(package)) for path in package.rglob("*.py") if "import subprocess" in path.read_text()
    }
    assert asking == {"schedulers/run.py", "verify/trials.py"}


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which sinfo, qsub and mpirun never answer, and nobody waits for them."""
    monkeypatch.setattr(run, "_PATIENCE_S", 0)
    for name in ("sinfo", "qsub", "mpirun"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 600\n")
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}


def test_a_silent_program_is_an_error_with_what_to_try(silent: dict[str, str]) -> None:
    with pytest.raises(SchedulerError, match=r"sinfo has not answered in 0 s") as error:
        run.run_program(["sinfo", "--noheader"], silent)
    assert error.value.hint == "try it by hand: sinfo --noheader"


def test_a_silent_scheduler_leaves_a_new_sites_file_to_be_filled_in(
    silent: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sites.run(sites.build_parser().parse_args(["new", "lab"]), silent) == 0
    said = capsys.readouterr()
    assert "sinfo has not answered" in said.err
    assert "# queues:" in Path(said.out.strip()).read_text()


def test_a_silent_mpirun_ends_launch_with_what_to_try(silent: dict[str, str]) -> None:
    args = launch.build_parser().parse_args(["--here", "--ranks-per-node", "2", "--dry-run"])
    args.command = ["true"]
    with pytest.raises(LaunchError, match="mpirun has not answered") as error:
        launch.run(args, silent)
    assert error.value.hint.startswith("try it by hand: ")


# scontrol show job of Slurm 22.05, recorded: while it runs, and in the SIGTERM of `scancel`
_RUNS = """JobId=6 JobName=t.sh
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-11-23T13:26:06 EndTime=2026-11-23T13:31:06 Deadline=N/A
"""
_CANCELLED = _RUNS.replace("RUNNING", "COMPLETING").replace(
    "EndTime=2026-11-23T13:31:06", "EndTime=2026-11-23T13:26:08"
)


def test_slurm_says_when_a_running_job_ends_and_of_one_that_is_being_ended_nothing() -> None:
    commands = find_scheduler("slurm").commands
    end = time.mktime(time.strptime("2026-11-23 13:31:06", "%Y-%m-%d %H:%M:%S"))
    assert commands.parse_end(Answer(0, _RUNS, "")) == int(end)
    assert commands.parse_end(Answer(0, _RUNS.replace("EndTime=2026-11-23T13:31:06", "EndTime=Unknown"), "")) is None
    assert commands.parse_end(Answer(0, _CANCELLED, "")) is None
    assert commands.parse_end(Answer(1, "", "slurm_load_jobs error: Invalid job id specified")) is None


@pytest.mark.parametrize(
    ("old", "new", "is_taken"),
    [
        ("", "", False),
        ("Reason=None", "Reason=TimeLimit", True),
        ("Deadline=N/A", "Deadline=N/A\n   PreemptEligibleTime=2026-11-23T13:26:06 PreemptTime=None", False),
        ("Deadline=N/A", "Deadline=N/A\n   PreemptTime=2026-11-23T13:26:08", True),
        ("JobState=COMPLETING", "JobState=NODE_FAIL", True),
        ("Restarts=0", "Restarts=1", False),
        ("Restarts=0", "Restarts=2", True),
    ],
)
def test_slurm_says_whether_it_takes_the_nodes_away_itself(old: str, new: str, is_taken: bool) -> None:
    started_again = {"SLURM_RESTART_COUNT": "1"}
    answer = Answer(0, _CANCELLED.replace(old, new), "")
    assert find_scheduler("slurm").commands.parse_taken(answer, started_again) == is_taken


def test_slurm_counts_the_next_start_of_a_job_while_it_ends() -> None:
    requeued = _CANCELLED.replace("Restarts=0", "Restarts=1").replace("EndTime=2026-11-23T13:26:08", "EndTime=Unknown")
    assert find_scheduler("slurm").commands.parse_taken(Answer(0, requeued, ""), {})
    assert not find_scheduler("slurm").commands.parse_taken(Answer(0, _CANCELLED, ""), {})


@pytest.mark.parametrize(("substate", "is_taken"), [(42, False), (63, True), (92, False)])
def test_pbs_says_that_it_runs_a_job_again(substate: int, is_taken: bool) -> None:
    """The numbers are of OpenPBS' source: no rerun was recorded while the job ended."""
    answer = Answer(0, f"    job_state = R\n    substate = {substate}\n", "")
    assert find_scheduler("pbs").commands.parse_taken(answer, {}) is is_taken


_TWO = ("node001/0*2+node002/0*2", "(node001:ncpus=2)+(node002:ncpus=2)")


@pytest.mark.parametrize(
    ("hosts", "vnodes", "host", "names"),
    [  # recorded on OpenPBS 23.06, whose list of hosts then had node004.hpc.test
        (*_TWO, "node002.hpc.test", ("node002",)),
        (*_TWO, "node002", ("node002",)),
        ("node004/0*0", "(node004[0]:ngpus=4:ncpus=96+node004[1]:ngpus=4:ncpus=96)", "node004.hpc.test", (0, 1)),
        ("node004/0+node004/1*0+node004/2*0", "(node004[0]:ncpus=1)+(node004)+(node004[1])", "node004", (0, "", 1)),
        ("node001/0+node002/0+node001/1", "(node001:ncpus=1)+(node002:ncpus=1)+(node001:ncpus=1)", "node001", None),
        ("", "", "node003.hpc.test", ("node003",)),  # no answer
        ("", "", "10.0.0.3", ("10.0.0.3",)),
    ],
)
def test_pbs_has_names_of_its_own_for_the_hosts_of_a_job(
    hosts: str, vnodes: str, host: str, names: tuple[object, ...] | None
) -> None:
    """qstat breaks long values: a line begins with a tab then."""
    text = f"Job Id: 41.pbs1\n    exec_host = {hosts}\n    exec_vnode = {vnodes[:30]}\n\t{vnodes[30:]}\n    queue = q\n"
    found = find_scheduler("pbs").commands.parse_names(Answer(0, text if hosts else "", ""), host)
    wanted = [f"node004[{one}]" if isinstance(one, int) else one or "node004" for one in names or ("node001",)]
    assert list(found) == wanted
