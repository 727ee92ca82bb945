"""A site's YAML file, read and checked: unknown keys, missing ones and values of a wrong form are SiteErrors.

The tables below and `site_keys` are the whole schema.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from hpcddp.errors import HpcddpError, RequestError, SiteError, nearest
from hpcddp.ranks.launchers import NODE_AGENTS
from hpcddp.record import Record
from hpcddp.schedulers.registry import find_scheduler, scheduler_names, scripted_schedulers, submit_commands
from hpcddp.schedulers.row import Scheduler
from hpcddp.script.container import RUNTIMES
from hpcddp.script.fields import (
    Reader,
    fields_of,
    read_choice,
    read_count,
    read_day,
    read_known,
    read_lines,
    read_mapping,
    read_name_list,
    read_text,
    read_whole_number,
    read_words,
    readers_of,
)
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

# libyaml is several times faster; PyYAML is sometimes built without it
_Base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_MAPPING = "write key: value, one per line, indented with blanks"


class _Loader(_Base):  # type: ignore[misc]  # the C loader is there or not
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not plain text", key.start_mark)
            if key.value in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]  # the base class is Any


def load_yaml(path: str, error: type[HpcddpError] = RequestError) -> tuple[dict[str, Any], str]:
    """The mapping in a YAML file, and the file's text. Raises `error` when it cannot be read or is no mapping."""
    text = load_text(path, error)
    return parse_yaml(text, path, error), text


def load_text(path: str, error: type[HpcddpError] = RequestError) -> str:
    """The text of a file. Raises `error` when it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # an editor may have put a mark before the text
            return file.read()
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror}", f"check the path: ls -l {path}") from e
    except UnicodeDecodeError as e:
        raise error(f"{path} is not UTF-8 text (byte {e.start})", f"check the file: file {path}") from e


def parse_yaml(text: str, where: str, error: type[HpcddpError] = RequestError) -> dict[str, Any]:
    """The mapping that `text` holds; an empty text is an empty mapping."""
    try:
        value = yaml.load(text, _Loader)  # noqa: S506  # this loader makes text, lists and mappings only
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(e, "problem", None) or str(e).splitlines()[0]
        raise error(f"{where}{line} is not YAML: {problem}", _MAPPING) from e
    if value in (None, ""):
        return {}
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "plain text"
        raise error(f"{where} holds {kind}, not a mapping of keys", _MAPPING)
    return value


# ---- the user's overlays: `overlays/NAME.yaml`, with the keys that differ


def merge_overlay(raw: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """The site's keys with those of the overlay over them: blocks key by key, queues fact by fact, lists as a whole.
    An empty value takes a key or a queue away."""
    merged = dict(raw)
    for key, value in overlay.items():
        before = merged.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[key] = merge_overlay(before, value) if key == "queues" else {**before, **value}
        else:
            merged[key] = value
    return merged


def _fill_likes(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The site's keys, where a queue that says `like: OTHER` has what it does not say itself from that one."""
    queues = raw.get("queues")
    if not isinstance(queues, Mapping):
        return dict(raw)
    filled = dict(queues)
    for name, block in queues.items():
        if isinstance(block, Mapping) and "like" in block:
            like = queues.get(block["like"])
            if not isinstance(like, Mapping):
                what = f"queue {name} in {where} is like {block['like']!r}, which is not there"
                raise SiteError(what, f"one of {', '.join(queues)}")
            filled[name] = {**like, **{key: value for key, value in block.items() if key != "like"}}
    return {**raw, "queues": filled}


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
    """Read one word that a directive or the shell takes as it stands."""
    text = read_text(value, where)
    if not re.fullmatch(r"[\w.:=+,-]+", text, re.ASCII):
        raise RequestError(f"{where} {text!r} is not one plain word", "letters, digits and _ . : = + , -")
    return text


def read_chunk(value: object, where: str) -> tuple[str, ...]:
    """Read the resources of a chunk: NAME or NAME=VALUE."""
    return tuple(read_word(word, where) for word in read_words(value, where))


def read_gpu_order(value: object, where: str) -> tuple[str, ...]:
    """The numbers of a node's GPUs, each once."""
    words = read_words(value, where)
    if sorted(words) != sorted(map(str, range(len(words)))):
        raise RequestError(f"{where} is {' '.join(words)}, not each of a node's GPUs once", "gpu_order: [3, 2, 1, 0]")
    return words


def read_block(make: Callable[..., Any], readers: Mapping[str, Reader], value: object, where: str) -> Any:
    """A nested mapping as one frozen value."""
    return make(**{SITE_FIELDS.get(k, k): v for k, v in read_mapping(value, readers, where).items()})


def _make_launcher(**fields: Any) -> SiteLauncher:
    node_agents = {name: fields.pop(name) for name in NODE_AGENTS if name in fields}
    return SiteLauncher(**fields, node_agents=node_agents)


def read_limits(value: object, where: str) -> tuple[Limit, ...]:
    """A list of rules, none of them empty."""
    if not isinstance(value, list) or not all(isinstance(rule, Mapping) and rule for rule in value):
        raise RequestError(f"{where} is not a list of rules", "write - {nodes: 1-4, walltime: 12:00:00}, one per line")
    return tuple(read_block(Limit, LIMIT, rule, where) for rule in value)


def read_blocks(make: type[Any], readers: Mapping[str, Reader], value: object, where: str) -> dict[str, Any]:
    """Blocks by name."""
    names = value if isinstance(value, Mapping) else {}
    return read_mapping(value, dict.fromkeys(names, partial(read_block, make, readers)), where)


LIMIT = readers_of(Limit, nodes=read_range, gpus=read_range)
QUEUE = readers_of(
    Queue,
    gpus=read_whole_number,
    **dict.fromkeys(("gpu_type", "partition", "qos"), read_word),
    vendor=read_choice("nvidia", "amd", "intel"),
    cpu_unit=read_choice("core", "hwthread"),
    account=read_text,  # site_keys puts in the block
    limits=read_limits,
)
ACCOUNT = readers_of(Account, pattern=read_pattern)
VARIABLE = readers_of(Variable, pattern=read_pattern)
MODULES = readers_of(Modules, before=read_lines, load=read_name_list, after=read_lines)
LAUNCHER = {**readers_of(SiteLauncher, name=read_launcher, node_agents=None), **dict.fromkeys(NODE_AGENTS, read_text)}
CONTAINER = readers_of(SiteContainer, runtime=read_choice(*RUNTIMES))
SITE: dict[str, Reader] = {
    "schema": read_choice("1"),
    **readers_of(
        Site,
        **dict.fromkeys(("name", "file", "guide", "overlay")),  # no keys
        scheduler=read_scheduler,
        standing=read_choice("documented", "practice", "generic"),
        verified=read_day,
        hostname=read_pattern,
        account=partial(read_block, Account, ACCOUNT),
        queues=partial(read_blocks, Queue, QUEUE),
        chunk=read_chunk,
        placement=read_word,
        modules=partial(read_block, Modules, MODULES),
        launcher=partial(read_block, _make_launcher, LAUNCHER),
        gpu_order=read_gpu_order,
        rendezvous=partial(read_block, SiteRendezvous, readers_of(SiteRendezvous, suffix=read_word)),
        staging=partial(read_block, Staging, readers_of(Staging)),
        container=partial(read_block, SiteContainer, CONTAINER),
        vars=partial(read_blocks, Variable, VARIABLE),
        notes=read_lines,
    ),
}
SITE_FIELDS = {**fields_of(Limit), **fields_of(Site)}


def site_keys(rows: Sequence[Scheduler]) -> dict[str, Reader]:
    """The table for a site of one of these schedulers: for some keys the words are those that their templates read, and
    a key is refused that no request of theirs can carry, since it would be lost."""
    titles = " or ".join(row.title for row in rows)
    has_chunks = any(row.directives.chunks for row in rows)
    has_types = any("gpus_option" in row.directives.site_words for row in rows)

    def refused(*keys: str) -> dict[str, Reader]:
        return {key: partial(_refuse_key, titles, key) for key in keys}

    def words(key: str, word: str, *also: str) -> dict[str, Reader]:
        known = dict.fromkeys((*(w for row in rows for w in row.directives.site_words.get(word, ())), *also))
        return {key: read_choice(*known)} if known else refused(key)

    account: dict[str, Reader] = {**ACCOUNT, **words("option", "account", "none")}
    variable = VARIABLE if has_chunks else {**VARIABLE, **refused("chunk")}
    queue: dict[str, Reader] = {**QUEUE, "account": partial(read_block, dict, account)}
    queue |= {} if has_chunks else refused("gpu_chunks")
    queue |= {} if has_types else refused("gpu_type", "partition", "qos")
    return {
        **SITE,
        **({} if has_chunks else refused("chunk", "placement")),
        "vars": partial(read_blocks, Variable, variable),
        "queues": partial(read_blocks, Queue, queue),
        "account": partial(read_block, Account, account),
        **words("size", "size"),
        **words("queue_option", "queue_option", "none"),
        **words("gpus_option", "gpus_option"),
    }


def _refuse_key(title: str, key: str, value: object, where: str) -> None:
    raise RequestError(f"{where} is {value!r}, but {title} has no use for this key", f"leave out {key}")


def _schedulers_of(raw: object) -> list[Scheduler]:
    """The scheduler that a file names; all of them where it names none, which is an error of its own."""
    name = raw.get("scheduler") if isinstance(raw, Mapping) else None
    return [find_scheduler(name)] if name in scheduler_names() else scripted_schedulers()


MANDATORY = ("schema", "summary", "scheduler", "standing", "verified")


def load_site(name: str, path: str, overlay: str = "") -> Site:
    """The profile in a file, with what the file `overlay` corrects in it, if there is one.

    SiteError when one cannot be read, or a key is unknown, missing or wrong.
    """
    raw, text = load_yaml(path, SiteError)
    guide = re.match(r"# *(https?://\S+)", text)
    if not guide:
        what = "the address of the user guide in its first line"
        raise SiteError(f"{path} lacks {what}", "see docs/sites.md for the keys of a site file")
    raw, where = _fill_likes(raw, path), path
    if overlay:
        where = f"{path} with {overlay}"
        raw = _fill_likes(merge_overlay(raw, load_yaml(overlay, SiteError)[0]), where)
    try:
        found = read_mapping(raw, site_keys(_schedulers_of(raw)), where)
    except RequestError as e:
        raise SiteError(e.message, e.hint) from e
    missing = [key for key in MANDATORY if key not in found]
    if missing:
        raise SiteError(f"{where} lacks the key {missing[0]!r}", "see docs/sites.md for the keys of a site file")
    if found.get("queue", "") not in {"", *found.get("queues", {})}:
        raise SiteError(f"{where}: its default queue {found['queue']!r} is none of its queues", "describe it there")
    for variable in found.get("vars", {}):
        if variable in KEYS and variable != "gpu_type":  # for which a site may have its own word
            raise SiteError(f"{where}: {variable!r} in vars is a key of every job file already", "give it another name")
    del found["schema"]
    fields = {SITE_FIELDS.get(key, key): value for key, value in found.items()}
    return Site(name=name, file=path, guide=guide[1], overlay=overlay, **fields)


# ---- the package's data folders

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def find_data_folder(name: str) -> str:
    """The absolute path of `templates` or `jobs`. Raises SiteError when the installation lacks it."""
    checkout = os.path.join(os.path.dirname(_PACKAGE), name)
    for folder in (os.path.join(_PACKAGE, f"_{name}"), checkout):
        if os.path.isdir(folder):
            return folder
    raise SiteError(f"the folder {name} of hpcddp is neither in {_PACKAGE} nor beside it", "install hpcddp again")


def source_root() -> str | None:
    """The folder that must be on PYTHONPATH for `import hpcddp`, or None when hpcddp is installed as a package."""
    if os.path.isdir(os.path.join(_PACKAGE, "_templates")):
        return None
    return os.path.dirname(_PACKAGE)


# ---- which site, and why


class SiteChoice(Record):
    """A site's name or path, and why it was taken."""

    site: str
    reason: str


def config_folder(env: Mapping[str, str]) -> str:
    """The user's own folder: config.yaml, sites/*.yaml and overlays/*.yaml."""
    base = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME", "/nonexistent"), ".config")
    return os.path.join(base, "hpcddp")


def config_folders(env: Mapping[str, str]) -> list[str]:
    """The user's own folder, then those that a centre has for everybody: in /etc/xdg, or where XDG_CONFIG_DIRS says. An
    environment without HOME is nobody's."""
    shared = (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":") if "HOME" in env or "XDG_CONFIG_DIRS" in env else []
    return [config_folder(env), *(os.path.join(base, "hpcddp") for base in shared if os.path.isabs(base))]


def find_config(name: str, env: Mapping[str, str]) -> str:
    """The path of this file in the first of these folders that has it; "" if none has."""
    for folder in config_folders(env):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
    return ""


def overlay_path(name: str, env: Mapping[str, str]) -> str:
    """The path of the user's own corrections of this site, if there are any."""
    return os.path.join(config_folder(env), "overlays", f"{name}.yaml")


def overlay_of(name: str, env: Mapping[str, str]) -> str:
    """The file with the user's own corrections of this site; "" if there is none."""
    path = overlay_path(name, env)
    return path if os.path.exists(path) else ""


def chosen_site(
    option: str | None, in_job_file: str | None, job_file: str, env: Mapping[str, str]
) -> SiteChoice | None:
    """The site that a person chose: --site, $HPCDDP_SITE, the job file, the user's config.yaml; None: nobody did."""
    if option:
        return SiteChoice(option, "--site")
    if env.get("HPCDDP_SITE"):
        return SiteChoice(env["HPCDDP_SITE"], "$HPCDDP_SITE")
    if in_job_file:
        return SiteChoice(in_job_file, f"site in {job_file}")
    config = find_config("config.yaml", env)
    if not config:
        return None
    site = load_yaml(config, SiteError)[0].get("site")
    if not site or not isinstance(site, str):
        raise SiteError(f"{config} chooses no site", "site: NAME, its only key")
    return SiteChoice(site, f"site in {config}")


def site_of_host(hostname: str, env: Mapping[str, str]) -> SiteChoice | None:
    """The site whose file has a `hostname:` pattern that matches the whole of this machine's name."""
    for name, path in site_files(env).items():
        # Only its line is parsed: whole profiles would cost every render of a user who names no site.
        line = re.search(r"^hostname:.*$", load_text(path, SiteError), re.MULTILINE)
        if line and re.fullmatch(str(parse_yaml(line[0], path, SiteError)["hostname"]), hostname):
            return SiteChoice(name, f"this host is {hostname}")
    return None


def site_of_scheduler(on_path: Callable[[str], bool], version_of: Callable[[str], str]) -> SiteChoice:
    """The generic site of the scheduler whose submit command is on PATH.

    `version_of` gives what `PROGRAM --version` prints. It is asked only where several schedulers have a command of that
    name, such as `qsub`.
    """
    for program, row in submit_commands():
        version = row.commands.version
        if on_path(program) and (not version or version in version_of(program)):
            return SiteChoice(row.generic_site, f"{program} is on PATH")
    here = next(row for row in scripted_schedulers() if row.this_machine)
    return SiteChoice(here.generic_site, "no scheduler's submit command is on PATH")


def site_files(env: Mapping[str, str]) -> dict[str, str]:
    """Name -> path of every known profile, sorted; the user's own win over the centre's, and those over the shipped."""
    found: dict[str, str] = {}
    folders = [find_data_folder("templates"), *config_folders(env)[::-1]]
    for folder in (os.path.join(folder, "sites") for folder in folders):
        for file in os.listdir(folder) if os.path.isdir(folder) else ():
            if file.endswith(".yaml") and os.path.isfile(os.path.join(folder, file)):
                found[file.removesuffix(".yaml")] = os.path.join(folder, file)
    return dict(sorted(found.items()))


def is_path(named: str) -> bool:
    """The site is given as a file, which has no overlay."""
    return "/" in named or named.endswith((".yaml", ".yml"))


def open_site(choice: SiteChoice, env: Mapping[str, str]) -> Site:
    """The chosen profile: a path (it has a `/` or ends in .yaml), else a name. Raises SiteError when there is none."""
    named = choice.site
    if is_path(named):
        return load_site(os.path.splitext(os.path.basename(named))[0], named)
    known = site_files(env)
    if named in known:
        return load_site(named, known[named], overlay_of(named, env))
    what = f"site {named!r} is not known ({choice.reason}){nearest(named, list(known))}"
    raise SiteError(what, f"known sites: {', '.join(known)}; or give a file: --site ./my.yaml")
