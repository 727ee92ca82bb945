"""What a rendered script does when bash runs it, with stub launchers."""

from __future__ import annotations

import json
import time

import pytest

from hpcddp.errors import RequestError

from .conftest import StubbedNode, script

SITES = ["local", "generic-pbs", "generic-slurm"]


@pytest.mark.parametrize(
    ("site", "launcher"),
    [("local", "intelmpi"), ("generic-pbs", "mpich"), ("generic-pbs", "torchrun"), ("generic-slurm", None)],
)
def test_the_scripts_status_is_the_commands_although_its_output_goes_through_the_supervisor(
    site, launcher, node: StubbedNode
):
    done = node.run(script(site, node.planned_by, launcher=launcher), STUB_STATUS="7")
    assert done.returncode == 7
    assert b"ended with status 7" in done.stderr


@pytest.mark.parametrize(
    ("nodes", "exported", "status"),
    [
        ("2", "PET_RDZV_CONF=is_host=1", 4),
        ("2", "PET_STANDALONE=0", 0),
        ("1", "PET_STANDALONE=1", 0),
    ],
)
def test_agents_that_would_not_meet_for_an_exported_variable_are_not_started(
    node: StubbedNode, nodes: str, exported: str, status: int
):
    name, _, value = exported.partition("=")
    text = script("generic-pbs", node.planned_by, launcher="torchrun", nodes=nodes, env={name: value})
    done = node.run(text)
    assert done.returncode == status, done.stderr
    assert (f"but {exported} is exported too\nhint: unset {name}".encode() in done.stderr) is (status == 4)
    assert (node.folder / "runs").exists() is (status == 0)


@pytest.mark.parametrize("site", ["local", "generic-slurm"])
def test_the_run_folder_gets_what_the_script_says(site, node: StubbedNode):
    text = script(site, node.planned_by, name="x", ranks_per_node="3", nodes="1", global_batch="12")
    assert node.run(text.replace("3 ", "5 ").replace("train.py", "other.py")).returncode == 0
    record = json.loads((node.folder / "runs/x/plan.json").read_text())
    said = ("schema", "site", "world_size", "global_batch", "command")
    found = [1, site, 5, 12, ["python", "other.py"]]
    assert [record[name] for name in said] == found


@pytest.mark.parametrize(
    ("site", "variables", "attempt"),
    [
        ("generic-pbs", {"PBS_JOBID": "12[3].pbs1"}, "12-3.pbs1.1"),
        (
            "generic-slurm",
            {"SLURM_JOB_ID": "79", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "4"},
            "77-4.1",
        ),
    ],
)
def test_each_start_of_a_job_is_an_attempt_of_its_own(site, variables, attempt, node: StubbedNode):
    assert node.run(script(site, node.planned_by, name="x"), **variables).returncode == 0
    assert node.environment["HPCDDP_ATTEMPT"] == attempt
    assert [path.parts[-3] for path in node.folder.glob("runs/x*/attempts/*/logs/job.log")] == [attempt]


@pytest.mark.parametrize("site", SITES)
def test_the_rank_sees_the_contracts_variables(site, node: StubbedNode):
    before = time.time()
    assert (
        node.run(script(site, node.planned_by, name="x", walltime="1:00:00", pythonpath=["src", "/opt/b c"])).returncode
        == 0
    )
    env = node.environment
    assert env["HPCDDP_RUN_DIR"] == f"{node.folder}/runs/x"
    assert env["HPCDDP_PYTHON"] == f"{node.folder}/env/python"
    assert env["HPCDDP_LOG_RANKS"] == "1"
    assert before + 3590 < int(env["HPCDDP_DEADLINE"]) < time.time() + 3610
    assert env["PATH"].split(":")[0] == f"{node.folder}/env"
    assert env["PYTHONPATH"] == f"{node.folder}/src:/opt/b c"
    assert env["OMP_NUM_THREADS"] == ("6" if site == "local" else "8")


def test_a_job_sets_what_a_person_sets_of_hpcddp_and_nothing_else_of_it(node: StubbedNode):
    assert node.run(script("generic-pbs", node.planned_by, env={"HPCDDP_WATCHDOG": "off"})).returncode == 0
    assert node.environment["HPCDDP_WATCHDOG"] == "off"
    with pytest.raises(RequestError, match="HPCDDP_RUN_DIR is set by the job script itself"):
        script("generic-pbs", node.planned_by, env={"HPCDDP_RUN_DIR": "x"})


@pytest.mark.parametrize(("site", "variable"), [("generic-pbs", "PBS_NODEFILE"), ("generic-slurm", "SLURM_JOB_ID")])
def test_a_script_that_does_not_run_in_a_job_starts_nothing(site, variable, node: StubbedNode):
    done = node.run(script(site, node.planned_by), **{variable: ""})
    assert done.returncode != 0
    assert not (node.folder / "arguments").exists()


def test_a_launcher_that_is_nowhere_is_said_with_a_remedy(node: StubbedNode):
    text = script("generic-slurm", node.planned_by).replace("    srun ", "    no-such-srun ")
    done = node.run(text)
    assert done.returncode == 127
    assert b"hpcddp: no-such-srun cannot be run: No such file or directory\nhint: put its folder on PATH" in done.stdout


def test_the_sites_mpirun_wins_over_one_that_comes_with_the_environment(node: StubbedNode):
    (node.folder / "env/mpirun").write_text("#!/bin/bash\nexit 66\n")
    (node.folder / "env/mpirun").chmod(0o755)
    assert node.run(script("generic-pbs", node.planned_by)).returncode == 0
    assert node.run(script("local", node.planned_by)).returncode == 66


def test_a_script_read_from_a_pipe_is_not_eaten_by_what_it_starts(node: StubbedNode):
    (node.folder / "bin/mpirun").write_text("#!/bin/bash\ncat > eaten\n")
    assert node.run(script("local", node.planned_by)).returncode == 0
    assert (node.folder / "eaten").read_text() == ""


# A launcher that sends its script a signal before it has started a rank, and waits to be given it.
_SIGNALLED = """\
#!/bin/bash
trap 'touch told' SIGNAL
kill -SIGNAL $PPID
until [ -e told ]; do sleep 0.05; done
exit 7
"""


@pytest.mark.parametrize("signal", ["TERM", "INT"])
def test_a_signal_that_comes_before_a_rank_has_started_is_given_to_the_launcher(signal, node: StubbedNode):
    """Also where the terminal is gone, and nothing can be printed: the script waits for the launcher's own end."""
    (node.folder / "bin/mpiexec.hydra").write_text(_SIGNALLED.replace("SIGNAL", signal))
    text = script("local", node.planned_by, name="x", launcher="intelmpi")
    (node.folder / "job.sh").write_text(text)
    # tests that run in the background, or under nohup, inherit ignored signals, for which bash sets no trap
    assert node.run("exec env --default-signal bash job.sh 2> /dev/full").returncode == 7
    assert (node.folder / "told").exists()


# A launcher that leaves a process behind, which sends the script a signal once the launcher has been waited for.
_LEAVES = """\
#!/bin/bash
bash -c "while kill -0 $$; do sleep 0.05; done; kill -TERM $PPID" 2> /dev/null &
"""


def test_a_signal_that_comes_after_the_launcher_s_end_is_heard(node: StubbedNode):
    """It may be the owner's wish to end a chain. The script waits for what a launcher that succeeded has left."""
    (node.folder / "bin/mpiexec.hydra").write_text(_LEAVES)
    done = node.run(script("local", node.planned_by, name="x", launcher="intelmpi"))
    assert b"SIGTERM came after the ranks had ended" in done.stderr
