"""The words of a launcher's command line: which processes to start on which hosts.

The function of a launcher's row yields groups of words. The job script prints one group per line, `launch_arguments`
makes one argument vector of them. Words that only the job's shell knows (`"$PBS_NODEFILE"`) are values of their own:
the script prints them, and `launch_arguments` looks them up in an environment.
"""

from __future__ import annotations

from hpcddp.errors import LaunchError
from hpcddp.record import TYPE_CHECKING, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
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


#: The variables that every job's ranks get for `hpcddp exec`.
EXPORTED_ALWAYS = ("HPCDDP_PYTHON", "HPCDDP_RUN_DIR", "HPCDDP_ATTEMPT", "HPCDDP_DEADLINE", "HPCDDP_LOG_RANKS")


class LaunchRequest(Record):
    """What to start: the same number of processes on each node.

    `hosts`: their names, first rank first; empty: all hosts of the job, as the scheduler or `hostfile` lists them.
    `hostfile`: the shell variable with the path of the list. `program`: the launcher's path; "": the one that the
    script found. `ranks_per_node`: what each process makes, if it is an agent. `exported` and
    `exported_always` are variables that every process needs, `exported_if_set` those that may be unset; only launchers
    that forward nothing by themselves print them. `oversubscribe`: there may be more processes than places.
    `launcher_options` are the site's own; `container_options` start each process in a container.
    """

    nodes: int
    processes_per_node: int
    cpus_per_process: int = 1
    ranks_per_node: int = 1
    hosts: tuple[str, ...] = ()
    hostfile: str = ""
    program: str = ""
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


def launch_arguments(groups: Iterable[Words], env: Mapping[str, str]) -> list[str]:
    """The argument vector, with shell variables looked up in `env`. LaunchError if one is not there.

    No part of hpcddp calls it yet: it is for a program that starts the launcher itself, without a shell.
    """
    arguments: list[str] = []
    for word in (word for words in groups for word in words):
        if isinstance(word, IfSet):
            arguments += word.words if env.get(word.variable) else ()
        elif isinstance(word, FromShell):
            arguments.append(word.before + _expand(word.text, env) + (word.after or ""))
        else:
            arguments.append(word)
    return arguments


def program_word(job: LaunchRequest) -> Word:
    """The launcher's path, or the one that the script found."""
    return job.program or FromShell("$launcher")


def host_words(job: LaunchRequest, hosts_option: str, file_option: str, *, counts: bool = True) -> Words:
    """The hosts, with their number of processes if `counts`; else the file that lists them; else nothing: the scheduler
    is asked. A launcher without an option for a file has "" for it."""
    if job.hosts:
        return hosts_option, ",".join(f"{h}:{job.processes_per_node}" if counts else h for h in job.hosts)
    return (file_option, FromShell(f"${job.hostfile}")) if job.hostfile and file_option else ()


def each_with(option: str, names: Iterable[str]) -> Iterator[str]:
    """The option before each of the names."""
    for name in names:
        yield option
        yield name


def _expand(text: str, env: Mapping[str, str]) -> str:
    """`text` with the value of each `$NAME` in it. Names end at the next character that cannot be in one."""
    first, *rest = text.split("$")
    for part in rest:
        name = next((part[:i] for i, c in enumerate(part) if not (c.isalnum() or c == "_")), part)
        if name not in env:
            raise LaunchError(f"the launcher's command line needs ${name}, which is not set", f"export {name}=VALUE")
        first += env[name] + part[len(name) :]
    return first
