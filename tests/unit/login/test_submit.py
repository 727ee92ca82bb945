"""`hpcddp submit`: what is queued, what is left of it in the run's folder, and what is refused before."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.ranks.frameworks import FRAMEWORK_VARIABLES
from hpcddp.runs.folder import RunFolder, name_checkpoint
from hpcddp.runs.lock import release_run
from hpcddp.runs.settings import Recorded, write_settings
from hpcddp.runs.start import RunRequest, read_about, set_run_aside
from hpcddp.runs.state import write_state
from hpcddp.runs.submitted import read_submissions, record_sweep

from .conftest import SLURM
from .runs import held, submitted

Program = Callable[[str, str], None]
TRAIN = ["--", "python", "-c", "pass"]
SIZE = ["--nodes", "1", "--ranks-per-node", "1", "--gpus-per-node", "0", "--cpus-per-rank", "2", "--walltime", "10m"]
SBATCH = 'cat "$2" > given.sh; env > given.env; echo "$@" > given.words; echo 4711'
SQUEUE = "echo '4711|4711|N/A|PENDING|N/A|N/A|Resources|train'"


def submit(*words: str) -> int:
    return main(["submit", *SLURM, *words])


def test_the_id_alone_is_printed_and_the_run_has_script_plan_and_id(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    assert submit("--nodes", "2", "--name", "train", *TRAIN) == 0
    out = capsys.readouterr()
    assert out.out == "4711\n"
    assert "run runs/train: new" in out.err
    run = RunFolder(str(here / "runs/train"))
    (job,) = read_submissions(run)
    assert (job.job, job.scheduler, job.array, job.folder) == ("4711", "slurm", "", str(here))
    script = (here / "runs/train/submitted/000001/script.sh").read_text()
    assert (here / "given.sh").read_text() == script
    assert "#SBATCH --nodes=2" in script
    assert json.loads(Path(run.plan).read_text())["nodes"] == 2
    assert (here / "given.words").read_text() == f"--parsable {run.submitted}/000001/script.sh\n"


def test_no_variable_of_a_job_around_it_goes_into_the_new_one(
    here: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("sbatch", SBATCH)
    kept = {"SLURM_CONF": "/etc/slurm.conf", "MINE": "1", "HPCDDP_SITE": "x"}
    of_job = ["SLURM_JOB_ID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "RANK", "MASTER_ADDR", "HPCDDP_RUN_DIR"]
    of_job += ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HPCDDP_ATTEMPT", "HPCDDP_GUARDED", *FRAMEWORK_VARIABLES]
    for name in of_job:
        monkeypatch.setenv(name, "3")
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    assert submit(*TRAIN) == 0
    seen = dict(line.partition("=")[::2] for line in (here / "given.env").read_text().splitlines())
    assert not seen.keys() & set(of_job)
    assert {name: seen[name] for name in kept} == kept


@pytest.mark.parametrize(
    ("sbatch", "said", "hint"),
    [
        (
            "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1",
            "sbatch refuses the job (status 1): sbatch: error: Batch job submission failed: Invalid account",
            "change the request; sinfo -s has the limits",
        ),
        (
            "echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
            " does not answer: ",
            "try again later; nothing was queued",
        ),
        (
            None,
            "this job is for a login node of generic-slurm: here sbatch is not on PATH",
            "submit it there; or print its script: hpcddp render",
        ),
    ],
)
def test_a_refusal_is_told_in_the_schedulers_words_and_leaves_nothing(
    here: Path,
    program: Program,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sbatch: str | None,
    said: str,
    hint: str,
) -> None:
    if sbatch is None:
        monkeypatch.setenv("PATH", "/nonexistent")
    else:
        program("sbatch", sbatch)
    assert submit("--no-check", *TRAIN) == 5
    out = capsys.readouterr()
    assert (out.out, os.listdir(here)) == ("", [])
    assert said in out.err
    assert f"hint: {hint}" in out.err


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ("echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1", ""),
        ("echo welcome to the cluster", "which has no job id"),
    ],
)
def test_a_request_that_the_scheduler_took_and_did_not_answer_may_be_queued(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str], says: str, said: str
) -> None:
    program("sbatch", says)
    assert submit("--name", "python", *TRAIN) == 5
    assert f"{said}: job python may be queued all the same\nhint: look for it in the queue" in capsys.readouterr().err
    assert (here / "runs/python/submitted/000001/script.sh").exists()


@pytest.mark.parametrize("array", [(), ("--array", "1-3")])
def test_a_refusal_leaves_the_folders_own_files_where_they_are(
    array: tuple[str, ...], here: Path, program: Program
) -> None:
    program("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    (here / "data").mkdir()
    (here / "data/images.bin").write_text("precious")
    assert submit("--set", "run_dir=data", *array, *TRAIN) == 5
    assert os.listdir(here / "data") == ["images.bin"]
    assert submit("--set", "run_dir=.", *array, *TRAIN) == 5
    assert os.listdir(here) == ["data"]


def test_two_jobs_cannot_wait_for_one_run_unless_one_waits_for_the_other(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    program("squeue", SQUEUE)
    assert submit("--name", "train", *TRAIN) == 0
    assert submit("--name", "train", *TRAIN) == 2
    said = capsys.readouterr().err
    assert "job 4711 (queued) has runs/train, and two jobs cannot write one run" in said
    assert "hint: --after afterany:4711" in said
    assert submit("--name", "train", "--after", "afterany:4711", *TRAIN) == 0
    assert "#SBATCH --dependency=afterany:4711" in (here / "given.sh").read_text()
    assert submit("--name", "train", "--fresh", "--after", "afterany:4711", *TRAIN) == 2
    assert "hint: hpcddp cancel train, which ends it; or another run: --name X" in capsys.readouterr().err
    assert os.listdir(here / "runs") == ["train"]


def leave(name: str, status: str = "finished", *, job: str = "30", exit_status: int = 0, step: int = 8) -> RunFolder:
    """A run whose job has ended, with a checkpoint."""
    run = RunFolder(f"runs/{name}")
    attempt = held(run, job)
    Path(name_checkpoint(run.checkpoints, step)).mkdir(parents=True)
    write_state(attempt, status, step=step, epoch=1, reason="the end")
    release_run(run, attempt.name, exit_status)
    return run


def test_a_run_with_nothing_left_is_refused_with_its_remedies(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    program("squeue", "")
    leave("a")
    assert submit("--name", "a", *TRAIN) == 2
    out = capsys.readouterr()
    finished = r"run runs/a: finished at step 8 on \d{4}-\d\d-\d\d \(the end\)"
    remedies = "hint: for a larger number of epochs: --resume a; to begin anew: --fresh; or another run: --name X"
    assert re.search(f"{finished}: a job would make no step\n{remedies}", out.err)
    assert not (here / "given.sh").exists()
    assert submit("--resume", "a", *TRAIN, "--epochs", "4") == 0
    assert submit("--name", "b", *TRAIN) == 0
    assert submit("--name", "a", "--fresh", *TRAIN) == 0


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (lambda: None, "run runs/a: new\n"),
        (lambda: submitted(RunFolder("runs/a"), "30"), "run runs/a: new\n"),
        (lambda: leave("a", "unfinished"), "run runs/a: resumes from step 8\n"),
        (lambda: leave("a", "failed"), "run runs/a: resumes from step 8\n"),
        (
            lambda: held(RunFolder("runs/a"), "30", status=1),
            "run runs/a: begins again, without a checkpoint\n",
        ),
        (lambda: leave("a", exit_status=1), "run runs/a: finished at step 8 "),
    ],
)
def test_render_and_submit_say_what_a_start_would_do_now(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str], begin: Callable[[], object], said: str
) -> None:
    program("sbatch", SBATCH)
    program("squeue", "")
    begin()
    for verb, *words in (("submit", "--dry-run"), ("render",), ("submit",)):
        assert main([verb, *SLURM, *words, "--name", "a", *TRAIN]) == 0
        is_told = verb == "submit" or not said.endswith("new\n")  # of what is the first here render says nothing
        assert (said in capsys.readouterr().err) == is_told


def test_other_words_than_the_run_was_begun_with_are_mentioned(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    program("squeue", "")
    run = leave("a", "unfinished")
    write_settings(run, Recorded({"run": {"command": ["python", "train.py", "--lr", "1"]}}))
    for words, is_told in ((["--name", "a"], True), (["--name", "a", "--accept", "command"], False)):
        assert submit("--dry-run", *words, *TRAIN) == 0
        said = "run a was begun with python train.py --lr 1; to take these words: --resume a"
        assert (said in capsys.readouterr().err) is is_told
    write_settings(run, Recorded({"run": {"command": ["python", "-c", "pass"]}}))
    assert submit("--dry-run", "--name", "a", *TRAIN) == 0
    assert "was begun with" not in capsys.readouterr().err


def test_fresh_sets_the_old_run_aside_when_the_job_is_submitted_and_not_again_when_it_starts(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    program("squeue", "")
    leave("a")
    assert submit("--name", "a", "--fresh", *TRAIN) == 0
    assert "run runs/a: new, as --fresh asks; the old one is runs/a.old1" in capsys.readouterr().err
    assert sorted(os.listdir("runs")) == ["a", "a.old1"]
    found = re.search(r"--fresh (\S+)", (here / "given.sh").read_text())
    assert found is not None
    run = RunFolder("runs/a")
    assert read_about(run).fresh == found[1]
    assert [one.job for one in read_submissions(run)] == ["4711"]
    assert set_run_aside(RunRequest(run.path, fresh=found[1]), {}) is None  # as the job asks it


def test_a_refused_fresh_job_leaves_the_old_run_where_it_was(here: Path, program: Program) -> None:
    program("sbatch", "echo 'sbatch: error: no more' >&2; exit 1")
    program("squeue", "")
    leave("a")
    before = sorted(map(str, Path("runs").rglob("*")))
    assert submit("--name", "a", "--fresh", *TRAIN) == 5
    assert [one for one in before if not Path(one).exists()] == []
    assert os.listdir("runs") == ["a"]


def test_resume_names_the_folder_and_takes_the_new_words(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    program("squeue", "")
    leave("old", "unfinished")
    assert submit("--resume", "old", "--", "python", "-c", "pass", "--lr", "2") == 0
    script = (here / "given.sh").read_text()
    assert " --name old " in script
    assert " --resume " in script
    assert "#SBATCH --job-name=old\n" in script
    assert submit("--resume", "other", *TRAIN) == 2
    assert "there is no such run\nhint: hpcddp status" in capsys.readouterr().err


def test_of_a_sweep_that_is_submitted_again_only_what_is_left_is_queued(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    program("squeue", "")
    nodes = ["--name", "s", "--set", "sweep.nodes=1,2", *TRAIN]
    assert submit(*nodes) == 0
    leave("s.1")
    leave("s.2", "unfinished", job="31")
    capsys.readouterr()
    assert submit(*nodes) == 0
    out = capsys.readouterr()
    assert out.out == "4711\n"
    assert "run runs/s.1: finished at step 8" in out.err
    assert "run runs/s.2: resumes from step 8" in out.err
    leave("s.2", job="32", step=16)
    assert submit(*nodes) == 2
    assert "each run of runs/s is finished: a job would make no step" in capsys.readouterr().err


def test_an_array_of_which_nothing_is_left_is_refused(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    program("squeue", "")
    assert submit("--name", "s", "--array", "1-2", *TRAIN) == 0
    leave("s.1")
    assert submit("--name", "s", "--array", "1-2", *TRAIN) == 0
    leave("s.2")
    assert submit("--name", "s", "--array", "1-2", *TRAIN) == 2
    assert "each run of runs/s is finished" in capsys.readouterr().err


def test_a_sweep_of_arguments_is_one_array(here: Path, program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program("sbatch", SBATCH)
    words = ["--name", "s", "--set", "sweep.lr=0.1,0.01", "--set", "sweep.seed=1-3", "--", "python", "-c", "pass"]
    assert submit(*words, "{lr}", "{seed}") == 0
    assert capsys.readouterr().out == "4711\n"
    assert "#SBATCH --array=1-6" in (here / "given.sh").read_text()
    assert json.loads((here / "runs/s/sweep.json").read_text())["axes"] == {
        "lr": ["0.1", "0.01"],
        "seed": ["1", "2", "3"],
    }
    assert os.listdir(here / "runs") == ["s"]


def test_a_sweep_of_nodes_is_one_job_for_each_at_one_global_batch(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", 'n=$(ls scripts 2>/dev/null | wc -l); mkdir -p scripts; cp "$2" scripts/$n; echo $((100 + n))')
    assert submit("--name", "s", "--global-batch", "64", "--set", "sweep.nodes=1,4", *TRAIN) == 0
    assert capsys.readouterr().out == "100\n101\n"
    for number, nodes in (("1", "1"), ("2", "4")):
        script = (here / "scripts" / str(int(number) - 1)).read_text()
        assert f"#SBATCH --nodes={nodes}\n" in script
        assert f" --name s.{number} " in script
        assert "exec --global-batch 64" in script
        (job,) = read_submissions(RunFolder(f"runs/s.{number}"))
        assert job.job == str(99 + int(number))


def test_where_a_later_job_is_refused_the_error_says_how_many_are_queued(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["--name", "s", "--set", "sweep.nodes=1,4", *TRAIN]
    program("sbatch", "echo 'sbatch: error: no more' >&2; exit 1")
    assert submit(*sweep) == 5
    assert os.listdir(here) == []
    program("sbatch", "[ -e one ] && { echo 'sbatch: error: no more' >&2; exit 1; }; touch one; echo 100")
    assert submit(*sweep) == 5
    assert "1 of 2 jobs are queued, 100 to 100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--after", "nothere"], "there is no run 'nothere'"),
        (["--array", "5"], "array '5' is not FIRST-LAST"),
        (["--chain", "1"], "chain 1 is no chain"),
        (["--chain", "3", "--array", "1-3"], "chain 3 beside array"),
        (["--set", "sweep.lr=1,2"], "{lr} does not stand in the command"),
        (["--set", "sweep.command=a,b"], "command cannot be swept"),
        (["--set", "sweep.nodes=1,2", "--array", "1-3"], "sweep beside array 1-3"),
        (["--set", "sweep.nodes=1,x"], "nodes in sweep 'x' is not a whole number"),
        (["--set", "sweep.workdir=x,y"], "workdir"),
    ],
)
def test_what_cannot_be_queued_is_said_before_anything_is_written(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    program("sbatch", "echo called > called; echo 1")
    assert submit(*words, *TRAIN) == 2
    out = capsys.readouterr()
    assert said in out.err
    assert re.search(r"\nhint: \S", out.err)
    assert out.out == ""
    assert os.listdir(here) == []


def test_a_plain_run_has_no_sweeps_name_and_a_sweep_no_runs(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    program("squeue", "true")
    assert submit("--name", "a", *TRAIN) == 0
    assert submit("--name", "a", "--array", "1-3", *TRAIN) == 2
    assert "runs/a is a run already" in capsys.readouterr().err
    assert submit("--name", "b", "--array", "1-3", *TRAIN) == 0
    assert submit("--name", "b", *TRAIN) == 2
    assert "runs/b is a sweep or an array, and no run\nhint: --name b-run" in capsys.readouterr().err
    assert sorted(os.listdir(here / "runs")) == ["a", "b"]


@pytest.mark.parametrize(
    ("site", "more", "says", "job"),
    [
        ("generic-pbs", [], "47.pbs1", "47.pbs1"),
        ("generic-pbs", ["--array", "1-3"], "48[].pbs1", "48[].pbs1"),
        ("generic-torque", [], "12.head.site", "12.head.site"),
        ("generic-slurm", [], "4711;cluster", "4711"),
    ],
)
def test_each_scheduler_says_the_id_in_its_own_way(
    here: Path,
    program: Program,
    capsys: pytest.CaptureFixture[str],
    site: str,
    more: list[str],
    says: str,
    job: str,
) -> None:
    for name in ("qsub", "sbatch"):
        program(name, f"for last; do :; done; cat \"$last\" > given.sh; echo '{says}'")
    words = ["--site", site, *SIZE, "--launcher", _launcher(site), "--name", "python", *more, *TRAIN]
    assert main(["submit", *words]) == 0
    assert capsys.readouterr().out == f"{job}\n"
    (noted,) = read_submissions(RunFolder("runs/python"))
    assert noted.job == job
    form = "python-{}.out" if "slurm" in site else "python.o{}"
    assert noted.output == ("" if "--array" in more else str(here / form.format(re.match(r"\d+", job)[0])))
    assert (here / "given.sh").read_text() == (here / "runs/python/submitted/000001/script.sh").read_text()


def _launcher(site: str) -> str:
    return "srun" if "slurm" in site else "openmpi"


def test_after_means_the_newest_job_of_a_run_and_all_runs_of_a_sweep(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    run = RunFolder("runs/c")
    begun = held(run, "30")
    Path(begun.next).write_text("31\n")
    assert submit("--name", "d", "--after", "c", *TRAIN) == 0
    assert "#SBATCH --dependency=afterok:30" in (here / "given.sh").read_text()  # it takes back what follows
    release_run(run, begun.name, 85)
    assert submit("--name", "d2", "--after", "c", *TRAIN) == 0
    assert "#SBATCH --dependency=afterok:31" in (here / "given.sh").read_text()
    held(run, "31", status=0)
    for age, path in enumerate([begun.next, *sorted(map(str, Path(run.holders).glob("*/holder.json")))]):
        os.utime(path, (age + 1, age + 1))
    submitted(run, "33")
    assert submit("--name", "e", "--after", "c", *TRAIN) == 0
    assert "#SBATCH --dependency=afterok:33" in (here / "given.sh").read_text()
    record_sweep(RunFolder("runs/s"), {"nodes": ["1", "2"]}, "1-2")
    for index in ("1", "2"):
        submitted(RunFolder(f"runs/s.{index}"), f"4{index}")
    assert submit("--name", "f", "--after", "s", *TRAIN) == 0
    assert "#SBATCH --dependency=afterok:41:42" in (here / "given.sh").read_text()
    assert submit("--name", "g", "--after", "33x", *TRAIN) == 2
    assert "there is no run '33x'" in capsys.readouterr().err


def test_a_scheduler_that_does_not_answer_lets_no_second_job_in(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", SBATCH)
    assert submit("--name", "train", *TRAIN) == 0
    program("squeue", "echo 'slurm_load_jobs error: no controller' >&2; exit 1")
    assert submit("--name", "train", *TRAIN) == 5
    said = capsys.readouterr().err
    assert "no controller: whether job 4711 of" in said
    assert submit("--name", "train", "--fresh", *TRAIN) == 5
    assert os.listdir("runs") == ["train"]


def test_a_training_script_that_was_never_verified_is_mentioned_once(
    here: Path, program: Program, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("sbatch", SBATCH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    Path("train.py").write_text("import hpcddp\nwith hpcddp.runtime() as rt: pass\n")
    Path("other.py").write_text("print('no runtime')\n")
    said = "train.py was never verified: hpcddp verify -- python train.py --lr 1\n"
    for name, script, is_told in (("a", "train.py", True), ("b", "train.py", False), ("c", "other.py", False)):
        assert submit("--name", name, "--", "python", script, *(["--lr", "1"] if script == "train.py" else [])) == 0
        assert (said in capsys.readouterr().err) == is_told
