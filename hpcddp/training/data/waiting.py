"""How long a training loop waits for its input, measured for each micro batch; a warning, once, where it is much."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")

_UNCOUNTED = 10  # micro batches at the start of an attempt: workers start, caches fill
_JUDGED_AFTER = 100  # micro batches
_JUDGED_AFTER_S = 10.0
_MUCH = 0.1  # of the time
_MUCH_S = 0.005  # per micro batch: less than this is indexing a tensor, and no loader process would help


class InputWait:
    """Two looks at the clock per micro batch. `write` gets the numbers of each loop over the loader, `say` the share of
    the time, once, if it is more than a tenth. `clock` is in seconds, from anywhere.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        say: Callable[[float], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._write = write
        self._say = say
        self._clock = clock
        self._said = False
        self._seen = -_UNCOUNTED  # micro batches
        self._waited = self._took = 0.0  # over those that count, in seconds
        self._loop: tuple[int, int, float, float] | None = None  # epoch, micro batches, seconds waited and seconds

    def over(self, items: Iterable[Item], epoch: int) -> Iterator[Item]:
        """The same items. What `next` takes is waiting; what the loop does between them is not."""
        self.end_loop()
        clock, ask = self._clock, iter(items).__next__
        waited, count = 0.0, 0
        began = asked = before = clock()
        while True:
            try:
                item = ask()
            except StopIteration:
                return
            now = clock()
            wait = now - asked
            waited += wait
            count += 1
            self._loop = (epoch, count, waited, now - began)
            if not self._said:
                self._judge(wait, now - before)
            before = now
            yield item
            asked = clock()

    def end_loop(self) -> None:
        """Write how long the loop over the loader waited that has ended, at its end or before."""
        if self._loop is not None:
            epoch, count, waited, took = self._loop
            self._loop = None
            share = round(waited / took, 4) if took > 0 else 0.0
            numbers = {"micro_batches": count, "wait_s": round(waited, 4), "loop_s": round(took, 4), "share": share}
            self._write({"epoch": epoch, **numbers})

    def _judge(self, wait_s: float, took_s: float) -> None:
        self._seen += 1
        if self._seen <= 0:
            return
        self._waited += wait_s
        self._took += took_s
        if self._seen >= _JUDGED_AFTER and self._took >= _JUDGED_AFTER_S:
            self._said = self._waited > max(_MUCH * self._took, _MUCH_S * self._seen)
            if self._said:
                self._say(self._waited / self._took)
