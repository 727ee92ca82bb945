"""`hpcddp watch`: one run on a live screen."""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from hpcddp.cli.parser import VerbParser
from hpcddp.errors import RequestError
from hpcddp.login.find_run import call_run, find_single_run
from hpcddp.login.watched import Watcher

_DESCRIPTION = """\
Show one run on a live screen: its loss curve over all attempts, the speed, the newest checkpoint, when the job ends,
why attempts ended, the last lines of its log.

RUN is a name below runs/, a run's folder, or the id of one of its jobs. The run's folder is read every two seconds; the
scheduler is asked every 30. q or Ctrl-C ends the screen, and not the job. Needs Rich: pip install 'hpcddp[watch]'."""
_LOOK_S = 2.0


def build_parser() -> VerbParser:
    """The options of `hpcddp watch`."""
    parser = VerbParser("watch", _DESCRIPTION, example="hpcddp watch train", exits=(2,))
    parser.usage = "hpcddp watch RUN"
    parser.add_argument("run", metavar="RUN", help="a name, a folder or a job id")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The screen, until somebody ends it."""
    of = find_single_run(args.run, "a screen", "hpcddp watch {}")
    name = call_run(of)
    if not sys.stdout.isatty() or env.get("TERM", "dumb") == "dumb":
        raise RequestError("hpcddp watch draws on a terminal, and standard output is none", f"hpcddp status {name}")
    try:
        import rich  # noqa: F401  # whether it is there
    except ImportError as error:
        raise RequestError(
            "hpcddp watch needs Rich, which is not installed here",
            f"pip install 'hpcddp[watch]', or without it: hpcddp status --watch {name}",
        ) from error
    _show(Watcher(of, env))
    return 0


def _show(watcher: Watcher) -> None:
    from rich.console import Console
    from rich.control import Control

    from hpcddp.cli.watch_screen import Screen

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal is given back as it was
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without braille has no curve, and no traceback
    console = Console()
    screen = Screen(watcher.look(), watcher.curve)
    with _keys() as entry, _resizes() as resized, console.screen() as shown:
        while True:
            console.control(Control.home())
            shown.update(screen)
            ready = select.select([resized, *entry], [], [], _LOOK_S)[0]
            if resized in ready:
                os.read(resized, 4096)  # the same again, in another size
            elif ready:
                keys = os.read(entry[0], 64)
                if not keys or b"q" in keys.lower():
                    return
            else:
                screen = Screen(watcher.look(), watcher.curve)


@contextmanager
def _keys() -> Iterator[list[int]]:
    """The descriptor that keys come from, one by one; none where standard input is no terminal."""
    if not sys.stdin.isatty():
        yield []
        return
    import termios
    import tty

    entry = sys.stdin.fileno()
    before = termios.tcgetattr(entry)
    try:
        tty.setcbreak(entry)
        yield [entry]
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(entry, termios.TCSADRAIN, before)


@contextmanager
def _resizes() -> Iterator[int]:
    """A descriptor that can be read once the terminal has another size."""
    entry, wake = os.pipe()
    os.set_blocking(wake, False)

    def wake_up(_number: int, _frame: object) -> None:
        with suppress(BlockingIOError):
            os.write(wake, b"\0")

    before = signal.signal(signal.SIGWINCH, wake_up)
    try:
        yield entry
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.close(wake)
        os.close(entry)
