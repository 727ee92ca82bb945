"""Which loops a resumed run would find again: those over the loader, in epochs, and those over `rt.epochs`."""

from __future__ import annotations

from hpcddp.errors import RequestError


class EpochLoops:
    """Hears where such loops begin, and refuses those that train otherwise than they read."""

    def __init__(self) -> None:
        self.body: int | None = None  # the epoch whose body in rt.epochs runs
        self._outside: int | None = None  # that of a loop over the loader outside of rt.epochs
        self._most: int | None = None  # epochs that rt.epochs was asked for
        self._is_read = False  # whether a loop over the loader has begun

    @property
    def are_new(self) -> bool:
        """Whether no rt.epochs has begun in this attempt."""
        return self._most is None

    def check_count(self, count: int, over: int) -> None:
        """`rt.epochs(count)` begins after `over` epochs. RequestError if the one before leaves it none."""
        if self._most is not None and count <= min(over, self._most):
            raise RequestError(
                f"rt.epochs({count}) came after rt.epochs({self._most}), and {over} epochs are over: it counts from the"
                " start of the run, so that none is left",
                f"rt.epochs({self._most + count}) for {count} more",
            )
        self._most = max(count, self._most or 0)

    def check_read(self, *, stepped: bool) -> None:
        """An epoch of rt.epochs is over. RequestError if no loop over the loader has begun, and the script has called
        for a step all the same, or no epoch is left."""
        if stepped and not self._is_read:
            raise RequestError(
                "an epoch of rt.epochs() ended, and no loop over the training loader has begun: a loop over another one"
                " gives each rank all of the data, and none of its steps is counted",
                "model, optimizer, loader = rt.prepare(model, optimizer, loader), then for x, y in loader: …",
            )

    def check_loop(self, epoch: int, *, is_open: bool, is_read: bool) -> None:
        """A loop over the loader begins, with what is left of this epoch. `is_open`: rt.epochs has begun one;
        `is_read`: all batches of that came in an attempt before. RequestError if it is a second one."""
        self._is_read = True
        if not is_open:
            if self._outside not in (None, epoch):
                raise RequestError(
                    "a second epoch began outside of rt.epochs(): a resumed run would not know how many are left",
                    "for epoch in rt.epochs(10): for x, y in loader: …",
                )
            self._outside = epoch
        elif self.body is not None and epoch > self.body and not is_read:
            raise RequestError(
                f"a second loop over the loader began in epoch {self.body + 1} of rt.epochs(), after its last batch: a"
                " resumed run would not know of it",
                "for epoch in rt.epochs(2 * 10): for x, y in loader: …, where each loop is an epoch and epoch % 2 says"
                " which one; or loader.steps() for several passes over each global batch",
            )
