"""What a short run of `hpcddp verify` changes in a training, and what it hears of it. Any other run has no trial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

    from hpcddp.training.data.sampler import MicroBatch
    from hpcddp.training.options import RuntimeOptions


class TrialHooks(Protocol):
    """Asked and told by the training; `hpcddp/verify/ranks.py` has the one that writes down what it hears."""

    def options(self, options: RuntimeOptions) -> RuntimeOptions:
        """The options of `hpcddp.runtime`, as the trial wants them."""

    def opened(self, rt: Any) -> None:
        """The runtime is open, and its body begins."""

    def closed(self) -> None:
        """The body is over, and the ranks have left the process group."""

    def shorten(self, dataset: Dataset[Any], batch: int, *, drop_last: bool = False) -> Dataset[Any]:
        """A data set with a few batches of this one's samples."""

    def key(self, key: tuple[int | str, ...], micro: MicroBatch) -> tuple[int | str, ...]:
        """What the random numbers of a micro batch depend on, besides the seed and the step."""

    def part_starts(self, micro: MicroBatch) -> None:
        """The loop gets this micro batch now; its random numbers are seeded."""

    def backward(self, loss: Tensor, share: float) -> None:
        """`rt.backward(loss)`: the loss, and its part in the loss of the global batch."""

    def step_ends(self) -> None:
        """The loop is done with a batch."""


current: TrialHooks | None = None
