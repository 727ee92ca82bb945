"""A part of a shared node takes its part of the CPUs and of the memory, on every shipped site and in every queue."""

from __future__ import annotations

from contextlib import suppress

import pytest

from hpcddp.errors import RequestError, SiteError
from hpcddp.script.plan import PlannedBy, plan_job
from hpcddp.script.site import Queue, Site
from hpcddp.script.site_file import load_site, site_files
from hpcddp.script.spec import read_spec

from .conftest import script

SITES = {name: load_site(name, path) for name, path in site_files({}).items()}
# Queues whose pages do not say all that a script needs, with what is missing: the error says what to type.
ASKS = {
    "aspire2a": "still needs GPUs per node",
    "horizon": "still needs a launcher",
    "jupiter": "still needs CPUs per rank",
    "juwels-booster": "still needs CPUs per rank",
    "stampede3": "still needs a launcher",
}
SHARED = [
    pytest.param(site, queue, id=f"{name} {queue}")
    for name, site in SITES.items()
    for queue, about in site.queues.items()
    if about.gpus and about.gpus > 1 and not about.exclusive and site.size != "type" and name not in ASKS
]


def request(site: Site, queue: str, **asked: str) -> dict[str, tuple[object, str]]:
    words = {"queue": queue, "walltime": "0:10:00", **asked}
    if site.account.required:
        words["account"] = site.account.example or "abc"
    words |= {name: rule.example or "x" for name, rule in site.vars.items() if rule.required}
    return {**{key: (value, "test") for key, value in words.items()}, "command": (["python", "t.py"], "test")}


def plan(site: Site, queue: str, **asked: str):  # type: ignore[no-untyped-def]  # of plan_job
    return plan_job(read_spec(request(site, queue, **asked), site.vars), site, PlannedBy("/usr/bin/python", "0", "x"))


def least_nodes(about: Queue, gpus: int) -> int:
    """The smallest job of nodes with so many GPUs that the queue takes: some want 65 nodes, or 4 GPUs, at least. 0 if
    it takes none."""
    fits = (n for n in range(1, 99) if not about.limits or any(r.takes(n, n * gpus) for r in about.limits))
    return next(fits, 0)


@pytest.mark.parametrize(("site", "queue"), SHARED)
def test_each_gpu_goes_with_its_share(site: Site, queue: str) -> None:
    about = site.queues[queue]
    assert about.gpus
    whole = plan(site, queue, nodes=str(least_nodes(about, about.gpus)))
    sizes = [gpus for gpus in range(1, about.gpus) if least_nodes(about, gpus)]  # Sophia's by-gpu: 1, 2 and 4
    assert sizes
    for gpus in sizes:
        part = plan(site, queue, nodes=str(least_nodes(about, gpus)), gpus_per_node=str(gpus))
        assert part.cpus_per_node <= -(-whole.cpus_per_node * gpus // about.gpus), gpus
        assert part.mem_gb <= -(-whole.mem_gb * gpus // about.gpus), gpus
        assert part.cpus_per_node >= 1


def test_a_job_alone_on_its_node_has_all_of_its_memory() -> None:
    derecho = plan(SITES["derecho"], "main", gpus_per_node="2")
    assert (derecho.cpus_per_node, derecho.mem_gb) == (64, 480)
    shared = plan(SITES["delta"], "gpuA100x4", gpus_per_node="1")
    alone = plan(SITES["delta"], "gpuA100x4", gpus_per_node="1", exclusive="true")
    assert (shared.cpus_per_node, alone.cpus_per_node) == (16, 64)
    assert alone.mem_gb in {0, 4 * shared.mem_gb}  # 0: --exclusive and nothing named is the site's own default


def test_several_parts_of_nodes_are_asked_for_by_the_node() -> None:
    """Slurm 22.05 deals a total unevenly: --nodes=2 --ntasks-per-node=2 --gpus=4 gave 3 GPUs and 1."""
    for nodes, gpus, line in (("2", "2", "--gpus-per-node=2"), ("2", "4", "--gpus=8"), ("1", "2", "--gpus=2")):
        text = script("isambard-ai", nodes=nodes, gpus_per_node=gpus, account="a", walltime="1:00:00")
        assert f"\n#SBATCH {line}\n" in text
        assert text.count("#SBATCH --gpus") == 1


def test_what_no_internal_queue_takes_is_refused() -> None:
    asked = {"cpus_per_rank": "8", "launcher": "openmpi"}
    for gpus, walltime in (("8", "2:00:01"), ("4", "0:30:00"), ("64", "120:00:00")):
        assert plan(SITES["aspire2a"], "normal", gpus_per_node=gpus, walltime=walltime, **asked).queue == "normal"
    with pytest.raises(RequestError, match="run at least 02:00:01, not 01:00:00"):
        plan(SITES["aspire2a"], "normal", gpus_per_node="8", walltime="1:00:00", **asked)
    with pytest.raises(RequestError, match="regular-mig of site miyabi-g takes 1 to 2 nodes, 4 nodes per job, not 3"):
        plan(SITES["miyabi-g"], "regular-mig", nodes="3")


def test_a_rank_has_the_cpus_next_to_its_gpu_or_is_not_bound() -> None:
    asked = {"account": "a", "walltime": "0:30:00", "queue": "debug", "filesystems": "home"}
    whole = script("polaris", **asked)
    assert "--cpu-bind list:0-7,32-39:8-15,40-47:16-23,48-55:24-31,56-63 " in whole
    assert "CUDA_VISIBLE_DEVICES=3,2,1,0 # a rank's GPU is the one next to its CPUs" in whole
    for part in ({"gpus_per_node": "2"}, {"ranks_per_node": "8"}):
        text = script("polaris", **asked, **part)
        assert "--cpu-bind none " in text
        assert "CUDA_VISIBLE_DEVICES=" not in text
    assert "--cpu-bind none " in script("aurora", **asked, gpus_per_node="6")


HINTS = [
    ("gadi", {"nodes": "2", "cpus_per_node": "24"}, "leave out cpus_per_node, or --nodes 1"),
    ("sophia", {"queue": "by-gpu", "gpus_per_node": "0"}, "--gpus-per-node 1, or another --queue"),
    ("sophia", {"queue": "by-gpu", "gpus_per_node": "3"}, "nearest: --gpus-per-node 2, or --queue by-node"),
    ("miyabi-g", {"nodes": "257"}, "nearest: --nodes 256"),
    ("aurora", {"nodes": "1", "walltime": "30:00:00"}, "nearest: --nodes 256, or --queue capacity"),
]


@pytest.mark.parametrize(("name", "asked", "hint"), HINTS, ids=[f"{name} {hint}" for name, _, hint in HINTS])
def test_a_hint_that_is_typed_is_not_refused_for_the_same_reason(name: str, asked: dict[str, str], hint: str) -> None:
    site = SITES[name]
    with pytest.raises(RequestError) as refused:
        plan(site, asked.get("queue", site.queue), **{key: value for key, value in asked.items() if key != "queue"})
    assert refused.value.hint == hint


@pytest.mark.parametrize("name", SITES)
def test_every_queue_of_a_shipped_site_gives_a_script_or_says_what_to_type(name: str) -> None:
    site = SITES[name]
    for queue, about in site.queues.items():
        first = next((rule.nodes[0] for rule in about.limits if rule.nodes), 1)
        if name not in ASKS:
            assert plan(site, queue, nodes=str(first)).queue == queue
            continue
        with suppress(SiteError):  # some of its queues say all
            plan(site, queue, nodes=str(first))
            continue
        with pytest.raises(SiteError, match=ASKS[name]) as refused:
            plan(site, queue, nodes=str(first))
        assert refused.value.hint
