"""A run folder is read as this hpcddp writes it; a file of another schema, or one that is damaged, is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.errors import RequestError
from hpcddp.ranks.predict import predict_environment
from hpcddp.runs.chain import Link, find_before, find_follow_up, start_attempt, write_follow_up
from hpcddp.runs.compare import read_run
from hpcddp.runs.folder import RunFolder, list_attempts
from hpcddp.runs.jsonfile import SchemaError
from hpcddp.runs.state import open_attempt, read_planned_batch


def set_schema(path: str, number: int) -> None:
    content = json.loads(Path(path).read_text()) if os.path.exists(path) else {}
    Path(path).write_text(json.dumps(content | {"schema": number}))


def test_a_record_has_every_step_over_all_attempts(chain_run: RunFolder) -> None:
    record = read_run(chain_run.path)
    assert list(record.steps) == [1, 2, 3, 4]
    assert read_planned_batch(chain_run) == 8


def test_the_next_attempt_of_a_chain_starts_where_the_last_one_stopped(chain_run: RunFolder) -> None:
    assert [attempt.name for attempt in list_attempts(chain_run)] == ["41.pbs1.1", "42.pbs1.1"]
    attempt = chain_run.attempt("43.pbs1.1")
    open_attempt(attempt)
    assert find_before(attempt) == Link("42.pbs1.1", 2, 2, 3)
    decision, link = start_attempt(attempt, 3)
    assert (decision.reason, link, link.left) == ("", Link("43.pbs1.1", 3, 4, 3), 0)
    write_follow_up(attempt, "44.pbs1")
    again = chain_run.attempt("43.pbs1.2")  # another start of the same job is the same link
    assert find_follow_up(again) == "44.pbs1"
    assert start_attempt(again, 3)[1].turn == 3


@pytest.mark.parametrize(
    ("file", "refusing"),
    [
        ("run.json", ["status", "chain", "compare", "open", "plan"]),
        ("state.json", ["status", "chain", "compare"]),
        ("plan.json", ["plan"]),
        ("attempts/42.pbs1.1/chain.json", ["chain"]),
        ("attempts/41.pbs1.1/metrics.jsonl", ["compare"]),
        ("checkpoints/step-00000004/manifest.json", ["compare"]),
    ],
)
def test_a_file_of_another_schema_is_refused_in_two_lines_by_everything_that_reads_it(
    chain_run: RunFolder, file: str, refusing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkdir(chain_run.attempt("43.pbs1.1").path)
    path = os.path.join(chain_run.path, file)
    if file.endswith("metrics.jsonl"):
        Path(path).write_text('{"kind": "start", "schema": 2, "time": 1.0}\n' + Path(path).read_text())
    else:
        set_schema(path, 2)
    before = Path(path).read_bytes()
    calls = {
        "open": lambda: open_attempt(chain_run.attempt("44")),
        "plan": lambda: read_planned_batch(chain_run),
        "chain": lambda: start_attempt(chain_run.attempt("43.pbs1.1"), 3),
    }
    for what in refusing:
        if what in calls:
            with pytest.raises(SchemaError):
                calls[what]()
            continue
        assert main([what, *[chain_run.path] * (2 if what == "compare" else 1)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.splitlines()[:2] == [
            f"hpcddp: {path} has schema 2, and this hpcddp reads schema 1",
            "hint: use the hpcddp that wrote it: python -m pip install --upgrade hpcddp",
        ]
    assert Path(path).read_bytes() == before


def test_exec_refuses_a_run_folder_of_another_schema_before_it_writes_rank_0s_address_there(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    set_schema(run.about, 2)
    env = predict_environment("mpich", ["node1", "node2"], [1, 1], 0) | {"PBS_JOBID": "17", "HPCDDP_RUN_DIR": run.path}
    line = [sys.executable, "-m", "hpcddp", "exec", "--", "true"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "run.json has schema 2" in done.stderr
    assert os.listdir(run.path) == ["run.json"]


def test_a_chain_file_without_numbers_is_refused_and_no_chain_begins_anew(chain_run: RunFolder) -> None:
    Path(chain_run.attempt("42.pbs1.1").chain).write_text("{}")
    with pytest.raises(RequestError, match=r"chain\.json does not hold what hpcddp writes: it has no attempt"):
        find_before(chain_run.attempt("43.pbs1.1"))
