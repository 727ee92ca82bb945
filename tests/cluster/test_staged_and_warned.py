"""A rendered job on a real Slurm: each node has its own copy before the ranks start, and srun's ranks are warned."""

from __future__ import annotations

from pathlib import Path

import pytest
from livecluster import HERE, PYTHON, Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.first]

_PROGRAM = """\
import os, signal, socket, sys, time
warned = []
signal.signal(signal.SIGUSR1, lambda *_: warned.append(True))
rank, staged = os.environ["RANK"], os.environ["HPCDDP_STAGED"]
# /tmp is each host's own
with open(f"seen-{rank}", "w") as file:
    file.write(socket.gethostname() + " " + open(staged + "/input").read())
end = time.time() + 600
while not warned and time.time() < end:
    time.sleep(0.1)
sys.exit(0 if warned else 1)
"""


def test_each_node_has_its_copy_and_each_rank_its_warning(cluster: Cluster, shared: Path) -> None:
    (shared / "train.py").write_text(_PROGRAM)
    (shared / "input").write_text("the data")
    request = ["--site", str(HERE / "site.yaml"), "--nodes", "2", "--ranks-per-node", "2", "--walltime", "0:30:00"]
    request += ["--set", "signal=0:00:50", "--set", "stage_in=input", "--set", "stage_dir=/tmp"]
    text = cluster.ok(["hpcddp", "render", *request, "--", PYTHON, "train.py"], cwd=shared)
    queued = cluster.submit(text, cwd=shared)
    wait_until(lambda: len(list(shared.glob("seen-*"))) == 4)
    # Slurm sends the warning up to a minute early, and looks every few seconds
    cluster.ok(["scontrol", "update", f"JobId={queued}", "EndTime=now+75"], cwd=shared)
    job = cluster.wait(queued, cwd=shared)
    assert job.state == "COMPLETED", job.output
    seen = [(shared / f"seen-{rank}").read_text() for rank in range(4)]
    assert seen == ["node1 the data", "node1 the data", "node2 the data", "node2 the data"]
