"""The reader of /proc gives what is true of a process that is known."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from hpcddp.processes import (
    find_machine,
    list_processes,
    process_lives,
    read_argv,
    read_environ,
    read_stat,
    start_time,
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        ["sh", "-c", 'printf "a) (b" > /proc/self/comm; echo; read -r line', "one word"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "MARK": "here"},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate()


def test_a_process_is_read_whatever_its_name_holds(child: subprocess.Popen[str]):
    stat = read_stat(child.pid)
    assert stat is not None
    assert (stat.name, stat.parent, stat.session) == ("a) (b", os.getpid(), child.pid)
    assert stat.started == start_time(child.pid) != ""
    assert stat.pages > 0
    assert child.pid in list_processes()
    assert b"MARK=here" in read_environ(child.pid)
    assert read_argv(child.pid)[3] == "one word"


def test_nothing_is_said_of_a_process_that_has_ended(child: subprocess.Popen[str]):
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is still there, as a zombie
    assert start_time(child.pid) == ""
    child.wait()
    assert read_stat(child.pid) is None
    assert (read_environ(child.pid), read_argv(child.pid), start_time(child.pid)) == (frozenset(), [], "")


def test_a_process_lives_until_it_ends_or_its_host_starts_anew(child: subprocess.Popen[str]):
    host, machine, started = os.uname().nodename, find_machine(), start_time(child.pid)
    kernel, space = machine.split()
    assert process_lives(child.pid, started, host, machine) is True
    assert process_lives(child.pid, "0", host, machine) is False  # another one has its number now
    assert process_lives(child.pid, "", host, machine) is None
    assert process_lives(child.pid, started, host, f"before {space}") is False
    for elsewhere in ((host, f"{kernel} other"), ("other", f"before {space}"), (host, "")):
        assert process_lives(child.pid, started, *elsewhere) is None
    child.kill()
    child.wait()
    assert process_lives(child.pid, started, host, machine) is False
    assert process_lives(child.pid, "", host, machine) is False
