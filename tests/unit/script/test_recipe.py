"""A site's network to meet on reaches the ranks of several nodes, through every launcher."""

from __future__ import annotations

import pytest

from .conftest import script

SITE = """# https://docs.example.org/
schema: 1
summary: a cluster
scheduler: {scheduler}
standing: generic
verified: 2026-11-21
walltime: 1:00:00
queue: q
queues: {{q: {{gpus: 2, cpus: 16}}}}
launcher: {{name: {launcher}}}
rendezvous: {{suffix: i, interface: hsn0}}
"""
CASES = [("slurm", "srun"), ("pbs", "openmpi")]


def rendered(tmp_path, scheduler: str, launcher: str, nodes: str) -> str:
    (tmp_path / "own.yaml").write_text(SITE.format(scheduler=scheduler, launcher=launcher))
    return script(f"{tmp_path}/own.yaml", nodes=nodes)


@pytest.mark.parametrize(("scheduler", "launcher"), CASES)
def test_the_recipe_is_exported_and_forwarded(tmp_path, scheduler, launcher):
    text = rendered(tmp_path, scheduler, launcher, "2")
    assert "\nexport HPCDDP_HOST_SUFFIX=i\nexport HPCDDP_INTERFACE=hsn0\n" in text
    if launcher == "openmpi":  # which passes on nothing by itself
        assert "-x HPCDDP_HOST_SUFFIX -x HPCDDP_INTERFACE" in text


def test_one_node_needs_no_network(tmp_path):
    text = rendered(tmp_path, "slurm", "srun", "1")
    assert "HPCDDP_HOST_SUFFIX" not in text
    assert "HPCDDP_INTERFACE" not in text
