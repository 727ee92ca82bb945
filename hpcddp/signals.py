"""The signals that a job can be sent, and the names of all."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # the same without enumerations, which cost a job's start a quarter of its time

#: Their default ends no process; and SIGKILL and SIGSTOP, which nobody catches.
_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH, signal.SIGKILL, signal.SIGSTOP}
_HARMLESS |= {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
#: A process causes these itself. Python ignores the last two.
_OF_PROCESS = {signal.SIGILL, signal.SIGTRAP, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGSYS}
_OF_PROCESS |= {signal.SIGPIPE, signal.SIGXFSZ}
#: All that can be caught and whose default ends a process, whoever sends them.
ENDING = frozenset({*range(1, 32), *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)} - _HARMLESS - _OF_PROCESS)
_PREFERRED = {signal.SIGABRT: "SIGABRT", signal.SIGCHLD: "SIGCHLD", signal.SIGIO: "SIGIO"}  # of two names


def name_signal(number: int) -> str:
    """`SIGTERM`, `SIGRTMIN+2`."""
    names = {value: name for name, value in vars(signal).items() if name.startswith("SIG") and name.isalnum()}
    names |= _PREFERRED
    after = number - signal.SIGRTMIN
    return names.get(number) or (f"SIGRTMIN+{after}" if after > 0 else f"signal {number}")
