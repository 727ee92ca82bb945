"""The tables of keys in the manual are the program's."""

from __future__ import annotations

import importlib.util
import re

from hpcddp.ranks.launchers import JOB_LAUNCHERS, LAUNCHER_NAMES
from hpcddp.script import site_file
from hpcddp.script.site_file import load_site, site_files
from hpcddp.script.spec import KEYS


def keys_in(text: str, heading: str) -> list[str]:
    """The words in the first column of the table after a heading or sentence."""
    table = text.split(heading)[1].split("\n\n|")[1].split("\n\n")[0]
    return [key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_every_key_of_a_job_file_is_in_the_manual(repo):
    assert keys_in((repo / "docs/job-file.md").read_text(), "## Keys") == list(KEYS)


def test_the_table_of_launchers_has_every_row_and_says_which_of_them_job_scripts_start(repo):
    table = (repo / "docs/ranks.md").read_text().split("\n## Launchers\n")[1].split("\n\n|")[1].split("\n\n")[0]
    cells = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    marked = {name.strip("`"): mark for name, _, mark, *_ in cells}
    assert marked == {name: "yes" if name in JOB_LAUNCHERS else "no" for name in LAUNCHER_NAMES if name != "none"}


def test_every_key_of_a_site_file_is_in_the_manual(repo):
    text = (repo / "docs/sites.md").read_text()
    assert keys_in(text, "(exit status 3") == list(site_file.SITE)
    assert keys_in(text, "A queue says") == [key for key in site_file.QUEUE if key != "source"]


def test_the_sites_pages_are_those_of_their_files(repo):
    spec = importlib.util.spec_from_file_location("make_site_pages", repo / "docs/make_site_pages.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    written = {path.name: path.read_text() for path in (repo / "docs/sites").iterdir()}
    assert written == maker.pages(), "run: python docs/make_site_pages.py"
    assert all(f"[`{name}`]" in written["README.md"] for name in site_files({}))


def test_the_manuals_own_site_is_one_that_loads(repo, tmp_path):
    typed = (repo / "docs/add-a-site.md").read_text().split("mycluster.yaml <<'END'\n")[1].split("\n> END\n")[0]
    (tmp_path / "my.yaml").write_text(re.sub("^> ", "", typed, flags=re.MULTILINE))
    assert load_site("my", str(tmp_path / "my.yaml")).queues["h100"].gpus == 4
