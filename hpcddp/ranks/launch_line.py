"""The words of a launcher's command line: which processes to start on which hosts.

The function of a launcher's row yields groups of words, and the job script prints one group per line. Words that only
the job's shell knows (`"$PBS_NODEFILE"`) are values of their own. The supervisor reads the words that
the shell has made of the line: supervisor/line.py.
"""

from __future__ import annotations

from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias


class FromShell(Record):
    """A word with the values of shell variables in it: `before`, `text` with each `$NAME` replaced, `after` if given.

    `text` stands in double quotes in a script, so it is a constant of this project and never a user's text.
    """

    text: str
    before: str = ""
    after: str | None = None


class IfSet(Record):
    """Words that are there only if the variable is set and not empty. They are constants too."""

    variable: str
    words: tuple[str, ...]


if TYPE_CHECKING:
    Word: TypeAlias = str | FromShell | IfSet
    Words: TypeAlias = tuple[Word, ...]


#: The launcher's path, which the script has looked for.
PROGRAM = FromShell("$launcher")
#: The variables that every job's ranks get for `hpcddp exec`.
EXPORTED_ALWAYS = ("HPCDDP_PYTHON", "HPCDDP_RUN_DIR", "HPCDDP_ATTEMPT", "HPCDDP_DEADLINE", "HPCDDP_LOG_RANKS")


class LaunchRequest(Record):
    """What to start: the same number of processes on each node.

    `hostfile`: the shell variable with the path of the list of the job's hosts; "": the launcher asks the scheduler.
    `ranks_per_node`: what each process makes, if it is an agent. `exported` and `exported_always` are variables that
    every process needs, `exported_if_set` those that may be unset; only launchers that forward nothing by themselves
    print them. `oversubscribe`: there may be more processes than places. `launcher_options` are the site's own;
    `container_options` start each process in a container.
    """

    nodes: int
    processes_per_node: int
    cpus_per_process: int = 1
    ranks_per_node: int = 1
    hostfile: str = ""
    exported: tuple[str, ...] = ()
    exported_always: tuple[str, ...] = EXPORTED_ALWAYS
    exported_if_set: tuple[str, ...] = ()
    bind: str = ""
    oversubscribe: bool = False
    launcher_options: tuple[str, ...] = ()
    container_options: tuple[Words, ...] = ()

    @property
    def processes(self) -> int:
        """Processes in all."""
        return self.nodes * self.processes_per_node


def host_words(job: LaunchRequest, option: str) -> Words:
    """The file that lists the hosts; nothing where the scheduler is asked."""
    return (option, FromShell(f"${job.hostfile}")) if job.hostfile else ()


def each_with(option: str, names: Iterable[str]) -> Iterator[str]:
    """The option before each of the names."""
    for name in names:
        yield option
        yield name
