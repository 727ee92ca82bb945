"""The advice as a table for people, and as JSON values."""

from __future__ import annotations

import re
from typing import Any

from hpcddp.advise.choice import MARGIN, Estimate, Target, choose_split, format_parallel
from hpcddp.advise.memory import Model, Work
from hpcddp.errors import RequestError
from hpcddp.record import Record
from hpcddp.units import format_count, shorten

_BYTES = {"gb": 1e9, "gib": 2.0**30, "tb": 1e12, "tib": 2.0**40, "mb": 1e6, "mib": 2.0**20}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = r"\d{1,18}(?:\.\d{1,9})?"
GIB = 2.0**30
#: Of a block's two layers; the names are those of the user's model.
_PLAN = 'tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'


def parse_memory(text: str, where: str) -> float:
    """Bytes of `80GB` (10^9) or `79.1GiB` (2^30). RequestError for another form."""
    found = re.fullmatch(rf"({_NUMBER}) *([a-zA-Z]+)", text.strip(), re.ASCII)
    if not found or found[2].lower() not in _BYTES or float(found[1]) == 0:
        raise RequestError(f"{where} {shorten(text)!r} is no size of memory", f"{where} 80GB, or {where} 79.1GiB")
    return float(found[1]) * _BYTES[found[2].lower()]


def parse_parameters(text: str, where: str) -> int:
    """A count as `7e9`, `7B`, `350M` or `6738415616`. RequestError for another form."""
    found = re.fullmatch(rf"({_NUMBER}(?:[eE]\+?\d{{1,2}})?) *([kKmMbBtT]?)", text.strip(), re.ASCII)
    value = float(found[1]) * _COUNTS[found[2].lower()] if found else 0.0
    if not 1 <= value < 1e16:
        raise RequestError(f"{where} {shorten(text)!r} is no count of parameters", f"{where} 7e9, or {where} 350M")
    return round(value)


def format_parameters(count: int) -> str:
    """`6.74e9` as people read it: 6.74 billion."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return str(count)


def format_gib(size: float) -> str:
    """GiB with a digit behind the point, two where it is small; `0` for nothing."""
    value = size / GIB
    if value == 0:
        return "0"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


_HEAD = ("nodes", "parallel", "weights", "gradients", "optimizer", "activations", "buffers", "peak", "checkpoint")


class Advice(Record):
    """The request and its estimates. `gpu`: which one, in words. `render`: the words of `hpcddp render` before the
    split's. `checkpointed`: with activation checkpointing. `found`: the splits on each number of nodes."""

    model: Model
    work: Work
    target: Target
    gpu: str
    render: str
    checkpointed: bool
    found: dict[int, list[Estimate]]


def format_advice(advice: Advice) -> str:
    """The request, the table, and for each number of nodes what to choose and why; then what to paste."""
    lines = [*_describe_request(advice), "", *_table([row for rows in advice.found.values() for row in rows]), ""]
    lines += [
        f"on {format_count(nodes, 'node')}: {explain_choice(advice, rows)}" for nodes, rows in advice.found.items()
    ]
    paste = find_paste(advice)
    if paste:
        lines += ["", "to paste:", f"  {paste['command']}"]
        lines += ["in the script:"] * bool(paste["script"]) + [f"  {line}" for line in paste["script"]]
    return "\n".join(lines) + "\n"


def _describe_request(advice: Advice) -> list[str]:
    model, work = advice.model, advice.work
    blocks = f", {format_count(len(model.blocks), 'block')}" if model.blocks else ""
    blocks += f" of class {model.block}" if model.block else ""
    passes = "with" if advice.checkpointed else "without"
    return [
        f"model    {model.name}: {format_parameters(model.elements)} parameters{blocks}",
        f"training {work.precision.name}, {work.optimizer}, {passes} activation checkpointing, micro batches of up to"
        f" {format_count(advice.target.micro_batch, 'sample')}",
        f"GPU      {advice.gpu}; {format_count(advice.target.ranks_per_node, 'rank')} per node",
        *["         activations are not counted: --sequence 1024 or --input 3,224,224 counts them"] * (not model.whole),
    ]


def _table(rows: list[Estimate]) -> list[str]:
    cells: list[tuple[str, ...]] = [(*_HEAD, "fits", "micro batch up to", "fullest at")]
    for row in rows:
        memory = [format_gib(value) for value in (*row.memory.parts.values(), row.memory.total, row.checkpoint)]
        largest = "-" if row.largest_micro_batch is None else str(row.largest_micro_batch)
        fits = "yes" if row.fits else "no"
        cells.append((str(row.nodes), format_parallel(row.parallel), *memory, fits, largest, row.memory.moment))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            f"{cell:<{w}}" if column in (1, 11) else f"{cell:>{w}}"
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return ["GiB per rank, at the fullest moment of a step:", *(line.rstrip() for line in lines)]


def explain_choice(advice: Advice, rows: list[Estimate]) -> str:
    """What to choose of these splits, and why; where nothing fits, what takes most of the least."""
    if not rows:
        return "nothing, since the global batch is too small for so many ranks"
    has, chosen = f"{format_gib(advice.target.memory)} GiB", choose_split(rows)
    if chosen is not None:
        needs = f"{format_parallel(chosen.parallel)} needs {format_gib(chosen.memory.total)} GiB"
        simpler = rows[: rows.index(chosen)]
        if not simpler:
            return f"{needs} of {has}, and is the simplest"
        refused = ", ".join(f"{format_parallel(row.parallel)} ({format_gib(row.memory.total)})" for row in simpler)
        return f"{needs}. Too large for {has} with {MARGIN - 1:.0%} to spare: {refused}"
    least = min(rows, key=lambda one: one.memory.total)
    name, size = max(least.memory.parts.items(), key=lambda part: part[1])
    needs = f"{format_parallel(least.parallel)} needs least, {format_gib(least.memory.total)} of {has}"
    cure = "take more nodes" if advice.checkpointed else "--activation-checkpointing, or more nodes"
    return f"nothing fits with {MARGIN - 1:.0%} to spare. {needs}, most of it {name}: {format_gib(size)}; {cure}"


def find_paste(advice: Advice) -> dict[str, Any] | None:
    """The line, and what to change in the script, for the fewest nodes on which something fits."""
    fitting = [chosen for _, rows in sorted(advice.found.items()) if (chosen := choose_split(rows)) is not None]
    if not fitting:
        return None
    found, batch = fitting[0], advice.target.global_batch
    parallel = found.parallel
    typed = parallel if isinstance(parallel, str) else ",".join(f"{name}={ranks}" for name, ranks in parallel.items())
    of_batch = f" --global-batch {batch}" if batch else ""
    return {
        "command": f"{advice.render} --nodes {found.nodes}{of_batch} --parallel {typed} -- python train.py",
        "script": _script(advice, found),
    }


def _script(advice: Advice, row: Estimate) -> list[str]:
    """Lines that the split needs in the training script."""
    lines = []
    is_mixed = advice.work.precision.name == "bf16-mixed"
    if row.parallel in ("fsdp", "hsdp") or isinstance(row.parallel, dict):
        options = [f"blocks={advice.model.block or 'Block'}"] * bool(advice.model.blocks)
        options += ["mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"] * is_mixed
        options += [_PLAN] * (isinstance(row.parallel, dict) and "tensor" in row.parallel)
        lines.append(f"rt.wrap({', '.join(['model', *options])})")
    elif is_mixed:
        lines.append("with torch.autocast('cuda', torch.bfloat16): around the forward pass and the loss")
    if advice.checkpointed:
        lines.append("torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) around each block")
    if advice.target.global_batch is not None:
        lines.append(f"hpcddp.runtime(max_micro_batch={advice.target.micro_batch})")
    return lines


def advice_record(advice: Advice) -> dict[str, Any]:
    """The same as JSON values. Sizes are bytes."""
    return {
        "model": {
            "name": advice.model.name,
            "parameters": advice.model.elements,
            "blocks": len(advice.model.blocks),
            "block_class": advice.model.block or None,
            "activations_counted": advice.model.whole is not None,
        },
        "precision": advice.work.precision.name,
        "optimizer": advice.work.optimizer,
        "max_micro_batch": advice.target.micro_batch,
        "global_batch": advice.target.global_batch,
        "activation_checkpointing": advice.checkpointed,
        "gpu": advice.gpu,
        "gpu_memory_bytes": round(advice.target.memory),
        "ranks_per_node": advice.target.ranks_per_node,
        "margin": round(MARGIN - 1, 2),
        "splits": [_row_record(row) for rows in advice.found.values() for row in rows],
        "recommended": [
            {
                "nodes": nodes,
                "parallel": chosen.parallel if (chosen := choose_split(rows)) is not None else None,
                "why": explain_choice(advice, rows),
            }
            for nodes, rows in advice.found.items()
        ],
        "paste": find_paste(advice),
    }


def _row_record(row: Estimate) -> dict[str, Any]:
    parts = {f"{name}_bytes": round(size) for name, size in row.memory.parts.items()}
    return {
        "nodes": row.nodes,
        "parallel": row.parallel,
        "data_ranks": row.data_size,
        "micro_batch": row.micro_batch,
        **parts,
        "peak_bytes": round(row.memory.total),
        "peak_at": row.memory.moment,
        "checkpoint_bytes": round(row.checkpoint),
        "fits": row.fits,
        "largest_micro_batch": row.largest_micro_batch,
    }
