"""`hpcddp watch`: one run on a live screen."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.errors import RequestError
from hpcddp.login.find_run import find_single_run, format_run
from hpcddp.login.watched import Watcher

_DESCRIPTION = """\
Show one run on a live screen: its loss curve over all attempts, the speed, the newest checkpoint, when the job ends,
why attempts ended, the last lines of its log.

RUN is a name below runs/, a run's folder, or the id of one of its jobs. The run's folder is read every two seconds; the
scheduler is asked every 30. Ctrl-C ends the screen, and not the job. Needs Rich: pip install 'hpcddp[watch]'."""
_POLL_S = 2.0


def build_parser() -> VerbParser:
    parser = VerbParser("watch", _DESCRIPTION, example="hpcddp watch train", exits=(2,))
    parser.usage = "hpcddp watch RUN"
    parser.add_argument("run", metavar="RUN", help="a name, a folder or a job id")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    of = find_single_run(args.run, "a screen", "hpcddp watch {}")
    name = format_run(of)
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
    console = Console()
    with console.screen() as shown:
        while True:
            console.control(Control.home())
            shown.update(Screen(watcher.poll(), watcher.curve))
            time.sleep(_POLL_S)
