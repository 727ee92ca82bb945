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
    """The site's keys with those of the overlay over them: blocks key by key, queues fact by fact, lists as a whole."""
    merged = dict(raw)
    for key, value in overlay.items():
        before = merged.get(key)
        if key == "queues" and isinstance(value, Mapping):
            merged[key] = _merge_queues(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[key] = {**before, **value}
        else:
            merged[key] = value
    return merged


def read_overlay(path: str) -> dict[str, Any]:
    """What the file says; {} where there is none. SiteError if it cannot be read, or is no mapping."""
    if not os.path.lexists(path):
        return {}
    return load_yaml(path, SiteError)[0]


def _merge_queues(before: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(before)
    for name, block in overlay.items():
        own = before.get(name)
        if block == GONE:
            # one that is like this one takes over what it said
            gone = merged.pop(name, {})
            for other, rest in merged.items():
                if isinstance(rest, Mapping) and rest.get("like") == name:
                    merged[other] = {**gone, **{key: value for key, value in rest.items() if key != "like"}}
        elif isinstance(block, Mapping) and isinstance(own, Mapping):
            merged[name] = {**own, **block}
        else:
            merged[name] = block
    return merged
