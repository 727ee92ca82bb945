"""The MPI libraries from PyPI, each with its real mpirun. All but .venv's Open MPI 5 come from `make mpi`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


class Flavour(NamedTuple):
    launcher: str  # as hpcddp names it
    library: str  # how the MPI library begins to describe itself
    prefix: Path
    options: tuple[str, ...]

    def mpirun(self, ranks: int) -> list[str]:
        return [f"{self.prefix}/bin/mpirun", *self.options, "-np", str(ranks)]

    @property
    def env(self) -> dict[str, str]:
        """What its user would set: PATH for Intel's mpirun; mpi4py would otherwise take .venv's library."""
        return {
            "PATH": f"{self.prefix}/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{self.prefix}/lib",
            "MPI4PY_LIBMPI": str(min(self.prefix.glob("lib/libmpi.so.*"))),
            **({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}),
        }


# Open MPI 5 with --oversubscribe deals local ranks in another order than MPI's own; mapped by slot they agree.
_ROWS = {
    "openmpi5": ("openmpi", "Open MPI v5.", None, ("--map-by", "slot:OVERSUBSCRIBE")),
    "openmpi4": ("openmpi", "Open MPI v4.", "openmpi-4.*", ("--oversubscribe",)),
    "mpich": ("mpich", "MPICH Version:", "mpich-*", ()),
    "impi": ("intelmpi", "Intel(R) MPI Library", "impi-rt-*", ()),
}


@pytest.fixture(scope="session", params=_ROWS)
def flavour(request: pytest.FixtureRequest, repo: Path) -> Flavour:
    return find_flavour(request.param, repo)


@pytest.fixture(scope="session")
def mpich(repo: Path) -> Flavour:
    return find_flavour("mpich", repo)


@pytest.fixture(scope="session")
def openmpi5(repo: Path) -> Flavour:
    return find_flavour("openmpi5", repo)


def find_flavour(name: str, repo: Path) -> Flavour:
    launcher, library, folder, options = _ROWS[name]
    found = sorted((repo / ".mpi").glob(folder)) if folder else [Path(sys.prefix)]
    assert found, f"{name} is not installed: make mpi"
    return Flavour(launcher, library, found[-1], options)


@pytest.fixture(scope="session")
def programs() -> Path:
    return Path(__file__).parent / "programs"
