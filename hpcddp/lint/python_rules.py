"""Mistakes in a training script, read as Python and not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hpcddp.lint.finding import Said


def data_parallel(tree: ast.AST) -> Iterator[Said]:
    """A6: one process that copies the model to all GPUs in every step."""
    for call in _calls(tree):
        if ast.unparse(call.func).rsplit(".", 1)[-1] == "DataParallel":
            what = "DataParallel is one process for all GPUs of one node, and slower than DistributedDataParallel"
            yield Said(call.lineno, what, "DistributedDataParallel, one rank per GPU")


def device_modulo(tree: ast.AST) -> Iterator[Said]:
    """A3: the device as rank modulo device count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            if "device_count" in right and "rank" in left.lower() and "local" not in left.lower():
                what = f"{left} % {right}: wrong wherever ranks are not dealt node by node"
                yield Said(node.lineno, what, "the launcher's local rank: hpcddp.env().local_rank, or LOCAL_RANK")


def item_in_loop(tree: ast.AST) -> Iterator[Said]:
    """A7: `loss.item()` in every step waits for the GPU in every step."""
    for loop in ast.walk(tree):
        if not isinstance(loop, (ast.For, ast.While)):
            continue
        text = [ast.unparse(call.func) for call in _calls(loop)]
        if not any(name.endswith(".backward") for name in text):
            continue
        for statement in loop.body:
            for call in _calls(statement) if not isinstance(statement, (ast.If, ast.For, ast.While)) else ():
                if ast.unparse(call.func).endswith("loss.item"):
                    what = "loss.item() in every step waits for the GPU in every step"
                    yield Said(call.lineno, what, "total += loss.detach(), and item() where it is printed")


def no_workers(tree: ast.AST) -> Iterator[Said]:
    """A8: a DataLoader without worker processes loads each batch while the GPU waits."""
    for call in _calls(tree):
        if ast.unparse(call.func).rsplit(".", 1)[-1] != "DataLoader" or len(call.args) >= 6:
            continue
        if not {word.arg for word in call.keywords} & {"num_workers", None}:  # None: **options, which may have it
            what = "DataLoader without num_workers loads in the training process: the GPU waits for each batch"
            yield Said(call.lineno, what, "num_workers=OMP_NUM_THREADS or so, persistent_workers=True")


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))
