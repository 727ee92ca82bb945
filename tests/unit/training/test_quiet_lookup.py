"""torch's warning about an address without a name does not reach stderr while a store is connected."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from hpcddp.training.rendezvous.process_group import without_lookup_warning

WARNING = b"[W1 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"


def test_all_but_the_warning_is_printed_afterwards_also_when_the_body_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with suppress(KeyError), without_lookup_warning():
        os.write(2, WARNING + b"[W1] b\n")
        raise KeyError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "[W1] b\nafter\n"
