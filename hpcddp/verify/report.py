"""What `hpcddp verify` says: the first difference, and the usual causes of that pattern with what to write instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hpcddp.units import format_count
from hpcddp.verify.compare import Mismatch
from hpcddp.verify.trials import Verification


class UsualCause(NamedTuple):
    """A usual cause of a pattern, and what to write instead."""

    fits: Callable[[Mismatch], bool]
    cause: str
    instead: str
    certain: bool = False


def _is_of(*kinds: str, resumed: bool = False) -> Callable[[Mismatch], bool]:
    return lambda one: one.kind in kinds and _is_resumed(one) == resumed


def _is_resumed(one: Mismatch) -> bool:
    return any("resumed" in title for title in one.runs)


def _is_first(*kinds: str) -> Callable[[Mismatch], bool]:
    return lambda one: one.kind in kinds and not _is_resumed(one) and (one.place is None or one.place[1] == 0)


def _is_later(*kinds: str) -> Callable[[Mismatch], bool]:
    return lambda one: one.kind in kinds and not _is_resumed(one) and one.place is not None and one.place[1] > 0


def _is_times(power: int, *kinds: str) -> Callable[[Mismatch], bool]:
    """Whether it is about as many times as much as there are ranks."""

    def fits(one: Mismatch) -> bool:
        factor, ranks = one.factor, float(one.ranks) ** power
        if one.kind == "settings" and one.values and all(isinstance(v, float) and v for v in one.values):
            factor = one.values[1] / one.values[0]
        return one.kind in kinds and not _is_resumed(one) and one.ranks > 1 and abs(factor - ranks) <= 0.15 * ranks

    return fits


_SAME_WAY = "decide by what is the same on all ranks: rt.mean(loss), rt.steps, rt.broadcast(…)"

# The first row that fits and is `certain` is the only one.
CAUSES = (
    UsualCause(
        _is_times(-1, "loss"),
        "a sum over the samples, a sum divided by a constant, or loss / rt.world_size",
        "the mean over the batch; of a sum: rt.backward(loss, summed=True)",
        certain=True,
    ),
    UsualCause(
        _is_times(1, "loss", "gradients"),
        "loss * rt.world_size, or gradients summed over the ranks once more",
        "leave it out: rt.backward has averaged them",
        certain=True,
    ),
    UsualCause(
        _is_times(1, "settings"),
        "lr * rt.world_size",
        "leave it out: the global batch is the same on any number of ranks",
        certain=True,
    ),
    UsualCause(
        _is_first("loss"),
        "a mean over what counts (mask, ignore_index, class weights), another number on each rank",
        "loader = rt.loader(loader, count=lambda batch: …), which says how much counts",
    ),
    UsualCause(
        _is_first("loss"),
        "a statistic of the batch: Dice, normalised rewards, the hardest half, a root or logarithm of the mean",
        "a loss that is a mean over samples; what needs no gradient by rt.sum(…) or rt.gather(…)",
    ),
    UsualCause(
        _is_first("loss"),
        "all pairs of the batch (InfoNCE), or samples mixed with each other (mixup): a rank has those of its share",
        "no mistake if it is meant; rt.gather(x.detach()) gives the other ranks' samples, without a gradient",
    ),
    UsualCause(
        _is_first("loss"),
        "rt.rank, or what only one rank has, in the loss, the input or the model",
        "the same on all ranks: torch.manual_seed(0) before data and model; the loader gives each rank its samples",
    ),
    UsualCause(
        _is_later("loss"),
        "the loop keeps something of one rank's samples: len(x) added up, a running loss, a memory by index",
        "rt.steps for a counter; rt.mean(loss); rt.sum(…) or rt.gather(…) before it is kept",
    ),
    UsualCause(
        _is_of("gradients"),
        "gradients changed after rt.backward by what one rank sees: len(x), noise, the norm of its shard",
        "torch.nn.utils.clip_grad_norm_(…); noise by rt.broadcast(torch.randn(…))",
    ),
    UsualCause(_is_of("gradients"), "a part of the loss by loss.backward()", "rt.backward(part) for each part"),
    UsualCause(
        _is_of("settings"),
        "a learning rate that follows one rank's loss or samples, or a number of steps divided by the ranks",
        "rt.mean(loss); len(loader) and rt.steps, which are the same on all ranks",
    ),
    UsualCause(
        _is_of("steps", "batch", "passes", "calls"),
        "a break, a skip or another iterable in zip() that depends on the rank or its samples",
        _SAME_WAY,
    ),
    UsualCause(_is_of("modes"), "model.eval() or another dropout on one rank", "the same line on every rank"),
    UsualCause(
        _is_of("attributes"),
        "a tensor drawn without a seed when the model is made, neither a parameter nor a buffer",
        "self.register_buffer(name, tensor), or torch.manual_seed(0) first",
    ),
    UsualCause(
        _is_of("weights"),
        "weights changed by what one rank sees: noise, a decay by its samples, its own best weights",
        "noise by rt.broadcast(torch.randn(…)); decide by rt.mean(loss)",
    ),
    UsualCause(
        _is_of("untrained"),
        "an average of weights or a teacher that follows what one rank sees",
        "the same update on every rank, once per step",
    ),
    UsualCause(
        lambda one: one.kind == "hang" and one.ranks > 1,
        "a branch, a break or an rt.sum(…) on one rank alone, which the others wait for",
        _SAME_WAY,
    ),
    UsualCause(
        lambda one: one.kind == "failed" and any(word in one.name for word in ("CUDA", "NVIDIA")),
        "the script names a GPU, and hpcddp verify runs on the CPU",
        "rt.device in place of 'cuda'; rt.prepare puts model and batches there",
    ),
    UsualCause(
        _is_of("untrained", resumed=True),
        "an average of weights or a teacher that no checkpoint has",
        "give it to rt.prepare: model, ema, optimizer, loader = rt.prepare(model, ema, optimizer, loader)",
    ),
    UsualCause(
        _is_of("loss", "gradients", "settings", "weights", "steps", "batch", "passes", "calls", resumed=True),
        "a variable of the loop that begins again: a counter, a threshold, a running mean, a state, a generator",
        "rt.steps for a counter; an object with state_dict() and load_state_dict(), given to rt.prepare",
    ),
)

#: Of scripts without hpcddp.runtime, of which only the ranks of one run are compared.
PLAIN_CAUSES = (
    UsualCause(
        _is_of("alone"),
        "the process group is never opened, or another one than that of RANK and WORLD_SIZE",
        "torch.distributed.init_process_group('gloo') where there is no GPU",
    ),
    UsualCause(
        _is_of("idle"),
        "the training is over before a step, or steps by an optimizer that is none of torch's",
        "hpcddp.runtime, whose loop is compared",
    ),
    UsualCause(
        _is_first("gradients"),
        "the model that is trained is not wrapped: each rank has the gradients of its own samples",
        "model = DistributedDataParallel(model); of Accelerate: model = accelerator.prepare(model)",
    ),
    UsualCause(
        _is_of("gradients"),
        "gradients changed after the backward pass by what one rank sees, or no_sync() around an optimizer's step",
        "the same change on every rank; no_sync() around all backward passes but the last",
    ),
    UsualCause(
        _is_of("weights", "settings"),
        "weights that start differently, or a learning rate by rank",
        "torch.manual_seed(0) before the model is made; the same settings on every rank",
    ),
    UsualCause(
        lambda one: one.kind == "hang",
        "a branch, a break or a collective on one rank alone, which the others wait for",
        "decide by what is the same on all ranks: all_reduce the loss first",
    ),
    UsualCause(
        lambda one: one.kind == "failed" and any(word in one.name for word in ("CUDA", "NVIDIA", "GPU")),
        "the script names a GPU, or NCCL, and hpcddp verify runs on the CPU",
        "'cuda' and 'nccl' if torch.cuda.is_available(), else 'cpu' and 'gloo'",
    ),
)


def describe_mismatch(one: Mismatch) -> str:
    """The difference in one line."""
    step = "" if one.place is None else f"step {one.place[1] + 1}: "
    if one.place is not None and one.place[0] > 0:
        step = f"run {one.place[0] + 1} of the script, {step}"
    runs = [f"on {title}" for title in one.runs]
    two = f"{_show(one.values[0])} {runs[0]} and {_show(one.values[1])} {runs[-1]}" if one.values else ""
    rank = "" if one.rank is None or one.ranks == 1 else f", on rank {one.rank}"
    says = math.isfinite(one.factor) and not math.isclose(one.factor, 1.0, rel_tol=1e-3)
    times = f", {one.factor:.3g} times as much" if says else ""
    ranks = f"{_show(one.values[0])} on rank 0 and {_show(one.values[1])} on rank {one.rank}" if one.values else ""
    name = one.name
    if one.kind == "failed":
        error = name.replace("\n", "\n    ")
        return f"{runs[0]} the script failed on rank {one.rank}: {error}"
    if one.kind == "hang":
        over, stuck = one.values or ([], [])
        where = f": {name}" if name else ""
        ended = f"{_ranks(over)} ended, " if over else ""
        return f"{runs[0]}: {ended}{_ranks(stuck)} did not{where}" if over else f"{runs[0]} no rank gets on{where}"
    texts = {
        "loss": f"the loss is {two}{times}",
        "gradients": f"the gradient of {name} that reaches the optimizer has norm {two}{rank}"
        f" (off by {one.off:.1e}; all of them together{times})",
        "settings": f"{name} of the optimizer is {two}{rank}",
        "steps": f"the number of steps is {two}{rank}",
        "batch": f"the global batch is another one {runs[0]} than {runs[-1]}",
        "passes": f"the number of rt.backward(…) is {two}{rank}",
        "calls": f"the number of optimizer.step() is {two}{rank}",
        "alone": f"{runs[0]} the script opens no process group of {one.ranks}: each rank trains alone",
        "idle": f"{runs[0]} no optimizer of torch makes a step",
        "untrained": f"{name}, which no optimizer trains, has norm {two} after the last step",
        "weights": f"the weights after the step differ between {runs[0]} and {runs[-1]}{rank}",
    }
    if len(one.runs) == 1:
        texts |= {
            "modes": f"{name} is {ranks}",
            "attributes": f"the tensor {name} is not the same on rank 0 and rank {one.rank}",
            "gradients": f"the gradients that reach the optimizer differ between rank 0 and rank {one.rank}",
            "weights": f"the weights after the step differ between rank 0 and rank {one.rank} ({runs[0]})",
        }
    return step + texts[one.kind]


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def list_causes(one: Mismatch, *, plain: bool = False) -> list[UsualCause]:
    """The usual causes of this pattern, the likeliest first. `plain`: of a script without hpcddp.runtime."""
    found = [cause for cause in (PLAIN_CAUSES if plain else CAUSES) if cause.fits(one)]
    return found[:1] if found and found[0].certain else found


def format_verification(script: str, result: Verification) -> str:
    """The answer, on several lines."""
    steps = format_count(result.steps, "step")
    lines = []
    if not result.differences and result.whole:
        counts = sorted({trial.ranks for trial in result.trials})
        stops = f", also stopped after step {', '.join(map(str, result.resumes))} and resumed" if result.resumes else ""
        counted = ", ".join(map(str, counts[:-1]))
        lines.append(f"{script}: the same training on {counted} and {counts[-1]} ranks{stops} ({steps})")
    elif not result.differences:
        same = (
            "gradients and weights are the same on both" if not result.in_parts else "each rank has a part of the model"
        )
        lines += [
            f"{script}: on 2 ranks, {same} ({steps})",
            "  It does not use hpcddp.runtime: whether this is the training of one process cannot be said, since only"
            " the script knows what its batches are.",
        ]
    elif result.differences[0].kind in {"alone", "idle"}:
        lines.append(f"{script}: nothing could be compared")
    elif not result.whole and len(result.trials) == 2:
        lines.append(f"{script}: the ranks do not train the same model")
    elif len(result.trials) == 1:
        lines.append(f"{script}: nothing could be compared, since it does not run in one process")
    else:
        lines.append(f"{script}: not the same training on any number of ranks, or after a stop")
    told: set[str] = set()
    for one in result.differences:
        lines.append(f"  {describe_mismatch(one)}")
        causes = [cause for cause in list_causes(one, plain=not result.whole) if cause.cause not in told]
        for cause in causes:
            told.add(cause.cause)
            lines += [f"    usual cause: {cause.cause}", f"        instead: {cause.instead}"]
    return "\n".join(lines) + "\n"


def verification_record(script: str, result: Verification) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "script": script,
        "same": not result.differences,
        "compared_with_one_process": result.whole,
        "steps": result.steps,
        "stopped_after": list(result.resumes),
        "runs": [{"title": t.title, "ranks": t.ranks, "seconds": round(t.took_s, 2)} for t in result.trials],
        "differences": [
            {
                "kind": one.kind,
                "runs": list(one.runs),
                "step": one.place[1] + 1 if one.place else None,
                "name": one.name or None,
                "values": list(one.values) if one.values else None,
                "rank": one.rank,
                "text": describe_mismatch(one),
                "causes": [
                    {"cause": cause.cause, "instead": cause.instead}
                    for cause in list_causes(one, plain=not result.whole)
                ],
            }
            for one in result.differences
        ],
    }
