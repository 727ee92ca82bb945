"""Mistakes of a training loop: one row for each that is certain, found at the step where it happens.

Each check is exact and nearly free. Mistakes that can only be guessed from a running loop (a loss that is a sum, a
learning rate that depends on the rank) are found by an experiment: `hpcddp verify`. `docs/mistakes.md` is made from
this table.
"""

from __future__ import annotations

from typing import NamedTuple

from hpcddp.errors import RequestError

_PREPARE = "model, optimizer, loader = rt.prepare(model, optimizer, loader)"
_MICRO_LOOP = "for x, y in rt.micro_batches(batch): rt.backward(loss_fn(model(x), y))"
_SEARCH = "model = rt.wrap(model, find_unused_parameters=True), then " + _PREPARE


class Mistake(NamedTuple):
    """One row. `message` and `remedy` are format strings; `cost` is what looking for it takes."""

    condition: str  # as the page says it
    message: str
    remedy: str
    cost: str = "one comparison per step"

    def error(self, **values: object) -> RequestError:
        """The error, with these values in its two lines."""
        return RequestError(self.message.format(**values), self.remedy.format(**values))


# ---- batches and micro batches

BATCH_UNPACKED = Mistake(
    condition="with `max_micro_batch` or `exact`, a batch of the loader is unpacked, indexed or counted",
    message="this batch is several micro batches (max_micro_batch or exact mode), and the loop used it as one",
    remedy=_MICRO_LOOP,
    cost="none",
)
BACKWARD_OUTSIDE = Mistake(
    condition="`rt.backward` is called outside the loop over the training loader",
    message="rt.backward(loss) came outside the loop over the training loader{when}",
    remedy="for x, y in loader: …, with the loader that rt.prepare returned for its first DataLoader",
    cost="one comparison per backward pass",
)
MICRO_LOOP_MISSING = Mistake(
    condition="with `max_micro_batch` or `exact`, `rt.backward` is called outside `rt.micro_batches(batch)`",
    message="rt.backward(loss) came outside rt.micro_batches(batch), which this run needs (max_micro_batch or exact)",
    remedy=_MICRO_LOOP,
    cost="one comparison per backward pass",
)
OTHER_BATCH = Mistake(
    condition="with `max_micro_batch` or `exact`, `rt.micro_batches` is given another batch than the one that the loop"
    " is at, or is called inside a loop over micro batches",
    message="rt.micro_batches(batch) was given another batch than the one that the loop is at, or was called inside a"
    " loop over micro batches",
    remedy="for batch in loader: for x, y in rt.micro_batches(batch): …",
)
MICRO_BATCH_LEFT_OUT = Mistake(
    condition="some micro batches of a pass have a backward pass and others have none, or the pass is left early",
    message="{done} of the {all} micro batches of this batch had rt.backward(loss): the samples of the others would"
    " count without a gradient",
    remedy="rt.backward(loss) in each micro batch; to leave a step out: leave out optimizer.step(), then"
    " optimizer.zero_grad()",
    cost="one comparison per micro batch",
)
BATCH_WITHOUT_BACKWARD = Mistake(
    condition="the next batch is taken, and this one had no `rt.backward`",
    message="a batch of the training loader had no rt.backward(loss){stepped}",
    remedy="rt.backward(loss) in place of loss.backward(), in each batch and on every rank; to leave a step out: leave"
    " out optimizer.step(), then optimizer.zero_grad(); to read the data only: a second DataLoader(data, …) for it,"
    " given to rt.prepare too",
)

# ---- two training loaders

SHARES_DIFFER = Mistake(
    condition="a loss over batches of two training loaders, whose shares on the ranks are not in proportion, or one of"
    " which has `count=`",
    message="rt.backward(loss) got one loss for {first} samples and the {second} of training loader {number}, and what"
    " counts in them is not in proportion on {ranks} ranks: one of them would weigh too much",
    remedy="rt.backward(a, of=x), then rt.backward(b, of=u), each right behind its model(x) and model(u), with x and u"
    " of the two batches; or batch sizes that the ranks divide, and drop_last=True",
    cost="a few whole numbers per backward pass, where there are two loaders",
)
OF_UNKNOWN = Mistake(
    condition="`rt.backward(loss, of=…)` or `rt.mean(loss, of=…)` is given what is no batch of this step, and no tensor"
    " of one; or no `of` where the run has two training loaders in micro batches",
    message="of= is no batch of this step, and no tensor in one (a copy is another object)",
    remedy="for (x, y), (u, _) in zip(first, second): …, rt.backward(loss, of=x); in micro batches rt.mean(losses,"
    " of=batch)",
    cost="one comparison for each tensor of the step's batches, where of= is given",
)

# ---- steps

STEP_IN_BACKWARD = Mistake(
    condition="an optimizer steps inside a backward pass",
    message="this {kind} steps inside the backward pass, before the ranks have averaged its gradients",
    remedy="optimizer.step() after rt.backward(loss), without a hook that steps",
)
STEP_EARLY = Mistake(
    condition="an optimizer steps inside `rt.micro_batches(batch)`",
    message="{kind}.step() came inside rt.micro_batches(batch): the gradients are complete behind that loop",
    remedy="for x, y in rt.micro_batches(batch): rt.backward(loss_fn(model(x), y)), then optimizer.step()",
)
STEP_AGAIN = Mistake(
    condition="an optimizer steps twice on one gradient, or without any `rt.backward`",
    message="{kind}.step() came without a new rt.backward(loss) since its last one",
    remedy="rt.backward(loss) in place of loss.backward(), then optimizer.step() once",
)
STEP_ON_SEVERAL = Mistake(
    condition="an optimizer steps on the gradients of several batches: those of an earlier one were neither stepped on"
    " nor cleared",
    message="{kind}.step() came with the gradients of an earlier batch still in the sum: one batch is one step",
    remedy="to accumulate n batches of b samples: DataLoader(data, batch_size=n * b) and"
    " hpcddp.runtime(max_micro_batch=b); to leave a step out: optimizer.zero_grad()",
)
STEP_NOT_PREPARED = Mistake(
    condition="an optimizer with parameters of a prepared model steps, and was not prepared itself",
    message="this {kind} steps a prepared model, and was not prepared itself: no checkpoint has its state",
    remedy=_PREPARE + ", with all optimizers: also one that another one steps, as optimizer.base_optimizer",
    cost="one look-up per step",
)
SCHEDULER_NOT_PREPARED = Mistake(
    condition="an optimizer has a scheduler that was not prepared (`ReduceLROnPlateau` leaves no trace: `hpcddp verify`"
    " finds it)",
    message="the {kind} has a scheduler that was not prepared: a resumed run would begin its schedule anew",
    remedy="model, optimizer, scheduler, loader = rt.prepare(model, optimizer, scheduler, loader)",
    cost="one look per attempt",
)

# ---- models

PARAMETERS_FOREIGN = Mistake(
    condition="an optimizer that is prepared has parameters of no prepared model",
    message="{count} of the parameters of a {kind} belong to no model that rt.prepare was given",
    remedy=_PREPARE + ", with each model that the optimizer steps",
    cost="one count per attempt",
)
LAYER_UNFROZEN = Mistake(
    condition="a layer that required no gradient at `rt.prepare` requires one at a step",
    message="{name} requires a gradient, and did not at rt.prepare: the ranks' gradients would not be averaged",
    remedy="model.requires_grad_(True) before rt.prepare; for a layer that is trained later, a group of the optimizer"
    " with lr=0.0 until then",
    cost="one look at each frozen parameter per step",
)
LAYER_UNUSED = Mistake(
    condition="on several ranks, a backward pass does not reach all parameters of a model, or one was frozen after"
    " `rt.prepare`",
    message="rt.backward(loss) did not reach all parameters of the {kind}: {name}, so the ranks' gradients were not"
    " averaged",
    remedy=_SEARCH,
    cost="none: DDP says that a gradient is missing",
)
MODEL_TWICE = Mistake(
    condition="on several ranks, a model is reached by two backward passes after one call, as by two forward passes"
    " before two backward passes",
    message="rt.backward(loss) reached the {kind} again since its last call: the ranks' gradients would not be"
    " averaged",
    remedy="rt.backward(a + b), or each rt.backward right after its own model(x)",
    cost="one comparison per backward pass",
)
MODEL_UNWRAPPED = Mistake(
    condition="on several ranks, a backward pass reaches a model that was not called through what `rt.prepare`"
    " returned",
    message="rt.backward(loss) reached the {kind}, but not through the model that rt.prepare returned: the ranks'"
    " gradients would not be averaged",
    remedy=_PREPARE + ", then call model(x): not model.module, rt.unwrap(model) or the old one",
    cost="one comparison per backward pass",
)

# ---- epochs

LOADER_UNUSED = Mistake(
    condition="an epoch of `rt.epochs` ends, and no loop over the training loader has begun",
    message="an epoch of rt.epochs() ended, and no loop over the training loader has begun: a loop over another one"
    " gives each rank all of the data, and none of its steps is counted",
    remedy=_PREPARE + ", then for x, y in loader: …",
    cost="one comparison per epoch",
)
EPOCH_OUTSIDE = Mistake(
    condition="a second epoch begins outside `rt.epochs`",
    message="a second epoch began outside of rt.epochs(): a resumed run would not know how many are left",
    remedy="for epoch in rt.epochs(10): for x, y in loader: …; or for x, y in rt.batches(10_000): …, for so many steps",
    cost="one comparison per loop",
)
LOOP_TWICE = Mistake(
    condition="a second loop over the loader begins in an epoch of `rt.epochs` after its last batch",
    message="a second loop over the loader began in epoch {epoch} of rt.epochs(), after its last batch: a resumed run"
    " would not know of it",
    remedy="for epoch in rt.epochs(2 * 10): for x, y in loader: …, where each loop is an epoch and epoch % 2 says"
    " which one",
    cost="one comparison per loop",
)

#: By the name that the page has, which is that of the row here.
MISTAKES = {name.lower().replace("_", "-"): row for name, row in list(globals().items()) if isinstance(row, Mistake)}
