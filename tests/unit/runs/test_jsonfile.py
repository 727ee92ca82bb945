"""The JSON files of a run folder: replaced as a whole, with a schema version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcddp.record import Record
from hpcddp.runs import jsonfile
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.jsonfile import DamagedFileError, SchemaError, read_object, read_record, write_object
from hpcddp.runs.state import check_run_folder, open_attempt


def test_what_is_written_is_read_without_its_schema_version(tmp_path: Path) -> None:
    path = tmp_path / "new" / "data.json"
    write_object(str(path), {"step": 3}, durable=True)
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


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", pytest.param("[" * 200_000, id="deep")])
def test_what_is_not_a_json_object_is_refused_in_two_lines(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(DamagedFileError, match=r"plan\.json.*\nhint: look at it: head "):
        read_object(str(path))


@pytest.mark.parametrize("schema", [2, "1", None])
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
    with pytest.raises(DamagedFileError, match="; then restore it, or remove it"):
        check_run_folder(run)
    Path(run.about).unlink()
    open_attempt(run.attempt("41"))
    assert read_object(run.about) == {}


class Sample(Record):
    name: str
    step: int
    loss: float | None = None
    words: tuple[str, ...] = ()
    axes: dict[str, list[str]] = {}  # noqa: RUF012  # never changed
    ended: bool = True


@pytest.mark.parametrize(
    ("content", "record"),
    [
        ({"name": "a", "step": 3}, Sample("a", 3)),
        ({"name": "a", "step": 3, "of a later release": {}}, Sample("a", 3)),
        ({"name": "", "step": -1, "loss": 1, "words": ["x"]}, Sample("", -1, 1, ("x",))),
        ({"name": "a", "step": 3, "axes": {"lr": ["1"]}}, Sample("a", 3, axes={"lr": ["1"]})),
    ],
)
def test_a_file_is_read_as_a_record(tmp_path: Path, content: dict[str, object], record: Sample) -> None:
    path = str(tmp_path / "data.json")
    assert read_record(path, Sample) is None
    write_object(path, content)
    assert read_record(path, Sample) == record


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": None}, "its name is None"),
        ({"step": "3"}, "its step is '3'"),
        ({"step": True}, "its step is True"),
        ({"loss": "1"}, "its loss is '1'"),
        ({"loss": float("nan")}, "its loss is nan"),
        ({"words": "x"}, "its words is 'x'"),
        ({"words": ["x", 1]}, "its words is ['x', 1]"),
        ({"axes": {"lr": ["1", 2]}}, "its axes is {'lr': ['1', 2]}"),
        ({"ended": 1}, "its ended is 1"),
    ],
)
def test_a_value_of_another_type_is_refused_in_two_lines(tmp_path: Path, change: dict[str, object], fault: str) -> None:
    path = str(tmp_path / "data.json")
    write_object(path, {"name": "a", "step": 3} | change)
    with pytest.raises(DamagedFileError) as error:
        read_record(path, Sample)
    hint = f"look at it: head {path}; then restore it, or remove it"
    assert str(error.value) == f"{path} does not hold what hpcddp writes: {fault}\nhint: {hint}"
    write_object(path, {"name": "a"})
    with pytest.raises(DamagedFileError, match="it has no step"):
        read_record(path, Sample)
