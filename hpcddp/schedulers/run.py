"""Runs the commands of schedulers and reads their answers, and runs other programs of this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from hpcddp.errors import NoAnswerError, SchedulerError
from hpcddp.schedulers.job_id import parse_id
from hpcddp.schedulers.registry import find_scheduler
from hpcddp.schedulers.row import CommandAnswer, JobFound, JobsFound, QueueFound

_PATIENCE_S = 60.0
_CANNOT_RUN = 127  # what a shell says then


def run_program(
    argv: list[str],
    env: Mapping[str, str],
    stdin: str = "",
    *,
    folder: str | None = None,
    patience_s: float | None = None,
    apart: bool = False,
) -> CommandAnswer:
    """Run a program in `folder` and return its answer. `apart`: the terminal's Ctrl-C does not reach it.

    SchedulerError if it cannot be started; NoAnswerError if it has not answered in time.
    """
    patience_s = _PATIENCE_S if patience_s is None else patience_s
    try:
        done = subprocess.run(
            argv,
            input=stdin.encode(errors="surrogateescape"),
            env=dict(env),
            cwd=folder,
            capture_output=True,
            timeout=patience_s,
            check=False,
            start_new_session=apart,
        )
    except OSError as e:
        where = f" in {folder}" if folder is not None and not os.path.isdir(folder) else ""
        raise SchedulerError(f"{argv[0]} cannot be run{where}: {e.strerror}", f"which {argv[0]}") from e
    except subprocess.TimeoutExpired as e:
        raise NoAnswerError(
            f"{argv[0]} has not answered in {patience_s:.0f} s", f"try it by hand: {shlex.join(argv)}"
        ) from e
    return CommandAnswer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def queue_job(
    name: str, words: list[str], env: Mapping[str, str], folder: str, hint: str = "", *, apart: bool = False
) -> str:
    """The id of the job that these words, run in `folder`, have queued. `hint`: for a request that is refused.

    SchedulerError if there is none; NoAnswerError where it may be queued all the same.
    """
    scheduler = find_scheduler(name)
    answer = run_program(words, env, folder=folder, apart=apart)
    lines = [line.strip() for line in answer.stdout.splitlines()]  # a site's banner may stand around the id's
    found = next(filter(None, (re.fullmatch(scheduler.commands.submitted, line) for line in reversed(lines))), None)
    if found is not None and answer.status == 0:
        return found[1]
    if answer.status == 0:
        raise NoAnswerError(f"{words[0]} answered {' '.join(answer.stdout.split())[-200:]!r}, which has no job id", "")
    why = [line.strip() for line in answer.stderr.splitlines() if line.strip() and "usage" not in line.lower()]
    reason = "; ".join(why[:3])[:400] or "it gives no reason"
    if re.search(r"timed out", reason, re.IGNORECASE):
        raise NoAnswerError(f"{words[0]} has had no answer from its server: {reason}", "")
    if scheduler.commands.down and re.search(scheduler.commands.down, reason):
        raise SchedulerError(f"{scheduler.title} does not answer: {reason}", "try again later; nothing was queued")
    raise SchedulerError(f"{words[0]} refuses the job (status {answer.status}): {reason}", hint)


def cancel_job(name: str, job: str, env: Mapping[str, str]) -> str:
    """Take one job out of the queue, or end it; why it is still there, "" where it is not."""
    try:
        answer = run_program([*find_scheduler(name).commands.cancel, job], env, apart=True)
    except SchedulerError as error:
        return error.message
    return (answer.stderr or answer.stdout).strip() or f"status {answer.status}" if answer.status else ""


def start_detached(argv: list[str], env: Mapping[str, str], *, folder: str, output: str) -> int:
    """Start a program that outlives this process and its terminal; its process number. SchedulerError if it cannot be
    started, or its output cannot be written."""
    try:
        with open(output, "ab") as written:
            started = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                start_new_session=True,
            )
    except OSError as e:
        raise SchedulerError(f"{argv[0]} cannot be started: {e.strerror} ({e.filename})", f"ls -ld {folder}") from e
    # it is this process's child: without a wait it would stay, when it has ended, and look alive
    threading.Thread(target=started.wait, daemon=True).start()
    return started.pid


def run_and_find_failures(
    commands: Mapping[str, list[str]], env: Mapping[str, str], patience_s: Mapping[str, float]
) -> dict[str, int]:
    """Run these commands at once, without their output. The names of those that did not end with status 0 in their
    time, and their statuses; what they have started ends with them."""
    began, started, failed = time.monotonic(), {}, dict[str, int]()
    for name, argv in commands.items():
        try:
            started[name] = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that what it has started ends with it
            )
        except OSError:
            failed[name] = _CANNOT_RUN
    for name, process in started.items():
        try:
            status = process.wait(max(began + patience_s[name] - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        if status:
            failed[name] = status
    return failed


def ask_job_state(name: str, job: str, env: Mapping[str, str], patience_s: float = _PATIENCE_S) -> str | None:
    """Ask for a job's state: one of the words that all schedulers share, `gone` if its scheduler does not know it (any
    more); None if that cannot be found out here."""
    found = ask_job(name, job, env, patience_s)
    return None if found is None or found.state == "unknown" else found.state


def ask_job(name: str, job: str, env: Mapping[str, str], patience_s: float = 10.0) -> JobFound | None:
    """Ask for one job as its scheduler shows it now; None if it cannot be asked, or if it does not answer."""
    scheduler, wanted = find_scheduler(name), parse_id(job)
    commands = scheduler.commands
    if commands.state:
        try:
            words = [word.replace("{}", job) for word in commands.state]
            answer = run_program(words, {**env, **commands.ask_env}, patience_s=patience_s)
        except SchedulerError:
            return None
        return commands.parse_job(wanted, answer, scheduler.states, env)
    if not commands.jobs:
        return None
    found = ask_jobs(name, [job], env, patience_s=patience_s)
    same = next((one for one in found.jobs if wanted.is_same(one.id)), None)
    return same or (None if found.problem else JobFound(wanted, "gone"))


def ask_jobs(
    name: str,
    ids: Sequence[str],
    env: Mapping[str, str],
    owners: Iterable[int] = (),
    patience_s: float = 10.0,
    *,
    one_by_one: Sequence[str] | None = None,
) -> JobsFound:
    """Ask the scheduler for these jobs, by one question however many they are. Jobs that it does not know (any more)
    are not in the answer, and others may be. `owners`: further users whose jobs they may be, by number. `one_by_one`:
    those that are asked for again, each by itself (None: all), if the answer neither shows them nor says that they are
    unknown: OpenPBS's qstat answers for the first alone since December 2023."""
    scheduler = find_scheduler(name)
    commands = scheduler.commands
    if not commands.jobs or not ids:
        return JobsFound()
    found = JobsFound()
    users = ",".join(dict.fromkeys(map(name_user, (os.getuid(), *owners))))
    for words in filter(None, (commands.jobs, commands.live_jobs)):
        argv = [w for word in words for w in (ids if word == "{ids}" else [word.replace("{user}", users)])]
        try:
            answer = run_program(argv, {**env, **commands.ask_env}, patience_s=patience_s)
        except SchedulerError as error:
            return JobsFound((), error.message)
        if commands.keeps_none and commands.keeps_none in answer.stderr:
            found = JobsFound((), f"{argv[0]}: {commands.keeps_none}")
            continue
        found = commands.parse_jobs(answer, scheduler.states)
        left = [] if found.problem or "{ids}" not in words else _list_missing(ids, found, answer)
        for job in left if len(ids) > 1 else ():
            if one_by_one is None or job in one_by_one:
                more = ask_jobs(name, [job], env, owners, patience_s)
                found = JobsFound((*found.jobs, *more.jobs), found.problem or more.problem)
        break
    return found


def ask_job_history(name: str, job: str, env: Mapping[str, str]) -> JobsFound:
    """Ask the scheduler for one job, also for one that ended long ago."""
    scheduler = find_scheduler(name)
    commands, wanted = scheduler.commands, parse_id(job)
    found = ask_jobs(name, [job], env)
    jobs = tuple(one for one in found.jobs if wanted.matches(one.id))
    if jobs or not commands.ended:
        return JobsFound(jobs, found.problem)
    try:
        answer = run_program([word.replace("{}", job) for word in commands.ended], {**env, **commands.ask_env})
    except SchedulerError as error:
        return JobsFound((), error.message)
    return commands.parse_ended(answer, scheduler.states)


def _list_missing(ids: Sequence[str], found: JobsFound, answer: CommandAnswer) -> list[str]:
    named = [*(one.id for one in found.jobs), *map(parse_id, answer.stderr.split())]
    return [job for job in ids if not any(parse_id(job).matches(one) for one in named)]


def name_user(number: int) -> str:
    """The name of this user; the number where it has none."""
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def ask_queues(name: str, env: Mapping[str, str], patience_s: float | None = None) -> list[QueueFound]:
    """The queues of this machine's scheduler. SchedulerError if it does not answer, or if its answer cannot be read."""
    commands = find_scheduler(name).commands
    texts = list[str]()
    for command in commands.survey:
        answer = run_program([*command], env, patience_s=patience_s)
        if answer.status:
            lines = (answer.stderr or answer.stdout).strip().splitlines()
            first = f": {lines[0]}" if lines else ""
            raise SchedulerError(f"{command[0]} ended with {answer.status}{first}", shlex.join(command))
        texts.append(answer.stdout)
    try:
        return commands.parse_survey(*texts)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        questions = " and ".join(command[0] for command in commands.survey)
        hint = "; ".join(map(shlex.join, commands.survey))
        raise SchedulerError(f"what {questions} printed cannot be read: {error}", hint) from error
