"""Grid Engine's reading of a script: `#$` lines at column 0, anywhere, also behind commands."""

from __future__ import annotations

from hpcddp.lint.directives import Option, Refusal, ScriptDirectives, UnmatchedError, numbered, split_pbs

# Options of qsub(1) without a value, and those with two; the others have one.
_GE_ALONE = {"-cwd", "-V", "-h", "-notify", "-terse", "-verify", "-clear"}
_GE_TWO = {"-pe"}


def read_gridengine(text: str) -> ScriptDirectives:
    """What Grid Engine's qsub takes. `-l a=1,b=2` is one option per resource; `-pe mpi 8` is called `-pe mpi`."""
    options: list[Option] = []
    refusals: list[Refusal] = []
    for number, line in numbered(text.replace("\r\n", "\n")):
        if not line.startswith("#$"):
            continue
        try:
            words = list(split_pbs(line[2:]))
        except UnmatchedError as e:
            refusals.append(Refusal(number, str(e)))
            continue
        while words:
            word = words.pop(0)
            if not word.startswith("-"):
                break  # qsub(1) does not say whether it takes comments here: not ours to decide
            if word in _GE_ALONE or not words:
                options.append(Option(word, "", number))
            elif word in _GE_TWO:
                options.append(Option(f"{word} {words.pop(0)}", words.pop(0) if words else "", number))
            elif word == "-l":
                for piece in words.pop(0).split(","):
                    key, _, value = piece.partition("=")
                    options.append(Option(f"-l {key}", value, number))
            else:
                options.append(Option(word, words.pop(0), number))
    return ScriptDirectives("gridengine", tuple(options), tuple(refusals))
