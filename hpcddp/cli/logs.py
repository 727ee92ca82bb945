"""`hpcddp logs`: what the ranks of a run have printed, and go on printing."""

from __future__ import annotations

import argparse
import os
import re
import select
import shlex
import sys
import time
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_message, shown_bytes
from hpcddp.errors import RequestError
from hpcddp.login.find_run import find_single_run, format_run
from hpcddp.login.judge import has_live_job
from hpcddp.login.on_disk import read_on_disk
from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.runs.logs import LogFile, LogReader, list_sources, merge, order_attempts, read_log_lines
from hpcddp.runs.submitted import read_submissions
from hpcddp.units import parse_count

_DESCRIPTION = """\
Print what a run's ranks have printed: the launcher and rank 0 of the newest attempt, or the ranks that are named, in
the order of the times that lines begin with.

RUN is a name below runs/, a run's folder, or the id of one of its jobs."""
_POLL_S = 0.5
_ASK_S = 30.0  # how often the scheduler is asked whether anything of the run still lives
_ALL = "all"


def build_parser() -> VerbParser:
    parser = VerbParser("logs", _DESCRIPTION, example="hpcddp logs train -f\nhpcddp logs train --rank 0-3", exits=(2,))
    parser.usage = "hpcddp logs RUN [options]"
    parser.add_argument("run", metavar="RUN", help="a name, a folder or a job id")
    parser.add_argument("-f", "--follow", action="store_true", help="go on, also into the next start and the next job")
    parser.add_argument("-n", "--lines", metavar="N", help="the last N lines only")
    parser.add_argument("--rank", metavar="R", help="the output of these ranks: 3, 0-7, 1,5, or all")
    parser.add_argument("--attempt", metavar="A", help="an attempt's name, its number from 1, or all (the newest)")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Lines on stdout as they are, each behind its source where there are several."""
    of = find_single_run(args.run, "logs", "hpcddp logs {}")
    last = None if args.lines is None else parse_count(args.lines, "--lines")
    printer = _Printer(_read_ranks(args.rank))
    there = order_attempts(of)
    attempts = _choose(of, there, args.attempt, follow=args.follow)
    if not attempts and not args.follow:
        return _print_start(of, last)
    printer.print_so_far(attempts, last, follow=args.follow)
    if args.follow:
        _follow(of, printer, env, there)
    return 0


class _Printer:
    """Which files are shown, and how far each was read."""

    def __init__(self, ranks: frozenset[int] | None) -> None:
        self._ranks = ranks
        self._readers: dict[str, LogReader] = {}

    def print_so_far(self, attempts: list[AttemptFolder], last: int | None, *, follow: bool) -> None:
        """Print what is there. RequestError if the attempts have no such file."""
        shown: list[tuple[LogFile, bytes]] = []
        for attempt in attempts:
            texts = []
            for source in list_sources(attempt, self._ranks):
                lines, offset = read_log_lines(source.path, last, whole=follow)
                self._readers[source.path] = LogReader(source, offset)
                texts.append((source, lines))
            shown += merge(texts)
        if attempts and not self._readers and not follow:
            ranks = f" of rank {', '.join(map(str, sorted(self._ranks)[:8]))}" if self._ranks else ""
            raise RequestError(
                f"there is no log{ranks} in attempt {attempts[-1].name}",
                f"ls {shlex.quote(os.path.dirname(attempts[-1].log))}",
            )
        for source, line in shown[-last:] if last else shown:
            self._print(source, line)

    def print_new(self, attempt: AttemptFolder, *, ended: bool) -> None:
        """Print what has come since; of a new attempt all of it."""
        readers = [self._readers.setdefault(one.path, LogReader(one)) for one in list_sources(attempt, self._ranks)]
        for source, line in merge([(reader.source, reader.read(ended=ended)) for reader in readers]):
            self._print(source, line)
        sys.stdout.flush()

    def _print(self, source: LogFile, line: bytes) -> None:
        label = f"{source.label} | ".encode() if self._ranks is None or len(self._ranks) > 1 else b""
        sys.stdout.buffer.write(label + shown_bytes(line) + b"\n")


def _follow(of: RunFolder, printer: _Printer, env: Mapping[str, str], shown: list[AttemptFolder]) -> None:
    """Print until nothing of the run lives any more. `shown`: the attempts that were there; the last may go on."""
    announced = {attempt.name for attempt in shown}
    over = {attempt.name for attempt in shown[:-1]}
    last_question = 0.0
    while True:
        attempts = order_attempts(of)
        for attempt in attempts:
            if attempt.name in over:
                continue
            # the last lines of the one before come late, and a new one may not have said yet that it holds the run
            is_over = attempt.name in announced and attempt not in attempts[-2:]
            if attempt.name not in announced:
                print_message(f"attempt {attempt.name}")
                announced.add(attempt.name)
            printer.print_new(attempt, ended=is_over)
            if is_over:
                over.add(attempt.name)
        if time.monotonic() - last_question >= _ASK_S or (attempts and _has_ended_on_disk(of)):
            if not has_live_job(of, env):
                for attempt in order_attempts(of):
                    if attempt.name not in over:
                        printer.print_new(attempt, ended=True)
                return
            last_question = time.monotonic()
        _rest()


def _rest() -> None:
    """Wait a while. BrokenPipeError if nobody reads the output any more, which no write says where no line comes."""
    poll = select.poll()
    poll.register(1, 0)
    if poll.poll(_POLL_S * 1000):
        raise BrokenPipeError


def _has_ended_on_disk(of: RunFolder) -> bool:
    """Whether the files of the run record its end: then the scheduler is asked at once."""
    one = read_on_disk(of)
    return one.holder is not None and one.ended and all(job.holder is not None for job in one.jobs)


def _choose(of: RunFolder, attempts: list[AttemptFolder], wanted: str | None, *, follow: bool) -> list[AttemptFolder]:
    if wanted is None:
        return attempts[-1:]
    if wanted == _ALL:
        return attempts
    named = [attempt for attempt in attempts if attempt.name == wanted]
    if not named and wanted.isdecimal() and 1 <= int(wanted) <= len(attempts):
        named = [attempts[int(wanted) - 1]]
    if not named:
        names = ", ".join(attempt.name for attempt in attempts[-6:]) or "none yet"
        raise RequestError(f"run {of.path} has no attempt {wanted}", f"1 to {len(attempts)}, or one of: {names}")
    if follow:
        raise RequestError("--follow goes with the newest attempt", f"leave out --attempt {wanted}")
    return named


def _print_start(of: RunFolder, last: int | None) -> int:
    """Print the job's own output, if it is known, before an attempt has begun."""
    for submission in reversed(read_submissions(of)):
        lines, _ = read_log_lines(submission.output, last) if submission.output else ([], 0)
        if lines:
            for line in lines:
                sys.stdout.buffer.write(shown_bytes(line) + b"\n")
            return 0
    raise RequestError(
        f"run {of.path} has no log: none of its jobs has started its ranks", f"hpcddp status {format_run(of)}"
    )


def _read_ranks(text: str | None) -> frozenset[int] | None:
    """The ranks of `--rank`; empty: none is named, None: all."""
    if text is None:
        return frozenset()
    if text == _ALL:
        return None
    ranks = set[int]()
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part)
        if not found or int(found[1]) > int(found[2] or found[1]):
            raise RequestError(f"--rank {text!r} names no ranks", "--rank 3, --rank 0-7, --rank 1,5 or --rank all")
        ranks.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(ranks)
