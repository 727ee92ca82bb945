"""Commands that make their ranks themselves run once per node, and cannot disagree with the request."""

from __future__ import annotations

import pytest

from hpcddp.errors import RequestError
from hpcddp.script.node_agents import plan_rank_maker
from hpcddp.script.spec import JobSpec


def spec(command: str, **more: object) -> JobSpec:
    return JobSpec(command=tuple(command.split()), **more)  # type: ignore[arg-type]  # what each test gives


@pytest.mark.parametrize(
    ("command", "maker"),
    [
        ("torchrun train.py", "torchrun"),
        ("/opt/env/bin/torchrun --nproc_per_node=4 train.py", "torchrun"),
        ("python -m torch.distributed.run train.py", "-m torch.distributed.run"),
        ("env A=1 accelerate launch --config_file c.yaml train.py", "accelerate launch"),
        ("python -m accelerate.commands.accelerate_cli launch a.py", "accelerate.commands.accelerate_cli launch"),
        ("trl sft --model_name_or_path gpt2 --bf16 --num_processes 2", "trl sft"),
        ("accelerate test --config_file c.yaml", "accelerate test"),
        ("axolotl train config.yml", "axolotl train"),
        ("llamafactory-cli train sft.yaml", "llamafactory-cli train"),
        ("python main.py --multiprocessing_distributed=True", "the command"),
        ("python main.py --multiprocessing-distributed --dist-url env:// --world-size -1 --rank -1", "the command"),
        ("python train.py", ""),
        ("python train.py torchrun", ""),
        ("axolotl preprocess config.yml", ""),
        ("tune download gpt2", ""),
        ("mpirun -n 2 torchrun train.py", ""),
    ],
)
def test_the_command_says_it(command: str, maker: str) -> None:
    assert plan_rank_maker(spec(command))[1].maker == maker


def test_the_job_file_says_it_else() -> None:
    assert plan_rank_maker(spec("python train.py", ranks="node"))[1].maker == "the command"
    assert plan_rank_maker(spec("torchrun train.py", ranks="each"))[1].maker == ""


@pytest.mark.parametrize("option", ["--nproc-per-node 4", "--nproc_per_node=4"])
def test_the_ranks_per_node_are_the_commands(option: str) -> None:
    assert plan_rank_maker(spec(f"torchrun {option} train.py --nproc-per-node 9"))[0].ranks_per_node == 4
    assert plan_rank_maker(spec("torchrun --nproc-per-n 4 -m pkg.train --nproc-per-node 9"))[0].ranks_per_node == 4
    assert plan_rank_maker(spec("torchrun --no-python ./a.out --nproc-per-node 9"))[0].ranks_per_node is None


def test_accelerates_processes_are_those_of_a_node() -> None:
    assert plan_rank_maker(spec("accelerate launch --num_processes 4 train.py"))[0].ranks_per_node == 4
    with pytest.raises(RequestError, match="--num-processes on several nodes"):
        plan_rank_maker(spec("accelerate launch --num_processes 4 train.py", nodes=2))


@pytest.mark.parametrize(
    ("command", "more", "what"),
    [
        ("torchrun --nproc-per-node 4 train.py", {"ranks_per_node": 8}, "but 8 ranks per node are asked for"),
        ("torchrun --nnodes 4 train.py", {}, "but the job has 1"),
        ("torchrun --nnodes 1:2 train.py", {"nodes": 2}, "torchrun --nnodes 1:2, but the job has 2"),
        ("torchrun --rdzv-backend c10d train.py", {"nodes": 2}, "--rdzv-backend on several nodes"),
        ("torchrun --standal train.py", {"nodes": 2}, "torchrun --standalone on several nodes"),
        ("torchrun --nproc-per-node gpu train.py", {}, "the job has to know the number"),
        ("accelerate launch --num_machines 2 t.py", {"nodes": 2}, "--num-machines on several nodes"),
        ("torchrun --rdzv_endpoint=localhost:1 train.py", {"nodes": 2}, "--rdzv-endpoint on several nodes"),
        ("torchrun train.py", {"launcher": "torchrun"}, "launcher torchrun would start it once per rank"),
        ("python train.py", {"launcher": "torchrun", "ranks": "node"}, "the command makes the ranks"),
    ],
)
def test_what_contradicts_the_request_is_refused(command: str, more: dict[str, object], what: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan_rank_maker(spec(command, **more))
    assert what in caught.value.message
    assert "4" not in caught.value.hint or "4" in command, "a number that nobody said"
