"""Sources of the ranks' programs: an interpreter, an environment, or a container's image.

A program that stands in front of a command and runs it in a container is one row. A runtime that is an option of a
launcher (pyxis, CSCS' Container Engine) stands in that launcher's row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from hpcddp.errors import RequestError, SiteError
from hpcddp.ranks.launcher import FromShell
from hpcddp.ranks.launchers import LAUNCHERS, launcher_of_container, launchers_under
from hpcddp.record import Record

if TYPE_CHECKING:
    from hpcddp.ranks.launcher import Words
    from hpcddp.script.site import Queue, Site
    from hpcddp.script.spec import JobSpec


class ContainerRuntime(Record):
    """A container runtime.

    `line`: the command up to what runs in the container, in groups as the script's lines are. `gpu_options`: by the
    GPUs' vendor, what shows them to the container. `path_variables`: what is put before the container's own PATH.
    `image`: the pattern of an image's name, where any other text would be read as something else.
    """

    line: Callable[[Container], Iterator[Words]]
    gpu_options: Mapping[str, str] = {}
    path_variables: tuple[str, ...] = ()
    image: str = r".+"

    def takes(self, image: str) -> bool:
        """The text can be the name of an image."""
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


class Container(Record):
    """`runtime`: a row of CONTAINER_RUNTIMES, or a launcher's; "" for none. `gpu_option` shows it the GPUs."""

    runtime: str = ""
    image: str = ""
    gpu_option: str = ""
    options: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()

    @property
    def launcher(self) -> str:
        """The launcher that starts the container itself; "" where a program in front of the command does so."""
        return launcher_of_container(self.runtime)

    @property
    def launcher_options(self) -> tuple[Words, ...]:
        """The launcher's options for the container, in groups as the script's lines are."""
        if not self.launcher:
            return ()
        mounts = "".join(f",{bind}" if ":" in bind else f",{bind}:{bind}" for bind in self.binds)
        return LAUNCHERS[self.launcher].containers[self.runtime](self.image, mounts)

    @property
    def line(self) -> tuple[Words, ...]:
        """The program in front of the command, in groups as the script's lines are; empty where a launcher does it."""
        row = CONTAINER_RUNTIMES.get(self.runtime)
        return tuple(filter(None, row.line(self))) if row else ()

    @property
    def path_variables(self) -> tuple[str, ...]:
        """Variables that hold what goes before the container's own PATH."""
        row = CONTAINER_RUNTIMES.get(self.runtime)
        return row.path_variables if row else ()


def plan_container(spec: JobSpec, site: Site, queue: Queue, gpus: int) -> Container:
    """The container asked for. Raises SiteError where the site does not say what runs containers."""
    if spec.container is None:
        key = next((key for key in ("container_runtime", "binds") if getattr(spec, key) is not None), None)
        if key:
            raise RequestError(f"{key} without container", "--set container=IMAGE")
        return Container()
    rule = site.container
    runtime = spec.container_runtime or rule.runtime
    if not runtime:
        what = f"site {site.name} does not say what runs containers"
        raise SiteError(what, f"--set container_runtime={USUAL_RUNTIME}, or another")
    by_launcher = launcher_of_container(runtime)
    if by_launcher and by_launcher not in launchers_under(site.scheduler):
        what = f"container_runtime {runtime} works with {by_launcher} only, and site {site.name} has {site.scheduler}"
        raise RequestError(what, f"--set container_runtime={USUAL_RUNTIME}")
    of_site = rule if runtime == rule.runtime else None
    directives = tuple(text.replace("{}", spec.container) for text in of_site.directives) if of_site else ()
    row = CONTAINER_RUNTIMES.get(runtime)
    if row and not row.takes(spec.container):
        raise RequestError(f"container {spec.container!r} is no name of an image", "--set container=NAME:TAG")
    return Container(
        runtime=runtime,
        image=spec.container,
        gpu_option=row.gpu_options.get(queue.vendor, "") if row and gpus else "",
        options=of_site.options if of_site else (),
        binds=spec.binds or (),
        directives=directives,
    )


def plan_python(spec: JobSpec, this_python: str) -> str:
    """The path of the ranks' interpreter; "" where it is found when the job runs (conda, modules)."""
    given = {key: value for key in ("python", "venv", "conda") if (value := getattr(spec, key)) is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        what = f"both {first} {given[first]!r} and {second} {given[second]!r} were given"
        raise RequestError(what, "keep one of them")
    if spec.container and not given:
        what = f"container {spec.container!r}: which Python of the image has hpcddp?"
        raise RequestError(what, "--set python=/usr/bin/python3, or where the image has it")
    if spec.conda or spec.python == "modules":
        return ""
    python = f"{spec.venv.rstrip('/')}/bin/python" if spec.venv else spec.python or this_python
    if "/" not in python:
        raise RequestError(f"python {python!r} is no path of an interpreter", f"--set python={this_python}")
    return python
