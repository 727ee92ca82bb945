"""What can be typed behind each verb, as a completion script of bash, zsh or fish. Text only."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import NamedTuple

#: In place of a completion's words: any file or folder.
FILES = ("<files>",)


class Completion(NamedTuple):
    """An option, or a positional word where `names` is empty. `words`: known values; FILES; empty: any text."""

    names: tuple[str, ...]
    has_value: bool
    words: tuple[str, ...]
    text: str


class VerbCompletions(NamedTuple):
    """A verb and what follows it. `takes_command`: a program and its words follow `--`."""

    verb: str
    text: str
    takes_command: bool
    completions: tuple[Completion, ...]

    @property
    def options(self) -> tuple[Completion, ...]:
        """Those with names."""
        return tuple(completion for completion in self.completions if completion.names)

    @property
    def positionals(self) -> tuple[Completion, ...]:
        """Those without."""
        return tuple(completion for completion in self.completions if not completion.names)


def format_bash(verbs: list[VerbCompletions]) -> str:
    """Needs nothing but bash 4."""
    patterns: dict[str, list[str]] = {}
    for v in verbs:
        for completion in v.options:
            if completion.has_value:
                patterns.setdefault(_bash_value(completion), []).extend(
                    f'"{v.verb} {name}"' for name in completion.names
                )
    cases = [f"    {' | '.join(found)}) {value} ;;" for value, found in patterns.items()]
    options = [f"    {v.verb}) words={_quoted(n for c in v.options for n in c.names)} ;;" for v in verbs]
    words = [
        f"    {v.verb}) {_bash_value(c)} ;;"
        for v in verbs
        for c in [Completion((), True, tuple(dict.fromkeys(w for p in v.positionals for w in p.words)), "")]
    ]
    return f"""\
# completion of hpcddp for bash, printed by `hpcddp completion bash`
_hpcddp() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} verb=${{COMP_WORDS[1]}} words= i
  COMPREPLY=()
  if [[ $cur == = ]]; then cur= # bash takes --site=ab for three words
  elif [[ $prev == = ]]; then prev=${{COMP_WORDS[COMP_CWORD - 2]}}; fi
  for ((i = 2; i < COMP_CWORD; i++)); do
    if [[ ${{COMP_WORDS[i]}} == -- ]]; then # behind it comes a command
      if ((i + 1 == COMP_CWORD)); then mapfile -t COMPREPLY < <(compgen -c -- "$cur" | sort -u); fi
      compopt -o default 2> /dev/null
      return
    fi
  done
  if ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W {_quoted([*(v.verb for v in verbs), "--help", "--version"])} -- "$cur")
    return
  fi
  case "$verb $prev" in
{_lines(cases)}
    *) case "$cur" in
      -*) case "$verb" in
{_lines(f"    {line}" for line in options)}
      esac ;;
      *) case "$verb" in
{_lines(f"    {line}" for line in words)}
      esac ;;
    esac ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
}}
complete -F _hpcddp hpcddp
"""


def _bash_value(completion: Completion) -> str:
    known = tuple(word for word in completion.words if (word,) != FILES)
    parts = [f"words={_quoted(known)}"] if known else []
    if set(FILES) & set(completion.words):
        parts.append("compopt -o default 2> /dev/null")
    return "; ".join(parts) or ":"


def format_zsh(verbs: list[VerbCompletions]) -> str:
    """A function for $fpath, which can be sourced as well."""
    described = [f"    {_zsh(f'{v.verb}:{v.text}')}" for v in verbs]
    cases = [
        f"    {v.verb}) _arguments {' '.join([*map(_zsh_option, v.options), *_zsh_positionals(v)])} ;;" for v in verbs
    ]
    return f"""\
#compdef hpcddp
# completion of hpcddp for zsh, printed by `hpcddp completion zsh`
_hpcddp() {{
  local -a verbs
  local -i dashes
  verbs=(
{_lines(described)}
  )
  if (( CURRENT == 2 )); then
    _describe verb verbs
    return
  fi
  dashes=${{words[(i)--]}}
  if (( dashes < CURRENT )); then # behind it comes a command
    shift dashes words
    (( CURRENT -= dashes ))
    _normal
    return
  fi
  shift words
  (( CURRENT -= 1 ))
  case $words[1] in
{_lines(cases)}
  esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _hpcddp "$@"; else compdef _hpcddp hpcddp; fi
"""


def _zsh_option(completion: Completion) -> str:
    """`_arguments` takes an option's help in brackets, and behind colons what its value is."""
    text = completion.text.replace("[", "(").replace("]", ")").replace(":", ",")
    value = f":value:{_zsh_value(completion)}" if completion.has_value else ""
    return " ".join(_zsh(f"{name}[{text}]{value}") for name in completion.names)


def _zsh_positionals(verb: VerbCompletions) -> list[str]:
    """One repeated spec where there is one word or several of a kind, else each by its number."""
    if len(verb.positionals) == 1:
        return [_zsh(f"*:word:{_zsh_value(verb.positionals[0])}")]
    return [_zsh(f"{nth}:word:{_zsh_value(completion)}") for nth, completion in enumerate(verb.positionals, 1)]


def _zsh_value(completion: Completion) -> str:
    if completion.words == FILES:
        return "_files"
    return f"({' '.join(completion.words)})" if completion.words else " "


def _zsh(text: str) -> str:
    return shlex.quote(text)


def format_fish(verbs: list[VerbCompletions]) -> str:
    """One `complete` line for each verb, option and word."""
    lines = ["complete -c hpcddp -f"]  # no files, but where they belong
    lines += [f"complete -c hpcddp -n __fish_is_first_arg -a {v.verb} -d {_quoted([v.text])}" for v in verbs]
    for verb in verbs:
        start = f"complete -c hpcddp -n '__hpcddp_behind {verb.verb}'"
        for completion in verb.completions:
            value = _fish_value(completion)
            names = "".join(
                f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in completion.names
            )
            if names or value:
                lines.append(f"{start}{names}{value} -d {_quoted([completion.text])}")
    commands = " ".join(verb.verb for verb in verbs if verb.takes_command)
    return f"""\
# completion of hpcddp for fish, printed by `hpcddp completion fish`
function __hpcddp_behind -d 'the verb is this one, and there is no -- yet'
    set -l words (commandline -opc)
    test (count $words) -ge 2; and test $words[2] = $argv[1]; and not contains -- -- $words
end
function __hpcddp_in_command -d 'behind the -- of a verb that takes a command'
    set -l words (commandline -opc)
    test (count $words) -ge 3; and contains -- $words[2] {commands}; and contains -- -- $words
end
function __hpcddp_command -d 'what completes the command behind --'
    set -l words (commandline -opc) (commandline -ct)
    set -l dashes (contains -i -- -- $words)
    complete -C (string join ' ' -- $words[(math $dashes + 1)..-1])
end
{_lines(lines)}
complete -c hpcddp -n __hpcddp_in_command -a '(__hpcddp_command)'
"""


def _fish_value(completion: Completion) -> str:
    """-r: a value follows; -F: files; -x: no files."""
    words = f" -a {_quoted(completion.words)}" if completion.words and completion.words != FILES else ""
    if not completion.names:
        return words or (" -F" if completion.words == FILES else "")
    if not completion.has_value:
        return ""
    return " -r -F" if completion.words == FILES else f" -x{words}"


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
