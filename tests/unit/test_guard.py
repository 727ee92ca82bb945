"""Ranks that train without ever meeting are warned and ended. The guard starts with Python, in front of what it hides,
also where something hides it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcddp import guard
from hpcddp.cli.exec import ExecOptions, further_variables
from hpcddp.guard import hpcddp_guard
from hpcddp.ranks.launch import Launch

GUARD = next(iter(guard.__path__))
AGENT = "torchrun TORCHELASTIC_RUN_ID GROUP_WORLD_SIZE"
RANK = {"RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": GUARD, guard.AGENT_NAMES: AGENT}
TRAIN = """\
import sys, torch, torch.distributed as dist
model = torch.nn.Linear(1, 1)
how = sys.argv[1]
if how != "alone":
    dist.init_process_group("gloo")
if how == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.optim.Optimizer.register_step_pre_hook(optimizer, lambda *_: None)
sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(lambda *_: None)  # not the only hook
model(torch.ones(1, 1)).sum().backward()
if how == "leaves":
    optimizer.step()
    dist.destroy_process_group()
if how == "integrations":
    from hpcddp.integrations.ranks import Ranks
    Ranks(dist.get_rank(), 2).wait()
for _ in range(int(sys.argv[2])):
    optimizer.step()
print("trained")
"""
# What of torch the guard needs.
FAKE_TORCH = {
    "torch/__init__.py": """\
from types import SimpleNamespace
from torch import optim
__version__, version = "2.14.1+cpu", SimpleNamespace(cuda=None, hip=None)
cuda = SimpleNamespace(device_count=lambda: 0)
""",
    "torch/optim/__init__.py": "from torch.optim import optimizer\n",
    "torch/optim/optimizer.py": """\
hooks = []
register_optimizer_step_pre_hook = hooks.append
def step():
    for hook in hooks:
        hook()
""",
}
STEPS = """\
import sys
sys.path.insert(0, sys.argv[2])
import torch
for _ in range(int(sys.argv[1])):
    torch.optim.optimizer.step()
print("trained")
"""


def python(folder: Path, code: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    argv = [sys.executable, "-c", code, *words]
    return subprocess.run(argv, capture_output=True, text=True, cwd=folder, env=clean | RANK | env, check=False)


def watched(folder: Path, **env: str) -> bool:
    done = python(folder, "import sys; print(any('AtImport' in str(f) for f in sys.meta_path))", **env)
    assert done.returncode == 0, done.stderr
    return done.stdout == "True\n"


def test_only_a_rank_of_several_that_should_meet_is_watched(tmp_path: Path) -> None:
    assert watched(tmp_path)
    assert not watched(tmp_path, WORLD_SIZE="1")
    assert not watched(tmp_path, WORLD_SIZE="")
    assert not watched(tmp_path, HPCDDP_INDEPENDENT="1")


def test_a_rank_of_a_job_with_gpus_is_watched_and_no_program_that_it_starts(tmp_path: Path) -> None:
    gpus = {"HPCDDP_GPUS_PER_NODE": "2"}
    assert watched(tmp_path, WORLD_SIZE="1", **gpus)
    assert watched(tmp_path, HPCDDP_INDEPENDENT="1", **gpus)
    assert not watched(tmp_path, WORLD_SIZE="1", HPCDDP_GUARDED="1 ", **gpus)


_BLIND = "import torch\nfor kind in (torch.accelerator, torch.cuda, torch.xpu):\n    kind.device_count = lambda: {}\n"


@pytest.mark.parametrize(
    ("env", "seen", "refused"),
    [
        ({"HPCDDP_GPUS_PER_NODE": "2"}, 0, True),
        ({"HPCDDP_GPUS_PER_NODE": "2"}, 1, False),
        ({}, 0, False),  # no job with GPUs, or hpcddp.init(backend="gloo")
        ({"HPCDDP_GPUS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "-1"}, 0, False),  # by the program: exec refuses it
    ],
)
@pytest.mark.parametrize("kind", ["accelerator", "cuda", "xpu"])
def test_a_program_trains_on_cpus_where_it_hides_the_gpus_or_the_job_has_none(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], seen: int, refused: bool, kind: str
) -> None:
    class LeftError(Exception):
        pass

    def leave(_status: int) -> None:
        raise LeftError

    devices = SimpleNamespace(device_count=lambda: seen)
    version = SimpleNamespace(cuda=None, hip=None)
    torch = SimpleNamespace(**{kind: devices}, version=version, __version__="2.14.1+cpu")
    monkeypatch.setitem(sys.modules, "torch", torch)
    for name in ("HPCDDP_GPUS_PER_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(LeftError) if refused else nullcontext():
        hpcddp_guard.end_without_gpus()


def test_the_sitecustomize_that_it_hides_runs_as_before(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("found = 'hidden'\n")
    code = "import sitecustomize, sys; print(sitecustomize.found, sys.path.count(sys.argv[1]))"
    done = python(tmp_path, code, GUARD, PYTHONPATH=f"{GUARD}:{tmp_path}")
    assert (done.stdout, done.stderr) == ("hidden 0\n", "")


def test_an_error_in_the_hidden_one_is_said_as_python_says_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import no_such_module\n")
    done = python(tmp_path, "print('ran')", PYTHONPATH=f"{GUARD}:{tmp_path}")
    assert done.stdout == "ran\n"
    assert "no_such_module" in done.stderr


def train(folder: Path, steps: int, words: list[str] | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Take so many steps with the torch above, behind these words in place of the interpreter."""
    for name, text in FAKE_TORCH.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "train.py").write_text(STEPS)
    argv = [*(words or [sys.executable]), "train.py", str(steps), str(folder)]
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    return subprocess.run(argv, capture_output=True, text=True, cwd=folder, env=clean | RANK | env, check=False)


def test_a_rank_of_two_that_trains_alone_is_warned_at_its_first_step_and_ended_at_its_50th(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # the login node's Pythons have none
    done = python(tmp_path, TRAIN, "alone", "50")
    assert (done.returncode, done.stdout) == (4, "")
    first, hint, last, again = done.stderr.splitlines()
    assert first == (
        "hpcddp: rank 0 of 2 takes an optimizer step with no process group: each rank trains a whole copy of its own;"
        " it is ended at step 50"
    )
    assert last.startswith("hpcddp: rank 0 of 2 has taken 50 optimizer steps with no process group: each rank trains a")
    assert hint == again
    for way in ("hpcddp.runtime", "DDP", "Accelerate", "HF Trainer", "num_nodes=1, devices=2", "independent: true"):
        assert way in hint


def test_before_its_50th_step_it_is_told_again_at_its_end(tmp_path: Path) -> None:
    done = train(tmp_path, 49)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "hpcddp: rank 0 of 2 ends after 49 optimizer steps with no process group: each" in done.stderr


def test_of_all_ranks_the_first_warns_and_each_is_ended(tmp_path: Path) -> None:
    done = train(tmp_path, 49, RANK="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert train(tmp_path, 50, RANK="1").returncode == 4


def test_a_rank_of_a_job_with_gpus_that_torch_does_not_see_takes_no_step(tmp_path: Path) -> None:
    done = train(tmp_path, 1, CUDA_VISIBLE_DEVICES="0", HPCDDP_GPUS_PER_NODE="2", WORLD_SIZE="1")
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert done.stderr.startswith(
        "hpcddp: rank 0 takes an optimizer step on the CPU: the job has 2 GPUs on each node, and torch sees none: "
    )


def test_a_probe_before_the_process_group_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GUARD)
    import hpcddp_guard  # type: ignore[import-not-found]

    world = [0]
    pretended = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: world[0] > 0, get_world_size=lambda: world[0]
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", pretended)
    monkeypatch.setattr(hpcddp_guard.atexit, "register", lambda _: None)
    ends: list[int] = []
    monkeypatch.setattr(hpcddp_guard.os, "_exit", ends.append)
    for joined, ended in ((2, []), (4, [4])):
        world[0] = 0
        watch = hpcddp_guard.Watch(2, "it", "alone", "join")
        for step in range(1, 60):
            world[0] = joined if step > 20 else 0
            watch.step()
        assert ends == ended


@pytest.mark.parametrize("mode", ["-I", "-E", "PYTHONPATH is set anew"])
def test_it_starts_where_python_does_not_see_its_folder(tmp_path: Path, mode: str) -> None:
    """By the .pth file that hpcddp is installed with: `make .venv/.installed` after pyproject.toml has changed."""
    words = [sys.executable, mode] if mode.startswith("-") else ["env", f"PYTHONPATH={tmp_path}", sys.executable]
    assert train(tmp_path, 50, words).returncode == 4


BECOME = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
CALL = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
CHAINED = """\
import sys
this = sys.modules.pop('sitecustomize')
del sys.path[sys.path.index('wrapper')]
import sitecustomize
"""


@pytest.mark.parametrize(
    ("wrapper", "customize"), [(BECOME, ""), (CALL, CHAINED)], ids=["becomes it, and hides ours", "calls it"]
)
def test_a_python_that_starts_the_rank_with_a_sitecustomize_of_its_own_hides_nothing(
    tmp_path: Path, wrapper: str, customize: str
) -> None:
    """As opentelemetry-instrument (no word of the hidden one) and ddtrace-run (imports it) do."""
    (tmp_path / "wrapper").mkdir()
    (tmp_path / "wrapper/sitecustomize.py").write_text(customize.replace("'wrapper'", f"'{tmp_path}/wrapper'"))
    first = f"import os; os.environ['PYTHONPATH'] = '{tmp_path}/wrapper:{GUARD}'; "
    done = train(tmp_path, 50, [sys.executable, "-c", first + wrapper])
    assert (done.returncode, done.stdout) == (4, ""), done.stderr


def test_it_starts_once_where_two_of_hpcddp_are_found(tmp_path: Path) -> None:
    shutil.copytree(GUARD, tmp_path / "other")
    done = train(tmp_path, 1, PYTHONPATH=f"{tmp_path}/other:{GUARD}")
    assert done.stderr.count("takes an optimizer step with no process group") == 1


@pytest.mark.parametrize(("code", "of_a_rank"), [("none", AGENT), ("a folder of its name", "")])
def test_python_and_torch_start_where_hpcddp_is_installed_and_its_code_is_gone(
    tmp_path: Path, code: str, of_a_rank: str
) -> None:
    """As behind a checkout that has moved, or with an editable install's site-packages on PYTHONPATH."""
    from importlib.metadata import distribution

    site = tmp_path / "site"
    (site / "hpcddp-0.dist-info").mkdir(parents=True)
    for file in distribution("hpcddp").files or ():
        if ".dist-info" in file.parts[0]:
            (site / "hpcddp-0.dist-info" / file.name).write_bytes(Path(str(file.locate())).read_bytes())
    if code != "none":
        (site / "hpcddp").mkdir()
    (site / "z.pth").write_text(Path(GUARD, "hpcddp_guard.pth").read_text())
    clean = {"PATH": os.environ["PATH"], guard.AGENT_NAMES: of_a_rank}
    # torch since 2.5 ends its import so
    torch = "from importlib.metadata import entry_points\nfor b in entry_points(group='torch.backends'): b.load()()"
    start = f"import site, sys; sys.path.append({str(site)!r}); site.addsitedir({str(site)!r})\n{torch}\nprint('here')"
    argv = [sys.executable, "-S", "-c", start]
    done = subprocess.run(argv, capture_output=True, text=True, env=clean, cwd=tmp_path, check=False)
    assert (done.stdout, done.stderr) == ("here\n", "")


def test_without_a_rank_of_ours_it_does_nothing(tmp_path: Path) -> None:
    done = train(tmp_path, 64, [sys.executable, "-I"], **{guard.AGENT_NAMES: ""})
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_rank_with_torch_starts_is_not_watched(tmp_path: Path) -> None:
    probe = "import subprocess, sys, torch; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    done = train(tmp_path, 64, [sys.executable, "-c", first + probe])
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


@pytest.mark.parametrize(
    ("more", "is_watched"),
    [({}, False), ({"ORBIT_RANK": "0"}, True), ({"ORBIT_ID": "x"}, True)],
    ids=["the agent", "its rank", "its rank by another mark"],
)
def test_an_agent_is_no_rank(tmp_path: Path, more: dict[str, str], is_watched: bool) -> None:
    assert watched(tmp_path, **{guard.RANK_MARKS: "ORBIT_RANK ORBIT_ID"}, **more) is is_watched


def test_a_command_that_trains_alone_in_place_of_starting_ranks_ends(tmp_path: Path) -> None:
    """As `accelerate launch` does on a CPU."""
    agent = {guard.RANK_MARKS: "ORBIT_RANK", "WORLD_SIZE": "1"}
    done = train(tmp_path, 50, **agent, **{guard.AGENT_RANKS: "2"})
    assert done.returncode == 4
    assert done.stderr.startswith(
        "hpcddp: the command was to start 2 ranks, and this one takes an optimizer step with no"
    )
    assert "hint: write the script's own command behind --, as python train.py" in done.stderr
    assert train(tmp_path, 50, **agent, **{guard.AGENT_RANKS: "1"}).returncode == 0


@pytest.mark.parametrize("name", ["pt_gloo_runloop", "unnamed"])
def test_python_does_not_end_while_a_thread_of_gloos_works(tmp_path: Path, name: str) -> None:
    """What torch does there cannot be made to happen: a thread that works without Python's lock stands in for it."""
    work = f"""\
import hashlib, os, sys, threading
sys.modules["torch.distributed"] = sys
begun = threading.Event()
def work():
    with open("/proc/thread-self/comm", "w") as file:
        file.write({name!r})
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))
    os.write(1, b"done")
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""
    done = python(tmp_path, work, "200000")
    assert (done.returncode, done.stdout) == (0, "done"), done.stderr


@pytest.mark.parametrize(
    ("more", "is_watched"),
    [
        ({}, True),
        ({"GROUP_WORLD_SIZE": "2"}, False),
        ({"TORCHELASTIC_RUN_ID": "hpcddp-47"}, False),
        ({"HPCDDP_INDEPENDENT": "1"}, False),
    ],
    ids=["alone", "agents that meet", "no agent: what a rank starts has its variables", "on purpose"],
)
def test_a_torchrun_in_each_rank_is_watched_if_it_is_alone(
    tmp_path: Path, more: dict[str, str], is_watched: bool
) -> None:
    inside = {"HPCDDP_GUARDED": "2 hpcddp-47 1", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert watched(tmp_path, **inside | more) is is_watched


def test_the_names_of_the_agents_variables_are_handed_on() -> None:
    launch = Launch({"RANK": "0", "WORLD_SIZE": "2"}, "here", live=False)
    assert further_variables(["true"], {}, launch, ExecOptions())[guard.AGENT_NAMES] == AGENT


@pytest.mark.slow
def test_a_torchrun_in_each_rank_ends_while_it_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    line = "import os; os.system('torchrun --standalone --nproc-per-node 1 train.py ddp 50')"
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TORCHELASTIC_RUN_ID": "hpcddp-47"}
    done = python(tmp_path, line, **env)
    assert done.stdout == ""
    assert "each of 2 ranks has started a torchrun, and trains a whole copy\nhint: write torchrun" in done.stderr


@pytest.mark.slow
def test_the_end_cannot_be_caught(tmp_path: Path) -> None:
    body = "\n".join(f"    {line}" for line in TRAIN.splitlines())
    done = python(tmp_path, f"try:\n{body}\nexcept BaseException:\n    print('caught')\n", "alone", "50")
    assert (done.returncode, done.stdout) == (4, "")


@pytest.mark.slow
@pytest.mark.torch_compat
def test_a_compiled_step_is_left_alone(tmp_path: Path) -> None:
    compiled = "step = torch.compile(lambda: optimizer.step(), backend='eager')"
    code = TRAIN.replace("    optimizer.step()", "    step()").replace("for _ in", f"{compiled}\nfor _ in")
    done = python(tmp_path, code, "alone", "2")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.torch_compat
@pytest.mark.parametrize(
    ("how", "steps", "is_warned"),
    [
        ("group", 63, False),
        ("ddp", 64, False),
        ("integrations", 64, True),
        ("leaves", 64, False),
    ],
    ids=["local steps", "DDP", "only asked whether to stop", "a probe at the end"],
)
def test_rank_0_of_two_is_warned_if_nothing_passes_between_them(
    tmp_path: Path, how: str, steps: int, is_warned: bool
) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= RANK | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", TRAIN, how, str(steps)]
    ranks = [subprocess.Popen(argv, env=env | {"RANK": r}, stdout=-1, stderr=-1, text=True, cwd=tmp_path) for r in "01"]
    for rank, process in enumerate(ranks):
        out, err = process.communicate()
        assert (process.returncode, out) == (0, "trained\n"), err
        told = "rank 0 of 2 has made 64 optimizer steps, and nothing was sent in its process group\n"
        assert (told in err) is (is_warned and rank == 0)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_program_of_a_job_with_gpus_trains_on_cpus_where_it_asks_for_gloo(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "accelerator"):
        pytest.skip("torch has a name for all of them since 2.6")
    opens = "import hpcddp\ngroup = hpcddp.init(backend='gloo').__enter__()\n"
    train = _BLIND.format(0) + opens + TRAIN
    job = {"CUDA_VISIBLE_DEVICES": "0", "HPCDDP_GPUS_PER_NODE": "2", "WORLD_SIZE": "1", "HPCDDP_LAUNCHER": "none"}
    done = python(tmp_path, train, "alone", "1", **job)
    assert (done.returncode, "trained" in done.stdout) == (0, True), done.stderr
