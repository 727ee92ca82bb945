"""A site of one's own: the start that is written, and the keys of its file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcddp.errors import RequestError, SiteError
from hpcddp.lint.script import read_script
from hpcddp.schedulers.row import QueueFound
from hpcddp.script.site_check import format_new_site
from hpcddp.script.site_file import SiteChoice, load_site, open_site
from hpcddp.script.site_text import page_of

from .conftest import script


def test_a_new_site_takes_the_name_of_no_shipped_one(run, tmp_path):
    done = run([sys.executable, "-m", "hpcddp", "sites", "new", "abci3"], env={"HOME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("abci3.yaml is there already\nhint: edit it, or: hpcddp sites new my-abci3\n")


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
@pytest.mark.parametrize("queues", [[], [QueueFound("gpu", 4, 64, 502, 4, "a100", "24:00:00"), QueueFound("x")]])
def test_a_start_is_a_site_that_loads(scheduler, queues, tmp_path):
    (tmp_path / "my.yaml").write_text(format_new_site("my", scheduler, "2026-11-21", queues, "sinfo"))
    site = load_site("my", str(tmp_path / "my.yaml"))
    assert (site.scheduler, list(site.queues)) == (scheduler, [q.name for q in queues])


def test_a_new_site_is_written_where_it_is_found_and_never_over_another(run, tmp_path):
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'gpu|4|64|515000|gpu:a100:4|1-00:00:00|up|1-4'\n")
    (tmp_path / "sinfo").chmod(0o755)
    env = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{tmp_path}"}
    done = run(["hpcddp", "sites", "new", "lab"], env=env)
    assert done.returncode == 0, done.stderr
    site = open_site(SiteChoice("lab", "test"), {"HOME": str(tmp_path)})
    assert site.file == done.stdout.strip()
    assert (site.queues["gpu"].gpus, site.queues["gpu"].limits[0].walltime_s) == (4, 86400)
    again = run(["hpcddp", "sites", "new", "lab"], env=env)
    assert (again.returncode, "is there already" in again.stderr) == (2, True)


GPU_TYPE = """\
# https://docs.example.org/
schema: 1
summary: two kinds of GPU
scheduler: {scheduler}
standing: documented
verified: 2026-11-24
walltime: 1:00:00
queue: gpu
queues: {{gpu: {{gpus: 4, gpu_type: gh200, cpus: 288}}, cpu: {{gpus: 0, cpus: 64}}}}
{said}
"""


def test_a_gpu_type_stands_in_each_form_of_the_request(tmp_path):
    (tmp_path / "my.yaml").write_text("")
    for said, line in (
        ("gpus_option: --gres", "--gres=gpu:gh200:4"),
        ("gpus_option: --gpus", "--gpus=gh200:8"),
        ("", "--gpus-per-node=gh200:4"),
    ):
        (tmp_path / "my.yaml").write_text(GPU_TYPE.format(scheduler="slurm", said=f"{said}\nlauncher: {{name: srun}}"))
        assert f"\n#SBATCH {line}\n" in script(str(tmp_path / "my.yaml"), nodes="2"), said
        assert "gh200" not in script(str(tmp_path / "my.yaml"), queue="cpu", ranks_per_node="2")


@pytest.mark.parametrize(
    ("scheduler", "key", "value", "title"),
    [
        ("pbs", "gpu_type", "gh200", "PBS"),
        ("pbs", "qos", "gpu", "PBS"),
        ("slurm", "gpu_chunks", "true", "Slurm"),
        ("gridengine", "gpu_type", "gh200", "Grid Engine"),
    ],
)
def test_a_key_of_a_queue_that_no_request_could_carry_is_refused(tmp_path, scheduler, key, value, title):
    text = GPU_TYPE.format(scheduler=scheduler, said="").replace("gpu_type: gh200", f"{key}: {value}")
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(SiteError) as error:
        load_site("my", str(tmp_path / "my.yaml"))
    assert error.value.message.endswith(f", but {title} has no use for this key")
    assert error.value.hint == f"leave out {key}"


def test_a_queue_of_gpu_chunks_asks_for_one_chunk_for_each_gpu_and_places_none():
    asked = {"account": "a", "walltime": "1:00:00", "queue": "by-gpu"}
    text = script("sophia", **asked, gpus_per_node="4")
    assert "\n#PBS -l select=4:mpiprocs=1:ompthreads=16\n" in text
    assert "place=" not in text
    assert "\n#PBS -l place=excl\n" in script("sophia", **asked, exclusive="true")
    for more, message in (
        ({"gpus_per_node": "3"}, "1 to 2 GPUs, .* not 1 with 3 GPUs"),
        ({"gpus_per_node": "2", "ranks_per_node": "4"}, "4 ranks do not go on 2 GPUs"),
        ({"mem_gb": "100"}, "mem_gb 100 cannot be asked for"),
    ):
        with pytest.raises(RequestError, match=message):
            script("sophia", **asked, **more)


QOS = """\
# https://docs.example.org/
schema: 1
summary: a partition and two QOS of it
scheduler: slurm
standing: documented
verified: 2026-11-24
walltime: 1:00:00
queue: prod
queues:
  prod: {gpus: 4, cpus: 64}
  debug: {like: prod, partition: prod, qos: debug, limits: [{nodes: 1-2}]}
launcher: {name: srun}
"""


def test_a_queue_that_is_a_qos_of_a_partition_stands_beside_it(tmp_path):
    (tmp_path / "my.yaml").write_text(QOS)
    assert "\n#SBATCH --partition=prod\n#SBATCH --qos=debug\n" in script(str(tmp_path / "my.yaml"), queue="debug")
    assert "--qos" not in script(str(tmp_path / "my.yaml"), queue="prod")
    with pytest.raises(RequestError, match="queue debug of site my takes 1 to 2 nodes"):
        script(str(tmp_path / "my.yaml"), queue="debug", nodes="3")


KINDS = QOS.replace(
    "queue: prod\nqueues:\n",
    "account: {required: true, pattern: '.+@v100', example: abc@v100}\nqueue: v100\nqueues:\n"
    "  v100: {partition: gpu, gpus: 4, cpus: 64, gpu_type: v100}\n"
    "  h100: {partition: gpu, gpus: 8, cpus: 96, gpu_type: h100, account: {pattern: '.+@h100', example: abc@h100}}\n"
    "  free: {like: h100, qos: idle, account: {required: false}}\n",
)


def test_queues_may_be_kinds_of_nodes_in_one_partition_each_with_its_rule_for_accounts(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(KINDS)
    text = script(str(path), account="abc@v100")
    assert "\n#SBATCH --partition=gpu\n#SBATCH --nodes=1\n" in text
    assert "\n#SBATCH --gpus-per-node=v100:4\n" in text
    text = script(str(path), queue="h100", account="abc@h100")
    assert ("\n#SBATCH --gpus-per-node=h100:8\n" in text, "--qos" in text) == (True, False)
    assert "\n#SBATCH --partition=gpu\n#SBATCH --qos=idle\n" in script(str(path), queue="free")
    with pytest.raises(RequestError, match=r"an account matches .*h100"):
        script(str(path), queue="h100", account="abc@v100")
    with pytest.raises(RequestError, match="still needs an account"):
        script(str(path), queue="h100")
    assert "--gpus-per-node=v100:4" in script(str(path), account="abc@v100", gpu_type="v100")
    of_queue = KINDS.replace("account: {pattern", "account: {required: true, pattern").replace(
        "queue: v100", "queue: h100"
    )
    path.write_text(of_queue.replace("account: {required: true, pattern: '.+@v100', example: abc@v100}\n", ""))
    assert "hpcddp render --site my --account abc@h100 " in page_of(load_site("my", str(path)), "a test")
    site = load_site("my", str(path))
    for said, queue in (("-p gpu", "v100"), ("-p gpu\n#SBATCH -q idle", "free")):
        known = read_script(f"#!/bin/bash\n#SBATCH {said}\nsrun python a.py\n", site, lambda path: True)
        assert known.queue_name == queue


@pytest.mark.parametrize("word", ["partition: a b", "qos: a;b", 'gpu_type: "#"', "gpu_type: a\\"])
def test_a_word_of_a_queue_that_no_directive_can_carry_is_refused(tmp_path, word):
    (tmp_path / "my.yaml").write_text(QOS.replace("partition: prod, qos: debug", word))
    with pytest.raises(
        SiteError, match=f"{word.split(':')[0]} in debug in queues in .*my.yaml .* is not one plain word"
    ):
        load_site("my", str(tmp_path / "my.yaml"))


@pytest.mark.parametrize("said", ["2024", "last year", "2026-13-01", "2026-11-24 or so"])
def test_a_day_that_is_none_would_never_age(tmp_path, said):
    (tmp_path / "my.yaml").write_text(QOS.replace("2026-11-24", said))
    with pytest.raises(SiteError, match=f"verified in .*my.yaml '{said}' is not a day") as error:
        load_site("my", str(tmp_path / "my.yaml"))
    assert error.value.hint == "verified: 2026-11-24"
