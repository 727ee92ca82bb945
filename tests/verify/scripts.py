"""Training scripts for `hpcddp verify`: mistakes that no exact check sees, and right ones that are unusual.

Each is the same small script but for the lines that it is about.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

_HEAD = """\
import copy, itertools, math, os, random

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hpcddp

torch.manual_seed(0)
inputs, labels = torch.randn(37, 12), torch.randint(0, 3, (37,))
"""
_LOSS = "F.cross_entropy(model(x), y)"


class Script(NamedTuple):
    """The parts of a training script; the rest is the same in all of them."""

    before: str = ""
    model: str = "nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))"
    optimizer: str = "torch.optim.AdamW(model.parameters(), lr=0.01)"
    loader: str = "DataLoader(TensorDataset(inputs, labels), batch_size=10, shuffle=True)"
    more: str = ""
    runtime: str = ""
    names: str = "model, optimizer, loader"
    inside: str = ""
    epoch: str = ""
    batch: str = "x, y"
    loss: str = _LOSS
    after: str = ""  # the backward pass
    step: str = ""  # all of it, instead of the usual one
    tail: str = ""
    whole: str = ""  # the whole script, behind its imports

    def text(self) -> str:
        """The script."""
        if self.whole:
            return _HEAD + textwrap.dedent(self.whole)
        step = self.step or f"optimizer.zero_grad()\nrt.backward({self.loss})\n{_lines(self.after)}\noptimizer.step()"
        parts = [
            _HEAD,
            _lines(self.before),
            f"model = {self.model}",
            f"optimizer = {self.optimizer}",
            f"loader = {self.loader}",
            _lines(self.more),
            f"with hpcddp.runtime(seed=1{self.runtime}) as rt:",
            _lines(f"{self.names} = rt.prepare({self.names})", 1),
            _lines(self.inside, 1),
            _lines("for epoch in rt.epochs(3):", 1),
            _lines(self.epoch, 2),
            _lines(f"for {self.batch} in loader:", 2),
            _lines(step, 3),
            _lines(self.tail, 2),
        ]
        return "\n".join(part for part in parts if part.strip()) + "\n"


def _lines(text: str, depth: int = 0) -> str:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), "    " * depth)


_INDEXED = """
class Indexed(Dataset):
    def __len__(self):
        return len(inputs)
    def __getitem__(self, index):
        return index, inputs[index], labels[index]
"""
_INDEXED_LOADER = "DataLoader(Indexed(), batch_size=10, shuffle=True)"
_BN = "nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))"
_DROPOUT = "nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))"
_EACH = "F.cross_entropy(model(x), y, reduction='none')"
_MICRO = """
optimizer.zero_grad()
for x, y in rt.micro_batches(batch):
    rt.backward(F.cross_entropy(model(x), y))
optimizer.step()
"""

# What is wrong on several ranks, or after a stop.
MISTAKES = {
    # the loss is no mean over the samples
    "sum divided by a constant": Script(loss="F.cross_entropy(model(x), y, reduction='sum') / 10"),
    "masked mean": Script(loss=f"(({_EACH}) * (y != 0)).sum() / (y != 0).sum().clamp(min=1)"),
    "ignore_index": Script(loss="F.cross_entropy(model(x), y, ignore_index=0)"),
    "class weights": Script(loss="F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 5.0]))"),
    "Dice over the batch": Script(
        step="""
        optimizer.zero_grad()
        p, t = model(x).softmax(1), F.one_hot(y, 3).float()
        rt.backward(1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1))
        optimizer.step()
        """
    ),
    "InfoNCE": Script(
        step="""
        optimizer.zero_grad()
        a, b = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1)
        rt.backward(F.cross_entropy(a @ b.T / 0.5, torch.arange(len(x))))
        optimizer.step()
        """,
    ),
    "hardest half": Script(loss=f"{_EACH}.topk(max(len(x) // 2, 1)).values.mean()"),
    "root of the mean": Script(loss="F.mse_loss(model(x), F.one_hot(y, 3).float()).sqrt()"),
    "variance of the batch": Script(loss=f"{_LOSS} + F.relu(1 - model(x).std(0)).mean()"),
    "normalised over the batch": Script(
        step="""
        optimizer.zero_grad()
        reward = x.sum(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        rt.backward(-(model(x).log_softmax(1)[:, 0] * advantage).mean())
        optimizer.step()
        """
    ),
    "mixup": Script(
        step="""
        other = torch.randperm(len(x))
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(0.7 * x + 0.3 * x[other]), y))
        optimizer.step()
        """
    ),
    # the rank, or the number of ranks, is in it
    "loss / world": Script(loss=f"{_LOSS} / rt.world_size"),
    "loss * world": Script(loss=f"{_LOSS} * rt.world_size"),
    "lr * world": Script(inside="for group in optimizer.param_groups: group['lr'] *= rt.world_size"),
    "smoothing by rank": Script(loss="F.cross_entropy(model(x), y, label_smoothing=0.1 * rt.rank)"),
    "BatchNorm in eval on one rank": Script(model=_BN, inside="if rt.rank == 1: model.eval()"),
    "dropout by rank": Script(model=_DROPOUT, inside="rt.unwrap(model)[1].p = 0.1 + 0.2 * rt.rank"),
    "attributes that nothing seeds": Script(
        before="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(12, 3)
                seed = random.SystemRandom().getrandbits(40)
                self.scale = 1 + 0.1 * torch.randn(12, generator=torch.Generator().manual_seed(seed))
            def forward(self, x):
                return self.layer(x * self.scale)
        """,
        model="Net()",
    ),
    "data seeded by rank": Script(
        before="torch.manual_seed(int(os.environ.get('RANK', 0)))\ninputs = torch.randn(37, 12)"
    ),
    "sharded twice": Script(
        loss="F.cross_entropy(model(x[rt.rank % 2::2]), y[rt.rank % 2::2])", inside="assert rt.world_size < 4"
    ),
    "gradients summed again": Script(
        after="""
        if rt.world_size > 1:
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
        """
    ),
    "noise on gradients": Script(after="for p in model.parameters(): p.grad.add_(0.01 * torch.randn(p.shape))"),
    "zip that ends early": Script(
        whole="""
        model = nn.Linear(12, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(inputs, labels), batch_size=10, shuffle=True)
        with hpcddp.runtime(seed=1) as rt:
            model, optimizer, loader = rt.prepare(model, optimizer, loader)
            for epoch in rt.epochs(3):
                for noise, (x, y) in zip(range(6 // rt.world_size), loader):
                    optimizer.zero_grad()
                    rt.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
        """
    ),
    "steps counted by ranks": Script(
        more="""
        steps = 37 // (10 * int(os.environ.get('WORLD_SIZE', 1))) + 1
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * steps)
        """,
        names="model, optimizer, scheduler, loader",
        step="optimizer.zero_grad(); rt.backward(F.cross_entropy(model(x), y)); optimizer.step(); scheduler.step()",
    ),
    "temperature by samples seen": Script(
        inside="seen = 0",
        step="""
        seen += len(x)
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x) / (1 + seen / 50), y))
        optimizer.step()
        """,
    ),
    "loss.backward() beside": Script(
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y))
        (0.1 * rt.unwrap(model)(x).square().mean()).backward()
        optimizer.step()
        """
    ),
    # what one rank sees decides
    "rate by the local loss": Script(
        step="""
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        rt.backward(loss)
        for group in optimizer.param_groups: group['lr'] = 0.01 * min(loss.item(), 1.1)
        optimizer.step()
        """
    ),
    "plateau on the local loss": Script(
        more="scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)",
        names="model, optimizer, scheduler, loader",
        step="""
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        rt.backward(loss)
        optimizer.step()
        scheduler.step(loss.item())
        """,
    ),
    "patience on the local loss": Script(
        inside="best, bad = math.inf, 0",
        step="""
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        rt.backward(loss)
        optimizer.step()
        best, bad = min(best, loss.item()), bad + (loss.item() > best)
        if bad >= 2:
            break
        """,
    ),
    "step left out by the local loss": Script(
        step="""
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        rt.backward(loss)
        if loss.item() < 1.12:
            optimizer.step()
        """
    ),
    "best weights by the local loss": Script(
        inside="best, kept = math.inf, None",
        step="""
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        rt.backward(loss)
        if loss.item() < best:
            best, kept = loss.item(), copy.deepcopy(rt.unwrap(model).state_dict())
        optimizer.step()
        """,
        tail="rt.unwrap(model).load_state_dict(kept)",
    ),
    "memory by the sample's index": Script(
        before=_INDEXED,
        loader=_INDEXED_LOADER,
        inside="memory = torch.ones(37)",
        batch="index, x, y",
        step="""
        optimizer.zero_grad()
        each = F.cross_entropy(model(x), y, reduction='none')
        rt.backward((each * memory[index]).mean())
        memory[index] = each.detach()
        optimizer.step()
        """,
    ),
    # what a resumed run does not find again
    "EMA that is not saved": Script(
        inside="ema = copy.deepcopy(rt.unwrap(model)).requires_grad_(False)",
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.parameters()): e.lerp_(p, 0.3)
        """,
    ),
    "warm-up by a counter of its own": Script(
        inside="made = 0",
        after="made += 1\nfor group in optimizer.param_groups: group['lr'] = 0.01 * min(1, made / 12)",
    ),
    "threshold of its own": Script(
        inside="limit = 2.0",
        loss="F.cross_entropy(model(x), y) * limit",
        tail="limit *= 0.8",
    ),
    "generator of its own": Script(
        inside="generator = torch.Generator().manual_seed(3)",
        loss="F.cross_entropy(model(x + 0.1 * torch.randn(x.shape, generator=generator)), y)",
    ),
    "hidden state carried on": Script(
        inside="carried = torch.zeros(12)",
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x + carried), y))
        optimizer.step()
        carried = 0.5 * carried + 0.1 * rt.unwrap(model)[0].weight.detach().mean(0)
        """,
    ),
    "penalty on the gradients of the last batch": Script(
        inside="last = None",
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y))
        now = [p.grad.clone() for p in model.parameters()]
        if last is not None:
            for p, g in zip(model.parameters(), last): p.grad.add_(g, alpha=0.3)
        last = now
        optimizer.step()
        """,
    ),
    "gradients that are never cleared": Script(
        optimizer="torch.optim.SGD(model.parameters(), lr=0.01)",
        step="rt.backward(F.cross_entropy(model(x), y)); optimizer.step()",
    ),
    "clipped by the norm of a shard": Script(
        whole="""
        model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
        loader = DataLoader(TensorDataset(inputs, labels), batch_size=10, shuffle=True)
        with hpcddp.runtime(seed=1, parallel="fsdp") as rt:
            model = rt.wrap(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = rt.prepare(model, optimizer, loader)
            for epoch in rt.epochs(3):
                for x, y in loader:
                    optimizer.zero_grad()
                    rt.backward(F.cross_entropy(model(x), y))
                    parts = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
                    norm = sum(part.square().sum() for part in parts).sqrt()
                    for part in parts: part.mul_(0.1 / norm)
                    optimizer.step()
        """
    ),
    # micro batches
    "loss / micro batches": Script(
        runtime=", max_micro_batch=3",
        batch="batch",
        step="""
        optimizer.zero_grad()
        parts = list(rt.micro_batches(batch)) if False else rt.micro_batches(batch)
        for nth, (x, y) in enumerate(parts):
            rt.backward(F.cross_entropy(model(x), y) / (nth + 1))
        optimizer.step()
        """,
    ),
    "clipped in each micro batch": Script(
        runtime=", max_micro_batch=3",
        batch="batch",
        step="""
        optimizer.zero_grad()
        for x, y in rt.micro_batches(batch):
            rt.backward(F.cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        """,
    ),
    "cleared in each micro batch": Script(
        runtime=", max_micro_batch=3",
        batch="batch",
        step="""
        for x, y in rt.micro_batches(batch):
            optimizer.zero_grad()
            rt.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        """,
    ),
}

# What is the same training on any number of ranks, however it looks.
RIGHT = {
    "classifier": Script(),
    "clipping": Script(after="nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
    "EMA": Script(
        more="ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))",
        names="model, optimizer, loader, ema",
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        ema.update_parameters(rt.unwrap(model))
        """,
    ),
    "two backward passes": Script(
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y))
        rt.backward(0.1 * model(x).square().mean())
        optimizer.step()
        """
    ),
    "gradient checkpointing": Script(
        before="""
        from torch.utils.checkpoint import checkpoint
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Sequential(nn.Linear(12, 16), nn.Tanh()), nn.Linear(16, 3)
            def forward(self, x):
                return self.b(checkpoint(self.a, x, use_reentrant=False))
        """,
        model="Net()",
    ),
    "sum": Script(
        optimizer="torch.optim.SGD(model.parameters(), lr=0.001)",
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y, reduction='sum'), summed=True)
        optimizer.step()
        """,
    ),
    "augmented samples": Script(
        before="""
        class Augmented(Dataset):
            def __len__(self):
                return 37
            def __getitem__(self, index):
                return inputs[index] * (1 + 0.1 * torch.rand(1)) + 0.1 * random.random(), labels[index]
        """,
        loader="DataLoader(Augmented(), batch_size=10, shuffle=True)",
    ),
    "VAE": Script(
        before="""
        class VAE(nn.Module):
            def __init__(self):
                super().__init__()
                self.enc, self.dec = nn.Linear(12, 8), nn.Linear(4, 12)
            def forward(self, x):
                mu, log = self.enc(x).chunk(2, 1)
                z = mu + torch.exp(0.5 * log) * torch.randn_like(mu)
                return self.dec(z), mu, log
        """,
        model="VAE()",
        step="""
        optimizer.zero_grad()
        out, mu, log = model(x)
        kl = -0.5 * (1 + log - mu.square() - log.exp()).sum(1).mean()
        rt.backward(F.mse_loss(out, x) + 0.1 * kl)
        optimizer.step()
        """,
    ),
    "diffusion": Script(
        before="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.time = nn.Embedding(20, 12)
                self.net = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 12))
            def forward(self, x, t):
                return self.net(x + self.time(t))
        """,
        model="Net()",
        step="""
        t = torch.randint(0, 20, (len(x),))
        noise = torch.randn_like(x)
        alpha = (1 - t / 20)[:, None]
        optimizer.zero_grad()
        rt.backward(F.mse_loss(model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, t), noise))
        optimizer.step()
        """,
    ),
    "LSTM": Script(
        before="""
        inputs = torch.randn(37, 7, 12)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm, self.out = nn.LSTM(12, 8, num_layers=2, dropout=0.2), nn.Linear(8, 3)
            def forward(self, x):
                return self.out(self.lstm(x.transpose(0, 1))[0][-1])
        """,
        model="Net()",
    ),
    "transformer": Script(
        before="""
        inputs = torch.randint(0, 30, (37, 9))
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.out = nn.Embedding(30, 16), nn.Linear(16, 30)
                layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
                self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            def forward(self, x):
                mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
                return self.out(self.layers(self.embed(x), mask=mask, is_causal=True))
        """,
        model="Net()",
        loss="F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())",
        after="nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    "BatchNorm": Script(model=_BN),
    "dropout": Script(model=_DROPOUT),
    "LoRA": Script(
        before="""
        class LoRA(nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer.requires_grad_(False)
                self.a = nn.Parameter(torch.randn(2, layer.in_features) * 0.1)
                self.b = nn.Parameter(torch.zeros(layer.out_features, 2))
            def forward(self, x):
                return self.layer(x) + x @ self.a.T @ self.b.T
        """,
        model="nn.Sequential(LoRA(nn.Linear(12, 16)), nn.ReLU(), LoRA(nn.Linear(16, 3)))",
        optimizer="torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)",
    ),
    "bf16": Script(
        step="""
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        rt.backward(loss)
        optimizer.step()
        """
    ),
    "spectral norm": Script(
        model="nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 3))"
    ),
    "mean teacher": Script(
        more="teacher = copy.deepcopy(model).requires_grad_(False)",
        names="model, optimizer, loader, teacher",
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y) + F.mse_loss(model(x), teacher(x)))
        optimizer.step()
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), model.parameters()): t.lerp_(p, 0.2)
        """,
    ),
    "SAM": Script(
        optimizer="torch.optim.SGD(model.parameters(), lr=0.05)",
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves): p.add_(move)
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y))
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves): p.sub_(move)
        optimizer.step()
        """,
    ),
    "LBFGS": Script(
        optimizer="torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)",
        step="""
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            rt.backward(loss)
            return rt.mean(loss)
        optimizer.step(closure)
        """,
    ),
    "plateau on rt.mean": Script(
        more="scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)",
        names="model, optimizer, scheduler, loader",
        step="""
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        rt.backward(loss)
        optimizer.step()
        scheduler.step(rt.mean(loss))
        """,
    ),
    "evaluation": Script(
        more="test = DataLoader(TensorDataset(inputs, labels), batch_size=9)",
        names="model, optimizer, loader, test",
        tail="""
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in test:
                right += int((model(x).argmax(1) == y).sum())
        rt.print(f"epoch {epoch}: {rt.sum(right)} right")
        model.train()
        """,
    ),
    "micro batches with clipping and EMA": Script(
        runtime=", max_micro_batch=4",
        batch="batch",
        more="ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))",
        names="model, optimizer, loader, ema",
        step="""
        optimizer.zero_grad()
        for x, y in rt.micro_batches(batch):
            rt.backward(F.cross_entropy(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        ema.update_parameters(rt.unwrap(model))
        """,
    ),
    "train_step": Script(
        batch="batch",
        runtime=", max_micro_batch=5",
        step="""
        optimizer.zero_grad()
        rt.train_step(batch, lambda micro: F.cross_entropy(model(micro[0]), micro[1]))
        optimizer.step()
        """,
    ),
    "scaler": Script(
        more="scaler = torch.amp.GradScaler('cpu')",
        names="model, optimizer, loader, scaler",
        step="""
        optimizer.zero_grad()
        rt.backward(F.cross_entropy(model(x), y), scaler=scaler)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        """,
    ),
    "tied weights": Script(
        before="inputs = torch.randint(0, 30, (37, 9))",
        model="nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 30, bias=False))",
        more="model[2].weight = model[0].weight\noptimizer = torch.optim.AdamW(model.parameters(), lr=0.01)",
        loss="F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())",
    ),
    "exact": Script(runtime=", exact=True, slices=4", batch="batch", step=_MICRO),
    "ZeRO-1": Script(runtime=", parallel='zero1'"),
}
RIGHT["unused layers"] = Script(
    whole="""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 3), nn.Linear(12, 3)
        def forward(self, x):
            return self.a(x)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=10, shuffle=True)
    with hpcddp.runtime(seed=1) as rt:
        model = rt.wrap(model, find_unused_parameters=True)
        model, optimizer, loader = rt.prepare(model, optimizer, loader)
        for epoch in rt.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(F.cross_entropy(model(x), y))
                optimizer.step()
    """
)
RIGHT["tokens"] = Script(
    whole="""
    inputs = torch.randint(1, 30, (37, 9))
    inputs[torch.rand(37, 9) < 0.3] = 0
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(inputs), batch_size=10, shuffle=True)
    with hpcddp.runtime(seed=1) as rt:
        loader = rt.loader(loader, count=lambda batch: int((batch[0][:, 1:] != 0).sum()))
        model, optimizer = rt.prepare(model, optimizer)
        for epoch in rt.epochs(3):
            for x, in loader:
                optimizer.zero_grad()
                scores = model(x)[:, :-1]
                rt.backward(F.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten(), ignore_index=0))
                optimizer.step()
    """
)
RIGHT["stream"] = Script(
    whole="""
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(inputs, labels)
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(), batch_size=10)
    with hpcddp.runtime(seed=1) as rt:
        model, optimizer, loader = rt.prepare(model, optimizer, loader)
        for epoch in rt.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                rt.backward(F.cross_entropy(model(x), y))
                optimizer.step()
    """
)
_GAN = """
    g = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 12))
    d = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
    opt_g, opt_d = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=10, shuffle=True)
    with hpcddp.runtime(seed=1) as rt:
        g, d, opt_g, opt_d, loader = rt.prepare(g, d, opt_g, opt_d, loader)
        for epoch in rt.epochs(3):
            for x, _ in loader:
                STEP
    """


def _gan(step: str) -> Script:
    return Script(whole=_GAN.replace("STEP", textwrap.indent(textwrap.dedent(step).strip(), " " * 16).strip()))


RIGHT["GAN"] = _gan(
    """
    opt_d.zero_grad()
    fake = g(torch.randn(len(x), 4))
    rt.backward(F.softplus(-d(x)).mean())
    rt.backward(F.softplus(d(fake.detach())).mean())
    opt_d.step()
    opt_g.zero_grad()
    rt.backward(F.softplus(-d(g(torch.randn(len(x), 4)))).mean())
    opt_g.step()
    """
)
RIGHT["WGAN-GP"] = _gan(
    """
    opt_d.zero_grad()
    fake = g(torch.randn(len(x), 4)).detach()
    mix = torch.rand(len(x), 1)
    between = (mix * x + (1 - mix) * fake).requires_grad_()
    slope, = torch.autograd.grad(rt.unwrap(d)(between).sum(), between, create_graph=True)
    rt.backward(d(fake).mean() - rt.unwrap(d)(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean())
    opt_d.step()
    opt_g.zero_grad()
    rt.backward(-d(g(torch.randn(len(x), 4))).mean())
    opt_g.step()
    """
)
RIGHT["k-fold"] = Script(
    whole="""
    for fold in range(2):
        torch.manual_seed(fold)
        model = nn.Linear(12, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        part = torch.utils.data.Subset(TensorDataset(inputs, labels), range(fold, 37, 2))
        loader = DataLoader(part, batch_size=10, shuffle=True)
        with hpcddp.runtime(seed=1, run_dir=f"runs/fold-{fold}") as rt:
            model, optimizer, loader = rt.prepare(model, optimizer, loader)
            for epoch in rt.epochs(2):
                for x, y in loader:
                    optimizer.zero_grad()
                    rt.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
    """
)
