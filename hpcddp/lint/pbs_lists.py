"""The lists in #PBS options, split as qsub and the server split them: `-l a=1,b=2`, `-W a=1,b=2`, select's chunks.

After OpenPBS's set_resource.c, pbs_quote_parse.c, parse_equal.c and attr_resc_func.c.
"""

from __future__ import annotations

import re

from hpcddp.lint.directive import ListError

Pairs = list[tuple[str, str]]

_RESOURCE = r"[A-Za-z][\w-]*=(?:[^:+'\"]|'[^']*'|\"[^\"]*\")*"
_CHUNK = re.compile(rf"(\d+)(?::({_RESOURCE}(?::{_RESOURCE})*))?|({_RESOURCE}(?::{_RESOURCE})*)", re.ASCII)
_UNFINISHED = re.compile(r"(^|[:+])([A-Za-z][\w-]*=)?$", re.ASCII)
_WORD = re.compile(r"\s*([^\s=,][^\s=]*)\s*=\s*", re.ASCII)


def split_resources(text: str) -> Pairs:
    """`select=2:ncpus=4,walltime=60` as names and values; a name alone has the value "". Raises ListError.

    A blank ends a value, so that `select=1: ncpus=2` is two resources.
    """
    found: Pairs = []
    at = 0
    while at < len(text):
        named = re.compile(r"\s*([^=,]*)").match(text, at)
        assert named is not None  # it matches nothing, too
        at = named.end()
        if not named[1].strip():
            raise ListError(f"-l {text}: a resource without a name, or a comma or a blank too many")
        name, value = named[1].split()[0], ""
        if text[at : at + 1] == "=":
            value, at = _resource_value(text, at + 1)
        found.append((name, value))
        if text[at : at + 1] == ",":
            at += 1
            if at == len(text):
                raise ListError(f"-l {text}: ends with a comma")
    return found


def _resource_value(text: str, at: int) -> tuple[str, int]:
    """A value and where it ends: at a comma or a blank outside quotes. Quotes are taken off."""
    while text[at : at + 1].isspace():
        at += 1
    value, quote, open_ = "", "", False
    while at < len(text):
        c = text[at]
        if not c.isascii() or c == "&":
            raise ListError(f"-l {text}: {c!r} may not stand there")
        if c in "'\"" and c == (quote or c):  # a quote of the other kind is a letter
            quote, open_, c = c, not open_, ""
        elif not open_ and (c == "," or c.isspace()):
            break
        value += c
        at += 1
    if open_:
        raise ListError(f"-l {text}: no closing {quote}")
    return value, at


def split_attributes(text: str) -> Pairs:
    """`umask=022,depend=afterok:1,afterany:2` as names and values. Raises ListError.

    A value goes up to the last comma before the next `=`.
    """
    found: Pairs = []
    rest = text.lstrip()
    if not rest:
        raise ListError("-W without a value")
    while rest:
        named = _WORD.match(rest)
        if not named:
            raise ListError(f"-W {text}: not NAME=VALUE")
        rest = rest[named.end() :]
        if rest[:1] in {"'", '"'}:
            end = rest.find(rest[0], 1)
            if end < 0:
                raise ListError(f"-W {text}: no closing {rest[0]}")
            rest = f"{rest[1:end]} {rest[end + 1 :]}"
        else:
            end = 1
        equals = rest.find("=", end - 1)
        comma = rest.rfind(",", 0, equals) if equals >= 0 else len(rest)
        if comma < 0 or (equals < 0 and rest.rstrip().endswith(",")):
            raise ListError(f"-W {text}: a comma stands between two NAME=VALUE, and nowhere else")
        found.append((named[1], rest[:comma].rstrip() if equals >= 0 else rest))
        rest = rest[comma + 1 :].lstrip()
    return found


def split_select(text: str) -> list[tuple[int, Pairs]]:
    """`2:ncpus=8:mpiprocs=4+1:ncpus=2` as counts and resources; [] if it is not of that form."""
    found: list[tuple[int, Pairs]] = []
    at = 0
    while True:
        chunk = _CHUNK.match(text, at)
        if not chunk or text[chunk.end() : chunk.end() + 1] not in {"", "+"} or _UNFINISHED.search(text):
            return []
        resources = chunk[2] or chunk[3] or ""
        found.append(
            (int((chunk[1] or "1")[:18]), [(k, v) for k, _, v in (r.partition("=") for r in _unquoted(resources))])
        )
        at = chunk.end() + 1
        if at > len(text):
            return found


def _unquoted(resources: str) -> list[str]:
    """The resources of one chunk: a colon in quotes divides nothing."""
    return re.findall(r"(?:[^:'\"]|'[^']*'|\"[^\"]*\")+", resources)


def chunks(select: str) -> list[tuple[int, dict[str, str]]]:
    """The same with the resources of a chunk by name."""
    return [(count, dict(resources)) for count, resources in split_select(select)]
