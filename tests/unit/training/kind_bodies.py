"""Kinds of training loops, each written once: in a run, and by hand in one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.errors import HpcddpError

BATCH, EPOCHS = 14, 2
SAMPLES = 16  # the last batch of an epoch has 2 samples: of three ranks one has none
STEPS = 2  # of an epoch
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "micro batches": {"max_micro_batch": 3},
    "exact": {"exact": True, "slices": 8},
}
Run = Any  # a runtime, or `Plain`


class Plain:
    """What the names of a runtime mean in one process that has the whole batch."""

    def prepare(self, *objects: Any) -> Any:
        return objects

    def wrap(self, model: nn.Module, **_options: Any) -> nn.Module:
        return model

    def epochs(self, count: int) -> Iterator[int]:
        return iter(range(count))

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        self.samples = len(batch[0])
        yield batch

    def backward(self, loss: Tensor, *, summed: bool = False, scaler: Any = None) -> None:
        (loss if scaler is None else scaler.scale(loss)).backward()

    def train_step(self, batch: Any, loss_of: Callable[[Any], Tensor]) -> Tensor:
        losses = []
        for micro in self.micro_batches(batch):
            losses.append(loss_of(micro))
            self.backward(losses[-1])
        return torch.stack(losses).detach()

    def mean(self, loss: Tensor) -> float:
        return float(loss)

    def sum(self, number: float) -> float:
        return number

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model


def make_data() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :1] * 2 - x[:, 1:2].square())


def make_net(inputs: int = 6, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def weights_of(rt: Run, *models: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in rt.unwrap(model).parameters()])


# ---- one model, one optimizer: what a loop does with a batch


def classifier(rt: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    for x, y in rt.micro_batches(batch):
        rt.backward(mse_loss(model(x), y))
    optimizer.step()


class Poisoned(torch.autograd.Function):
    """As it is, and a gradient of infinities where the condition holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, poisons: bool) -> Tensor:
        ctx.factor = torch.inf if poisons else 1.0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one gradient
        return gradient * ctx.factor, None


def skipped_where_not_finite(rt: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    optimizer.seen = getattr(optimizer, "seen", 0) + 1
    for x, y in rt.micro_batches(batch):
        rt.backward(Poisoned.apply(mse_loss(model(x), y), optimizer.seen % 3 == 0))
    if clip_grad_norm_(model.parameters(), 0.1).isfinite():
        optimizer.step()


def never_cleared(rt: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    for x, y in rt.micro_batches(batch):
        rt.backward(mse_loss(model(x), y))
    optimizer.step()


def two_backwards(rt: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    for x, y in rt.micro_batches(batch):
        rt.backward(mse_loss(model(x), y))
        rt.backward(0.5 * model(x).square().mean())
    optimizer.step()


def two_passes_one_step(rt: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    for x, y in rt.micro_batches(batch):
        rt.backward(mse_loss(model(x), y))
    for x, _ in rt.micro_batches(batch):
        rt.backward(0.5 * model(x).square().mean())
    optimizer.step()


def summed(rt: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    for x, y in rt.micro_batches(batch):
        rt.backward((model(x) - y).square().sum(), summed=True)
    optimizer.step()


def looks_without_gradients(rt: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    for x, y in rt.micro_batches(batch):
        with torch.no_grad():
            target = 0.5 * (y + model(x))
        rt.backward(mse_loss(model(x), target))
        with torch.no_grad():
            model(x)
    with torch.no_grad():
        for x, _ in rt.micro_batches(batch):
            model(x)
    optimizer.step()


def counted_samples(rt: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    """The samples that count sum up to those of the batch, on any number of ranks."""
    optimizer.zero_grad()
    samples = 0
    for x, y in rt.micro_batches(batch):
        rt.backward(mse_loss(model(x), y))
        samples += rt.samples
        assert rt.samples in (0, len(x))
    optimizer.seen = getattr(optimizer, "seen", 0) + 1
    assert rt.sum(samples) == (BATCH if optimizer.seen % STEPS else SAMPLES % BATCH)
    optimizer.step()


BODIES = (
    classifier,
    skipped_where_not_finite,
    never_cleared,
    two_backwards,
    two_passes_one_step,
    summed,
    looks_without_gradients,
    counted_samples,
)


def train_one(rt: Run, body: Callable[..., None], model: nn.Module, **options: Any) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    net = rt.wrap(model, **options) if options else model
    net, optimizer, loader = rt.prepare(net, optimizer, DataLoader(make_data(), batch_size=BATCH))
    for _ in rt.epochs(EPOCHS):
        for batch in loader:
            body(rt, net, optimizer, batch)
    return weights_of(rt, net)


# ---- other models, and more objects


class Checkpointed(nn.Module):
    """Computes its first layer again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8).double(), nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Any:
        return self.b(checkpoint(lambda t: self.a(t).tanh(), x, use_reentrant=False))


class Unused(nn.Module):
    """One layer is never used, another for every second call's samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = (nn.Linear(6, 1).double() for _ in range(3))

    def forward(self, x: Tensor, *, both: bool) -> Any:
        return self.a(x) + self.b(x) if both else self.a(x)


def unused(rt: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.seen = getattr(optimizer, "seen", 0) + 1
    optimizer.zero_grad()
    for x, y in rt.micro_batches(batch):
        rt.backward(mse_loss(model(x, both=bool(optimizer.seen % 2)), y))
    optimizer.step()


def parts_of_a_model(rt: Run) -> Tensor:
    """One optimizer for each layer; the second layer is used in every second batch, and both step in each."""
    model = Unused()
    optimizers = [torch.optim.SGD(part.parameters(), 0.05) for part in (model.a, model.b)]
    net = rt.wrap(model, find_unused_parameters=True)
    net, *optimizers, loader = rt.prepare(net, *optimizers, DataLoader(make_data(), batch_size=BATCH))
    nth = 0
    for _ in rt.epochs(EPOCHS):
        for batch in loader:
            nth += 1
            for optimizer in optimizers:
                optimizer.zero_grad()
            for x, y in rt.micro_batches(batch):
                rt.backward(mse_loss(net(x, both=bool(nth % 2)), y))
            for optimizer in optimizers:
                optimizer.step()
    return weights_of(rt, net)


class Gan:
    """Two models and their optimizers, in a run or by hand."""

    def __init__(self, rt: Run) -> None:
        g, d = make_net(3, 6), make_net(6, 1)
        optimizers = [torch.optim.Adam(one.parameters(), 0.01) for one in (g, d)]
        loader = DataLoader(make_data(), batch_size=BATCH)
        self.rt = rt
        self.g, self.d, self.of_g, self.of_d, self.loader = rt.prepare(g, d, *optimizers, loader)

    def fake(self, x: Tensor) -> Any:
        return self.g(x[:, :3])

    def train_g(self, batch: Any) -> None:
        self.of_g.zero_grad()
        for x, _ in self.rt.micro_batches(batch):
            self.rt.backward(softplus(-self.d(self.fake(x))).mean())
        self.of_g.step()

    def train(self, body: Callable[[Gan, Any], None]) -> Tensor:
        for _ in self.rt.epochs(EPOCHS):
            for batch in self.loader:
                body(self, batch)
        return weights_of(self.rt, self.g, self.d)


def gan(parts: Gan, batch: Any) -> None:
    parts.of_d.zero_grad()
    for x, _ in parts.rt.micro_batches(batch):
        fake = parts.fake(x)
        parts.rt.backward(softplus(-parts.d(x)).mean() + softplus(parts.d(fake)).mean())
    parts.of_d.step()
    parts.train_g(batch)


def gan_with_one_fake(parts: Gan, batch: Any) -> None:
    """As plain GANs do where a batch is one piece: the same fake for both."""
    x, _ = batch
    fake = parts.fake(x)
    parts.of_d.zero_grad()
    parts.rt.backward(softplus(-parts.d(x)).mean() + softplus(parts.d(fake.detach())).mean())
    parts.of_d.step()
    parts.of_g.zero_grad()
    parts.rt.backward(softplus(-parts.d(fake)).mean())
    parts.of_g.step()


def gan_with_critics(parts: Gan, batch: Any) -> None:
    """The generator in every second batch only; its gradients are cleared there."""
    parts.of_d.zero_grad()
    for x, _ in parts.rt.micro_batches(batch):
        fake = parts.fake(x).detach()
        parts.rt.backward(softplus(-parts.d(x)).mean() + softplus(parts.d(fake)).mean())
    parts.of_d.step()
    parts.seen = getattr(parts, "seen", 0) + 1
    if parts.seen % 2 == 0:
        parts.train_g(batch)


def wgan_gp(parts: Gan, batch: Any) -> None:
    parts.of_d.zero_grad()
    for x, _ in parts.rt.micro_batches(batch):
        fake = parts.fake(x).detach()
        middle = ((x + fake) / 2).requires_grad_()
        [slope] = torch.autograd.grad(parts.d(middle).sum(), middle, create_graph=True)
        parts.rt.backward(parts.d(fake).mean() - parts.d(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean())
    parts.of_d.step()
    parts.of_g.zero_grad()
    for x, _ in parts.rt.micro_batches(batch):
        parts.rt.backward(-parts.d(parts.fake(x)).mean())
    parts.of_g.step()


class Sam(torch.optim.Optimizer):
    """As published: https://github.com/davda54/sam."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05} | options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["moved"] = 0.05 / norm * p.grad
            p.add_(self.state[p]["moved"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(self.state[p]["moved"])
        self.base_optimizer.step()
        self.zero_grad()


def sam(rt: Run) -> Tensor:
    model = make_net()
    optimizer = Sam(model.parameters(), lr=0.1, momentum=0.9)
    net, optimizer, _, loader = rt.prepare(
        model, optimizer, optimizer.base_optimizer, DataLoader(make_data(), batch_size=BATCH)
    )
    for _ in rt.epochs(EPOCHS):
        for batch in loader:
            rt.train_step(batch, lambda micro: mse_loss(net(micro[0]), micro[1]))
            optimizer.first_step()
            rt.train_step(batch, lambda micro: mse_loss(net(micro[0]), micro[1]))
            optimizer.second_step()
    return weights_of(rt, net)


def lbfgs(rt: Run) -> Tensor:
    model = make_net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
    net, optimizer, loader = rt.prepare(model, optimizer, DataLoader(make_data(), batch_size=BATCH))
    for _ in rt.epochs(EPOCHS):
        for batch in loader:

            def closure(batch: Any = batch) -> float:
                optimizer.zero_grad()
                mean: float = rt.mean(rt.train_step(batch, lambda micro: mse_loss(net(micro[0]), micro[1])))
                return mean

            optimizer.step(closure)
    return weights_of(rt, net)


def plateau(rt: Run) -> Tensor:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
    net, optimizer, scheduler, loader = rt.prepare(
        model, optimizer, scheduler, DataLoader(make_data(), batch_size=BATCH)
    )
    for _ in rt.epochs(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            losses = rt.train_step(batch, lambda micro: mse_loss(net(micro[0]), micro[1]))
            optimizer.step()
            scheduler.step(rt.mean(losses))
    return weights_of(rt, net)


def scaled(rt: Run) -> Tensor:
    """Powers of two are exact: the scale leaves no trace but in a step that overflows."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    net, optimizer, scaler, loader = rt.prepare(model, optimizer, scaler, DataLoader(make_data(), batch_size=BATCH))
    nth = 0
    for _ in rt.epochs(EPOCHS):
        for batch in loader:
            nth += 1
            optimizer.zero_grad()
            for x, y in rt.micro_batches(batch):
                rt.backward(Poisoned.apply(mse_loss(net(x), y), nth == 3), scaler=scaler)
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return torch.cat([weights_of(rt, net), torch.tensor([scaler.get_scale()])])


def by_turns(rt: Run) -> Tensor:
    """Two optimizers over one model, as of an encoder's warm-up: in some batches one, in others both."""
    model = make_net()
    optimizers = [torch.optim.AdamW(model[0].parameters(), 0.02), torch.optim.SGD(model[2].parameters(), 0.05)]
    net, *optimizers, loader = rt.prepare(model, *optimizers, DataLoader(make_data(), batch_size=BATCH))
    nth = 0
    for _ in rt.epochs(EPOCHS):
        for batch in loader:
            nth += 1
            net.zero_grad()
            for x, y in rt.micro_batches(batch):
                rt.backward(mse_loss(net(x), y))
            for optimizer in optimizers[: 1 + nth % 2]:
                optimizer.step()
    return weights_of(rt, net)


KINDS: dict[str, Callable[[Run], Tensor]] = {
    **{body.__name__: lambda rt, body=body: train_one(rt, body, make_net()) for body in BODIES},
    "checkpointed": lambda rt: train_one(rt, classifier, Checkpointed()),
    "unused": lambda rt: train_one(rt, unused, Unused(), find_unused_parameters=True),
    "parts_of_a_model": parts_of_a_model,
    "gan": lambda rt: Gan(rt).train(gan),
    "gan_with_one_fake": lambda rt: Gan(rt).train(gan_with_one_fake),
    "gan_with_critics": lambda rt: Gan(rt).train(gan_with_critics),
    "wgan_gp": lambda rt: Gan(rt).train(wgan_gp),
    "sam": sam,
    "lbfgs": lbfgs,
    "plateau": plateau,
    "scaled": scaled,
    "by_turns": by_turns,
}
ONLY_WHOLE = {"gan_with_one_fake"}


def train_plainly(kind: str) -> Tensor:
    torch.manual_seed(5)
    return KINDS[kind](Plain())


def train_kinds(argument: dict[str, Any]) -> None:
    """Every kind in every mode; rank 0 writes the weights, or the error, to argument["out"]."""
    found: dict[tuple[str, str], Any] = {}
    with hpcddp.init() as group:
        for mode in argument["modes"]:
            for kind in KINDS:
                if kind in ONLY_WHOLE and mode != "whole":
                    continue
                try:
                    with hpcddp.runtime(group=group, **MODES[mode]) as rt:
                        torch.manual_seed(5)
                        found[kind, mode] = KINDS[kind](rt)
                except HpcddpError as error:
                    found[kind, mode] = str(error)
    if group.is_first:
        torch.save(found, Path(argument["out"]))
