"""The advice as a table for people, and as JSON values."""

from __future__ import annotations

import re

from hpcddp.advise.choice import MARGIN, Estimate, OnNodes, Target, format_parallel
from hpcddp.advise.memory import Model, Work
from hpcddp.errors import RequestError
from hpcddp.record import Record
from hpcddp.units import format_count, shorten

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any


# Memory and counts of parameters as people write them.


_BYTES = {"gb": 1e9, "gib": 2.0**30, "tb": 1e12, "tib": 2.0**40, "mb": 1e6, "mib": 2.0**20}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = r"\d{1,18}(?:\.\d{1,9})?"
GIB = 2.0**30


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


_WORDS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer states"}
_WORDS |= {"activations": "activations", "buffers": "buffers"}
_HEAD = ("nodes", "parallel", "weights", "gradients", "optimizer", "activations", "buffers", "peak", "checkpoint")


#: Of a block's two layers; the names are those of the user's model.
_PLAN = 'tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'


class Advice(Record):
    """All that is said. `gpu`: which one, in words. `render`: the words of `hpcddp render` before the split's.
    `checkpointed`: whether activation checkpointing was asked for."""

    model: Model
    work: Work
    target: Target
    gpu: str
    render: str
    checkpointed: bool
    found: tuple[OnNodes, ...]


def format_advice(advice: Advice) -> str:
    """The facts, the table, and for each number of nodes what to choose and why; then what to paste."""
    lines = [*_describe_request(advice), "", *_table([row for one in advice.found for row in one.rows])]
    left = [one for found in advice.found for one in found.left]
    lines += [f"not on {_on(one.nodes)}: {format_parallel(one.parallel)}, since {one.why}" for one in left]
    lines += ["", *(f"on {_on(one.nodes)}: {explain_choice(advice, one)}" for one in advice.found)]
    paste = find_paste(advice)
    if paste:
        lines += ["", "to paste:", f"  {paste['command']}", "or into the job file:"]
        lines += [f"  {line}" for line in paste["job_file"]]
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
        *(
            ()
            if model.whole
            else ("         activations are not counted: --sequence 1024 or --input 3,224,224 counts them",)
        ),
    ]


def _table(rows: list[Estimate]) -> list[str]:
    cells: list[tuple[str, ...]] = [(*_HEAD, "fits", "micro batch up to", "fullest at")]
    for row in rows:
        memory = [format_gib(value) for value in (*row.memory.parts.values(), row.memory.total, row.spike.device)]
        largest = "-" if row.largest_micro_batch is None else str(row.largest_micro_batch)
        cells.append(
            (
                str(row.nodes),
                format_parallel(row.parallel),
                *memory,
                "yes" if row.fits else "no",
                largest,
                row.memory.moment,
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            f"{cell:<{w}}" if column in (1, 11) else f"{cell:>{w}}"
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return ["GiB per rank, at the fullest moment of a step:", *(line.rstrip() for line in lines)]


def explain_choice(advice: Advice, found: OnNodes) -> str:
    """Explain what to choose on so many nodes."""
    has = f"{format_gib(advice.target.memory)} GiB"
    chosen = found.chosen
    if chosen is not None:
        says = format_parallel(chosen.parallel) + (" with activation checkpointing" if found.checkpointed else "")
        needs = f"{says} needs {format_gib(chosen.memory.total)} GiB"
        names = [row.parallel for row in found.rows]
        before = found.rows if found.checkpointed else found.rows[: names.index(chosen.parallel)]
        simpler = [row for row in before if not row.fits]
        if not simpler:
            return f"{needs} of {has}, and is the simplest{' that is left' if found.left else ''}"
        refused = ", ".join(f"{format_parallel(row.parallel)} ({format_gib(row.memory.total)})" for row in simpler)
        return f"{needs}. Too large for {has} with {MARGIN - 1:.0%} to spare: {refused}"
    if not found.rows:
        return "nothing, since the global batch is too small for so many ranks"
    least = min(found.rows, key=lambda one: one.memory.total)
    needs = f"{format_parallel(least.parallel)} needs least, {format_gib(least.memory.total)} of {has}"
    says = f"nothing fits with {MARGIN - 1:.0%} to spare. {needs}"
    smaller = max((one.largest_micro_batch or 0 for one in found.rows), default=0)
    cure = f"--max-micro-batch {smaller} fits" if 0 < smaller < advice.target.micro_batch else "take more nodes"
    return f"{says}, {say_limit(least)}; {cure}"


def say_limit(row: Estimate) -> str:
    """The largest part of a split's memory."""
    name, size = max(row.memory.parts.items(), key=lambda part: part[1])
    return f"most of it {_WORDS[name]}: {format_gib(size)}"


def find_paste(advice: Advice) -> dict[str, Any] | None:
    """The line, the job file's keys and what to change in the script, for the fewest nodes on which something fits."""
    fitting = [one for one in advice.found if one.chosen is not None]
    if not fitting:
        return None
    found = min(fitting, key=lambda one: one.nodes)
    assert found.chosen is not None  # for the type checker
    parallel, batch = found.chosen.parallel, advice.target.global_batch
    typed = parallel if isinstance(parallel, str) else ",".join(f"{name}={ranks}" for name, ranks in parallel.items())
    of_batch = f" --global-batch {batch}" if batch else ""
    keys = [f"nodes: {found.nodes}", f"parallel: {format_parallel(parallel)}"]
    keys += [f"global_batch: {batch}"] if batch else []
    return {
        "command": f"{advice.render} --nodes {found.nodes}{of_batch} --parallel {typed} -- python train.py",
        "job_file": keys,
        "script": _script(advice, found.chosen, checkpointed=advice.checkpointed or found.checkpointed),
    }


def _script(advice: Advice, row: Estimate, *, checkpointed: bool) -> list[str]:
    """Lines that the split needs in the training script."""
    said = []
    sharded = row.parallel in ("fsdp", "hsdp") or isinstance(row.parallel, dict)
    mixed = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
    is_mixed = advice.work.precision.name == "bf16-mixed"
    if sharded:
        block = advice.model.block or "Block"
        options = [f"blocks={block}"] * bool(advice.model.blocks) + [mixed] * is_mixed
        options += [_PLAN] * (isinstance(row.parallel, dict) and "tensor" in row.parallel)
        if options:
            said.append(f"rt.wrap(model, {', '.join(options)})")
    elif is_mixed:
        said.append("with torch.autocast('cuda', torch.bfloat16): around the forward pass and the loss")
    if checkpointed:
        said.append("torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) around each block")
    if advice.target.global_batch is not None:
        said.append(f"hpcddp.runtime(max_micro_batch={advice.target.micro_batch})")
    return said


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
        "splits": [_row_record(row) for one in advice.found for row in one.rows],
        "impossible": [left._asdict() for one in advice.found for left in one.left],
        "recommended": [_recommended(advice, one) for one in advice.found],
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
        "checkpoint_bytes": round(row.spike.device),
        "fits": row.fits,
        "limit": max(row.memory.parts.items(), key=lambda part: part[1])[0],
        "largest_micro_batch": row.largest_micro_batch,
    }


def _recommended(advice: Advice, found: OnNodes) -> dict[str, Any]:
    return {
        "nodes": found.nodes,
        "parallel": found.chosen.parallel if found.chosen else None,
        "activation_checkpointing": advice.checkpointed or found.checkpointed,
        "why": explain_choice(advice, found),
    }


def _on(nodes: int) -> str:
    return format_count(nodes, "node")
