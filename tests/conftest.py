"""Property tests that never depend on chance, and real programs in a clean environment that leave nobody behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]

# The stamp of --fresh in a printed script must not depend on the day.
os.environ["SOURCE_DATE_EPOCH"] = "1795478400"
# Nor on what this machine's centre says of sites.
os.environ["XDG_CONFIG_DIRS"] = "/nonexistent"

# How long a test waits for what should come. It is a limit for hangs: a busy machine must not reach it.
PATIENCE_S = 600

# `make test` draws the same examples each time, so that a failure always comes from a change. `make test-all` draws 20
# times as many at random; one with which it finds a fault is added to its property as an `@example`. A property that
# needs another number of them than 50 takes it relative to `settings.default.max_examples`.
_CALM = settings(deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _CALM, derandomize=True, max_examples=50)
# Said, since hypothesis itself derandomizes where it finds itself in CI.
settings.register_profile("random", _CALM, derandomize=False, max_examples=1000)
settings.load_profile("same")

# Hypothesis also draws constants of the modules that are loaded, and which those are depends on the tests that the same
# process ran before. `same` draws none of them.
with contextlib.suppress(ImportError, AttributeError):  # older releases have no such constants
    from hypothesis.internal.conjecture import providers

    _of_modules, _NONE = providers._get_local_constants, providers.Constants()
    providers._get_local_constants = lambda: _NONE if settings.default.derandomize else _of_modules()

# What a program may inherit from whoever runs the tests: nothing that a launcher or a scheduler set.
_INHERITED = ("HOME", "LANG", "TMPDIR", "USER", "SSL_CERT_FILE", "PIP_", "SOURCE_DATE_EPOCH", "XDG_CONFIG_DIRS")


# Where each test gets a folder of its own for what its programs leave there.
_SHARED_TMP = os.environ.get("TMPDIR", "/tmp")


def marked(mark: str, proc: Path = Path("/proc")) -> dict[int, str]:
    """Process id and command line of every process whose environment holds `mark`.

    A process group is not enough: Open MPI gives each rank a group of its own, and a killed mpirun leaves them behind.
    Two looks, since a process may start another one and end while the first look is under way.
    """
    found = {}
    for folder in [*proc.glob("[0-9]*"), *proc.glob("[0-9]*")]:
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark.encode() in _environment(folder):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


_KERNEL_THREAD = 0x00200000


def _environment(folder: Path) -> bytes:
    """The environment of the process of this folder of /proc.

    In the middle of an exec it is empty, and so is the command line. On a busy machine that can last: ask again. A
    kernel thread and a process that has ended have neither, for ever.
    """
    while not (environment := (folder / "environ").read_bytes()) and not (folder / "cmdline").read_bytes():
        state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
        if state in "ZX" or int(fields[5]) & _KERNEL_THREAD:
            break
        time.sleep(0.001)
    return environment


def wait_until(is_so: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    """Whether it came to be so. Asks often."""
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def kill_marked(mark: str, grace_s: float = 0) -> list[str]:
    """SIGKILL what is still there after `grace_s`, and wait for its end; the command lines of what had to be killed.

    An mpirun may end while a rank that it killed is still ending.
    """
    if wait_until(lambda: not marked(mark), grace_s):
        return []
    killed: dict[int, str] = {}
    end = time.monotonic() + PATIENCE_S
    while (left := marked(mark)) and time.monotonic() < end:
        killed |= left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return list(killed.values())


def run_command(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    hangs: Callable[[], object] = lambda: False,
    grace_s: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Run to the end and return status, stdout and stderr.

    Fails the test if the program runs for more than PATIENCE_S, or until `hangs()` is true, and if it leaves processes
    that have not ended `grace_s` later. The environment is a clean one with the tests' Python first on PATH; `env` is
    added to it.
    """
    mark = f"HPCDDP_TEST_MARK={uuid.uuid4()}"
    clean = {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}
    clean["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    name, value = mark.split("=")
    with _temporary_folder() as room:
        return _run_in(
            argv, clean | {"TMPDIR": room} | dict(env or {}) | {name: value}, mark, cwd, stdin, hangs, grace_s
        )


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder for TMPDIR, its path short enough for a socket's.

    A killed mpirun of Open MPI 5 leaves a folder that is named by its number in TMPDIR, and a later one that gets the
    same number ends with 213: "The PMIx server's listener thread failed to start".
    """
    with tempfile.TemporaryDirectory(prefix="t-", dir=_SHARED_TMP, ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture(autouse=True)
def own_tmpdir(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test starts by itself finds nothing that another test or another day has left."""
    with _temporary_folder() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


def _run_in(
    argv: Sequence[str | Path],
    env: Mapping[str, str],
    mark: str,
    cwd: Path | None,
    stdin: str,
    hangs: Callable[[], object],
    grace_s: float,
) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        [str(word) for word in argv],
        env=env,
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ended = None
    try:
        ended = _communicate(process, stdin, hangs)
        if ended is None:
            kill_marked(mark)
            out, err = process.communicate()
            pytest.fail(f"{argv} did not end\n--- stdout\n{out}\n--- stderr\n{err}")
        out, err = ended
    finally:
        left = kill_marked(mark, grace_s if ended else 0)
    assert not left, f"{argv} left these processes: {left}"
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def _communicate(process: subprocess.Popen[str], stdin: str, hangs: Callable[[], object]) -> tuple[str, str] | None:
    """Its output, or None if it does not end."""
    end = time.monotonic() + PATIENCE_S
    given: str | None = stdin
    while time.monotonic() < end and not hangs():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(given, timeout=0.2)
        given = None  # the first call has it
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="3/16: the tests 3, 19, 35, … of those that are asked for")


@pytest.hookimpl(trylast=True)  # once -m and -k have left what they leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked `first` begins first, so that no worker begins a long test when the others have nothing left."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    if part := config.getoption("part"):
        nth, of = map(int, part.split("/"))
        part_of_them = items[nth % of :: of]
        config.hook.pytest_deselected(items=[item for item in items if item not in part_of_them])
        items[:] = part_of_them


def pytest_collection_finish() -> None:
    """What is there now stays: the collector need not look at torch and at 8000 tests again and again."""
    gc.collect()
    gc.freeze()


@functools.cache
def _is_one_group(file: str) -> bool:
    return "xdist_group" in (REPO / file).read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Tests go to the workers one by one, those of a file with `xdist_group` all to one worker.

    What `--dist loadgroup` does, which has no effect with pytest 9.2 and xdist 3.8.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFileWhereAsked(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if _is_one_group(file) else nodeid

    return ByFileWhereAsked(config, log)


@pytest.fixture(scope="session")
def run() -> Run:
    return run_command


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO
