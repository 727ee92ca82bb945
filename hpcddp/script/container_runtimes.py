"""Programs that stand in front of a command and run it in a container, one row each.

A runtime that is an option of a launcher (pyxis, CSCS' Container Engine) stands in that launcher's row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from hpcddp.ranks.launcher import FromShell
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.record import Record

if TYPE_CHECKING:
    from hpcddp.ranks.launcher import Words
    from hpcddp.script.container import Container


class ContainerRuntime(Record):
    """What differs between them.

    `line`: the command up to what runs in the container, in groups as the script's lines are. `gpu_options`: by the
    GPUs' vendor, what shows them to the container. `path_variables`: what is put before the container's own PATH.
    `image`: the pattern of an image's name, where any other text would be read as something else.
    """

    line: Callable[[Container], Iterator[Words]]
    gpu_options: Mapping[str, str] = {}
    path_variables: tuple[str, ...] = ()
    image: str = r".+"

    def takes(self, image: str) -> bool:
        """Whether this can be the name of an image."""
        return bool(re.fullmatch(self.image, image, re.ASCII | re.DOTALL))


def _apptainer_line(container: Container) -> Iterator[Words]:
    here, run = FromShell("$PWD"), FromShell("$runs")
    gpu_option = (container.gpu_option,) if container.gpu_option else ()
    binds = (word for bind in container.binds for word in ("--bind", bind))
    yield (container.runtime, "exec", *gpu_option, "--pwd", here, "--bind", here, "--bind", run, *binds)
    yield container.options
    yield (container.image,)


def _shifter_line(container: Container) -> Iterator[Words]:
    """The image stands in a directive, and the container sees the node's folders."""
    yield (container.runtime, *container.options)


_APPTAINER = ContainerRuntime(
    line=_apptainer_line,
    gpu_options={"nvidia": "--nv", "amd": "--rocm"},
    path_variables=("APPTAINERENV_PREPEND_PATH", "SINGULARITYENV_PREPEND_PATH"),  # each reads the other's, or its own
)

CONTAINER_RUNTIMES: dict[str, ContainerRuntime] = {
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
    "shifter": ContainerRuntime(line=_shifter_line, image=r"[\w./:-]+"),
}
#: What a hint proposes.
USUAL_RUNTIME = "apptainer"
#: Every word that `container_runtime` can be.
RUNTIMES = (*CONTAINER_RUNTIMES, *(name for row in LAUNCHERS.values() for name in row.containers))
