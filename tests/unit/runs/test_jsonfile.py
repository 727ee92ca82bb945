"""The JSON files of a run folder: replaced as a whole, with a schema version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcddp.runs import jsonfile
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.jsonfile import DamagedFileError, SchemaError, read_object, write_object
from hpcddp.runs.opening import check_run_folder, open_attempt


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_written_is_read_without_its_schema_version(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "new" / "data.json"
    write_object(str(path), {"step": 3}, durable=durable)
    assert json.loads(path.read_text()) == {"schema": 1, "step": 3}
    assert read_object(str(path)) == {"step": 3}
    assert [entry.name for entry in path.parent.iterdir()] == ["data.json"]


def test_a_writer_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "state.json")
    write_object(path, {"step": 3})

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(jsonfile.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_object(path, {"step": 4})
    assert read_object(path) == {"step": 3}


def test_no_file_is_none_and_a_file_that_says_no_schema_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert read_object(str(path)) is None
    assert read_object(str(path / "below" / "state.json")) is None
    path.write_text("{}")
    assert read_object(str(path)) == {}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "3", "\0", "\xff"),
        pytest.param("[" * 200_000, id="deep"),
    ],
)
def test_what_is_not_a_json_object_is_refused_in_two_lines(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(DamagedFileError, match=r"plan\.json.*\nhint: look at it: head "):
        read_object(str(path))


@pytest.mark.parametrize("schema", [2, 0, "1", None])
def test_another_schema_is_refused_with_both_numbers_and_what_to_do(tmp_path: Path, schema: object) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema": schema}))
    with pytest.raises(
        SchemaError, match=rf"plan\.json has schema {schema!r}, .* reads schema 1\nhint: use the hpcddp"
    ):
        read_object(str(path))


def test_a_damaged_run_json_is_restored_or_removed_as_its_hint_says(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    Path(run.about).write_text("{")
    with pytest.raises(DamagedFileError, match="then restore it, or remove it: the next attempt writes it again"):
        check_run_folder(run)
    Path(run.about).unlink()
    open_attempt(run.attempt("41"))
    assert read_object(run.about) == {}
