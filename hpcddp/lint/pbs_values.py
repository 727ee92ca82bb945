"""What qsub and its server take as the value of an option, and what they refuse with the whole script.

After OpenPBS 23.06: qsub.c (process_opts), ecl_verify_values.c, and the parsers of Libcmds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hpcddp.lint.directives import ON_TORQUE, Option, Pairs, Refusal, split_select
from hpcddp.schedulers.pbs import OF_CHUNK


class ValueRule(NamedTuple):
    """What an option takes: a test of its value, the rule in words, and a value that is taken."""

    fits: Callable[[str], object]
    words: str
    example: str


def matches(pattern: str) -> Callable[[str], object]:
    """A test for the whole of a value. Blanks in front do not count: qsub skips them."""
    return re.compile(rf"\s*(?:{pattern})", re.ASCII).fullmatch


def _is_priority(value: str) -> bool:
    return bool(re.fullmatch(r"\s*[+-]?\d{1,9}", value, re.ASCII)) and -1024 <= int(value) <= 1023


def _is_keep_files(value: str) -> bool:
    files, none = {*value} & {"o", "e"}, "n" in value
    return {*value} <= set("oedn") and bool(files) != none


def _is_range(value: str) -> bool:
    found = re.fullmatch(r"(\d{1,18})-(\d{1,18})(:0*[1-9]\d*)?(%\d+)?", value, re.ASCII)
    return found is not None and int(found[1]) < int(found[2])


def _is_path(value: str) -> bool:
    """A colon behind a slash belongs to the path."""
    host, colon, _ = value.strip().partition(":")
    plain = value.isprintable() and value.isascii() and bool(value.strip())
    return plain and (not colon or bool(re.fullmatch(r"[A-Za-z0-9.-]*(/.*)?", host)))


def _is_dependency(value: str) -> bool:
    """A job is its number; of an array with []; with .SERVER and @SERVER."""
    server = r"[!-\"$-9;-?A-~]+"
    job = rf":[RSM]?\d{{1,12}}(\[\])?(\.{server})?(@{server})?"
    kinds = rf"((after|before)(ok|notok|any)?|syncwith|runone)({job})+:?|(on|synccount)(:[^:]+)+:?"
    return all(re.fullmatch(kinds, item.strip(), re.ASCII) for item in value.split(","))


_PATH = ValueRule(_is_path, "[HOST:]PATH in printable ASCII letters", "job.log")

# Of the options that stand in people's scripts; of the others qsub says itself what is wrong.
RULES: dict[str, ValueRule] = {
    "-e": _PATH,
    "-j": ValueRule({"oe", "eo", "n"}.__contains__, "oe, eo or n", "oe"),
    "-J": ValueRule(_is_range, "FIRST-LAST[:STEP][%AT_ONCE], at least two indices", "1-2"),
    "-k": ValueRule(_is_keep_files, "letters of o and e, or n; d only beside them", "oe"),
    "-m": ValueRule(matches("n|[abe]|[abej]{2,}"), "n, or letters of a, b, e (j with -J)", "abe"),
    "-N": ValueRule(re.compile(r"[A-Za-z0-9._+-]{1,230}").fullmatch, "1 to 230 letters, digits and . _ + -", "train"),
    "-o": _PATH,
    "-p": ValueRule(_is_priority, "a whole number from -1024 to 1023", "0"),
    "-P": ValueRule(matches(r"[^/\[\]\";:|<>+,?*]*"), r'a name without / [ ] " ; : | < > + , ? *', "NAME"),
    "-q": ValueRule(matches(r"[!-\"$-?A-~]{0,15}(@[!-\"$-?A-~]+)?"), "QUEUE[@SERVER], at most 15 letters", "QUEUE"),
    "-r": ValueRule({"y", "n"}.__contains__, "y or n", "n"),
    "-W depend": ValueRule(_is_dependency, "TYPE:JOB[:JOB]: a type such as afterok, numbers of jobs", "afterok:1234"),
}
# What -W may set besides, also under the names that qstat shows.
_ATTRIBUTES = {"account_name", "argument_list", "block", "checkpoint", "create_resv_from_job", "cred", "credential_id",
               "depend", "error_path", "executable", "execution_time", "gridname", "group_list", "hold_types",
               "interactive", "join_path", "keep_files", "mail_points", "mail_users", "max_run_subjobs",
               "no_stdio_sockets", "output_path", "priority", "project", "release_nodes_on_stageout", "remove_files",
               "rerunable", "run_count", "sandbox", "shell_path_list", "stagein", "stageout", "submit_arguments",
               "submit_host", "tolerate_node_failures", "umask", "user_list", "variable_list"}  # fmt: skip


def refused_values(options: Sequence[Option]) -> Iterator[Refusal]:
    """Every value that is refused, but those of -l. All of an option's values are read; of -N only the last."""
    last_name = next((option for option in reversed(options) if option.name == "-N"), None)
    for option in options:
        prefix, _, attribute = option.name.lower().partition(" ")
        rule = RULES.get(f"-W {attribute}" if prefix == "-w" else option.name)
        if option.name[:3] == "-W " and attribute not in _ATTRIBUTES:
            known = "depend, group_list, umask, sandbox, block"
            yield Refusal(option.line, f"{option.text}: no attribute of a job", f"{known}: man qsub; {ON_TORQUE}")
        if rule and not rule.fits(option.value) and (option.name != "-N" or option is last_name):
            example = option._replace(value=rule.example).text
            yield Refusal(option.line, f"{option.text}: {option.name} takes {rule.words}", f"#PBS {example}")
    yield from _refused_together(options)


def _refused_together(options: Sequence[Option]) -> Iterator[Refusal]:
    """Options that exclude each other, or a script."""
    rerun, array = "", False
    for name, value, line in options:
        rerun = value if name == "-r" else rerun
        array = array or name == "-J"
        if name in {"-J", "-r"} and array and rerun == "n":
            yield Refusal(line, "an array (-J) cannot have -r n: its jobs have to be rerunable", "#PBS -r y")
        elif name == "-m" and "j" in value and not array:
            yield Refusal(line, f"-m {value}: the letter j is for arrays, with -J before it", "#PBS -m abe")
        elif name in {"-I", "-X"}:
            yield Refusal(line, f"{name}: an interactive job needs a terminal, and runs no script", "leave it out")
        elif name == "-v":
            left = re.sub(r"\\.|'[^']*'|\"[^\"]*\"", "", value).removesuffix(",")
            for word in left.split(","):
                if "=" not in word and not re.fullmatch(r"\s*[A-Za-z_]\w*", word):
                    what = f"-v {value}: a comma ends a value, and {word!r} is no variable of your shell"
                    yield Refusal(line, what, "export NAME=VALUE in the script")


# What qsub and its server take behind `-l`: sizes, times, select, place, nodes, and which of them go together.


_TIME = ValueRule(
    matches(r"(\d{1,18}(:\d{1,18}){0,2}(\.\d*)?|\d{1,18}(:\d{1,18})?:)?"),
    "SECONDS or [HOURS:]MINUTES:SECONDS",
    "1:00:00",
)
_SIZE = ValueRule(matches(r"(\d+[kmgtpKMGTP]?[bwBW]?)?"), "a whole number with b, kb, mb, gb, tb or pb", "4gb")
_WHOLE_NUMBER = ValueRule(matches(r"\+?\d+"), "a whole number, 0 or more", "4")
_NUMBER = ValueRule(matches(r"[+-]?\d*"), "a whole number", "0")

_TYPES = {
    **dict.fromkeys(("cput", "walltime", "min_walltime", "max_walltime", "pcput"), _TIME),
    **dict.fromkeys(("mem", "vmem", "pmem", "pvmem", "file", "hbmem", "accelerator_memory"), _SIZE),
    **dict.fromkeys(("ncpus", "mpiprocs", "ompthreads"), _WHOLE_NUMBER),
    **dict.fromkeys(("nice", "hpm", "ssinodes", "naccelerators", "ngpus"), _NUMBER),
}
_OF_CHUNK = {*OF_CHUNK} - {"ngpus"}  # which sites with GPUs add
# Of a job; in a select they are refused.
_OF_JOB = {"cput", "walltime", "min_walltime", "max_walltime", "pcput", "pmem", "pvmem", "file", "nice", "hpm",
           "ssinodes", "select", "place", "nodes", "resc", "software", "site", "preempt_targets", "pstate", "pgov",
           "pcap_node", "pcap_accelerator"}  # fmt: skip
_NOT_FOR_USERS = {"soft_walltime", "nodect", "nchunk", "cpupercent", "energy", "nodemask", "exec_vnode", "start_time",
                  "pe_mask", "partition"}  # fmt: skip
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
            yield from _refused_nodes(option)
        else:
            yield from _refused_value(option, name, option.value)
    yield from _refused_with_select({name.lower(): option for name, option in first.items()})


def is_time(value: str) -> bool:
    """Whether PBS reads it as a time."""
    return bool(_TIME.fits(value))


def _refused_value(option: Option, name: str, value: str) -> Iterator[Refusal]:
    rule = _TYPES.get(name.lower())
    if rule and name != "walltime" and not rule.fits(value):  # a walltime has a rule of its own, M33
        where = "-l " if name == option.name[3:] else "in -l select, "
        yield Refusal(option.line, f"{where}{name}={value}: {name} takes {rule.words}", f"{name}={rule.example}")


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


def _refused_nodes(option: Option) -> Iterator[Refusal]:
    """nodes=N:ppn=P or nodes=HOST:ppn=P, several with +; Torque's other words are refused."""
    good = r"(ppn=0*[1-9]|(cpp|ncpus)=\d)\d{0,8}|[A-Za-z][\w.-]*|\d+[A-Za-z][A-Za-z0-9]*"
    for _, host, words in _node_parts(option.value):
        for word in host + words:
            if not re.fullmatch(good, word, re.ASCII | re.IGNORECASE):
                instead = f"select=N:ncpus=…:mpiprocs=P:ngpus=…; {ON_TORQUE}"
                yield _refusal(option, f"{word!r}: nodes takes N or a host, and ppn=P", instead)
                return


def _node_parts(nodes: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """Each part of `nodes=2:ppn=4+HOST:ppn=2`: how many, the host in its place, and the words behind."""
    for part in nodes.partition("#")[0].split("+") if nodes else ():
        count, *words = part.strip().split(":")
        number = re.fullmatch(r"0*([1-9]\d{0,8})", count, re.ASCII)
        yield (int(number[1]), [], words) if number else (1, [count], words)


def _refused_with_select(first: dict[str, Option]) -> Iterator[Refusal]:
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
