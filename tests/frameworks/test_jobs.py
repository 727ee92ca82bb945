"""The jobs of jobs/frameworks, rendered and run as a user would, on two ranks as on one."""

from __future__ import annotations

import pytest

from tests.jobs.comparing import compare_ranks
from tests.jobs.conftest import images, user_folder  # noqa: F401  fixtures
from tests.jobs.rows import ROWS


@pytest.mark.parametrize("row", [row for row in ROWS if row.package], ids=lambda row: row.name)
def test_several_ranks_have_the_weights_of_one(row, user_folder):  # noqa: F811  the fixture
    compare_ranks(row, user_folder)
