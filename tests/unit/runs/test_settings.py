"""What was recorded of a run is compared by one function: a table of differences, their remedies, and the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import RequestError
from hpcddp.runs.folder import RunFolder
from hpcddp.runs.jsonfile import DamagedFileError
from hpcddp.runs.settings import (
    OF_SCRIPT,
    OF_VERB,
    Decision,
    check_names,
    check_unchanged,
    compare_settings,
    decide,
    describe_start,
    read_list,
    read_recorded,
    renew,
    settings_at,
    write_settings,
)

OLD: dict[str, dict[str, Any]] = {
    "run": {"seed": 0, "samples": 40, "owner": "ann", "command": ["python", "train.py", "--lr", "0.1", "--amp"]},
    "script": {"train.py": "aa", "conf.yaml": "bb"},
    "optimizer": {"class": "SGD", "lr": 0.1, "betas": [0.9, 0.99], "parameters": ["model.a", "model.b"]},
    "scheduler": {"class": "StepLR", "gamma": 0.5},
}
RUN = RunFolder("runs/train")


def with_(group: str, **values: Any) -> dict[str, dict[str, Any]]:
    return {**OLD, group: {**OLD.get(group, {}), **values}}


def without(group: str) -> dict[str, dict[str, Any]]:
    return {name: values for name, values in OLD.items() if name != group}


NO_CONF = {**OLD, "script": {"train.py": "aa", "other.yaml": "cc"}}
ROWS = [
    # now, what is said, --accept, --keep
    (OLD, "", "", ""),
    (with_("optimizer", lr=0.4), "optimizer.lr: 0.1 -> 0.4", "lr", "lr"),
    (with_("optimizer", betas=[0.8, 0.99]), "optimizer.betas: [0.9, 0.99] -> [0.8, 0.99]", "betas", "betas"),
    (with_("optimizer", **{"class": "Adam"}), "optimizer.class: SGD -> Adam", "class", ""),
    (with_("optimizer", parameters=["model.a", "model.c"]), "optimizer.parameters: model.b -> model.c", "", ""),
    (with_("optimizer[1]", lr=0.1), "optimizer[1]: none -> there", "", ""),
    (with_("scheduler", gamma=0.9), "scheduler.gamma: 0.5 -> 0.9", "gamma", "gamma"),
    (without("scheduler"), "scheduler: StepLR -> none", "scheduler", ""),
    (with_("run", seed=1), "seed: 0 -> 1", "seed", "seed"),
    (with_("run", samples=41), "samples: 40 -> 41", "samples", ""),
    (with_("run", owner="bob"), "owner: ann -> bob", "owner", ""),
    (with_("run", command=["python", "train.py", "--lr", "0.2", "--amp"]), "command: 0.1 -> 0.2", "command", ""),
    (with_("run", command=["python", "train.py", "--lr", "0.1"]), "command: --amp -> none", "command", ""),
    # what only one of the two knows is no difference: a notebook's words, a loader that comes later, a new option
    ({**OLD, "run": {"seed": 0}}, "", "", ""),
    (with_("optimizer", fast=True), "", "", ""),
    (NO_CONF, "", "", ""),
]


@pytest.mark.parametrize(("now", "said", "accept", "keep"), ROWS, ids=[f"{n}-{row[1]}" for n, row in enumerate(ROWS)])
def test_a_difference_is_an_error_until_it_is_accepted_or_kept(
    now: dict[str, Any], said: str, accept: str, keep: str
) -> None:
    found = compare_settings(OLD, now)
    assert [str(one) for one in found] == ([said] if said else [])
    if not said:
        assert decide(RUN, found, (), (), hints=OF_VERB) == Decision()
        return
    with pytest.raises(RequestError) as caught:
        decide(RUN, found, (), (), hints=OF_VERB)
    assert caught.value.message == f"run runs/train was recorded with other settings: {said}"
    assert (f"--accept {accept} takes the new" in caught.value.hint) == bool(accept)
    assert (f"--keep {keep} the recorded" in caught.value.hint) == bool(keep)
    assert "--fresh" in caught.value.hint
    names = {found[0].name, found[0].group, f"{found[0].group}.{found[0].name}"}
    for name in names - {"", "run", f"{found[0].group}.", f"run.{found[0].name}"}:
        if accept:
            assert decide(RUN, found, [name], (), hints=OF_VERB) == Decision(tuple(found), ())
        if keep:
            assert decide(RUN, found, (), [name], hints=OF_VERB) == Decision((), tuple(found))
        else:
            with pytest.raises(RequestError):
                decide(RUN, found, (), [name], hints=OF_VERB)


def test_all_differences_are_in_one_error_and_its_hint_has_what_is_given_already() -> None:
    now = {**with_("optimizer", lr=0.4), "run": {**OLD["run"], "seed": 1, "owner": "bob"}}
    with pytest.raises(RequestError) as caught:
        decide(RUN, compare_settings(OLD, now), ["owner"], (), hints=OF_VERB)
    assert str(caught.value) == (
        "run runs/train was recorded with other settings: seed: 0 -> 1; optimizer.lr: 0.1 -> 0.4\n"
        "hint: --accept owner,seed,lr takes the new; --keep seed,lr the recorded; a run of its own: --fresh, or another"
        " name"
    ), "two lines, to be typed as they are"


def test_a_script_that_no_verb_has_started_is_told_what_can_be_written_in_it() -> None:
    with pytest.raises(RequestError) as caught:
        decide(RUN, compare_settings(OLD, with_("run", seed=1)), (), ("lr",), hints=OF_SCRIPT)
    assert caught.value.hint == (
        'hpcddp.runtime(…, accept="seed") takes the new; hpcddp.runtime(…, keep="lr,seed") the recorded; a run of its'
        " own: another run_dir"
    )


def test_a_changed_script_is_a_line_while_the_run_is_unfinished_and_an_error_when_it_is_finished() -> None:
    found = compare_settings(OLD, with_("script", **{"train.py": "zz"}))
    assert [str(one) for one in found] == ["train.py has changed"]
    decision = decide(RUN, found, (), (), hints=OF_VERB)
    assert decision.accepted == tuple(found)
    with pytest.raises(
        RequestError, match=r"is finished, and train.py has changed since\nhint: --accept script takes .*: --fresh"
    ):
        check_unchanged(RUN, decision, OF_VERB)
    check_unchanged(RUN, decide(RUN, found, ["script"], (), hints=OF_VERB), OF_VERB)


def test_an_accepted_value_is_recorded_with_the_step_that_it_holds_from(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    assert read_recorded(run) is None
    recorded = renew(None, OLD, Decision(), 0)
    for step, lr in ((10, 0.2), (20, 0.3)):
        now = with_("optimizer", lr=lr)
        recorded = renew(
            recorded, now, decide(run, compare_settings(recorded.settings, now), ["lr"], (), hints=OF_VERB), step
        )
    now = with_("scheduler", gamma=0.9)
    kept = decide(
        run,
        compare_settings(recorded.settings, {**now, "optimizer": recorded.settings["optimizer"]}),
        (),
        ["gamma"],
        hints=OF_VERB,
    )
    write_settings(run, renew(recorded, {**now, "optimizer": recorded.settings["optimizer"]}, kept, 30))
    again = read_recorded(run)
    assert again is not None
    assert again.settings == with_("optimizer", lr=0.3)
    # the checkpoint of the step at which a value was accepted was written before that
    rates = [settings_at(again, step)["optimizer"]["lr"] for step in (5, 10, 11, 20, 21)]
    assert rates == [0.1, 0.1, 0.2, 0.2, 0.3]
    assert [one["settings"]["optimizer"]["lr"] for one in again.before] == [0.1, 0.2]


@pytest.mark.parametrize("text", ["[]", '{"settings": {"run": 1}}'])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(DamagedFileError, match=r"settings\.json"):
        read_recorded(RunFolder(str(tmp_path)))


def test_a_name_that_no_setting_has_is_refused_with_the_nearest() -> None:
    check_names(["lr", "optimizer", "optimizer.lr", "script", "train.py", "command", "samples_2"], [OLD], "--accept {}")
    with pytest.raises(RequestError, match=r"--keep gama: the run has no such setting \(did you mean 'gamma'\?\)"):
        check_names(["gama"], [OLD], "--keep {}")


def test_names_in_a_variable_have_commas_between_them() -> None:
    assert read_list({"HPCDDP_KEEP": "lr, seed,"}, "HPCDDP_KEEP") == ("lr", "seed")
    assert read_list({}, "HPCDDP_KEEP") == ()


def test_a_start_is_its_owner_its_words_and_the_files_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = RunFolder(str(tmp_path / "run")).attempt("4711.pbs1.2")
    for name in ("train.py", "conf.yaml", "a.json", "large.bin", "run/log.txt", "solve"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * (2**20 + 1 if name == "large.bin" else 1))
    (tmp_path / "solve").write_bytes(b"\x7fELF\x02")
    monkeypatch.chdir(tmp_path)

    def describe(words: str, main: str | None = None, told: str = "") -> dict[str, Any]:
        monkeypatch.setattr(sys, "orig_argv", words.split())
        return describe_start(attempt, main, {"HPCDDP_COMMAND": told.replace(" ", "\x1f")} if told else {})

    words = "/opt/bin/python3 -u train.py --conf=conf.yaml a.json large.bin run/log.txt ./solve --port 14711"
    start = describe(f"{words} --out out/4711.pbs1 absent.txt", "train.py")
    assert sorted(start["script"]) == ["a.json", "conf.yaml", "train.py"]
    assert start["run"]["command"][:3] == ["python", "train.py", "--conf=conf.yaml"]
    assert start["run"]["command"][-4:-1] == ["14711", "--out", "out/…"], "each start of a job has another id"
    assert start["run"]["owner"]
    otherwise = describe("python ./train.py --conf=./conf.yaml ./a.json")
    assert otherwise["script"] == start["script"], "a file is compared however it is written"
    of_module = describe("python -m train", str(tmp_path / "train.py"))
    assert list(of_module["script"]) == ["train.py"]
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    assert describe(words) == {"run": {"owner": start["run"]["owner"]}, "script": {}}


@pytest.mark.parametrize(
    ("typed", "process", "files"),
    [
        ("env SCALE=5 python train.py", "python train.py", ["train.py"]),
        ("bash run.sh --fast", "python train.py --lr 0.1", ["run.sh", "train.py"]),
        ("./run.sh", "python train.py", ["run.sh", "train.py"]),
        ("torchrun --nproc-per-node 2 train.py", "/opt/bin/python -u train.py", ["train.py"]),
        ("python train.py --ranks {world_size}", "/opt/bin/python train.py --ranks 4", ["train.py"]),
    ],
)
def test_what_is_recorded_is_the_job_s_command_whatever_process_of_it_opens_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, process: str, files: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "run.sh").write_text("#!/bin/bash\n")
    monkeypatch.setattr(sys, "orig_argv", process.split())
    start = describe_start(
        RunFolder(str(tmp_path / "r")).attempt("1"), "train.py", {"HPCDDP_COMMAND": typed.replace(" ", "\x1f")}
    )
    assert " ".join(start["run"]["command"]) == typed.removeprefix("./")
    assert sorted(start["script"]) == files
