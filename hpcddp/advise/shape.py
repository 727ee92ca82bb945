"""What the arithmetic of memory needs to know of a model. Sizes are elements or bytes, as the names say."""

from __future__ import annotations

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
        return Stages(*(mine + times * yours for mine, yours in zip(self, other, strict=True)))


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
    `is_double`: its weights have 64 bit of their own. `remark`: what its numbers leave open.
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
    is_double: bool = False
    remark: str = ""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All of them."""
        return (*self.before, *(one for block in self.blocks for one in block), *self.behind)

    @property
    def elements(self) -> int:
        """Weights in all."""
        return count(self.parameters)


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
STATES = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1}


def count(parameters: Iterable[Parameter]) -> int:
    """Elements."""
    return sum(one.elements for one in parameters)


def count_trained(parameters: Iterable[Parameter]) -> int:
    """Elements that have a gradient."""
    return sum(one.elements for one in parameters if one.trained)
