"""A training script that starts a node's ranks itself (mp.spawn, notebook_launcher) is started once per node."""

from __future__ import annotations

import os
import re
from types import MappingProxyType

from hpcddp.errors import RequestError
from hpcddp.ranks.launch_commands import find_agent
from hpcddp.script.command import find_script
from hpcddp.script.spec import JobSpec

_CALLS = (b"spawn(", b"notebook_launcher(", b"Process(")
_RANKS = (b'"RANK"', b"'RANK'", b'"LOCAL_RANK"', b"'LOCAL_RANK'", b"env://")  # the script can be a rank, too
_MOST_BYTES = 2**20
# Of a shell script: a line that starts no program of the user's, and one that starts Python with words that no shell
# replaces, but for its own arguments.
_SETS_UP = r"(#.*|set [-+][\w ]+|(echo|module|ml|ulimit|source) [^|&;<>`$]*|export( \w+=[^|&;<>`$( ]*)+)?"
_PLAIN = r"(?:exec )?(python[\d.]* [^|&;<>`$(){}\[\]\"'\\*?~]*)(\"?\$[@*]\"?)?"


def see_spawn(spec: JobSpec) -> tuple[JobSpec, tuple[str, ...]]:
    """The spec, with `ranks: node` if the command's script calls such a function, as its file on this machine says;
    and what to tell of that.

    RequestError on several nodes: the script gives its ranks the numbers of one node.
    """
    if spec.ranks is not None or not spec.command or find_agent(spec.command):
        return spec, ()
    path = find_python_file(spec.command, spec.workdir or "")
    line = _spawning_line(os.path.join(spec.workdir or "", path))
    if not line:
        return spec, ()
    what = f"{path}:{line} starts a node's ranks itself"
    if (spec.nodes or 1) > 1:
        raise RequestError(
            f"{what}, and numbers them from 0 on each of {spec.nodes} nodes",
            "leave that to the launcher (hpcddp lint says how), or count from int(os.environ['NODE_RANK']) * ranks,"
            " with the world of all nodes and MASTER_ADDR as it is set, and say --set ranks=node; for actors"
            " that are no ranks: --set ranks=each",
        )
    remark = f"{what}: the job starts it once (ranks: node); --set ranks=each starts it in each rank"
    sources = MappingProxyType({**spec.sources, "ranks": f"{path}:{line}"})
    return spec._replace(ranks="node", sources=sources), (remark,)


def find_python_file(command: tuple[str, ...], folder: str) -> str:
    """The first file of Python among the words, whatever starts it (`env A=B python`, `uv run`, `numactl`), or that of
    the module behind -m, or the one that a plain shell script starts; "" if there is none here."""
    for i, word in enumerate(command):
        if word.endswith(".py") and os.path.isfile(os.path.join(folder, word)):
            return word
        if (
            i
            and command[i - 1] == "-m"
            and os.path.isfile(os.path.join(folder, path := word.replace(".", "/") + ".py"))
        ):
            return path
    inner = _find_only_command(command, folder)
    return find_python_file(inner, folder) if inner else ""


def _find_only_command(command: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """The one command of a shell script, if that is a Python with plain words, beside what sets it up; else ()."""
    script = find_script(command) or ""
    if not script.endswith(".sh"):
        return ()
    try:
        with open(os.path.join(folder, script), encoding="utf-8") as file:
            text = file.read(_MOST_BYTES).replace("\\\n", " ")
    except (OSError, ValueError):
        return ()
    if re.search("(?i)rank|world|dist|procid|launch|mpi|hpcddp", text):  # it may give each rank its own words
        return ()
    lines = [line for line in map(str.strip, text.splitlines()) if not re.fullmatch(_SETS_UP, line)]
    found = re.fullmatch(_PLAIN, lines[0]) if len(lines) == 1 else None
    return tuple(found[1].split()) if found is not None else ()


def _spawning_line(path: str) -> int:
    """The line of the file that starts ranks in any case; 0 for none, for a file that cannot be read, and for one that
    reads its rank."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return 0
    if not any(call in text for call in _CALLS) or any(word in text for word in _RANKS):
        return 0
    from hpcddp.lint.check import find_spawning_line  # parses the file: only for the few that may call it

    return find_spawning_line(text)
