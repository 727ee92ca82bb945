"""`accept` and `keep` of a job reach its ranks: options and keys of the job file print the same lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.cli.main import main

ROWS = [
    ("accept: [lr, seed]\nkeep: weight_decay\n", [], ["HPCDDP_ACCEPT=lr,seed", "HPCDDP_KEEP=weight_decay"]),
    ("accept: lr seed\n", [], ["HPCDDP_ACCEPT=lr,seed"]),
    ("", ["--accept", "lr,seed", "--keep", "weight_decay"], ["HPCDDP_ACCEPT=lr,seed", "HPCDDP_KEEP=weight_decay"]),
    ("", ["--set", "keep=lr"], ["HPCDDP_KEEP=lr"]),
    ("", ["--resume", "train"], ["HPCDDP_ACCEPT=command"]),  # a run that is named takes the new words
    ("", ["--resume", "train", "--accept", "lr"], ["HPCDDP_ACCEPT=lr,command"]),
    ("", [], []),
]


@pytest.mark.parametrize(("file", "options", "said"), ROWS)
def test_what_is_accepted_and_kept_is_exported_to_the_ranks(
    file: str, options: list[str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(f"site: abci3\naccount: g\n{file}command: python train.py\n")
    assert main(["render", "--no-check", "job.yaml", *options]) == 0
    lines = capsys.readouterr().out.splitlines()  # type: ignore[attr-defined]  # pytest's
    names = ("HPCDDP_ACCEPT", "HPCDDP_KEEP")
    assert [
        line.removeprefix("export ") for line in lines if line.startswith(tuple(f"export {n}" for n in names))
    ] == said
    assert all(any(f"-x {name.partition('=')[0]}" in line for line in lines) for name in said)
