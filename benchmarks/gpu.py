"""What hpcddp does and costs on one CUDA device, in one command of less than ten minutes.

Checks: NCCL with one rank; two gloo ranks on one device; exact sums, the same bits on one and two ranks; saves beside
the training, resumed; mixed precision; torch.compile. Then speed, in turns with the hand-written loop:
ResNet-50 and a transformer of 0.15 billion parameters at 32 and 8 samples, the small one also as a CUDA graph
(torch.compile, mode reduce-overhead). Needs torch with CUDA, torchvision and jinja2, and installs nothing.
Usage: gpu.py [--only PART ...] [--out FILE], or gpu.py --device cpu --tiny: a dry run that measures nothing.
It has not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))  # a checkout that is not installed

Found = dict[str, Any]
PART_S = 110  # seconds that a part may take
ALL_S = 570  # and all of them


def make_small(samples: int = 64) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, DataLoader and loss: large enough to be wrong."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))
    draw = torch.Generator().manual_seed(1)
    images, classes = torch.randn(samples, 3, 16, 16, generator=draw), torch.randint(10, (samples,), generator=draw)
    loader = DataLoader(TensorDataset(images, classes), batch_size=16, shuffle=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loader, nn.functional.cross_entropy


def train_small(args: argparse.Namespace, *, epochs: int = 3, compiled: bool = False, **options: Any) -> Any:
    """A short training; returns the runtime after its end."""
    import torch

    import hpcddp

    backend = options.pop("backend", "gloo")
    with hpcddp.runtime(backend=backend, **options) as rt:
        assert rt.device.type == args.device, rt.device
        model, optimizer, loader, loss_fn = make_small()
        model, optimizer, loader = rt.prepare(model, optimizer, loader)
        forward = torch.compile(model) if compiled else model
        for _ in rt.epochs(epochs):
            for x, y in loader:
                assert x.device.type == args.device, x.device
                optimizer.zero_grad()
                rt.backward(loss_fn(forward(x), y))
                optimizer.step()
    assert rt.stop_reason is None, rt.stop_reason
    return rt


def check_alone(args: argparse.Namespace) -> Found:
    """One rank over NCCL."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    rt = train_small(args, backend=backend, run_dir=args.folder)
    return {"backend": rt.group.backend, "steps": rt.steps, "weights": rt.weights_sha256}


def check_exact(args: argparse.Namespace) -> Found:
    """The weights' hash of an exact run; `main` compares that of one rank and of two ranks on one device."""
    rt = train_small(args, exact=True, slices=4, run_dir=args.folder)
    return {"ranks": rt.group.world_size, "weights": rt.weights_sha256}


def check_saves(args: argparse.Namespace) -> Found:
    """A run that stops after an epoch and is resumed ends with the weights of one that does not."""
    import hpcddp

    def go(name: str, stop_at: int | None) -> Any:
        # exact, because kernels of a GPU may otherwise sum in another order each time
        options: dict[str, Any] = {"run_dir": f"{args.folder}/{name}", "checkpoint": "async", "save_every": 2}
        with hpcddp.runtime(backend="gloo", exact=True, slices=4, **options) as rt:
            model, optimizer, loader, loss_fn = make_small()
            model, optimizer, loader = rt.prepare(model, optimizer, loader)
            for _ in rt.epochs(3):
                for x, y in loader:
                    optimizer.zero_grad()
                    rt.backward(loss_fn(model(x), y))
                    optimizer.step()
                    if rt.steps + 1 == stop_at:
                        rt.stop("by the benchmark")
        return rt

    whole = go("whole", None)
    first = go("parts", 5)
    assert first.stop_reason is not None
    resumed = go("parts", None)
    assert resumed.steps == whole.steps, (resumed.steps, whole.steps)
    return {"steps": whole.steps, "same_weights": resumed.weights_sha256 == whole.weights_sha256}


def check_amp(args: argparse.Namespace) -> Found:
    """Autocast to half precision with a gradient scaler."""
    import torch

    import hpcddp

    half = torch.float16 if args.device == "cuda" else torch.bfloat16
    losses = []
    with hpcddp.runtime(backend="gloo") as rt:
        model, optimizer, loader, loss_fn = make_small()
        scaler = torch.amp.GradScaler(args.device)
        model, optimizer, loader, scaler = rt.prepare(model, optimizer, loader, scaler)
        for _ in rt.epochs(8):
            for x, y in loader:
                with torch.autocast(args.device, half):
                    loss = loss_fn(model(x), y)
                rt.backward(loss, scaler=scaler)
                rt.step(optimizer, clip_norm=1.0, scaler=scaler)
                losses.append(float(loss.detach()))
    assert losses[-1] == losses[-1], "the loss is not a number"
    return {"first_loss": losses[0], "last_loss": losses[-1], "scale": scaler.get_scale()}


def check_compile(args: argparse.Namespace) -> Found:
    """torch.compile around what `prepare` gives."""
    return {"steps": train_small(args, epochs=1, compiled=True).steps}


class Tokens:
    """Random tokens and the tokens after them."""

    def __init__(self, samples: int, length: int, words: int) -> None:
        import torch

        self.tokens = torch.randint(words, (samples, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def make_transformer(tiny: bool) -> Any:
    """12 layers of 768 with 50,304 words and weights of its own for the output: 0.16 billion parameters."""
    import torch
    from torch import nn

    width, layers, heads, words = (32, 2, 2, 100) if tiny else (768, 12, 12, 50304)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, width)
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.out = nn.Linear(width, words, bias=False)

        def forward(self, tokens: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
            return self.out(self.layers(self.embed(tokens), mask=mask, is_causal=True)).transpose(1, 2)

    torch.manual_seed(0)
    return Transformer()


def make_large(kind: str, batch: int, steps: int, tiny: bool) -> tuple[Any, Any, Any]:
    """Model, optimizer and DataLoader of `steps` batches that lie in memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torchvision import models

    if kind == "resnet50":
        side = 32 if tiny else 224
        images = torch.randn(batch, 3, side, side).repeat(steps, 1, 1, 1)
        data: Any = TensorDataset(images, torch.randint(1000, (batch * steps,)))
        model = models.resnet18() if tiny else models.resnet50()
    else:
        data = Tokens(batch * steps, 16 if tiny else 512, 100 if tiny else 50304)
        model = make_transformer(tiny)
    loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True, pin_memory=torch.cuda.is_available())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader


def blocks_by_hand(args: argparse.Namespace, make: Callable[[], Any], compiled: bool) -> Iterator[None]:
    import torch
    from torch.nn.functional import cross_entropy

    model, optimizer, loader = make()
    model = model.to(args.device)
    forward = torch.compile(model, mode="reduce-overhead") if compiled else model
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            x, y = x.to(args.device, non_blocking=True), y.to(args.device, non_blocking=True)
            with torch.autocast(args.device, torch.bfloat16):
                loss = cross_entropy(forward(x), y)
            loss.backward()
            optimizer.step()
        yield


def blocks_with_hpcddp(
    args: argparse.Namespace, make: Callable[[], Any], compiled: bool, blocks: int
) -> Iterator[None]:
    import torch
    from torch.nn.functional import cross_entropy

    import hpcddp

    with hpcddp.runtime(run_dir=args.folder, save_every=sys.maxsize) as rt:
        model, optimizer, loader = rt.prepare(*make())
        forward = torch.compile(model, mode="reduce-overhead") if compiled else model
        for _ in rt.epochs(blocks):
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast(args.device, torch.bfloat16):
                    loss = cross_entropy(forward(x), y)
                rt.backward(loss)
                optimizer.step()
            yield


def measure_speed(args: argparse.Namespace, kind: str, batch: int, *, compiled: bool = False) -> Found:
    """Samples per second of both loops, and the median over the rounds of their times' ratio."""
    import torch

    steps, rounds = (2, 2) if args.tiny else (10, 6)

    def make() -> Any:
        return make_large(kind, batch, steps, args.tiny)

    running = {
        "by hand": blocks_by_hand(args, make, compiled),
        "hpcddp": blocks_with_hpcddp(args, make, compiled, rounds + 1),
    }
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds + 1):
        for name in list(running)[:: -1 if turn % 2 else 1]:
            wait()
            began = time.perf_counter()
            next(running[name])
            wait()
            if turn:  # the first round compiles, tunes and fills caches
                times[name].append((time.perf_counter() - began) / steps)
    next(running["hpcddp"], None)  # it ends its run
    found = {f"{name}, samples/s": round(batch / statistics.median(took), 1) for name, took in times.items()}
    ratios = [ours / hand for hand, ours in zip(times["by hand"], times["hpcddp"], strict=True)]
    return found | {"time of by hand": round(statistics.median(ratios), 3)}


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "alone": check_alone,
    "exact": check_exact,
    "saves": check_saves,
    "amp": check_amp,
    "compile": check_compile,
    "resnet50-32": lambda args: measure_speed(args, "resnet50", 32),
    "resnet50-8": lambda args: measure_speed(args, "resnet50", 8),
    "resnet50-8-graph": lambda args: measure_speed(args, "resnet50", 8, compiled=True),
    "transformer-32": lambda args: measure_speed(args, "transformer", 32),
    "transformer-8": lambda args: measure_speed(args, "transformer", 8),
}


def run_part(args: argparse.Namespace, name: str, ranks: int = 1) -> Found:
    """A part in processes of its own; {"failed": the end of its output} if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [__file__, "--part", name, "--device", args.device, "--part-out", str(out), "--folder", f"{folder}/run"]
        words += ["--tiny"] if args.tiny else []
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(torchrun if ranks > 1 else []), *words]
        env = os.environ | {"HPCDDP_PROGRESS": "off"}
        limit = None if math.isinf(args.part_s) else args.part_s
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took more than {args.part_s:.0f} s"}
        if done.returncode or not out.exists():
            return {"failed": "\n".join((done.stdout + done.stderr).splitlines()[-15:])}
        found: Found = json.loads(out.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models: with --device cpu a dry run")
    parser.add_argument("--out", help="write what was found as JSON")
    for hidden in ("--part", "--part-out", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    import torch

    if args.part is not None:
        found = PARTS[args.part](args)
        if os.environ.get("RANK", "0") == "0":
            Path(args.part_out).write_text(json.dumps(found))
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch sees no CUDA device here, so nothing was run", file=sys.stderr)
        print("hint: run it on a node with a GPU, or as a dry run: gpu.py --device cpu --tiny", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU: A DRY RUN, its figures mean nothing"
    print(f"torch {torch.__version__} on {device}", flush=True)
    results: dict[str, Found] = {}
    ends = time.monotonic() + ALL_S
    for name in args.only or PARTS:
        args.part_s = max(1.0, min(PART_S, ends - time.monotonic())) if args.device == "cuda" else math.inf
        results[name] = run_part(args, name)
        if name == "exact" and "failed" not in results[name]:
            two = run_part(args, name, ranks=2)
            one = results[name]["weights"]
            results[name] = two if "failed" in two else {"ranks": [1, 2], "same_weights": one == two["weights"]}
        print(f"{name}: {results[name].get('failed') or json.dumps(results[name])}", flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps({"device": device, "torch": torch.__version__, **results}, indent=2))
    return int(any("failed" in found or found.get("same_weights") is False for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
