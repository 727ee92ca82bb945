"""Runs in every rank: reports the line of its main thread to the rank's agent, and writes its stacks on request.

Standard library only, and nothing of hpcddp: the rank's Python may be another one. `runs/heartbeat.py` reads the page.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from types import CodeType, FrameType
else:
    import _signal as signal  # the same without enumerations, which cost an agent a tenth of its start

#: Whether a rank's main thread waits where it stands: for nothing; perhaps, for other ranks or its device, unless it
#: computes; for other ranks.
NO_WAIT, MAY_WAIT, WAITS = range(3)
#: Where in the page the first rank's entry is, and the bytes of each: an agent's ranks (torchrun) have one each.
STAND_AT, STAND = 512, 512
#: The signal at which a rank writes its stacks. A process that does not catch it ignores it.
ASK_FOR_STACKS = int(signal.SIGURG)
#: What a main thread does, by the functions that it is in, in the order of the numbers in the page.
PHASES = ("start", "input", "compute", "communication", "checkpoint")
_START, _INPUT, _COMPUTE, _COMMUNICATION, _CHECKPOINT = range(5)
_INPUT_IN = "torch.utils.data"
_CHECKPOINT_IN = ("torch.serialization", "torch.distributed.checkpoint", "hpcddp.training.checkpoint", "safetensors")
_TELLING = (_INPUT_IN, *_CHECKPOINT_IN, "torch.distributed")
_BACKWARD_IN = "torch.autograd"
_BEGAN = time.monotonic()
_EVERY_S = 0.5
_WRITTEN = 2  # looks
_LEAST_CPU = 0.02  # of the time
_COLLECTIVES = "torch.distributed"
_NO_COLLECTIVES = ("torch.distributed.checkpoint", "torch.distributed.tensor")
#: Where a thread waits or computes: the backward pass, in which DDP's buckets are reduced; operators of a DTensor;
#: a GPU whose collective does not end.
_MAY_WAIT_IN = ("torch.autograd", "torch._ops", "torch.cuda", "torch.distributed.tensor")
_MAY_WAIT_CALL = r"\.(wait|item|cpu|tolist|synchronize)\(\)"  # of a work handle, or of a GPU's tensor
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_libraries: list[str] = []  # filled at the first question


def is_library(path: str) -> bool:
    """Whether the file is no part of the user's program."""
    if not _libraries:
        import sysconfig

        _libraries.extend(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
    if "/site-packages/" in path or "/dist-packages/" in path:  # also of another environment, on PYTHONPATH
        return True
    return path.startswith((*_libraries, "<frozen", _PACKAGE))


def describe_line(code: CodeType, line: int) -> str:
    """`train.py:41, in evaluate: total = rt.sum(total)`."""
    import linecache

    source = linecache.getline(code.co_filename, line).strip()
    where = f"{os.path.basename(code.co_filename)}:{line}, in {code.co_name}"
    return f"{where}: {source}" if source else where


def describe_frames(frames: list[FrameType]) -> tuple[str, str, int]:
    """Describe where a thread with these frames stands: the innermost line of the user's code, the function called
    there ("": none), and one of NO_WAIT, MAY_WAIT and WAITS. A thread that runs none of the user's code stands at its
    innermost line, and one that has no frames any more at Python's end."""
    if not frames:
        return "Python's end (atexit)", "", NO_WAIT
    innermost = frames[0]
    at = next((frame for frame in frames if not is_library(frame.f_code.co_filename)), None)
    inside = "" if at is None or at is innermost else innermost.f_code.co_name
    at = at or innermost
    line = describe_line(at.f_code, at.f_lineno or at.f_code.co_firstlineno)  # between two lines it is in none
    return line, inside, judge_wait(innermost.f_globals.get("__name__", "") if inside else "", line)


def judge_wait(module: str, line: str) -> int:
    """One of NO_WAIT, MAY_WAIT and WAITS for a thread that stands in this module ("": in no Python code), called by
    this line of the user's code. Collectives of torch and of FSDP wait for other ranks."""
    import re

    if module.startswith(_COLLECTIVES) and not module.startswith(_NO_COLLECTIVES):
        return WAITS
    return MAY_WAIT if module.startswith(_MAY_WAIT_IN) or (not module and re.search(_MAY_WAIT_CALL, line)) else NO_WAIT


def list_frames(thread: int) -> list[FrameType]:
    """List the frames of a thread, the innermost first; none where it has ended. A thread that hangs cannot do it."""
    collects = gc.isenabled()
    # Python 3.11 allocates a frame's object before it looks at the frame. A garbage collection at this moment may let
    # the thread leave the frame, and the object then points to memory that is used for another one: a crash.
    gc.disable()
    try:
        return walk_frames(sys._current_frames().get(thread))  # the only way to another thread's frames
    finally:
        if collects:
            gc.enable()


def walk_frames(frame: FrameType | None) -> list[FrameType]:
    """List this frame and those that have called it."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # Python has no list of them
    return frames


def find_place(frames: list[FrameType]) -> list[int]:
    """Find the place of a thread in each of its frames: another place means that it has moved."""
    return [number for frame in frames for number in (id(frame), frame.f_lasti)]


def measure_children(process: int) -> int:
    """How much of the processor the processes have used that this one has started and that live, in clock ticks."""
    used = 0
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                children = file.read().split()
            for child in map(int, children):
                with open(f"/proc/{child}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                used += sum(map(int, fields[11:15])) + measure_children(child)
    except OSError:  # a process that has ended; a kernel that does not say
        return used
    return used


class Quiet:
    """Measures for how long a thread has computed without reading or writing anything. An endless loop does so, while
    one that prepares data, evaluates or saves reads or writes now and then."""

    def __init__(self, thread: int) -> None:
        """`thread`: its number in the kernel."""
        path = f"/proc/self/task/{thread}/io"  # a kernel that does not count has none
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if os.access(path, os.R_OK) else -1
        self._before = b""
        self._since = time.monotonic()

    def measure(self, *, is_alone: bool) -> float:
        """Measure the seconds; 0 where the kernel does not count. `is_alone`: whether it waits for nothing now."""
        counts = os.pread(self._file, 512, 0) if self._file >= 0 else b""
        if not counts or counts != self._before or not is_alone:
            self._before, self._since = counts, time.monotonic()
        return time.monotonic() - self._since


def has_watchdog() -> bool:
    """Whether the script has opened hpcddp's runtime, or watches by hpcddp.init: its ranks look themselves."""
    watching = getattr(sys.modules.get("hpcddp.training.watchdog"), "_watching", None)
    return "hpcddp.training.opening" in sys.modules or bool(watching)


class Entry:
    """A rank's entry in the page of its agent: which rank and process it is, where the process writes its stacks at
    ASK_FOR_STACKS, and what `ThreadWatch` says."""

    def __init__(self, page: int, at: int) -> None:
        self._page, self._at = page, STAND_AT + at * STAND
        self.phases: list[float] = []  # seconds, as PHASES
        self._stacks = os.memfd_create("hpcddp-stacks")
        faulthandler.register(ASK_FOR_STACKS, file=self._stacks, all_threads=True)  # needs no lock of Python's
        self.write()

    def write(
        self,
        looks: int = 0,
        stood_s: float = 0.0,
        waits: int = NO_WAIT,
        line: str = "",
        inside: str = "",
        quiet_s: float = 0.0,
    ) -> None:
        """Write it, and leave the page as old as before: a program may touch that to show that it gets on."""
        touched = os.fstat(self._page)
        env = os.environ
        who = env.get("RANK", "0"), env.get("WORLD_SIZE", "1"), os.getpid(), self._stacks
        numbers = (*who, looks, f"{stood_s:g}", waits, count_collectives() if stood_s else 0, f"{quiet_s:g}")
        phases = "/".join(f"{seconds:.2f}" for seconds in self.phases)
        text = "\0".join([" ".join(map(str, (*numbers, phases or "-"))), inside, line])
        os.pwrite(self._page, text.encode(errors="replace")[: STAND - 1].ljust(STAND, b"\0"), self._at)
        os.utime(self._page, ns=(touched.st_atime_ns, touched.st_mtime_ns))


def count_collectives() -> int:
    """How many collectives this rank has called in the group of all ranks, by torch's Flight Recorder; 0: not known."""
    import json

    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    try:  # without the collectives themselves: that takes seconds
        status = json.loads(dump(False, False))["pg_status"]["0"] if dump is not None else {}
        return max(int(status.get("last_enqueued_collective", 0)), 0)
    except (KeyError, RuntimeError, TypeError, ValueError):  # none was called; an older torch
        return 0


def judge_phase(frames: list[FrameType], sleeps: Callable[[], bool]) -> int:
    """Find a thread's phase, by the innermost of its functions that shows one. `sleeps()`: whether it uses no
    processor: in a backward pass on a CPU it then waits for other ranks' gradients."""
    for frame in frames:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(_TELLING) and frame.f_code.co_name != "<module>":  # which is imported
            if module.startswith(_CHECKPOINT_IN):
                return _CHECKPOINT
            if module.startswith(_INPUT_IN):
                return _INPUT
            if judge_wait(module, "") == WAITS:
                return _COMMUNICATION
    innermost = (frames[0].f_globals.get("__name__") or "") if frames else ""
    return _COMMUNICATION if innermost.startswith(_BACKWARD_IN) and sleeps() else _COMPUTE


class ThreadWatch:
    """Looks at the main thread of this process twice a second, and writes to its entry the seconds of each phase, and
    of a plain script where the thread stands, until it leaves its process group.

    A thread in the user's own code that uses the processor or waits for a disk is at work, and does not stand. One that
    waits for its child processes is at work while these use the processor.
    """

    def __init__(self, entry: Entry, has_stepped: Callable[[], bool], *, waits: bool) -> None:
        """`has_stepped`: whether an optimizer has: until then, or until a batch is read, it starts. `waits`: whether
        this rank is to meet others."""
        import threading

        self._entry, self._has_stepped = entry, has_stepped
        self._main = threading.main_thread()
        self._clock = time.pthread_getcpuclockid(self._main.ident or 0)
        self._stat = os.open(f"/proc/self/task/{self._main.native_id}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._quiet = Quiet(self._main.native_id or 0)
        self._before: list[int] = []
        self._used_s = 0.0
        self._children = 0
        self._nth = self._looks = self._stood = 0
        self._reports_stand = waits
        self._has_group = False
        self._looked = _BEGAN
        entry.phases = [0.0] * len(PHASES)
        threading.Thread(target=self._watch, name="hpcddp-pulse", daemon=True).start()

    def _watch(self) -> None:
        while True:  # also while Python waits for other threads, or calls what is registered for its end
            time.sleep(_EVERY_S)
            try:
                self._look()
            except (AttributeError, KeyError, OSError, ValueError):  # torch is not imported as a whole; Python ends
                continue

    def _look(self) -> None:
        import hpcddp_guard  # type: ignore[import-not-found]  # this folder is on the path

        frames = list_frames(self._main.ident or 0)
        self._nth += 1
        self._count_phase(judge_phase(frames, self._sleeps))
        had_group, self._has_group = self._has_group, hpcddp_guard.find_distributed() is not None
        if self._reports_stand and not has_watchdog() and self._has_group >= had_group:
            self._report_stand(frames)
        elif self._reports_stand or self._nth % _WRITTEN == 0:  # it has left its group, or looks itself: no stand more
            self._reports_stand = False
            self._entry.write()

    def _count_phase(self, phase: int) -> None:
        phases, now = self._entry.phases, time.monotonic()
        if phase != _INPUT and not phases[_INPUT] and not self._has_stepped():
            phase = _START
        phases[phase] += now - self._looked
        self._looked = now

    def _sleeps(self) -> bool:
        """Whether the main thread sleeps in the kernel and no GPU is in use, whose backward pass has its own thread."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        return self._read_state() == b"S" and not (cuda is not None and cuda.is_initialized())

    def _read_state(self) -> bytes:
        """R, S, D, … as the kernel has it. The file stays open: to open it takes four times as long."""
        return os.pread(self._stat, 512, 0).rpartition(b")")[2].split()[0]

    def _report_stand(self, frames: list[FrameType]) -> None:
        """Write where the thread stands; of one that moves once a second."""
        place, used_s = find_place(frames), time.clock_gettime(self._clock)
        stands, before_s = place == self._before, self._used_s
        self._before, self._used_s, self._looks = place, used_s, self._looks + 1
        if not stands and not self._stood and self._nth % _WRITTEN:
            return
        line, inside, waits = describe_frames(frames)
        waits = NO_WAIT if waits == MAY_WAIT and not self._has_group else waits  # there is nobody to wait for
        uses = used_s - before_s > _EVERY_S * _LEAST_CPU
        children, has_children = self._children, False
        if stands and waits == NO_WAIT and not uses:
            self._children = measure_children(os.getpid())
            has_children = self._children > children
        quiet_s = self._quiet.measure(is_alone=waits == NO_WAIT and not has_children)
        uses |= has_children
        works = waits == NO_WAIT and (uses or self._read_state() == b"D")
        self._stood = self._stood + 1 if stands and not works else 0
        self._entry.write(self._looks, self._stood * _EVERY_S, waits, line, inside, quiet_s)


def watch_thread(page: str, at: int, has_stepped: Callable[[], bool], *, waits: bool) -> None:
    """Begin to write to the entry `at` of this page, where there is one; as `ThreadWatch`."""
    try:
        entry = Entry(os.open(page, os.O_RDWR | os.O_CLOEXEC), at)
    except (OSError, ValueError):
        return
    from functools import partial

    import hpcddp_guard

    hpcddp_guard.AtImport("torch.optim.optimizer", lambda _: entry.write()).begin()  # not what it started before
    begin = partial(ThreadWatch, entry, has_stepped, waits=waits)
    hpcddp_guard.AtImport("torch.distributed.distributed_c10d", lambda _: begin()).begin()
