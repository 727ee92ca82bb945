"""The rows of docs/strategies.md: each way to train that has a job in jobs/, and what the tests here find of it.

The tests fail where a row says what is not so; docs/make_strategies.py makes the page from the same rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

JOBS = Path(__file__).parents[2] / "jobs"
OWN = "The script saves its last weights only, as the manuals show it."
CHECKS = "It trains nothing."
LINE = "It saves its last weights only. With the lines of [its page](frameworks.md) it stops in time and resumes."


class Row(NamedTuple):
    name: str
    job: str  # below jobs/
    ranks: tuple[int, ...]  # it runs on each; the result on the first is the one that others are compared with
    equal_to: str  # "bits", or the largest difference of weights from one process; else why there is none
    resumes: str = OWN  # "yes", or why not
    stops: str = OWN  # "yes", or why not
    why: str = ""  # why the largest difference is more than float64's rounding
    renders: str = "any number of nodes"
    lint: tuple[str, ...] = ()  # what `hpcddp lint` says of the script on purpose
    command: str = ""  # a smaller one than the job's, for the test
    alone: str = ""  # options of `hpcddp render` on one rank, for the test
    together: str = ""  # and on several
    exact: str = "--double"  # what to add to the command for the comparison
    also: tuple[str, ...] = ()  # job files with the same program that need no run of their own
    prints: str = ""  # pattern of a line of its output, where there are no weights to compare
    gpus: int = 0  # of each rank, where its job asks for several
    package: str = ""  # of the environment of `make test-all-frameworks`

    @property
    def trains(self) -> bool:
        return self.equal_to == "bits" or self.equal_to[0].isdigit()


IN_DOUBLE = "1e-12"
ROWS = (
    Row(
        "the article's job on 1 and 4 nodes of ABCI 3.0",
        "abci/one-node.yaml",
        (1, 2),
        "bits",
        "yes",
        "yes",
        renders="1 to 128 nodes of ABCI 3.0",
        command="python train.py --data images --model resnet18 --side 32 --workers 0 --epochs 2",
        exact="--exact",
        also=("abci/four-nodes.yaml",),
    ),
    Row("DDP by `hpcddp.runtime`", "runtime/ddp.yaml", (1, 3), IN_DOUBLE, "yes", "yes"),
    Row("ZeRO-1 by `hpcddp.runtime`", "runtime/zero1.yaml", (1, 3), IN_DOUBLE, "yes", "yes"),
    Row("FSDP2 by `hpcddp.runtime`", "runtime/fsdp.yaml", (1, 3), IN_DOUBLE, "yes", "yes"),
    Row(
        "HSDP by `hpcddp.runtime` (here: 2 copies of 2 shards)",
        "runtime/hsdp.yaml",
        (1, 4),
        IN_DOUBLE,
        "yes",
        "yes",
        together="--parallel data=-1,shard=2",  # on one node `hsdp` is one copy
    ),
    Row(
        "FSDP2 over tensor parallel by `hpcddp.runtime`",
        "runtime/tensor.yaml",
        (1, 4),
        IN_DOUBLE,
        "yes",
        "yes",
        alone="--parallel ddp",
    ),
    Row(
        "DDP with a model on two GPUs of each rank (here both halves are on the CPU, a stand-in)",
        "runtime/split_model.yaml",
        (1, 2),
        IN_DOUBLE,
        "yes",
        "yes",
        renders="any number of nodes with an even number of GPUs",
        gpus=2,
    ),
    Row("DDP", "plain/ddp.yaml", (1, 2, 4), IN_DOUBLE),
    Row("the MNIST loop on images from a folder", "plain/mnist.yaml", (1, 2), IN_DOUBLE),
    Row("torchrun, one agent per node", "plain/torchrun.yaml", (1, 2), IN_DOUBLE),
    Row(
        "torchrun, elastic inside the allocation (here: a rank fails, and all start again)",
        "plain/elastic.yaml",
        (1, 2),
        IN_DOUBLE,
        command="torchrun --max-restarts 3 elastic.py --snapshot {run_dir}/s.pt --batch {per_rank_batch} --fail-in 2",
    ),
    Row("`torch.distributed.launch`", "plain/launch.yaml", (1, 2), IN_DOUBLE),
    Row(
        "`mp.spawn` in a script for one node, unchanged",
        "plain/spawn.yaml",
        (1, 2),
        IN_DOUBLE,
        renders="1 node; refused on more, since its address is localhost",
        lint=("A5", "A9", "A20"),
        command="python spawn.py --ranks {local_world_size}",
    ),
    Row(
        "`nn.DataParallel`",
        "plain/data_parallel.yaml",
        (1,),
        "It is one process. Its split over GPUs cannot run here, where there is no GPU.",
        renders="1 node is enough: it is one process",
        lint=("A6",),
        prints="samples per second",
    ),
    Row("ZeRO-1 by hand", "plain/zero1.yaml", (1, 2), IN_DOUBLE),
    Row("FSDP2 by hand", "plain/fsdp.yaml", (1, 2), IN_DOUBLE),
    Row(
        "HSDP by hand",
        "plain/hsdp.yaml",
        (1, 4),
        IN_DOUBLE,
        command="python fsdp.py --shard 2 --batch {per_rank_batch}",
    ),
    Row(
        "tensor parallel (2 ranks), FSDP2 with it (4 ranks), by hand",
        "plain/tensor-parallel.yaml",
        (1, 2, 4),
        IN_DOUBLE,
    ),
    Row("FSDP1 with size-based wrapping", "plain/fsdp1.yaml", (1, 2), IN_DOUBLE),
    Row("sequence parallel by torch's styles", "plain/sequence-parallel.yaml", (1, 2, 4), IN_DOUBLE),
    Row("context parallel by hand: keys and values gathered", "plain/context-parallel.yaml", (1, 2, 3), IN_DOUBLE),
    Row("pipeline by hand, 1F1B", "plain/pipeline.yaml", (1, 2), IN_DOUBLE, renders="4 ranks at most: 4 layers"),
    Row(
        "pipeline by hand, GPipe",
        "plain/pipeline.yaml",
        (1, 2),
        IN_DOUBLE,
        renders="4 ranks at most: 4 layers",
        command="python pipeline.py --schedule gpipe --batch {global_batch}",
    ),
    Row("DeviceMesh and DTensor by hand", "plain/dtensor.yaml", (1, 2, 4), IN_DOUBLE),
    Row("init by environment, TCP, file", "plain/init.yaml", (2,), CHECKS, CHECKS, CHECKS, prints="2 ranks met"),
    Row(
        "backends nccl, gloo, mpi, ucc (here: gloo; the others are refused with what they need)",
        "plain/backends.yaml",
        (2,),
        CHECKS,
        CHECKS,
        CHECKS,
        prints="gloo: the sum over 2 ranks on cpu is 3\n(.*\n)*mpi: .* built without it",
    ),
    Row(
        "all collectives, among all ranks and per pair",
        "plain/collectives.yaml",
        (3,),
        CHECKS,
        CHECKS,
        CHECKS,
        command="python collectives.py 0.01 1",
        prints="1-2 +barrier +right",
    ),
    Row("Accelerate", "frameworks/accelerate.yaml", (1, 2), IN_DOUBLE, LINE, LINE, package="accelerate"),
    Row(
        "`notebook_launcher`, unchanged",
        "frameworks/notebook.yaml",
        (1, 2),
        IN_DOUBLE,
        renders="1 node; refused on more: it counts the ranks of one node",
        lint=("A20",),
        command="python notebook.py --ranks {local_world_size}",
        package="accelerate",
    ),
    Row("HF Trainer", "frameworks/hf-trainer.yaml", (1, 2), IN_DOUBLE, LINE, LINE, package="transformers"),
    Row("Lightning Trainer", "frameworks/lightning.yaml", (1, 2), IN_DOUBLE, LINE, LINE, package="lightning"),
    Row("Lightning Fabric", "frameworks/fabric.yaml", (1, 2), IN_DOUBLE, LINE, LINE, package="lightning"),
    *(
        Row(
            f"DeepSpeed ZeRO-{stage}",
            "frameworks/deepspeed.yaml",
            (1, 2),
            "1e-5",
            LINE,
            LINE,
            why="float32, whose rounding grows over 80 steps of Adam.",
            command=f"python deepspeed_zero.py --stage {stage} --batch {{global_batch}}",
            exact="",
            package="deepspeed",
        )
        for stage in (1, 2, 3)
    ),
)

# Ways to train that have no job, and why.
MISSING = (
    (
        "a pipeline by `hpcddp.runtime`, or on one mesh with FSDP2 and tensor parallel",
        "a prototype needed private names of torch, and took no uneven micro batches",
    ),
    (
        "torch's own `context_parallel`",
        "torch has no attention for it on CPUs; `jobs/plain/context-parallel.yaml` does the same by hand",
    ),
)
