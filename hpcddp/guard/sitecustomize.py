"""Python imports a module of this name at its start, and old Pythons do. It starts the guard, then what it hides."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_is_started = "hpcddp_guard" in sys.modules  # by another such file: two of hpcddp are on the path
if sys.version_info >= (3, 8) and not _is_started:  # a rank may start another Python, with this path
    import hpcddp_guard  # type: ignore[import-not-found]  # this folder is on the path

    hpcddp_guard.start()
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _here]
_this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # not this file: its folder has left the path
except ImportError as error:
    sys.modules["sitecustomize"] = _this
    if getattr(error, "name", "sitecustomize") != "sitecustomize":
        raise
