"""Where the package's data folders are: inside the package (wheel) or beside it (checkout, editable install, sdist).

Only `os.path`: importlib.resources and pathlib would cost every render more than finding the folder does.
"""

from __future__ import annotations

import os

from hpcddp.errors import SiteError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def find_folder(name: str) -> str:
    """The absolute path of `templates` or `jobs`. Raises SiteError when the installation lacks it."""
    beside = os.path.join(os.path.dirname(_PACKAGE), name)
    for folder in (os.path.join(_PACKAGE, f"_{name}"), beside):
        if os.path.isdir(folder):
            return folder
    raise SiteError(f"the folder {name} of hpcddp is neither in {_PACKAGE} nor beside it", "install hpcddp again")


def source_root() -> str | None:
    """The folder that must be on PYTHONPATH for `import hpcddp`, or None when hpcddp is installed as a package."""
    if os.path.isdir(os.path.join(_PACKAGE, "_templates")):
        return None
    return os.path.dirname(_PACKAGE)
