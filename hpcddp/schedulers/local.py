"""No scheduler: the ranks run on this machine, here and now."""

from __future__ import annotations

from hpcddp.schedulers.row import Scheduler

SCHEDULER = Scheduler(
    name="local",
    title="this machine",
    generic_site="local",
    this_machine=True,
)
