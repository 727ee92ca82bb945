"""What the schedulers print of queues and nodes: what is not said is unknown, and what cannot be read is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcddp.schedulers.pbs import parse_queues
from hpcddp.schedulers.row import QueueFound
from hpcddp.schedulers.slurm import parse_partitions

OPEN = {"enabled": "True", "started": "True"}


def pbs(queues: object, nodes: object) -> dict[str, QueueFound]:
    return {q.name: q for q in parse_queues(json.dumps({"Queue": queues}), json.dumps({"nodes": nodes}))}


def vnode(host: str, **has: Any) -> dict[str, Any]:
    return {"resources_available": {"host": host, **has}}


def two_vnodes(host: str) -> dict[str, Any]:
    """A host of the form that OpenPBS 23.06 shows: the vnode of its own name has nothing."""
    half = {"ncpus": 96, "ngpus": 4, "mem": "500gb"}
    empty = {"ncpus": 0, "ngpus": 0, "mem": "0b"}
    return {
        host: vnode(host, **empty),
        **{f"{host}[{i}]": vnode(host, **half, vnode=f"{host}[{i}]") for i in (0, 1)},
    }


def test_pbs_queues_are_those_that_are_open_with_the_nodes_behind_them(repo: Path) -> None:
    texts = [
        json.dumps(json.loads((repo / f"tests/captures/pbs/{name}.json").read_text())["stdout_json"])
        for name in ("qstat_queues_json", "pbsnodes_json")
    ]
    found = {q.name: q for q in parse_queues(*texts)}
    both = ("cpus", "gpus")
    assert found["rt_HF"] == QueueFound("rt_HF", 4, 192, 1000, 8, None, "168:00:00", defaults=both)
    assert found["rt_HG"] == QueueFound("rt_HG", 4, 16, None, 1, defaults=both)
    assert found["workq"] == QueueFound("workq", 4, 192, 1000, 8)
    assert [name for name, queue in found.items() if not queue.is_open] == ["closed", "stopped"]


def test_the_vnodes_of_a_host_are_one_node() -> None:
    found = pbs({"a": OPEN}, {**two_vnodes("n1"), **two_vnodes("n2")})
    assert found["a"] == QueueFound("a", 2, 192, 1000, 8)


def test_a_queue_whose_chunk_names_no_gpus_is_not_said_to_have_the_nodes() -> None:
    found = pbs({"cpu": {**OPEN, "default_chunk": {"ncpus": 32}}}, two_vnodes("n1"))
    assert found["cpu"] == QueueFound("cpu", 1, 32, None, None, defaults=("cpus",))


def test_of_nodes_that_differ_no_queue_is_said_to_have_the_largest() -> None:
    found = pbs({"a": OPEN}, {**two_vnodes("n1"), "n2": vnode("n2", ncpus=64, mem="100gb"), "login": vnode("login")})
    assert found["a"] == QueueFound("a", 2)


@pytest.mark.parametrize("text", ["", "{}", '{"Queue": {}}', '{"Queue": {"a', "<html>"])
def test_text_that_shows_no_queue_is_never_a_server_without_queues(text: str) -> None:
    with pytest.raises(ValueError, match=r"shows no queue|Expecting|Unterminated"):
        parse_queues(text, '{"nodes": {}}')


def test_partitions_are_read_with_their_largest_node() -> None:
    text = "gpu|4|64|515000|gpu:a100:4(S:0-1)|2-00:00:00|up|1-4\ngpu|2|64|1031000|gpu:a100:8|2-00:00:00|up|1-4\n"
    text += "cpu|9|48|192000|(null)|30:00|down|1-infinite\nall|15|48+|192000+|(null)|infinite|up|1-infinite\n\n"
    assert parse_partitions(text) == [
        QueueFound("gpu", 6, 64, 1006, 8, "a100", "48:00:00", 4, mixed=True),
        QueueFound("cpu", 9, 48, 187, 0, None, "0:30:00", is_open=False),
        QueueFound("all", 15, 48, 187, 0, None, None, mixed=True),
    ]


@pytest.mark.parametrize(
    ("gres", "said"),
    [
        ("gpu:4", (4, None)),
        ("gpu:1g.5gb:7(S:0)", (7, "1g.5gb")),
        ("nvme:1,gpu:a100:4(S:0-1)", (4, "a100")),
        ("gpu:a100:2,gpu:v100:2", (4, None)),
        ("gpu:many", (None, None)),
    ],
)
def test_gpus_of_a_node_are_read_with_their_kind(gres: str, said: tuple[int | None, str | None]) -> None:
    (found,) = parse_partitions(f"a|1|8|8000|{gres}|1:00:00|up|1\n")
    assert (found.gpus, found.gpu) == said


@pytest.mark.parametrize("text", ["", "\n", "a|6|64\n", "<html>502</html>\n", "a|1|8|8000|(null)|1:00|up|1\nb|8|96|95"])
def test_text_that_is_cut_or_no_list_is_never_a_list_without_partitions(text: str) -> None:
    with pytest.raises(ValueError, match="partition"):
        parse_partitions(text)
