"""A plan through its scheduler's template. Templates print or skip; what cannot be printed as it stands is an error."""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2.bccache import Bucket

from hpcddp.errors import RequestError, SiteError
from hpcddp.ranks.launchers import LAUNCHERS
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.script.jobplan import WARNING
from hpcddp.script.plan import JobPlan
from hpcddp.script.scheduler_options import check_script
from hpcddp.script.site_file import find_folder
from hpcddp.script.spec import LONGEST_ARGUMENT, quote_line, quote_path, quote_word, quote_words

# Templates compiled ahead. Parsing and compiling four templates costs a quarter of `hpcddp render`.


_HASH_BYTES = hashlib.sha256().digest_size


class CompiledTemplates(jinja2.BytecodeCache):
    """jinja2 asks it for a template's code before it compiles the template. `settings`: what else changes the code."""

    def __init__(self, settings: object) -> None:
        self._known = repr((settings, _jinja2_version(), sys.version)).encode()

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        """The file of the compiled form."""
        return compiled_path(filename or name)

    def get_source_checksum(self, source: str) -> str:
        """The text itself: it goes into the hash."""
        return source

    def load_bytecode(self, bucket: Bucket) -> None:
        """Give `bucket` the code from its file, if the hash is right."""
        try:
            with open(bucket.key, "rb") as file:
                found = file.read()
        except OSError:
            return
        digest, code = found[:_HASH_BYTES], found[_HASH_BYTES:]
        if digest == self._digest(bucket, code):
            bucket.code = marshal.loads(code)  # noqa: S302  # the hash shows that it is what dump_bytecode wrote

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write the code of `bucket`. A folder that cannot be written is no error: the next render compiles again."""
        if sys.dont_write_bytecode:
            return
        code = marshal.dumps(bucket.code)
        with contextlib.suppress(OSError):
            _write_whole(bucket.key, self._digest(bucket, code) + code)

    def _digest(self, bucket: Bucket, code: bytes) -> bytes:
        parts = (self._known, bucket.checksum.encode(), code)
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def compiled_path(template: str) -> str:
    """`templates/__pycache__/pbs.sh.j2.cpython-311` for `templates/pbs.sh.j2`."""
    folder, name = os.path.split(os.path.abspath(template))
    if sys.pycache_prefix:
        folder = os.path.join(sys.pycache_prefix, folder.lstrip("/"))
    else:
        folder = os.path.join(folder, "__pycache__")
    return os.path.join(folder, f"{name}.{sys.implementation.cache_tag}")


def _write_whole(path: str, content: bytes) -> None:
    """Under another name first, so that a render which reads at the same time finds all of it or nothing."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f"{path}.{os.uname().nodename}.{os.getpid()}"
    try:
        with open(partial, "xb") as file:
            file.write(content)
        os.replace(partial, path)
    except FileExistsError:  # another process's
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _jinja2_version() -> str:
    """jinja2 3.1 has it in a variable; later versions may leave it to the package's metadata."""
    version = vars(jinja2).get("__version__")
    if version is None:
        from importlib.metadata import version as installed

        version = installed("jinja2")
    return str(version)


#: Bytes for what stands before the command: Python's path, `hpcddp exec` and its options.
_BEFORE = 4096


def format_command(plan: JobPlan) -> str:
    """The ranks' command as bash words, as the launcher next to them takes it."""
    words = plan.command if plan.rank_maker else LAUNCHERS[plan.launcher].as_arguments(plan.command)
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


# The command for a shell on the nodes that a script asks for: its directives, without those of batch jobs.


def interactive_command(name: str, script: str) -> str:
    """One line to type, for the scheduler of that name. Raises RequestError where there are no interactive jobs."""
    scheduler = find_scheduler(name)
    program, left_out = scheduler.commands.interactive, scheduler.directives.batch_only
    if not program:
        raise RequestError(f"{scheduler.title} has no interactive jobs", "run the command itself")
    prefix = f"{scheduler.directives.prefix} "
    options = [line.removeprefix(prefix) for line in script.splitlines() if line.startswith(prefix)]
    kept = [option for option in options if not (left_out and re.match(left_out, option))]
    return quote_words([*program, *(word for option in kept for word in option.split(" "))])
