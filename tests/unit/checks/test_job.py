"""The checker with 64 hosts, which one process plays: who is asked what, in how many rounds, and what follows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpcddp.checks.environment import FAILED, OK
from hpcddp.checks.job import Checker, CheckRequest, format_report

PLAY = """
import json, select, socket, sys, time
from hpcddp.checks.node import CheckedNode, Process

key, port, _ = sys.argv[-1].split(":", 2)
hosts, rests, poll = {}, {}, select.poll()
for rank in range(64):
    connection = socket.create_connection(("localhost", int(port)))
    hosts[connection.fileno()] = connection, f"n{rank}", Process(f"n{rank}", rank, 64, 0, 1)._asdict()
    connection.sendall(json.dumps({"key": key, "process": hosts[connection.fileno()][2]}).encode() + b"\\n")
    rests[connection.fileno()] = b""
    poll.register(connection, select.POLLIN)

def answer(host, process, order):
    slow = "n7" in {host, order.get("address")}
    return {
        "look": {"node": CheckedNode(host, 8.0, files=99 if host == "n9" else 9999)._asdict(), "gpus": []},
        "measure": {"process": process, "gpus": [], "of_node": {}},
        "clock": {"time": time.time()},
        "listen": {"host": host, "port": 1},
        "reach": {"resolve_error": "", "reach_error": "no answer" if host == "n3" else ""},
        "open_store": {"address": host, "port": 1},
        "exchange": {"gbps": 0.1 if slow else 10.0, "ms": 0.02, "all_reduce_gbps": 5.0},
    }[order.get("what") or order["do"]]

while True:
    for number, _ in poll.poll():
        connection, host, process = hosts[number]
        data = connection.recv(65536)
        if not data:
            sys.exit()
        *lines, rests[number] = (rests[number] + data).split(b"\\n")
        for order in map(json.loads, lines):
            said = {"id": order.pop("id"), **answer(host, process, order)}
            connection.sendall(json.dumps(said).encode() + b"\\n")
"""


def test_of_64_hosts_the_ill_ones_are_named_and_the_slow_one_after_two_rounds(tmp_path: Path) -> None:
    launcher = tmp_path / "play.py"
    launcher.write_text(PLAY)
    expected = tuple(f"n{at}" for at in range(64))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    report = Checker(
        CheckRequest((sys.executable, str(launcher)), hosts=expected, patience=20), env, lambda _: None
    ).check()
    found = {host: check.name for host, check in report.checks}
    assert found == {"n9": "open files", "n3": "rank 0's port", "n7": "slow host"}
    assert report.hosts == dict.fromkeys(expected, OK) | dict.fromkeys(found, FAILED)
    met = [sum(host in pair for pair in report.pairs) for host in expected if host not in {"n3", "n9"}]
    assert met == [2] * 62
    assert report.all_reduce_gbps == 5.0
    print(format_report(report))
