"""Each Slurm site's goldens through a real `sbatch --test-only`, on a Slurm with the site's partitions and nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from livecluster import Cluster, Done
from siteslurm import controller, write_conf

from hpcddp.script.site_file import SiteChoice, open_site, site_files

pytestmark = pytest.mark.cluster

GOLDENS = Path(__file__).parents[1] / "golden"
SITES = [name for name in site_files({}) if open_site(SiteChoice(name, ""), {}).scheduler == "slurm"]
OF_SLURM = ["generic-slurm-options", "generic-slurm-chain"]
# Options of plugins that this Slurm does not have. They are taken out, and said.
PLUGINS = {"perlmutter": {"--image": "Shifter", "--module": "Shifter"}}


def scripts(site: str) -> dict[str, str]:
    names = [f"{site}-1-node", f"{site}-3-nodes", *(OF_SLURM if site == "generic-slurm" else [])]
    return {name: (GOLDENS / f"{name}.sh").read_text() for name in names}


def without_plugins(site: str, text: str) -> tuple[str, list[str]]:
    """The script without what a plugin would read, and what that was."""
    lines, gone = [], []
    for line in text.splitlines(keepends=True):
        option = re.match(r"#SBATCH (--[\w-]+)", line)
        (gone if option and option[1] in PLUGINS.get(site, {}) else lines).append(line)
    return "".join(lines), gone


@pytest.fixture
def judge(cluster: Cluster, shared: Path) -> Callable[[str, str], Done]:
    def ask(text: str, conf: str) -> Done:
        return cluster.sh(["sbatch", "--test-only"], cwd=shared, stdin=text, env={"SLURM_CONF": conf})

    return ask


@pytest.mark.parametrize("site", SITES)
def test_a_sites_goldens_are_taken_by_a_real_slurm(site, cluster, shared, judge) -> None:
    texts = scripts(site)
    features = {w for t in texts.values() for c in re.findall(r"--constraint=(\S+)", t) for w in re.findall(r"\w+", c)}
    folder = shared / "slurm"
    write_conf(folder, open_site(SiteChoice(site, "test"), {}), features)
    conf = f"{folder}/slurm.conf"
    with controller(cluster.state, folder):
        for name, golden in texts.items():
            text, gone = without_plugins(site, golden)
            print(f"{name}: not judged, for lack of a plugin: {gone}" if gone else f"{name}: judged whole")
            done = judge(text, conf)
            assert done.returncode == 0, f"{name}: {done.stderr}\n{text[:1200]}"
            assert re.search(r"Job \d+ to start at", done.stderr), done.stderr
            # and the judge does judge
            assert judge(text.replace("--nodes=", "--nodes=9"), conf).returncode != 0
            assert judge(text.replace("#SBATCH --time", "#SBATCH --frobnicate=1\n#SBATCH --time"), conf).returncode != 0
