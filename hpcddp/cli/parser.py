"""argparse with this project's error form, and what every verb's help has: an example and the exit statuses."""

from __future__ import annotations

import argparse
import os

from hpcddp.cli.streams import write_help
from hpcddp.errors import RequestError

TYPE_CHECKING = False  # mypy knows the name; importing typing would cost `exec` more than argparse's parser
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from _typeshed import SupportsWrite


class VerbParser(argparse.ArgumentParser):
    """Raises RequestError instead of printing usage and leaving, so that every error has the same two lines.

    `example` is a line to type, or several. `exits` are the statuses of EXITS that the verb has beside 0, `also` its
    own ones. `takes_command`: whether a command may follow `--`.
    """

    def __init__(
        self,
        verb: str,
        description: str,
        *,
        example: str,
        exits: Iterable[int],
        also: Mapping[int, str] | None = None,
        takes_command: bool = False,
    ) -> None:
        super().__init__(
            prog=f"hpcddp {verb}",
            description=description,
            formatter_class=_formatter,
            add_help=False,  # argparse would look for a translation of its help's text, in eight files
            allow_abbrev=False,  # an abbreviation that works today is ambiguous tomorrow, inside somebody's job script
        )
        self.add_argument("-h", "--help", action="help", help="show this help and exit")
        self.example = example
        #: status -> what it means for this verb; "": what EXITS says
        self.exits = {0: "", **dict.fromkeys(exits, ""), **(also or {})}
        self.takes_command = takes_command
        #: option of another verb -> why this one does not have it
        self.elsewhere: dict[str, str] = {}
        #: of a verb that makes a job: its words for an option of another program, with its value
        self.find_equivalent: Callable[[str, str], str | None] = lambda _option, _value: None

    def format_help(self) -> str:
        """argparse's, with the example and the exit statuses."""
        from hpcddp.cli.verbs import EXITS, format_example, format_exits

        statuses = {status: text or EXITS[status] for status, text in self.exits.items()}
        return f"{super().format_help()}\n{format_example(self.example)}\n{format_exits(statuses)}"

    def print_help(self, _file: SupportsWrite[str] | None = None) -> None:
        """Print it on stdout, so that no scheduler takes it for a job."""
        write_help(self.format_help())

    def read_words(self, words: Sequence[str]) -> argparse.Namespace:
        """`parse_args`, with an error that says more of words that are left over: a command without its `--`.

        RequestError for an empty word, which `--nodes "$NODES"` gives where NODES is not set.
        """
        if "" in words:
            before = " ".join([self.prog, *words[: words.index("")]])
            raise RequestError(f"the word after `{before}` is empty", f"{self.prog} --help")
        found, left = self.parse_known_args(words)
        if left:
            raise self._refuse_left_over(found, left, words)
        return found

    def _refuse_left_over(self, found: argparse.Namespace, left: list[str], words: Sequence[str]) -> RequestError:
        if left[0].startswith("-"):
            return self._refuse_option(left[0], words)
        if not self.takes_command:
            return RequestError(f"{self.prog} takes no further word, got {left[0]!r}", f"{self.prog} --help")
        import shlex

        positional = [getattr(found, action.dest) for action in self._get_positional_actions()]
        command = shlex.join([*filter(None, positional), *left])
        return RequestError(f"{self.prog}: there is no -- before the command {command}", f"put it there: -- {command}")

    def _refuse_option(self, word: str, words: Sequence[str]) -> RequestError:
        """The error for an option that this verb does not have, with the one that means it or is spelt like it."""
        option, _, value = word.partition("=")
        if option[:1] == "-" and option[1:2].isalpha() and option[2:].isdigit():  # -n2
            option, value = option[:2], option[2:]
        after = words[words.index(word) + 1 :][:1]
        value = value or "".join(one for one in after if not one.startswith("-"))
        equivalent = self.find_equivalent(option, value)
        same = equivalent.split()[0] if equivalent else option
        if why := self.elsewhere.get(option) or self.elsewhere.get(same):
            return RequestError(f"{self.prog} has no option {option}: {why}", f"leave out {option}")
        if equivalent and same in self._option_string_actions:
            name = "a key of the job file" if same == "--set" else f"called {same}"
            return RequestError(f"{self.prog} has no option {option}; it is {name} here", equivalent)
        from hpcddp.errors import nearest

        guess = nearest(option, list(self._option_string_actions))
        return RequestError(f"{self.prog} has no option {option}{guess}", f"{self.prog} --help")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """argparse's, with the choice that was meant."""
        known = [str(choice) for choice in action.choices or ()]
        if known and value not in known:
            from hpcddp.errors import nearest

            name = action.option_strings[-1] if action.option_strings else self.prog
            what = f"{name} {value!r} is not known{nearest(str(value), known)}"
            raise RequestError(what, f"{name} with one of {', '.join(known)}")

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn; raising is not returning
        raise RequestError(f"{self.prog}: {message}", f"{self.prog} --help")


def _formatter(prog: str) -> argparse.HelpFormatter:
    """argparse makes a formatter for every option, and left alone would import shutil (2 ms) for the width."""
    try:
        width = os.get_terminal_size().columns
    except OSError:  # not a terminal
        width = 100
    return argparse.RawDescriptionHelpFormatter(prog, width=width - 2)
