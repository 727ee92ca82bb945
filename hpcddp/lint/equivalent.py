"""The `hpcddp render` line for the job of a script that is there already, and what of the script is not in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from hpcddp.errors import HpcddpError, RequestError
from hpcddp.lint.directives import Option, chunks, numbered
from hpcddp.lint.launches import ADDRESS, Program, find_program
from hpcddp.lint.request import Request, count_gpus, read_seconds
from hpcddp.lint.script import Script, read_script
from hpcddp.record import Record
from hpcddp.runs.command import nearest_name
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.jobplan import WARNING, JobPlan, PlannedBy
from hpcddp.script.plan import list_missing, plan_job
from hpcddp.script.render import render_script
from hpcddp.script.site import Queue, Site
from hpcddp.script.site_file import load_site, load_text
from hpcddp.script.spec import quote_words, read_spec
from hpcddp.units import format_walltime, parse_walltime

# Keys of a job file that have an option of their own, in the line's order; the others are --set KEY=VALUE.
_OPTIONS = {"nodes": "--nodes", "ranks_per_node": "--ranks-per-node", "gpus_per_node": "--gpus-per-node",
            "cpus_per_rank": "--cpus-per-rank", "walltime": "--walltime", "queue": "--queue", "account": "--account",
            "launcher": "--launcher", "name": "--name"}  # fmt: skip
_KEYS = {option: key for key, option in _OPTIONS.items()}
# Directives for what every script of hpcddp's does.
_USUAL = {("--no-requeue", ""), ("--export", "ALL"), ("-r", "n"), ("-j", "oe"), ("-j", "eo"), ("-j", "y"), ("-cwd", "")}
# Directives whose numbers are compared, whatever their words are.
_COMPARED = {"--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--cpus-per-gpu", "--gpus-per-node",
             "--gpus", "--gpus-per-task", "--ntasks-per-gpu", "--time", "-l select", "-l nodes", "-l walltime",
             "-l h_rt", "-l ncpus", "-l ngpus", "-l mem"}  # fmt: skip
_ACCOUNTS = {"-P", "-A", "-W group_list", "-g"}
_SET_UP = {"module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack"}
_OF_CHUNK = {"ncpus", "mpiprocs", "ngpus", "mem", "ompthreads"}
# Keys of a job file whose option may stand there as a directive, too.
_AS_DIRECTIVES = {"mail", "mail_to", "dependency", "hold", "mem_gb", "chain"}
# Queues that many clusters have: that one known site has such a queue says nothing about another's script.
_COMMON = {"ai", "batch", "booster", "debug", "dev", "develop", "extended", "gpu", "gpus", "h100", "a100", "v100",
           "low", "long", "main", "normal", "preempt", "prod", "regular", "short", "standard", "workq"}  # fmt: skip


class SameJob(Record):
    """A line that `hpcddp render` takes ("": the script starts no program), those of its options whose values are
    examples, and what of the script is not in it. `queue`: the script's, by which the site was found."""

    line: str = ""
    examples: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    site: str = ""
    queue: str = ""


class Setting(NamedTuple):
    """A key of a job file, its value, and the script's directive that says it."""

    key: str
    value: str
    option: Option | None = None

    @property
    def text(self) -> str:
        """The script's own words, else the line's."""
        return self.option.text if self.option else " ".join(_typed([self]))


def same_job_where_the_queue_is(script: Script, files: Mapping[str, str]) -> SameJob | None:
    """The line for the one of these sites that has the script's queue. None if several have it, or many other
    clusters."""
    site = _site_of_queue(script, files)
    same = same_job(script, site) if site else SameJob()
    return same._replace(queue=_queue(script, site)) if site and same.line else None


def _site_of_queue(script: Script, files: Mapping[str, str]) -> Site | None:
    words = {o.value for o in script.directives.options} | {o.name[3:] for o in script.directives.options}
    names = "|".join(re.escape(word) for word in words - _COMMON if re.fullmatch(r"[\w-]+", word))
    if not names:
        return None
    found = []
    for name, path in files.items():
        text = load_text(path, HpcddpError)  # a whole profile takes longer to read
        has_it = re.search(rf"^\s+({names}):", text, re.MULTILINE)
        if has_it and re.search(rf"^scheduler: {script.scheduler}\b", text, re.MULTILINE):
            site = load_site(name, path)
            found += [site] if _queue(script, site) in site.queues else []
    return found[0] if len(found) == 1 else None


def same_job(script: Script, site: Site) -> SameJob:
    """The line, with an example for what neither the script nor the site says; what it leaves out is listed."""
    script = replace(script, commands=tuple(c for c in script.commands if not c.document))
    program = find_program(script.commands, script.launches, script.values, script.request_on(site))
    if not program.words:
        return SameJob()
    settings = _convert(script, program, site)
    wanted, left_out, timed = tuple(settings), [], script.request.walltime is not None
    while True:
        examples = _examples(settings, site, timed)
        why = _refusal([*settings, *examples], program.words, site)
        if not why:
            break
        if not settings:
            return SameJob()
        without = {}
        for one in settings:
            rest = [other for other in settings if other != one]
            without[one] = _refusal([*rest, *_examples(rest, site, timed)], program.words, site)
        dropped = min(settings, key=lambda one: (without[one] != "", without[one] == why))
        settings.remove(dropped)
        left_out.append(f"{dropped.text} ({why})")
    plan = _plan([*settings, *examples], program.words, site)
    rendered = read_script(render_script(plan), site, lambda _: True)
    dropped_keys = {one.key for one in wanted if one not in settings} | {one.key for one in examples}
    dropped_keys |= {"mem_gb"} & {one.key for one in settings}  # per node on every site
    left_out += _differing_numbers(script, rendered, program, plan, dropped_keys)
    left_out += _missing_options(script, rendered, {one.option for one in wanted if one not in settings})
    left_out += ["the job's other components (hetjob)"] if "hetjob" in script.directives.other_words else []
    left_out += _set_up(script)
    words = ["hpcddp", "render", "--site", site.name, *_typed(settings), *_typed(examples), "--", *program.words]
    shown = (*(" ".join(_typed([example])) for example in examples), *program.unknown)
    return SameJob(quote_words(words), shown, tuple(dict.fromkeys([*left_out, *program.left_out])), site.name)


def _set_up(script: Script) -> list[str]:
    """The script's commands that change what the program finds: modules, environments, variables."""
    commands = [c for c in script.commands if not (c.launched or c.captured or c.function)]
    found = [c.text for c in commands if c.program in _SET_UP]
    names = [name for c in commands if c.program == "export" for name, _ in c.sets if name not in ADDRESS]
    found += [f"export {' '.join(dict.fromkeys(names))}"] if names else []
    return ["; ".join(dict.fromkeys(found))] if found else []


def _typed(settings: Iterable[Setting]) -> list[str]:
    """Options of `hpcddp render`; all directives are one list."""
    listed = list(settings)
    typed = [
        word for key, option in _OPTIONS.items() for one in listed if one.key == key for word in (option, one.value)
    ]
    sets = [f"{one.key}={one.value}" for one in listed if one.key not in _OPTIONS and one.key != "directives"]
    directives = quote_words([one.value for one in listed if one.key == "directives"])
    sets += [f"directives={directives}"] if directives else []
    return [*typed, *(word for item in sets for word in ("--set", item))]


def _plan(settings: list[Setting], command: tuple[str, ...], site: Site) -> JobPlan:
    keys: dict[str, tuple[object, str]] = {"command": (list(command), "the command")}
    for key, value, _ in settings:
        keys[key] = (value, _OPTIONS.get(key, f"--set {key}"))
    directives = [one.value for one in settings if one.key == "directives"]
    if directives:
        keys["directives"] = (directives, "--set directives")
    return plan_job(read_spec(keys, site.vars), site, PlannedBy("/usr/bin/python3", "", ""))


def _refusal(settings: list[Setting], command: tuple[str, ...], site: Site) -> str:
    """Why `hpcddp render` would not take them; "" if it would."""
    try:
        render_script(_plan(settings, command, site))
    except HpcddpError as e:
        return e.message
    return ""


def _examples(settings: list[Setting], site: Site, timed: bool) -> list[Setting]:
    """What is still missing, with values that render; a walltime also where the script asks for one (`timed`)."""
    given = {one.key for one in settings}
    given |= {"cpus_per_rank"} if "cpus_per_node" in given else set()
    keys = {one.key: (one.value, _OPTIONS[one.key]) for one in settings if one.key == "queue"}
    missing = list_missing(read_spec(keys, site.vars), site, find_scheduler(site.scheduler).this_machine)
    found = dict(
        (m.example if m.option == "--set" else f"{_KEYS[m.option]}={m.example}").split("=", 1) for m in missing
    )
    found |= {"walltime": "1:00:00"} if timed else {}
    return [Setting(key, value) for key, value in found.items() if key not in given]


def _convert(script: Script, program: Program, site: Site) -> list[Setting]:
    """The script's request in the words of a job file."""
    request = _normal(script, site)
    gpus = site.queues.get(_queue(script, site) or site.queue, Queue()).gpus
    gpus = gpus if request.gpus_per_node is None else request.gpus_per_node
    ranks = program.ranks_per_node or request.slots
    usual = max(gpus, 1) if gpus is not None else None  # one for each GPU
    numbers: dict[str, int | None] = {"nodes": request.nodes, "gpus_per_node": request.gpus_per_node}
    numbers["ranks_per_node"] = ranks if ranks != usual else None
    each, left = divmod(request.cpus_per_node or 0, ranks or usual or 1)
    whole = left or (ranks or usual) is None
    numbers["cpus_per_node" if whole else "cpus_per_rank"] = request.cpus_per_node if whole else each or None
    texts = {"walltime": request.walltime and _walltime(request.walltime, script.scheduler)}
    words = _chunk_words(script, site)
    texts |= {"queue": _queue(script, site), "gpu_type": request.gpu_type}
    texts |= {"gpu_type": ""} if any(word.endswith(request.gpu_type) for _, word in words) else {}
    texts |= {"account": request.account and request.account.value}
    numbers["mem_gb"] = _whole_gb(request) if script.scheduler == "pbs" else None
    found = [Setting(key, str(number)) for key, number in numbers.items() if number is not None]
    found += [Setting(key, word) for key, word in words]
    found += [Setting(key, text) for key, text in texts.items() if text]
    return found + [setting for option in _further(script, site) for setting in _settings(option, script, site)]


def _normal(script: Script, site: Site) -> Request:
    """The request with what the scheduler adds: a number of nodes for so many tasks, one task where none is named."""
    request = script.request_on(site)
    if request.nodes is None and request.ranks and script.scheduler == "slurm":
        each = script.directives.get("--gpus-per-task")
        total, threads = script.directives.get("--gpus"), request.cpus_per_task
        gpus = count_gpus(total.value)[1] if total else each and (count_gpus(each.value)[1] or 0) * request.ranks
        request = request._replace(nodes=1, slots=request.ranks, cpus_per_node=threads and threads * request.ranks)
        request = request._replace(gpus_per_node=request.gpus_per_node if gpus is None else gpus)
    if request.size and request.size.name == "-l nodes":  # Torque's processes are its CPUs
        request = request._replace(cpus_per_node=request.slots, slots=None if request.gpus_per_node else request.slots)
    if request.slots is None and script.scheduler == "slurm" and request.size:
        request = request._replace(slots=1, cpus_per_node=request.cpus_per_node or request.cpus_per_task)
    if request.cpus_per_node is None and request.cpus_per_task:
        request = request._replace(cpus_per_node=request.cpus_per_task * (request.slots or 1))
    return request


def _further(script: Script, site: Site) -> list[Option]:
    """The directives beside size, time, queue and account."""
    taken = {*_COMPARED, site.queue_option or "", "-q" if script.scheduler != "slurm" else "--partition"}
    taken |= {"--gpus-per-socket", "--sockets-per-node"}  # their product is the line's
    taken |= {"--account", *_ACCOUNTS, *({"--qos"} if _is_queue(script, site) else ())}
    size = script.request.size.name if script.request.size else ""
    found = [o for o in script.directives.options if o.name not in taken and o.name != size]
    return [o for o in found if (o.name, o.value) not in _USUAL]


def _settings(option: Option, script: Script, site: Site) -> list[Setting]:
    """One directive as a key of a job file, of the site, or as it stands."""
    name, value, _ = option
    row = find_scheduler(script.scheduler).directives
    keys = {of: key for key, of in row.options.items() if key not in {"array_limit", "chain"}}
    key = "requeue" if (name, value) == ("-r", "y") else keys.get(name, "")
    key = "array" if name == "-t" and script.directives.torque else key
    for word, variable in site.vars.items():
        if variable.directive and (
            found := re.fullmatch(re.escape(variable.directive).replace(r"\{\}", "(.+)"), _line(option))
        ):
            return [Setting(word, found[1], option)]
    if name == "--gres":
        others = ",".join(word for word in value.split(",") if word.partition(":")[0] != "gpu")
        return [Setting("directives", f"--gres={others}", option)] if others else []
    if name in {"--job-name", "-N"}:
        return [Setting("name", nearest_name(value), option)]
    if name == "-l place":
        return [Setting("exclusive", "true", option)] if "excl" in value.split(":") else []
    if key == "array":
        first, _, limit = value.partition("%")
        return [Setting("array", first, option), *([Setting("array_limit", limit, option)] if limit else [])]
    if key in {"exclusive", "requeue"}:
        return [Setting(key, "true", option)] if value in {"", "y"} else []
    if key == "mem_gb" and (memory := _whole_gb(script.request)):
        return [Setting("mem_gb", str(memory), option)]
    if key == "signal":
        warns = re.fullmatch(rf"(?:SIG)?{WARNING}@(\d+)", value)
        return [Setting("signal", f"{warns[1]}s", option)] if warns else []
    if key == "constraint" and site.constraint:
        more = value.removeprefix(site.constraint).removeprefix("&")
        return [Setting(key, more, option)] if more else []
    if name.startswith("-pe "):
        return [Setting("pe", name[4:], option)] if "pe" in site.vars else []
    if key in {"constraint", "reservation", "output"}:
        return [Setting(key, value, option)]
    if key and key not in _AS_DIRECTIVES:
        return []
    return [Setting("directives", _line(option), option)]


def _line(option: Option) -> str:
    """A directive without its prefix: `--exclude=node3`, `-m abe`, `-l jobfs=1GB`."""
    if option.name.startswith("--"):
        return f"{option.name}={option.value}" if option.value else option.name
    return f"{option.name}={option.value}" if " " in option.name else f"{option.name} {option.value}".strip()


def _differing_numbers(script: Script, rendered: Script, program: Program, plan: JobPlan, named: set[str]) -> list[str]:
    """The numbers of the request that are others in the rendered script. `named`: the keys that are listed already."""
    before, after = _normal(script, plan.site), _normal(rendered, plan.site)
    was, will = (read_seconds(r.walltime.value, script.scheduler) if r.walltime else None for r in (before, after))
    payer, other = (r.account.text if r.account else None for r in (before, after))
    said = script.values.get("OMP_NUM_THREADS") or _chunk(script).get("ompthreads") or ""
    threads = f"OMP_NUM_THREADS={said}" if said.isdecimal() and int(said) != plan.threads_per_rank else None
    rows: list[tuple[str, str, object, object]] = [
        ("account", "", payer, other),
        ("nodes", "nodes", before.nodes, plan.nodes),
        ("", "ranks in all", program.ranks, plan.nodes * plan.ranks_per_node),
        ("ranks_per_node", "ranks per node", program.ranks_per_node or before.slots, plan.ranks_per_node),
        ("cpus_per_rank", "CPUs per node", before.cpus_per_node, after.cpus_per_node),
        ("gpus_per_node", "GPUs per node", before.gpus_per_node, after.gpus_per_node),
        ("mem_gb", "MB of memory per node", before.mem_mb, after.mem_mb),
        ("walltime", "seconds of run time", was, will),
        ("", "", threads, plan.threads_per_rank),
        ("gpu_type", "GPUs", before.gpu_type or None, after.gpu_type or None),
    ]
    found = []
    for key, what, old, new in rows:
        if old is not None and old != new and key not in named:
            found.append(f"{old} {what}".strip() + (f" (the line: {new})" if new is not None else ""))
    if before.ranks and before.ranks > 1 and script.request_on(plan.site).nodes is None:
        chosen = f"the number of nodes, which the scheduler chooses for {before.ranks} slots"
        found.append(f"{chosen} (the line: {plan.nodes})")
    if not before.one_size and before.size:
        found.append(f"{before.size.text} (nodes that differ)")
    if before.walltime and was is None and not _walltime(before.walltime, script.scheduler):
        found.append(before.walltime.text)
    return found + [option.text for option in _uneven(script)]


def _uneven(script: Script) -> Iterator[Option]:
    """Numbers of the whole job that are not the same on each node, and a number of nodes that is a range."""
    request = script.request
    for option in script.directives.options:
        spread = option.name == "--ntasks" and request.nodes and request.slots is None
        spread = spread or (option.name == "--gpus" and request.nodes and request.gpus_per_node is None)
        if spread or (option.name == "--nodes" and not option.value.isdecimal()):
            yield option


def _missing_options(script: Script, rendered: Script, named: set[Option | None]) -> list[str]:
    """The directives that the rendered script does not have."""
    there = {(option.name, option.value) for option in rendered.directives.options}
    there |= {(name, f"SIG{value}") for name, value in there if name == "--signal"}
    compared = {*_COMPARED, *({"--mem"} if script.request.mem_mb else ())}
    found = []
    unread = [line.strip() for n, line in numbered(script.text) if n in {r.line for r in script.directives.refusals}]
    found += [line for line in unread if line.startswith("#") and not line.startswith("#!")]
    for option in script.directives.options:
        same = option == script.request.account or (option.name, option.value) in {*_USUAL, *there, ("-r", "y")}
        same = same or _has_place(option, rendered)
        text = ",".join(word for word in option.value.split(",") if word.partition(":")[0] != "gpu")
        same = same or (option.name == "--gres" and (not text or ("--gres", text) in there))
        counts = script.directives.get(option.name) == option
        size = option.name == "-l nodes" and option != script.request.size
        if (size or option.name not in compared) and counts and not same and option not in named:
            found.append(option.text)
    here = _chunk(rendered)
    found += [
        f"{name}={value}" for name, value in _chunk(script).items() if name not in _OF_CHUNK and here.get(name) != value
    ]
    return found


def _has_place(option: Option, rendered: Script) -> bool:
    """Whether a place of PBS is the rendered script's, by its words in any order."""
    place = rendered.directives.get("-l place")
    return place is not None and option.name == place.name and {*option.value.split(":")} == {*place.value.split(":")}


def _chunk(script: Script) -> dict[str, str]:
    select = script.directives.get("-l select")
    parts = chunks(select.value) if select else []
    return parts[0][1] if parts else {}


def _chunk_words(script: Script, site: Site) -> list[tuple[str, str]]:
    """What a chunk of PBS names beside its size, in the words of the site, else as a constraint."""
    found = []
    for name, value in _chunk(script).items():
        if name in _OF_CHUNK:
            continue
        keys = [key for key, v in site.vars.items() if v.chunk and v.chunk.partition("=")[0] == name]
        found.append((keys[0], value) if keys else ("constraint", f"{name}={value}"))
    return list(dict(reversed(found)).items())


def _whole_gb(request: Request) -> int | None:
    return request.mem_mb // 1024 if request.mem_mb and request.mem_mb % 1024 == 0 else None


def _queue(script: Script, site: Site) -> str:
    """The queue that the script says, in the site's way of saying it; "" where it says none."""
    if site.queue_option == "none":
        return ""
    if script.scheduler == "gridengine" and script.request.size and script.request.size.name[3:] in site.queues:
        return script.request.size.name[3:]  # a resource type
    return script.named_queue(site)


def _is_queue(script: Script, site: Site) -> bool:
    """Whether the script's QOS is the site's queue."""
    qos = script.directives.get("--qos")
    return qos is not None and qos.value == _queue(script, site)


def _walltime(option: Option, scheduler: str) -> str:
    """`H:M:S` of a run time, also of one such as `24h`, which no scheduler reads; "" if hpcddp cannot read it."""
    seconds = read_seconds(option.value, scheduler)
    try:
        return format_walltime(parse_walltime(option.value) if seconds is None else seconds) if seconds != 0 else ""
    except RequestError:
        return ""
