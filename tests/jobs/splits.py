"""The ways to split a model over ranks: what each rank holds, and what it sends in each step.

docs/make_splits.py draws what they hold, docs/strategies.md shows what they send, and test_splits.py compares both with
ranks that train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hpcddp.parallelism import Split, plan_split, read_parallel

LAYERS = 4  # of the model in the pictures: square matrices, colwise and rowwise in turn where layers are divided
HELD = ("weights", "gradients", "optimizer")
WORDS = {
    "P": "bytes of the weights (4 for each, in 32 bit)",
    "A": "bytes of the activations between two layers, of the samples that the rank computes in a step",
    "L": "divided pairs of layers",
    "W": "ranks",
    "S": "ranks that share one copy of the model (hsdp: those of a node)",
    "C": "copies of the model",
    "T": "ranks that compute each layer together",
}
# A ring of n ranks: each sends (n - 1) / n of the whole, once to reduce and once to gather.
PASSES = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "broadcast": 1}


class Exchange(NamedTuple):
    """`times` calls on `amount` bytes in all, a product of WORDS over another one, among so many ranks."""

    call: str
    amount: str
    among: str
    times: int = 1

    def bytes_in_call(self, values: Mapping[str, float]) -> float:
        """Of the whole tensor, over all calls of a step."""
        over, _, under = self.amount.partition("/")
        whole = self.times * 1.0
        for word in over.split():
            whole *= values[word]
        return whole / (values[under.strip()] if under else 1)

    def bytes_sent(self, values: Mapping[str, float]) -> float:
        """By one rank in a step."""
        ranks = values[self.among]
        if self.call == "send":
            return self.bytes_in_call(values)
        return PASSES[self.call] * self.bytes_in_call(values) * (ranks - 1) / ranks

    def format(self) -> str:
        """`2 P (W - 1) / W`, as `bytes_sent` computes it."""
        passes = self.times * PASSES.get(self.call, 1)
        ring = "" if self.call == "send" else f" ({self.among} - 1) / {self.among}"
        return (f"{passes} " if passes > 1 else "") + self.amount + ring


class Kind(NamedTuple):
    name: str
    parallel: object  # as hpcddp.runtime(parallel=…) takes it; None: by hand
    hosts: tuple[str, ...]  # of the ranks in the picture
    exchanges: tuple[Exchange, ...]
    says: str

    @property
    def split(self) -> Split:
        return plan_split(read_parallel(self.parallel, "parallel"), self.hosts)

    @property
    def formula(self) -> str:
        """Bytes that a rank sends in a step."""
        return format_sum(self.exchanges)


def format_sum(exchanges: Iterable[Exchange]) -> str:
    """The bytes of all of them, those with the same factor in one term."""
    merged: dict[tuple[str, str], int] = {}
    for one in exchanges:
        key = (one.amount, "" if one.call == "send" else one.among)
        merged[key] = merged.get(key, 0) + one.times * PASSES.get(one.call, 1)
    return " + ".join(
        Exchange("all-gather" if among else "send", amount, among, times).format()
        for (amount, among), times in merged.items()
    )


ONE_NODE, TWO_NODES = ("node 0",) * 4, ("node 0", "node 0", "node 1", "node 1")
SHARDED = (Exchange("all-gather", "P", "S", 2), Exchange("reduce-scatter", "P", "S"))
KINDS = (
    Kind(
        "ddp",
        "ddp",
        TWO_NODES,
        (Exchange("all-reduce", "P", "W"),),
        "Each rank has everything, and its own samples. The gradients are averaged.",
    ),
    Kind(
        "zero1",
        "zero1",
        TWO_NODES,
        (Exchange("all-reduce", "P", "W"), Exchange("broadcast", "P", "W")),
        "Each rank keeps the optimizer's state of some weights, steps those, and sends them to the others.",
    ),
    Kind(
        "fsdp",
        "fsdp",
        TWO_NODES,
        SHARDED,
        "Each rank keeps a shard of everything. A block's weights are gathered for its forward and its backward pass.",
    ),
    Kind(
        "hsdp",
        "hsdp",
        TWO_NODES,
        (*SHARDED, Exchange("all-reduce", "P / S", "C")),
        "A copy for each node, in shards over its ranks. Only shards of gradients go from node to node.",
    ),
    Kind(
        "tensor",
        {"tensor": 4},
        ONE_NODE,
        (Exchange("all-reduce", "L A", "T", 2),),
        "All ranks compute each layer together, on the same samples.",
    ),
    Kind(
        "fsdp+tensor",
        {"shard": -1, "tensor": 2},
        TWO_NODES,
        (
            Exchange("all-gather", "P / T", "S", 2),
            Exchange("reduce-scatter", "P / T", "S"),
            Exchange("all-reduce", "L A", "T", 2),
        ),
        "The ranks of a node compute each layer together. What each of them has is sharded over the nodes.",
    ),
    Kind(
        "pipeline",
        None,
        TWO_NODES,
        (Exchange("send", "A", "W", 2),),
        "Each rank has some layers. Micro batches go through them one after the other.",
    ),
    Kind(
        "two-devices",
        None,
        ("node 0", "node 0"),
        (Exchange("all-reduce", "P", "W"),),
        "Each rank has two GPUs with half of the layers on each. Ranks see their own samples, as with ddp.",
    ),
)


class Part(NamedTuple):
    """What a rank holds of a matrix: its rows and columns from and to, as parts of 1."""

    top: float
    bottom: float
    left: float = 0.0
    right: float = 1.0


WHOLE = Part(0, 1)


def samples(kind: Kind, rank: int) -> tuple[int, int]:
    """The number of the rank's samples, and of how many different ones."""
    if kind.parallel is None:
        return (0, 1) if kind.name == "pipeline" else (rank, len(kind.hosts))
    return rank // kind.split.tensor, kind.split.data_size


def held(kind: Kind, rank: int) -> dict[str, list[Part | None]]:
    """For each of HELD the part of each layer that the rank has between two steps; gradients: before the step."""
    if kind.name == "pipeline":  # as jobs/plain/pipeline.py deals its layers
        mine = [WHOLE if layer * len(kind.hosts) // LAYERS == rank else None for layer in range(LAYERS)]
        return dict.fromkeys(HELD, mine)
    if kind.parallel is None:
        return dict.fromkeys(HELD, [WHOLE] * LAYERS)
    split = kind.split
    if split.kind == "zero1":  # of layers of one size each rank owns the same number
        owned = [WHOLE if layer % split.data_size == rank else None for layer in range(LAYERS)]
        return {"weights": [WHOLE] * LAYERS, "gradients": [WHOLE] * LAYERS, "optimizer": owned}
    mine = [_part(split, rank, layer) for layer in range(LAYERS)]
    return dict.fromkeys(HELD, mine)


def _part(split: Split, rank: int, layer: int) -> Part:
    data_rank, number = divmod(rank, split.tensor)
    row = next(row for row in split.rows if data_rank in row)
    shard, shards = (row.index(data_rank), len(row)) if split.is_sharded else (0, 1)
    if layer % 2 == 0:  # colwise divides the rows of the weight, and FSDP divides them again
        width = 1 / split.tensor
        top = number * width + shard * width / shards
        return Part(top, top + width / shards)
    return Part(shard / shards, (shard + 1) / shards, number / split.tensor, (number + 1) / split.tensor)
