"""A site's YAML file, read and checked: unknown keys, missing ones and values of a wrong form are SiteErrors.

The tables below and `site_keys` are the whole schema; `hpcddp sites schema` exports them for editors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from hpcddp.errors import RequestError, SiteError, nearest
from hpcddp.ranks.launchers import AGENTS
from hpcddp.schedulers.registry import find_scheduler, scheduler_names, scripted_schedulers
from hpcddp.schedulers.row import Scheduler
from hpcddp.script.container_runtimes import RUNTIMES
from hpcddp.script.fields import (
    MODULE_WORDS,
    Reader,
    read_choice,
    read_count,
    read_day,
    read_flag,
    read_hours,
    read_known,
    read_lines,
    read_mapping,
    read_modules,
    read_number,
    read_text,
    read_variables,
    read_walltime,
    read_words,
)
from hpcddp.script.loading import load_yaml
from hpcddp.script.overlay import merge_overlay, read_overlay
from hpcddp.script.site import (
    Account,
    Limit,
    Modules,
    Queue,
    Site,
    SiteContainer,
    SiteLauncher,
    SiteRendezvous,
    Staging,
    Variable,
)
from hpcddp.script.spec import KEYS, read_launcher


def read_range(value: object, where: str) -> tuple[int, int]:
    """`1-128`, or one number."""
    ends = read_text(value, where).split("-")
    first, last = (read_count(e, where) for e in (ends if len(ends) == 2 else ends * 2))
    if first > last:
        raise RequestError(f"{where} {value!r} ends before it begins", "write it as 1-128")
    return first, last


def read_scheduler(value: object, where: str) -> str:
    """The name of a scheduler that hpcddp writes job scripts for. Loads that one only, unless there is none."""
    name = read_text(value, where)
    if name in scheduler_names() and find_scheduler(name).generic_site:
        return name
    return read_known(tuple(row.name for row in scripted_schedulers()), value, where)


def read_pattern(value: object, where: str) -> str:
    """A regular expression."""
    text = read_text(value, where)
    try:
        re.compile(text)
    except re.error as e:
        raise RequestError(f"{where} {text!r} is no regular expression: {e}", f"{where.split()[0]}: '[a-z]+'") from e
    return text


def read_word(value: object, where: str) -> str:
    """One word, as a directive or the shell takes it where it stands."""
    text = read_text(value, where)
    if not re.fullmatch(r"[\w.:=+,-]+", text, re.ASCII):
        raise RequestError(f"{where} {text!r} is not one plain word", "letters, digits and _ . : = + , -")
    return text


def read_chunk(value: object, where: str) -> tuple[str, ...]:
    """What a chunk asks for: NAME or NAME=VALUE, each name once."""
    words = tuple(read_word(word, where) for word in read_words(value, where))
    names = [word.partition("=")[0] for word in words]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise RequestError(f"{where} has {twice} twice: {' '.join(words)}", f"one {twice}")
    return words


def read_gpu_order(value: object, where: str) -> tuple[str, ...]:
    """The numbers of a node's GPUs, each once."""
    words = read_words(value, where)
    if sorted(words) != sorted(map(str, range(len(words)))):
        raise RequestError(f"{where} is {' '.join(words)}, not each of a node's GPUs once", "gpu_order: [3, 2, 1, 0]")
    return words


def read_names_of_modules(value: object, where: str) -> tuple[str, ...]:
    """Names of modules alone: what else `module` does is a line of shell in `before` or `after`."""
    words = read_modules(value, where)
    word = next((word for word in words if word in MODULE_WORDS), None)
    if word is not None:
        raise RequestError(f"{where} has {word!r}, which is no module's name", f"before: [module {word}]")
    return words


def read_block(make: Callable[..., Any], readers: Mapping[str, Reader], value: object, where: str) -> Any:
    """A nested mapping as one frozen value."""
    return make(**{FIELDS.get(k, k): v for k, v in read_mapping(value, readers, where).items()})


def _make_launcher(**fields: Any) -> SiteLauncher:
    agents = {name: fields.pop(name) for name in AGENTS if name in fields}
    return SiteLauncher(**fields, agents=agents)


def read_limits(value: object, where: str) -> tuple[Limit, ...]:
    """A list of rules, none of them empty."""
    if not isinstance(value, list) or not all(isinstance(rule, Mapping) and rule for rule in value):
        raise RequestError(f"{where} is not a list of rules", "write - {nodes: 1-4, walltime: 12:00:00}, one per line")
    return tuple(read_block(Limit, LIMIT, rule, where) for rule in value)


def read_blocks(make: type[Any], readers: Mapping[str, Reader], value: object, where: str) -> dict[str, Any]:
    """Blocks by name. One that says `like: OTHER` takes from that one what it does not say itself."""
    blocks = value if isinstance(value, Mapping) else {}
    merged = {}
    for name, block in blocks.items():
        like = block.get("like") if isinstance(block, Mapping) else None
        if like is not None and not isinstance(blocks.get(like), Mapping):
            raise RequestError(f"{name} in {where} is like {like!r}, which is not there", f"one of {', '.join(blocks)}")
        own = {k: v for k, v in block.items() if k != "like"} if isinstance(block, Mapping) else block
        merged[name] = {**blocks[like], **own} if like else own
    value = merged if isinstance(value, Mapping) else value
    return read_mapping(value, dict.fromkeys(merged, partial(read_block, make, readers)), where)


# Keys whose field carries its unit, or another word where the key is short for people.
FIELDS = {"walltime": "walltime_s", "least": "least_s", "vars": "variables"}

LIMIT: dict[str, Reader] = {
    "nodes": read_range,
    "gpus": read_range,
    "walltime": read_walltime,
    "least": read_walltime,
    "node_hours": read_hours,
}
QUEUE: dict[str, Reader] = {
    "gpus": read_number,
    "gpu": read_text,
    "vendor": read_choice("nvidia", "amd", "intel"),
    "gpu_type": read_text,
    "gpu_mem_gb": read_count,
    "cpus": read_count,
    "cpus_per_gpu": read_count,
    "cpu_unit": read_choice("core", "hwthread"),
    "mem_gb": read_count,
    "local_gb": read_count,
    "exclusive": read_flag,
    "routing": read_flag,
    "partition": read_text,
    "qos": read_text,
    "account": read_text,  # site_keys puts in the block
    "gpu_chunks": read_flag,
    "limits": read_limits,
    "source": read_text,
}
ACCOUNT: dict[str, Reader] = {
    "required": read_flag,
    "option": read_text,  # site_keys puts in the words
    "pattern": read_pattern,
    "example": read_text,
    "command_line": read_flag,
    "without": read_text,
    "source": read_text,
}
VARIABLE: dict[str, Reader] = {
    "required": read_flag,
    "default": read_text,
    "directive": read_text,
    "chunk": read_text,
    "pattern": read_pattern,
    "example": read_text,
    "meaning": read_text,
    "source": read_text,
}
MODULES: dict[str, Reader] = {
    "init": read_text,
    "before": read_lines,
    "load": read_names_of_modules,
    "after": read_lines,
    "source": read_text,
}
LAUNCHER: dict[str, Reader] = {
    "name": read_launcher,
    "options": read_words,
    "forward": read_words,
    "bind": read_text,
    "bind_full": read_text,
    **dict.fromkeys(AGENTS, read_text),
    "source": read_text,
}
CONTAINER: dict[str, Reader] = {
    "runtime": read_choice(*RUNTIMES),
    "options": read_words,
    "directives": read_words,
    "source": read_text,
}
SITE: dict[str, Reader] = {
    "schema": read_choice("1"),
    "summary": read_text,
    "scheduler": read_scheduler,
    "standing": read_choice("documented", "practice", "generic"),
    "verified": read_day,
    "sources": read_variables,
    "cited": read_variables,
    "hostname": read_pattern,
    "account": partial(read_block, Account, ACCOUNT),
    "walltime": read_walltime,
    "queue": read_text,
    "queues": partial(read_blocks, Queue, QUEUE),
    "vars": partial(read_blocks, Variable, VARIABLE),
    **dict.fromkeys(("size", "queue_option", "gpus_option"), read_text),  # site_keys puts in the words
    "chunk": read_chunk,
    "placement": read_word,
    "asks_memory": read_flag,
    "constraint": read_text,
    "reservation": read_words,
    "rejects": read_words,
    "directives": read_words,
    "modules": partial(read_block, Modules, MODULES),
    "launcher": partial(read_block, _make_launcher, LAUNCHER),
    "gpu_order": read_gpu_order,
    "rendezvous": partial(
        read_block, SiteRendezvous, {"suffix": read_word, "interface": read_word, "source": read_text}
    ),
    "staging": partial(read_block, Staging, {"folder": read_text, "source": read_text}),
    "container": partial(read_block, SiteContainer, CONTAINER),
    "env": read_variables,
    "prepend": read_variables,
    "notes": read_lines,
}


def site_keys(rows: Sequence[Scheduler]) -> dict[str, Reader]:
    """The table for a site of one of these schedulers: for some keys the words are those that their templates read."""
    return {
        **SITE,
        **({} if any(row.directives.chunks for row in rows) else _without_chunks(rows)),
        "queues": partial(read_blocks, Queue, _queue_keys(rows)),
        "account": partial(read_block, Account, _account_keys(rows)),
        "size": _read_word(rows, "size"),
        "queue_option": _read_word(rows, "queue_option", "none"),
        "gpus_option": _read_word(rows, "gpus_option"),
    }


def _read_word(rows: Sequence[Scheduler], key: str, *also: str) -> Reader:
    """A reader of the words that these rows have for a key, and of those that hpcddp itself reads."""
    words = dict.fromkeys((*(word for row in rows for word in row.directives.site_words.get(key, ())), *also))
    return read_choice(*words) if words else partial(_refuse_key, _titles(rows), key)


def _without_chunks(rows: Sequence[Scheduler]) -> dict[str, Reader]:
    """Readers of what only a request of chunks can carry, where no scheduler has one: dropped, it would be lost."""
    refused = {key: partial(_refuse_key, _titles(rows), key) for key in ("chunk", "placement")}
    return {**refused, "vars": partial(read_blocks, Variable, {**VARIABLE, "chunk": refused["chunk"]})}


def _queue_keys(rows: Sequence[Scheduler]) -> dict[str, Reader]:
    """The keys of a queue. Those are refused that no request of these schedulers can carry: dropped, they would be
    lost."""
    lost = [] if any(row.directives.chunks for row in rows) else ["gpu_chunks"]
    lost += [] if any("gpus_option" in row.directives.site_words for row in rows) else ["gpu_type", "partition", "qos"]
    account = {"account": partial(read_block, dict, _account_keys(rows))}
    return {**QUEUE, **account, **{key: partial(_refuse_key, _titles(rows), key) for key in lost}}


def _account_keys(rows: Sequence[Scheduler]) -> dict[str, Reader]:
    return {**ACCOUNT, "option": _read_word(rows, "account", "none")}


def _titles(rows: Sequence[Scheduler]) -> str:
    return " or ".join(row.title for row in rows)


def _refuse_key(title: str, key: str, value: object, where: str) -> None:
    raise RequestError(f"{where} is {value!r}, but {title} has no use for this key", f"leave out {key}")


def _schedulers_of(raw: object) -> list[Scheduler]:
    """The scheduler that a file names; all of them where it names none, which is an error of its own."""
    name = raw.get("scheduler") if isinstance(raw, Mapping) else None
    return [find_scheduler(name)] if name in scheduler_names() else scripted_schedulers()


def _sources(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each block that names its source, and that name."""
    blocks = {key: value for key, value in found.items() if key not in {"sources", "cited"}}
    named = {key: value for of in ("queues", "vars") for key, value in blocks.pop(of, {}).items()}
    for name, block in (*blocks.items(), *named.items()):
        if source := getattr(block, "source", ""):
            yield name, source
        if source := getattr(block, "account", {}).get("source", ""):
            yield f"account of {name}", source
    yield from found.get("cited", {}).items()


def _examples(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Each value in the file that a pattern of the file is about."""
    account = found.get("account", Account())
    rules = {"account": account, **found.get("vars", {})}
    rules |= {
        f"account of {name}": account._replace(**queue.account) for name, queue in found.get("queues", {}).items()
    }
    for name, rule in rules.items():
        for value in filter(None, (rule.example, getattr(rule, "default", ""))):
            if rule.pattern:
                yield name, value, rule.pattern


MANDATORY = ("schema", "summary", "scheduler", "standing", "verified")


def load_site(name: str, path: str, overlay: str = "") -> Site:
    """The profile in a file, with what the file `overlay` corrects in it, if there is one.

    SiteError when one cannot be read, or a key is unknown, missing or wrong.
    """
    raw, text = load_yaml(path, SiteError)
    corrected = read_overlay(overlay) if overlay else {}
    if corrected:
        site = load_site(name, path)  # so that a fault of the file itself is told as one
        made = _make_site(name, f"{path} with {overlay}", merge_overlay(raw, corrected), site.guide, path)
        return made._replace(overlay=overlay)
    guide = re.match(r"# *(https?://\S+)", text)
    if not guide:
        what = "the address of the user guide in its first line"
        raise SiteError(f"{path} lacks {what}", "see docs/sites.md for the keys of a site file")
    return _make_site(name, path, raw, guide[1], path)


def _make_site(name: str, where: str, raw: Mapping[str, Any], guide: str, path: str) -> Site:
    """`where`: the files that the keys are from, for errors."""
    try:
        found = read_mapping(raw, site_keys(_schedulers_of(raw)), where)
    except RequestError as e:
        raise SiteError(e.message, e.hint) from e
    missing = [key for key in MANDATORY if key not in found]
    if missing:
        raise SiteError(f"{where} lacks the key {missing[0]!r}", "see docs/sites.md for the keys of a site file")
    if found.get("queue", "") not in {"", *found.get("queues", {})}:
        raise SiteError(f"{where}: its default queue {found['queue']!r} is none of its queues", "describe it there")
    for block, source in _sources(found):
        if source not in found.get("sources", {}):
            known_sources = ", ".join(found.get("sources", {})) or "none yet: sources: {NAME: https://…}"
            what = f"{where}: {block} is from the source {source!r}, which is not one of its sources"
            raise SiteError(what + nearest(source, list(found.get("sources", {}))), f"one of {known_sources}")
    unknown = next((key for key in found.get("cited", {}) if key not in {**SITE, **QUEUE}), None)
    if unknown is not None:
        raise SiteError(
            f"{where}: cited has {unknown!r}, which is no key{nearest(unknown, list(SITE))}", "leave it out"
        )
    for rule, value, pattern in _examples(found):
        if not re.fullmatch(pattern, value, re.ASCII):
            raise SiteError(f"{where}: {value!r} of {rule} does not match its pattern {pattern}", "correct one of them")
    for variable in found.get("vars", {}):
        if variable in KEYS and variable != "gpu_type":  # for which a site may have its own word
            raise SiteError(f"{where}: {variable!r} in vars is a key of every job file already", "give it another name")
    del found["schema"]
    return Site(name=name, file=path, guide=guide, **{FIELDS.get(key, key): v for key, v in found.items()})
