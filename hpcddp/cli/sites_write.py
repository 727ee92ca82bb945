"""`hpcddp sites check --write`: what has one clear correction, in the user's own overlay of the site."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpcddp.cli.streams import tell
from hpcddp.errors import RequestError, SiteError
from hpcddp.script.find_site import SiteChoice, config_folder, is_path
from hpcddp.script.loading import load_text
from hpcddp.script.overlay import merge_overlay, read_overlay
from hpcddp.script.site import Site
from hpcddp.script.site_check import CHECKED, Difference
from hpcddp.script.site_file import load_site
from hpcddp.script.words import quote_word

_HEAD = "# Corrections of site "


def find_overlay(choice: SiteChoice, site: Site, env: Mapping[str, str]) -> str:
    """The overlay's path, whether it is there or not. RequestError for a site that is given as a file: none wins over
    it."""
    if is_path(choice.site):
        what = f"{site.file} is a file of your own, and --write corrects a site that is known by its name"
        raise RequestError(what, f"hpcddp sites check {quote_word(choice.site)}, and correct the file")
    return os.path.join(config_folder(env), "overlays", f"{site.name}.yaml")


def write_overlay(site: Site, differences: Sequence[Difference], path: str) -> str:
    """The path; "" if there is nothing to write. What stood in the overlay stays. SiteError, and the overlay as it was,
    if the correction makes no site."""
    corrections = [one.correction for one in differences if one.correction]
    if not corrections:
        return ""
    before = read_overlay(path)
    day = time.strftime("%Y-%m-%d")
    merged = {**before}
    for correction in corrections:
        merged = _add(merged, correction)
    merged = merge_overlay(merged, {"sources": {CHECKED: f"hpcddp sites check on {os.uname().nodename} {day}"}})
    text = f"{_HEAD}{site.name}, found by hpcddp sites check on {day}. They win over {site.file}.\n{_as_yaml(merged)}"
    partial = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            load_site(site.name, site.file, partial)
        except SiteError as error:
            os.unlink(partial)
            raise SiteError(
                f"the correction makes no site: {error.message.replace(partial, path)}", error.hint
            ) from error
        _keep(path, before)
        os.replace(partial, path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {(error.strerror or '').lower()}", "ls -ld ~/.config") from error
    return path


def _keep(path: str, before: Mapping[str, Any]) -> None:
    """A copy of an overlay in which a person has written; an older copy stays."""
    if not os.path.exists(path):
        return
    text = load_text(path, SiteError)
    head, _, rest = text.partition("\n")
    if head.startswith(_HEAD) and rest == _as_yaml(before):
        return
    number, kept = 1, f"{path}.before"
    while os.path.lexists(kept):
        number += 1
        kept = f"{path}.before{number}"
    with open(kept, "w", encoding="utf-8") as file:
        file.write(text)
    tell(f"what was there before: {kept} (comments are not kept)")


def _as_yaml(overlay: Mapping[str, Any]) -> str:
    import yaml

    said: str = yaml.safe_dump(dict(overlay), sort_keys=False, default_flow_style=None, allow_unicode=True)
    return said


def _add(merged: Mapping[str, Any], correction: Mapping[str, Any]) -> dict[str, Any]:
    """Two corrections of one queue are both kept."""
    added = merge_overlay(merged, {key: value for key, value in correction.items() if key != "queues"})
    queues = dict(merged.get("queues") or {})
    for name, facts in correction.get("queues", {}).items():
        before = queues.get(name)
        if isinstance(facts, Mapping):
            queues[name] = {**(before if isinstance(before, dict) else {}), **facts, "source": CHECKED}
        else:
            queues[name] = facts
    return {**added, "queues": queues} if queues else added
