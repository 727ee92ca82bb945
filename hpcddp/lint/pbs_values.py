"""What qsub and its server take as the value of an option, and what they refuse with the whole script.

After OpenPBS 23.06: qsub.c (process_opts), ecl_verify_values.c, and the parsers of Libcmds. `-l`: pbs_resources.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hpcddp.lint.directive import Option, Refusal

ON_TORQUE = "on Torque: hpcddp lint --site generic-torque"
_LETTER = r"[!-\"$-+\--?A-~]"  # printable, without blank, comma, # and @


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


def _is_kept(value: str) -> bool:
    said = set(value)
    files, none = said & {"o", "e"}, "n" in said
    return said <= set("oedn") and bool(files) != none


def _is_range(value: str) -> bool:
    found = re.fullmatch(r"(\d{1,18})-(\d{1,18})(:0*[1-9]\d*)?(%\d+)?", value, re.ASCII)
    return found is not None and int(found[1]) < int(found[2])


def _is_date(value: str) -> bool:
    found = re.fullmatch(r"((?:\d\d){2,6})(\.[0-5]\d)?", value, re.ASCII)
    if not found:
        return False
    pairs = [int(found[1][i : i + 2]) for i in range(0, len(found[1]), 2)]
    bounds = ((0, 59), (0, 23), (1, 31), (1, 12))  # minute, hour, day, month
    return all(least <= n <= most for n, (least, most) in zip(reversed(pairs), bounds, strict=False))


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


def _is_staging(value: str) -> bool:
    return all(re.fullmatch(r"[^@]+@[^\s@:]+:[^@]+", item.strip()) for item in re.split(r"(?<!\\),", value))


def _users(one_per_host: bool, first: str = "") -> Callable[[str], bool]:
    """NAME[@HOST], several with commas; `first` begins each name."""
    item = re.compile(rf"\s*{first}{_LETTER}{'*' if first else '+'}(@{_LETTER}+)?\s*")

    def fits(value: str) -> bool:
        found = [item.fullmatch(each) for each in value.split(",")]
        hosts = [each[1] for each in found if each]
        return None not in found and (not one_per_host or len(set(hosts)) == len(hosts))

    return fits


_COUNT = ValueRule(matches(r"\+?\d+"), "a whole number, 0 or more", "2")
_YES_NO = ValueRule(matches("true|True|TRUE|[tTyY1]|false|False|FALSE|[fFnN0]"), "true or false", "true")
_SWITCH = ValueRule(matches("(?i:true|false)"), "true or false", "true")
_STAGING = ValueRule(_is_staging, "LOCAL@HOST:REMOTE, several with commas", "a@HOST:b")
_PATH = ValueRule(_is_path, "[HOST:]PATH in printable ASCII letters", "job.log")
_NOT_IN_PROJECT = r'/ [ ] " ; : | < > + , ? *'

RULES: dict[str, ValueRule] = {
    "-a": ValueRule(_is_date, "[[[[CC]YY]MM]DD]hhmm[.SS]", "202601311830"),
    "-c": ValueRule(matches(r"[nscw]|[cw]=\d+"), "n, s, c, w, c=MINUTES or w=MINUTES", "n"),
    "-e": _PATH,
    "-j": ValueRule({"oe", "eo", "n"}.__contains__, "oe, eo or n", "oe"),
    "-J": ValueRule(_is_range, "FIRST-LAST[:STEP][%AT_ONCE], at least two indices", "1-2"),
    "-k": ValueRule(_is_kept, "letters of o and e, or n; d only beside them", "oe"),
    "-m": ValueRule(matches("n|[abe]|[abej]{2,}"), "n, or letters of a, b, e (j with -J)", "abe"),
    "-M": ValueRule(_users(one_per_host=False), "USER[@HOST], several with commas", "me@example.org"),
    "-N": ValueRule(re.compile(r"[A-Za-z0-9._+-]{1,230}").fullmatch, "1 to 230 letters, digits and . _ + -", "train"),
    "-o": _PATH,
    "-p": ValueRule(_is_priority, "a whole number from -1024 to 1023", "0"),
    "-P": ValueRule(matches(r"[^/\[\]\";:|<>+,?*]*"), f"a name without {_NOT_IN_PROJECT}", "NAME"),
    "-q": ValueRule(matches(r"[!-\"$-?A-~]{0,15}(@[!-\"$-?A-~]+)?"), "QUEUE[@SERVER], at most 15 letters", "QUEUE"),
    "-r": ValueRule({"y", "n"}.__contains__, "y or n", "n"),
    "-R": ValueRule(matches("[oe]+"), "letters of o and e", "oe"),
    "-S": ValueRule(_users(one_per_host=True, first="/"), "/PATH[@HOST] of a shell, without options", "/bin/bash"),
    "-u": ValueRule(_users(one_per_host=True), "USER[@HOST], one for each host", "USER"),
    "-W depend": ValueRule(_is_dependency, "TYPE:JOB[:JOB]: a type such as afterok, numbers of jobs", "afterok:1234"),
    "-W group_list": ValueRule(_users(one_per_host=True), "GROUP[@HOST], one for each host", "GROUP"),
    "-W sandbox": ValueRule(matches("(?i:HOME|O_WORKDIR|PRIVATE)"), "HOME, O_WORKDIR or PRIVATE", "PRIVATE"),
    "-W stagein": _STAGING,
    "-W stageout": _STAGING,
    "-W umask": ValueRule(matches(r"[+-]?\d+"), "a number", "022"),
    "-W run_count": _COUNT,
    "-W max_run_subjobs": _COUNT,
    "-W block": _SWITCH,
    "-W interactive": _SWITCH,
    "-W release_nodes_on_stageout": _YES_NO,
    "-W no_stdio_sockets": _YES_NO,
    "-W create_resv_from_job": _YES_NO,
    "-W tolerate_node_failures": ValueRule(
        {"all", "job_start", "none"}.__contains__, "all, job_start or none", "job_start"
    ),
}
# What -W may set besides, under the names that qstat shows.
_OTHER_ATTRIBUTES = {"account_name", "argument_list", "checkpoint", "cred", "credential_id", "error_path", "executable",
                     "execution_time", "gridname", "hold_types", "join_path", "keep_files", "mail_points",
                     "mail_users", "output_path", "priority", "project", "remove_files", "rerunable",
                     "shell_path_list", "submit_arguments", "submit_host", "user_list",
                     "variable_list"}  # fmt: skip


def refused_values(options: Sequence[Option]) -> Iterator[Refusal]:
    """Every value that is refused, but those of -l. All of an option's values are read; of -N only the last."""
    last_name = next((option for option in reversed(options) if option.name == "-N"), None)
    for option in options:
        attribute = option.name.startswith("-W ")
        rule = RULES.get(f"-W {option.name[3:].lower()}" if attribute else option.name)
        if attribute and rule is None and option.name[3:].lower() not in _OTHER_ATTRIBUTES:
            known = ", ".join(name[3:] for name in RULES if name.startswith("-W "))
            yield Refusal(
                option.line, f"{option.text}: no attribute that a user may set", f"one of {known}; {ON_TORQUE}"
            )
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
        elif name == "-I" or (name == "-W interactive" and value.lower() == "true"):
            yield Refusal(line, f"{name}: an interactive job needs a terminal, and runs no script", "leave it out")
        elif name == "-X" and not any(option.name == "-I" for option in options):
            yield Refusal(line, "-X: X11 is forwarded to interactive jobs only", "leave it out")
        elif name == "-v":
            yield from _refused_variables(value, line)


def _refused_variables(value: str, line: int) -> Iterator[Refusal]:
    left = re.sub(r"\\.|'[^']*'|\"[^\"]*\"", "", value)
    if "'" in left or '"' in left:
        yield Refusal(line, f"-v {value}: a quote opens and does not close", "export NAME=VALUE in the script")
        return
    for word in left.removesuffix(",").split(","):
        if "=" not in word and not re.fullmatch(r"\s*[A-Za-z_]\w*", word):
            what = f"-v {value}: a comma ends a value, and {word!r} is no variable of your shell"
            yield Refusal(line, what, "export NAME=VALUE in the script")


def lost_quotes(directive: str, line: int) -> Iterator[Refusal]:
    """-v A='x,y': qsub takes the quotes off first, and then looks for a variable y."""
    for found in re.finditer(r"=(['\"])([^'\"]*)\1", directive if re.match(r"\s*-v", directive) else ""):
        for word in found[2].split(",")[1:]:
            if "=" not in word:
                what = f"-v …{found[0]}: the quotes are taken off, and {word!r} is read as a variable of your shell"
                yield Refusal(line, what, "export NAME=VALUE in the script")
