"""The door: verbs, errors in two lines, exit statuses, and what a failed render leaves behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcddp.cli.streams import refusal
from hpcddp.cli.verbs import VERBS

REFUSAL = refusal()


def hpcddp(*argv: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcddp", *argv], capture_output=True, text=True, timeout=600, check=False, **more
    )


def test_the_help_names_every_verb() -> None:
    said = hpcddp("--help")
    assert said.returncode == 0
    for verb, text in VERBS.items():
        assert verb in said.stdout
        assert text in said.stdout


@pytest.mark.parametrize("argv", [["--nodes", "0"], ["--site", "nosuch"]])
def test_a_failed_render_leaves_only_the_refusal_on_the_pipe(argv: list[str]) -> None:
    said = hpcddp("render", *argv)
    assert said.returncode in {2, 3}
    assert said.stdout == REFUSAL
    assert "hint:" in said.stderr
    assert "Traceback" not in said.stderr


def test_an_interrupted_render_leaves_the_refusal(tmp_path: object) -> None:
    fifo = os.path.join(str(tmp_path), "job.yaml")
    os.mkfifo(fifo)  # render blocks while it waits for somebody to write its job file
    with subprocess.Popen(
        [sys.executable, "-m", "hpcddp", "render", fifo],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs the tests in the background has SIGINT ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while True:  # until it reads
            try:
                writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        os.close(writer)  # a read that began just after the signal came ends as well
        try:
            out, _ = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 130
    assert out == REFUSAL


def test_a_crash_of_hpcddp_leaves_the_refusal_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hpcddp.cli import main as door

    def crash(_argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(door, "_run", crash)
    with pytest.raises(ZeroDivisionError):
        door.main(["render"])
    assert capsys.readouterr().out == REFUSAL


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line of shell in which $HPCDDP is the program."""
    env = os.environ | {"HPCDDP": f"{sys.executable} -m hpcddp"}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=600, check=False, env=env)


def test_output_on_a_full_disk_is_an_error_in_two_lines() -> None:
    said = shell("$HPCDDP render --site local -- true >/dev/full")
    assert said.returncode == 2
    assert said.stderr.splitlines()[-2:] == [
        "hpcddp: the output cannot be written: no space left on device",
        "hint: df -h .",
    ]


def test_a_script_and_a_refusal_are_whole_even_if_remarks_cannot_be_printed() -> None:
    assert shell("$HPCDDP render --site nosuch 2>/dev/full").stdout == REFUSAL
    said = shell("$HPCDDP render --site local 2>/dev/full -- true")
    assert (said.returncode, said.stdout.startswith("#!/bin/bash\n")) == (0, True)


@pytest.mark.parametrize("verb", ["status", "render --site local -- true", "submit --site local -- touch begun"])
def test_a_closed_output_is_refused_before_anything_is_done(verb: str, tmp_path: Path) -> None:
    said = shell(f"cd {tmp_path} && $HPCDDP {verb} >&-")
    assert (said.returncode, said.stdout, os.listdir(tmp_path)) == (2, "", [])
    assert said.stderr.splitlines() == [
        "hpcddp: standard output is closed, and the answer would go nowhere",
        "hint: leave out `>&-`",
    ]


def test_closed_streams_that_are_not_needed_do_no_harm() -> None:
    for closed in ("2>&-", "<&-"):
        assert shell(f"$HPCDDP env {closed}").stdout.startswith("a single process")
    said = shell("$HPCDDP render --site nosuch 2>&-")
    assert (said.returncode, said.stdout) == (3, REFUSAL)
    said = shell("$HPCDDP exec -- bash -c 'echo no >&2; exit 7' >&-")
    assert (said.returncode, said.stderr) == (7, "no\n")


def test_exec_says_the_words_that_were_typed_to_what_it_starts_before_it_fills_placeholders() -> None:
    """A longer list than a variable holds is not said: the kernel would start no program with that."""
    program = "import os, sys; print(os.environ['HPCDDP_COMMAND'].split('\\x1f')[3:], sys.argv[1])"
    env = {**os.environ, "HPCDDP_LAUNCHER": "none"}
    for word, told in (("{world_size}", "['{world_size}'] 1\n"), (long := "é" * 50_000, f"[] {long}\n")):
        assert hpcddp("exec", "--", sys.executable, "-c", program, word, env=env).stdout == told
