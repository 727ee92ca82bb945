"""The request: what a job file and the options ask for. None means that the site decides."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcddp.errors import RequestError
from hpcddp.parallelism import read_parallel
from hpcddp.ranks.launcher import FromShell, IfSet
from hpcddp.ranks.launchers import JOB_LAUNCHERS, LAUNCHERS
from hpcddp.record import Record
from hpcddp.runs.command import check_run_name
from hpcddp.script.container import RUNTIMES
from hpcddp.script.fields import (
    fields_of,
    read_choice,
    read_command,
    read_directives,
    read_known,
    read_name_list,
    read_preflight,
    read_text,
    read_variables,
    read_whole_number,
    readers_of,
    refuse_unknown,
)
from hpcddp.supervisor.notice import Notify, read_notify
from hpcddp.sweep import read_axes
from hpcddp.units import assign

if TYPE_CHECKING:
    from hpcddp.ranks.launcher import Word


class JobSpec(Record):
    """A job as it was asked for; the keys are documented in docs/job-file.md.

    `sources`: key -> where it was asked for, `--nodes` or `nodes in job.yaml`.
    """

    site: str | None = None
    name: str | None = None
    nodes: int | None = None
    ranks: str | None = None
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    gpus_per_rank: int | None = None
    gpu_type: str | None = None
    cpus_per_node: int | None = None
    cpus_per_rank: int | None = None
    mem_gb: int | None = None
    walltime_s: int | None = None
    queue: str | None = None
    account: str | None = None
    launcher: str | None = None
    independent: bool | None = None
    global_batch: int | None = None
    max_micro_batch: int | None = None
    parallel: str | None = None
    modules: tuple[str, ...] | None = None
    env: Mapping[str, str] | None = None
    pythonpath: tuple[str, ...] | None = None
    python: str | None = None
    venv: str | None = None
    conda: str | None = None
    container: str | None = None
    container_runtime: str | None = None
    binds: tuple[str, ...] | None = None
    stage_in: tuple[str, ...] | None = None
    stage_dir: str | None = None
    workdir: str | None = None
    run_dir: str | None = None
    supervise: bool | None = None
    fresh: bool | None = None
    resume: str | None = None
    accept: tuple[str, ...] | None = None
    keep: tuple[str, ...] | None = None
    reservation: str | None = None
    constraint: str | None = None
    exclusive: bool | None = None
    output: str | None = None
    mail: tuple[str, ...] | None = None
    mail_to: str | None = None
    array: str | None = None
    array_limit: int | None = None
    dependency: tuple[str, ...] | None = None
    hold: bool | None = None
    requeue: bool | None = None
    signal_s: int | None = None
    chain: int | None = None
    max_restarts: int | None = None
    min_nodes: int | None = None
    spares: int | None = None
    stall_limit_s: int | None = None
    preflight: str | None = None
    notify: Notify | None = None
    sweep: Mapping[str, tuple[str, ...]] | None = None
    directives: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    variables: Mapping[str, str] | None = None
    sources: Mapping[str, str] = MappingProxyType({})

    def asks_for(self, key: str) -> bool:
        """The request sets this key of a job file."""
        return getattr(self, FIELDS[key]) is not None


# Of one that is named by the program that it calls, such as mpirun, the error has its name.
read_launcher = partial(read_known, JOB_LAUNCHERS, synonyms={LAUNCHERS[name].program: name for name in JOB_LAUNCHERS})

# Every key of a job file, and how its value is read. `--set KEY=VALUE` takes the same keys.
KEYS = readers_of(
    JobSpec,
    name=lambda value, where: check_run_name(read_text(value, where), where, assign(where, "{}")),
    ranks=read_choice("each", "node"),
    gpus_per_node=read_whole_number,
    launcher=read_launcher,
    parallel=lambda value, where: str(read_parallel(read_text(value, where) if value == "" else value, where)),
    modules=read_name_list,
    container_runtime=read_choice(*RUNTIMES),
    accept=read_name_list,
    keep=read_name_list,
    preflight=read_preflight,
    sweep=lambda value, where: read_axes(read_text(value, where) if value == "" else value, where),
    notify=lambda value, where: read_notify(read_text(value, where) if value == "" else value, where),
    directives=read_directives,
    command=read_command,
    variables=None,
    sources=None,
)
FIELDS = fields_of(JobSpec)


def read_spec(given: Mapping[str, tuple[object, str]], site_keys: Iterable[str] = ()) -> JobSpec:
    """A spec from raw values with their sources: key -> (value, "--nodes" or "nodes in job.yaml").

    An empty value goes to its key's reader, from an option as from a file: `modules=` is an empty list, and
    `nodes: $NODES` with a variable that is not set must not become the default. A key `env.NAME` sets one variable,
    `sweep.NAME` one axis;
    `site_keys` are the words that only the job's site asks for. Raises RequestError for an unknown key or a value that
    is not of its key's form.
    """
    values: dict[str, Any] = {}
    env: dict[str, str] = {}
    axes: dict[str, object] = {}
    of_site: dict[str, str] = {}
    site_keys = tuple(site_keys)
    plain = {key: f"({where})" for key, (_, where) in given.items() if not key.startswith(("env.", "sweep."))}
    refuse_unknown(plain, [*KEYS, *site_keys], "docs/job-file.md")
    for key, (value, where) in given.items():
        if key.startswith("env."):
            env.update(read_variables({key[4:]: value}, where))
        elif key.startswith("sweep."):
            axes[key[6:]] = value
        elif key in site_keys:
            of_site[key] = read_text(value, where)
        else:
            values[FIELDS[key]] = KEYS[key](value, where)
    if axes:
        more = read_axes(axes, next(where for key, (_, where) in given.items() if key.startswith("sweep.")))
        values["sweep"] = {**values.get("sweep", {}), **more}
    if env:
        values["env"] = {**values.get("env", {}), **env}
    sources = {key: where for key, (_, where) in given.items()}
    return JobSpec(**values, variables=of_site or None, sources=sources)


# ---- quoting for bash

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+").fullmatch
_OPTION = re.compile(r"(--[\w-]+=)(.+)", re.DOTALL | re.ASCII).fullmatch
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UNCARRIED = re.compile(r"[\x00\ud800-\udfff]").search
_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


def quote_word(text: str) -> str:
    """`text` as one bash word on one line: no line of a script starts with a user's text, and none holds a CR.

    Control characters become `$'...'` escapes. Raises RequestError for NUL and broken UTF-8, which nothing can carry.
    """
    if _PLAIN(text):
        return text
    if _UNCARRIED(text):
        # where Python's own encoding is ASCII (LC_ALL=C with PYTHONUTF8=0), it takes every other character for broken
        hint = "leave the character out" if sys.getfilesystemencoding() == "utf-8" else "export PYTHONUTF8=1"
        raise RequestError(f"{text!r} holds a character that no program argument can carry", hint)
    if _CONTROL.search(text):
        escaped = "".join(_NAMED.get(c) or (f"\\{ord(c):03o}" if _CONTROL.match(c) else c) for c in text)
        return f"$'{escaped}'"
    return "'" + text.replace("'", "'\"'\"'") + "'"


def quote_words(words: Iterable[str]) -> str:
    """A command as one line of bash."""
    return " ".join(quote_word(w) for w in words)


def quote_line(words: Iterable[Word]) -> str:
    """Words of a launcher's command line: a shell variable stays one, in double quotes."""
    return " ".join(map(_quote_launch_word, words))


def _quote_launch_word(word: Word) -> str:
    if isinstance(word, IfSet):
        return f"${{{word.variable}:+{quote_words(word.words)}}}"
    if isinstance(word, FromShell):
        after = "" if word.after is None else quote_word(word.after)
        return f'{word.before and quote_word(word.before)}"{word.text}"{after}'
    option = _OPTION(word)  # only its value is quoted
    return option[1] + quote_word(option[2]) if option else quote_word(word)


def quote_path(path: str) -> str:
    """A bash word for `path`; a relative one hangs from the folder that the script has changed into."""
    return quote_word(path) if path.startswith("/") else '"$PWD"/' + quote_word(path)
