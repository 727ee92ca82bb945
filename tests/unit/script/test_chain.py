"""A chain over stand-in schedulers: which attempts run, which are queued and cancelled, and what people are told.

The stand-ins only write down what was submitted; the scripts, `hpcddp supervise` and the form of state.json are real.
A chain on a real Slurm is in tests/cluster/test_chain.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcddp.errors import RequestError
from hpcddp.runs.chain import Link, decide_start
from hpcddp.runs.state import RunState

from .conftest import PLANNED_BY, plan, script

# Stands in for qsub, sbatch, qdel and scancel: numbers what it is given, and writes down folder, options and script.
_STAND_IN = """#!/bin/bash
# a stand-in, no scheduler
[ ! -e "$SERVER/refuses" ] || { echo "$(basename "$0"): no more jobs today" >&2; exit 1; }
case $0 in
*/qdel|*/scancel) rm "$SERVER/queue/${1%%.*}" && echo "$1" >> "$SERVER/cancelled" ;;
*) id=$(($(cat "$SERVER/last") + 1)); echo $id > "$SERVER/last"
   printf '%s\\n' "$PWD" "${*: -1}" "${*:1:$#-1}" > "$SERVER/queue/$id"; cat "$SERVER/banner" 2>/dev/null
   echo "$id$SUFFIX" ;;
esac
"""
# Stands in for a launcher of one rank, and for a container's runtime: runs here what it is given.
_RUN_HERE = """#!/bin/bash
while [ "$1" != "$HPCDDP_PYTHON" ]; do shift; done
echo "$(basename "$0") $4" >> "$SERVER/started"
if [ "$4" = exec ]; then while [ "$1" != -- ]; do shift; done; shift; fi
exec "$@"
"""
# One attempt: what the first line of `story` says that its ranks do. `+fold0=9`: the same of a run of the script's own,
# which is finished at step 9.
_ATTEMPT = """
import os, signal, sys
from pathlib import Path
from hpcddp.runs.folder import RunFolder, find_attempt
from hpcddp.runs.chain import record_opened
from hpcddp.runs.state import write_state
story = Path(os.environ["SERVER"], "story")
lines = story.read_text().splitlines()
story.write_text("\\n".join(lines[1:]))
status, _, step = lines[0].partition(" ")
run = find_attempt(os.environ)
said = {"killed": "unfinished", "killed-finished": "finished"}.get(status, status)
for fold in step.split("+")[1:]:
    name, _, reached = fold.partition("=")
    own = RunFolder(os.path.join(os.path.dirname(run.run.path), name)).attempt(run.name)
    record_opened(run, own.run)
    write_state(own, "finished" if reached == "9" else "unfinished", step=int(reached), epoch=0, reason="as told")
step = step.partition("+")[0]
if step:
    write_state(run, said, step=int(step), epoch=0, reason="as told")
if status.startswith("killed"):
    os.kill(os.getppid(), signal.SIGKILL)  # the script, as at the walltime
Path(os.environ["SERVER"], "variables").write_text(" ".join(os.environ))
sys.exit(status == "failed")
"""


class Ended(NamedTuple):
    status: int
    said: str


class Server:
    """A folder with stand-ins for one scheduler's commands, and what it does with the queue."""

    def __init__(self, folder: Path, scheduler: str) -> None:
        self.folder, self.scheduler = folder, scheduler
        for name in ("queue", "bin", "home", "home/sub"):
            (folder / name).mkdir()
        for name in ("mpirun", "srun", "apptainer"):
            self._program(name, _RUN_HERE)
        for name in ("qsub", "qdel", "sbatch", "scancel"):
            self._program(name, _STAND_IN)
        self.env: dict[str, str] = {}
        (folder / "last").write_text("40")
        (folder / "attempt.py").write_text(_ATTEMPT)
        (folder / "nodes").write_text("node1\n")

    def _program(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    @property
    def queue(self) -> list[int]:
        return sorted(int(path.name) for path in (self.folder / "queue").iterdir())

    def submission(self, number: int) -> list[str]:
        """Folder, script and options."""
        return (self.folder / "queue" / str(number)).read_text().splitlines()

    @property
    def state(self) -> dict:
        return json.loads((self.run_dir / "state.json").read_text())

    @property
    def run_dir(self) -> Path:
        return next(self.folder.glob("home/**/runs/long"))

    def run(self, *story: str, **asked: object) -> list[Ended]:
        """Submit the script, and run what is queued until nothing is; each job's end."""
        (self.folder / "story").write_text("\n".join(story))
        self.submit(**asked)
        ends = []
        while self.queue:
            ends.append(self._run(self.queue[0]))
        return ends

    def submit(self, **asked: object) -> None:
        command = [sys.executable, str(self.folder / "attempt.py")]
        asked = {
            "chain": "5",
            "name": "long",
            "ranks_per_node": "1",
            "launcher": "openmpi",
            **asked,
            "command": command,
        }
        text = script(f"generic-{self.scheduler}", PLANNED_BY._replace(python=sys.executable, stamp="1"), **asked)
        (self.folder / "job.sh").write_text(text)
        subprocess.run(
            ["bash", str(self.folder / "bin/qsub"), str(self.folder / "job.sh")],
            cwd=self.folder / "home",
            env={"PATH": "/usr/bin:/bin", "SERVER": str(self.folder), "SUFFIX": ""},
            check=True,
        )

    def _run(self, number: int) -> Ended:
        folder, path, _ = self.submission(number)
        (self.folder / "queue" / str(number)).unlink()
        spooled = self.folder / f"{number}.spooled"  # a server has a copy of its own
        spooled.write_text(Path(path).read_text())
        suffix = {"pbs": ".pbs1", "slurm": "", "gridengine": ""}[self.scheduler]
        env = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "SERVER": str(self.folder),
            "SUFFIX": {"slurm": ";cluster"}.get(self.scheduler, suffix),
            **dict.fromkeys(("PBS_O_WORKDIR", "SLURM_SUBMIT_DIR", "SGE_O_WORKDIR"), folder),
            **dict.fromkeys(("PBS_JOBID", "SLURM_JOB_ID", "JOB_ID"), f"{number}{suffix}"),
            **dict.fromkeys(("PBS_NODEFILE", "PE_HOSTFILE"), f"{self.folder}/nodes"),
            **self.env,
        }
        done = subprocess.run(
            ["bash", str(spooled)], env=env, cwd="/", capture_output=True, text=True, timeout=600, check=False
        )
        return Ended(done.returncode, done.stdout + done.stderr)


@pytest.fixture
def pbs(tmp_path) -> Server:
    return Server(tmp_path, "pbs")


@pytest.mark.parametrize(
    ("scheduler", "waits"),
    [
        ("pbs", "-W depend=afterany:41.pbs1"),
        ("slurm", "--parsable --dependency=afterany:41"),
        ("gridengine", "-terse -hold_jid 41"),
    ],
)
def test_a_run_goes_on_until_it_is_finished_although_an_attempt_is_killed(scheduler, waits, tmp_path):
    server = Server(tmp_path, scheduler)
    seen = []
    server_run = server._run

    def watched(number: int) -> Ended:
        end = server_run(number)
        seen.extend(server.submission(n) for n in server.queue)
        return end

    server._run = watched
    ends = server.run("unfinished 5", "killed 7", "finished 9")
    assert [end.status for end in ends] == [0, -9, 0]
    assert seen[0] == [f"{tmp_path}/home", str(next(tmp_path.glob("home/runs/long/attempts/41*/script.sh"))), waits]
    assert (server.state["status"], server.state["step"]) == ("finished", 9)
    assert (tmp_path / "cancelled").read_text().startswith("44")
    assert "attempt 3 of at most 5, from step 7" in ends[2].said


def test_a_chain_goes_on_until_the_runs_that_its_script_has_opened_are_finished(pbs):
    ends = pbs.run("done +fold0=5", "killed +fold0=9+fold1=3", "done +fold1=9", "done +fold2=9")
    assert [end.status for end in ends] == [0, -9, 0]
    assert "unfinished: run runs/fold0, step 5 (as told)" in ends[0].said
    assert "attempt 2 of at most 5, from step 5 of the runs of its script together" in ends[1].said
    assert "attempt 3 of at most 5, from step 12 of the runs of its script together" in ends[2].said
    assert "nothing is left to do: 44.pbs1 is cancelled" in ends[2].said


def test_the_same_step_twice_ends_the_chain_without_a_launch(pbs):
    ends = pbs.run("unfinished 5", "killed 5", "finished 9")
    assert [end.status for end in ends] == [0, -9, 1]
    assert "the chain ends here: no progress: attempt 42.pbs1.1 began and ended at step 5" in ends[2].said
    assert (pbs.folder / "story").read_text() == "finished 9"
    assert (pbs.state["status"], pbs.state["step"]) == ("failed", 5)
    assert "no progress" in pbs.state["reason"]


def test_an_attempt_that_was_killed_before_its_first_checkpoint_ends_the_chain(pbs):
    ends = pbs.run("killed", "finished 9")
    assert [end.status for end in ends] == [-9, 1]
    assert "attempt 41.pbs1.1 ended before its first checkpoint" in pbs.state["reason"]


def test_a_failed_attempt_cancels_its_follow_up_and_keeps_its_status(pbs):
    (end,) = pbs.run("failed 5", "finished 9")
    assert end.status == 1
    assert (pbs.folder / "cancelled").read_text() == "42.pbs1\n"


def test_no_more_attempts_than_asked_for_run(pbs):
    ends = pbs.run("unfinished 5", "unfinished 7", "unfinished 9", chain="2")
    assert [end.status for end in ends] == [0, 85]
    assert "unfinished: step 7" in ends[1].said


def test_a_server_that_takes_no_follow_up_is_told_with_the_command_and_the_training_runs(pbs):
    pbs_run = pbs._run

    def refused(number: int) -> Ended:
        (pbs.folder / "refuses").touch()
        return pbs_run(number)

    pbs._run = refused
    (end,) = pbs.run("unfinished 5")
    assert end.status == 85
    typed = f"cd {pbs.folder}/home && qsub -W depend=afterany:41.pbs1 {pbs.run_dir}/attempts/41.pbs1.1/script.sh"
    refused = "qsub refuses the job (status 1): qsub: no more jobs today"
    assert f"hpcddp: the next attempt is not queued: {refused}\nhint: on a login node: {typed}" in end.said
    assert pbs.state["status"] == "unfinished"


def test_in_a_job_with_a_container_only_the_ranks_run_in_there(tmp_path):
    server = Server(tmp_path, "slurm")
    container = {"container": "torch.sif", "container_runtime": "pyxis", "python": sys.executable}
    ends = server.run("unfinished 5", "finished 7", launcher="srun", workdir="sub", **container)
    assert [end.status for end in ends] == [0, 0]
    assert (tmp_path / "started").read_text().splitlines() == ["srun exec"] * 2
    assert server.run_dir == server.folder / "home/sub/runs/long", "a relative folder is the same for each attempt"


def test_a_program_that_writes_no_state_is_not_continued(pbs):
    ends = pbs.run("nothing")
    assert [end.status for end in ends] == [0]
    assert (pbs.folder / "cancelled").read_text() == "42.pbs1\n"


@pytest.mark.parametrize(
    ("site", "asked", "words"),
    [
        ("generic-pbs", {"chain": "1"}, "chain 1 is no chain"),
        ("generic-pbs", {"chain": "0"}, "is not a whole number of 1 or more"),
        ("generic-pbs", {"chain": "5", "array": "1-3"}, "beside array"),
        ("generic-slurm", {"chain": "5", "hold": "true"}, "beside hold"),
        ("generic-slurm", {"chain": "5", "requeue": "true"}, "beside requeue"),
        ("local", {"chain": "5"}, "site local cannot take chain"),
        ("generic-pbs", {"chain": "5", "directives": ["-W depend=afterok:1"]}, "printed by the script itself"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(site, asked, words):
    with pytest.raises(RequestError) as error:
        plan(site, **asked)
    assert words in str(error.value)


STOPPED, DONE, FAILED = (RunState(status, 8, 0, "as told", "7.1") for status in ("unfinished", "finished", "failed"))


@pytest.mark.parametrize(
    ("states", "since", "again", "well", "starts"),
    [
        ([STOPPED], None, False, False, True),  # the first of its chain
        ([FAILED], None, False, False, True),
        ([STOPPED], Link("7.1", 1, 7), False, False, True),
        ([STOPPED], Link("7.1", 1, 8), False, True, False),  # no progress
        ([STOPPED], Link("7.1", 1, 8), True, False, True),  # its scheduler has started it again
        ([], Link("7.1", 1, 0), False, False, False),
        ([FAILED], Link("7.1", 1, 7), False, False, False),
        ([FAILED], Link("7.1", 1, 7), True, False, False),
        ([FAILED], Link("9.1", 1, 8), True, False, True),  # of a job before the chain
        ([DONE], Link("7.1", 1, 7), False, True, False),  # the chain ends
        ([DONE], Link("7.1", 1, 7), False, False, True),  # an evaluation may be left
        ([DONE], Link("7.1", 1, 8), False, False, False),  # twice, and no step between
        ([DONE, STOPPED], Link("7.1", 1, 15), False, True, True),
        ([DONE, FAILED], Link("7.1", 1, 15), False, True, False),
    ],
)
def test_an_attempt_of_a_chain_starts_unless_there_was_no_progress(
    states: list[RunState], since: Link | None, again: bool, well: bool, starts: bool
) -> None:
    decision = decide_start(states, since, again=again, ended_well=well)
    assert (decision.reason == "") is starts
    assert decision.is_failure is (not starts and not (well and states == [DONE]))
