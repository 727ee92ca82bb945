"""The door: verbs, errors in two lines, exit statuses, and what a failed render leaves behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hpcddp.cli.main import VERBS
from hpcddp.cli.streams import refusal

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


@pytest.mark.parametrize(
    "argv",
    [
        ["--nodes", "0"],
        ["--site", "nosuch"],
    ],
)
def test_a_failed_render_leaves_only_the_refusal_on_the_pipe(argv: list[str]) -> None:
    said = hpcddp("render", *argv)
    assert said.returncode in {2, 3}
    assert said.stdout == REFUSAL
    assert "hint:" in said.stderr
    assert "Traceback" not in said.stderr


def test_the_refusal_has_no_shebang_and_ends_a_shell_with_2() -> None:
    assert not REFUSAL.startswith("#!")
    assert REFUSAL.splitlines()[0].startswith("#PBS ")
    assert any(line.startswith("#$ -") for line in REFUSAL.splitlines())
    assert subprocess.run(["bash"], input=REFUSAL, text=True, capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_render_leaves_the_refusal(signum: int, tmp_path: object) -> None:
    fifo = os.path.join(str(tmp_path), "job.yaml")
    os.mkfifo(fifo)  # render blocks while it waits for somebody to write its job file
    with subprocess.Popen(
        [sys.executable, "-m", "hpcddp", "render", fifo],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs the tests in the background has SIGINT ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL),
    ) as process:
        while True:  # until it reads
            try:
                writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.01)
        process.send_signal(signum)
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


@pytest.mark.parametrize("verb", ["render --site local -- true", "env", "--help"])
@pytest.mark.parametrize(("where", "why"), [(">&-", "standard output is closed"), (">/dev/full", "no space left")])
def test_output_that_goes_nowhere_is_an_error_in_two_lines(verb: str, where: str, why: str) -> None:
    said = shell(f"$HPCDDP {verb} {where}")
    assert said.returncode == 2
    *_, first, second = said.stderr.splitlines()
    assert why in first
    assert second.startswith("hint: ")
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_a_failed_render_leaves_the_refusal_even_if_it_cannot_tell_anybody(where: str) -> None:
    assert shell(f"$HPCDDP render --site nosuch {where}").stdout == REFUSAL


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_a_script_is_whole_even_if_its_remarks_cannot_be_told(where: str) -> None:
    said = shell(f"$HPCDDP render --site local {where} -- true")
    assert said.returncode == 0
    assert said.stdout == shell("$HPCDDP render --site local -- true").stdout


@pytest.mark.parametrize("where", ["2>&-", "<&-"])
def test_a_closed_stream_that_is_not_needed_does_no_harm(where: str) -> None:
    assert shell(f"$HPCDDP env {where}").stdout.startswith("a single process")


def test_exec_says_the_words_that_were_typed_to_what_it_starts_before_it_fills_placeholders() -> None:
    """A longer list than a variable holds is not said: the kernel would start no program with that."""
    program = "import os, sys; print(os.environ['HPCDDP_COMMAND'].split('\\x1f')[3:], sys.argv[1])"
    env = {**os.environ, "HPCDDP_LAUNCHER": "none"}
    for word, told in (("{world_size}", "['{world_size}'] 1\n"), (long := "é" * 50_000, f"[] {long}\n")):
        assert hpcddp("exec", "--", sys.executable, "-c", program, word, env=env).stdout == told
