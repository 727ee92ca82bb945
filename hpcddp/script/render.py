"""A plan through its scheduler's template. Templates print or skip; what cannot be printed as it stands is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2

from hpcddp.errors import RequestError, SiteError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.script.compiled import CompiledTemplates
from hpcddp.script.directives import check_script
from hpcddp.script.folders import find_folder
from hpcddp.script.jobplan import WARNING
from hpcddp.script.plan import JobPlan
from hpcddp.script.words import LONGEST_ARGUMENT, quote_line, quote_path, quote_word, quote_words

#: Bytes for what stands before the command: Python's path, `hpcddp exec` and its options.
_BEFORE = 4096


def format_command(plan: JobPlan) -> str:
    """The ranks' command as bash words, as the launcher next to them takes it."""
    words = plan.command if plan.own_ranks else LAUNCHERS[plan.launcher].as_arguments(plan.command)
    sizes = [len(word.encode(errors="surrogateescape")) for word in words]
    what, size = "a word of the command is", max(sizes)
    if plan.outer is not None and plan.outer.joins_words:
        what, size = f"the command, which {plan.outer.name} makes one word, is", sum(sizes) + len(sizes) + _BEFORE
    if size > LONGEST_ARGUMENT:
        raise RequestError(
            f"{what} {size} bytes long, and Linux takes {LONGEST_ARGUMENT} of one argument",
            "let the program read it from a file",
        )
    return quote_words(words)


FILTERS: dict[str, Callable[..., str]] = {
    "sh": quote_word,
    "words": quote_words,
    "line": quote_line,
    "path": quote_path,
    "command": format_command,
}
# What the text of a template becomes depends on these.
SETTINGS: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}


def render_script(plan: JobPlan) -> str:
    """The whole job script. Raises SiteError when a template asks for a value that the plan does not have; RequestError
    and SiteError for directives that cannot stand together."""
    compiled = CompiledTemplates(SETTINGS)
    text = "".join(render_pieces(plan.site.scheduler, plan, FILTERS, printable, compiled))
    check_script(plan.spec, plan.site, text)
    return text


def render_pieces(
    scheduler: str,
    job: object,
    filters: Mapping[str, Callable[..., str]],
    finalize: Callable[[object], object],
    compiled: CompiledTemplates | None = None,
) -> Iterator[str]:
    """The script piece by piece: the text of the templates, and each value that they print, after `finalize`.

    `compiled` takes the templates' code from their compiled forms, which were made with FILTERS and `printable`: jinja2
    calls `finalize` on a template's constants when it compiles.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(find_folder("templates")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  # shell, not HTML: every value goes through `sh` or was checked by plan_job
        finalize=finalize,
        cache_size=-1,
        bytecode_cache=compiled,
        **SETTINGS,
    )
    environment.globals.clear()
    environment.filters = dict(filters)
    template = f"{scheduler}.sh.j2"
    try:
        yield from environment.get_template(template).generate(job=job, warning=WARNING)
    except jinja2.TemplateError as e:
        block = re.fullmatch(r"Required block '(\w+)' not found", e.message or "")
        if block:
            raise SiteError(
                f"templates/{template} has no block {block[1]}, and this job needs it",
                f"write the block in templates/{template}, as the templates of other schedulers do",
            ) from e
        raise SiteError(f"template {getattr(e, 'name', None) or template}: {e.message}", "install hpcddp again") from e


def printable(value: object) -> object:
    """`value` if it can be printed as it stands."""
    if value is None or isinstance(value, (tuple, dict)):
        raise jinja2.TemplateRuntimeError(f"a template prints {value!r}, which is no single value")
    return value
