"""A comparison of two runs as text for people, and as JSON values for programs."""

from __future__ import annotations

from typing import Any

from hpcddp.runs.compare import Comparison, LossDifference
from hpcddp.units import format_count, shorten

_SHOWN_STEPS = 12
_FLOAT32_ULP = 2.0**29  # in units of a double's
_LIKE_ROUNDING = 1e-4  # of a loss


def format_comparison(result: Comparison) -> str:
    """The verdict, its basis, a table of what differed, and what of it can explain a difference."""
    lines = [_say_verdict(result), *_say_losses(result), *_say_weights(result)]
    if result.differed:
        rows = [("", *result.paths), *((name, *map(_say_values, pair)) for name, pair in result.differed.items())]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        lines += ["", "what differed" if not result.is_same else "what differed all the same"]
        lines += [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    if result.causes:
        lines += ["", "what can explain it", *(f"  {cause}" for cause in result.causes)]
    return "\n".join(lines) + "\n"


def comparison_record(result: Comparison) -> dict[str, Any]:
    """The same as JSON values. Pairs are lists of two, the first run's first."""
    loss = result.first_difference
    return {
        "runs": list(result.paths),
        "verdict": result.verdict,
        "common_steps": result.common_steps,
        "last_steps": list(result.last_steps),
        "unrecorded_steps": list(result.unrecorded),
        "differing_steps": result.differing_steps,
        "first_difference": loss
        and {"step": loss.step, "loss": list(loss.losses), "difference": loss.size, "ulps": loss.ulps},
        "weights": {"equal_at": result.equal_weights, "differ_at": result.other_weights},
        "differed": {name: [list(values) for values in pair] for name, pair in result.differed.items()},
        "causes": result.causes,
    }


def _say_verdict(result: Comparison) -> str:
    steps = format_count(result.common_steps, "step")
    if result.verdict == "same":
        return f"the same: {steps}, all losses and the last weights are equal to the last bit"
    if result.verdict == "same so far":
        return f"the same as far as both go: {steps}"
    if result.first_difference is None:
        return f"different: all losses of {steps} are equal, but the weights of step {result.other_weights[0]} are not"
    return f"different from step {result.first_difference.step} on"


def _say_losses(result: Comparison) -> list[str]:
    lines = []
    if result.last_steps[0] != result.last_steps[1]:
        ends = (f"{path} ends at step {step}" for path, step in zip(result.paths, result.last_steps, strict=True))
        lines.append(f"  steps    {', '.join(ends)}")
    for path, steps in zip(result.paths, result.unrecorded, strict=True):
        if steps:
            lines.append(f"  steps    {path} has no loss of step {_say_steps(steps)}: an attempt was killed there")
    if result.first_difference is not None:
        first, second = (_say_value(loss) for loss in result.first_difference.losses)
        lines.append(f"  loss     {first} against {second} at step {result.first_difference.step}")
        lines += [f"           {text}" for text in _say_size(result.first_difference)]
        lines.append(f"           {result.differing_steps} of {result.common_steps} common steps differ")
    return lines


def _say_size(loss: LossDifference) -> list[str]:
    """How much; in ulps where rounding may have made it."""
    if loss.size is None or loss.ulps is None or loss.losses[0] is None:
        return []
    relative = abs(loss.size / loss.losses[0]) if loss.losses[0] else float("inf")
    text = f"the difference is {loss.size:.3g}, {relative:.1g} of the first"
    if relative < _LIKE_ROUNDING:
        text += f": {_count(loss.ulps / _FLOAT32_ULP)} of float32, {_count(loss.ulps)} of float64"
    return [text]


def _count(ulps: float) -> str:
    return "1 ulp" if ulps == 1 else f"{ulps:,.3g} ulps"


def _say_weights(result: Comparison) -> list[str]:
    parts = []
    if result.equal_weights:
        parts.append(f"equal at step {_say_steps(result.equal_weights)}")
    if result.other_weights:
        parts.append(f"different at step {_say_steps(result.other_weights)}")
    return [f"  weights  {'; '.join(parts) or 'no step of which both recorded them'}"]


def _say_steps(steps: list[int]) -> str:
    more = f" and {len(steps) - _SHOWN_STEPS} more" if len(steps) > _SHOWN_STEPS else ""
    return ", ".join(map(str, steps[:_SHOWN_STEPS])) + more


def _say_values(values: tuple[Any, ...]) -> str:
    """A fact over the attempts: `4 -> 2 -> 8`; a dash where it is not recorded."""
    return shorten(" -> ".join(map(_say_value, values))) if values else "-"


def _say_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_say_value, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
