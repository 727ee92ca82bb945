"""The same global batch on 1, 2 and 4 ranks, exact and plain: the curves, and how far they are from one rank's.

Runs the reference trainer on the handwritten digits six times and draws docs/convergence.svg from what the runs
recorded. Prints the last loss, the test accuracy and the weights of each.
Usage: convergence.py [--epochs N] [--out FILE] [--keep FOLDER] (about 6 minutes on 2 cores)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
WORLDS = (1, 2, 4)
TRAIN = ["-m", "hpcddp", "train"]
BATCH = 64
COLOURS = {1: "#1b1b1b", 2: "#0072b2", 4: "#d55e00"}
WIDTH, HEIGHT, LEFT, TOP = 380, 200, 62, 40


class Curve(NamedTuple):
    losses: list[float]
    accuracy: float
    weights: str


def train(world_size: int, exact: bool, epochs: int, folder: Path) -> Curve:
    """One run of the reference trainer on so many ranks of this machine."""
    run = folder / f"{'exact' if exact else 'plain'}-{world_size}"
    words = [*TRAIN, "--epochs", epochs, "--global-batch", BATCH, "--run-dir", run, *(["--exact"] if exact else [])]
    place = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    place |= {"MASTER_PORT": random.randrange(12000, 32000)}
    ranks = []
    for rank in range(world_size):
        env = os.environ | {name: str(value) for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        ranks.append(subprocess.Popen([sys.executable, *map(str, words)], env=env, stdout=subprocess.DEVNULL))
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise SystemExit(f"{run.name} failed")
    (metrics,) = run.glob("attempts/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Curve(
        [line["loss"] for line in lines if line["kind"] == "step"],
        [line["test_acc"] for line in lines if "test_acc" in line][-1],
        json.loads((run / "state.json").read_text())["weights_sha256"],
    )


class Panel(NamedTuple):
    """A plot at (x, y) of the picture: steps to the right, powers of ten upwards."""

    x: float
    y: float
    steps: int
    lowest: int  # exponents
    highest: int

    def point(self, step: int, value: float) -> str:
        height = (math.log10(max(value, 10.0**self.lowest)) - self.lowest) / (self.highest - self.lowest)
        return f"{self.x + WIDTH * step / self.steps:.1f},{self.y + HEIGHT * (1 - min(height, 1)):.1f}"

    def frame(self, title: str) -> str:
        lines = [f'<rect x="{self.x}" y="{self.y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
        lines.append(f'<text x="{self.x}" y="{self.y - 10}" class="title">{title}</text>')
        for exponent in range(self.lowest, self.highest + 1, max(1, (self.highest - self.lowest) // 4)):
            y = self.y + HEIGHT * (1 - (exponent - self.lowest) / (self.highest - self.lowest))
            lines.append(f'<line x1="{self.x}" x2="{self.x + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
            power = f'10<tspan dy="-4" font-size="9">{exponent}</tspan>'
            lines.append(f'<text x="{self.x - 8}" y="{y + 4:.1f}" text-anchor="end">{power}</text>')
        for step in (0, self.steps // 2, self.steps):
            x = self.x + WIDTH * step / self.steps
            lines.append(f'<text x="{x:.1f}" y="{self.y + HEIGHT + 16}" text-anchor="middle">{step}</text>')
        return "\n".join(lines)

    def curve(self, values: list[float], colour: str, width: float) -> str:
        points = " ".join(self.point(step + 1, value) for step, value in enumerate(values))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def draw(curves: dict[tuple[bool, int], Curve]) -> str:
    """Loss above, difference of the loss from one rank below; plain left, exact right."""
    steps = len(curves[True, 1].losses)
    parts = []
    for column, exact in enumerate((False, True)):
        x = LEFT + column * (WIDTH + 80)
        name = "exact" if exact else "plain DDP"
        above = Panel(x, TOP, steps, -3, 1)
        below = Panel(x, TOP + HEIGHT + 70, steps, -9, 1)
        parts += [above.frame(f"{name}: training loss"), below.frame(f"{name}: difference from 1 rank")]
        for world_size in WORLDS:
            curve, colour = curves[exact, world_size], COLOURS[world_size]
            # widest first, so that curves that lie on top of each other all show
            parts.append(above.curve(curve.losses, colour, 5 - 2 * WORLDS.index(world_size)))
            alone = curves[exact, 1].losses
            gaps = [abs(a - b) for a, b in zip(curve.losses, alone, strict=True)]
            if world_size > 1 and any(gaps):
                parts.append(below.curve(gaps, colour, 1.5))
            accuracy = f"{world_size} rank{'s' if world_size > 1 else ''}: test accuracy {curve.accuracy:.2%}"
            y = TOP + HEIGHT - 36 + 15 * WORLDS.index(world_size)  # below the curves, between two lines of the grid
            parts.append(f'<text x="{x + WIDTH - 8}" y="{y}" fill="{colour}" text-anchor="end">{accuracy}</text>')
        if exact and len({curves[True, w].weights for w in WORLDS}) == 1:
            middle = TOP + HEIGHT + 70 + HEIGHT / 2
            parts.append(f'<text x="{x + WIDTH / 2}" y="{middle}" text-anchor="middle">none, to the last bit</text>')
        bottom = TOP + 2 * HEIGHT + 70 + 34
        parts.append(f'<text x="{x + WIDTH / 2}" y="{bottom}" text-anchor="middle">optimizer step</text>')
    width, height = LEFT + 2 * WIDTH + 100, TOP + 2 * HEIGHT + 70 + 46
    style = "<style>text{font:12px sans-serif} .title{font-weight:bold}</style>"
    style += "\n<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) hue-rotate(180deg) } }</style>"
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    title = "<title>Training loss on 1, 2 and 4 ranks with the same global batch, plain and exact</title>"
    return f'{head}\n{title}\n{style}\n<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "convergence.svg")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    curves: dict[tuple[bool, int], Curve] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for exact in (False, True):
            for world_size in WORLDS:
                curve = train(world_size, exact, args.epochs, args.keep or Path(scratch))
                curves[exact, world_size] = curve
                told: list[Any] = ["exact" if exact else "plain", f"{world_size} ranks", f"{curve.losses[-1]:.9f}"]
                print(*told, f"{curve.accuracy:.2%}", curve.weights[:16], sep="  ", flush=True)
    args.out.write_text(draw(curves))
    print(f"drawn: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
