"""Every verb, also of those that come later, works in a terminal whose encoding lacks some of the characters.

People get such a character spelt in others. What a program reads, a job script above all, has the same bytes as ever.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.cli.main import VERBS, main
from hpcddp.cli.streams import refusal

REPO = Path(__file__).parents[3]
EXACT = ("utf-8", "surrogateescape")
STATE = {"schema": 1, "status": "unfinished", "step": 3, "epoch": 0, "reason": "Größe…", "attempt": "ü"}

REQUEST = ["--site", "local", "--ranks-per-node", "2", "--set", "run_dir=läufe", "--", "true", "データ/ç.py", "…"]
# verb -> what is typed, and who reads the answer. It has characters that ASCII lacks, but for PLAIN.
PLAIN = [["sites"], ["sites", "show", "aurora", "--json"], ["train", "--help"], ["completion", "bash"]]
PEOPLE, PROGRAMS = False, True
SAID = {
    "render": [
        (REQUEST, PROGRAMS),
        (["--explain", *REQUEST], PEOPLE),
        (["--nodes", "…"], PEOPLE),
    ],
    "init": [(["--site", "lökal"], PEOPLE)],
    "layout": [(["--site", "local", "--ranks-per-node", "70", "--", "true"], PEOPLE)],
    "advise": [(["ç.py:f", "--gpu-memory", "80GB"], PEOPLE)],
    "lint": [(["ç.sh"], PEOPLE), (["nîcht.sh"], PEOPLE)],
    "sites": [
        ([], PEOPLE),
        (["show", "./ç.yaml"], PEOPLE),
        (["show", "aurora", "--json"], PEOPLE),
        (["new", "mine", "--file", "neu-ç.yaml"], PROGRAMS),
    ],
    "env": [(["--from", "ç.env", "--hostname", "knötchen"], PEOPLE), (["--from", "nîcht"], PEOPLE)],
    "exec": [(["--help"], PEOPLE), (["…"], PEOPLE)],
    "launch": [
        (["--here", "--dry-run", "--", "true", "データ/ç.py"], PROGRAMS),
        (["--launcher", "müsli", "--here", "--", "true"], PEOPLE),
    ],
    "submit": [(["--site", "local", "--dry-run", "--no-check", "--", "true", "データ/ç.py"], PROGRAMS)],
    "status": [(["läufe"], PEOPLE), (["nîcht"], PEOPLE)],
    "diagnose": [(["läufe"], PEOPLE), (["nîcht"], PEOPLE)],
    "stacks": [(["läufe"], PEOPLE), (["nîcht"], PEOPLE)],
    "efficiency": [(["läufe"], PEOPLE), (["nîcht"], PEOPLE)],
    "watch": [(["läufe"], PEOPLE), (["nîcht"], PEOPLE)],
    "logs": [(["läufe"], PEOPLE), (["nîcht"], PEOPLE)],
    "cancel": [(["läufe"], PEOPLE), (["nîcht"], PEOPLE)],
    "supervise": [],  # job scripts call it
    "check": [(["--site", "nîcht"], PEOPLE)],
    "train": [(["--help"], PEOPLE), (["--exact", "zahlen…"], PEOPLE)],
    "verify": [(["--", "python", "nîcht.py"], PEOPLE)],
    "compare": [(["läufe", "nîcht"], PEOPLE)],
    "completion": [(["bash"], PROGRAMS), (["tçsh"], PEOPLE)],
    "help": [([], PEOPLE), (["exec"], PEOPLE), (["…"], PEOPLE)],
}
ASKED = [pytest.param(verb, *said, id=shlex.join([verb, *said[0]])) for verb in SAID for said in SAID[verb]]


def test_no_verb_is_left_out() -> None:
    assert set(SAID) == set(VERBS)


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Status, stdout and stderr of a verb, in this process, in a folder where the words above mean something."""
    for name in list(os.environ):
        if name.startswith(("HPCDDP_", "SLURM", "PBS", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HPCDDP_ATTEMPT", "ü")

    def ask(words: list[str], encoding: str) -> tuple[int | str | None, bytes, bytes]:
        here = tmp_path / "here"
        shutil.rmtree(here, ignore_errors=True)
        (here / "läufe").mkdir(parents=True)
        (here / "läufe/state.json").write_text(json.dumps(STATE))
        (here / "ç.sh").write_bytes("#!/bin/bash\n#PBS -l walltme=ç\nmpirun python データ.py\n# ".encode() + b"\xff\n")
        (here / "ç.env").write_text("OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=ç\n")
        (here / "ç.yaml").write_text((REPO / "templates/sites/local.yaml").read_text().replace("machine", "Küche…"))
        monkeypatch.chdir(here)
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
        with monkeypatch.context() as m:
            m.setattr(sys, "stdout", out)
            m.setattr(sys, "stderr", err)
            try:
                status: int | str | None = main(words)
            except SystemExit as left:
                status = left.code
            out.flush()
            err.flush()
        return status, out.buffer.getvalue(), err.buffer.getvalue()

    return ask


def spelt(text: bytes, encoding: str) -> bytes:
    """The same for people who read this encoding."""

    def spell(character: str) -> bytes:
        try:
            return character.encode(encoding, "surrogateescape")
        except UnicodeEncodeError:
            return b"..." if character == "…" else ascii(character)[1:-1].encode()

    return b"".join(map(spell, text.decode(*EXACT)))


@pytest.mark.parametrize(("verb", "words", "for_programs"), ASKED)
def test_every_verb_answers_in_any_encoding(verb, words, for_programs, answer):
    status, out, err = answer([verb, *words], "utf-8")
    assert not (for_programs and status), err
    assert (out + err).isascii() is ([verb, *words] in PLAIN)
    for encoding in ("ascii", "latin-1", "cp932"):
        expected = status, out if for_programs else spelt(out, encoding), spelt(err, encoding)
        assert answer([verb, *words], encoding) == expected


def start(words: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    """A Python of its own, with this environment."""
    argv = [sys.executable, "-m", "hpcddp", *words]
    return subprocess.run(argv, cwd=folder, env={"PATH": os.environ["PATH"], **env}, capture_output=True, check=False)


def test_a_script_is_the_same_whatever_the_terminals_encoding(tmp_path):
    words = ["render", *REQUEST]
    text = start(words, tmp_path, PYTHONUTF8="1")
    assert "データ/ç.py".encode() in text.stdout
    for encoding in ("ascii", "latin-1"):
        assert start(words, tmp_path, PYTHONUTF8="1", PYTHONIOENCODING=encoding).stdout == text.stdout


IN_WORDS = ["--site", "local", "--", "true", "ç.py"]
IN_A_FILE = {
    "site.yaml": "command: [true]\nsite: ./ç.yaml\n",
    "script.yaml": "command: python ç.py\nsite: local\n",
    "folder.yaml": "command: [true]\nsite: local\npythonpath: [.ç]\n",
}


@pytest.mark.parametrize("words", [IN_WORDS, *([file] for file in IN_A_FILE)], ids=["option", *IN_A_FILE])
def test_where_python_itself_knows_only_ascii_a_job_that_needs_more_is_refused(words, tmp_path):
    (tmp_path / "ç.py").touch()
    for file, text in IN_A_FILE.items():
        (tmp_path / file).write_text(text)
    done = start(["render", *words], tmp_path, PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 2
    assert done.stdout.decode() == refusal()
    assert done.stderr.decode().endswith("\nhint: export PYTHONUTF8=1\n")
    assert "Traceback" not in done.stderr.decode()


def test_where_python_itself_knows_only_ascii_a_name_is_printed_as_it_is(tmp_path):
    done = start(["status", "nîcht"], tmp_path, PYTHONUTF8="0", LC_ALL="C")
    assert (
        done.stderr.decode() == "hpcddp: there is no run 'nîcht' in runs/\nhint: cd to the folder that has its runs/\n"
    )
