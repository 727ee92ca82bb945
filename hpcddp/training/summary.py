"""What rank 0 prints when a run starts and when it ends, as text."""

from __future__ import annotations

from typing import NamedTuple

from hpcddp.training.progress import format_seconds


class RunStart(NamedTuple):
    """What is known when the run's objects are there. Which run it is was said when its folder was chosen."""

    saves: bool  # whether there is a run folder
    resumed_from: int | None  # the step; None: a new run
    plan: str  # the batch plan as text: `256 = 32 ranks x 8 x 1`
    ranks: str  # `32 ranks on 4 nodes (…), launcher openmpi, nccl on cuda`


def format_start(start: RunStart) -> str:
    """One line: the batch plan, the ranks and their devices, and from which step the run resumes, if from any."""
    resumed = f"resumed from step {start.resumed_from}" if start.resumed_from is not None else None
    saved = None if start.saves else "no run folder: nothing is saved"
    return "; ".join(filter(None, [f"global batch: {start.plan}", start.ranks, resumed, saved]))


class Summary(NamedTuple):
    """What a run has come to in this attempt. None: not known, and not shown."""

    steps: int  # over all attempts
    title: str = ""  # what was trained
    stop_reason: str | None = None  # None: finished
    finish_reason: str | None = None  # why it finished before its last step
    epochs: int | None = None
    loss: float | None = None  # of the last step
    samples_per_s: float | None = None
    seconds: float | None = None  # of this attempt
    weights_sha256: str | None = None
    is_exact: bool = False
    checkpoint: str | None = None  # its folder
    run: str | None = None  # the run folder
    resume_with: str | None = None  # a command


def format_summary(summary: Summary, more: tuple[tuple[str, str], ...] = ()) -> str:
    """The closing text, one fact a line. `more` are lines (name, text) of the caller, before the last ones."""
    s = summary
    # the launcher may have handed on another signal than the one that was sent, which state.json names at the job's end
    reason = "a signal" if (s.stop_reason or "").startswith("SIG") else s.stop_reason
    status = f"unfinished ({reason})" if reason else "finished"
    if s.finish_reason and not s.stop_reason:
        status += f" early ({s.finish_reason})"
    epochs = f", epoch {s.epochs}" if s.epochs is not None else ""
    weights = None
    if s.weights_sha256 is not None:
        weights = f"sha256 {s.weights_sha256}" + (", the same on any number of ranks" if s.is_exact else "")
    rows = [
        ("loss", f"{s.loss:.6g} in the last step" if s.loss is not None else None),
        *more,
        ("speed", _format_speed(s)),
        ("weights", weights),
        ("saved", s.checkpoint),
        ("files", s.run),
        ("resume", s.resume_with if s.stop_reason else None),
    ]
    lines = [f"{s.title}: {status} after step {s.steps}{epochs}"]
    return "\n".join(lines + [f"  {name:<9} {text}" for name, text in rows if text])


def _format_speed(s: Summary) -> str | None:
    rate = f"{s.samples_per_s:,.0f} samples/s" if s.samples_per_s else ""
    took = f"{format_seconds(s.seconds)} in all" if s.seconds is not None else ""
    return ", ".join(filter(None, [rate, took])) or None
