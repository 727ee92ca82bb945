"""What `hpcddp verify` prints: the first difference, its usual causes, and what to write instead."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hpcddp.units import format_count
from hpcddp.verify.compare import Mismatch
from hpcddp.verify.trials import Verification


class UsualCause(NamedTuple):
    """A usual cause of a difference of these kinds, and what to write instead."""

    kinds: tuple[str, ...]
    cause: str
    instead: str
    when: str = ""  # `first` or `later` step; `resumed`: after a stop, where no other row fits
    power: int = 0  # the values differ by the number of ranks to this power, which only this row explains

    def fits(self, one: Mismatch) -> bool:
        """The row explains this difference."""
        is_resumed = any("resumed" in title for title in one.runs)
        if one.kind not in self.kinds or is_resumed != (self.when == "resumed"):
            return False
        is_first = one.place is None or one.place[1] == 0
        if (self.when == "first" and not is_first) or (self.when == "later" and is_first):
            return False
        return not self.power or (one.ranks > 1 and math.isclose(one.factor, one.ranks**self.power, rel_tol=0.15))


_COUNTS = ("counts", "batch")

CAUSES = (
    UsualCause(
        ("loss",),
        "a sum over the samples, a sum divided by a constant, or loss / rt.world_size",
        "the mean over the batch; of a sum: rt.backward(loss, summed=True)",
        power=-1,
    ),
    UsualCause(
        ("loss", "gradients"),
        "loss * rt.world_size, or gradients summed over the ranks once more",
        "leave it out: rt.backward has averaged them",
        power=1,
    ),
    UsualCause(
        ("loss",),
        "a mean over what counts (mask, ignore_index, class weights), another number on each rank",
        "loader = rt.loader(loader, count=lambda batch: …), which says how much counts",
        when="first",
    ),
    UsualCause(
        ("loss",),
        "a statistic of the batch: Dice, normalised rewards, the hardest half, a root or logarithm of the mean",
        "a loss that is a mean over samples; what needs no gradient by rt.sum(…) or rt.gather(…)",
        when="first",
    ),
    UsualCause(
        ("loss",),
        "rt.rank, or what only one rank has, in the loss, the input or the model",
        "the same on all ranks: torch.manual_seed(0) before data and model; the loader gives each rank its samples",
        when="first",
    ),
    UsualCause(
        ("loss",),
        "the loop keeps something of one rank's samples: len(x) added up, a running loss, a memory by index",
        "rt.steps for a counter; rt.mean(loss); rt.sum(…) or rt.gather(…) before it is kept",
        when="later",
    ),
    UsualCause(
        ("gradients", "weights", "untrained"),
        "loss.backward() beside; gradients, weights or averages changed by what one rank sees: len(x), noise, a norm",
        "rt.backward(part); clip_grad_norm_(…); noise by rt.broadcast(torch.randn(…)); decide by rt.mean(loss)",
    ),
    UsualCause(
        ("settings",),
        "lr * rt.world_size, or a rate that follows one rank's loss or samples, or steps divided by the ranks",
        "leave the ranks out: the global batch is the same on any number; rt.mean(loss), len(loader), rt.steps",
    ),
    UsualCause(
        _COUNTS,
        "a break, a skip or another iterable in zip() that depends on the rank or its samples",
        "decide by what is the same on all ranks: rt.mean(loss), rt.steps, rt.broadcast(…)",
    ),
    UsualCause(("modes",), "model.eval() or another dropout on one rank", "the same line on every rank"),
    UsualCause(
        ("attributes",),
        "a tensor drawn without a seed when the model is made, neither a parameter nor a buffer",
        "self.register_buffer(name, tensor), or torch.manual_seed(0) first",
    ),
    UsualCause(
        ("untrained",),
        "an average of weights or a teacher that no checkpoint has",
        "give it to rt.prepare: model, ema, optimizer, loader = rt.prepare(model, ema, optimizer, loader)",
        when="resumed",
    ),
    UsualCause(
        ("loss", "gradients", "settings", "weights", *_COUNTS),
        "a variable of the loop that begins again: a counter, a threshold, a running mean, a state, a generator",
        "rt.steps for a counter; an object with state_dict() and load_state_dict(), given to rt.prepare",
        when="resumed",
    ),
)

#: Of scripts without hpcddp.runtime, of which only the ranks of one run are compared.
PLAIN_CAUSES = (
    UsualCause(
        ("gradients",),
        "the model that is trained is not wrapped: each rank has the gradients of its own samples",
        "model = DistributedDataParallel(model); of Accelerate: model = accelerator.prepare(model)",
        when="first",
    ),
    UsualCause(
        ("alone",),
        "the process group is never opened, or another one than that of RANK and WORLD_SIZE",
        "torch.distributed.init_process_group('gloo') where there is no GPU",
    ),
    UsualCause(
        ("idle",),
        "the training is over before a step, or steps by an optimizer that is none of torch's",
        "hpcddp.runtime, whose loop is compared",
    ),
)
ALL_CAUSES = (
    UsualCause(
        ("hang",),
        "a branch, a break or a collective on one rank alone, which the others wait for",
        "decide by what is the same on all ranks",
    ),
    UsualCause(
        ("no GPU",),
        "the script names a GPU, or NCCL, and hpcddp verify runs on the CPU",
        "'cuda' and 'nccl' if torch.cuda.is_available(), else 'cpu' and 'gloo'; hpcddp.runtime has the device",
    ),
)

_BY_DEFINITION = {
    "pairs": "The loss compares all pairs of a batch (as InfoNCE does): on several ranks each has the pairs of its own"
    " share. That is another training by definition, and no mistake if it is meant: rt.gather(x.detach()) gives the"
    " other ranks' samples without a gradient.",
    "permutation": "The batch is permuted (as for mixup): on several ranks each mixes the samples of its own share."
    " That is another training by definition, and no mistake if it is meant.",
}


def describe_mismatch(one: Mismatch) -> str:
    """The difference in one line."""
    name, first, last = one.name, f"on {one.runs[0]}", f"on {one.runs[-1]}"
    if one.kind in {"failed", "no GPU"}:
        error = name.replace("\n", "\n    ")
        return f"{first} the script failed on rank {one.rank}: {error}"
    if one.kind == "hang":
        return f"{first} the script does not end: {name}"
    step = "" if one.place is None else f"step {one.place[1] + 1}: "
    if one.place is not None and one.place[0] > 0:
        step = f"run {one.place[0] + 1} of the script, {step}"
    rank = "" if one.rank is None or one.ranks == 1 else f", on rank {one.rank}"
    mine, its = map(_show, one.values or ("", ""))
    two = f"{mine} {first} and {its} {last}"
    says = math.isfinite(one.factor) and not math.isclose(one.factor, 1.0, rel_tol=1e-3)
    times = f", {one.factor:.3g} times as much" if says else ""
    texts = {
        "loss": f"the loss is {two}{times}",
        "gradients": f"the gradient of {name} that reaches the optimizer has norm {two}{rank}"
        f" (off by {one.off:.1e}; all of them together{times})",
        "settings": f"{name} of the optimizer is {two}{rank}",
        "counts": f"the number of {name} is {two}{rank}",
        "batch": f"the global batch is another one {first} than {last}",
        "alone": f"{first} the script opens no process group of {one.ranks}: each rank trains alone",
        "idle": f"{first} no optimizer of torch makes a step",
        "untrained": f"{name}, which no optimizer trains, has norm {two} after the last step",
        "weights": f"the weights after the step differ between {first} and {last}{rank}",
    }
    if len(one.runs) == 1:
        two = f"rank 0 and rank {one.rank}"
        texts |= {
            "modes": f"{name} is {mine} on rank 0 and {its} on rank {one.rank}",
            "attributes": f"the tensor {name} is not the same on {two}",
            "gradients": f"the gradients that reach the optimizer differ between {two}",
            "weights": f"the weights after the step differ between {two} ({first})",
        }
    return step + texts[one.kind]


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def list_causes(one: Mismatch, *, plain: bool = False) -> list[UsualCause]:
    """The usual causes of this pattern, the likeliest first. `plain`: of a script without hpcddp.runtime."""
    found = [cause for cause in (*(PLAIN_CAUSES if plain else CAUSES), *ALL_CAUSES) if cause.fits(one)]
    return found[:1] if found and found[0].power else found


def format_verification(script: str, result: Verification) -> str:
    """The answer, on several lines."""
    steps = format_count(result.steps, "step")
    lines = []
    if not result.differences and result.whole:
        *counts, most = sorted({trial.ranks for trial in result.trials})
        stops = f", also stopped after step {', '.join(map(str, result.resumes))} and resumed" if result.resumes else ""
        lines.append(f"{script}: the same training on {', '.join(map(str, counts))} and {most} ranks{stops} ({steps})")
    elif not result.differences:
        same = "each rank has a part of the model" if result.in_parts else "gradients and weights are the same on both"
        lines += [
            f"{script}: on 2 ranks, {same} ({steps})",
            "  It does not use hpcddp.runtime: whether this is the training of one process cannot be said, since only"
            " the script knows what its batches are.",
        ]
    elif result.differences[0].kind in {"alone", "idle"} or len(result.trials) == 1:
        lines.append(f"{script}: nothing could be compared")
    else:
        lines.append(f"{script}: not the same training on any number of ranks, or after a stop")
    printed: set[str] = set()
    for one in result.differences:
        lines.append(f"  {describe_mismatch(one)}")
        for cause in list_causes(one, plain=not result.whole):
            if cause.cause not in printed:
                lines += [f"    usual cause: {cause.cause}", f"        instead: {cause.instead}"]
            printed.add(cause.cause)
    if any(one.kind == "loss" for one in result.differences):
        lines += [f"  {_BY_DEFINITION[name]}" for name in result.definition]
    if result.numbers is not None:
        alone, shared = (text.strip() for text in result.numbers)
        lines.append(f"  printed on 1 rank: {alone!r}; on 2 ranks: {shared!r} (of one rank alone? rt.mean, rt.sum)")
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
                "text": describe_mismatch(one),
                "causes": [
                    {"cause": row.cause, "instead": row.instead} for row in list_causes(one, plain=not result.whole)
                ],
            }
            for one in result.differences
        ],
        "by_definition": [_BY_DEFINITION[name] for name in result.definition],
        "printed": list(result.numbers) if result.numbers else None,
    }
