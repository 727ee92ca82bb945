"""The user's own corrections of a site's file: `overlays/NAME.yaml` in the user's folder, with the keys that differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hpcddp.errors import SiteError
from hpcddp.script.loading import load_yaml

#: In an overlay, the value of a queue that the site's file has and the site has not.
GONE = "gone"


def merge_overlay(raw: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """The site's keys with those of the overlay over them: blocks key by key, queues fact by fact, lists as a whole.
    An empty value counts as absent, as in a site's file."""
    merged = dict(raw)
    for key, value in overlay.items():
        before = merged.get(key)
        if value == "":
            continue
        if key == "queues" and isinstance(value, Mapping):
            merged[key] = _merge_queues(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[key] = {**before, **(value if key == "env" else _said(value))}  # a variable may be empty
        else:
            merged[key] = value
    return merged


def read_overlay(path: str) -> dict[str, Any]:
    """What the file says; {} where there is none. SiteError if it cannot be read, or is no mapping."""
    if not os.path.lexists(path):
        return {}
    return load_yaml(path, SiteError)[0]


def _merge_queues(before: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """What is corrected in one queue is not so in those that are like it: they keep what the file says of both."""
    merged = {name: _with_like(block, before) for name, block in before.items()}
    for name, block in overlay.items():
        own = (before if isinstance(block, Mapping) and "like" in block else merged).get(name)
        if block == GONE:
            merged.pop(name, None)
        elif block != "":
            merged[name] = {**own, **_said(block)} if isinstance(block, Mapping) and isinstance(own, Mapping) else block
    return merged


def _with_like(block: object, queues: Mapping[str, Any]) -> object:
    """A queue's block with what it takes from another one; as it is where that one is not there, which is an error of
    the file."""
    like = queues.get(block.get("like", "")) if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(like, Mapping):
        return block
    return {**like, **{key: value for key, value in block.items() if key != "like"}}


def _said(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if value != ""}
