"""What is settled when a runtime opens, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hpcddp.parallelism import Split
from hpcddp.runs.folder import AttemptFolder
from hpcddp.training.options import RuntimeOptions
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.rendezvous.group import Group


class Hints(NamedTuple):
    """What a person types, for the second line of an error: options of a command, or arguments of `hpcddp.runtime`."""

    anew: str = "begin a new run: resume=False"
    seed: str = "hpcddp.runtime(…, seed={})"


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The options of the caller, and what follows from them and from the launch."""

    options: RuntimeOptions
    group: Group
    layout: Layout
    split: Split  # of the models over the data ranks
    global_batch: int | None  # of the caller, or of the job plan; None: the training loader says it
    folder: AttemptFolder | None  # None: nothing is written
    hints: Hints
    over: str = ""  # why the run ended, of one that is finished already: no step is left
    loads: bool = True  # the newest checkpoint, if there is one
    is_strict: bool = False  # it has to be of a training with the same data and settings: see `OpenedRun`
