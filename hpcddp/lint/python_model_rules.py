"""Mistakes of a training script around its model: the wrapper, the loop, what ranks do together, checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hpcddp.lint.expression import dotted, is_constant, keyword, last_word, may_have, shown, words
from hpcddp.lint.finding import Said
from hpcddp.lint.training_script import SHARDERS, CodeBlock, TrainingScript

_WRAPPERS = ("DistributedDataParallel", "DDP")
_COLLECTIVES = {
    *("barrier", "all_reduce", "broadcast", "all_gather", "gather", "scatter", "reduce", "reduce_scatter"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "monitored_barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
}  # fmt: skip
_OWN = re.compile(r"rank|gpu|pid|shard", re.IGNORECASE)
_CLEANS_UP = re.compile(r"clean_?up|destroy|tear_?down|shutdown|finalize|close|dispose", re.IGNORECASE)
_CHECKPOINT = re.compile(r"ckpt|check_?point|state|resume|snapshot|weights|pretrain|model", re.IGNORECASE)


def item_in_loop(script: TrainingScript) -> Iterator[Said]:
    """A7: `loss.item()` in every step waits for the GPU in every step."""
    if not script.has_gpu():
        return
    losses: dict[ast.AST, set[str]] = {}
    for call in script.find_calls("backward"):
        loop = script.blocks[call].loop
        epochs = isinstance(loop, ast.For) and any(
            "epoch" in word.lower() for word in words(loop.target)
        )  # all data at once
        if loop is not None and not epochs and isinstance(call.func, ast.Attribute):
            of = [
                call.func.value,
                *call.args,
                *(a for c in [call.func.value] if isinstance(c, ast.Call) for a in c.args),
            ]
            losses.setdefault(loop, set()).update(filter(None, map(dotted, of)))
    for name, calls in script.calls.items():
        for call in calls if name in {"item", "float", "print"} else ():
            loop = script.blocks[call].loop
            loss = losses.get(loop) if loop is not None else None
            if loss and loop is not None and _is_each_step(script, call, loop) and (said := _reads(call, loss)):
                yield Said(call.lineno, f"{said} in every step waits for the GPU in every step",
                           "total += loss.detach(), and item() where it is printed, every 100 steps or so")  # fmt: skip


def no_rank_check(script: TrainingScript) -> Iterator[Said]:
    """A15: every rank writes the same file."""
    if not (script.is_distributed() or script.runtimes()) or "deepspeed" in script.modules:
        return
    for call in script.find_calls("save"):
        if dotted(call.func) == "torch.save" and len(call.args) > 1 and script.on_every_rank(call):
            held = [w for name in words(call) for value in script.held(call, name) for w in words(value)]
            state = any(_CHECKPOINT.search(word) for word in words(call.args[0]))
            if not state or any(_OWN.search(word) for word in (*words(call), *held)):
                continue
            what = "torch.save on every rank: all of them write the same file, and a reader may find a half of it"
            yield Said(call.lineno, what, "if rank == 0: torch.save(…), or rt.save_model(…)")


def backward_beside_runtime(script: TrainingScript) -> Iterator[Said]:
    """A33: `loss.backward()` where hpcddp's runtime has prepared the model, and no backward pass is the runtime's."""
    runtimes = script.runtimes()
    calls = [call for call in script.find_calls("backward") if isinstance(call.func, ast.Attribute)]
    if not runtimes or script.has("train_step") or any(dotted(call.func)[:-9] in runtimes for call in calls):
        return
    for call in calls:
        if script.in_loop(call) and dotted(call.func) != "torch.autograd.backward":
            name = next(iter(runtimes))
            what = f"{shown(call)} beside {name}.prepare: the gradients are not those of the global batch"
            yield Said(call.lineno, what, f"{name}.backward(loss)")
            return


def optimizer_before_sharding(script: TrainingScript) -> Iterator[Said]:
    """A17: an optimizer over parameters that FSDP then replaces. DDP keeps them: nothing is said."""
    if {"param_groups", "data_ptr"} & set(script.uses):  # a script that puts them right itself
        return
    made: dict[tuple[ast.AST | None, str], int] = {}
    for name in script.calls:
        for call in script.calls[name] if re.search(r"^(SGD|Adam\w*|RMSprop|Adagrad|LAMB|Lion|Muon)$", name) else ():
            first = call.args[0] if call.args else keyword(call, "params")
            if isinstance(first, ast.Call) and last_word(first.func) == "parameters":
                of = dotted(first.func.value) if isinstance(first.func, ast.Attribute) else ""
                made.setdefault((script.blocks[call].function, of), call.lineno)
    for call in script.find_calls(*SHARDERS):
        name = dotted(call.args[0]) if call.args else ""
        line = made.get((script.blocks[call].function, name), call.lineno) if name else call.lineno
        if line < call.lineno and not script.blocks[call].loop and not may_have(call, "use_orig_params"):
            what = f"the optimizer holds the parameters of {name} before {last_word(call.func)}: they are never trained"
            yield Said(line, what, f"the optimizer behind {last_word(call.func)}, over the wrapped model's parameters")


def bare_model_called(script: TrainingScript) -> Iterator[Said]:
    """A18: a step through the model that DDP wraps, under its old name."""
    wrapped: dict[tuple[ast.AST | None, str], tuple[str, int]] = {}
    for call in script.find_calls(*_WRAPPERS):
        inner, outer = dotted(call.args[0]) if call.args else "", script.targets.get(call, "")
        if inner and outer and inner.split(".")[-1] != outer:
            wrapped[script.blocks[call].function, inner] = outer, call.lineno
    steps = {script.blocks[call].loop for call in script.find_calls("backward")} - {None}
    for (function, inner), (outer, line) in wrapped.items():
        for call in script.find_calls(inner.rsplit(".", 1)[-1]):
            block = script.blocks[call]
            same = dotted(call.func) == inner and block.function is function and call.lineno > line
            again = [v for v in script.held(call, inner) if v.lineno > line]
            if same and not again and block.loop in steps and not _is_quiet(block):
                what = f"{inner}(…) in a training step, where {outer} is the wrapped model: gradients are not averaged"
                yield Said(call.lineno, what, f"{outer}(…)")


def no_destroy(script: TrainingScript) -> Iterator[Said]:
    """A19: a process group that is never shut down."""
    in_loop = any(script.blocks[call].loop is not None for call in script.find_calls("backward"))
    if script.has_framework() or not in_loop or "deepspeed" in script.modules:
        return
    if any(_CLEANS_UP.search(name) for name in script.calls):
        return
    for call in script.find_calls("init_process_group"):
        backend = call.args[0] if call.args else keyword(call, "backend")
        elsewhere = script.blocks[call].function not in script.reached  # a file that calls it may call the other
        if elsewhere or is_constant(backend, "gloo"):
            continue
        what = "destroy_process_group is never called: NCCL warns at the end, and resources may leak"
        yield Said(call.lineno, what, "torch.distributed.destroy_process_group() as the last line, also after an error")
        return


def no_map_location(script: TrainingScript) -> Iterator[Said]:
    """A21: a checkpoint of GPU 0, loaded by every rank."""
    if not script.is_distributed() or not script.has_gpu():
        return
    states = {call.args[0] for call in script.find_calls("load_state_dict") if call.args}
    for call in script.find_calls("load"):
        if dotted(call.func) != "torch.load" or len(call.args) != 1 or may_have(call, "map_location"):
            continue
        names = [*words(call.args[0]), script.targets.get(call, "")]
        choice = [word for test in script.blocks[call].conditions() for word in words(test)]
        elsewhere = any(re.search(r"gpu|device|cuda|cpu|distributed|eval|test", word, re.IGNORECASE) for word in choice)
        if (
            (call in states or any(_CHECKPOINT.search(n) for n in names))
            and not elsewhere
            and script.on_every_rank(call)
        ):
            what = "torch.load without map_location: every rank loads onto the GPU that saved it, GPU 0 of its node"
            yield Said(call.lineno, what, 'torch.load(path, map_location="cpu")')


def collective_on_some_ranks(script: TrainingScript) -> Iterator[Said]:
    """A22: a collective that some ranks never reach."""
    for name in _COLLECTIVES:
        calls = [c for c in script.find_calls(name) if re.match(r"(torch\.)?(distributed|dist)\.", dotted(c.func))]
        branches: dict[
            ast.AST | None, set[tuple[ast.AST, str]]
        ] = {}  # if rank != 0: barrier(); …; if rank == 0: barrier()
        for call in calls:
            for block in script.blocks[call].outward():
                if isinstance(block.node, ast.If) and script.chooses_ranks(block.node.test):
                    branches.setdefault(block.function, set()).add((block.node, block.branch))
        for call in calls:
            chosen = any(_chooses(block) for block in script.blocks[call].outward())
            if not chosen or len(branches[script.blocks[call].function]) > 1:
                continue
            if not may_have(call, "group") and not may_have(call, "async_op"):
                what = f"{name} on some ranks only: they wait for the others, which never come"
                yield Said(call.lineno, what, f"{name} on every rank, outside of the condition on the rank")


def _reads(call: ast.Call, losses: set[str]) -> str:
    """`loss.item()`, `float(loss)` or `print(loss)` as it stands; "" for something else."""
    name = last_word(call.func)
    if name == "item" and isinstance(call.func, ast.Attribute):
        of = dotted(call.func.value)
        return f"{of}.item()" if of in losses or of.split(".")[-1] == "loss" else ""
    inside = [a.value if isinstance(a, ast.FormattedValue) else a for a in _printed(call)]
    of = next((dotted(a) for a in inside if dotted(a) in losses), "")
    return f"{name}({of})" if of else ""


def _printed(call: ast.Call) -> list[ast.expr]:
    return [v for a in call.args for v in (a.values if isinstance(a, ast.JoinedStr) else [a])]


def _is_each_step(script: TrainingScript, call: ast.Call, loop: ast.AST) -> bool:
    """Whether nothing inside the loop decides about a line but the rank."""
    for block in script.blocks[call].outward():
        if block.node is loop:
            return block.branch == "body"
        if isinstance(block.node, (ast.If, ast.IfExp, ast.ExceptHandler)):
            return False
    return False


def _is_quiet(block: CodeBlock) -> bool:
    items = [i.context_expr for b in block.outward() if isinstance(b.node, ast.With) for i in b.node.items]
    return any({"no_grad", "inference_mode"} & set(words(item)) for item in items)


def _chooses(block: CodeBlock) -> bool:
    """`if rank == 0:` and its like: surely some ranks, but not all. `rank != -1` asks whether there are any."""
    node = block.node
    if not isinstance(node, ast.If) or block.branch not in {"body", "after"}:
        return False
    test = node.test
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    if isinstance(test, ast.BoolOp) and block.branch == "after":
        return False
    return any(_is_rank_choice(part) for part in parts)


def _is_rank_choice(test: ast.expr) -> bool:
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        left = test.left.func if isinstance(test.left, ast.Call) else test.left
        return bool(re.search(r"rank$", last_word(left).lower())) and is_constant(test.comparators[0], 0)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    named = last_word(test.func) if isinstance(test, ast.Call) else last_word(test)
    return bool(re.search(r"^(is_)?(main|master)(_process)?$|^is_rank_?(0|zero)$|^is_primary$", named))
