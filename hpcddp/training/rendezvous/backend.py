"""torch's backends: which this build of torch has, and where to get one with the others."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpcddp.errors import RequestError

# Backend -> what makes torch have it. torch's wheels have gloo, those for
# CUDA also nccl, and none has mpi or ucc.
_BUILDS = {
    "nccl": "install torch's wheel for CUDA (on Linux: pip install torch)",
    "mpi": "build torch from source with USE_MPI=1 and this cluster's mpicc on PATH",
    "ucc": "build torch from source with USE_UCC=1 USE_SYSTEM_UCC=1, UCX and UCC installed",
}
_NO_REAL_ONES = ("undefined", "fake")  # torch's own names for none and for one that sends nothing


def check_backend(backend: str) -> None:
    """RequestError where torch knows no such backend, or this build of it does not have it.

    One that another package has registered (`torch.distributed.Backend.register_backend`) is known. Only one may be
    named: a rank has one device, so that "cpu:gloo,cuda:nccl" is none.
    """
    if backend not in dist.Backend.backend_list or backend in _NO_REAL_ONES:
        here = [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
        known = ", ".join(name for name in here if name not in _NO_REAL_ONES)
        raise RequestError(f"torch {torch.__version__} knows no backend {backend!r}", f"one of {known}")
    if not dist.is_backend_available(backend):
        how = _BUILDS.get(backend, f"install a torch that has {backend}")
        raise RequestError(
            f"backend {backend!r}: torch {torch.__version__} here was built without it",
            f'{how}, or backend="gloo", which every build has',
        )
