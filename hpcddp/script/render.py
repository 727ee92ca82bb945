"""A plan through its scheduler's template. Templates print or skip; what cannot be printed as it stands is an error."""

from __future__ import annotations

import functools
import re

import jinja2

from hpcddp.errors import SiteError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.script.jobplan import WARNING_SIGNAL
from hpcddp.script.plan import JobPlan
from hpcddp.script.scheduler_options import check_script
from hpcddp.script.site_file import find_data_folder
from hpcddp.script.spec import quote_line, quote_path, quote_word, quote_words


def _format_command(plan: JobPlan) -> str:
    """The ranks' command as bash words, as the launcher next to them takes it."""
    return quote_words(plan.command if plan.rank_maker else LAUNCHERS[plan.launcher].as_arguments(plan.command))


def render_script(plan: JobPlan) -> str:
    """The whole job script. Raises SiteError when a template asks for a value that the plan does not have; RequestError
    and SiteError for directives that cannot stand together."""
    template = f"{plan.site.scheduler}.sh.j2"
    try:
        text = _environment().get_template(template).render(job=plan, warning=WARNING_SIGNAL)
    except jinja2.TemplateError as e:
        block = re.fullmatch(r"Required block '(\w+)' not found", e.message or "")
        if block:
            raise SiteError(
                f"templates/{template} has no block {block[1]}, and this job needs it",
                f"write the block in templates/{template}, as the templates of other schedulers do",
            ) from e
        raise SiteError(f"template {getattr(e, 'name', None) or template}: {e.message}", "install hpcddp again") from e
    check_script(plan.spec, plan.site, text)
    return text


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(find_data_folder("templates")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  # shell, not HTML: every value goes through `sh` or was checked by plan_job
        finalize=_check_printed,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.clear()
    environment.filters = {
        "sh": quote_word,
        "words": quote_words,
        "line": quote_line,
        "path": quote_path,
        "command": _format_command,
    }
    return environment


def _check_printed(value: object) -> object:
    """`value` if it can be printed as it stands."""
    if value is None or isinstance(value, (tuple, dict)):
        raise jinja2.TemplateRuntimeError(f"a template prints {value!r}, which is no single value")
    return value
