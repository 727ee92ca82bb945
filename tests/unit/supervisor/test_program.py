"""What the supervisor makes of signals."""

from __future__ import annotations

import pytest

from hpcddp.supervisor.program import ended_by


@pytest.mark.parametrize(
    ("name", "ago_s", "grace_s", "is_so"),
    [
        ("", 0, 0, False),
        ("SIGUSR1", 5, 0, True),  # the ranks save
        ("SIGUSR1", 3600, 0, False),  # they went on
        ("SIGHUP", 3600, 0, False),
        ("SIGUSR2", 3600, 7200, True),
        ("SIGTERM", 3600, 0, True),  # somebody wants the job's end
        ("SIGINT", 3600, 0, True),
    ],
)
def test_a_signal_after_which_the_ranks_went_on_is_not_why_they_were_lost(
    name: str, ago_s: float, grace_s: float, is_so: bool
):
    assert ended_by(name, ago_s, grace_s) == is_so
