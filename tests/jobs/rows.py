"""The rows of docs/strategies.md: each way to train that has a job in jobs/, and what the tests here find of it.

The tests fail where a row says what is not so; docs/make_strategies.py makes the page from the same rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

JOBS = Path(__file__).parents[2] / "jobs"
OWN = "The script saves its last weights only, as the manuals show it."
CHECKS = "It trains nothing."


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
    exact: str = "--double"  # what to add to the command for the comparison
    also: tuple[str, ...] = ()  # job files with the same program that need no run of their own
    prints: str = ""  # pattern of a line of its output, where there are no weights to compare
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
    Row("DDP", "plain/ddp.yaml", (1, 2, 4), IN_DOUBLE),
    Row("the MNIST loop on images from a folder", "plain/mnist.yaml", (1, 2), IN_DOUBLE),
    Row("torchrun, one agent per node", "plain/torchrun.yaml", (1, 2), IN_DOUBLE),
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
    Row("Accelerate", "frameworks/accelerate.yaml", (1, 2), IN_DOUBLE, package="accelerate"),
    Row("HF Trainer", "frameworks/hf-trainer.yaml", (1, 2), IN_DOUBLE, package="transformers"),
    Row("Lightning Trainer", "frameworks/lightning.yaml", (1, 2), IN_DOUBLE, package="lightning"),
    Row(
        "Lightning Fabric",
        "frameworks/fabric.yaml",
        (1, 2),
        IN_DOUBLE,
        renders="1 node; for more change the script's `--nodes`, too",
        package="lightning",
    ),
    *(
        Row(
            f"DeepSpeed ZeRO-{stage}",
            "frameworks/deepspeed.yaml",
            (1, 2),
            "1e-5",
            why="float32, whose rounding grows over 80 steps of Adam.",
            command=f"python deepspeed_zero.py --stage {stage} --batch {{global_batch}}",
            exact="",
            package="deepspeed",
        )
        for stage in (1, 2)
    ),
)

# Ways to train that have no job, and why.
MISSING = (
    ("FSDP2, HSDP, ZeRO-1, tensor parallel and pipeline by `hpcddp.runtime`", "come with `parallel=`"),
    ("FSDP2, tensor parallel and pipeline on one mesh", "needs 8 ranks; comes with `parallel=`"),
    ("DDP with a model on two devices", "needs two GPUs per rank, which a job file cannot ask for yet"),
    ("FSDP1", "torch 2.15 refuses it without an accelerator, and FSDP2 replaces it"),
    ("context parallel", "torch has no attention for it on CPUs"),
    ("`notebook_launcher`", "it starts its ranks as `mp.spawn` does, and is seen in the same way"),
)
