"""hpcddp: a PyTorch training script, run correctly on many nodes of a PBS or Slurm cluster.

`hpcddp.env()` says which rank this process is, `hpcddp.init()` brings up the process group, `hpcddp.runtime()` gives
the helpers for a training loop, `hpcddp.load()` reads the numbers of a run, `hpcddp.Job` submits a job and follows it,
`hpcddp.integrations` lets the loops of other frameworks stop in time and resume. Each is imported when it is first
used, so `import hpcddp` costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers take this name for true, wherever it comes from
if TYPE_CHECKING:
    from hpcddp import integrations
    from hpcddp.api import env, init, load, runtime
    from hpcddp.login.job import Job

_API = ("env", "init", "runtime", "load")
__all__ = ["__version__", "env", "init", "runtime", "load", "Job", "integrations"]


def __getattr__(name: str) -> object:
    if name in _API:
        from hpcddp import api

        return getattr(api, name)
    if name == "Job":
        from hpcddp.login.job import Job

        return Job
    if name == "integrations":  # a package, which Python imports only if it is told to
        from importlib import import_module

        return import_module("hpcddp.integrations")
    raise AttributeError(f"module 'hpcddp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
