"""argparse with this project's error form, and what every verb's help has: an example and the exit statuses."""

from __future__ import annotations

import argparse
import os

from hpcddp.cli.streams import write_help
from hpcddp.errors import RequestError

TYPE_CHECKING = False  # mypy knows the name; importing typing would cost `exec` more than argparse's parser
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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

    def format_help(self) -> str:
        """argparse's, with the example and the exit statuses."""
        from hpcddp.cli.verbs import EXITS, format_example, format_exits

        statuses = {status: text or EXITS[status] for status, text in self.exits.items()}
        return f"{super().format_help()}\n{format_example(self.example)}\n{format_exits(statuses)}"

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """As argparse does; on stdout so that no scheduler takes it for a job."""
        if file is None:
            write_help(self.format_help())
        else:
            super().print_help(file)

    def read_words(self, words: Sequence[str]) -> argparse.Namespace:
        """`parse_args`, with an error that says more of words that are left over: a command without its `--`."""
        found, left = self.parse_known_args(words)
        if left and len(self._get_positional_actions()) > 1:
            # options between two words (`sites show --json abci3`): argparse gives each optional word its turn at once
            found, left = self.parse_known_intermixed_args(words)
        if left:
            raise self._refuse_left_over(found, left, words)
        self._refuse_empty(found)
        return found

    def _refuse_empty(self, found: argparse.Namespace) -> None:
        """RequestError for a value that is the empty word, which `--nodes "$NODES"` gives where NODES is not set: left
        to the verb, it would be taken for an option that nobody gave."""
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if action.nargs == 0 or (value != "" and not (isinstance(value, list) and "" in value)):
                continue
            if action.option_strings:
                option = action.option_strings[-1]
                hint = f"{option} {action.metavar}, or leave out {option}"
                raise RequestError(f"{option} has no value: the word after it is empty", hint)
            raise RequestError(f"{self.prog}: {action.metavar} is an empty word", self._first_example)

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
        """What to type instead of an option that this verb does not have, by its meaning or else by its spelling."""
        option, _, value = word.partition("=")
        if option[:1] == "-" and option[1:2].isalpha() and option[2:].isdigit():  # -n2
            option, value = option[:2], option[2:]
        equivalent, given = None, value
        if "--nodes" in self.elsewhere or "--nodes" in self._option_string_actions:  # a verb that makes a job
            from hpcddp.cli.request import find_equivalent

            after = words[words.index(word) + 1 :][:1]
            given = value or "".join(one for one in after if not one.startswith("-"))
            equivalent = find_equivalent(option, given)
        same = equivalent.split()[0] if equivalent else option
        of_node = "--ranks-per-node"
        if equivalent and same in self.elsewhere and of_node in equivalent and of_node in self._option_string_actions:
            what = f"{self.prog} has no option {option}: it is the ranks of each node here; {self.elsewhere[same]}"
            return RequestError(what, f"{of_node} {given or 'R'}")
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
            from hpcddp.errors import find_nearest

            name = action.option_strings[-1] if action.option_strings else self.prog
            guess = find_nearest(str(value), known)
            hint = f"{name} {guess}" if guess else f"{name} with one of {', '.join(known)}"
            raise RequestError(f"{name} {value!r} is not known", hint)

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn; raising is not returning
        lacks_word = message.startswith("the following arguments are required")
        raise RequestError(f"{self.prog}: {message}", self._first_example if lacks_word else f"{self.prog} --help")

    @property
    def _first_example(self) -> str:
        return self.example.splitlines()[0]


def _formatter(prog: str) -> argparse.HelpFormatter:
    """argparse makes a formatter for every option, and left alone would import shutil (2 ms) for the width."""
    try:
        width = os.get_terminal_size().columns
    except OSError:  # not a terminal
        width = 100
    return argparse.RawDescriptionHelpFormatter(prog, width=width - 2)
