"""YAML files: text, lists and mappings, nothing else.

The loader resolves no types. YAML 1.1 would read an unquoted 1:30:00 as 5400, FALSE as a boolean and 010 as 8; here
every plain value is the text that stands in the file. A key that stands twice is refused: YAML would keep the last.
"""

from __future__ import annotations

from typing import Any

import yaml

from hpcddp.errors import HpcddpError, RequestError

# libyaml is several times faster; PyYAML is sometimes built without it
_Base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_TWICE = "stands twice"
_MAPPING = "write key: value, one per line"
_DEEP = 100
_MANY = 1000  # marks that begin a level; more than any file of a person has


class _Loader(_Base):  # type: ignore[misc]  # the C loader is there or not
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not plain text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} {_TWICE}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]  # the base class is Any


def load_yaml(path: str, error: type[HpcddpError] = RequestError) -> tuple[dict[str, Any], str]:
    """The mapping in a YAML file, and the file's text. Raises `error` when it cannot be read or is no mapping."""
    text = load_text(path, error)
    return parse_yaml(text, path, error), text


def load_text(path: str, error: type[HpcddpError] = RequestError) -> str:
    """The text of a file. Raises `error` when it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror}", f"check the path: ls -l {path}") from e
    except UnicodeDecodeError as e:
        raise error(f"{path} is not UTF-8 text (byte {e.start})", f"check the file: file {path}") from e


def parse_yaml(text: str, where: str, error: type[HpcddpError] = RequestError) -> dict[str, Any]:
    """The mapping that `text` holds; an empty text is an empty mapping."""
    try:
        if sum(map(text.count, "[{-?")) > _MANY and _is_deep(text):
            raise RecursionError
        value = yaml.load(text, _Loader)  # noqa: S506  # this loader makes text, lists and mappings only
    except RecursionError as e:
        raise error(f"{where} has lists or mappings inside each other, more than {_DEEP} deep", _MAPPING) from e
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(e, "problem", None) or str(e).splitlines()[0]
        if problem.endswith(_TWICE):
            raise error(f"{where}{line}: {problem}", "remove one of the two") from e
        if mark and ("tab character" in problem or "any token" in problem) and "\t" in _line(text, mark.line):
            raise error(f"{where}{line} is indented with a tab", "indent with blanks") from e
        raise error(f"{where}{line} is not YAML: {problem}", _MAPPING) from e
    if value in (None, ""):
        return {}
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "plain text"
        raise error(f"{where} holds {kind}, not a mapping of keys", _MAPPING)
    return value


def _is_deep(text: str) -> bool:
    """libyaml calls itself for each level when it loads, and the process would end where its stack ends."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEP:
            return True
    return False


def _line(text: str, number: int) -> str:
    """Line `number`, counted from 0; empty beyond the end, where YAML marks what is missing."""
    return "".join(text.splitlines()[number : number + 1])
