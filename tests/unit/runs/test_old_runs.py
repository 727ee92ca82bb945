"""What hpcddp 0.1 wrote before its files had versions is read; what a newer hpcddp writes is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.errors import RequestError
from hpcddp.ranks.predict import predict_environment
from hpcddp.runs.chain import Link, find_before
from hpcddp.runs.folder import RunFolder, list_attempts
from hpcddp.runs.jsonfile import SCHEMAS, NewerFileError
from hpcddp.runs.opening import open_attempt, read_planned_batch
from hpcddp.runs.record import read_run
from hpcddp.runs.state import AT_ITS_END, State, read_state

OldRun = Callable[[str], RunFolder]
AT_4 = "7d01333d2197e9920a21c1728022d1ef22013ecfe06d2f70652ed138fcec1e6b"
AT_6 = "eaf8ecd8545f5c26ee49ef7327c5253e54a18aaef4655af1f194121644ec3d34"
DONE = "the training loop came to its end"


def set_version(path: str, version: int) -> None:
    content = json.loads(Path(path).read_text()) if os.path.exists(path) else {}
    Path(path).write_text(json.dumps(content | {"schema": version}))


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("single", State("finished", 6, 2, DONE, "local-20261121T235117-3322", AT_6)),
        ("async", State("finished", 6, 2, DONE, "local-20261121T235132-3443", AT_6)),
        ("sharded", State("unfinished", 4, 1, "the deadline", "local-20261121T235125-3361", AT_4)),
        (
            "exact",
            State(
                *("unfinished", 4, 1, "the deadline", "local-20261121T235140-3626", AT_4),
                {"method": "tree", "deviations": []},
            ),
        ),
    ],
)
def test_a_state_is_read(old_run: OldRun, name: str, state: State, capsys: pytest.CaptureFixture[str]) -> None:
    run = old_run(name)
    assert read_state(run) == state
    assert main(["status", run.path]) == 0
    said = [f"{run.path}: {state.status}", f"  step      {state.step}, epoch {state.epoch}"]
    said += [f"  why       {state.reason}"] if state.reason != AT_ITS_END else []
    said += [f"  weights   {state.weights_sha256}"]
    said += ["  exact     tree; no deviations"] if state.exact else []
    assert capsys.readouterr().out.splitlines() == said
    assert read_planned_batch(run) == 8


def test_a_record_has_every_step_with_its_speed_and_time_over_all_attempts(old_run: OldRun) -> None:
    whole, chain = read_run(old_run("single").path), read_run(old_run("chain").path)
    assert list(whole.steps) == [1, 2, 3, 4, 5, 6]
    assert whole.steps[3].samples_per_s == 369.3
    assert whole.steps[3].time == 1795305083.809
    assert whole.weights == {4: AT_4, 6: AT_6}
    assert list(chain.steps) == [1, 2, 3, 4]
    assert chain.steps[3].loss == whole.steps[3].loss
    assert (chain.unrecorded, chain.facts["ranks"]) == ([], (1,))


def test_runs_are_compared(old_run: OldRun, capsys: pytest.CaptureFixture[str]) -> None:
    single, asynchronous, exact, chain = (old_run(name).path for name in ("single", "async", "exact", "chain"))
    assert main(["compare", single, asynchronous]) == 0
    assert capsys.readouterr().out.startswith("the same: 6 steps")
    assert main(["compare", single, exact]) == 0
    assert capsys.readouterr().out.startswith("the same as far as both go: 4 steps")
    assert main(["compare", single, chain]) == 1
    assert "ranks: on other ranks" in capsys.readouterr().out


def test_the_next_attempt_of_a_chain_starts_where_the_last_one_stopped(
    old_run: OldRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = old_run("chain")
    assert [attempt.name for attempt in list_attempts(run)] == ["41.pbs1", "42.pbs1"]
    open_attempt(run.attempt("43.pbs1"))
    assert find_before(run.attempt("43.pbs1")) == Link("42.pbs1", 2, 2)
    monkeypatch.setenv("HPCDDP_ATTEMPT", "43.pbs1")
    assert main(["state", run.path, "--chain", "3"]) == 0
    assert capsys.readouterr() == ("0\n", "hpcddp: attempt 3 of at most 3, from step 4\n")
    monkeypatch.setenv("HPCDDP_ATTEMPT", "42.pbs1")
    for option in ("--unfinished", "--continues"):  # the second is in the scripts that hpcddp 0.1 made
        assert main(["state", run.path, option]) == 0


@pytest.mark.parametrize(
    ("file", "refusing"),
    [
        ("run.json", ["status", "state --unfinished", "state --chain 3", "compare", "open", "plan"]),
        ("state.json", ["status", "state --unfinished", "state --chain 3", "compare", "open"]),
        ("plan.json", ["compare", "open", "plan"]),
        ("attempts/42.pbs1/chain.json", ["state --chain 3"]),
        ("attempts/43.pbs1/chain.json", ["state --chain 3"]),  # this attempt's own, from before it was requeued
        ("attempts/41.pbs1/versions.json", ["compare"]),
        ("attempts/41.pbs1/metrics.jsonl", ["compare"]),
        ("checkpoints/step-00000004/manifest.json", ["compare", "open"]),
        ("checkpoints/best.json", ["open"]),
    ],
)
def test_a_newer_file_is_refused_in_two_lines_by_everything_that_reads_it(
    old_run: OldRun,
    file: str,
    refusing: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = old_run("chain")
    monkeypatch.setenv("HPCDDP_ATTEMPT", "43.pbs1")
    os.mkdir(run.attempt("43.pbs1").path)
    path = os.path.join(run.path, file)
    known = SCHEMAS[os.path.basename(file)]
    if file.endswith("metrics.jsonl"):
        Path(path).write_text(f'{{"kind": "start", "schema": {known + 1}, "time": 1.0}}\n' + Path(path).read_text())
    else:
        set_version(path, known + 1)
    before = Path(path).read_bytes()
    for what in refusing:
        if what in {"open", "plan"}:
            with pytest.raises(NewerFileError):
                open_attempt(run.attempt("44")) if what == "open" else read_planned_batch(run)
            continue
        verb, *options = what.split()
        runs = [run.path, run.path] if verb == "compare" else [run.path]
        assert main([verb, *runs, *options]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        first, second = said.err.splitlines()
        assert first.startswith(
            f"hpcddp: {path} was written by a newer hpcddp: its schema version is {known + 1}, this"
        )
        assert second.startswith("hint: upgrade hpcddp")
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize(
    ("folder", "verbs"),
    [("checkpoints", ["compare", "render"]), ("attempts", ["compare"]), (".", ["compare"]), ("..", ["render"])],
)
def test_a_run_folder_that_cannot_be_listed_is_told_in_two_lines_by_compare_and_render(
    old_run: OldRun, folder: str, verbs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests run as root, whom permissions do not stop: `os.scandir` is told to refuse."""
    run = old_run("chain")
    monkeypatch.chdir(os.path.dirname(run.path))
    Path("train.py").touch()  # render looks for the command's script first
    refused = os.path.normpath(os.path.join(run.path, folder))
    scan = os.scandir

    def refuse(path: str) -> object:
        if path == refused:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    if folder == ".":
        shutil.rmtree(run.attempts)  # then the runs in it would be named
    monkeypatch.setattr("hpcddp.runs.folder.os.scandir", refuse)
    command = json.loads(Path(run.plan).read_text())["command"]
    words = {
        "compare": [run.path, run.path],
        "render": ["--site", "local", "--set", f"run_dir={run.path}", "--", *command],
    }
    for verb in verbs:
        assert main([verb, *words[verb]]) == 2
        told = capsys.readouterr().err.splitlines()[-2:]
        assert told == [f"hpcddp: {refused} cannot be read: permission denied", f"hint: ls -ld {refused}"]


def test_exec_refuses_a_newer_run_folder_before_it_writes_rank_0s_address_there(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    set_version(run.about, SCHEMAS["run.json"] + 1)
    env = predict_environment("mpich", ["node1", "node2"], [1, 1], 0) | {"PBS_JOBID": "17", "HPCDDP_RUN_DIR": run.path}
    line = [sys.executable, "-m", "hpcddp", "exec", "--", "true"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "run.json was written by a newer hpcddp" in done.stderr
    assert os.listdir(run.path) == ["run.json"]


def test_a_chain_file_without_numbers_is_refused_and_no_chain_begins_anew(old_run: OldRun) -> None:
    run = old_run("chain")
    Path(run.attempt("42.pbs1").chain).write_text("{}")
    with pytest.raises(RequestError, match="does not say which attempt of its chain it was"):
        find_before(run.attempt("43.pbs1"))


def test_a_run_folder_gets_its_version_when_an_attempt_opens_it(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path / "runs" / "new"))
    open_attempt(run.attempt("1"))
    assert json.loads(Path(run.about).read_text()) == {"schema": 1}
    shutil.rmtree(run.attempts)
    set_version(run.about, SCHEMAS["run.json"] + 1)
    with pytest.raises(NewerFileError, match=r"run\.json was written by a newer hpcddp"):
        open_attempt(run.attempt("2"))
    assert not os.path.exists(run.attempts)


@pytest.mark.parametrize("damaged", ["", "[]", '{"schema": "x"}'])
def test_damaged_files_do_not_keep_an_attempt_from_opening_its_folder(old_run: OldRun, damaged: str) -> None:
    run = old_run("chain")
    attempt = run.attempt("42.pbs1")
    for path in (run.state, attempt.versions, attempt.metrics, *map(str, Path(run.path).glob("**/manifest.json"))):
        Path(path).write_text(damaged)
    open_attempt(attempt)
    assert os.path.exists(run.about)
