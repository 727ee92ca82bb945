"""The agents of the ranks and the supervisor, over real sockets on this machine, with real processes as the ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hpcddp.errors import PEER_FAILED
from hpcddp.guard.hpcddp_stand import WAITS
from hpcddp.runs.folder import AttemptFolder, RunFolder
from hpcddp.runs.hang import Stand
from hpcddp.runs.heartbeat import NO_RANK, Beat, open_page
from hpcddp.supervisor import agent, wire
from hpcddp.supervisor.agent import Agent
from hpcddp.supervisor.events import ERROR, GONE, KILLED, LEFT, SILENT, STUCK, UNHEARD, UNKNOWN, find_first_cause
from hpcddp.supervisor.program import Teardown
from hpcddp.supervisor.rank import OPENS
from hpcddp.supervisor.reports import Reports
from hpcddp.supervisor.wire import read_supervisor_address

LONG_S, SHORT_S = 1000.0, 2.0  # the short one: a busy machine keeps nobody from a word for so long


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    attempt = RunFolder(str(tmp_path)).attempt("7.1")
    os.makedirs(attempt.path)
    return attempt


def make_agent(attempt: AttemptFolder, rank: int, world_size: int, host: str) -> Agent:
    address = read_supervisor_address(attempt)
    assert address is not None
    return Agent(attempt, address, rank, world_size, host, os.environ)


class Ranks:
    """Processes of this test, each with its agent in a thread."""

    def __init__(self, attempt: AttemptFolder, reports: Reports) -> None:
        self.attempt, self.reports = attempt, reports
        self.processes: list[subprocess.Popen[bytes]] = []
        self.agents: list[Agent] = []
        self.given: list[list[int]] = []  # the signals that each was to get

    def start(self, host: str) -> Agent:
        rank = len(self.processes)
        sleep = ["sleep", "1000"]
        env = os.environ | {
            "HPCDDP_RUN_DIR": self.attempt.run.path,
            "HPCDDP_ATTEMPT": self.attempt.name,
            "RANK": str(rank),
        }
        self.processes.append(subprocess.Popen(sleep, env=env))
        agent = make_agent(self.attempt, rank, 4, host)
        self.agents.append(agent)
        self.given.append([])
        agent.start(self.processes[-1].pid, self.given[-1].append)
        self.until(lambda: rank in self.reports.ranks)
        return agent

    def until(self, is_so: Callable[[], object]) -> None:
        """Waits as long as the machine needs; the test's own timeout ends what never comes."""
        while not is_so():
            self.reports.read()
            self.reports.check()
            time.sleep(0.01)

    def kinds(self) -> list[tuple[str, int]]:
        return [(event.kind, event.rank) for event in self.reports.events]

    def end(self) -> None:
        self.reports.close()
        for process in self.processes:
            process.kill()
            process.wait()
        for one in self.agents:
            one.wait_for_others()


@pytest.fixture
def ranks_with(attempt: AttemptFolder) -> Iterator[Callable[[float], Ranks]]:
    made = []

    def make(limit_s: float) -> Ranks:
        made.append(Ranks(attempt, Reports(limit_s, {})))
        made[-1].reports.open(attempt)
        return made[-1]

    yield make
    for ranks in made:
        ranks.end()


@pytest.fixture
def ranks(ranks_with: Callable[[float], Ranks]) -> Ranks:
    """Nobody is silent or stuck."""
    return ranks_with(LONG_S)


def report_end(ranks: Ranks, agent: Agent, status: int, text: str = "") -> None:
    """As `hpcddp exec` does; it waits for the supervisor, which is this thread."""
    tells = threading.Thread(target=agent.end, args=(wire.Ended(status, text),))
    tells.start()
    ranks.until(lambda: not tells.is_alive())


def test_ranks_are_known_and_their_ends_are_heard(ranks: Ranks):
    well, killed, failed, unfinished = (ranks.start(f"n{rank}") for rank in range(4))
    report_end(ranks, well, 0)
    report_end(ranks, unfinished, 85 << 8)
    assert ranks.kinds() == []
    assert not ranks.reports.all_over
    report_end(ranks, killed, signal.SIGKILL)
    report_end(ranks, failed, 1 << 8, "step 1\nValueError: größer")
    assert ranks.kinds() == [(KILLED, 1), (ERROR, 2)]
    assert ranks.reports.events[1].text == "ValueError: größer"
    assert [event.host for event in ranks.reports.events] == ["n1", "n2"]
    assert ranks.reports.all_over


def test_a_signal_after_a_refusal_is_the_launcher_s_own_also_where_the_refusing_process_has_no_rank(
    ranks: Ranks, attempt: AttemptFolder
):
    other = ranks.start("n0")
    refuses = make_agent(attempt, NO_RANK, 0, "n1")
    tells = threading.Thread(target=refuses.refuse, args=(4, "NODE_RANK=0 is exported too"))
    tells.start()
    ranks.until(lambda: not tells.is_alive())
    other.send_signal(signal.SIGTERM)
    report_end(ranks, other, signal.SIGTERM)
    teardown = Teardown(ranks.reports, print, acts=False)
    cause = teardown.conclude(143)
    assert cause is not None
    assert (str(cause), cause.exit_status) == ("n1: NODE_RANK=0 is exported too", 4)
    assert teardown.find_signal(cause) == 0


def test_a_agent_that_is_gone_takes_its_rank_with_it(ranks: Ranks):
    ranks.start("n0")
    rank = ranks.reports.ranks[0]
    ranks.reports._disconnect(rank)  # as the kernel of its host does
    ranks.reports.finish()
    assert ranks.kinds() == [(GONE, 0)]
    assert ranks.reports.lost_hosts == {"n0"}


def test_each_rank_gets_each_signal_once_also_one_that_calls_late_or_again(ranks: Ranks):
    ranks.start("n0")
    ranks.reports.give(signal.SIGUSR1)
    ranks.reports.give(signal.SIGUSR1)
    ranks.until(lambda: ranks.given == [[10, 10]])
    first = ranks.reports.ranks[0]
    ranks.reports._disconnect(first)  # the connection breaks
    ranks.start("n1")
    ranks.until(lambda: first.caller is not None)
    ranks.reports.give(signal.SIGTERM)
    ranks.until(lambda: [len(given) for given in ranks.given] == [3, 3])
    assert ranks.given == [[10, 10, 15]] * 2


def test_a_signal_that_comes_to_a_rank_from_elsewhere_is_known_unless_one_has_failed(
    ranks: Ranks,
):
    one, other = ranks.start("n0"), ranks.start("n1")
    other.send_signal(signal.SIGUSR1)
    ranks.until(lambda: list(ranks.reports.ranks[1].signals) == [signal.SIGUSR1])
    report_end(ranks, one, 1 << 8, "ValueError: a")
    other.send_signal(signal.SIGTERM)
    report_end(ranks, other, signal.SIGTERM)
    assert list(ranks.reports.ranks[1].signals) == [signal.SIGUSR1]
    assert [event.signal for event in ranks.reports.events] == [0, 0]


def test_a_rank_that_says_nothing_for_longer_than_the_limit_is_silent(ranks_with: Callable[[float], Ranks]):
    ranks = ranks_with(SHORT_S)
    reports, attempt = ranks.reports, ranks.attempt
    told = read_supervisor_address(attempt)
    assert told is not None
    with socket.create_connection(("127.0.0.1", told.port)) as caller:
        caller.sendall(wire.write(wire.Hello(told.key, "7.1", 5, 8, "n5")) + wire.write(Beat(12, 1, 1)))
        while not reports.events:
            reports.read()
            reports.check()
            time.sleep(0.01)
    assert [(event.kind, event.rank, event.step) for event in reports.events] == [(SILENT, 5, 12)]


class Clock:
    """That of a process that may be suspended."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("is_suspended", [True, False])
def test_a_supervisor_that_was_suspended_itself_calls_nobody_silent_stuck_or_absent(
    attempt: AttemptFolder, is_suspended: bool
):
    clock = Clock()
    reports = Reports(60.0, {}, clock)
    reports.open(attempt)
    told = read_supervisor_address(attempt)
    assert told is not None
    with socket.create_connection(("127.0.0.1", told.port)) as caller:
        caller.sendall(wire.write(wire.Hello(told.key, "7.1", 0, 2, "n5")) + wire.write(Beat(12, 1, 1)))
        while not (reports.ranks and reports.ranks[0].beat.step):
            reports.read()
        for _ in range(1 if is_suspended else 2000):
            clock.now += 2000 if is_suspended else 1
            reports.read()
            reports.check()
        assert [event.kind for event in reports.events] == ([] if is_suspended else [SILENT])
        clock.now += 1
        reports.check()
        assert len(reports.events) == (not is_suspended)  # the others may run again only now
    reports.close()


def ended(status: int) -> wire.Ended:
    return wire.Ended(status)


class Told:
    """Reports with a clock that stands, and two ranks that say what a test wants."""

    def __init__(self, attempt: AttemptFolder) -> None:
        self.clock = Clock()
        self.reports = Reports(0, {}, self.clock)
        self.reports.open(attempt)
        supervised = read_supervisor_address(attempt)
        assert supervised is not None
        self.callers = [socket.create_connection(("127.0.0.1", supervised.port)) for _ in range(2)]
        for rank, caller in enumerate(self.callers):
            caller.sendall(wire.write(wire.Hello(supervised.key, "7.1", rank, 2, f"n{rank}")))
        self.until(lambda: len(self.reports.ranks) == 2)

    def until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            self.reports.read()

    def say(self, rank: int, *messages: wire.Message) -> None:
        """And it is heard."""
        one = self.reports.ranks[rank]
        step = one.beat.step + 1
        self.callers[rank].sendall(b"".join(map(wire.write, (*messages, Beat(step)))))
        self.until(lambda: one.status is not None or one.beat.step == step)

    def pass_by(self, seconds: int) -> None:
        for _ in range(seconds):  # a longer step is a process that was suspended
            self.clock.now += 1
            self.reports.check()

    def close(self) -> None:
        self.reports.close()
        for caller in self.callers:
            caller.close()


@pytest.fixture
def told(attempt: AttemptFolder) -> Iterator[Told]:
    told = Told(attempt)
    yield told
    told.close()


USR1 = wire.Signalled(10)


@pytest.mark.parametrize(
    ("says", "is_held", "by"),
    [
        ([USR1, ended(768)], True, 10),  # with status 3
        ([USR1, ended(10)], True, 10),
        ([USR1, wire.Signalled(15), ended(15)], True, 15),
        ([USR1, ended(85 << 8)], True, 10),
        ([USR1, ended(0)], False, 10),  # no launcher ends others for that
        ([USR1, ended(9)], False, 0),
        ([USR1, ended(137 << 8)], False, 0),  # the same behind a shell
        ([USR1, ended(15)], False, 0),
        ([USR1, wire.Ended(9, unheard_s=46)], False, 0),
        ([ended(768)], False, 0),
    ],
)
def test_a_rank_that_ended_by_a_signal_is_hidden_from_the_launcher_while_others_save(
    told: Told, says: list[wire.Message], is_held: bool, by: int
):
    told.say(0, USR1)
    told.say(1, *says)
    assert (told.reports.is_deferring, told.reports.ranks[1].signal) == (is_held, by)
    assert {event.signal for event in told.reports.events} <= {by}
    teardown = Teardown(told.reports, print, acts=True)
    teardown.poll(cast(Any, None))
    assert (teardown._began is None) == (is_held or not told.reports.events)  # what ends the others
    told.say(0, ended(0))
    told.reports.check()
    assert not told.reports.is_deferring
    while told.callers[1].recv(4096):  # it is let end
        pass


def test_a_stall_of_the_runtime_s_ranks_is_one_notice_until_they_get_on(told: Told):
    places = Stand("train.py:9 (in all_reduce)", waits=WAITS), Stand("train.py:7")
    told.say(0, wire.PlainStand(0, 2, "", "", 0.0, 0, 0, 0.0))  # before it opened the runtime
    for moves in (1, 2):
        for rank, place in enumerate(places):
            told.reports.ranks[rank].change(OPENS, told.clock.now)
            told.say(rank, place)
        told.pass_by(59)
        assert len(told.reports.stalls) == moves - 1
        told.pass_by(100)
        (stall,) = told.reports.stalls[moves - 1 :]
        assert stall.startswith("no progress for 60 s. The ranks stand at:\n  rank 0  train.py:9 (in all_reduce)\n")
        for rank in range(2):
            told.say(rank, Stand())
        told.pass_by(1)
    assert (told.reports.events, told.reports.remarks) == ([], [])  # the ranks print it themselves


NO_WAIT = wire.Ended(1 << 8, "Traceback …\nValueError: b", "runs/log")
HEARD = wire.Ended(PEER_FAILED << 8, "hpcddp: rank 1 on n1 failed: ValueError: b\nhint: its log", "", is_printed=True)
SAID = "1. The end of its output:\n    Traceback …\n    ValueError: b\n  all of it: runs/log"
REFUSED = "cannot run 'x': no such file\nhint: check its spelling"


@pytest.mark.parametrize(
    ("ends", "report"),
    [
        ([(1, NO_WAIT), (0, HEARD)], SAID),
        ([(0, HEARD), (1, NO_WAIT)], SAID),
        (
            [(1, NO_WAIT), (0, NO_WAIT._replace(output="main()\nValueError: b", log="", is_printed=True))],
            "1; the error is above",
        ),
        ([(1, wire.Ended(4 << 8, REFUSED)), (0, wire.Ended(4 << 8, REFUSED))], f"rank 1 on n1: {REFUSED}"),
        ([(0, HEARD)], "rank 0 on n0 ended with status 6; the error is above"),  # whoever it heard of said nothing
        ([(1, wire.Ended(0)), (0, wire.Ended(0))], None),
    ],
)
def test_how_the_first_rank_has_failed_is_said_once_on_the_jobs_output(
    told: Told, ends: list[tuple[int, wire.Ended]], report: str | None
):
    for rank, ended in ends:
        told.say(rank, ended)
    told.pass_by(1)
    told.reports.finish()
    told.reports.finish()
    assert [one[-len(report or "") :] for one in told.reports.remarks] == ([] if report is None else [report])


def test_a_rank_that_has_only_seen_another_one_fail_stays_until_that_ones_words_are_there(told: Told):
    told.say(0, HEARD)
    assert 0 in {one.rank for one in told.reports._connected}
    told.say(1, NO_WAIT)
    assert told.reports._connected == []


@pytest.mark.parametrize(
    ("other", "still", "over"),
    [
        ([USR1], 300, 301),  # it may have caught the signal, and go on
        ([Stand()], 3, 4),  # the signal has not come to it: it does not save
    ],
)
def test_it_is_hidden_no_longer_than_a_rank_may_save(told: Told, other: list[wire.Message], still: int, over: int):
    told.say(0, *other)
    told.say(1, USR1, ended(10))
    told.pass_by(still - 1)
    assert told.reports.is_deferring
    told.pass_by(over - still + 1)
    assert not told.reports.is_deferring


@pytest.mark.parametrize("end", [ended(9), ended(256)])
def test_ranks_that_ended_by_a_signal_are_not_hidden_once_the_launcher_sees_another_s_end(
    attempt: AttemptFolder, told: Told, end: wire.Ended
):
    supervised = read_supervisor_address(attempt)
    assert supervised is not None
    told.say(0, USR1)
    told.say(1, USR1, ended(10))
    with socket.create_connection(("127.0.0.1", supervised.port)) as third:
        third.sendall(wire.write(wire.Hello(supervised.key, "7.1", 2, 3, "n2")) + wire.write(end))
        told.until(lambda: 2 in told.reports.ranks and told.reports.ranks[2].status is not None)
    assert not told.reports.is_deferring
    told.say(0, wire.Signalled(15), ended(15))  # the launcher's own
    assert (told.reports.is_deferring, told.reports.ranks[0].signal) == (False, 0)


@pytest.mark.parametrize(
    ("ends", "after_s", "status", "by"),
    [
        ([ended(0), ended(768)], 0, 3, 10),
        ([ended(0), ended(10)], 0, 138, 10),
        ([ended(0), ended(0)], 0, 0, 10),
        ([ended(0), ended(9)], 0, 137, 0),
        ([ended(15), ended(15)], 0, 143, 0),  # the launcher has ended them, and nobody has told it to
        ([ended(0), ended(0)], 301, 0, 0),  # long before their end
        ([ended(768), ended(768)], 301, 3, 0),
    ],
)
def test_a_job_ended_by_a_signal_that_came_to_its_ranks_alone_if_the_first_cause_did(
    told: Told, ends: list[wire.Ended], after_s: int, status: int, by: int
):
    for rank in range(2):
        told.say(rank, USR1)
    told.pass_by(after_s)
    for rank, end in enumerate(ends):
        told.say(rank, end)
    teardown = Teardown(told.reports, print, acts=False)
    assert teardown.find_signal(teardown.conclude(status)) == by


@pytest.mark.parametrize(
    "line", ["hello wrong 7.1 0 4 n0", "hello {key} 7.1 x 4 n0", "GET / HTTP/1.1", "hello {key}", ""]
)
def test_who_does_not_know_the_key_is_not_heard(ranks: Ranks, line: str):
    reports = ranks.reports
    told = read_supervisor_address(ranks.attempt)
    assert told is not None
    with socket.create_connection(("127.0.0.1", told.port)) as caller:
        caller.sendall(line.format(key=told.key).encode() + b"\n")
        caller.settimeout(0.01)
        while True:
            reports.read()
            try:
                answer = caller.recv(100)
                break
            except TimeoutError:
                pass
    assert answer == b""
    assert reports.ranks == {}


def test_ranks_of_an_attempt_before_are_ended_when_they_call(ranks: Ranks):
    ranks.start("n0")
    new = ranks.attempt.run.attempt("7.2")
    os.makedirs(new.path)
    ranks.reports.open(new)  # another attempt takes the run
    ranks.until(lambda: ranks.processes[0].poll() is not None)
    assert ranks.processes[0].returncode == -signal.SIGKILL
    assert ranks.agents[0].was_ended
    assert ranks.reports.ranks == {}
    late = make_agent(ranks.attempt, 0, 4, "n0")  # a host that comes back
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as left:
        late.start(left.pid)
        ranks.until(lambda: left.poll() is not None)
    assert late.was_ended


def test_a_rank_that_has_lost_its_supervisor_and_its_launcher_is_ended(
    ranks_with: Callable[[float], Ranks], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agent, "_ORPHAN_S", 0.1)
    ranks = ranks_with(0.0)  # without a lease: nothing is started again
    left, kept = ranks.start("n0"), ranks.start("n1")
    ranks.until(lambda: left._heard is not None and kept._heard is not None)
    left._launcher = 0  # a stand-in for one that was killed
    ranks.reports.close()
    assert ranks.processes[0].wait() == -signal.SIGKILL
    assert left.was_ended
    assert ranks.processes[1].poll() is None  # its launcher lives, and may end it


def test_a_rank_that_was_ended_for_its_lease_is_said_to_be(ranks_with: Callable[[float], Ranks]):
    ranks = ranks_with(SHORT_S)
    agent = ranks.start("n0")
    ranks.until(lambda: agent._heard is not None)
    assert ranks.processes[0].wait() == -signal.SIGKILL  # as if a file system kept the supervisor
    report_end(ranks, agent, signal.SIGKILL)
    [event] = ranks.reports.events
    assert (event.kind, event.rank) == (UNHEARD, 0)
    assert re.fullmatch(r"rank 0 on n0 was ended, since it had not heard the supervisor for \d+ s", str(event))
    assert event.is_loss
    assert event.exit_status == 0


def test_the_last_words_of_an_attempt_are_no_news_of_the_next(ranks: Ranks):
    before = ranks.start("n0")
    ranks.until(lambda: before._heard is not None)
    new = ranks.attempt.run.attempt("7.2")
    os.makedirs(new.path)
    ranks.reports.open(new)
    words = threading.Thread(target=before.end, args=(wire.Ended(9),))
    words.start()
    ranks.until(lambda: not words.is_alive())
    assert ranks.kinds() == []
    assert ranks.reports.ranks == {}


def test_a_launcher_that_starts_no_rank_is_told_of(ranks_with: Callable[[float], Ranks]):
    ranks = ranks_with(SHORT_S)
    reports = ranks.reports
    os.makedirs(os.path.dirname(ranks.attempt.rank_environment(0)))  # the supervisor's
    reports.check()
    assert reports.events == []
    reports._opened -= 1000
    reports.check()
    assert [str(event) for event in reports.events] == ["no rank was started in 20 s"]
    assert reports.events[0].is_loss


def test_ranks_that_all_stand_are_stuck_and_the_odd_one_is_named(ranks_with: Callable[[float], Ranks]):
    ranks = ranks_with(SHORT_S)
    pages = [open_page(ranks.start(f"n{rank}").path) for rank in range(3)]
    for page in pages:
        assert page is not None
        page.write(4, 1, 1)
    ranks.until(lambda: all(one.beat.step == 4 for one in ranks.reports.ranks.values()))
    for rank, page in enumerate(pages):
        page.write_place(Stand("train.py:7, in main: sleep()" if rank == 1 else "train.py:9, in main: step()"))
        page.write(5, 2, 2)  # the second step: from now on no step compiles
    looks = 2

    def stands() -> bool:
        nonlocal looks
        looks += 1
        for page in pages:
            page.write(5, 2, looks)
        return bool(ranks.reports.events)

    ranks.until(stands)
    assert ranks.kinds() == [(STUCK, 1)]
    assert str(ranks.reports.events[0]) == (
        "no rank gets on since step 5; rank 1 on n1 stands at train.py:7, in main: sleep()"
    )


def test_a_rank_that_a_signal_has_stopped_is_named(ranks_with: Callable[[float], Ranks]):
    ranks = ranks_with(SHORT_S)
    pages = [open_page(ranks.start(f"n{rank}").path) for rank in range(2)]
    for step in (4, 5):
        for page in pages:
            page.write(step, step, step)
        ranks.until(lambda step=step: all(one.beat.step == step for one in ranks.reports.ranks.values()))
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    ranks.until(lambda: ranks.reports.events)
    assert ranks.kinds() == [(STUCK, 1)]
    assert ranks.reports.events[0].text == "was stopped by a signal"


def test_a_rank_that_left_early_is_the_cause_of_what_the_others_say(ranks: Ranks):
    ranks.start("n0")
    second, third = ranks.start("n1"), ranks.start("n2")
    report_end(ranks, third, 0)
    report_end(ranks, second, 1 << 8, "RuntimeError: Connection closed by peer")
    swept = ranks.reports.ranks[0]
    ranks.reports._disconnect(swept)  # the launcher has ended it, and its agent
    ranks.reports.finish()
    assert ranks.kinds() == [(ERROR, 1), (GONE, 0), (LEFT, 2)]
    cause = find_first_cause(ranks.reports.events)
    assert cause is not None
    assert (cause.kind, cause.rank) == (LEFT, 2)


def test_a_rank_that_was_killed_behind_a_shell_is_a_lost_one(ranks: Ranks):
    first, second = ranks.start("n0"), ranks.start("n1")
    report_end(ranks, first, (128 + signal.SIGKILL) << 8)
    report_end(ranks, second, 200 << 8)
    assert ranks.kinds() == [(KILLED, 0), (ERROR, 1)]
    killed = ranks.reports.events[0]
    assert (killed.is_loss, killed.exit_status) == (True, 128 + signal.SIGKILL)
    assert str(killed).startswith("rank 0 on n0 was killed by SIGKILL")


def test_ranks_that_all_end_well_are_no_cause_of_what_their_launcher_says(ranks: Ranks):
    for one in (ranks.start("n0"), ranks.start("n1")):
        report_end(ranks, one, 0)
    cause = Teardown(ranks.reports, print, acts=True).conclude(1)
    assert cause is not None
    assert (cause.kind, str(cause)) == (UNKNOWN, "the launcher ended with status 1")
    for status in (0, 85 << 8):  # all four: whatever the launcher says
        report_end(ranks, ranks.start("n2"), status)
    assert Teardown(ranks.reports, print, acts=True).conclude(1) is None
    assert ranks.kinds() == []


def test_the_job_s_new_end_reaches_the_page(ranks: Ranks):
    page = open_page(ranks.start("n0").path)
    assert page is not None
    assert page.read_end() is None
    ranks.reports.send_end(1795446000.5)
    ranks.until(lambda: page.read_end() is not None)
    assert page.read_end() == 1795446000.5
