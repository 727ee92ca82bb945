"""A name of rank 0's host that is unknown here is an error at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.predict import predict_environment
from hpcddp.ranks.reach import require_resolved


def test_a_known_name_and_an_address_pass() -> None:
    for address in ("localhost", "127.0.0.1", "::1"):
        require_resolved(address, "MASTER_ADDR", "node2")


def test_an_unknown_name_is_named_with_its_source() -> None:
    with pytest.raises(LaunchError, match=r"'no-such-host.invalid' \(MASTER_ADDR\) does not resolve on node2"):
        require_resolved("no-such-host.invalid", "MASTER_ADDR", "node2")


def test_exec_stops_with_two_lines() -> None:
    env = predict_environment("mpich", ["node1", "node2"], [1, 1], 1)
    env |= {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "23456"}
    line = [sys.executable, "-m", "hpcddp", "exec", "--", "true"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "'no-such-host.invalid' (MASTER_ADDR) does not resolve on" in done.stderr
    assert "\nhint: " in done.stderr
