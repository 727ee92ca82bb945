"""What is private to torch about tensors that ranks have in parts (DTensors).

As in `torch_compat.py` each has a test, run with the supported versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def kept_assignments() -> Iterator[None]:
    """Meanwhile `p.data = numbers` changes the numbers of a parameter in parts. Torch would lose them without an error:
    the part lies in another tensor that the parameter only refers to."""
    from torch.distributed.tensor import DTensor

    kind: Any = DTensor
    if "data" in vars(kind):  # of a runtime around this one
        yield
        return
    data: Any = vars(torch._C.TensorBase)["data"]

    def assign(tensor: Tensor, numbers: Tensor) -> None:
        if not isinstance(numbers, DTensor) or (numbers.shape, numbers.dtype) != (tensor.shape, tensor.dtype):
            data.__set__(tensor, numbers)
            return
        data.__get__(tensor).copy_(numbers.detach())

    kind.data = property(data.__get__, assign)
    try:
        yield
    finally:
        del kind.data
