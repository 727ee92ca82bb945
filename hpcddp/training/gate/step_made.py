"""Whether a global batch that is over has trained: it had backward passes, and the step that was asked for."""

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
