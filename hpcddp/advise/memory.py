"""Bytes per rank under each way to split a model, at the fullest moment of a training step.

A step after the first is meant: the optimizer's states are there. Tensors are counted, as torch's allocator gives them
out. What a GPU holds besides (the CUDA context, NCCL's and cuBLAS's buffers, gaps between tensors) is not; the margin
of `choice` is for that.
"""

from __future__ import annotations

from heapq import heapreplace

from hpcddp.record import Record

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterable


class Parameter(Record):
    """One tensor of weights. `rows`: its first dimension, along which FSDP2 shards it. `trained`: it has a gradient.

    `divides`: tensor parallelism divides it, as Megatron's plan does with the matrices of a block.
    """

    elements: int
    rows: int
    trained: bool = True
    divides: bool = False


class Stages(Record):
    """Bytes of tensors beside weights, their gradients and the optimizer's states, at the fullest moment of each stage.

    `forward`: until the last block has been passed. `loss`: behind it, and back to it. `backward`: in the backward pass
    of the blocks. `last`: in that of the first block. `piled`: the fullest moment of all where the gradients that
    are there by then are counted as well, for a model without blocks. `casts`: autocast's copies of weights, in all of
    them.
    """

    forward: float
    loss: float
    backward: float
    last: float
    piled: float
    casts: float = 0.0

    def plus(self, other: Stages, times: float = 1.0) -> Stages:
        """Each number, and `times` that of `other`."""
        return Stages(*(left + times * right for left, right in zip(self, other, strict=True)))


class Activations(Record):
    """The stages as a line over the micro batch. `divided`: what tensor parallelism divides of `per_sample`."""

    fixed: Stages
    per_sample: Stages
    divided: Stages = Stages(0, 0, 0, 0, 0)

    def at(self, micro_batch: int) -> Stages:
        """The stages with so many samples in one forward pass."""
        return self.fixed.plus(self.per_sample, micro_batch)


class Model(Record):
    """A model: its blocks, which FSDP gathers one by one, and the parameters before and behind them.

    A model without blocks has all parameters in `before`. `whole`: activations where each rank computes with the
    weights as they are (ddp), None where they are not known; `gathered`: where FSDP gathers them in the precision of
    the computation. `block`: the class of the blocks. `heads`: of attention; 0: not known.
    """

    name: str
    blocks: tuple[tuple[Parameter, ...], ...]
    before: tuple[Parameter, ...]
    behind: tuple[Parameter, ...] = ()
    buffer_bytes: int = 0
    whole: Activations | None = None
    gathered: Activations | None = None
    block: str = ""
    heads: int = 0

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.before, *(one for block in self.blocks for one in block), *self.behind)

    @property
    def elements(self) -> int:
        return count_elements(self.parameters)


class Precision(Record):
    """Bytes of one weight, of its gradient and of each state of it; of a weight that FSDP has gathered, and of that
    one's gradient."""

    name: str
    weight: int
    gathered: int


PRECISIONS = {
    "fp32": Precision("fp32", 4, 4),
    "fp64": Precision("fp64", 8, 8),
    "bf16-mixed": Precision("bf16-mixed", 4, 2),
    "bf16": Precision("bf16", 2, 2),
}
#: Numbers per weight that torch's optimizers keep between two steps.
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1}


def count_elements(parameters: Iterable[Parameter]) -> int:
    return sum(one.elements for one in parameters)


def count_trained(parameters: Iterable[Parameter]) -> int:
    """Elements that have a gradient."""
    return sum(one.elements for one in parameters if one.trained)


_STEP = "optimizer step"


class ParallelDims(Record):
    """One way to split a model over `ranks`. `shard`: ranks over which FSDP shards it (1: not at all). `tensor`: ranks
    of tensor parallelism. `zero`: ZeRO-1, which shards the optimizer's states."""

    ranks: int
    shard: int = 1
    tensor: int = 1
    zero: bool = False

    @property
    def data_size(self) -> int:
        """Ranks that get different samples."""
        return self.ranks // self.tensor


class Work(Record):
    """How it is trained. `accumulates`: several micro batches per step. `loops`: the optimizer takes one weight after
    the other, as torch does on CPUs, and not all at once, as on GPUs."""

    precision: Precision
    optimizer: str
    micro_batch: int
    accumulates: bool = False
    loops: bool = False


class Memory(Record):
    """Bytes per rank at one moment. `buffers`: what collectives hold, gathered weights and whole gradients; in the
    optimizer's step its copies."""

    moment: str
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def parts(self) -> dict[str, float]:
        """The five parts by name."""
        return {name: value for name, value in self._asdict().items() if name != "moment"}


def peak(model: Model, split: ParallelDims, work: Work) -> Memory:
    """The fullest moment of a step."""
    return max(_moments(model, split, work), key=lambda one: one.total)


def _moments(model: Model, split: ParallelDims, work: Work) -> list[Memory]:
    model = _divide(model, split.tensor)
    return _sharded(model, split, work) if split.shard > 1 else _whole(model, split, work)


def resting_bytes(model: Model, split: ParallelDims, work: Work) -> float:
    """Bytes of a rank between two steps."""
    rests = next(one for one in _moments(model, split, work) if one.moment == _STEP)
    return rests.weights + rests.gradients + rests.optimizer


def checkpoint_bytes(model: Model, split: ParallelDims, work: Work) -> float:
    """Bytes that a checkpoint and `rt.save_model` take on a rank's device, outside of a step. A model that each rank
    has whole is written by rank 0, tensor by tensor, in place.

    Of a sharded one each rank writes its shards; `rt.save_model` gathers one tensor after the other on every rank
    (torch's `full_tensor`: the gathered shards and the tensor).
    Of ZeRO-1 rank 0 gets the states of one rank after the other (torch's `consolidate_state_dict`), with a copy.
    """
    weight, states = work.precision.weight, OPTIMIZER_STATES[work.optimizer]
    if split.shard > 1 or split.tensor > 1:
        return 2.0 * weight * max((one.elements for one in model.parameters), default=0)
    if split.zero and split.ranks > 1:
        return 2.0 * weight * states * zero_share(model.parameters, split.ranks)
    return 0.0


def shard_elements(parameters: Iterable[Parameter], shards: int) -> int:
    """Elements of rank 0's shards: FSDP2 deals each parameter's rows, and pads to equal shards."""
    return sum(-(-one.rows // shards) * (one.elements // max(one.rows, 1)) for one in parameters)


def zero_share(parameters: Iterable[Parameter], ranks: int) -> int:
    """Elements of the rank that has most: torch's ZeroRedundancyOptimizer gives each parameter, the largest first, to
    the rank that has least."""
    dealt = [0] * ranks  # a heap
    for one in sorted((p.elements for p in parameters if p.trained), reverse=True):
        heapreplace(dealt, dealt[0] + one)
    return max(dealt)


def _divide(model: Model, tensor: int) -> Model:
    """The part of the model that each rank of tensor parallelism has."""
    if tensor == 1:
        return model

    def part(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        return tuple(
            one._replace(elements=-(-one.elements // tensor), rows=-(-one.rows // tensor)) if one.divides else one
            for one in parameters
        )

    def activations(known: Activations | None) -> Activations | None:
        if known is None:
            return None
        return known._replace(per_sample=known.per_sample.plus(known.divided, 1 / tensor - 1))

    return model._replace(
        blocks=tuple(part(block) for block in model.blocks),
        before=part(model.before),
        behind=part(model.behind),
        whole=activations(model.whole),
        gathered=activations(model.gathered),
    )


def _stages(known: Activations | None, micro_batch: int) -> Stages:
    return known.at(micro_batch) if known else Stages(0, 0, 0, 0, 0)


def _step_extra(elements: int, largest: int, work: Work) -> float:
    """Memory of the optimizer's step: two copies of one weight, or one of each (torch's `foreach`)."""
    if OPTIMIZER_STATES[work.optimizer] == 0:
        return 0.0
    return float(work.precision.weight * (2 * largest if work.loops else elements))


def _whole(model: Model, split: ParallelDims, work: Work) -> list[Memory]:
    """Each rank has the whole model. With several ranks DDP has buckets for all gradients at all times."""
    weight, states = work.precision.weight, OPTIMIZER_STATES[work.optimizer]
    trained = count_trained(model.parameters)
    with_state = zero_share(model.parameters, split.ranks) if split.zero else trained
    largest = max((one.elements for one in model.parameters if one.trained), default=0)
    stages = _stages(model.whole if split.tensor == 1 else model.gathered, work.micro_batch)
    weights = float(weight * model.elements + model.buffer_bytes)
    gradients, optimizer = float(weight * trained), float(weight * with_state * states)

    def at(moment: str, done: float, held: float) -> Memory:
        casts = min(stages.casts, held)
        return Memory(moment, weights + casts, gradients if always else done, optimizer, held - casts, 0)

    always = split.data_size > 1 or work.accumulates
    extra = _step_extra(with_state, largest, work)
    step = Memory(_STEP, weights, gradients, optimizer, 0, extra)
    if not always and not model.blocks:
        return [step, at("backward pass", 0, stages.piled)]
    return [
        step,
        at("forward pass", 0, stages.forward),
        at("loss", 0, stages.loss),
        at("backward pass", float(weight * count_trained(model.behind)), stages.backward),
        at("backward pass", gradients, stages.last),
    ]


def _sharded(model: Model, split: ParallelDims, work: Work) -> list[Memory]:
    """FSDP2. The weights before and behind the blocks stay gathered from the forward pass to the end of the backward
    pass, and so do their gradients until then. Of the blocks two are gathered at a time, the second one ahead of its
    use; in the backward pass two more have whole gradients: that of the block at work, and that of the block before,
    which is being summed over the ranks. At the end the gradients of the rest are there twice for the same reason.
    """
    weight, gathered, states = work.precision.weight, work.precision.gathered, OPTIMIZER_STATES[work.optimizer]
    stages = _stages(model.gathered, work.micro_batch)
    rest, head = (*model.before, *model.behind), count_trained(model.behind)
    block = max((count_elements(one) for one in model.blocks), default=0)
    trained_block = max((count_trained(one) for one in model.blocks), default=0)
    elements = shard_elements(model.parameters, split.shard)
    trained = [one for one in model.parameters if one.trained]
    gradients = float(weight * shard_elements(trained, split.shard))
    of_blocks = weight * sum(shard_elements([p for p in one if p.trained], split.shard) for one in model.blocks)
    optimizer = float(weight * states * shard_elements(trained, split.shard))
    weights = float(weight * elements + model.buffer_bytes)
    largest = max((shard_elements([one], split.shard) for one in trained), default=0)
    outside = float(gathered * count_elements(rest))
    two = 2.0 * gathered * block
    whole_gradients = 2.0 * gathered * trained_block + gathered * head

    def at(moment: str, done: float, activations: float, buffers: float) -> Memory:
        return Memory(moment, weights, gradients if work.accumulates else done, optimizer, activations, buffers)

    extra = _step_extra(shard_elements(trained, split.shard), largest, work)
    moments = [
        at("end of the backward pass", of_blocks, 0, outside + 2.0 * gathered * count_trained(rest)),
        Memory(_STEP, weights, gradients, optimizer, 0, extra),
    ]
    if not model.blocks:
        return [*moments, at("backward pass", 0, stages.piled, outside)]
    return [
        *moments,
        at("forward pass", 0, stages.forward, outside + two),
        at("loss", 0, stages.loss, outside),
        at("backward pass", of_blocks / len(model.blocks), stages.backward, outside + two + whole_gradients),
        at("backward pass", of_blocks, stages.last, outside + two + whole_gradients),
    ]
