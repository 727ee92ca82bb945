"""A transformer from a few numbers, with its activations by formula.

The block is the usual one: attention and a two-layer network of width 4 x hidden, a normalisation before each, no
dropout, and attention that keeps no table of sequence x sequence (FlashAttention, scaled_dot_product_attention).

Per block it keeps for the backward pass, in numbers per token and unit of hidden: what goes into both normalisations
(2) and comes out of them (2), queries, keys and values (3), what attention gives (1), and what the network's first
layer gives, before and behind its activation function (8). That makes 16 numbers: 32 bytes in 16 bit. Korthikanti et
al. 2022 (arXiv 2205.05198, equation 1) have 34, two of them for masks of dropout. Under autocast the sums between
blocks stay in 32 bit: 36 bytes. The loss (cross entropy) holds the logits three times in 32 bit at its fullest moment.
A test compares all this with what real ranks hold (tests/unit/training/test_advised_memory.py).
"""

from __future__ import annotations

from hpcddp.advise.memory import Activations, Model, Parameter, Stages
from hpcddp.errors import RequestError
from hpcddp.record import Record

# Bytes per token and unit of hidden: kept per block; the sum between blocks; what the backward pass of a block adds.
_BYTES = {"fp64": (128, 8, 32), "fp32": (64, 4, 16), "bf16": (32, 2, 8), "bf16-mixed": (36, 4, 8)}
_LOGIT_BYTES = 12
#: Tokens that are told apart, where nobody says how many: between the 32 000 of Llama 2 and the 128 000 of Llama 3.
VOCABULARY = 50000
_DIVIDED = 0.75  # of a block's 16 numbers tensor parallelism divides all but those around the normalisations


class Numbers(Record):
    """Numbers of a transformer on the command line. `vocabulary` None: what is left of the parameters decides."""

    parameters: int
    layers: int
    hidden: int
    sequence: int
    vocabulary: int = VOCABULARY
    heads: int = 0


def make_transformer(numbers: Numbers, precision: str, *, recompute: bool = False) -> Model:
    """The model. `recompute`: activation checkpointing, which keeps only what goes into each block.

    RequestError for counts that no transformer of this form has.
    """
    elements, per_layer = _deal(numbers)
    hidden, layers = numbers.hidden, numbers.layers
    matrices = [(3 * hidden, 3), (hidden, 1), (4 * hidden, 4), (hidden, 4)]  # rows, share of 12 parts
    block = tuple(Parameter(per_layer * part // 12, rows, divides=True) for rows, part in matrices)
    table = Parameter(elements, numbers.vocabulary)
    rest = numbers.parameters - layers * sum(one.elements for one in block) - 2 * table.elements
    other = (Parameter(rest, rest),) if rest > 0 else ()
    behind = (table,) if rest >= 0 else ()  # else one table serves at both ends
    whole = _activations(numbers, precision, recompute)
    if precision == "bf16-mixed":
        casts = 2 * (layers * per_layer + table.elements)
        fixed = Stages(casts, casts, casts, casts, casts, casts)
        whole = Activations(whole.fixed.plus(fixed), whole.per_sample, whole.divided)
    return Model(
        name="transformer",
        blocks=(block,) * layers,
        before=(table, *other),
        behind=behind,
        whole=whole,
        gathered=_activations(numbers, "bf16" if precision == "bf16-mixed" else precision, recompute),
        heads=numbers.heads,
    )


def _deal(numbers: Numbers) -> tuple[int, int]:
    """The parameters of a table of the vocabulary, and of each block."""
    if numbers.heads and numbers.hidden % numbers.heads:
        raise RequestError(f"--heads {numbers.heads} do not divide --hidden {numbers.hidden}", "--heads 8")
    table = numbers.vocabulary * numbers.hidden
    tables = 2 * table if numbers.parameters >= 4 * table else table  # a small model has one for both ends
    per_layer = (numbers.parameters - tables) // numbers.layers
    if per_layer < 12:
        what = f"--vocabulary {numbers.vocabulary} of width {numbers.hidden} has {table:.3g} parameters alone"
        raise RequestError(f"{what}, and --params are {numbers.parameters:.3g}", "--vocabulary 1000, or more --params")
    return table, per_layer


def _activations(numbers: Numbers, precision: str, recompute: bool) -> Activations:
    """Activations of one sample, which is a sequence."""
    block, sums, adds = _BYTES[precision]
    tokens, hidden, layers = numbers.sequence, numbers.hidden, numbers.layers
    unit = tokens * hidden
    per_block = sums if recompute else block
    through = unit * (layers * per_block + sums)
    again = block if recompute else 0
    stages = Stages(
        forward=through + unit * (sums + again),
        loss=through + unit * sums + tokens * numbers.vocabulary * _LOGIT_BYTES,
        backward=through + unit * (adds + again),
        last=unit * (per_block + sums + adds + again),
        piled=0.0,
    )
    of_one = unit * block * _DIVIDED
    of_all = 0.0 if recompute else layers * of_one
    now = of_one if recompute else 0.0
    divided = Stages(of_all + now, of_all, of_all + now + unit * adds, of_one + unit * adds, 0.0)
    return Activations(Stages(0, 0, 0, 0, 0), stages, divided)
