"""What is settled when a runtime opens, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcddp.parallelism import Split
from hpcddp.runs.folder import AttemptFolder
from hpcddp.training.checkpoint.settings import RunSettings
from hpcddp.training.options import RuntimeOptions
from hpcddp.training.parallel.layout import Layout
from hpcddp.training.rendezvous.group import Group

#: For the second line of an error, in a script that no job script has started.
ANEW = "begin a new run: another run_dir"


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The options of the caller, and what follows from them and from the launch."""

    options: RuntimeOptions
    group: Group
    layout: Layout
    split: Split  # of the models over the data ranks
    global_batch: int | None  # of the caller, or of the job plan; None: the training loader says it
    folder: AttemptFolder | None  # None: nothing is written
    anew: str  # how to begin a new run, for the second line of an error
    over: str = ""  # why the run ended, of one that is finished already: no step is left
    asked: dict[str, int] | None = None  # of a finished run: how many epochs or steps; None: it does not say
    settings: RunSettings = field(kw_only=True)
