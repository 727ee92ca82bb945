"""Global batches that the loop leaves before their last micro batch: their backward passes train nothing."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.training.remarks import print_warning

_HINT = "if rt.is_last_micro_batch and …: break; or one global batch at a time: for step in loader.steps(): …"


class DroppedBatches:
    """Counts them. The first is a warning: a loop may end so. Two without a step between them are a mistake."""

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first
        self._dropped_after = -1  # steps of this attempt

    def note(self, steps: int) -> None:
        """One with backward passes is dropped, after so many steps of this attempt. RequestError for the second in a
        row."""
        if self._dropped_after == steps:
            raise RequestError(
                "the loop left two global batches in a row before their last micro batch: what rt.backward(loss)"
                " brought is dropped, and no optimizer steps",
                _HINT,
            )
        if self._dropped_after < 0:
            print_warning(
                "the loop left a global batch before its last micro batch: what rt.backward(loss) brought is dropped"
                f"\nhint: {_HINT}",
                is_first=self._is_first,
            )
        self._dropped_after = steps

    def check_trained(self, steps: int) -> None:
        """At the end of an attempt of so many steps. RequestError if all that it did was dropped."""
        if steps == 0 and self._dropped_after == 0:
            raise RequestError(
                "nothing was trained: the loop left its only global batch before the last micro batch", _HINT
            )
