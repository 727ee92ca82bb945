"""Draws docs/house.svg and docs/house-training.svg from the imports: the rooms in layer order, and which imports which.

Run it after an import between two rooms appeared or went: python docs/make_house.py. The order of the rooms is that of
the layer contracts in pyproject.toml. A room's colour says which packages the room itself needs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

REPO = Path(__file__).parents[1]

PICTURES = {"hpcddp": "house.svg", "hpcddp.training": "house-training.svg"}

CAPTIONS = {
    "cli": "one file per verb: options, output, exit status",
    "api": "hpcddp.env(), init(), runtime() for training scripts",
    "verify": "short runs of a script, on 1 to 3 ranks, compared",
    "trainer": "the reference trainer: a script like any other",
    "integrations": "loops of other frameworks stop in time and resume",
    "training": "process group, data, gradients, checkpoints",
    "lint": "job script or training script → findings",
    "advise": "memory per rank of each split, and which to choose",
    "diagnose": "logs → the first cause of a job's end",
    "script": "request + site → plan → job script",
    "login": "submit, find, status, cancel: hpcddp.Job",
    "checks": "before a job trains: one function per fault of a rank, a node, a link",
    "supervisor": "what a job script becomes: beside the launcher",
    "runs": "the run folder: state, attempts, metrics, compare",
    "ranks": "environment → rank, rendezvous",
    "schedulers": "one module per scheduler: words, commands, parsers",
    "sweep": "the points of a sweep, by their numbers",
    "batchplan": "the arithmetic of the global batch",
    "parallelism": "how a model is split over ranks",
    "units": "durations and counts as text",
    "uncaught": "an error that a script does not catch",
    "signals": "the signals that end a process, and their names",
    "processes": "what Linux says of a process: state, parent, environment",
    "errors": "the two-line error, exit codes",
    "guard": "ends ranks that train alone",
    "record": "named tuples that start fast",
    "training.opening": "opens and closes a run",
    "training.runtime": "rt: what a training script calls",
    "training.report": "what rank 0 says of a run; TensorBoard, MLflow, W&B",
    "training.prepare": "takes over models, data, optimizers",
    "training.loop": "where the loop is, and what is refused there",
    "training.mistakes": "what a loop may not do, as rows",
    "training.collectives": "numbers and rows of all data ranks",
    "training.epochs": "what is left of the run, and between its epochs",
    "training.saves": "what all ranks do at one step: save, stop, finish",
    "training.objects": "the models and training data of a run",
    "training.arguments": "what a script's arguments may be",
    "training.steps": "the record of each optimizer step",
    "training.checkpoint": "writing, reading, resume",
    "training.gradient": "micro batches → global gradient",
    "training.data": "which samples a rank sees, and their weights",
    "training.options": "what hpcddp.runtime is asked for, alike on all ranks",
    "training.parallel": "world → data rank and mesh; how a model is split",
    "training.activity": "what a rank is at: files, or waiting",
    "training.watchdog": "where the ranks stand; a sign of life for the supervisor",
    "training.rendezvous": "ranks find each other: process group",
    "training.stopping": "signals, the deadline, how long steps and saves take",
    "training.versions": "software and hardware of this run",
    "training.torch_compat": "what depends on torch's version",
}

_NEEDS = {"torch": "#f6c28b", "jinja2": "#a9cbe8", "yaml": "#a9cbe8"}  # the first that a room imports
_PLAIN = "#b9dfb4"
_ROW, _TOP = 24, 84  # pixels: from room to room, and down to the first one
_BOX = (36, 118, 20)  # a room's box: where it begins, width, height
_TEXT, _DOTS = 164, 500  # where the captions and the columns of dots begin
_COLUMN = 16  # pixels from column to column


class Room(NamedTuple):
    """A package or module right below `inside`. `layer` counts from the top; `imports` are other rooms there."""

    inside: str
    name: str
    layer: int
    imports: frozenset[str]
    packages: frozenset[str]

    @property
    def caption(self) -> str:
        return CAPTIONS[f"{self.inside}.{self.name}".partition(".")[2]]


def read_rooms(repo: Path, inside: str = "hpcddp") -> list[Room]:
    """The rooms of a package in the order of its layer contract, with what the code in them imports."""
    text = (repo / "pyproject.toml").read_text(encoding="utf-8")
    contract = re.search(rf'containers = \["{inside}"\]\s+layers = (\[.*?\])', text, re.DOTALL)
    assert contract, f"pyproject.toml has no layer contract for {inside}"
    layers = [[name.strip() for name in re.split(r"[|:]", layer)] for layer in ast.literal_eval(contract[1])]
    rooms = []
    for number, names in enumerate(layers):
        for name in names:
            found = {module for file in _files(repo / inside.replace(".", "/"), name) for module in _imports(file)}
            own = {
                module.removeprefix(f"{inside}.").split(".")[0] for module in found if module.startswith(f"{inside}.")
            }
            outside = {module.split(".")[0] for module in found}
            rooms.append(Room(inside, name, number, frozenset(own - {name}), frozenset(outside)))
    names = {room.name for room in rooms}
    return [room._replace(imports=room.imports & names) for room in rooms]


def _files(package: Path, room: str) -> list[Path]:
    return sorted((package / room).rglob("*.py")) or [package / f"{room}.py"]


def _imports(file: Path) -> Iterator[str]:
    """Full names of what a file imports, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def draw(rooms: list[Room]) -> str:
    """The picture: a numbered row for each room, and in it a dot in the column of each room that it imports."""
    width, height = max(_DOTS + _COLUMN * len(rooms) + 12, 760), _TOP + _ROW * len(rooms) + 44
    drawn = [*_floors(rooms, width), *_columns(rooms)]
    place = {room.name: number for number, room in enumerate(rooms)}
    for number, room in enumerate(rooms):
        y = _TOP + _ROW * number
        colour = next((colour for package, colour in _NEEDS.items() if package in room.packages), _PLAIN)
        x, across, down = _BOX
        drawn += [
            f'<text x="{x - 8}" y="{y + 15}" font-size="11" fill="#555555" text-anchor="end">{number + 1}</text>',
            f'<rect x="{x}" y="{y}" width="{across}" height="{down}" rx="4" fill="{colour}" stroke="#666666"/>',
            f'<text x="{x + across // 2}" y="{y + 15}" text-anchor="middle">{room.name}</text>',
            f'<text x="{_TEXT}" y="{y + 15}" font-size="12" fill="#333333">{escape(room.caption)}</text>',
        ]
        for other in sorted(place[name] for name in room.imports):
            drawn.append(f'<circle cx="{_across(other)}" cy="{y + 10}" r="4" fill="#333333"/>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            ' font-family="sans-serif" font-size="13">',
            "  <style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) hue-rotate(180deg) } }</style>",
            "  <!-- made by docs/make_house.py from the imports -->",
            f"  <title>The rooms of {rooms[0].inside} by floors; imports point down only</title>",
            f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
            '  <g fill="#222222">',
            *(f"    {line}" for line in [*_head(rooms[0].inside), *drawn, *_legend(height)]),
            "  </g>",
            "</svg>",
            "",
        ]
    )


def _head(inside: str) -> list[str]:
    folder = inside.replace(".", "/")
    return [
        f'<text x="12" y="24" font-size="16" font-weight="bold">The rooms of {folder}/, floor by floor</text>',
        '<text x="12" y="45" font-size="12" fill="#555555">A dot in the row of one room and the column of another: the '
        "first imports the second. Imports point down only.</text>",
    ]


def _floors(rooms: list[Room], width: int) -> Iterator[str]:
    """One stripe per layer of the contract."""
    for layer in sorted({room.layer for room in rooms}):
        of_layer = [number for number, room in enumerate(rooms) if room.layer == layer]
        y, height = _TOP + _ROW * of_layer[0] - 2, _ROW * len(of_layer)
        fill = "#eeeeee" if layer % 2 == 0 else "#ffffff"
        yield f'<rect x="0" y="{y}" width="{width}" height="{height}" fill="{fill}"/>'


def _columns(rooms: list[Room]) -> Iterator[str]:
    """The number of each room, and a line down to its own row."""
    for number in range(len(rooms)):
        x, y = _across(number), _TOP + _ROW * number + 10
        yield f'<text x="{x}" y="{_TOP - 8}" font-size="11" fill="#555555" text-anchor="middle">{number + 1}</text>'
        yield f'<path d="M{x} {_TOP}V{y}" stroke="#cccccc"/>'
        yield f'<path d="M{x - 4} {y}h8" stroke="#888888"/>'


def _across(number: int) -> int:
    return _DOTS + _COLUMN * number + _COLUMN // 2


def _legend(height: int) -> Iterator[str]:
    words = [("imports torch", _NEEDS["torch"]), ("imports jinja2, yaml", _NEEDS["yaml"]), ("neither", _PLAIN)]
    for number, (text, colour) in enumerate(words):
        x, y = 12 + 165 * number, height - 28
        yield f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}" stroke="#666666"/>'
        yield f'<text x="{x + 21}" y="{y + 12}" font-size="12">{text}</text>'


if __name__ == "__main__":
    for inside, file in PICTURES.items():
        (REPO / "docs" / file).write_text(draw(read_rooms(REPO, inside)), encoding="utf-8")
