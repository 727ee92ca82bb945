"""Which splits there are on so many nodes, which of them fit, and which one to choose.

The simplest one that fits is chosen. Simple is what exchanges least and changes least in a script: ddp, then zero1,
which only deals out the optimizer's states, then FSDP2 inside of each node (hsdp; fsdp on one node), over all ranks
(fsdp). Last is tensor parallelism, which needs a plan for each layer and stays inside a node.
"""

from __future__ import annotations

from hpcddp.advise.memory import Memory, Model, ParallelDims, Work, checkpoint_bytes, peak, resting_bytes
from hpcddp.batchplan import plan_batch
from hpcddp.errors import RequestError
from hpcddp.record import Record

#: What has to be left: the estimates are within 15 % of what was measured, and a GPU holds more than tensors.
MARGIN = 1.15
_MOST_SAMPLES = 1 << 20


class Target(Record):
    """The request. `memory`: bytes of one GPU. `micro_batch`: the largest forward pass, in samples."""

    memory: float
    ranks_per_node: int
    micro_batch: int
    global_batch: int | None = None


class Estimate(Record):
    """One split on so many nodes. `parallel`: the job file's key. `checkpoint`: bytes that one takes besides. `fits`:
    with the margin. `largest_micro_batch`: 0 where not even one sample fits, None where activations are not known."""

    nodes: int
    parallel: str | dict[str, int]
    data_size: int
    micro_batch: int
    memory: Memory
    checkpoint: float
    fits: bool
    largest_micro_batch: int | None


def format_parallel(value: str | dict[str, int]) -> str:
    """Format the split as a job file has it."""
    return value if isinstance(value, str) else "{" + ", ".join(f"{k}: {n}" for k, n in value.items()) + "}"


def list_splits(model: Model, nodes: int, ranks_per_node: int) -> list[tuple[str | dict[str, int], ParallelDims]]:
    """The splits in the order of choice. Tensor parallelism is for models with blocks of matrices."""
    ranks = nodes * ranks_per_node
    found: list[tuple[str | dict[str, int], ParallelDims]] = [("ddp", ParallelDims(ranks))]
    if ranks == 1:
        return found
    found.append(("zero1", ParallelDims(ranks, zero=True)))
    if nodes > 1 and ranks_per_node > 1:
        found.append(("hsdp", ParallelDims(ranks, shard=ranks_per_node)))
    found.append(("fsdp", ParallelDims(ranks, shard=ranks)))
    if not any(one.divides for block in model.blocks for one in block):
        return found
    sizes = [n for n in (2, 4, 8, 16) if ranks_per_node % n == 0 and not (model.heads and model.heads % n)]
    if nodes == 1 and ranks_per_node in sizes:
        found.append(({"tensor": ranks}, ParallelDims(ranks, tensor=ranks)))
    pairs = [
        ({"shard": ranks // n, "tensor": n}, ParallelDims(ranks, shard=ranks // n, tensor=n))
        for n in sizes
        if n < ranks
    ]
    return [*found, *pairs]


def estimate_splits(model: Model, nodes: int, target: Target, work: Work) -> list[Estimate]:
    """Every split on so many nodes in which each data rank has a sample of the global batch, with its memory."""
    rows = []
    for parallel, split in list_splits(model, nodes, target.ranks_per_node):
        if target.global_batch is not None and target.global_batch < split.data_size:
            continue
        micro_batch, accumulates = _micro_batch(target, split)
        of_split = work._replace(micro_batch=micro_batch, accumulates=accumulates)
        memory, checkpoint = peak(model, split, of_split), checkpoint_bytes(model, split, of_split)
        most = max(memory.total, resting_bytes(model, split, of_split) + checkpoint)
        largest = _largest_micro_batch(model, split, of_split, target.memory) if model.whole else None
        fits = most * MARGIN <= target.memory
        rows.append(Estimate(nodes, parallel, split.data_size, micro_batch, memory, checkpoint, fits, largest))
    return rows


def choose_split(rows: list[Estimate]) -> Estimate | None:
    """The first that fits with the margin."""
    return next((row for row in rows if row.fits), None)


def _micro_batch(target: Target, split: ParallelDims) -> tuple[int, bool]:
    if target.global_batch is None:
        return target.micro_batch, False
    try:
        plan = plan_batch(target.global_batch, split.data_size, target.micro_batch)
    except RequestError:  # shares that differ: render says which batch to take
        return target.micro_batch, True
    return plan.largest_micro_batch, plan.accumulation_steps > 1


def _largest_micro_batch(model: Model, split: ParallelDims, work: Work, has: float) -> int:
    """The most samples in one forward pass that fit with the margin."""

    def fits(samples: int) -> bool:
        return peak(model, split, work._replace(micro_batch=samples)).total * MARGIN <= has

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _MOST_SAMPLES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
