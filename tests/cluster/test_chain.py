"""A run that goes on by itself, on a real Slurm: over walltimes that are too short, and over kills."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from livecluster import HERE, PATIENCE_S, PYTHON, Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.first]

STEPS = f"{PYTHON} {HERE.parent}/multirank/programs/steps.py"


def submit(cluster: Cluster, shared: Path, command: str, *asked: str) -> str:
    request = ["--site", f"{HERE}/site.yaml", "--nodes", "2", "--ranks-per-node", "1", "--cpus-per-rank", "1", *asked]
    text = cluster.ok(["hpcddp", "render", *request, "--name", "long", "--", *command.split()], cwd=shared)
    return cluster.submit(text, cwd=shared)


def ended(cluster: Cluster, shared: Path, job: str) -> list[tuple[str, str]]:
    """Every attempt of the chain that begins with `job`, as (id, how Slurm says it ended)."""
    ends = []
    while job:
        ends.append((job, cluster.wait(job, cwd=shared).state))
        follows = attempt_of(shared, job) / "next"
        job = follows.read_text().strip() if follows.exists() else ""
    return ends


def attempt_of(shared: Path, job: str) -> Path:
    return shared / f"runs/long/attempts/{job}.1"


def state_of(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "runs/long/state.json").read_text())


def wait_for(path: Path) -> None:
    wait_until(path.exists, lambda: f"{path} is not there")


def output_of(shared: Path) -> str:
    """Of the attempts that the chain itself queued."""
    return "".join(path.read_text() for path in sorted(shared.glob("long-*.out")))


# rank 0 fails at the first two starts, each time in another way
FAILS_TWICE = r"""echo "$*" > "words.$RANK"
failed=$(ls | grep -c '^failed')
[ "$failed" -lt 2 ] || exit 0
[ "$RANK" = 0 ] || exec sleep 600
touch "failed.$failed"; echo "failure $failed" >&2; exit $((33 + failed))"""
EDITS = {
    "--ntasks-per-node=1\n#SBATCH": "--ntasks-per-node=2\n#SBATCH",
    "--ntasks=2 --ntasks-per-node=1": "--ntasks=4 --ntasks-per-node=2",
    "--chain 2": "--chain 3",
    "--max-restarts 1": "--max-restarts 2",
    "    sh train.sh 0.1": """    sh train.sh 0.5 "it's" '$(exit 9)' --chain""",
}


def test_a_script_that_was_edited_is_what_runs_and_what_is_recorded(cluster: Cluster, shared: Path) -> None:
    (shared / "train.sh").write_text(FAILS_TWICE)
    sizes = ["--nodes", "2", "--ranks-per-node", "1", "--cpus-per-rank", "1", "--walltime", "0:10:00"]
    asked = [*sizes, "--name", "long", "--set", "chain=2", "--set", "max_restarts=1"]
    line = ["hpcddp", "render", "--site", f"{HERE}/site.yaml", *asked, "--", "sh", "train.sh", "0.1"]
    text = cluster.ok(line, cwd=shared)
    for before, after in EDITS.items():
        assert text.count(before) == 1, (before, text)
        text = text.replace(before, after)
    job = cluster.wait(cluster.submit(text, cwd=shared), cwd=shared)
    assert job.state == "COMPLETED", job.output
    assert "attempt 1 of at most 3" in job.output
    assert "start 3 of at most 3" in job.output
    words = {path.name: path.read_text() for path in shared.glob("words.*")}
    assert words == dict.fromkeys(("words.0", "words.1", "words.2", "words.3"), "0.5 it's $(exit 9) --chain\n")
    command = ["sh", "train.sh", "0.5", "it's", "$(exit 9)", "--chain"]
    plan = json.loads((shared / "runs/long/plan.json").read_text())
    assert (plan["nodes"], plan["ranks_per_node"], plan["world_size"], plan["command"]) == (2, 2, 4, command)
    holder = json.loads((shared / "runs/long/holders/000001/holder.json").read_text())
    assert holder["command"] == command
    assert (shared / f"runs/long/attempts/{job.id}.3/hosts").read_text().count("node") == 2


# Slurm counts walltimes in minutes. In short, the program sees a deadline that has come already in place of the job's;
# what the job's is, is checked all the same.
SOONER = "[ -e hurry ] || export HPCDDP_DEADLINE=$(date +%s); "


@pytest.mark.parametrize(
    ("sooner", "step_s"),
    # a minute is too short for 20 steps of 14 s; the attempts behind the first are to be short
    [(SOONER, 0), pytest.param("", 14, marks=pytest.mark.slow)],
    ids=["a deadline that has come", "a minute"],
)
def test_a_run_goes_on_over_walltimes_that_are_too_short_for_it(
    cluster: Cluster, shared: Path, sooner: str, step_s: int
) -> None:
    train = f"until [ -e drained ]; do sleep 0.1; done; {sooner}exec {STEPS} 10 {step_s}\n"
    (shared / "train.sh").write_text(train)
    job = submit(cluster, shared, "sh train.sh", "--walltime", "0:01:00", "--set", "chain=9")
    wait_for(attempt_of(shared, job) / "next")
    cluster.ok(["scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=test"], cwd=shared)
    (shared / "drained").touch()
    try:
        cluster.wait(job, cwd=shared)
        (shared / "hurry").touch()
        ends = ended(cluster, shared, job)
    finally:
        cluster.ok(["scontrol", "update", "NodeName=node1", "State=RESUME"], cwd=shared)
    state = state_of(shared)
    assert (state["status"], state["step"]) == ("finished", 20), output_of(shared)
    assert [how for _, how in ends[:-1]] == ["COMPLETED"] * (len(ends) - 1)
    assert len(ends) >= 3  # two that trained, and the cancelled last
    assert ends[-1][1] == "CANCELLED"
    assert state["attempt"] == f"{ends[-2][0]}.1"
    assert "hpcddp: unfinished" in (shared / f"job-{job}.out").read_text()
    assert "(deadline)" in (shared / f"job-{job}.out").read_text()
    hosts = [
        {path.name.split(".")[1] for path in attempt_of(shared, name).glob("logs/rank-0001.*")}
        for name, _ in (ends[0], ends[-2])
    ]
    assert hosts == [{"node2"}, {"node3"}]  # on other nodes than before
    for name, _ in ends[:-1]:
        # A fault of the units or of the time zone is an hour or more. Two looks at the clock may be minutes apart.
        assert abs(deadline_of(attempt_of(shared, name)) - end_of_walltime(cluster, shared, name)) <= PATIENCE_S
    steps = [json.loads(line)["step"] for name, _ in ends[:-1] for line in _metrics(attempt_of(shared, name))]
    assert steps == list(range(1, 21))  # none twice, none left out


def deadline_of(attempt: Path) -> int:
    """When the ranks were told to have ended, in seconds since 1970."""
    recorded = (attempt / "env/rank-0000.env").read_text().split("\0")
    return int(dict(line.split("=", 1) for line in recorded if line)["HPCDDP_DEADLINE"])


def end_of_walltime(cluster: Cluster, shared: Path, job: str) -> int:
    """A minute after Slurm started the job. This Slurm kills later (OverTimeLimit): a machine may be busy."""
    said = cluster.ok(["scontrol", "show", "job", job], cwd=shared, env={"SLURM_TIME_FORMAT": "%s"})
    assert "TimeLimit=00:01:00" in said
    return int(re.findall(r"\bStartTime=(\d+)", said)[0]) + 60


def _metrics(attempt: Path) -> list[str]:
    return [
        line for line in (attempt / "metrics.jsonl").read_text().splitlines() if '"step"' in line and '"loss"' in line
    ]


def test_a_killed_attempt_is_gone_on_with_from_its_last_checkpoint(cluster: Cluster, shared: Path) -> None:
    # Stopped ranks are killed: one that lived a moment longer could see the other's end, and say that it failed.
    (shared / "freeze").touch()
    job = submit(cluster, shared, f"{STEPS} 10 0.1", "--set", "chain=3")
    wait_for(shared / "frozen-0")
    wait_for(shared / "frozen-1")
    (shared / "freeze").unlink()
    # the batch shell dies, and Slurm ends the rest; what scancel sends would be the owner's wish
    host = cluster.ok(["squeue", "--noheader", f"--jobs={job}", "--format=%B"], cwd=shared).strip()
    cluster.ok(["pkill", "-KILL", "-f", "hpcddp supervis[e]"], host=host, cwd=shared)
    ends = ended(cluster, shared, job)
    assert ends[0][1] in {"FAILED", "CANCELLED", "NODE_FAIL"}
    assert [how for _, how in ends[1:]] == ["COMPLETED", "CANCELLED"], output_of(shared)
    assert (state_of(shared)["status"], state_of(shared)["step"]) == ("finished", 20)
    begun = re.search(r"attempt 2 of at most 3, from step (\d+)", output_of(shared))
    assert begun is not None
    assert int(begun[1]) > 0


def test_a_cancelled_job_ends_its_chain_and_says_so(cluster: Cluster, shared: Path) -> None:
    job = submit(cluster, shared, f"{STEPS} 10000 0.02", "--walltime", "1:00:00", "--set", "chain=3")
    wait_for(shared / "here-0")
    wait_for(shared / "here-1")
    cluster.ok(["scancel", job], cwd=shared)
    ends = ended(cluster, shared, job)
    assert [how for _, how in ends] == ["CANCELLED", "CANCELLED"]
    said = (shared / f"job-{job}.out").read_text()
    assert f"job {ends[1][0]} follows this one and resumes the run; to end both: scancel {job}" in said
    assert f"and with it the chain: {ends[1][0]} is cancelled" in said
    state = state_of(shared)
    assert (state["status"], state["reason"]) == ("unfinished", "SIGTERM")
    assert (shared / f"runs/long/checkpoints/step-{state['step']:08d}/manifest.json").exists()
