"""What plan_job decides, and what it refuses."""

from __future__ import annotations

import re

import pytest

from hpcddp.errors import RequestError, SiteError
from hpcddp.script.plan import plan_job
from hpcddp.script.site import Limit, Queue, Site, check_limits

from .conftest import PLANNED_BY, plan, script


@pytest.mark.parametrize(
    ("site", "asked", "words"),
    [
        (
            "abci3",
            {"account": None},
            ["still needs an account (https://docs.abci.ai", "--account NAME"],
        ),
        ("abci3", {"queue": "rt_hf"}, ["'rt_hf' is not one of", "rt_HF"]),
        ("abci3", {"nodes": "129"}, ["1 to 128 nodes", "129", "docs.abci.ai", "--nodes 128"]),
        ("abci3", {"nodes": "2", "queue": "rt_HG"}, ["takes 1 node", "--queue rt_HF"]),
        ("abci3", {"walltime": "168:00:01"}, ["168:00:00", "168:00:01", "--walltime 168:00:00"]),
        ("abci3", {"ranks_per_node": "193"}, ["193 ranks of 1 CPU do not fit", "--ranks-per-node 192"]),
        ("abci3", {"cpus_per_rank": "25"}, ["8 ranks of 25 CPUs", "--cpus-per-rank 24"]),
        ("abci3", {"gpus_per_node": "9"}, ["a node has 8", "--gpus-per-node 8"]),
        ("abci3", {"launcher": "srun"}, ["srun does not work", "openmpi"]),
        ("abci3", {"global_batch": "7"}, ["cannot be split over 8 ranks"]),
        ("abci3", {"python": "python3"}, ["is no path of an interpreter"]),
        ("abci3", {"python": "/a", "venv": "/b"}, ["both python"]),
        ("abci3", {"command": []}, ["no command"]),
        ("abci3", {"command": ["mpirun", "x.py"]}, ["starts its own ranks", "-- python train.py"]),
        ("abci3", {"command": ["torchrun", "--nnodes=4", "x.py"]}, ["--nnodes 4, but the job has 1", "--nodes 4"]),
        ("abci3", {"command": ["fabric", "run", "x.py"]}, ["starts its own ranks with fabric run"]),
        ("abci3", {"command": ["python", "-m", "composer.cli.launcher", "x.py"]}, ["-m composer.cli.launcher"]),
        ("abci3", {"command": ["mpirun", "-n", "2", "torchrun", "x.py"]}, ["starts its own ranks with mpirun"]),
        ("abci3", {"command": ["env", "A=1", "/opt/bin/mpirun", "x.py"]}, ["starts its own ranks with mpirun"]),
        ("abci3", {"command": ["cd", "x"]}, ["begins with 'cd', which is no program", "-- bash -c"]),
        ("abci3", {"command": ["A=1", "python", "x.py"]}, ["begins with 'A=1', which is no program"]),
        ("abci3", {"env": {"RANK": "0"}}, ["env RANK is set by"]),
        ("abci3", {"env": {"PYTHONPATH": "x"}}, ["pythonpath"]),
        ("local", {"nodes": "2"}, ["takes 1 node", "--nodes 1"]),
        ("local", {"account": "x"}, ["knows no accounts"]),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_the_reason_and_what_to_type(site, asked, words):
    with pytest.raises(RequestError) as error:
        plan(site, **asked)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("missing", "option"),
    [("gpus_per_node", "--gpus-per-node"), ("cpus_per_rank", "--cpus-per-rank"), ("walltime", "--walltime")],
)
@pytest.mark.parametrize("site", ["generic-pbs", "generic-slurm"])
def test_a_fact_that_nobody_gave_is_a_site_error_naming_the_option(site, missing, option):
    with pytest.raises(SiteError, match=option):
        plan(site, **{missing: None})


def test_how_a_global_batch_is_dealt_is_told():
    [told] = [remark for remark in plan("abci3", nodes="3", global_batch="256").remarks if "global batch" in remark]
    assert told.startswith("global batch 256 = 24 ranks x 10 to 11 samples in 1 micro batch, 97% of")


def test_the_nearest_request_that_fits_is_taken_from_the_rules_of_the_size():
    rules = (Limit((1, 91), 7200), Limit((92, 183), 21600))
    site = Site("s", "s.yaml", "", "", "slurm", "documented", "2026-01-01", queues={"batch": Queue(limits=rules)})
    check_limits(site, "batch", 4, 7200)
    check_limits(site, "batch", 92, 21600)
    with pytest.raises(RequestError, match="1 to 91 nodes run at most 02:00:00, not 03:00:00") as error:
        check_limits(site, "batch", 4, 10800)
    assert error.value.hint == "nearest: --walltime 02:00:00"
    with pytest.raises(RequestError, match="takes 1 to 91 nodes, 92 to 183 nodes per job, not 200"):
        check_limits(site, "batch", 200, 60)


def test_the_nearest_number_of_nodes_is_one_that_a_rule_about_gpus_takes():
    rules = (Limit(nodes=(1, 4), gpus=(1, 4)), Limit(gpus=(5, 10)))
    site = Site("x", "x.yaml", "", "", "slurm", "documented", "2026-01-01", queues={"gpu": Queue(limits=rules)})
    for nodes, gpus, hint in ((4, 16, "--nodes 2"), (1, 11, "--gpus-per-node 10")):
        with pytest.raises(RequestError) as error:
            check_limits(site, "gpu", nodes, 60, gpus)
        assert error.value.hint == f"nearest: {hint}", nodes


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("a b", "a_b"),
        ("../x", "_x"),
        ("実験", "_"),
        ("train.7", "train_7"),
        ("x" * 231, "x" * 230),
        ("a\n#PBS -q x", "a_PBS_-q_x"),
    ],
)
def test_a_name_is_the_run_s_folder_literally_or_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(RequestError) as error:
        plan("abci3", name=name)
    assert nearest in error.value.hint or "one line" in str(error.value)
    assert (plan("abci3", name=nearest).name, plan("abci3", name=nearest).run_dir) == (nearest, f"runs/{nearest}")


def test_a_job_name_that_the_scheduler_would_not_take_is_changed_and_said():
    job = plan("abci3", name="2nd")
    assert (job.job_name, job.run_dir) == ("job_2nd", "runs/2nd")
    assert any("job name '2nd' becomes 'job_2nd'" in remark for remark in job.remarks)
    assert not any("becomes" in remark for remark in plan("abci3", name="a_b").remarks)


def test_two_sweeps_of_one_command_have_two_names_and_a_single_point_is_called_after_its_own_words():
    def name(**axes):
        return plan("generic-slurm", command=["python", "t.py", "--lr", "{lr}"], sweep=axes).name

    assert re.fullmatch("t-lr\\+lr-lr-1-2-[0-9a-f]{10}", name(lr=["1", "2"]))
    assert len({name(lr=["1", "2"]), name(lr=["2", "1"]), name(lr=["1", "2", "3"])}) == 3
    assert name(lr=["1"]) == "t-lr1"


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (None, "~/resnet.oID, with the job's number (-k oe)"),
        ("1-3", "~/resnet.oID.INDEX, with the job's number and index (-k oe)"),
    ],
)
def test_where_the_output_will_be_is_said(array: str | None, name: str):
    assert f"the job's output will be {name}" in plan("abci3", name="resnet", array=array).remarks


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        (["python", "t.py", "--out", "$HOME/x"], True),
        (["python", "t.py", "${RUNS}"], True),
        (["python", "t.py", "$(date)"], True),
        (["python", "t.py", "`date`"], True),
        (["python", "t.py", "--end", "^x$", "cost=$"], False),
        (["bash", "-c", "python t.py --out $HOME/x"], False),
    ],
)
def test_a_word_of_a_job_file_that_no_shell_replaces_is_said(words: list[str], is_told: bool):
    typed = plan("local", command=words)
    assert not any("no shell reads it" in remark for remark in typed.remarks)
    spec = typed.spec._replace(sources={**typed.spec.sources, "command": "command in job.yaml"})
    told = [remark for remark in plan_job(spec, typed.site, PLANNED_BY).remarks if "no shell reads it" in remark]
    assert bool(told) is is_told, told
    assert not told or told[0].startswith(f"command in job.yaml: the program gets {words[-1]!r} as it is")


def test_a_script_for_four_nodes_reads_in_a_minute():
    lines = [line for line in script("abci3", nodes="4").splitlines() if line]
    assert len(lines) <= 30
    assert len([line for line in lines if not line.startswith("#")]) <= 18
