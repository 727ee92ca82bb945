"""The losses of a run over all its attempts, read while it trains: a step that was made again counts as made last."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from hpcddp.errors import RequestError
from hpcddp.runs.folder import AttemptFolder
from hpcddp.runs.jsonfile import SchemaError, UnreadableFileError
from hpcddp.runs.metrics_reader import AtLine, MetricsReader, StepLine


class LossCurve:
    """Sixteen bytes a step, however long the run is. Each file is read once."""

    def __init__(self) -> None:
        self.steps = array("q")  # ascending
        self.losses = array("d")  # NaN where the loss was none, or infinite
        #: attempt -> the first and the last step that it has made
        self.made: dict[str, tuple[int, int]] = {}
        self._readers: dict[str, MetricsReader] = {}

    def read(self, attempts: Sequence[AttemptFolder]) -> None:
        """What is new in the metrics of these attempts, in the order in which they began.

        SchemaError if another hpcddp wrote one, UnreadableFileError. A damaged line is passed over.
        """
        newest = max((at for at, attempt in enumerate(attempts) if attempt.name in self.made), default=0)
        for attempt in attempts[newest:]:  # one that another has followed writes no more
            reader = self._readers.setdefault(attempt.name, MetricsReader(attempt.metrics))
            while not self._read_whole(reader, attempt.name):
                pass

    def _read_whole(self, reader: MetricsReader, attempt: str) -> bool:
        """Whether all was read: a damaged line ends the reading, and the next one begins behind it."""
        try:
            for line in reader.read():
                if isinstance(line, StepLine):
                    self._add(line)
                if isinstance(line, StepLine | AtLine):
                    first, _ = self.made.get(attempt, (line.step, line.step))
                    self.made[attempt] = (min(first, line.step), line.step)
        except (SchemaError, UnreadableFileError):
            raise
        except RequestError:
            return False
        return True

    def _add(self, line: StepLine) -> None:
        at = bisect_left(self.steps, line.step) if self.steps and self.steps[-1] >= line.step else len(self.steps)
        del self.steps[at:], self.losses[at:]
        self.steps.append(line.step)
        self.losses.append(math.nan if line.loss is None else line.loss)

    def sample(self, count: int) -> list[float | None]:
        """The curve as so many values at even distances of steps: the mean loss of the steps around each, or what lies
        between two steps where there are fewer. None: no finite loss."""
        if not self.steps or count < 1:
            return []
        if len(self.steps) == 1:
            return [_finite(self.losses[0])]
        first, span = self.steps[0], self.steps[-1] - self.steps[0]
        if len(self.steps) < 2 * count:
            return [self._value_at(first + span * at / max(count - 1, 1)) for at in range(count)]
        cuts = [bisect_left(self.steps, first + math.ceil(span * at / count)) for at in range(count)]
        return [_mean(self.losses[a:b]) for a, b in zip(cuts, [*cuts[1:], len(self.losses)], strict=True)]

    def _value_at(self, step: float) -> float | None:
        right = min(bisect_left(self.steps, step), len(self.steps) - 1)
        left = max(right - 1, 0) if self.steps[right] > step else right
        a, b = _finite(self.losses[left]), _finite(self.losses[right])
        if a is None or b is None:
            return a if abs(step - self.steps[left]) < 0.5 else b if abs(step - self.steps[right]) < 0.5 else None
        width = self.steps[right] - self.steps[left]
        return a if not width else a + (b - a) * (step - self.steps[left]) / width


def _mean(losses: array[float]) -> float | None:
    total = sum(losses)  # in C: a curve of a million steps is drawn every few seconds
    if not losses or math.isfinite(total):
        return total / len(losses) if losses else None
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
