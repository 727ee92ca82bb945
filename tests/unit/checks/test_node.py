"""Each check of a node finds its fault by name, and says nothing of a node that is like the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcddp.checks.environment import FAILED
from hpcddp.checks.node import ERRORS, NODE_CHECKS, CheckedJob, CheckedNode, Gpu, Process, judge_nodes, judge_ranks
from hpcddp.checks.process import (
    choose_common_variables,
    choose_gpus,
    count_cpus,
    describe_node,
    probe_disk,
    reach,
    read_gpus,
)

GPU = Gpu("GPU-a", "NVIDIA H100 80GB HBM3", "570.1", 4, tflops=650.0, copy_gbs=2200.0)
VERSIONS = {"torch": "2.9.1", "NCCL": "2.27.5"}
WELL = CheckedNode("", 32.0, 65536, (30_000, 32_000), {"/home": (9999, 9999, "")}, (GPU,), versions=VERSIONS)
RANKS = [{"rank": at, "world_size": 4, "local_rank": 0, "local_world_size": 1} for at in range(4)]


def job(ill: dict[str, object], process: dict[str, object]) -> CheckedJob:
    """Four nodes with a rank each, of which the third is ill."""
    nodes = [WELL._replace(host=f"node{at}", gpus=(GPU._replace(uuid=f"GPU-{at}"),)) for at in range(4)]
    ranks = [
        Process(f"node{at}", **RANKS[at], cpus=(0, 1), env={"PATH": "/bin"}, gpus=(f"GPU-{at}",)) for at in range(4)
    ]
    nodes[2], ranks[2] = nodes[2]._replace(**ill), ranks[2]._replace(**process)
    return CheckedJob(nodes, ranks, gpus_per_node=1)


#: What is ill in the third node, or in its process -> the row that finds it, and words of its message.
ILL: list[tuple[str, str, dict[str, object], dict[str, object]]] = [
    ("GPU count", "it shows 0 GPUs of 1", {"gpus": ()}, {}),
    ("GPU driver", "nvidia-smi: no driver", {"gpus": (), "errors": {"GPU driver": "nvidia-smi: no driver"}}, {}),
    ("GPU memory", "needs a reset", {"gpus": (GPU._replace(is_pending=True),)}, {}),
    ("GPU memory", "has counted 3 uncorrectable errors", {"gpus": (GPU._replace(uncorrected=3),)}, {}),
    ("GPU answer", "did not answer in 15 s", {"gpus": (GPU._replace(error="it did not answer in 15 s"),)}, {}),
    (
        "GPU speed",
        "multiplies at 440 TFLOPS; the job's median is 650; the data sheet of H100 says 989",
        {"gpus": (GPU._replace(tflops=440.0),)},
        {},
    ),
    ("GPU speed", "copies at 1100 GB/s", {"gpus": (GPU._replace(copy_gbs=1100.0),)}, {}),
    ("leftover processes", "311, python still runs", {"leftover": ("311, python",)}, {}),
    ("leftover processes", "40000 MiB of GPU GPU-a are in use", {"gpus": (GPU._replace(used_mb=40_000),)}, {}),
    ("CPUs", "may use 8 CPUs, and 32", {"cpus": 8.0}, {}),
    ("full shared memory", "/dev/shm has room for 2 of 32000 MiB", {"shm_mb": (2, 32_000)}, {}),
    ("small shared memory", "/dev/shm has 64 MiB", {"shm_mb": (60, 64)}, {}),
    ("open files", "may open 256 files", {"files": 256}, {}),
    ("disk", "Disk quota exceeded", {"disks": {"/home": (9999, 9999, "Disk quota exceeded")}}, {}),
    ("disk", "/tmp has 12 MiB left", {"disks": {"/tmp": (12, 9999, "")}}, {}),
    ("disk", "/tmp has room for 3 more files", {"disks": {"/tmp": (9999, 3, "")}}, {}),
    ("versions", "NCCL is 2.26.2, and 2.27.5 on 3 of 4", {"versions": {**VERSIONS, "NCCL": "2.26.2"}}, {}),
    ("clock", "90.0 s ahead of the first host's", {"clock_s": 90.0}, {}),
    *[(name, "it is so", {"errors": {name: "it is so"}}, {}) for name in ERRORS],
    ("environment", "PATH is '/opt', and '/bin' in most", {}, {"env": {"PATH": "/opt"}}),
    ("environment", "NCCL_DEBUG is 'INFO', and not set in most", {}, {"env": {"PATH": "/bin", "NCCL_DEBUG": "INFO"}}),
    ("NCCL's interface", "leaves none", {}, {"found": (("NCCL's interface", "leaves none", "", FAILED),)}),
]


@pytest.mark.parametrize(("name", "said", "ill", "process"), ILL, ids=[f"{row[0]}: {row[1]}" for row in ILL])
def test_a_check_names_the_node_that_is_ill(name: str, said: str, ill: dict, process: dict) -> None:
    found = list(judge_nodes(job(ill, process)))
    assert [(host, check.name) for host, check in found] == [("node2", name)]
    assert said in found[0][1].message


def test_nodes_that_are_alike_are_well_and_what_is_not_known_is_no_fault() -> None:
    assert list(judge_nodes(job({}, {}))) == []
    assert list(judge_nodes(CheckedJob(tuple(CheckedNode(f"n{at}") for at in range(3)), ()))) == []
    assert list(judge_nodes(CheckedJob((WELL._replace(host="alone"),), ()))) == []


def test_every_check_has_a_case() -> None:
    shown = {row[0] for row in ILL} | {"shared GPU", "oversubscribed CPUs"}
    assert {row.name for row in NODE_CHECKS} <= shown


def test_a_gpu_that_is_as_slow_as_the_others_is_below_the_floor_of_its_type() -> None:
    slow = GPU._replace(tflops=300.0)
    found = list(
        judge_nodes(CheckedJob((WELL._replace(host="a", gpus=(slow,)), WELL._replace(host="b", gpus=(slow,))), ()))
    )
    assert [(host, check.name) for host, check in found] == [("a", "GPU speed"), ("b", "GPU speed")]
    assert "300 TFLOPS; the job's median is 300; the data sheet of H100 says 989" in found[0][1].message
    unknown = slow._replace(name="a GPU of next year")
    assert not list(judge_nodes(CheckedJob((WELL._replace(host="a", gpus=(unknown,)),), ())))


@pytest.mark.parametrize(
    ("cpus", "masks", "gpus", "found"),
    [
        (2.0, [(0, 1), (0, 1)], ["GPU-a", "GPU-b"], []),
        (2.0, [(0, 1), (0, 1), (0, 1)], ["GPU-a", "GPU-b", ""], ["oversubscribed CPUs"]),
        (8.0, [(0,), (0,)], ["GPU-a", "GPU-b"], ["oversubscribed CPUs"]),
        (0.5, [(0, 1)], ["GPU-a"], []),
        (8.0, [(0,), (1,)], ["GPU-a", "GPU-a"], ["shared GPU"]),
    ],
)
def test_ranks_of_a_node_that_take_the_same(cpus: float, masks: list, gpus: list[str], found: list[str]) -> None:
    ranks = tuple(
        Process("a", at, len(masks), at, len(masks), cpus=mask, gpus=(gpu,) if gpu else ())
        for at, (mask, gpu) in enumerate(zip(masks, gpus, strict=True))
    )
    assert [check.name for _, check in judge_nodes(CheckedJob((CheckedNode("a", cpus),), ranks))] == found


NO_RANK = "{} of {} processes have no rank: no variable of a launcher reaches them"


def placed(*ranks: tuple[str, int, int]) -> list[Process]:
    return [Process(host, rank, size) for host, rank, size in ranks]


@pytest.mark.parametrize(
    ("processes", "hosts", "found"),
    [
        (placed(("a", 0, 2), ("b", 1, 2)), ["a", "b"], []),
        (placed(("a", 0, 2), ("b", 1, 2)), [], []),
        (placed(("a", 0, 3), ("b", 1, 3)), ["a", "b"], [("", "rank 2 of 3 did not come")]),
        (
            [Process("a", 0, 4, 0, 2), Process("b", 3, 4, 1, 2)],
            ["a", "b"],
            [(host, "ranks 1, 2 of 4 did not come: it has 1 of its 2") for host in ("a", "b")],
        ),
        (
            [Process("a", 0, 4, 0, 2), Process("a", 1, 4, 1, 2), Process("b", 3, 4, 1, 2)],
            ["a", "b"],
            [("b", "rank 2 of 4 did not come: it has 1 of its 2")],
        ),
        (placed(("a", 0, 3), ("b", 1, 3)), ["a", "b", "c"], []),  # the host is missing, and named so
        (
            placed(("a", 0, 3), ("b", 1, 3), ("c", 1, 3)),
            ["a", "b", "c"],
            [("c", "rank 1 is on b and c"), ("", "rank 2 of 3 did not come")],
        ),
        (placed(("a", 0, 1), ("b", 0, 1)), ["a", "b"], [("b", "rank 0 is on a and b")]),
        ([Process("a"), Process("b")], ["a", "b"], [("", NO_RANK.format(2, 2))]),
        ([Process("a")], ["a"], []),
        ([Process("a", error="half a row from srun\nhint: unset it")], ["a"], [("a", "half a row from srun")]),
    ],
)
def test_ranks_that_are_missing_or_there_twice_are_named(processes, hosts, found) -> None:
    said = list(judge_ranks(processes, hosts))
    assert [(host, check.message) for host, check in said] == found
    assert all(check.name == "ranks" and check.state == FAILED and check.remedy for _, check in said)


def test_a_list_of_folders_is_compared_without_what_is_in_it_twice() -> None:
    env = {"PATH": "/a::/b:/a", "NCCL_DEBUG": "a:a", "HOME": "/root"}
    assert choose_common_variables(env) == {"PATH": "/a:/b", "NCCL_DEBUG": "a:a"}


@pytest.mark.parametrize(
    ("own", "files", "most"),
    [
        ("0::/job/step\n", {"job/cpu.max": "50000 100000", "job/step/cpu.max": "max 100000"}, 0.5),
        ("0::/\n", {"cpu.max": "9900000000 100000"}, None),
        ("4:memory:/x\n3:cpu,cpuacct:/job\n", {"cpu,cpuacct/job/cpu.cfs_quota_us": "20000"}, 0.2),
        ("3:cpuset:/job\n", {"cpuset/job/cpu.cfs_quota_us": "20000"}, None),
    ],
)
def test_a_quota_of_the_control_group_bounds_the_cpus(
    tmp_path: Path, own: str, files: dict, most: float | None
) -> None:
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        (file.parent / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "own").write_text(own)
    whole = len(os.sched_getaffinity(0))
    assert count_cpus(root=str(tmp_path / "cgroup"), table=str(tmp_path / "own")) == (whole if most is None else most)


def test_a_folder_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    free_mb, files, error = probe_disk(str(tmp_path))
    assert (free_mb > 0, files != 0, error) == (True, True, "")
    assert not [*tmp_path.iterdir()]
    assert probe_disk(str(tmp_path / "no")) == (0, -1, "No such file or directory")
    assert probe_disk("/proc")[2]


def test_a_folder_that_is_another_one_on_a_node_is_named(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    for name, found in (("mark", None), ("other", f"{tmp_path} is another folder here than on the checker's host")):
        node = describe_node("a", str(tmp_path), str(tmp_path / name), "", {"PATH": ""})
        assert node.errors.get("folder") == found


# The form of nvidia-smi 550 and later; the numbers are made up.
ROWS_OF_SMI = """\
00000000:18:00.0, GPU-a, NVIDIA H100 80GB HBM3, 570.133.20, 4, 0
00000000:2A:00.0, GPU-b, NVIDIA H100 80GB HBM3, 570.133.20, 61234, 12
00000000:3A:00.0, GPU-c, NVIDIA GeForce, 570.133.20, 4, [N/A]
"""
REMAPPED = """
==============NVSMI LOG==============
GPU 00000000:18:00.0
    Remapped Rows
        Correctable Error                 : 0
        Pending                           : No
        Remapping Failure Occurred        : No
GPU 00000000:2A:00.0
    Remapped Rows
        Correctable Error                 : 0
        {:34}: Yes
"""


@pytest.mark.parametrize("line", ["Pending", "Remapping Failure Occurred", "Pending Page Blacklist"])
def test_the_driver_says_what_gpus_there_are(line: str) -> None:
    a, b, c = read_gpus(ROWS_OF_SMI, REMAPPED.format(line))
    assert (a.uuid, a.is_pending, a.uncorrected) == ("GPU-a", False, 0)
    assert (b.uuid, b.is_pending, b.uncorrected, b.used_mb) == ("GPU-b", True, 12, 61234)
    assert (c.name, c.uncorrected, c.driver) == ("NVIDIA GeForce", 0, "570.133.20")


@pytest.mark.parametrize(
    ("mask", "local", "taken"),
    [
        (None, (1, 2), ("GPU-b",)),
        (None, (0, 1), ("GPU-a", "GPU-b", "GPU-c")),
        ("2", (1, 2), ("GPU-c",)),
        ("GPU-c,GPU-a", (1, 2), ("GPU-a",)),
        ("", (0, 2), ()),
    ],
)
def test_a_rank_takes_the_gpus_that_training_would_take(mask: str | None, local: tuple[int, int], taken: tuple) -> None:
    env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    process = Process("a", local[0], local[1], *local)
    assert choose_gpus([Gpu("GPU-a"), Gpu("GPU-b"), Gpu("GPU-c")], env, process) == taken


def test_a_name_that_does_not_resolve_or_is_this_host_itself_is_named() -> None:
    assert "does not resolve" in reach("no-such-host.invalid", 1)["rank 0's name"]
    assert "itself" in reach("localhost", 1)["rank 0's name"]
