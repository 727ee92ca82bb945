"""What a node's first agent writes of the use of its node, by processes, cgroups and a stand-in for nvidia-smi."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hpcddp.guard.hpcddp_stand import PHASES, judge_phase, walk_frames
from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.supervisor import usage
from hpcddp.supervisor.usage import Cgroup, Gpus, Processes, UsageSampler

_SMI = """\
#!/bin/sh
# a stand-in, no GPU
[ "$2 $3 $4" = "--format=csv,noheader,nounits -l 10" ] || exit 9
echo "NVIDIA H100 80GB HBM3, 91, 40000, 81559"
echo "NVIDIA H100 80GB HBM3, [N/A], 40000, 81559"
echo "NVIDIA H100 80GB HBM3, 89, 41000, 81559"
exec sleep 1000
"""


def wait_until(is_so: Any) -> None:
    """As long as the machine needs; the test's own timeout ends what never comes."""
    while not is_so():
        time.sleep(0.01)


def test_processes_of_the_attempt_count_and_those_of_their_children_that_have_ended():
    burn = "import time\nwhile time.process_time() < 0.5: pass\n"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(flush=True); input()"
    words = [sys.executable, "-c", parent]
    env = os.environ | {"HPCDDP_ATTEMPT": "7.usage.1"}
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        cpu_s, memory, cpus = Processes("7.usage.1").read()
        assert cpu_s >= 0.4  # the kernel cuts user and system time to whole ticks of 10 ms
        assert memory > 1_000_000
        assert cpus == len(os.sched_getaffinity(0))
        assert Processes("7.usage.2").read() == (0.0, 0, 0)
        process.kill()


V2 = {"memory.stat": "anon 3000\nfile 9000\nshmem 500\n", "memory.peak": "12500\n", "memory.max": "64000\n"}
V1 = {
    "memory.stat": "rss 1\ntotal_rss 3000\ntotal_shmem 500\n",
    "memory.max_usage_in_bytes": "12500\n",
    "memory.limit_in_bytes": "64000\n",
}
USED = {"memory": 3500, "peak": 12500, "limit": 64000}


@pytest.mark.parametrize(
    ("job", "table", "folder", "files", "found"),
    [
        ("41", "0::/slurmstepd.scope/job_41/step_0/user/task_0", "slurmstepd.scope/job_41", V2, USED),
        ("41", "4:memory:/slurm/uid_7/job_41/step_0", "memory/slurm/uid_7/job_41", V1, USED),
        ("41", "0::/pbs_jobs.service/jobid/41.server", "pbs_jobs.service/jobid/41.server", V2, USED),
        ("41", "0::/slurm/job_41", "slurm/job_41", V2 | {"memory.max": "max\n"}, {"memory": 3500, "peak": 12500}),
        ("1", "0::/slurm/job_41", "slurm/job_41", V2, {}),  # another job's
        ("local-3", "0::/user.slice/user-1000.slice/session-3.scope", "user.slice/user-1000.slice", V2, {}),
        ("41", "0::/", "none", V2, {}),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_cgroup_with_the_jobs_number(
    job: str, table: str, folder: str, files: dict[str, str], found: dict[str, int], tmp_path: Path
):
    (tmp_path / folder).mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "table").write_text(f"3:cpuset:/\n{table}\n")
    cgroup = Cgroup(job, root=str(tmp_path), table=str(tmp_path / "table"))
    assert (cgroup.read(), cgroup.is_there) == (found, bool(found))


def test_each_line_of_nvidia_smi_is_a_gpu_and_what_it_cannot_say_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    gpus = Gpus(os.environ)
    wait_until(lambda: len(gpus.each) == 2)
    assert [row[1:] for row in gpus.each.values()] == [[91.0, 40000.0, 81559.0], [89.0, 41000.0, 81559.0]]
    os.killpg(gpus.process, signal.SIGKILL)
    os.waitpid(gpus.process, 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert Gpus(os.environ).each == {}


def test_each_look_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    attempt = AttemptFolder(RunFolder(str(tmp_path)), "7.1")
    os.makedirs(attempt.path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(Processes, "read", lambda _: (3.14159, 5, 4))
    sampler = UsageSampler(attempt, "node1", os.environ, lambda: [1.0, 2.0])
    sampler._open()
    sampler._gpus.each = {0: ["NVIDIA H100", 80.0, 100.0, 800.0]}
    sampler._sample(1)
    sampler._sample(6)
    lines = [json.loads(line) for line in Path(attempt.usage("node1")).read_text().splitlines()]
    assert [(line["memory"], line["gpus"][0][1], line["looks"]) for line in lines] == [(5, 80.0, 1), (5, 80.0, 6)]
    known = {"host": "node1", "cpus": 4, "cpu_s": 3.14, "phases": [1.0, 2.0], "by": "processes"}
    assert known.items() <= lines[0].items()


def test_a_folder_that_cannot_be_written_ends_the_sampler_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(usage, "_FIRST_S", (0.0, 0.0))
    UsageSampler(AttemptFolder(RunFolder(str(tmp_path / "gone")), "7.1"), "node1", {}, list)._run()


def frame_in(*modules: str) -> FrameType:
    """The innermost frame of functions of these modules, the outermost first."""
    code = "def f(inner):\n    return inner() if inner else __import__('sys')._getframe()\n"
    functions = []
    for module in modules:
        names: dict[str, Any] = {"__name__": module}
        exec(code, names)
        functions.append(names["f"])
    call: Any = None
    for function in reversed(functions):
        call = partial(function, call)
    frame = call()
    assert isinstance(frame, FrameType)
    return frame


@pytest.mark.parametrize(
    ("modules", "sleeps", "phase"),
    [
        (("__main__",), False, "compute"),
        (("__main__",), True, "compute"),
        (("__main__", "torch.nn.functional"), False, "compute"),
        (("__main__", "torch.utils.data.dataloader", "dataset"), False, "input"),
        (("__main__", "torch.utils.data.dataloader", "queue", "threading"), True, "input"),
        (("__main__", "torch.distributed.distributed_c10d"), True, "communication"),
        (("__main__", "torch.autograd", "torch.autograd.graph"), True, "communication"),
        (("__main__", "torch.autograd", "torch.autograd.graph"), False, "compute"),
        (("__main__", "torch.serialization"), False, "checkpoint"),
        (("__main__", "torch.distributed.checkpoint.api", "torch.distributed.distributed_c10d"), True, "communication"),
        (("__main__", "hpcddp.training.checkpoint.files", "os"), True, "checkpoint"),
    ],
)
def test_what_a_thread_does_is_told_by_the_innermost_function_that_tells_it(
    modules: tuple[str, ...], sleeps: bool, phase: str
):
    assert PHASES[judge_phase(walk_frames(frame_in(*modules)), lambda: sleeps)] == phase
