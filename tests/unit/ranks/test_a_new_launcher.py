"""A launcher is one row: all else reads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
# A launcher that hpcddp does not know, and an agent, which starts the ranks of one node as torchrun does. Their rows
# stand before all others: a row's place says nothing.
BEFORE = '    "openmpi": Launcher(\n'
FLUX = """\
    "flux": Launcher(
        "flux",
        RESOURCE_MANAGER,
        *("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
        marks=("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
        command="flux run -n {n}",
        commands=("flux run", "flux submit"),
        version_words=("flux-core",),
        program="flux",
        line=lambda job: [
            (LAUNCHER_PROGRAM, "run", f"--nodes={job.nodes}", f"--ntasks={job.processes}"),
            (f"--cores-per-task={job.cpus_per_process}",),
            job.launcher_options,
        ],
        order=70,
        counts={"--nodes": "nodes", "--ntasks": "processes"},
        hosts=("{host} ranks={each}", "--requires=file:"),
        environment_first=True,
        root_settings=(("FLUX_ALLOW_ROOT", "1"),),
    ),
"""
AGENT = """\
    "orbit": Launcher(
        "orbit",
        NODE_AGENT,
        *("ORBIT_RANK", "ORBIT_SIZE", "ORBIT_LOCAL_RANK", "ORBIT_LOCAL_SIZE", "ORBIT_NODE"),
        marks=("ORBIT_RANK", "ORBIT_SIZE"),
        prefixes=("ORBIT_",),
        rank_0_anywhere=True,
        command="orbit --each {n}",
        commands=("orbit",),
        typed={"--each": "--ranks-per-node"},
        program="orbit",
        line=lambda job: [
            ("orbit", f"--each={job.ranks_per_node}"),
            (FromShell("$rendezvous", before="--meet="),) if job.nodes > 1 else (),
        ],
        order=80,
    ),
"""
# Made up from flux-environment(7), for this test alone: a real launcher needs a recorded one.
CAPTURED = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f1"}


class Checkout:
    """A copy of the project in which flux is a launcher of job scripts, and so is the agent orbit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("hpcddp", "templates", "jobs"):
            shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        rows = folder / "hpcddp/ranks/launchers.py"
        assert rows.read_text().count(BEFORE) == 1
        rows.write_text(rows.read_text().replace(BEFORE, AGENT + FLUX + BEFORE))
        (folder / "bin").mkdir()
        (folder / "bin/flux").write_text("#!/bin/sh\necho 'flux-core 0.60'\n")
        (folder / "bin/flux").chmod(0o755)

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`hpcddp …` of this copy."""
        return subprocess.run(
            [sys.executable, "-m", "hpcddp", *argv],
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "PYTHONPATH": str(self.folder), **env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def plan(
        self, verb: str, *argv: str, launcher: str = "flux", nodes: int = 2, site: str = "generic-slurm"
    ) -> subprocess.CompletedProcess[str]:
        """A verb that plans nodes of four ranks, started by the launcher."""
        size = ("--nodes", str(nodes), "--ranks-per-node", "4", "--gpus-per-node", "0", "--cpus-per-rank", "8")
        site = ("--site", site, "--walltime", "1:00:00", "--launcher", launcher)
        return self.run(verb, *site, *size, *argv)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout"))


def test_render_prints_its_line(checkout: Checkout) -> None:
    script = checkout.plan("render", "--", "true")
    assert '"$launcher" run --nodes=2 --ntasks=8 \\\n    --cores-per-task=8 \\\n' in script.stdout, script.stderr
    assert "launcher=$(type -P flux)" in script.stdout
    assert "--scheduler slurm --launcher flux --site generic-slurm -- \\\n" in script.stdout


def test_a_host_file_that_the_script_makes_has_its_rows_form(checkout: Checkout) -> None:
    made = checkout.plan("render", "--set", "pe=mpi", "--", "true", site="generic-gridengine").stdout
    assert '\n    echo "$host ranks=4"\ndone < "${PE_HOSTFILE:?' in made


def test_on_this_machine_its_row_says_where_it_is_looked_for_and_what_root_needs(checkout: Checkout) -> None:
    here = checkout.run("launch", "--here", "--ranks-per-node", "2", "--dry-run", "--launcher", "flux", "--", "true")
    assert "\nlauncher=flux\n" in here.stdout, here.stderr
    assert '\nif [ "$(id -u)" = 0 ]; then export FLUX_ALLOW_ROOT=1; fi\n' in here.stdout


def test_layout_predicts_its_variables_and_its_capture_is_understood(checkout: Checkout) -> None:
    layout = json.loads(checkout.plan("layout", "--json", "--", "true").stdout)
    assert layout["ranks"][5]["environment"]["FLUX_TASK_RANK"] == "5"
    found = json.loads(checkout.run("env", "--json", **CAPTURED).stdout)
    assert [found[key] for key in ("launcher", "rank", "world_size", "local_rank")] == ["flux", 5, 8, 1]


def test_its_command_inside_a_rank_is_refused(checkout: Checkout) -> None:
    refused = checkout.plan("render", "--", "env", "A=1", "flux", "run", "-n", "2", "python", "x.py")
    assert (refused.returncode, "starts its own ranks with flux run" in refused.stderr) == (2, True)
    assert checkout.plan("render", "--", "flux", "resource", "list").returncode == 0


def test_launch_finds_it_on_path_by_its_version_and_takes_it_for_no_other(checkout: Checkout) -> None:
    here = ("launch", "--here", "--ranks-per-node", "2", "--dry-run")
    found = checkout.run(*here, "--launcher", "flux", "--", "true", PATH=f"{checkout.folder}/bin:/usr/bin:/bin")
    assert '"$launcher" run --nodes=1 --ntasks=2' in found.stdout, found.stderr
    other = checkout.folder / "other"
    other.mkdir(exist_ok=True)
    os.symlink(checkout.folder / "bin/flux", other / "mpiexec.hydra")
    refused = checkout.run(*here, "--launcher", "intelmpi", "--", "true", PATH=f"{other}:/usr/bin:/bin")
    assert "mpiexec.hydra belongs to flux" in refused.stderr


def test_an_agents_line_is_its_rows(checkout: Checkout) -> None:
    two = checkout.plan("render", "--", "true", launcher="orbit")
    line = '    orbit --each=4 \\\n    --meet="$rendezvous" \\\n'
    assert line + '    "$HPCDDP_PYTHON" -m hpcddp exec -- \\\n' in two.stdout, two.stderr
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1" in two.stdout
    one = checkout.plan("render", "--", "true", launcher="orbit", nodes=1, site="generic-pbs")
    assert "--scheduler pbs --launcher orbit --site generic-pbs -- \\\n" in one.stdout
    for script in (one.stdout, two.stdout):
        assert "torch" not in script


def test_layout_and_env_know_an_agents_ranks_and_its_command_inside_a_rank_is_refused(checkout: Checkout) -> None:
    layout = json.loads(checkout.plan("layout", "--json", "--", "true", launcher="orbit").stdout)
    fifth = layout["ranks"][5]["environment"]
    assert {name: fifth[name] for name in ("ORBIT_RANK", "ORBIT_SIZE", "ORBIT_NODE")} == {
        "ORBIT_RANK": "5",
        "ORBIT_SIZE": "8",
        "ORBIT_NODE": "1",
    }
    assert json.loads(checkout.run("env", "--json", **fifth).stdout)["launcher"] == "orbit"
    typed = checkout.plan("render", "--each", "4", "--", "true")
    assert "hint: --ranks-per-node 4" in typed.stderr
    refused = checkout.plan("render", "--", "orbit", "--each", "4", "python", "x.py")
    assert (refused.returncode, "(and --launcher orbit if orbit shall start it)" in refused.stderr) == (2, True)
