"""Which site: what the user said, else what the machine shows. Every choice comes with the reason for it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from hpcddp.errors import SiteError, nearest
from hpcddp.record import Record
from hpcddp.schedulers.registry import scripted_schedulers, submit_commands
from hpcddp.script.folders import find_folder
from hpcddp.script.loading import load_text, load_yaml, parse_yaml
from hpcddp.script.site import Site
from hpcddp.script.site_file import load_site


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
        if _is_there(path, folder):
            return path
    return ""


def overlay_of(name: str, env: Mapping[str, str]) -> str:
    """The file with the user's own corrections of this site; "" if there is none."""
    folder = config_folder(env)
    path = os.path.join(folder, "overlays", f"{name}.yaml")
    return path if _is_there(path, folder) else ""


def asked_site(option: str | None, in_job_file: str | None, job_file: str, env: Mapping[str, str]) -> SiteChoice | None:
    """What somebody said: --site, $HPCDDP_SITE, the job file, the user's config.yaml; None when nobody did."""
    if option:
        return SiteChoice(option, "--site")
    if env.get("HPCDDP_SITE"):
        return SiteChoice(env["HPCDDP_SITE"], "$HPCDDP_SITE")
    if in_job_file:
        return SiteChoice(in_job_file, f"site in {job_file}")
    config = find_config("config.yaml", env)
    if not config:
        return None
    asked, _ = load_yaml(config, SiteError)
    unknown = next((key for key in asked if key != "site"), None)
    if unknown is not None:
        what = f"unknown key {unknown!r} in {config}{nearest(unknown, ['site'])}"
        raise SiteError(what, "its only key is site: NAME")
    site = asked.get("site")
    if site is not None and (not site or not isinstance(site, str)):
        raise SiteError(f"site in {config} has no value", "site: NAME, or leave it out")
    return SiteChoice(site, f"site in {config}") if site else None


def _is_there(path: str, folder: str) -> bool:
    """Whether `folder` of configurations has it. SiteError where that cannot be seen: a choice would be ignored."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        if not os.path.lexists(folder):  # HOME is somebody else's
            return False
        raise SiteError(f"{path} cannot be read: {e.strerror}", f"check the folders above it: namei -l {path}") from e
    return True


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
    others: list[str] = []
    for program, row in submit_commands():
        version = row.commands.version
        if not on_path(program):
            others.append(f"there is no {program}")
        elif not version:
            return SiteChoice(row.generic_site, f"{program} is on PATH")
        elif version in version_of(program):
            return SiteChoice(row.generic_site, f"{program} is on PATH and says that it is {row.title}")
        else:
            others.append(f"the {program} on PATH is not {row.title}'s")
    here = next(row for row in scripted_schedulers() if row.this_machine)
    return SiteChoice(here.generic_site, " and ".join(others))


def site_files(env: Mapping[str, str]) -> dict[str, str]:
    """Name -> path of every known profile, sorted; the user's own win over the centre's, and those over the shipped."""
    found: dict[str, str] = {}
    own = [os.path.join(folder, "sites") for folder in config_folders(env)[::-1]]
    there = [folder for folder in own if _is_there(folder, os.path.dirname(folder))]
    for folder in (os.path.join(find_folder("templates"), "sites"), *there):
        try:
            files = os.listdir(folder)
        except OSError as e:
            raise SiteError(f"{folder} cannot be read: {e.strerror}", f"ls -ld {folder}") from e
        for file in files:
            if file.endswith(".yaml") and os.path.isfile(os.path.join(folder, file)):
                found[file.removesuffix(".yaml")] = os.path.join(folder, file)
    return dict(sorted(found.items()))


def is_path(named: str) -> bool:
    """Whether a site is given as its file, of which there is no overlay."""
    return "/" in named or named.endswith((".yaml", ".yml"))


def open_site(choice: SiteChoice, env: Mapping[str, str]) -> Site:
    """The chosen profile: a path (it has a `/` or ends in .yaml), else a name. Raises SiteError when there is none."""
    named = choice.site
    if is_path(named):
        return load_site(os.path.splitext(os.path.basename(named))[0], named)
    own = find_config(os.path.join("sites", f"{named}.yaml"), env)
    shipped = os.path.join(find_folder("templates"), "sites", f"{named}.yaml")
    if own:
        return load_site(named, own, overlay_of(named, env))
    if os.path.isfile(shipped):
        return load_site(named, shipped, overlay_of(named, env))
    known = list(site_files(env))
    raise SiteError(
        f"site {named!r} is not known ({choice.reason}){nearest(named, known)}",
        f"known sites: {', '.join(known)}; or give a file: --site ./my.yaml",
    )
