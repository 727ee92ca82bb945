"""Templates compiled ahead. Parsing and compiling four templates costs a quarter of `hpcddp render`.

The compiled form of a template is kept as Python keeps the byte code of a module: in `__pycache__` beside the
template, or below PYTHONPYCACHEPREFIX, and not at all where Python must not or cannot write byte code. Whoever can
write there can change the template itself, so that reading it trusts nobody new.

Each file starts with a SHA-256 of all that its code depends on and of the code itself: the template's text, the
environment's settings, the versions of jinja2 and Python. A file that is old, cut short or damaged has another hash,
and the template is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys

import jinja2
from jinja2.bccache import Bucket

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
