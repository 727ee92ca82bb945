"""The keys of a site file as a JSON Schema, for editors. Made from the tables that read it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hpcddp.schedulers.registry import scripted_schedulers
from hpcddp.script import fields, site_file
from hpcddp.script.fields import Reader
from hpcddp.units import WALLTIME_PATTERN

_TEXT: dict[str, Any] = {"type": ["string", "number", "boolean"]}
_WALLTIME = {"type": "string", "pattern": f"^{WALLTIME_PATTERN}$"}
_COUNT = {"type": "integer", "minimum": 1}
_LIST = {"type": ["array", "string"], "items": {"type": ["string", "number"]}}
_FORMS: dict[Reader, dict[str, Any]] = {
    fields.read_text: _TEXT,
    fields.read_count: _COUNT,
    fields.read_number: {"type": "integer", "minimum": 0},
    fields.read_hours: {"type": "number", "exclusiveMinimum": 0},
    fields.read_walltime: _WALLTIME,
    fields.read_day: {"type": "string", "pattern": f"^{fields.DAY_PATTERN}$"},
    fields.read_flag: {"type": "boolean"},
    fields.read_words: _LIST,
    fields.read_command: _LIST,
    site_file.read_names_of_modules: _LIST,
    site_file.read_chunk: _LIST,
    site_file.read_gpu_order: _LIST,
    site_file.read_pattern: _TEXT,
    site_file.read_word: _TEXT,
    fields.read_lines: _LIST,
    fields.read_variables: {"type": ["object", "null"], "additionalProperties": _TEXT},
    site_file.read_range: {"type": ["integer", "string"], "pattern": r"^\d+(-\d+)?$"},
}


def site_schema() -> dict[str, Any]:
    """The whole schema, of draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a site of hpcddp",
        **_object(site_file.site_keys(scripted_schedulers())),
        "required": list(site_file.MANDATORY),
    }


def _object(readers: Mapping[str, Reader]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {key: _form(reader) for key, reader in readers.items()},
    }


def _form(reader: Reader) -> dict[str, Any]:
    if reader is site_file.read_limits:
        return {"type": "array", "items": _object(site_file.LIMIT)}
    if reader is site_file.read_scheduler:
        return {"enum": sorted(row.name for row in scripted_schedulers())}
    if not isinstance(reader, partial):
        return _FORMS[reader]
    if reader.func is fields.read_known:
        words = reader.args[0]
        return {"enum": [*words, *(int(w) for w in words if w.isdigit())]}
    readers = reader.args[1]
    if reader.func is site_file.read_block:
        return _object(readers)
    like = _object({**readers, "like": fields.read_text})
    return {"type": "object", "additionalProperties": like}
