"""What qsub and its server take behind `-l`: sizes, times, select, place, nodes, and which of them go together.

After OpenPBS 23.06: master_resc_def_all.xml, attr_fn_*.c, resc_attr.c, node_manager.c, vnparse.c (do_schedselect).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence

from hpcddp.lint.directive import Option, Refusal
from hpcddp.lint.pbs_lists import Pairs, split_select
from hpcddp.lint.pbs_values import ON_TORQUE, ValueRule, matches
from hpcddp.schedulers.pbs import OF_CHUNK

_TIME = ValueRule(
    matches(r"(\d{1,18}(:\d{1,18}){0,2}(\.\d*)?|\d{1,18}(:\d{1,18})?:)?"),
    "SECONDS or [HOURS:]MINUTES:SECONDS",
    "1:00:00",
)
_SIZE = ValueRule(matches(r"(\d+[kmgtpKMGTP]?[bwBW]?)?"), "a whole number with b, kb, mb, gb, tb or pb", "4gb")
_COUNT = ValueRule(matches(r"\+?\d+"), "a whole number, 0 or more", "4")
_NUMBER = ValueRule(matches(r"[+-]?\d*"), "a whole number", "0")

_TYPES = {
    **dict.fromkeys(("cput", "walltime", "min_walltime", "max_walltime", "pcput"), _TIME),
    **dict.fromkeys(("mem", "vmem", "pmem", "pvmem", "file", "hbmem", "accelerator_memory"), _SIZE),
    **dict.fromkeys(("ncpus", "mpiprocs", "ompthreads"), _COUNT),
    **dict.fromkeys(("nice", "hpm", "ssinodes", "naccelerators", "ngpus"), _NUMBER),
}
_OF_CHUNK = {*OF_CHUNK} - {"ngpus"}  # which sites with GPUs add
# Of a job; in a select they are refused.
_OF_JOB = {"cput", "walltime", "min_walltime", "max_walltime", "pcput", "pmem", "pvmem", "file", "nice", "hpm",
           "ssinodes", "select", "place", "nodes", "resc", "software", "site", "preempt_targets", "pstate", "pgov",
           "pcap_node", "pcap_accelerator"}  # fmt: skip
_NOT_FOR_USERS = {"soft_walltime", "nodect", "nchunk", "cpupercent", "energy", "nodemask", "exec_vnode", "start_time",
                  "pe_mask", "partition"}  # fmt: skip
_KNOWN = _OF_CHUNK | _OF_JOB | _NOT_FOR_USERS
# Words of other schedulers, with PBS's.
_FOREIGN = {"ppn": "ncpus and mpiprocs", "procs": "select=…:mpiprocs", "mppwidth": "select=…:mpiprocs",
            "mppnppn": "mpiprocs", "mppdepth": "ompthreads", "tpn": "mpiprocs", "nprocs": "mpiprocs",
            "ntasks": "mpiprocs", "gpus": "ngpus", "gpu": "ngpus", "ngpu": "ngpus", "cpus": "ncpus", "cores": "ncpus",
            "threads": "ompthreads", "memory": "mem", "time": "walltime", "h_rt": "walltime"}  # fmt: skip
# Names that sites are known to add; see templates/sites.
_ADDED = {"bigmem", "cluster", "cpu_model", "cpu_type", "cputype", "debug", "feature", "features", "filesystems",
          "gpu_mem", "gpu_model", "gpu_type", "gputype", "interconnect", "jobfs", "job_priority", "model", "ngpus",
          "os", "scratch", "scratch_local", "scratch_shm", "scratch_ssd", "singularity_fakeroot", "storage", "system",
          "wd"}  # fmt: skip
_PLACES = ({"free", "pack", "scatter", "vscatter"}, {"excl", "exclhost", "shared"})


def refused_resources(options: Sequence[Option]) -> Iterator[Refusal]:
    """Every `-l` that is refused. Of several with one name, qsub drops all but the first before it looks."""
    first: dict[str, Option] = {}
    for option in options:
        if option.name.startswith("-l "):
            first.setdefault(option.name[3:], option)
    for name, option in first.items():
        lower = name.lower()
        if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
            yield _refusal(option, f"{name!r} is no name of a resource", "#PBS -l NAME=VALUE, without blanks")
        elif lower in _NOT_FOR_USERS:
            yield _refusal(option, f"users may not set {name}", "leave it out")
        elif lower == "select":
            yield from _refused_select(option)
        elif lower == "place":
            yield from _refused_place(option)
        elif lower == "nodes":
            yield from _refused_nodes(option, first.get("ncpus"))
        else:
            yield from _refused_value(option, name, option.value)
    yield from _refused_beside_select({name.lower(): option for name, option in first.items()})


def foreign_names(options: Sequence[Option], added: Collection[str]) -> Iterator[Refusal]:
    """Names of another scheduler, and misspelt ones. `added`: names that the site has added."""
    for option, name in _names(options, added):
        if right := _meant(name):
            instead = f"{right}; {ON_TORQUE}"
            yield _refusal(option, f"PBS has no resource {name}", instead)


def unknown_names(options: Sequence[Option], added: Collection[str]) -> Iterator[Refusal]:
    """Other names that PBS does not have of its own: refused unless the site has added them."""
    for option, name in _names(options, added):
        if not _meant(name):
            what = f"PBS has no resource {name} of its own: qsub refuses it unless this site has added it"
            yield _refusal(option, what, "a name from the site's guide: hpcddp sites show NAME")


def _names(options: Sequence[Option], added: Collection[str]) -> Iterator[tuple[Option, str]]:
    """Every name of a resource that PBS does not have, and that no known site and not this one has added."""
    for option in options:
        if option.name.startswith("-l "):
            names = [option.name[3:]]
            if names == ["select"]:
                names = [name for _, chunk in split_select(option.value) for name, _ in chunk]
            elif names == ["nodes"]:  # each word is a resource that has to be true
                names = [word for _, _, words in _node_parts(option.value) for word in words if "=" not in word]
            for name in dict.fromkeys(names):
                valid = re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII)
                if valid and name not in added and name.lower() not in _KNOWN | _ADDED:
                    yield option, name


def is_time(value: str) -> bool:
    """Whether PBS reads it as a time."""
    return bool(_TIME.fits(value))


def _refused_value(option: Option, name: str, value: str) -> Iterator[Refusal]:
    rule = _TYPES.get(name.lower())
    if rule and name != "walltime" and not rule.fits(value):  # a walltime has a rule of its own, M33
        where = "-l " if name == option.name[3:] else "in -l select, "
        yield Refusal(option.line, f"{where}{name}={value}: {name} takes {rule.words}", f"{name}={rule.example}")


def _meant(name: str) -> str:
    """PBS's name for a word of another scheduler, or for a misspelt one; "" where the site may have added it."""
    near = difflib.get_close_matches(name.lower(), sorted(_KNOWN | {"ngpus"}), 1, cutoff=0.85)
    return _FOREIGN.get(name.lower()) or next(iter(near), "")


def _refused_select(option: Option) -> Iterator[Refusal]:
    found = split_select(option.value)
    if not found:
        form = "select is N:NAME=VALUE:NAME=VALUE, several chunks with +, without blanks"
        yield _refusal(option, form, "select=2:ncpus=8:mpiprocs=4")
    elif sum(count for count, _ in found) == 0:
        yield _refusal(option, "no chunk is asked for", "select=1")
    for _, resources in found:
        yield from _refused_chunk(option, resources)


def _refused_chunk(option: Option, resources: Pairs) -> Iterator[Refusal]:
    names = [name for name, _ in resources]
    for at, (name, value) in enumerate(resources):
        lower = name.lower()
        if name in names[:at]:
            yield _refusal(option, f"{name} stands twice in a chunk", f"one {name} in each chunk")
        elif lower in _OF_JOB or lower in _NOT_FOR_USERS:
            yield _refusal(option, f"{name} is the job's, not a chunk's", f"#PBS -l {name}={value}")
        elif not value and lower in _TYPES:
            yield _refusal(option, f"{name} has no value", f"{name}={_TYPES[lower].example}")
        else:
            yield from _refused_value(option, name, value.strip("'\""))


def _refused_place(option: Option) -> Iterator[Refusal]:
    left = list(_PLACES)
    for word in option.value.split(":"):
        kind = next((words for words in left if word.strip().lower() in words), None)
        if kind:
            left.remove(kind)
        elif not re.fullmatch(r"\s*group=[\w-]+", word, re.ASCII | re.IGNORECASE):
            words = "one of free, pack, scatter, vscatter; one of excl, exclhost, shared; group=NAME"
            yield _refusal(option, f"place takes {words}, with colons", "#PBS -l place=scatter:excl")
            return


def _refused_nodes(option: Option, ncpus: Option | None) -> Iterator[Refusal]:
    """nodes=N:ppn=P or nodes=HOST:ppn=P, several with +; Torque's other words are refused."""
    total, exact = 0, False
    for word in option.value.split("#")[1:]:
        if not re.fullmatch(r"[A-Za-z][\w.=-]*|\d+[A-Za-z0-9]*", word, re.ASCII):
            yield _refusal(option, f"{word!r} behind # is no word", "#excl or #shared")
            return
    for count, host, words in _node_parts(option.value):
        factors = {"ppn": 1, "cpp": 1}
        for word in host + words:
            key, equals, number = word.lower().partition("=")
            good = r"ppn=0*[1-9]\d{0,8}|(cpp|ncpus)=\d{1,9}" if equals else r"[A-Za-z][\w.-]*|\d+[A-Za-z][A-Za-z0-9]*"
            if not re.fullmatch(good, word, re.ASCII | re.IGNORECASE):
                instead = f"select=N:ncpus=…:mpiprocs=P:ngpus=…; {ON_TORQUE}"
                yield _refusal(option, f"{word!r}: nodes takes N or a host, and ppn=P", instead)
                return
            if equals:
                factors["ppn" if key == "ppn" else "cpp"] = int(number)
                exact = exact or key != "ppn"
        total += count * factors["ppn"] * factors["cpp"]
    if ncpus and total and re.fullmatch(r"\d{1,18}", ncpus.value, re.ASCII):
        asked = int(ncpus.value)
        if asked % total or (exact and asked != total):
            yield _refusal(ncpus, f"{option.text} has {total} CPUs, and ncpus has to be a multiple", "leave out ncpus")


def _node_parts(nodes: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """Each part of `nodes=2:ppn=4+HOST:ppn=2`: how many, the host in its place, and the words behind."""
    for part in nodes.partition("#")[0].split("+") if nodes else ():
        count, *words = part.strip().split(":")
        number = re.fullmatch(r"0*([1-9]\d{0,8})", count, re.ASCII)
        yield (int(number[1]), [], words) if number else (1, [count], words)


def _refused_beside_select(first: dict[str, Option]) -> Iterator[Refusal]:
    """select and place against what a select has within itself, and against nodes."""
    owner = first.get("select") or first.get("place")
    if owner is None:
        return
    inside = [option for name, option in first.items() if name in _OF_CHUNK | {"ngpus"} and option.value]
    for option in inside:
        name = option.name[3:]
        yield _refusal(option, f"{name} may not stand beside {owner.name}", f"select=N:…:{name}={option.value}")
    if "nodes" in first and first["nodes"].value:
        yield _refusal(first["nodes"], f"nodes may not stand beside {owner.name}", "select alone")
    elif "select" not in first and not inside:
        yield _refusal(owner, "place needs a select", "#PBS -l select=… -l place=…")


def _refusal(option: Option, what: str, instead: str) -> Refusal:
    return Refusal(option.line, f"{option.text}: {what}", instead)
