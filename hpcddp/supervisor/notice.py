"""Notices to people: by a webhook, mail or a command, when a run ends, fails, is started again or stalls.

The supervisor sends them while the ranks run. What it cannot send, as on a compute node without a way out, is left in
the attempt's folder, from where the login node sends it. An address is named by a variable or a private file, and
stands in no script, record, log or message.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress

from hpcddp.errors import UNFINISHED, HpcddpError, RequestError
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.runs.folder import AttemptFolder, job_of
from hpcddp.runs.jsonfile import read_object, write_object
from hpcddp.runs.rank_files import is_recorded
from hpcddp.schedulers.run import run_program
from hpcddp.supervisor.follow import ask_in_thread

if TYPE_CHECKING:
    from _queue import SimpleQueue
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from hpcddp.diagnose.cause import Cause

EVENTS = ON_END, ON_FAILURE, ON_RESTART, ON_STALL = "end", "failure", "restart", "stall"
FORMATS = ("slack", "discord", "ntfy", "teams", "json")
#: The end of a host's name -> the form that it takes; others get JSON.
_HOSTS = {
    "slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord", "ntfy.sh": "ntfy",
    "office.com": "teams", "azure.com": "teams", "powerplatform.com": "teams",
}  # fmt: skip
_LONGEST = {"discord": 2000, "ntfy": 4000}  # characters
_SEND_S = 10.0  # for one message
_END_S = 15.0  # that the job's end waits for the last one, when nothing else is left to do
_SENT, _LEFT = ".sent", ".left"
_OF_END = rf"-({ON_END}|{ON_FAILURE})-"
_EXAMPLE = "notify: {on: [failure, stall], webhook: 'file:~/.config/hpcddp/webhook'}"


class Notify(Record):
    """Where notices go. `webhook`: `env:NAME` or `file:PATH`, of what has the address. `format`: "" is its host's."""

    on: tuple[str, ...] = (ON_FAILURE, ON_RESTART, ON_STALL)
    webhook: str = ""
    format: str = ""
    mail: str = ""
    command: tuple[str, ...] = ()

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(name for name in ("webhook", "mail", "command") if getattr(self, name))

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in self._asdict().items() if value}, separators=(",", ":"))


class Notice(Record):
    """One notice. `event`: one of EVENTS. `title`: one line."""

    event: str
    run: str
    job: str
    title: str
    text: str


# ---- the settings


def read_notify(value: object, where: str) -> Notify | None:
    """The settings that a mapping holds, or the text of one as JSON; None of `false`. RequestError for a wrong one."""
    if value == "false":
        return None
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, dict):
        raise RequestError(f"{where} is no mapping", f"{_EXAMPLE}, or notify: false")
    if unknown := next((key for key in value if key not in Notify._fields), ""):
        raise RequestError(f"{where} has no key {unknown!r}", f"its keys are {', '.join(Notify._fields)}")
    values: dict[str, Any] = {key: _read_value(key, value[key], where) for key in value}
    notify = Notify(**values)
    if odd := next((event for event in notify.on if event not in EVENTS), ""):
        raise RequestError(f"{where}: {odd!r} is no event", f"on: [{', '.join(EVENTS)}]")
    if notify.format not in {"", *FORMATS}:
        raise RequestError(f"{where}: {notify.format!r} is no format", f"format: {' | '.join(FORMATS)}")
    if notify.mail and not re.fullmatch(r"[\w.+]+[\w.+-]*@[\w.-]+", notify.mail):
        raise RequestError(f"{where}: {notify.mail!r} is no address", "mail: you@example.org")
    if not notify.ways:
        raise RequestError(f"{where} says nowhere to send notices to", _EXAMPLE)
    return notify


def _read_value(key: str, value: object, where: str) -> object:
    if key in {"on", "command"}:
        words = [value] if isinstance(value, str) and key == "on" else value
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise RequestError(f"{where}: {key} is no list of words, and no shell reads one", f"{key}: [WORD, WORD]")
        return tuple(words)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise RequestError(f"{where}: {key} is no text of one line", _EXAMPLE)
    named = re.fullmatch(r"(?:env:(?P<name>\w+)|file:.+)", value)
    if key == "webhook" and (named is None or is_recorded(named["name"] or "")):
        raise RequestError(  # what stands there may be secret
            f"{where}: webhook is the address itself, or a variable that run folders record: others can read those",
            "webhook: file:~/.config/hpcddp/webhook, which has it and mode 600; or webhook: env:NAME",
        )
    return value


def check_notify(notify: Notify, env: Mapping[str, str]) -> None:
    """RequestError where a private file that is here would not be taken later."""
    if notify.webhook.startswith("file:") and os.path.exists(_path(notify.webhook, env)):
        _read_address(notify.webhook, env)


def _path(word: str, env: Mapping[str, str]) -> str:
    return re.sub(r"^~(?=/)", lambda _: env.get("HOME", "~"), word.partition(":")[2])


def _read_address(word: str, env: Mapping[str, str]) -> str:
    """Read the address from the variable or the private file. RequestError if it is missing, or others may read it."""
    kind, _, name = word.partition(":")
    text, path = env.get(name, ""), _path(word, env)
    if kind == "file":
        try:
            with open(path, encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise RequestError(f"others may read {path}, the webhook of notify", f"chmod 600 {path}")
                text = file.read(10_000)
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}, the webhook of notify, cannot be read", f"ls -l {path}") from error
    if not re.match(r"https?://[^/\s@]+([/?\s]|$)", text.strip()):
        what = f"{word}, the webhook of notify, holds no http:// or https:// address, or a user's name in it"
        raise RequestError(what, "look into it")
    return text.split()[0]


# ---- one notice


def send(notify: Notify, way: str, notice: Notice, env: Mapping[str, str]) -> str:
    """Send it; why that did not work, without any address, or ""."""
    try:
        if way == "webhook":
            _post(_read_address(notify.webhook, env), notify.format, notice, env)
        else:
            _run(notify, way, notice, env)
    except HpcddpError as error:
        return error.message
    except Exception as error:  # a notice is no reason for a job to fail; an error's text has the address
        below = getattr(error, "reason", error)
        code = getattr(error, "code", None) or getattr(below, "strerror", None)
        return f"{type(below if isinstance(below, Exception) else error).__name__}{f': {code}' if code else ''}"
    return ""


def _post(address: str, form: str, notice: Notice, env: Mapping[str, str]) -> None:
    import urllib.parse
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_args: object) -> None:
            return None

    host = urllib.parse.urlsplit(address).hostname or ""
    by_host = next((form for end, form in _HOSTS.items() if f".{host}".endswith(f".{end}")), "json")
    body, kind = format_body(form or by_host, notice)
    proxies = {name: env[f"{name}_proxy"] for name in ("http", "https") if env.get(f"{name}_proxy")}
    opener = urllib.request.build_opener(NoRedirect(), urllib.request.ProxyHandler(proxies))
    request = urllib.request.Request(address, body, {"Content-Type": kind}, method="POST")  # noqa: S310  # http or https
    with opener.open(request, timeout=_SEND_S):
        pass


def format_body(form: str, notice: Notice) -> tuple[bytes, str]:
    """The body of the POST, and its type."""
    whole = f"{notice.title}\n{notice.text}".strip()[: _LONGEST.get(form, 20_000)]
    if form == "ntfy":
        return whole.encode(), "text/plain; charset=utf-8"
    content: object = notice._asdict()
    if form == "slack":  # what a log says is no mention, link or markup
        content = {"text": whole.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    elif form == "discord":
        content = {"content": whole, "allowed_mentions": {"parse": []}}
    elif form == "teams":
        block = {"type": "TextBlock", "text": whole.replace("\n", "\n\n"), "wrap": True}
        card = {"type": "AdaptiveCard", "version": "1.2", "body": [block]}
        attached = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
        content = {"type": "message", "attachments": [attached]}
    return json.dumps(content).encode(), "application/json"


def _run(notify: Notify, way: str, notice: Notice, env: Mapping[str, str]) -> None:
    words, text = list(notify.command), f"{notice.title}\n{notice.text}\n"
    if way == "mail":
        words = [next(filter(os.path.exists, ("/usr/sbin/sendmail", "/usr/lib/sendmail")), "sendmail"), "-t", "-i"]
        subject = re.sub(r"[^ -~]", "?", notice.title)
        text = f"To: {notify.mail}\nSubject: {subject}\nContent-Type: text/plain; charset=utf-8\n\n{text}"
    variables = {f"HPCDDP_NOTICE_{name.upper()}": value for name, value in notice._asdict().items()}
    # apart: the signals that end the job do not come to it
    done = run_program(words, {**env, **variables}, text, patience_s=_SEND_S, apart=True)
    if done.status:
        raise RequestError(f"{os.path.basename(words[0])} ended with status {done.status}", "run it by hand")


# ---- the attempt's folder: the settings, and a file for each notice and way, whose ending says whether it was sent


def _folder(attempt: AttemptFolder) -> str:
    return os.path.join(attempt.path, "notices")


def _settings(attempt: AttemptFolder) -> str:
    return os.path.join(_folder(attempt), "settings.json")


def _make(event: str, attempt: AttemptFolder, what: str, text: str) -> Notice:
    job, run = job_of(attempt.name), os.path.abspath(attempt.run.path)
    return Notice(event, run, job, f"{os.path.basename(run)} {what}, job {job}", f"{text}\n{run}".strip())


def _send_all(notify: Notify, attempt: AttemptFolder, notice: Notice, env: Mapping[str, str]) -> list[str]:
    began = time.time_ns() // 1_000_000
    places = {way: os.path.join(_folder(attempt), f"{began}-{notice.event}-{way}") for way in notify.ways}
    return [problem for way, place in places.items() for problem in _send_one(notify, way, notice, place, env)]


def _send_one(notify: Notify, way: str, notice: Notice, place: str, env: Mapping[str, str]) -> list[str]:
    problem = send(notify, way, notice, env)
    with suppress(OSError):
        write_object(place + (_LEFT if problem else _SENT), notice._asdict())
    return [f"no notice by {way} from here: {problem}"] if problem else []


class Notices:
    """The notices of one job, which its supervisor sends in threads. Only `finish` waits, and no error gets out."""

    def __init__(self, notify: Notify | None, env: Mapping[str, str], emit: Callable[[str], None]) -> None:
        self._notify, self._env, self._emit = notify, env, emit
        self._running: list[SimpleQueue[None]] = []

    def open(self, attempt: AttemptFolder) -> None:
        """Leave the settings for the login node, which sends the notice of an end that nobody here could see."""
        if self._notify is not None:
            with suppress(OSError):
                os.makedirs(_folder(attempt), exist_ok=True)
                write_object(_settings(attempt), json.loads(self._notify.to_json()))

    def stall(self, attempt: AttemptFolder, text: str) -> None:
        self._send(ON_STALL, attempt, "makes no progress", lambda: text)

    def restart(self, attempt: AttemptFolder, why: str) -> None:
        self.open(attempt)
        self._send(ON_RESTART, attempt, "is started again", lambda: why)

    def end(self, attempt: AttemptFolder, status: int | None, by: str, why: str) -> None:
        """The job has ended with this status. `by`: the signal that came; "": none has."""
        event = ON_FAILURE if status and status != UNFINISHED and not by else ON_END
        what = "has failed" if event == ON_FAILURE else "has ended, unfinished" if status else "has ended"
        why = why or (f"{by} came" if by else "")
        self._send(event, attempt, what, lambda: _find_cause(attempt, why) if event == ON_FAILURE else why)

    def finish(self) -> None:
        """Wait a moment for what is still sent; the login node sends the rest."""
        until = time.monotonic() + _END_S
        while any(one.empty() for one in self._running) and time.monotonic() < until:
            time.sleep(0.02)

    def _send(self, event: str, attempt: AttemptFolder, what: str, text: Callable[[], str]) -> None:
        notify = self._notify
        if notify is None or event not in notify.on:
            return

        def run() -> None:
            with suppress(Exception):  # as above
                for problem in _send_all(notify, attempt, _make(event, attempt, what, text()), self._env):
                    self._emit(f"{problem}; hpcddp status --watch sends it on the login node")

        self._running.append(ask_in_thread(run))


def _find_cause(attempt: AttemptFolder, why: str) -> str:
    from hpcddp.diagnose.job_record import diagnose_attempt  # no job that ends well needs it

    return explain_cause(diagnose_attempt(attempt, why, None), why)


def explain_cause(cause: Cause, why: str) -> str:
    """The text of a notice: the cause, or `why` where the logs name none."""
    from hpcddp.diagnose.cause import format_cause

    return why if cause.class_ in {"unknown", "none"} else format_cause(cause, "cause").strip()


# ---- on the login node


def send_left(
    attempts: Sequence[AttemptFolder], env: Mapping[str, str], end: Callable[[], tuple[str, str, str]] | None
) -> list[str]:
    """Send what supervisors could not, each once, however many look; what did not work. `end`: of a run that has ended,
    the event, what it is called and why, for which no notice may have been made; None: it lives."""
    problems = []
    for attempt in attempts:
        try:
            found = read_object(_settings(attempt)) or {}
            notify = read_notify({key: value for key, value in found.items() if key != "schema"}, "settings.json")
            names = os.listdir(_folder(attempt))
        except (OSError, HpcddpError):
            continue
        if notify is None:
            continue
        if end is not None and attempt == attempts[-1] and not any(re.search(_OF_END, name) for name in names):
            event, what, why = end()
            if event in notify.on:
                problems += _send_all(notify, attempt, _make(event, attempt, what, why), env)
        for name in names:
            if name.endswith(_LEFT):
                problems += _send_again(notify, os.path.join(_folder(attempt), name), env)
    return problems


def _send_again(notify: Notify, path: str, env: Mapping[str, str]) -> list[str]:
    """Send what was left. Of several that look at the same time one has the file."""
    place, taken = path.removesuffix(_LEFT), f"{path}.{os.getpid()}"
    try:
        os.rename(path, taken)
        found = read_object(taken) or {}
        os.unlink(taken)
    except (OSError, HpcddpError):
        return []
    notice = Notice(*(str(found.get(key, "")) for key in Notice._fields))
    return _send_one(notify, place.rpartition("-")[2], notice, place, env)
