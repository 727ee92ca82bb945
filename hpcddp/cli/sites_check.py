"""`hpcddp sites check`: a site's file against the live scheduler and the module system of this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from hpcddp.cli.streams import tell, write_exactly
from hpcddp.errors import RequestError, SchedulerError, SiteError
from hpcddp.login.planning import find_site_here, on_path
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import QueueFound
from hpcddp.schedulers.run import ask_queues, run_program
from hpcddp.script.find_site import SiteChoice, asked_site, config_folder, open_site
from hpcddp.script.overlay import merge_overlay, read_overlay
from hpcddp.script.site import Site
from hpcddp.script.site_check import Difference, compare_modules, compare_queues, module_questions, read_modules
from hpcddp.script.site_file import load_site

_MODULES_S = 30.0
_DIFFERS = 1


def check_site(name: str | None, env: Mapping[str, str], *, as_json: bool, write: bool) -> int:
    """The exit status: 1 if something differs. SchedulerError if the scheduler does not answer."""
    choice = SiteChoice(name, "hpcddp sites check") if name else asked_site(None, None, "", env) or find_site_here(env)
    site = open_site(choice, env)
    differences, unasked = _compare(site, env)
    written = _write(site, differences, env) if write else ""
    if as_json:
        told = [{"text": one.text, "correction": one.correction or None} for one in differences]
        record = {"site": site.name, "file": site.file, "differences": told, "not_asked": unasked}
        sys.stdout.write(json.dumps({**record, "written": written or None}, indent=2) + "\n")
    else:
        for why in unasked:
            tell(why)
        lines = [f"{one.text}{'' if one.correction else '  (correct it by hand)'}" for one in differences]
        count = f"{len(lines)} differ" if len(lines) != 1 else "1 differs"
        agreed = "nothing differs in what could be asked" if unasked else "nothing differs"
        agreed = f"site {site.name}: {count if lines else agreed}"
        report = "".join(f"{line}\n" for line in [*lines, agreed])
        (sys.stderr if write else sys.stdout).write(report)
        if written:
            write_exactly(f"{written}\n")
    return _DIFFERS if differences else 0


def _compare(site: Site, env: Mapping[str, str]) -> tuple[list[Difference], list[str]]:
    """The differences, and what could not be asked."""
    differences, unasked = list[Difference](), list[str]()
    commands = find_scheduler(site.scheduler).commands
    if site.queue_option == "--qos":
        unasked.append("its queues are QOS, which have limits of their own: not asked (sacctmgr show qos)")
    elif not commands.survey:
        unasked.append(f"{find_scheduler(site.scheduler).title} has no command that lists its queues for hpcddp")
    elif not site.queues:
        unasked.append("the site's file has no queues to compare")
    else:
        qos = [name for name, queue in site.queues.items() if queue.partition]
        unasked += [f"QOS {', '.join(qos)}: not asked (sacctmgr show qos)"] if qos else []
        asked = " and ".join(command[0] for command in commands.survey)
        differences += compare_queues(site, _survey(site, env), asked)
    unasked += _ask_accounts(site, env)
    if site.modules.load:
        shell = ["bash", "-l"]
        try:
            answer = run_program(shell, env, module_questions(site), patience_s=_MODULES_S)
            found = read_modules(answer.stdout, answer.status)
        except SchedulerError as error:
            unasked.append(f"modules: {error.message}")
        else:
            differences += compare_modules(site, found)
            unasked += [found.problem] if found.problem else []
    return differences, unasked


def _survey(site: Site, env: Mapping[str, str]) -> list[QueueFound]:
    commands = find_scheduler(site.scheduler).commands
    missing = next((command[0] for command in commands.survey if not on_path(command[0], env)), None)
    if missing is not None:
        raise SchedulerError(
            f"there is no {missing} here to ask", f"on a login node of {site.name}: hpcddp sites check"
        )
    return ask_queues(site.scheduler, env, _MODULES_S)


def _ask_accounts(site: Site, env: Mapping[str, str]) -> list[str]:
    """Which accounts the user may charge, as far as the scheduler says it: for people, it is no difference."""
    command = find_scheduler(site.scheduler).commands.accounts
    if not command:
        return ["accounts: hpcddp knows no command that lists them here"] if site.account.required else []
    try:
        user = env.get("USER") or env.get("LOGNAME") or str(os.getuid())
        answer = run_program([word.replace("{user}", user) for word in command], env, patience_s=_MODULES_S)
    except SchedulerError as error:
        return [f"accounts: {error.message}"]
    names = sorted({line.strip().strip("|") for line in answer.stdout.splitlines() if line.strip()})
    if answer.status or not names:
        return [f"accounts: {command[0]} does not say which ones are yours"]
    return [f"accounts that you may charge: {', '.join(names[:12])}"]


def _write(site: Site, differences: list[Difference], env: Mapping[str, str]) -> str:
    """The overlay with what can be corrected; "" if there is nothing. What stood in it stays."""
    import yaml

    corrections = [one.correction for one in differences if one.correction]
    if not corrections:
        return ""
    if "/" in site.name or not os.path.basename(site.file).startswith(site.name):
        raise RequestError(f"{site.file} is a file of your own", "correct it there")
    path = os.path.join(config_folder(env), "overlays", f"{site.name}.yaml")
    merged: dict[str, Any] = read_overlay(path)
    for correction in corrections:
        merged = _add(merged, correction)
    day = time.strftime("%Y-%m-%d")
    source = f"hpcddp sites check on {os.uname().nodename} {day}"
    merged = merge_overlay(merged, {"sources": {"checked": source}})
    for name in {name for correction in corrections for name in correction.get("queues", {})}:
        if isinstance(merged["queues"][name], dict):
            merged["queues"][name]["source"] = "checked"
    head = f"# Corrections of site {site.name}, found by hpcddp sites check on {day}. They win over {site.file}.\n"
    partial = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.exists(path):
            os.replace(path, f"{path}.before")
            tell(f"what was there before: {path}.before (comments are not kept)")
        with open(partial, "w", encoding="utf-8") as file:
            file.write(head + yaml.safe_dump(merged, sort_keys=False, default_flow_style=None, allow_unicode=True))
        os.replace(partial, path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {(error.strerror or '').lower()}", "ls -ld ~/.config") from error
    try:
        load_site(site.name, site.file, path)
    except SiteError as error:
        os.unlink(path)
        raise SiteError(f"the correction makes no site: {error.message}", error.hint) from error
    return path


def _add(merged: dict[str, Any], correction: Mapping[str, Any]) -> dict[str, Any]:
    """Two corrections of one queue are both kept."""
    added = merge_overlay(merged, {key: value for key, value in correction.items() if key != "queues"})
    queues = dict(merged.get("queues") or {})
    for name, facts in correction.get("queues", {}).items():
        before = queues.get(name)
        queues[name] = {**before, **facts} if isinstance(before, dict) and isinstance(facts, Mapping) else facts
    return {**added, "queues": queues} if queues else added
