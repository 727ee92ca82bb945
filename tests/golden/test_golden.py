"""Whole scripts, as they stand in tests/golden/*.sh. After a wanted change: python tests/golden/test_golden.py"""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest

from hpcddp.errors import HpcddpError
from hpcddp.schedulers.registry import all_schedulers
from hpcddp.script import render
from hpcddp.script.plan import JobPlan, PlannedBy, plan_job
from hpcddp.script.render import render_script
from hpcddp.script.site_file import SiteChoice, load_yaml, open_site, site_files
from hpcddp.script.spec import read_spec
from tests.job_script import order_in

HERE = Path(__file__).parent
PREFIXES = [row.directives.prefix for row in all_schedulers() if row.directives.prefix]


def site_cases() -> dict[str, dict[str, object]]:
    """Each site on 1 node and on 3, as sites.yaml says."""
    cases: dict[str, dict[str, object]] = {}
    for site, asked in load_yaml(str(HERE / "sites.yaml"))[0].items():
        for nodes in ("1", "3") if "both" in asked else asked:
            case = {**asked.get("both", {}), **asked.get(nodes, {})}
            name = f"{site}-{nodes}-node{'s' if nodes > '1' else ''}"
            cases[name] = {"site": site, "nodes": nodes, "command": "python train.py", **case}
    return cases


CASES = {**load_yaml(str(HERE / "cases.yaml"))[0], **site_cases()}
PLANNED_BY = PlannedBy(python="/opt/env/bin/python", version="1.2.3", created_by="hpcddp render job.yaml", cpus=6)


def plan_case(name: str) -> JobPlan:
    asked = {key: (value, key) for key, value in CASES[name].items()}
    site = open_site(SiteChoice(str(CASES[name]["site"]), "golden"), {})
    return plan_job(read_spec(asked, site.vars), site, PLANNED_BY)


def render_case(name: str) -> str:
    return render_script(plan_case(name))


@pytest.fixture(params=list(CASES))
def golden(request) -> Path:
    return HERE / f"{request.param}.sh"


def test_the_script_is_the_golden_byte_for_byte(golden):
    assert render_case(golden.stem) == golden.read_text()


def test_every_golden_has_its_case():
    assert sorted(path.stem for path in HERE.glob("*.sh")) == sorted(CASES)


def test_every_shipped_site_has_goldens():
    assert {case["site"] for case in CASES.values()} == set(site_files({}))


@pytest.mark.parametrize("value", [None, ("a", "b"), {}])
def test_a_template_that_prints_no_single_value_is_an_error(value):
    with pytest.raises(jinja2.TemplateRuntimeError, match="which is no single value"):
        render._environment().from_string("{{ value }}").render(value=value)


def test_bash_parses_the_scripts(run):
    done = run(["bash", "-c", 'for script; do bash -n "$script" || exit; done', "bash", *HERE.glob("*.sh")])
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck_finds_nothing(run):
    # SC1091: a site's module init is not on this machine. SC2016: a user's argument holds a $ and stays as it is.
    done = run(["shellcheck", "-e", "SC1091,SC2016", *HERE.glob("*.sh")])
    assert done.returncode == 0, done.stdout


def test_directives_follow_the_first_line_without_a_gap(golden):
    lines = golden.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    words = "|".join(re.escape(prefix.removeprefix("#")) for prefix in PREFIXES)
    directives = [i for i, line in enumerate(lines) if re.match(rf"\s*#\s*({words})", line, re.IGNORECASE)]
    assert directives == list(range(1, len(directives) + 1))
    assert all(re.fullmatch(rf"#({words}) -[ -~]*[^ \\]", lines[i]) for i in directives)


def test_the_supervisor_reads_the_numbers_of_the_plan_in_the_launcher_s_line(golden):
    plan, line = plan_case(golden.stem), order_in(golden.read_text()).line
    assert (line.nodes, line.ranks_per_node) == (plan.nodes, plan.ranks_per_node)
    assert (line.world_size, line.global_batch) == (plan.world_size, plan.global_batch)
    assert line.gpus_per_node in {0, plan.gpus_per_node}
    assert line.command == plan.command


if __name__ == "__main__":
    for case in CASES:
        try:
            text = render_case(case)
        except HpcddpError as e:
            raise SystemExit(f"{case}: {e}") from e
        (HERE / f"{case}.sh").write_text(text)
