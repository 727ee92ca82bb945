"""`hpcddp check`: launches with a mistake are made on this machine, and each is found by its name."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from hpcddp.checks import job as checker
from hpcddp.checks import process
from hpcddp.checks.environment import FAILED, NOT_CHECKED, OK
from hpcddp.checks.job import Checker, CheckReport, CheckRequest, LinkSpeed, format_report
from hpcddp.checks.process import Worker
from hpcddp.cli import check as login
from hpcddp.cli.check import check_fit, check_folder, check_modules, check_site_rows, find_file_system
from hpcddp.cli.sites_check import SiteFound
from hpcddp.schedulers.row import CommandAnswer, QueueFound
from hpcddp.script.site import Account, Modules, Queue, Site
from hpcddp.script.site_check import compare_modules
from hpcddp.script.spec import JobSpec
from hpcddp.supervisor.order import split_check
from tests.conftest import REPO

# In a launch.

HOST = os.uname().nodename
ENV = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


def check(tmp_path: Path, ranks: str, each: str, *, path: str = "", size: int = 0, **asked: object) -> CheckReport:
    """A launch by hand on this machine: of these ranks, each of which runs a piece of shell first."""
    launcher = tmp_path / "launcher"
    each = f"export RANK WORLD_SIZE={size or len(ranks.split())}\n{each}"
    launcher.write_text(f'#!/bin/bash\nfor RANK in {ranks}; do ( {each}\nexec "$@" ) & done; wait\n')
    launcher.chmod(0o755)
    env = ENV | {"PATH": f"{path}:{ENV['PATH']}"} if path else ENV
    asked = {"folder": str(tmp_path), "fast": True, "patience": 20, **asked}
    return Checker(CheckRequest((str(launcher),), **asked), env).check()  # type: ignore[arg-type]


def named(report: CheckReport) -> dict[str, str]:
    checks = [check for _, check in report.checks]
    return {one.name: "; ".join(each.message for each in checks if each.name == one.name) for one in checks}


def test_a_launch_without_a_mistake_passes(tmp_path: Path) -> None:
    report = check(tmp_path, "0 1", "")
    of_machine = {"small shared memory", "full shared memory", "disk", "open files", "oversubscribed CPUs"}
    assert named(report).keys() <= of_machine
    assert (report.ranks, [*report.hosts]) == (2, [HOST])
    assert format_report(report).splitlines()[-1].startswith("1 host, 2 processes in ")


FIRST_CPU = min(os.sched_getaffinity(0))
SMI = """#!/bin/sh
# a stand-in, no GPU
case $1 in
--query-gpu=pci*) echo "00:18.0, GPU-a, NVIDIA H100 80GB HBM3, 570.1, 4, 0"; echo "00:2A.0, GPU-b, X, 570.1, 4, 0" ;;
--query-compute*) [ ! -e "$0.left" ] || echo "311, python" ;;
esac
"""

# What is wrong in one launch: the ranks, what each does first, and the checks with words of their messages.
MISTAKES = [
    ("0 1", "export OMPI_COMM_WORLD_RANK=$RANK", {"ranks": "half a row from openmpi"}),
    (
        "0 1 1",
        f"ulimit -n 256; taskset -pc {FIRST_CPU} $BASHPID > /dev/null; [ $RANK = 0 ] || export NCCL_DEBUG=INFO\n"
        "export GLOO_SOCKET_IFNAME=eth77",
        {
            "ranks": f"rank 1 is on {HOST} and {HOST}",
            "open files": "may open 256 files",
            "environment": "NCCL_DEBUG is",
            "oversubscribed CPUs": "3 ranks may use 1 CPUs together",
            "interface": "GLOO_SOCKET_IFNAME=eth77 names no interface of",
        },
    ),
    ("0 1", "export HPCDDP_INTERFACE=eth77; ulimit -n 1024", {"interface": "is none of its interfaces"}),
]


@pytest.mark.parametrize(("ranks", "each", "found"), MISTAKES, ids=["half a launch", "many", "interface of the site"])
def test_each_mistake_of_a_launch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str, each: str, found: dict[str, str]
) -> None:
    monkeypatch.setattr(checker, "_QUIET_S", 0.01)  # nobody knows how many they are in half a launch
    said = named(check(tmp_path, ranks, each))
    assert {name: words in said[name] for name, words in found.items()} == dict.fromkeys(found, True), said


def test_ranks_that_would_share_a_gpu_and_what_is_left_on_it_are_named(tmp_path: Path) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    (smi.parent / "nvidia-smi.left").touch()
    each = "export CUDA_VISIBLE_DEVICES=1 LOCAL_RANK=$RANK LOCAL_WORLD_SIZE=2"
    found = named(check(tmp_path, "0 1", each, path=str(smi.parent), gpus_per_node=3))
    assert "would both take GPU GPU-b" in found["shared GPU"]
    assert found["GPU count"] == "it shows 2 GPUs of 3"
    assert "311, python still runs" in found["leftover processes"]


def test_a_port_of_rank_0_that_another_process_has_is_named(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        report = check(tmp_path, "0 1", f"export MASTER_ADDR={HOST} MASTER_PORT={port}")
    assert named(report)["port in use"] == f"rank 0's port {port} cannot be listened on: address already in use"
    assert report.hosts == {HOST: FAILED}


def test_the_job_file_s_own_line_is_a_check(tmp_path: Path) -> None:
    assert "status 3" in named(check(tmp_path, "0 1", "", line="exit 3"))["own check"]


def test_a_rank_that_never_comes_and_a_host_without_one_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named(check(tmp_path, "0 1", "", hosts=(HOST, "ghost")))["answer"] == "no process of the launch is there"
    monkeypatch.setattr(checker, "LOOK_S", 0.2)
    report = Checker(CheckRequest(("sh", "-c", "exec sleep 600"), hosts=("ghost",)), ENV).check()
    assert (report.hosts, named(report)) == ({"ghost": FAILED}, {"answer": "did not answer in 0 s"})


HELLO = """
import json, socket, sys
from hpcddp.checks.process import Peer
key, port, _ = sys.argv[-1].split(":", 2)
checker = Peer(socket.create_connection(("localhost", int(port))))
checker.send({"key": key, "process": {"host": "node9", "rank": 0, "world_size": 1}})
while checker.receive(): pass
"""


def test_a_host_that_comes_and_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checker, "_is_complete", lambda self, _launcher: bool(self._processes))
    report = Checker(CheckRequest((sys.executable, "-c", HELLO), patience=20), ENV).check()
    told = "it came, and did not answer in 600 s"
    assert (report.hosts, named(report)["answer"]) == ({"node9": FAILED}, told)


@pytest.mark.parametrize(
    ("each", "found"),
    [
        ("", "rank 0 of 2 did not come"),
        ("export LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", "rank 0 of 2 did not come: it has 1 of its 2"),
    ],
)
def test_a_rank_that_is_missing_is_named_with_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: str, found: str
) -> None:
    # the time is over once it has come
    monkeypatch.setattr(Checker, "_is_complete", lambda self, _launcher: bool(self._measured))
    assert named(check(tmp_path, "1", each, size=2))["ranks"] == found


def test_where_no_process_knows_how_many_they_are_others_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one starts after the first has described the node."""
    decide = Checker._is_complete
    monkeypatch.setattr(checker, "_QUIET_S", 600.0)
    monkeypatch.setattr(Checker, "_is_complete", lambda self, _: len(self._measured) == 2 or decide(self, _))
    described = tmp_path / "described"
    each = f"export OMPI_COMM_WORLD_RANK=$RANK; until [ $RANK = 0 ] || [ -e {described} ]; do sleep 0.05; done"
    assert check(tmp_path, "0 1", each, line=f"touch {described}").ranks == 2


def test_a_launcher_that_starts_nothing_is_named() -> None:
    report = Checker(CheckRequest(("false",), patience=20), ENV).check()
    assert named(report) == {"launcher": "false ended with status 1, and no process called"}
    assert not report.is_well


def test_a_process_that_does_not_reach_the_checker_says_so_and_its_host_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher gives it another port, as a firewall would."""
    closed = 'set -- "${@:1:$#-1}" "$(echo "${@: -1}" | sed "s/:[0-9]*:/:1:/")"'
    found = check(tmp_path, "0 1", closed, hosts=(HOST,))
    assert found.hosts == {HOST: NOT_CHECKED}
    assert "and no process called" in named(found)["launcher"]
    said = capfd.readouterr().err
    assert f"{HOST} does not reach the checker at " in said
    assert "port 1: connection refused" in said


def test_links_have_a_median() -> None:
    links = {("a", f"b{gbps}"): LinkSpeed(gbps, 0.5) for gbps in (2, 3, 4)}
    told = format_report(CheckReport({}, (), links=links, means="gloo")).splitlines()[0]
    assert told == "links    gloo, median of 3 pairs: 3.5 Gb/s and 0.5 ms"


# A device.


def stand_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A program in place of the one with torch."""
    begin = "import os, socket, sys, time; from hpcddp.checks.process import Peer; "
    begin += "peer = Peer(socket.socket(fileno=int(sys.argv[1])))\n"
    monkeypatch.setattr(process, "_DEVICE", (sys.executable, "-c", begin + text))


def test_a_device_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "peer.send({}); time.sleep(600)")
    worker = Worker(ENV)
    assert worker.receive(time.monotonic() + 600, "late") == {}
    assert worker.receive(time.monotonic() + 0.1, "late") == {"error": "late"}
    assert worker._process.poll() == -9


def test_a_device_whose_process_ends_says_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "raise SystemExit('CUDA error: no driver')")
    worker = Worker(ENV)
    assert worker.receive(time.monotonic() + 600, "late") == {"error": "CUDA error: no driver"}
    worker.close()


_GPUS_OF_TWO = """
from hpcddp.supervisor.wire import Content, write
data = write(Content('{"versions": {"torch": "2.9.1"}}'))
if os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a":
    data += write(Content('{"tflops": 600.0, "copy_gbs": 2000.0}'))
peer.connection.sendall(data)
time.sleep(600)
"""


def test_each_gpu_has_a_process_of_its_own_and_one_that_hangs_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    stand_in(monkeypatch, _GPUS_OF_TWO)
    monkeypatch.setattr(process, "GPU_S", 0.001)
    checked = process.CheckedProcess({**ENV, "PATH": f"{tmp_path}:{ENV['PATH']}"}, HOST)
    checked.describe(str(tmp_path), "", "")
    said = checked.measure(fast=False, leads=True, patience=20)
    checked.close()
    by_uuid = {gpu["uuid"]: gpu for gpu in said["gpus"]}
    assert (by_uuid["GPU-a"]["tflops"], by_uuid["GPU-a"]["error"]) == (600.0, "")
    assert by_uuid["GPU-b"]["error"] == "it did not answer in 0 s, and its process was killed"
    assert said["versions"] == {"torch": "2.9.1", "driver": "570.1"}


# The line of a job script.

PY = "/env/bin/python"
EXEC = [PY, "-m", "hpcddp", "exec", "--gpus-per-node", "2", "--", "python", "t.py"]
SRUN = ["srun", "--nodes=2", "--ntasks=4"]


@pytest.mark.parametrize(
    ("words", "started_by"),
    [
        ([*SRUN, *EXEC], (SRUN, PY)),
        ([*SRUN, "apptainer", "exec", "a.sif", *EXEC], ([*SRUN, "apptainer", "exec", "a.sif"], PY)),
        ([*SRUN, "-m", "hpcddp"], ([*SRUN, "-m", "hpcddp"], "own")),
        ([*SRUN, "hpcddp", "exec", "--", "t"], (SRUN, "own")),
        ([*SRUN, "/env/bin/hpcddp", "exec", "--", "t"], (SRUN, "own")),
        (["srun", "cp", "--then", *SRUN, *EXEC], (SRUN, PY)),
        ([*SRUN, PY, "-m", "torch.distributed.run", "--nnodes=2", *EXEC], (SRUN, PY)),
        ([*SRUN, "torchrun", "--nnodes=2", *EXEC], (SRUN, PY)),
        (EXEC, ([], PY)),
        (SRUN, (SRUN, "own")),
    ],
)
def test_the_check_is_started_by_what_starts_the_ranks(words: list[str], started_by: tuple[list[str], str]) -> None:
    assert split_check(words, "own") == started_by


# On a login node.

SITE = Site(
    "s", "s.yaml", "", "", "slurm", "practice", "2026-11-01", queue="gpu", queues={"gpu": Queue(gpus=4, gpu="H100")}
)
GPU, OLD = QueueFound("gpu"), QueueFound("old", is_open=False)


@pytest.mark.parametrize(
    ("found", "asked", "states"),
    [
        (SiteFound(queues=(GPU,), accounts=("lab",)), ("gpu", "lab"), {"queue": OK, "account": OK}),
        (SiteFound(queues=(GPU,), accounts=("lab",)), ("gqu", "nobody"), {"queue": FAILED, "account": FAILED}),
        (SiteFound(queues=(OLD,)), ("old", ""), {"queue": FAILED}),
        (SiteFound(queues=(GPU,), accounts_unasked=("no command",)), ("", ""), {"queue": OK, "account": NOT_CHECKED}),
    ],
)
def test_the_scheduler_s_word_decides_on_queue_and_account(found: SiteFound, asked: tuple, states: dict) -> None:
    spec = JobSpec(queue=asked[0] or None, account=asked[1] or None)
    rows = {row.name: row.state for row in check_site_rows(SITE._replace(account=Account()), found, spec, "")}
    assert rows == {"scheduler": OK, **states}


OF_SITE = {"queues": {"gpu": Queue(), "small": Queue(partition="debug"), "gone": Queue()}}
BY_QOS = {"queues": {"gpu": Queue(), "regular": Queue()}, "queue_option": "--qos"}
WITH_QOS = {"queues": {"gpu": Queue(), "regular": Queue(qos="short")}}
LIVE = (GPU, OLD, QueueFound("debug"))
UNKNOWN = (FAILED, "queue 'nope' is not one of site s's", "--queue one of gpu, small, gone")
QOS = (NOT_CHECKED, "regular is a QOS: not asked (sacctmgr show qos)", "CHECK")


@pytest.mark.parametrize(
    ("site", "live", "queue", "row"),
    [
        (OF_SITE, LIVE, "small", (OK, "small takes jobs", "")),
        (OF_SITE, LIVE, "nope", UNKNOWN),
        (OF_SITE, LIVE, "gone", (FAILED, "gone is none of the scheduler's", "--queue one of gpu, small")),
        ({}, LIVE, "old", (FAILED, "old takes no jobs now", "--queue one of gpu, debug")),
        ({}, LIVE, "", (NOT_CHECKED, "the site has none that is chosen by itself", "--queue one of gpu, debug")),
        (BY_QOS, LIVE, "regular", QOS),
        (WITH_QOS, LIVE, "regular", QOS),
    ],
)
def test_a_queue_s_hint_has_the_queues_that_render_would_take(site: dict, live: tuple, queue: str, row: tuple) -> None:
    changed = SITE._replace(**{"queue": "", "queues": {}, **site})
    rows = check_site_rows(changed, SiteFound(queues=live), JobSpec(queue=queue or None), "CHECK")
    assert [(one.state, one.message, one.remedy) for one in rows if one.name == "queue"] == [row]


HINT = "hpcddp sites check "
JOB_FILE = "site: generic-slurm\nqueue: debug\naccount: lab\nnodes: 4\ncommand: python train.py\n"


@pytest.mark.parametrize(
    ("options", "env", "job_file", "checked"),
    [
        (["--queue", "q"], {}, JOB_FILE, ("generic-slurm", "q", "lab", HINT + "generic-slurm")),
        ([], {"HPCDDP_SITE": "generic-pbs"}, JOB_FILE, ("generic-pbs", "debug", "lab", HINT + "generic-pbs")),
        (["--site", "./x y.yaml"], {}, "", ("x y", None, None, HINT + "'./x y.yaml'")),
    ],
)
def test_the_request_that_render_would_take_here_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list, env: dict, job_file: str, checked: tuple
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(REPO / "templates/sites/generic-slurm.yaml", tmp_path / "x y.yaml")
    if job_file:
        (tmp_path / "hpcddp.yaml").write_text(job_file)
    found = []

    def note(site: Site, _: SiteFound, spec: JobSpec, hint: str) -> list:
        found.append((site.name, spec.queue, spec.account, hint))
        return []

    monkeypatch.setattr(login, "compare_site", lambda *_: SiteFound(queues=(GPU,)))
    monkeypatch.setattr(login, "check_site_rows", note)
    monkeypatch.setattr(login, "check_python", lambda *_: [])
    args = login.build_parser().parse_args(options)
    args.command = []
    list(login.check_login(args, env))
    assert found == [checked]


SILENT = "the module system does not answer in a login shell (status 1)"


@pytest.mark.parametrize(
    ("lines", "status", "row"),
    [
        ("HPCDDP-MODULE cuda/12.4\nHPCDDP-THERE\nHPCDDP-ASKED", 0, (OK, "cuda/12.4", "")),
        ("HPCDDP-MODULE cuda/12.4\nHPCDDP-ASKED", 0, (FAILED, "module cuda/12.4 is not there", "CHECK")),
        (
            "HPCDDP-NO-MODULES",
            0,
            (FAILED, "a login shell here has no `module` command", "modules: {init: source FILE}"),
        ),
        ("", 1, (NOT_CHECKED, SILENT, "CHECK")),
    ],
    ids=["there", "not there", "no command", "no answer"],
)
def test_modules_are_well_only_where_a_login_shell_finds_them(lines: str, status: int, row: tuple) -> None:
    site = SITE._replace(modules=Modules(load=("cuda/12.4",)))
    found = check_modules(site, compare_modules(site, lambda _: CommandAnswer(status, lines, "")), "CHECK")
    assert (found.state, found.message, found.remedy.partition(" in s.yaml")[0]) == row


MOUNTS = """\
home:/ /home nfs4 rw 0 0
tmpfs /home/me/ram tmpfs rw 0 0
10.0.0.1@o2ib:/lus /a\\040b lustre rw 0 0
/dev/sda1 / ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind", "state"),
    [
        ("/home/me", "nfs4", OK),
        ("/home/me/ram", "tmpfs", FAILED),
        ("/homes", "ext4", NOT_CHECKED),
        ("/a b/c", "lustre", OK),
    ],
)
def test_a_folder_is_another_host_s_or_in_this_one_s_memory_or_it_is_not_known_who_sees_it(
    tmp_path: Path, folder: str, kind: str, state: str
) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    mounts = str(tmp_path / "mounts")
    assert find_file_system(folder, mounts)[1] == kind
    assert next(check_folder(folder, SITE, mounts)).state == state
    assert next(check_folder(folder, SITE._replace(scheduler="local"), mounts)).state == OK


def test_a_folder_that_cannot_be_written_is_named() -> None:
    assert [one.state for one in check_folder("/proc", SITE) if one.name == "disk"] == [FAILED]


@pytest.mark.parametrize(
    ("gpu", "vendor", "torch", "state"),
    [
        ("H100", "nvidia", {"cuda": "13.0", "archs": "sm_80 sm_90 compute_90"}, OK),
        ("A40", "nvidia", {"cuda": "13.0", "archs": "sm_80 sm_90"}, OK),
        ("V100", "nvidia", {"cuda": "13.0", "archs": "sm_80 sm_90"}, FAILED),
        ("H100", "nvidia", {"cuda": None, "archs": ""}, FAILED),
        ("MI250X (GCD)", "amd", {"cuda": "13.0", "hip": None, "archs": "sm_90"}, FAILED),
        ("MI250X (GCD)", "amd", {"cuda": None, "hip": "6.4", "archs": ""}, NOT_CHECKED),
    ],
)
def test_torch_has_to_fit_the_site_s_gpus(gpu: str, vendor: str, torch: dict, state: str) -> None:
    site = SITE._replace(queues={"gpu": Queue(gpus=4, gpu=gpu, vendor=vendor)})
    assert [one.state for one in check_fit(site, "gpu", {"hip": None, **torch})] == [state]


def test_this_machine_is_checked_as_json(run, tmp_path: Path) -> None:
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    env = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = run([sys.executable, "-m", "hpcddp", "check", "--site", "local", "--json"], env=env, cwd=tmp_path)
    said = json.loads(done.stdout)
    assert (done.returncode, said["ok"]) == (1, False)
    rows = {row["name"]: row for row in said["checks"]}
    assert [name for name, row in rows.items() if row["state"] == FAILED] == ["torch"]
    assert "libcudart.so.13" in rows["torch"]["message"]
