"""`hpcddp sites check`: a site's file against the live scheduler and the module system of this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from hpcddp.cli.streams import print_message, print_messages
from hpcddp.errors import SchedulerError
from hpcddp.login.planning import find_site_here, on_path
from hpcddp.record import Record
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import QueueFound
from hpcddp.schedulers.run import ask_queues, run_program
from hpcddp.script.site import Site
from hpcddp.script.site_check import ModulesCompared, compare_modules, compare_queues
from hpcddp.script.site_file import SiteChoice, chosen_site, is_path, open_site, overlay_path

_PATIENCE_S = 30.0
_DIFFERS = 1


class SiteFound(Record):
    """Differences from the scheduler, and questions without an answer. `queues`: the scheduler's; `accounts`: those
    that the user may charge, or why they are not known; `modules`: of the module system."""

    differences: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    queues: tuple[QueueFound, ...] = ()
    accounts: tuple[str, ...] = ()
    accounts_unasked: tuple[str, ...] = ()
    modules: ModulesCompared = ModulesCompared()


def check_site(name: str | None, env: Mapping[str, str], *, as_json: bool) -> int:
    """The exit status: 1 if something differs. SchedulerError if the scheduler does not answer."""
    choice = SiteChoice(name, "hpcddp sites check") if name else chosen_site(None, None, "", env) or find_site_here(env)
    site = open_site(choice, env)
    found = compare_site(site, env)
    differences = [*found.differences, *found.modules.differences]
    unasked = [*found.unasked, *found.modules.unasked]
    remarks = [f"accounts that you may charge: {', '.join(found.accounts[:12])}"] if found.accounts else []
    if as_json:
        record = {"site": site.name, "file": site.file, "differences": differences, "not_asked": unasked}
        print(json.dumps({**record, "remarks": remarks}, indent=2))
        return _DIFFERS if differences else 0
    print_messages([*unasked, *remarks])
    count = f"{len(differences)} differ" if len(differences) != 1 else "1 differs"
    agreed = "nothing differs in what could be asked" if unasked else "nothing differs"
    print(*differences, f"site {site.name}: {count if differences else agreed}", sep="\n")
    if differences and not is_path(choice.site):
        print_message(f"what differs goes into an overlay of your own: {overlay_path(site.name, env)} (docs/sites.md)")
    return _DIFFERS if differences else 0


def compare_site(site: Site, env: Mapping[str, str]) -> SiteFound:
    """The file beside what the scheduler and the modules of this machine say. SchedulerError if it does not answer."""
    differences, unasked = list[str](), list[str]()
    queues = list[QueueFound]()
    commands = find_scheduler(site.scheduler).commands
    if site.queue_option == "--qos":
        unasked.append("its queues are QOS, which have limits of their own: not asked (sacctmgr show qos)")
    elif not commands.survey:
        unasked.append(f"{find_scheduler(site.scheduler).title} has no command that lists its queues for hpcddp")
    elif not site.queues:
        unasked.append("the site's file has no queues to compare")
    else:
        qos = [name for name, queue in site.queues.items() if queue.qos]
        unasked += [f"QOS {', '.join(qos)}: not asked (sacctmgr show qos)"] if qos else []
        programs = " and ".join(command[0] for command in commands.survey)
        queues = survey_site(site, env)
        differences += compare_queues(site, queues, programs)
    accounts, unknown = ask_accounts(site, env)
    unasked += [f"accounts: {why}" for why in unknown]
    modules = ModulesCompared()
    if site.modules.load:
        try:
            modules = compare_modules(
                site, lambda lines: run_program(["bash", "-l"], env, lines, patience_s=_PATIENCE_S)
            )
        except SchedulerError as error:
            modules = ModulesCompared(unasked=(f"modules: {error.message}",))
    known = tuple(queues), tuple(accounts), tuple(unknown)
    return SiteFound(tuple(differences), tuple(unasked), *known, modules)


def survey_site(site: Site, env: Mapping[str, str]) -> list[QueueFound]:
    """The scheduler's queues. SchedulerError if it does not answer."""
    commands = find_scheduler(site.scheduler).commands
    missing = next((command[0] for command in commands.survey if not on_path(command[0], env)), None)
    if missing is not None:
        raise SchedulerError(
            f"there is no {missing} here to ask", f"on a login node of {site.name}: hpcddp sites check"
        )
    return ask_queues(site.scheduler, env, _PATIENCE_S)


def ask_accounts(site: Site, env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Which accounts the user may charge, as far as the scheduler says it, and why they could not be asked."""
    command = find_scheduler(site.scheduler).commands.accounts
    if not command:
        return [], ["hpcddp knows no command that lists them here"] if site.account.required else []
    try:
        user = env.get("USER") or env.get("LOGNAME") or str(os.getuid())
        answer = run_program([word.replace("{user}", user) for word in command], env, patience_s=_PATIENCE_S)
    except SchedulerError as error:
        return [], [error.message]
    names = sorted({line.strip().strip("|") for line in answer.stdout.splitlines() if line.strip()})
    if answer.status or not names:
        return [], [f"{command[0]} does not say which ones are yours"]
    return names, []
