"""A site's file against what the machine says: differences, their corrections, and the overlay that keeps them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.schedulers.row import CommandAnswer, QueueFound
from hpcddp.schedulers.run import run_program
from hpcddp.script.site import Site
from hpcddp.script.site_check import ModulesCompared, compare_modules, compare_queues
from hpcddp.script.site_file import load_site, merge_overlay

SITE = """\
# https://example.org/
schema: 1
summary: a site of the tests
scheduler: slurm
standing: practice
verified: 2026-11-24
queue: gpu
queues:
  gpu: {gpus: 4, cpus: 64, mem_gb: 500, limits: [{nodes: 1-8, walltime: 24:00:00}]}
  old: {gpus: 4, cpus: 64}
  dbg: {like: gpu, partition: gpu, qos: dbg}
modules: {load: [cuda/12.2, mpi]}
launcher: {name: srun}
"""
SINFO = "gpu|6|64|512000|gpu:a100:4|12:00:00|up|1-4\nnew|2|64|512000|(null)|1:00:00|up|1-infinite\n"
MODULES = """\
module() {
    case "$1 $2 $3" in
    "is-avail mpi "* | "is-avail cuda/12.6 "*) return 0 ;;
    "-t avail mpi") echo mpi ;;
    "-t avail cuda") printf '/apps/modules:\\ncuda/12.6(default)\\ncudnn/9\\n' ;;
    *) return 1 ;;
    esac
}
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A login node with stand-ins for sinfo, sacctmgr and module; gives the user's configuration folder."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    # A login shell reads this machine's /etc/profile, which may define `module`. This one has the user's profile alone.
    clean = f'exec env -i HOME="$HOME" PATH="$PATH" BASH_ENV="$HOME/.bash_profile" {shutil.which("bash")}'
    (bin_ / "bash").write_text(f'#!/bin/sh\n[ "$*" = -l ] && {clean}\nexit 9\n')
    (bin_ / "bash").chmod(0o755)
    config = tmp_path / ".config/hpcddp"
    (config / "sites").mkdir(parents=True)
    (config / "sites/mine.yaml").write_text(SITE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")

    def make(sinfo: str = SINFO, modules: str = MODULES, status: int = 0) -> Path:
        for name, script in (("sinfo", f"cat <<'END'\n{sinfo}END\nexit {status}"), ("sacctmgr", "echo abc; echo def")):
            (bin_ / name).write_text(f"#!/bin/sh\n{script}\n")
            (bin_ / name).chmod(0o755)
        (tmp_path / ".bash_profile").write_text(modules)
        return config

    return make


def test_each_difference_is_said_once_and_written_once(
    machine: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = machine()
    assert main(["sites", "check", "mine"]) == 1
    out = capsys.readouterr()
    assert out.out.splitlines() == [
        "queue gpu: walltime 24:00:00 in the site's file, 12:00:00 by sinfo",
        "queue gpu: at most 8 nodes in the site's file, 4 by sinfo",
        "queue old: it is in the site's file, and not in sinfo",
        "module cuda/12.2 is not there; there is cuda/12.6",
        "site mine: 4 differ",
    ]
    assert "accounts that you may charge: abc, def" in out.err
    assert "QOS dbg: not asked (sacctmgr show qos)" in out.err
    overlay(config, "queues: {old: , gpu: {limits: [{nodes: 1-4, walltime: 12:00:00}]}}\nmodules: {load: [mpi]}\n")
    assert main(["sites", "check", "mine"]) == 0  # that the file leaves out a queue is no difference
    assert capsys.readouterr().out == "site mine: nothing differs in what could be asked\n"


def overlay(config: Path, text: str) -> None:
    (config / "overlays").mkdir()
    (config / "overlays/mine.yaml").write_text(text)


def test_the_overlay_wins_and_says_so(machine: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    text = "sources: {me: seen on login 2026-11-24}\nqueues: {gpu: {limits: [{nodes: 1-4}], source: me}}\n"
    overlay(machine(), f"{text}modules: {{load: [cuda/12.6]}}\n")
    request = ["--site", "mine", "--nodes", "8", "--walltime", "1h", "--", "true"]
    assert main(["render", *request]) == 2
    said = capsys.readouterr().err
    assert "takes 1 to 4 nodes per job, not 8 (seen on login, 2026-11-24)" in said
    request[3] = "2"
    assert main(["render", *request]) == 0
    out = capsys.readouterr()
    assert "module load cuda/12.6" in out.out
    assert ", corrected by " in out.err
    assert main(["sites", "show", "mine"]) == 0
    assert "corrected  " in capsys.readouterr().out


@pytest.mark.parametrize("text", ["queues: [", "queues:\n  gpu: {cpus: x}\n"])
def test_an_overlay_that_is_wrong_is_named(
    machine: Callable[..., Path], capsys: pytest.CaptureFixture[str], text: str
) -> None:
    overlay(machine(), text)
    assert main(["sites", "show", "mine"]) == 3
    assert "overlays/mine.yaml" in capsys.readouterr().err


def test_what_could_not_be_asked_is_never_taken_for_agreement(
    machine: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    machine(modules="")
    assert main(["sites", "check", "mine", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert "a login shell here has no `module` command" in told["not_asked"]
    assert not any("module" in text for text in told["differences"])
    machine(status=1)
    assert main(["sites", "check", "mine"]) == 5
    assert "sinfo ended with 1" in capsys.readouterr().err


@pytest.mark.parametrize("sinfo", ["", "gpu|6|64|512000|(null)|1:00:00|up|1-4\nold|8|9\n"])
def test_an_answer_that_cannot_be_read_makes_no_queue_gone(
    machine: Callable[..., Path], capsys: pytest.CaptureFixture[str], sinfo: str
) -> None:
    machine(sinfo=sinfo)
    assert main(["sites", "check", "mine"]) == 5
    out = capsys.readouterr()
    message, hint = out.err.splitlines()
    assert (out.out, message.startswith("hpcddp: what sinfo printed cannot be read: ")) == ("", True)
    assert hint == "hint: sinfo --all --exact --noheader '--format=%R|%D|%c|%m|%G|%l|%a|%s'"
    assert main(["sites", "new", "lab"]) == 0
    assert "what sinfo printed cannot be read" in capsys.readouterr().err


def test_a_module_name_is_one_word_for_the_shell(tmp_path: Path) -> None:
    asked: list[str] = []
    compare_modules(
        module_site(tmp_path, "'$(touch x)'"), lambda lines: asked.append(lines) or CommandAnswer(0, "", "")
    )
    assert "'$(touch x)'" in asked[0]
    assert " $(touch x)" not in asked[0]


def test_an_overlay_is_put_over_a_files_blocks_key_by_key_and_queues_fact_by_fact() -> None:
    raw = {"env": {"A": "b"}, "modules": {"load": ["x"]}, "queues": {"a": {"cpus": "64", "gpus": "4"}, "old": {}}}
    over = {"env": {"B": "c"}, "queues": {"a": {"cpus": "32"}, "old": ""}}
    assert merge_overlay(raw, over) == {
        "env": {"A": "b", "B": "c"},
        "modules": {"load": ["x"]},
        "queues": {"a": {"cpus": "32", "gpus": "4"}, "old": ""},
    }


def queue_site(tmp_path: Path, facts: str, more: str = "") -> Site:
    text = f"# https://a.b/\nschema: 1\nsummary: x\nscheduler: pbs\nstanding: practice\nverified: 2026-11-24\n{more}"
    (tmp_path / "mine.yaml").write_text(f"{text}\nqueues:\n  a: {{{facts}}}\n")
    return load_site("mine", str(tmp_path / "mine.yaml"))


FULL = "gpus: 4, cpus: 64, mem_gb: 500"


def test_what_a_request_gets_that_names_nothing_says_nothing_of_one_that_names_it(tmp_path: Path) -> None:
    live = QueueFound("a", 4, 1, 2, 1, defaults=("cpus", "mem_gb", "gpus"))
    found = compare_queues(queue_site(tmp_path, FULL), [live], "qstat")
    assert [text.split(" in each")[0] for text in found] == [
        f"queue a: {said}" for said in ("4 GPUs", "64 CPUs", "500 GB of memory")
    ]
    assert compare_queues(queue_site(tmp_path, f"{FULL}, exclusive: true"), [live], "qstat") == []
    assert compare_queues(queue_site(tmp_path, FULL, "chunk: [ncpus, ngpus, mem]"), [live], "qstat") == []


def test_of_nodes_that_differ_the_largest_counts(tmp_path: Path) -> None:
    site = queue_site(tmp_path, FULL)
    assert compare_queues(site, [QueueFound("a", 4, 64, 500, 8, mixed=True)], "qstat") == []
    for found, text in (
        (QueueFound("a", 4, 48, 500, 8, mixed=True), "64 CPUs in each node in the site's file, 48 by qstat"),
        (QueueFound("a", 4, 64, 500, 0), "4 GPUs in each node in the site's file, 0 by qstat"),
    ):
        assert compare_queues(site, [found], "qstat") == [f"queue a: {text}"]


def test_a_limit_that_is_another_is_told_and_memory_that_is_nearly_there_is_none(tmp_path: Path) -> None:
    site = queue_site(tmp_path, f"{FULL}, limits: [{{nodes: 1-2, walltime: 2:00:00}}]")
    live = QueueFound("a", 90, 64, 460, 4, None, "4:00:00", 9)
    assert compare_queues(site, [live], "qstat") == [
        "queue a: walltime 02:00:00 in the site's file, 04:00:00 by qstat",
        "queue a: at most 2 nodes in the site's file, 9 by qstat",
    ]
    assert compare_queues(queue_site(tmp_path, FULL, "asks_memory: true"), [live], "qstat") == [
        "queue a: 500 GB of memory in each node in the site's file, 460 by qstat"
    ]


def test_a_scheduler_with_none_of_the_sites_queues_is_another_machines(tmp_path: Path) -> None:
    assert compare_queues(queue_site(tmp_path, FULL), [QueueFound("b")], "qstat") == [
        "none of the queues of the site's file is in qstat: this may be another machine"
    ]


def module_site(tmp_path: Path, load: str) -> Site:
    return queue_site(tmp_path, FULL, f"modules: {{load: [{load}]}}")


def login_shell(modules: str) -> Callable[[str], CommandAnswer]:
    return lambda lines: run_program(["bash"], {"PATH": os.environ["PATH"]}, modules + lines)


# openmpi shows when cuda is loaded, as in a hierarchy of modules
HIERARCHY = """\
loaded=
there() { case "$1:$loaded" in cuda/12.6:*) : ;; openmpi/4.1.7:*cuda/12.6*) : ;; openmpi/3:) : ;; *) false ;; esac; }
module() {
    case "$1" in
    is-avail) there "$2" ;;
    load) there "$2" && loaded="$loaded $2" ;;
    -t) for name in cuda/12.6 openmpi/4.1.7 openmpi/3; do there $name && echo $name; done ;;
    esac
}
"""


def test_each_module_is_asked_for_where_those_before_it_are_loaded(tmp_path: Path) -> None:
    ask = login_shell(HIERARCHY)
    assert compare_modules(module_site(tmp_path, "cuda/12.6, openmpi/4.1.7"), ask) == ModulesCompared()
    for load, told in (
        ("cuda/12.2", "module cuda/12.2 is not there; there is cuda/12.6"),
        ("gcc", "module gcc is not there"),
    ):
        found = compare_modules(module_site(tmp_path, f"{load}, openmpi/4.1.7"), ask)
        assert found == ModulesCompared((told,), (f"module openmpi/4.1.7: not found without {load}",))


@pytest.mark.parametrize(
    ("name", "listed", "told"),
    [
        ("cuda/1", "/x:\ncuda/2\ncuda/3(default)", ("module cuda/1 is not there; there is cuda/2, cuda/3",)),
        # a name within another line is not the module
        (
            "cuda/12.6",
            "cuda/12.6.2\nno modulefile 'cuda/12.6'",
            ("module cuda/12.6 is not there; there is cuda/12.6.2",),
        ),
        ("cuda/12.6", "cuda/12.6(default)", ()),
        ("cuda", "cuda/12.6", ()),
    ],
)
def test_a_list_of_modules_has_the_module_or_a_version_of_it(
    tmp_path: Path, name: str, listed: str, told: tuple[str, ...]
) -> None:
    answer = CommandAnswer(0, f"HPCDDP-MODULE {name}\n{listed}\nHPCDDP-ASKED\n", "")
    assert compare_modules(module_site(tmp_path, name), lambda _: answer).differences == told
