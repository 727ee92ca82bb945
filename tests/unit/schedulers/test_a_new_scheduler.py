"""A scheduler is added by one module, one template and one generic site, and no other file learns of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from .moonshot import ASKED, MODULE, SITE, TEMPLATE, checkout, write_program


@pytest.fixture(scope="module")
def moon(run, repo, tmp_path_factory):
    """`hpcddp` of a checkout with the new scheduler; `programs` are on PATH."""
    folder = checkout(repo, tmp_path_factory.mktemp("moon"), MODULE)

    def hpcddp(*words: str, programs: Path | None = None, **env: str):
        # not /usr/bin, where this machine may have a scheduler
        env = {"PATH": f"{Path(sys.executable).parent}:{programs or '/nonexistent'}", "HOME": str(folder), **env}
        env["PYTHONPATH"] = str(folder)
        return run([sys.executable, "-m", "hpcddp", *words], cwd=folder, env=env)

    return hpcddp


def directives(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.startswith("#MOON")]


def test_its_scripts_are_rendered_for_one_node_and_for_three(moon):
    one = moon("render", *ASKED, "--name", "train", "--", "python", "-m", "train")
    assert one.returncode == 0, one.stderr
    assert directives(one.stdout) == ["#MOON --name=train", "#MOON --nodes=1:4", "#MOON --time=01:00:00"]
    words = ["--nodes", "3", "--account", "luna", "--name", "a-very-long-name", "--set", "mail=begin fail"]
    three = moon("render", *ASKED, *words, "--set", "array=0-3", "--set", "directives=--soft", "--", "true")
    assert three.returncode == 0, three.stderr
    assert directives(three.stdout) == [
        "#MOON --name=a-_47f340",
        "#MOON --nodes=3:4",
        "#MOON --time=01:00:00",
        "#MOON --payer=luna",
        "#MOON --tell=launch+crash",
        "#MOON --each=0-3",
        "#MOON --soft",
    ]
    assert "-np 12" in three.stdout
    assert '-hostfile "$MOON_HOSTS"' in three.stdout
    assert re.search(r"^export HPCDDP_PYTHON MASTER_ADDR$", three.stdout, re.MULTILINE)
    warned = moon("render", *ASKED, "--set", "signal=0:05:00", "--set", "directives=--soft", "--", "true")
    assert warned.returncode == 0, warned.stderr
    chain = moon("render", *ASKED, "--set", "chain=3", "--", "true")
    assert "--chain 3" in chain.stdout, chain.stderr


def test_its_sites_may_say_the_words_of_its_row_and_no_other_schedulers_words(moon, tmp_path):
    def rendered(said: str):
        (tmp_path / "lab.yaml").write_text(f"{SITE}{said}\n")
        asked = ["--site", str(tmp_path / "lab.yaml"), *ASKED[2:], "--account", "luna", "--", "true"]
        return moon("render", *asked)

    said = rendered("account: {option: --sponsor}\nsize: orbits")
    assert said.returncode == 0, said.stderr
    assert {"#MOON --orbits=1:4", "#MOON --sponsor=luna"} <= set(directives(said.stdout))
    for wrong, hint in (
        ("account: {option: -P}", "one of --payer, --sponsor, none"),
        ("size: totals", "one of orbits"),
        ("gpus_option: --gres", "leave out gpus_option"),
    ):
        refused = rendered(wrong)
        assert (refused.returncode, f"hint: {hint}\n" in refused.stderr) == (3, True), refused.stderr


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("hold=true", "cannot take hold: its scheduler, moonshot, has no option for it"),
        ("directives=--time=1", "directive '--time=1' is printed by the script itself"),
        ("env.MOON_JOB=1", "env MOON_JOB is set by the job script itself"),
        ("mail=orbit", "any of begin end fail"),
    ],
)
def test_what_it_cannot_do_is_refused_by_its_row_and_the_pipe_is_refused_by_its_parser(moon, asked, told):
    done = moon("render", *ASKED, "--set", asked, "--", "true")
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    assert "#MOON hpcddp-render-failed\n" in done.stdout


def test_its_sites_are_listed_shown_and_started(moon, tmp_path):
    assert "generic-moonshot" in moon("sites").stdout
    assert re.search(r"scheduler +moonshot", moon("sites", "show", "generic-moonshot").stdout)
    programs = write_program(tmp_path, "mqueues", "echo crater 7")
    new = moon("sites", "new", "lab", "--file", str(tmp_path / "lab.yaml"), programs=programs)
    assert new.returncode == 0, new.stderr
    shown = moon("sites", "show", new.stdout.strip()).stdout
    assert re.search(r"scheduler +moonshot", shown)
    assert re.search(r"queue crater +1-7 nodes", shown)


def test_its_allocation_is_found_and_launch_runs_in_it(moon, tmp_path):
    (tmp_path / "hosts").write_text("a\na\nb\nb\n")
    job = {"MOON_JOB": "7", "MOON_HOSTS": str(tmp_path / "hosts"), "MOON_CPUS": "16", "MOON_LANDING": "2000000000"}
    env = moon("env", **job)
    assert env.returncode == 4
    assert "this is a batch script or shell of moonshot job 7" in env.stderr
    assert "mpirun -np 4 hpcddp exec" in env.stderr
    (tmp_path / "none").touch()
    empty = moon("env", **job | {"MOON_HOSTS": str(tmp_path / "none")})
    assert "is empty\nhint: mpirun -np N hpcddp exec" in empty.stderr, empty.stderr
    launched = moon("launch", "--launcher", "openmpi", "--dry-run", "--", "true", **job)
    assert launched.returncode == 0, launched.stderr
    assert "#MOON --nodes=2:2" in launched.stdout
    assert "CPUs per rank 8" in launched.stdout
    assert "the end of this allocation is not known" not in launched.stderr


def test_a_template_without_a_block_that_the_job_needs_is_an_error_that_names_it(run, repo, tmp_path):
    folder = checkout(repo, tmp_path, MODULE)
    template = folder / "templates/moonshot.sh.j2"
    template.write_text(re.sub(r"{% block first_host %}.*?{% endblock %}\n", "", TEMPLATE, flags=re.DOTALL))
    line = [sys.executable, "-m", "hpcddp", "render", *ASKED, "--nodes", "3", "--", "true"]
    done = run(line, cwd=folder, env={"HOME": str(folder), "PYTHONPATH": str(folder), "PATH": "/nonexistent"})
    assert done.returncode == 3
    assert done.stderr.splitlines()[-2:] == [
        "hpcddp: templates/moonshot.sh.j2 has no block first_host, and this job needs it",
        "hint: write the block in templates/moonshot.sh.j2, as the templates of other schedulers do",
    ]
