"""What hpcddp does and costs on one CUDA device, in one command of less than ten minutes.

`checks`: NCCL with one rank; two gloo ranks that share the device; exact sums, the same bits on one and two ranks;
ZeRO-1 and FSDP2; saves beside the training, resumed; mixed precision; torch.compile; `hpcddp launch`; the scripts of
docs/frameworks/, stopped and resumed. `memory`: what a step holds against what `hpcddp advise` says. Of these some run
at a time. Then, each alone: `input` and `exact-cost`, which are input.py and exact.py beside this file; `speed`, in
turns with the hand-written loop: ResNet-50 and a transformer of 0.16 billion parameters at 32 and 8 samples, the small
one also as a CUDA graph (torch.compile, mode reduce-overhead). Needs torch with CUDA, torchvision and PyYAML, the
frameworks for their scripts, and installs nothing.
Usage: gpu.py [--only PART ...] [--out FILE], or gpu.py --device cpu --tiny: a dry run that measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # a checkout that is not installed

Found = dict[str, Any]
PART_S = 150  # seconds that a part may take


def make_small(samples: int = 64) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, DataLoader and loss: large enough to be wrong."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(128, 10))
    draw = torch.Generator().manual_seed(1)
    images, classes = torch.randn(samples, 3, 16, 16, generator=draw), torch.randint(10, (samples,), generator=draw)
    loader = DataLoader(TensorDataset(images, classes), batch_size=16, shuffle=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loader, nn.functional.cross_entropy


def train_small(args: argparse.Namespace, *, epochs: int = 3, compiled: bool = False, **options: Any) -> Any:
    """A short training; returns the runtime after its end."""
    import torch

    import hpcddp

    if args.device == "cpu" or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        options["backend"] = "gloo"  # NCCL takes a device for one rank only
    with hpcddp.runtime(**options) as rt:
        assert rt.device.type == args.device, rt.device
        model, optimizer, loader, loss_fn = make_small()
        model, optimizer, loader = rt.prepare(model, optimizer, loader)
        forward = torch.compile(model) if compiled else model
        for _ in rt.epochs(epochs):
            for batch in loader:
                optimizer.zero_grad()
                for x, y in rt.micro_batches(batch):
                    assert x.device.type == args.device, x.device
                    rt.backward(loss_fn(forward(x), y))
                optimizer.step()
    assert rt.stop_reason is None, rt.stop_reason
    return rt


def check_training(args: argparse.Namespace, **options: Any) -> Found:
    """A training to its end."""
    rt = train_small(args, run_dir=args.folder, **options)
    found = {"backend": rt.group.backend, "ranks": rt.group.world_size, "steps": rt.steps, "device": str(rt.device)}
    return found | {"weights": rt.weights_sha256}


def check_saves(args: argparse.Namespace, **options: Any) -> Found:
    """A run that stops after an epoch and is resumed ends with the weights of one that does not."""
    import hpcddp
    import hpcddp.runs.start

    hpcddp.runs.start.is_interactive = lambda: True  # as in a notebook: one process plays two attempts of a run

    def go(group: Any, name: str, stop_at: int | None) -> Any:
        # exact, because kernels of a GPU may otherwise sum in another order each time
        how: dict[str, Any] = {"run_dir": f"{args.folder}/{name}", "save_every": 2}
        with hpcddp.runtime(group=group, exact=True, slices=4, **how, **options) as rt:
            model, optimizer, loader, loss_fn = make_small()
            model, optimizer, loader = rt.prepare(model, optimizer, loader)
            for _ in rt.epochs(3):
                for batch in loader:
                    optimizer.zero_grad()
                    for x, y in rt.micro_batches(batch):
                        rt.backward(loss_fn(model(x), y))
                    optimizer.step()
                    if rt.steps + 1 == stop_at:
                        rt.stop("by the benchmark")
        return rt

    with hpcddp.init(backend="gloo") as group:
        whole = go(group, "whole", None)
        first = go(group, "parts", 5)
        assert first.stop_reason is not None
        resumed = go(group, "parts", None)
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
                optimizer.zero_grad()
                with torch.autocast(args.device, half):
                    loss = loss_fn(model(x), y)
                optimizer.zero_grad()
                rt.backward(loss, scaler=scaler)
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses.append(float(loss.detach()))
    assert losses[-1] == losses[-1], "the loss is not a number"
    return {"first_loss": losses[0], "last_loss": losses[-1], "scale": scaler.get_scale()}


def check_compile(args: argparse.Namespace) -> Found:
    """torch.compile around what `prepare` gives."""
    return {"steps": train_small(args, epochs=1, compiled=True).steps}


def launch(folder: Path, ranks: int, words: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """One attempt of a run in this folder, by `hpcddp launch`."""
    folder.mkdir(exist_ok=True)
    ours = [
        "-m",
        "hpcddp",
        "launch",
        "--here",
        "--ranks-per-node",
        str(ranks),
        "--name",
        "own",
        "--walltime",
        "1:00:00",
    ]
    env |= {"PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *ours, "--", sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=os.environ | env, capture_output=True, text=True, check=False)


def read_json(path: Path) -> Found:
    found: Found = json.loads(path.read_text())
    return found


def check_launch(args: argparse.Namespace) -> Found:
    """A job's script on one rank, to its end, and on two, which a single GPU has to refuse in two lines."""
    script = str(REPO / "jobs/runtime/train.py")
    folder = Path(args.folder)
    folder.mkdir()
    one, two = (launch(folder / str(ranks), ranks, [script, "--epochs", "2"]) for ranks in (1, 2))
    assert one.returncode == 0, one.stdout + one.stderr
    state = read_json(folder / "1/runs/own/state.json")
    (versions,) = (folder / "1/runs/own").glob("attempts/*/versions.json")
    said = (two.stdout + two.stderr).splitlines()
    assert "Traceback" not in "".join(said), "\n".join(said)
    refused = [line for line in said if line.startswith(("hpcddp:", "hint:"))][-6:] if two.returncode else []
    return {"status": state["status"], "backend": read_json(versions)["backend"], "two ranks": refused or "finished"}


def check_framework(args: argparse.Namespace, heading: str, weights: str, at: int = 7) -> Found:
    """A script of docs/frameworks/, stopped after a step and resumed, and one that is not stopped."""
    import torch

    pages = "".join(page.read_text(encoding="utf-8") for page in (REPO / "docs/frameworks").glob("*.md"))
    (script,) = re.findall(rf"^### {heading}\n\n```python\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)
    if not find_spec("lightning"):
        script = script.replace("import lightning\n", "import pytorch_lightning as lightning\n")
    modules = re.findall(r"^(?:import|from) (\w+)", script, re.MULTILINE)
    if missing := [module for module in modules if not find_spec(module)]:
        return {"left out": f"{sys.executable} has no {missing[0]}"}
    Path(args.folder).mkdir()
    train = Path(args.folder) / "train.py"
    train.write_text(script, encoding="utf-8")
    stopping = str(REPO / "tests/frameworks/programs/stopping.py")
    whole, parts = train.parent / "whole", train.parent / "parts"
    env = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    steps = []
    for folder, stop, status in ((whole, "0 SIGTERM", 0), (parts, f"{at} SIGTERM", 85), (parts, "0 SIGTERM", 0)):
        done = launch(folder, 1, [stopping, str(train)], STOP_AT=stop, **env)
        assert done.returncode == status, done.stdout + done.stderr
        steps.append(read_json(folder / "runs/own/state.json")["step"])

    def load(file: Path) -> dict[str, Any]:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        content = torch.load(file, weights_only=False, map_location="cpu")
        return content.get("state_dict") or content

    once, twice = load(whole / weights), load(parts / weights)
    assert once.keys() == twice.keys()
    off = max(float((once[name].double() - twice[name].double()).abs().max()) for name in once)
    return {"steps": steps, "same_weights": off == 0, "largest difference": off}


class Tokens:
    """Random tokens and the tokens after them."""

    def __init__(self, samples: int, length: int, words: int) -> None:
        import torch

        self.tokens = torch.randint(words, (samples, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def make_transformer(width: int = 768, layers: int = 12, heads: int = 12, words: int = 50304) -> Any:
    """12 layers of 768 with 50,304 words and weights of its own for the output: 0.16 billion parameters."""
    import torch
    from torch import nn

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


def make_resnet50() -> Any:
    from torchvision import models

    return models.resnet50()


def make_tiny_transformer() -> Any:
    return make_transformer(32, 2, 2, 100)


def make_tiny_resnet50() -> Any:
    from torchvision import models

    return models.resnet18()


def make_large(kind: str, batch: int, steps: int, tiny: bool) -> tuple[Any, Any, Any]:
    """Model, optimizer and DataLoader of `steps` batches that lie in memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    if kind == "resnet50":
        side = 32 if tiny else 224
        images = torch.randn(batch, 3, side, side).repeat(steps, 1, 1, 1)
        data: Any = TensorDataset(images, torch.randint(1000, (batch * steps,)))
        model = make_tiny_resnet50() if tiny else make_resnet50()
    else:
        data = Tokens(batch * steps, 16 if tiny else 512, 100 if tiny else 50304)
        model = make_tiny_transformer() if tiny else make_transformer()
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


GIB = 2**30
MEMORY = [  # model, samples, precision
    ("resnet50", 32, "bf16-mixed"),
    ("resnet50", 64, "fp32"),
    ("transformer", 8, "bf16-mixed"),
    ("transformer", 32, "bf16-mixed"),
    ("transformer", 8, "fp32"),
]


def ask_advice(case: tuple[str, int, str], tiny: bool) -> Found:
    """What `hpcddp advise` says of the model on one rank, in GiB."""
    kind, batch, precision = case
    name = f"{__file__}:make_{'tiny_' if tiny else ''}{kind}"
    sample = ("--sequence", "16" if tiny else "512") if kind == "transformer" else ("--input", "3,224,224")
    words = [*sample, "--precision", precision, "--max-micro-batch", str(batch), "--gpu-memory", "80GB", "--json"]
    command = [sys.executable, "-m", "hpcddp", "advise", name, *words]
    env = os.environ | {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    (row,) = [row for row in json.loads(said.stdout)["splits"] if row["parallel"] == "ddp"]
    parts = {name.removesuffix("_bytes"): size / GIB for name, size in row.items() if name.endswith("_bytes")}
    return parts | {"fullest at": row["peak_at"]}


def hold_by_hand(args: argparse.Namespace, kind: str, batch: int, precision: str) -> Found:
    """GiB at the moments of a hand-written step, of the third."""
    import torch
    from torch.nn.functional import cross_entropy

    model, optimizer, loader = make_large(kind, batch, 1, args.tiny)
    model = model.to(args.device)
    x, y = (one.to(args.device) for one in next(iter(loader)))
    found: Found = {}
    for _ in range(3):
        reset_peak(args)
        found = {"between steps": allocated(args)}
        with torch.autocast(args.device, torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = cross_entropy(model(x), y)
        found["after forward"] = allocated(args)
        loss.backward()
        found |= {"after backward": allocated(args), "peak": peak(args)}
        del loss
        reset_peak(args)
        optimizer.step()
        found["peak of optimizer.step()"] = peak(args)
        optimizer.zero_grad()
    return found


def hold_with_hpcddp(
    args: argparse.Namespace, kind: str, batch: int, precision: str, group: Any, *, saves: bool
) -> Found:
    """GiB of the steps after the second in hpcddp's loop; with saves after each step."""
    import torch
    from torch.nn.functional import cross_entropy

    import hpcddp

    options: Found = {"save_every": 1} if saves else {"save_every": sys.maxsize}
    folder = f"{args.folder}/{kind}-{batch}-{precision}-{saves}"
    with hpcddp.runtime(run_dir=folder, group=group, **options) as rt:
        model, optimizer, loader = rt.prepare(*make_large(kind, batch, 5, args.tiny))
        for _ in rt.epochs(1):
            for x, y in loader:
                if rt.steps == 2:
                    reset_peak(args)
                optimizer.zero_grad()
                with torch.autocast(args.device, torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss = cross_entropy(model(x), y)
                rt.backward(loss)
                optimizer.step()
    found = {"peak": peak(args)}
    if args.device == "cuda":
        found["reserved by torch"] = torch.cuda.memory_reserved() / GIB
    return found


def allocated(args: argparse.Namespace) -> float:
    import torch

    return torch.cuda.memory_allocated() / GIB if args.device == "cuda" else math.nan


def peak(args: argparse.Namespace) -> float:
    import torch

    return torch.cuda.max_memory_allocated() / GIB if args.device == "cuda" else math.nan


def reset_peak(args: argparse.Namespace) -> None:
    import torch

    if args.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def measure_memory(args: argparse.Namespace, case: tuple[str, int, str]) -> Found:
    """What `hpcddp advise` says of the model, and what a step holds; `ratio`: of hpcddp's peak. GiB."""
    import hpcddp

    says = ask_advice(case, args.tiny)
    with hpcddp.init(backend="gloo" if args.device == "cpu" else None) as group:
        return hold(args, group, case, says)


def hold(args: argparse.Namespace, group: Any, case: tuple[str, int, str], says: Found) -> Found:
    import gc

    import torch

    ways: dict[str, Callable[[], Found]] = {
        "by hand": lambda: hold_by_hand(args, *case),
        "hpcddp": lambda: hold_with_hpcddp(args, *case, group, saves=False),
        "hpcddp, with saves": lambda: hold_with_hpcddp(args, *case, group, saves=True),
    }
    held: Found = {"advised": says}
    for name, way in ways.items():
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        held[name] = way()
    return held | {"ratio": says["peak"] / held["hpcddp"]["peak"]}


def few_workers() -> int:
    """Processes at a time."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def run_beside(script: str, *words: str) -> Found:
    """Another script of this folder; what it prints."""
    command = [sys.executable, str(REPO / "benchmarks" / script), *words]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {"prints": [line for line in done.stdout.splitlines() if line]}


def measure_input(args: argparse.Namespace) -> Found:
    """See input.py."""
    few = ["--images", "64", "--side", "64", "--crop", "32", "--rounds", "2"]
    return run_beside("input.py", *(few if args.tiny else ["--images", "1024", "--workers", "8", "--rounds", "6"]))


def measure_exact(args: argparse.Namespace) -> Found:
    """See exact.py."""
    few = ["--worlds", "1", "--rounds", "1", "--batch", "16", "--side", "32"]
    return run_beside("exact.py", *(few if args.tiny else ["--worlds", "1", "2", "--rounds", "3"]))


class Part(NamedTuple):
    """`group`: another word for several parts. `ranks` share the device."""

    group: str
    run: Callable[..., Found]
    options: Found = {}  # noqa: RUF012  # nothing changes it
    ranks: int = 1


_EXACT: Found = {"exact": True, "slices": 4}
PARTS = {
    "exact": Part("checks", check_training, _EXACT),
    "exact-2": Part("checks", check_training, _EXACT, 2),
    "exact-integer": Part("checks", check_training, _EXACT | {"exact": "integer"}),
    "exact-integer-2": Part("checks", check_training, _EXACT | {"exact": "integer"}, 2),
    "hf-trainer": Part("checks", check_framework, {"heading": "HF Trainer", "weights": "model/model.safetensors"}),
    # on one rank its loader has no DistributedSampler, which alone repeats an order inside an epoch
    "lightning": Part("checks", check_framework, {"heading": "Lightning Trainer", "weights": "model.ckpt", "at": 16}),
    "accelerate": Part("checks", check_framework, {"heading": "Accelerate", "weights": "model/model.safetensors"}),
    "launch": Part("checks", check_launch),
    "saves": Part("checks", check_saves),
    "saves-2": Part("checks", check_saves, {}, 2),
    "alone": Part("checks", check_training),
    "ddp-2": Part("checks", check_training, {}, 2),
    "zero1": Part("checks", check_training, {"parallel": "zero1"}),
    "zero1-2": Part("checks", check_training, {"parallel": "zero1"}, 2),
    "fsdp": Part("checks", check_training, {"parallel": "fsdp"}),
    "fsdp-2": Part("checks", check_training, {"parallel": "fsdp"}, 2),
    "amp": Part("checks", check_amp),
    "compile": Part("checks", check_compile),
    **{f"memory-{'-'.join(map(str, case))}": Part("memory", measure_memory, {"case": case}) for case in MEMORY},
    "input": Part("input", measure_input),
    "exact-cost": Part("exact-cost", measure_exact),
    "resnet50-32": Part("speed", measure_speed, {"kind": "resnet50", "batch": 32}),
    "resnet50-8": Part("speed", measure_speed, {"kind": "resnet50", "batch": 8}),
    "resnet50-8-graph": Part("speed", measure_speed, {"kind": "resnet50", "batch": 8, "compiled": True}),
    "transformer-32": Part("speed", measure_speed, {"kind": "transformer", "batch": 32}),
    "transformer-8": Part("speed", measure_speed, {"kind": "transformer", "batch": 8}),
}
BESIDE = {"checks", "memory"}  # some parts at a time: torch counts the memory of each process
SAME = {"exact-2": "exact", "exact-integer-2": "exact-integer"}  # their weights


def run_part(args: argparse.Namespace, name: str, ends: float) -> Found:
    """A part in processes of its own; {"failed": the end of its output} if it fails, or takes too long."""
    with tempfile.TemporaryDirectory() as made:
        out, log, ranks = Path(made) / "found.json", Path(made) / "log", PARTS[name].ranks
        words = [__file__, "--part", name, "--device", args.device, "--part-out", str(out), "--folder", f"{made}/run"]
        words += ["--tiny"] if args.tiny else []
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(torchrun if ranks > 1 else []), *words]
        limit = max(1.0, min(PART_S, ends - time.monotonic())) if args.device == "cuda" else None
        began = time.monotonic()
        with log.open("w") as stream:
            env = os.environ | {"HPCDDP_PROGRESS": "off"}
            part = subprocess.Popen(command, env=env, stdout=stream, stderr=stream, start_new_session=True)
            late = False
            try:
                part.wait(limit)
            except subprocess.TimeoutExpired:
                late = True
            for number in (signal.SIGTERM, signal.SIGKILL):  # what it has started, too: torchrun ends its ranks at TERM
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(part.pid, number)
                    part.wait(15)
        said = log.read_text(errors="replace").splitlines()
        took = {"seconds": round(time.monotonic() - began)}
        if late or part.returncode or not out.exists():
            first = [f"it took more than {limit:.0f} s"] if late else []
            return {"failed": "\n".join([*first, *said[-25:]]), **took}
        return read_json(out) | took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = list(dict.fromkeys(part.group for part in PARTS.values()))
    names = [*groups, *(name for name in PARTS if name not in groups)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models: with --device cpu a dry run")
    parser.add_argument("--out", help="write what was found as JSON")
    parser.add_argument("--limit", type=float, default=570, metavar="S", help="seconds that all parts may take (570)")
    for hidden in ("--part", "--part-out", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    import torch

    if args.part is not None:
        found = PARTS[args.part].run(args, **PARTS[args.part].options)
        if os.environ.get("RANK", "0") == "0":
            Path(args.part_out).write_text(json.dumps(found))
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch sees no CUDA device here, so nothing was run", file=sys.stderr)
        print("hint: run it on a node with a GPU, or as a dry run: gpu.py --device cpu --tiny", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU: A DRY RUN, its figures mean nothing"
    print(f"torch {torch.__version__} on {device}", flush=True)
    chosen = [name for name, part in PARTS.items() if not args.only or {name, part.group} & {*args.only}]
    found: dict[str, Found] = {}
    ends = time.monotonic() + args.limit

    def note(name: str, result: Found) -> None:
        found[name] = result
        print(f"{name}: {result.get('failed') or json.dumps(result)}", flush=True)
        if args.out:  # what is there, if this is ended before its end
            Path(args.out).write_text(json.dumps({"device": device, "torch": torch.__version__, **found}, indent=2))

    with ThreadPoolExecutor(few_workers()) as pool:
        beside = {pool.submit(run_part, args, name, ends): name for name in chosen if PARTS[name].group in BESIDE}
        for part in as_completed(beside):
            note(beside[part], part.result())
    for name in chosen:
        if PARTS[name].group not in BESIDE:  # a time: each alone, after the others
            note(name, run_part(args, name, ends))
    weights = {name: one.get("weights") for name, one in found.items()}
    other = [name for name, first in SAME.items() if {name, first} <= {*found} and weights[name] != weights[first]]
    for name in other:
        print(f"{name}: OTHER WEIGHTS than {SAME[name]}")
    failed = [name for name, one in found.items() if "failed" in one or one.get("same_weights") is False]
    return int(bool(failed or other))


if __name__ == "__main__":
    sys.exit(main())
