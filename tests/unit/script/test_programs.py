"""Where the ranks' programs come from, and what is brought to their nodes: run with stubs, under bash."""

from __future__ import annotations

import sys
import time

import pytest

from hpcddp.errors import RequestError, SiteError

from .conftest import StubbedNode, plan, script

# What it was started with, and then what it starts.
_RUNTIME = (
    '#!/bin/bash\nprintf "%s\\n" "$0" "$@" > container\nwhile [ "$1" != "$HPCDDP_PYTHON" ]; do shift; done\nexec "$@"\n'
)

# A launcher that ends when it is warned. The signal is held back until it has said what to do with it.
_WARNED = f"""#!{sys.executable}
import signal, sys
def end(*_):
    print("warned")
    sys.exit(3)
signal.signal(signal.SIGUSR1, end)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
signal.alarm(600)
signal.pause()
"""


def put(node: StubbedNode, name: str, text: str) -> None:
    path = node.folder / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("site", "runtime"),
    [("generic-pbs", "apptainer"), ("generic-slurm", "singularity"), ("generic-gridengine", "shifter")],
)
def test_ranks_run_in_the_container(site, runtime, node: StubbedNode):
    put(node, runtime, _RUNTIME)
    for name in ("mpirun", "srun"):
        put(node, name, f'#!/bin/bash\nwhile [ "$1" != {runtime} ]; do shift; done\nexec "$@"\n')
    image = {"container": "torch:2", "container_runtime": runtime, "python": f"{node.folder}/env/python"}
    text = script(site, node.planned_by, name="x", **image)
    done = node.run(text)
    assert done.returncode == 0, done.stderr
    words = (node.folder / "container").read_text().splitlines()
    assert words[0].endswith(runtime)
    assert node.arguments == ["python", "train.py"]
    if runtime != "shifter":
        assert words[1:5] == ["exec", "--nv", "--pwd", str(node.folder)]
        assert f"{node.folder}/runs" in words
        assert node.environment["APPTAINERENV_PREPEND_PATH"] == f"{node.folder}/env"


def test_pyxis_and_environment_files_are_options_of_srun():
    text = script("generic-slurm", container="a b", container_runtime="cscs", python="/usr/bin/python3")
    assert "\n    --environment='a b' \\\n" in text
    one = plan("generic-slurm", container="i", container_runtime="pyxis", python="/p", launcher="torchrun", nodes="1")
    assert one.outer_launcher == "srun"
    with pytest.raises(RequestError, match="works with srun only"):
        plan("generic-pbs", container="i", container_runtime="pyxis", python="/p")
    with pytest.raises(RequestError, match="works with srun only"):
        plan("generic-slurm", container="i", container_runtime="pyxis", python="/p", launcher="openmpi")


def test_a_container_needs_a_runtime_and_a_python_of_its_own():
    with pytest.raises(SiteError, match="does not say what runs containers"):
        plan("generic-pbs", container="i", python="/p")
    with pytest.raises(RequestError, match="which Python of the image"):
        plan("abci3", container="i")
    with pytest.raises(RequestError, match="binds without container"):
        plan("abci3", binds=["/data"])


def test_conda_is_activated_and_its_python_taken(node: StubbedNode):
    hook = f'echo "conda() {{ [ \\"\\$2\\" = \\"my env\\" ] && export CONDA_PREFIX={node.folder}/prefix; }}"'
    put(node, "conda", f"#!/bin/bash\n{hook}\n")
    (node.folder / "prefix/bin").mkdir(parents=True)
    (node.folder / "prefix/bin/python").symlink_to(node.folder / "env/python")
    assert node.run(script("generic-slurm", conda="my env")).returncode == 0
    assert node.environment["HPCDDP_PYTHON"] == f"{node.folder}/prefix/bin/python"


def test_the_python_of_the_modules_is_found_when_the_job_runs(node: StubbedNode):
    put(node, "python3", (node.folder / "env/python").read_text())
    assert node.run(script("generic-slurm", python="modules")).returncode == 0
    assert node.environment["HPCDDP_PYTHON"] == f"{node.folder}/bin/python3"


@pytest.mark.parametrize(("site", "launcher"), [("local", None), ("generic-pbs", "torchrun"), ("generic-slurm", None)])
def test_files_are_on_the_nodes_own_disk_before_the_ranks_start(site, launcher, node: StubbedNode):
    skip = '#!/bin/bash\nwhile [ "$1" != bash ] && [ "$1" != "$HPCDDP_PYTHON" ]; do shift; done\nexec "$@"\n'
    for name in ("mpirun", "srun"):
        put(node, name, skip)
    (node.folder / "in put").mkdir()
    (node.folder / "in put/$x").write_text("7")
    text = script(
        site, node.planned_by, stage_in=["in put"], stage_dir=f"{node.folder}/own disk", launcher=launcher, nodes="1"
    )
    done = node.run(text)
    assert done.returncode == 0, done.stderr
    staged = node.environment["HPCDDP_STAGED"]
    assert staged.startswith(f"{node.folder}/own disk/hpcddp-")
    assert (node.folder / staged / "in put/$x").read_text() == "7"


def test_a_file_that_is_not_there_to_be_staged_ends_the_job(node: StubbedNode):
    text = script("generic-slurm", node.planned_by, stage_in=["none"], stage_dir="/tmp", launcher="torchrun")
    assert node.run(text).returncode != 0
    assert not (node.folder / "arguments").exists()


def test_a_grid_engine_job_reads_its_hosts_from_the_pe_hostfile(node: StubbedNode):
    put(node, "mpirun", '#!/bin/bash\nwhile [ "$1" != -hostfile ]; do shift; done\ncat "$2" > hosts\n')
    assert node.run(script("generic-gridengine", node.planned_by, nodes="2", ranks_per_node="4")).returncode == 0
    assert (node.folder / "hosts").read_text() == "node001.hpc.test slots=4\nnode002.hpc.test slots=4\n"


def test_the_warning_comes_before_the_end_and_the_ranks_status_is_kept(node: StubbedNode):
    put(node, "mpirun", _WARNED)
    text = script("generic-slurm", node.planned_by, launcher="openmpi", walltime="1:00:00", signal="0:02:00")
    (node.folder / "job.sh").write_text(text)
    done = node.run("exec env --block-signal=USR1 bash job.sh", SLURM_JOB_END_TIME=str(int(time.time()) + 121))
    assert done.returncode == 3, done.stderr
    assert b"warned" in done.stdout
    assert b"the ranks are warned: SIGUSR1 is sent" in done.stderr


def test_ranks_meet_on_the_network_that_the_site_names(node: StubbedNode):
    text = script(
        "aurora", node.planned_by, account="a", queue="debug", walltime="1:00:00", filesystems="x", modules="[]"
    )
    assert node.run(text).returncode == 0
    assert node.environment["MASTER_ADDR"] == "node001.hsn.cm.aurora.alcf.anl.gov"
    text = script("juwels-booster", node.planned_by, account="a", walltime="1:00:00", cpus_per_rank="8", nodes="2")
    put(node, "scontrol", "#!/bin/sh\necho jwb0001.juwels\n")
    assert node.run(text, SLURM_JOB_NODELIST="jwb[0001-2]").returncode == 0
    assert node.environment["MASTER_ADDR"] == "jwb0001i"


def test_cpus_are_bound_by_mask_only_where_the_whole_node_is_the_jobs():
    lumi = {"account": "project_1", "walltime": "1:00:00"}
    assert "mask_cpu" in script("lumi-g", **lumi)
    assert "mask_cpu" not in script("lumi-g", **lumi, ranks_per_node="4")
    assert "mask_cpu" not in script("lumi-g", **lumi, queue="small-g")
    assert "mask_cpu" not in script("lumi-g", **lumi, launcher="torchrun", nodes="2")


@pytest.mark.parametrize("launcher", ["openmpi", "srun", "torchrun"])
def test_a_word_with_which_launchers_begin_another_program_is_refused(launcher: str):
    """Run for real: each of them takes it wherever it stands, and `echo more` would be a program of its own."""
    for asked in (
        {"command": ["python", "a.py", "x", ":", "echo", "more"]},
        {"command": ["python", "a.py", "{x}"], "sweep": {"x": ["a", ":"]}},
        {"stage_in": [":"], "stage_dir": "/tmp"},
    ):
        with pytest.raises(RequestError, match=r"an argument is .:. alone, with which .* begins another program"):
            plan("generic-slurm", launcher=launcher, nodes="2", **asked)
    assert plan("generic-slurm", launcher=launcher, nodes="2", command=["python", "a.py", "x:y", "::"])
    assert plan("generic-slurm", launcher="torchrun", nodes="1", command=["python", "a.py", ":"])


def test_a_programs_argument_is_no_end_of_what_copies_the_data(node: StubbedNode):
    put(node, "srun", '#!/bin/bash\nwhile [ "$1" != "$HPCDDP_PYTHON" ]; do shift; done\nexec "$@"\n')
    words = ["python", "a.py", "--then", "echo", "hi"]
    assert node.run(script("generic-slurm", node.planned_by, command=words)).returncode == 0
    assert node.arguments == words
    (node.folder / "data").write_text("7")
    staged = {"stage_in": ["data"], "stage_dir": f"{node.folder}/disk"}
    put(
        node, "srun", '#!/bin/bash\nwhile [ "$1" != bash ] && [ "$1" != "$HPCDDP_PYTHON" ]; do shift; done\nexec "$@"\n'
    )
    done = node.run(script("generic-slurm", node.planned_by, command=words, name="two", **staged))
    assert done.returncode == 0, done.stderr
    assert node.arguments == words


def test_the_words_of_module_in_a_jobs_list_are_calls_of_their_own():
    text = script("local", modules="purge use '/apps/my modules' gcc/12 unuse /x swap gcc intel cuda")
    assert [line for line in text.splitlines() if line.startswith("module ")] == [
        "module purge || exit",
        "module use '/apps/my modules' || exit",
        "module load gcc/12 || exit",
        "module unuse /x || exit",
        "module swap gcc intel || exit",
        "module load cuda || exit",
    ]
