"""Whether a global batch has trained: it had backward passes, in their order, and the step that was asked for."""

from __future__ import annotations

from hpcddp.errors import RequestError
from hpcddp.training.gate.step_gate import StepGate

LOOP = "for x, y in loader: … rt.backward(loss_fn(model(x), y)); optimizer.step()"


def check_step(gate: StepGate, total: int, *, had_backward: bool) -> None:
    """RequestError if the global batch of `total` samples went by without its step."""
    if not had_backward:
        raise RequestError(
            "a global batch went by without rt.backward(loss)",
            f"{LOOP}. To read the data without training: model, optimizer, loader, reading = rt.prepare(model,"
            " optimizer, loader, DataLoader(dataset, 256)); for x, y in reading: …",
        )
    if not gate.optimizers:
        raise RequestError(
            "this run has no optimizer: none was prepared",
            "model, optimizer, loader = rt.prepare(model, optimizer, loader)",
        )
    if not gate.acted:
        raise RequestError(
            "a global batch went by without optimizer.step()",
            f"{LOOP}. To accumulate K batches: hpcddp.runtime(global_batch=K * {total}), and a step for each"
            " batch of the loader. To leave a step out: rt.skip_step()",
        )
    if not gate.reached:
        raise RequestError("rt.backward(loss) brought no gradient to any optimizer of this run", LOOP)
    gate.check_calls()


def check_order(gate: StepGate, *, accumulates: bool, is_taken: bool) -> None:
    """A backward pass is asked for. RequestError if it comes after the step of its micro batch, where that cannot be.

    `accumulates`: the step is made later. `is_taken`: the gradients are taken away already.
    """
    turns = "for step in loader.steps(): one pass `for x in step: …` for each optimizer"
    if accumulates and gate.asked:
        whole = "hpcddp.runtime(max_micro_batch=N), where N samples are a rank's whole share of the global batch"
        raise RequestError(
            "rt.backward(loss) came after optimizer.step() in one micro batch, but the optimizer steps once per global"
            " batch, which has several micro batches here",
            turns if len(gate.optimizers) > 1 else f"{whole}: one optimizer may step several times in each batch then",
        )
    if is_taken:
        raise RequestError(
            "rt.backward(loss) came after optimizer.step() in one batch, and an exact run takes gradients once", turns
        )


def refuse_outside(*, is_over: bool) -> RequestError:
    """What was asked for needs a batch of the training loader, and there is none. `is_over`: there was one."""
    return RequestError(
        "the loop is in no batch of the training loader: that belongs into the loop over the loader which rt.prepare"
        f" returned for the first DataLoader that it was given{', before it ends' if is_over else ''}",
        f"model, optimizer, loader, test = rt.prepare(model, optimizer, loader, test); {LOOP}",
    )
