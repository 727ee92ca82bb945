"""#SBATCH lines, read as sbatch reads them: Slurm `src/sbatch/opt.c` (_opt_batch_script, _get_argument).

Checked against a real sbatch 22.05, which also parses #PBS lines unless `#SBATCH --ignore-pbs` stands there.
"""

from __future__ import annotations

from hpcddp.lint.directive import UNIX_LINES, Option, Refusal, ScriptDirectives, Tokens, UnmatchedError, numbered
from hpcddp.schedulers.directive_rules import full_name
from hpcddp.schedulers.registry import find_scheduler

_RULES = find_scheduler("slurm").directives
# Options whose value, if they have one, is joined on: the next word is none.
_ALONE = {
    "contiguous", "exclusive", "export-file", "get-user-env", "help", "hold", "ignore-pbs", "immediate", "nice",
    "no-kill", "no-requeue", "overcommit", "oversubscribe", "parsable", "propagate", "quiet", "reboot", "requeue",
    "share", "spread-job", "test-only", "usage", "use-min-nodes", "verbose", "version", "wait",
}  # fmt: skip

_COMPONENT = {"hetjob", "packjob"}
_VALUED = {"comment", "gres", "gpus-per-node", "gpus-per-task", "mem", "ntasks-per-node", "reservation", "signal"}


def read_slurm(text: str) -> ScriptDirectives:
    """What sbatch takes from a script. Options that it does not know are left to it: plugins add some."""
    lines = numbered(text)
    if not text.startswith("#!"):
        return ScriptDirectives(
            "slurm", refusals=(Refusal(1, "a batch script must begin with #!", "#!/bin/bash as the first line"),)
        )
    for number, line in lines:
        if line.endswith("\r") and text.count("\n") >= number:
            return ScriptDirectives(
                "slurm", refusals=(Refusal(number, "batch script contains DOS line breaks", UNIX_LINES),)
            )
    words: list[tuple[str, int]] = []  # of all lines: an option at a line's end takes its value from the next one
    refusals: list[Refusal] = []
    unread: list[int] = []
    command_line = 0
    for number, line in lines:
        if not line.startswith("#SBATCH"):
            if line.lstrip().startswith("#SBATCH") and not line.lstrip().startswith("#SBATCH#"):
                unread.append(number)  # indented: a comment to sbatch
            command_line = command_line or (number if line.strip() and not line.strip().startswith("#") else 0)
        elif command_line:
            unread.append(number)
        else:
            try:
                words += [(word, number) for word in split_slurm(line[len("#SBATCH") :])]
            except UnmatchedError as e:
                refusals.append(Refusal(number, str(e)))
    ends = [i for i, (word, _) in enumerate(words) if word in _COMPONENT]
    component = next((i for i in ends if any(word not in _COMPONENT for word, _ in words[:i])), None)
    options, stray = read_options([one for one in words[:component] if one[0] not in _COMPONENT])
    refusals += [Refusal(number, f"invalid directive found in batch script: {word}") for word, number in stray]
    return ScriptDirectives(
        "slurm",
        tuple(options),
        tuple(refusals),
        tuple(unread),
        command_line,
        other_words=("hetjob",) * (component is not None),
    )


def split_slurm(text: str) -> Tokens:
    """Words as sbatch makes them: a backslash vanishes, in quotes too; an unquoted `#` ends the line."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    escaped = False
    for c in text:
        if c in " \t" and not quote:
            if word == "":
                return tuple(words)  # a word of quotes or a backslash alone ends the line
            escaped = False  # a backslash before a blank vanishes, and the word ends
            if word is not None:
                words.append(word)
            word = None
        elif escaped:
            word, escaped = (word or "") + c, False
        elif c == "\\":
            word, escaped = word or "", True
        elif quote:
            if c == quote:
                quote = ""
            else:
                word = (word or "") + c
        elif c in "'\"":
            quote, word = c, word or ""
        elif c == "#":
            break
        else:
            word = (word or "") + c
    if quote:
        raise UnmatchedError(f"unmatched {quote}")
    return (*words, word) if word else tuple(words)


def read_options(words: list[tuple[str, int]]) -> tuple[list[Option], list[tuple[str, int]]]:
    """Options under their long names, and the stray words, each with its line."""
    found: list[Option] = []
    stray: list[tuple[str, int]] = []
    rest = list(words)
    while rest:
        word, line = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word.partition("=")
        elif word.startswith("-") and len(word) > 1:
            name, value = word[:2], word[2:]
            equals = "=" if value else ""
        else:
            stray.append((word, line))
            continue
        name = full_name(_RULES, name).lstrip("-")
        known = (
            name in _RULES.letters.values() or name in _VALUED
        )  # of another option it is not known that it has a value
        if not equals and name not in _ALONE and rest and (known or not rest[0][0].startswith("-")):
            value = rest.pop(0)[0]
        found.append(Option(f"--{name}", value, line))
    return found, stray
