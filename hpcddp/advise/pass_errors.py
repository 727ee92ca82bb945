"""What to type when a model's forward pass fails on the sample that `hpcddp advise` made for it."""

from __future__ import annotations

import re

from hpcddp.user_code import find_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# In torch's own words: a tensor of the wrong type of numbers, of the wrong shape; arguments that forward() also takes.
_OTHER_NUMBERS = re.compile(
    r"scalar types?\b|\bdtype|(long|int|float|c10::\w+)\)? and \w+ type|should be the same$|\b(Long|Int)Tensor", re.I
)
_OTHER_SHAPE = re.compile(
    r"\bshapes?\b|\bsizes?\b|dimension|\bdim\b|channel|broadcast|out of range|too many indices|unpack", re.I
)
_OTHER_ARGUMENTS = re.compile(r"forward\(\) (missing|takes) \d|required positional argument")


def hint_of_pass(error: BaseException, shape: Sequence[int], *, tokens: bool) -> str:
    """What the model was given, then what to change: the option, or the line of the model.

    `shape` is the batch's, with the samples in front.
    """
    numbers, other = "token numbers", "--input 3,224,224 for a model of other numbers"
    option, fits = f"--sequence {shape[1]}", "--sequence with as many tokens as it takes"
    if not tokens:
        numbers, other = "numbers", "--sequence 1024 for a model of token numbers"
        option, fits = f"--input {','.join(map(str, shape[1:]))}", "--input with the shape of one sample that it takes"
    given = f"its input was {option}, {numbers} of shape {tuple(shape)}"
    text, where = str(error), find_line(error.__traceback__)
    if isinstance(error, TypeError) and _OTHER_ARGUMENTS.search(text):
        return f"{given}, and nothing else: a model around it, whose forward(x) makes the other arguments"
    if isinstance(error, (RuntimeError, TypeError)) and _OTHER_NUMBERS.search(text):
        return f"{given}; {other}"
    if isinstance(error, (RuntimeError, ValueError, IndexError)) and _OTHER_SHAPE.search(text):
        return f"{given}; {fits}" + (f" (the error is at {where})" if where else "")
    return f"{given}; the error is at {where}" if where else f"{given}; {fits}, or {other}"
