"""The MPI libraries from PyPI that `make mpi` installs, and how each starts ranks on several hosts from login."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
REPO = HERE.parents[1]
RSH = str(HERE / "rsh")
_FORWARD = ("-x", "LD_LIBRARY_PATH", "-x", "MPI4PY_LIBMPI")  # Open MPI passes on nothing by itself


class Mpi(NamedTuple):
    launcher: str  # as hpcddp names it
    prefix: Path
    kind: str  # whose options: openmpi4, openmpi5, mpich or impi

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": f"{self.prefix}/bin:{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
            "LD_LIBRARY_PATH": f"{self.prefix}/lib",
            # else mpi4py would take the library of the environment it is installed in
            "MPI4PY_LIBMPI": str(next(self.prefix.glob("lib/libmpi.so.[0-9][0-9]"))),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def mpirun(self, ranks: int) -> list[str]:
        """One or more ranks on the host or allocation it is started in."""
        options = {
            "openmpi4": ["--oversubscribe", "--bind-to", "none", *_FORWARD],
            # not --oversubscribe: it deals local ranks in another order than MPI's own
            "openmpi5": ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", *_FORWARD],
        }.get(self.kind, [])
        return [f"{self.prefix}/bin/mpirun", *options, "-np", str(ranks)]

    def over_hosts(self, slots: dict[str, int], ranks: int, folder: Path, *, cyclic: bool = False) -> list[str]:
        """mpirun, typed on login, of `ranks` ranks over hosts with so many slots each."""
        mpirun = f"{self.prefix}/bin/mpirun"
        if self.launcher == "openmpi":
            policy = "node" if cyclic else "slot"
            over = ":OVERSUBSCRIBE" if ranks > sum(slots.values()) else ""
            hosts = ",".join(f"{host}:{count}" for host, count in slots.items())
            return [
                *(mpirun, "--mca", "plm_rsh_agent", RSH, "--host", hosts, "--map-by", policy + over),
                *("--bind-to", "none", *_FORWARD, "-np", str(ranks)),
            ]
        file = folder / "machines"
        file.write_text("".join(f"{host}:{1 if cyclic else count}\n" for host, count in slots.items()))
        return [mpirun, "-launcher-exec", RSH, "-machinefile", str(file), "-np", str(ranks)]


_ROWS = {
    "openmpi5": ("openmpi", None),
    "openmpi4": ("openmpi", "openmpi-4.*"),
    "mpich": ("mpich", "mpich-*"),
    "impi": ("intelmpi", "impi-rt-*"),
}
NAMES = list(_ROWS)


def find_mpi(name: str) -> Mpi:
    launcher, folder = _ROWS[name]
    found = sorted((REPO / ".mpi").glob(folder)) if folder else [Path(sys.prefix)]
    assert found, f"{name} is not installed: make mpi"
    return Mpi(launcher, found[-1], name)
