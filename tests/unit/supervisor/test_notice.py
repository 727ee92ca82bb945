"""Notices: what is sent, where to, by whom, and that neither a job's end nor a secret depends on it."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli.main import main
from hpcddp.errors import RequestError
from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.supervisor.notice import Notice, Notices, Notify, check_notify, format_body, read_notify, send, send_left

MESSAGE = Notice("failure", "/u/runs/train", "4711", "train has failed, job 4711", "disk-full on rank 1 <!channel>")


class Taken:
    """What a real server on this machine has received; it answers with `status`."""

    def __init__(self) -> None:
        self.status, self.bodies, self.heads = 200, list[bytes](), list[dict[str, str]]()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.heads.append(dict(self.headers))
                outer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(outer.status)
                if outer.status == 302:
                    self.send_header("Location", outer.url)
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/secret-topic"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def events(self) -> list[str]:
        return [json.loads(body)["event"] for body in self.bodies]


@pytest.fixture
def server() -> Iterator[Taken]:
    taken = Taken()
    yield taken
    taken.close()


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    of = RunFolder(str(tmp_path / "runs/train")).attempt("4711.1")
    Path(of.log).parent.mkdir(parents=True)
    Path(of.log).write_text(
        "[rank1]: Traceback (most recent call last):\n[rank1]: OSError: [Errno 28] No space left on device\n"
    )
    return of


def notices(settings: dict[str, Any], env: dict[str, str]) -> tuple[Notices, list[str]]:
    said: list[str] = []
    notify = read_notify(settings, "notify")
    return Notices(notify, env, said.append), said


def states(attempt: AttemptFolder) -> list[str]:
    return sorted(name.rpartition(".")[2] for name in os.listdir(f"{attempt.path}/notices") if "settings" not in name)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("https://hooks.slack.com/services/T0/B0/secret", "is no mapping"),
        ({"webhook": "https://hooks.slack.com/services/T0/B0/secret"}, "is the address itself"),
        ({"webhook": "env:HPCDDP_HOOK"}, "a variable that run folders record"),
        ({"webhook": "env:NCCL_HOOK"}, "a variable that run folders record"),
        ({"webhook": "env:SLURM_HOOK"}, "a variable that run folders record"),
        ({"command": "notify-send; rm -rf ~"}, "no list of words"),
        ({"command": ["x", ""]}, "no list of words"),
        ({"mail": "me@example.org\nBcc: all@example.org"}, "no text of one line"),
        ({"mail": "-oQ/tmp@example.org"}, "no address"),
        ({"on": ["failed"], "mail": "me@example.org"}, "'failed' is no event"),
        ({"webhook": "env:HOOK", "format": "irc"}, "'irc' is no format"),
        ({"on": ["end"]}, "nowhere"),
        ({"url": "x"}, "no key 'url'"),
    ],
)
def test_wrong_settings_are_refused_and_an_address_is_not_repeated(value: object, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        read_notify(value, "notify in job.yaml")
    assert "secret" not in str(refused.value)


def test_settings_travel_as_one_word_of_the_script_without_what_is_secret(tmp_path: Path) -> None:
    notify = read_notify({"on": "end", "webhook": "env:HOOK", "command": ["a", "$(b)"]}, "notify")
    assert notify == Notify(on=("end",), webhook="env:HOOK", command=("a", "$(b)"))
    assert notify is not None
    assert read_notify(notify.to_json(), "--notify") == notify
    assert read_notify("false", "notify") is None


def test_a_file_that_others_may_read_is_refused_at_once_and_later(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("http://127.0.0.1:9/secret\n")
    (tmp_path / "hook").chmod(0o644)
    notify = Notify(webhook="file:~/hook")
    with pytest.raises(RequestError, match="others may read"):
        check_notify(notify, {"HOME": str(tmp_path)})
    assert "others may read" in send(notify, "webhook", MESSAGE, {"HOME": str(tmp_path)})
    (tmp_path / "hook").chmod(0o600)
    check_notify(notify, {"HOME": str(tmp_path)})


def test_a_webhook_gets_one_post_with_the_form_of_its_host(server: Taken) -> None:
    env = {"HOOK": server.url}
    assert send(Notify(webhook="env:HOOK"), "webhook", MESSAGE, env) == ""
    assert json.loads(server.bodies[0]) == MESSAGE._asdict()
    forms = {form: format_body(form, MESSAGE)[0] for form in ("slack", "discord", "ntfy", "teams")}
    assert json.loads(forms["slack"])["text"].endswith("&lt;!channel&gt;")
    assert json.loads(forms["discord"])["allowed_mentions"] == {"parse": []}
    assert forms["ntfy"].startswith(b"train has failed")
    assert "train has failed" in json.loads(forms["teams"])["attachments"][0]["content"]["body"][0]["text"]


@pytest.mark.parametrize("status", [403, 302])
def test_what_did_not_work_is_said_without_the_address_and_no_redirect_is_followed(server: Taken, status: int) -> None:
    server.status = status
    said = send(Notify(webhook="env:HOOK"), "webhook", MESSAGE, {"HOOK": server.url})
    assert str(status) in said
    assert "secret" not in said
    assert len(server.bodies) == 1
    said = send(Notify(webhook="env:HOOK"), "webhook", MESSAGE, {"HOOK": "http://127.0.0.1:1/secret"})
    assert "refused" in said
    assert "secret" not in said


def test_a_command_is_a_list_of_words_with_the_message_on_its_input_and_in_its_environment(tmp_path: Path) -> None:
    script = "import os, sys; open(sys.argv[1], 'w').write(sys.stdin.read() + os.environ['HPCDDP_NOTICE_EVENT'])"
    words = (sys.executable, "-c", script, f"{tmp_path}/$(touch x); y")
    assert send(Notify(command=words), "command", MESSAGE, dict(os.environ)) == ""
    assert (tmp_path / "$(touch x); y").read_text() == f"{MESSAGE.title}\n{MESSAGE.text}\nfailure"
    assert "ended with status 3" in send(Notify(command=("sh", "-c", "exit 3")), "command", MESSAGE, {"PATH": "/bin"})
    assert "cannot be run" in send(Notify(command=("/no/such",)), "command", MESSAGE, {})


def test_an_end_with_a_failure_has_its_cause_and_one_by_a_signal_is_no_failure(
    server: Taken, attempt: AttemptFolder
) -> None:
    sent, said = notices({"on": ["end", "failure"], "webhook": "env:HOOK"}, {"HOOK": server.url})
    sent.open(attempt)
    sent.end(attempt, 1, "", "rank 1 ended with status 1")
    sent.finish()
    message = json.loads(server.bodies[0])
    assert (message["event"], message["title"]) == ("failure", "train has failed, job 4711")
    assert "disk-full on rank 1" in message["text"]
    assert "hint" in message["text"]
    sent.end(attempt, 143, "SIGTERM", "")
    sent.finish()
    assert server.events == ["failure", "end"]
    assert (states(attempt), said) == (["sent", "sent"], [])
    assert server.url not in "".join(path.read_text() for path in Path(attempt.path).rglob("*") if path.is_file())


def test_an_event_of_which_nobody_asked_to_hear_is_not_sent(server: Taken, attempt: AttemptFolder) -> None:
    sent, _ = notices({"webhook": "env:HOOK"}, {"HOOK": server.url})
    sent.stall(attempt, "no progress for 60 s")
    sent.finish()
    sent.restart(attempt, "rank 1 was killed")
    sent.end(attempt, 0, "", "")
    sent.finish()
    assert server.events == ["stall", "restart"]


def test_what_a_compute_node_cannot_send_is_sent_once_by_the_login_node(server: Taken, attempt: AttemptFolder) -> None:
    sent, said = notices({"webhook": "env:HOOK"}, {"HOOK": "http://127.0.0.1:1/"})
    sent.open(attempt)
    sent.end(attempt, 1, "", "")
    sent.finish()
    assert states(attempt) == ["left"]
    assert len(said) == 1
    assert "hpcddp status --watch" in said[0]
    assert send_left([attempt], {"HOOK": "http://127.0.0.1:1/"}, None) != []
    assert states(attempt) == ["left"]
    for _ in range(2):
        assert send_left([attempt], {"HOOK": server.url}, lambda: ("failure", "has failed", "killed")) == []
    assert (server.events, states(attempt)) == (["failure"], ["sent"])


def test_an_end_that_no_supervisor_saw_is_told_from_the_login_node(server: Taken, attempt: AttemptFolder) -> None:
    sent, _ = notices({"webhook": "env:HOOK"}, {})
    sent.open(attempt)
    send_left([attempt], {"HOOK": server.url}, None)
    assert server.events == []
    for _ in range(2):
        send_left([attempt], {"HOOK": server.url}, lambda: ("failure", "has failed", "node3 is gone"))
    assert server.events == ["failure"]


def test_the_users_own_file_holds_for_every_job_and_a_job_file_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "hpcddp").mkdir()
    (tmp_path / "hpcddp/notify.yaml").write_text("webhook: env:SLACK_URL\ncommand: [say, it's; rm x]\n")
    size = ["--nodes", "1", "--gpus-per-node", "0", "--cpus-per-rank", "1", "--walltime", "1h"]
    assert main(["render", "--no-check", "--site", "generic-slurm", *size, "--", "python", "train.py"]) == 0
    words = '\'{"on":["failure","restart","stall"],"webhook":"env:SLACK_URL","command":["say","it\'"\'"\'s; rm x"]}\''
    assert f"--notify {words}" in capsys.readouterr().out
    for off in ("notify=false", "supervise=false"):
        asked = [*size, "--set", off, "--", "python", "train.py"]
        assert main(["render", "--no-check", "--site", "generic-slurm", *asked]) == 0
        assert "--notify" not in capsys.readouterr().out
