"""What a scheduler's directive may hold: words that every directive parser reads as they stand.

sbatch drops backslashes and takes `#` for a comment; qsub joins lines that end in a backslash and knows no comments
(Slurm `src/sbatch/opt.c`; OpenPBS `src/cmds/qsub.c`). So the words are narrow, and others are refused, not repaired.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from itertools import takewhile

from hpcddp.errors import RequestError, SiteError
from hpcddp.schedulers.directive_rules import find_clashes, full_name, read_options
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.site import Site
from hpcddp.script.spec import JobSpec

_VALUE = r"[A-Za-z0-9_.+:,@=%/^&|()\[\]*-]+"
_LINE = re.compile(rf"-[A-Za-z][a-z_]*( ?{_VALUE})?|--[a-z][a-z0-9-]*(={_VALUE})?").fullmatch


def directive_word(text: str, where: str) -> str:
    """`text` if every scheduler reads it as one word as it stands (queue, account), else RequestError."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+:,@=%-]*", text):
        raise RequestError(
            f"{where} {text!r} is not a word that a scheduler's directive can carry",
            "use ASCII letters, digits and _ . + : , @ = % -",
        )
    return text


def plan_directives(
    spec: JobSpec, site: Site, queue: str, values: Mapping[str, str], further: Iterable[str], asked: Iterable[str]
) -> tuple[str, ...]:
    """The site's further directives, those of its variables and of what was chosen (`further`), and the job's own.

    Each is one option such as `-v USE_SSH=1`, without the prefix. Where an option may stand once only, it has all
    values: two `-v` become one. Raises RequestError for what a directive cannot carry, and for an option that the
    script prints; `asked` are those for what the job asks.
    """
    wanted = spec.directives or ()
    if wanted and not find_scheduler(site.scheduler).directives.prefix:
        raise RequestError(f"directive {wanted[0]!r}: this site has no scheduler to read it", "leave out directives")
    _check_wanted(site, wanted, tuple(asked))
    reserved = [text.replace("{queue}", queue) for text in site.reservation] if spec.reservation else []
    printed = ((v.directive, values[name]) for name, v in site.variables.items() if v.directive and name in values)
    own = [directive.replace("{}", value) for directive, value in printed]
    lines = (*site.directives, *own, *reserved, *further, *wanted)
    for text in lines:
        if not _LINE(text):
            whole = _joined_words(wanted, spec.sources.get("directives", "")) if text in wanted else ""
            raise RequestError(
                f"directive {text!r} is not one option that a directive can carry",
                whole
                or "one option per item: '-v USE_SSH=1' or '--constraint=gpu'; no blanks, quotes, # or \\ in values",
            )
    return _joined(lines, find_scheduler(site.scheduler).directives.joined)


def _joined_words(items: Iterable[str], where: str) -> str:
    """What to type where blanks or YAML's brackets have split options from their values; "" if that is not what is
    wrong."""
    options: list[str] = []
    text = " ".join(items)
    is_list = text.startswith("[") and text.endswith("]")
    for word in (text[1:-1].replace(", -", " -") if is_list else text).replace('"', "").replace("'", "").split():
        if word.startswith("-") or not options:
            options.append(word)
        else:
            options[-1] += f"{'=' if options[-1].startswith('--') else ' '}{word}"
    if not all(map(_LINE, options)):
        return ""
    quoted = [f"'{option}'" for option in options]
    return (
        f'--set "directives={" ".join(quoted)}"' if where.startswith("--set") else f"directives: [{', '.join(quoted)}]"
    )


def _check_wanted(site: Site, wanted: Iterable[str], asked: tuple[str, ...]) -> None:
    rules = find_scheduler(site.scheduler).directives
    keys = {option: key for key, option in [*rules.options.items()][::-1]}
    for option in (option for text in wanted for option in read_options(rules, text)):
        if option.name in (*rules.printed, *asked):
            raise RequestError(
                f"directive {option.text!r} is printed by the script itself",
                f"use the job key {keys[option.name]}" if option.name in keys else "use the option or job key for it",
            )
        if option.name in rules.no_submit:
            what = f"directive {option.text!r}: the submit command would queue no job, or wait for its end"
            raise RequestError(what, f"leave out {option.text!r}")
        refused = next((one for one in site.rejects if full_name(rules, one) in option.name.split()), None)
        if refused:
            raise RequestError(
                f"site {site.name} refuses {refused} ({site.source(site.cited.get('rejects', ''))})",
                f"leave out {option.text!r}",
            )


def check_script(spec: JobSpec, site: Site, script: str) -> None:
    """RequestError where the script would ask for one thing twice, or for what its scheduler refuses together;
    SiteError where nobody but the site's file says so."""
    scheduler = find_scheduler(site.scheduler)
    rules = scheduler.directives
    if not rules.prefix:
        return
    head = takewhile(lambda line: line.startswith("#"), script.splitlines()[1:])
    texts = [line.removeprefix(f"{rules.prefix} ") for line in head if line.startswith(f"{rules.prefix} ")]
    options = [option for text in texts for option in read_options(rules, text)]
    clash = next(find_clashes(rules, options), None)
    if clash is None:
        return
    both = clash.options
    what = f"the script would have {' and '.join(repr(option.text) for option in both)}: {scheduler.title} {clash.why}"
    own = [repr(option.text) for option in both if option.text in (spec.directives or ())]
    keys = [key for key, name in rules.options.items() if spec.asks_for(key) and name in {one.name for one in both}]
    clashing = {option.text for option in both}
    for name, value in (spec.variables or {}).items():
        if name in site.variables and site.variables[name].directive.replace("{}", value) in clashing:
            keys.append(name)
    if not own and not keys:
        raise SiteError(f"{what}, and both are from {site.file}", "leave one of them out of the site's file")
    instead = "; gpus_per_node and gpu_type ask for GPUs" if {one.name for one in both} & {*rules.one_of} else ""
    raise RequestError(what, f"leave out {' or '.join([*own[-1:], *keys])}{instead}")


def _joined(lines: Iterable[str], option: str) -> tuple[str, ...]:
    """`lines`, where all values of `option` stand in its first line, with commas; "" for no such option."""
    joined: dict[str, str] = {}
    for text in lines:
        name, _, value = text.partition(" ")
        if name == option and value and name in joined:
            joined[name] += f",{value}"
        else:
            joined[name if name == option and value else text] = text
    return tuple(joined.values())


def job_name(text: str, limit: int) -> str:
    """`text` under the strictest rule for job names: a letter, then letters, digits and `_ . + -`, at most `limit`.

    OpenPBS 23.06 takes any of them in first place (measured); a letter is for older releases.

    Other characters become `_`. A name that lost characters ends in a mark of the whole text: runs are named after
    jobs, and two names should not share a run. The caller says so when the result differs.
    """
    name = re.sub(r"[^A-Za-z0-9_.+-]", "_", text)
    is_whole = name == text
    if not re.match(r"[A-Za-z]", name):
        name = f"job{name}" if name[:1] in "_.+-" else f"job_{name}"
    if is_whole and len(name) <= limit:
        return name
    mark = f"_{zlib.crc32(text.encode(errors='surrogatepass')) & 0xFFFFFF:06x}"
    return f"{name[: limit - len(mark)]}{mark}"
