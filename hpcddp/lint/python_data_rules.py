"""Mistakes of a training script in its data: workers, samplers, shuffling, means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hpcddp.lint.expression import dotted, is_constant, keyword, last_word, may_have, words
from hpcddp.lint.finding import Said
from hpcddp.lint.training_script import SHARDERS, TrainingScript

_SAMPLER = "DistributedSampler"
_DISK_SETS = {"ImageFolder", "DatasetFolder", "CocoDetection", "ImageNet"}
_DISK_READS = ("imread", "decode_image", "read_image", "read_video", "decode_jpeg")
_TEST = re.compile(r"test|val|eval|dev|infer|predict|gallery|query|memory|knn|fid", re.IGNORECASE)
_MADE_UP = re.compile(
    r"random|fake|dummy|synth|toy|iter|stream|shard|subset|chunk|partition|TensorDataset", re.IGNORECASE
)
_LOOPS = (ast.For, ast.AsyncFor)
_GIVEN = {"sampler", "batch_sampler", None}


def no_workers(script: TrainingScript) -> Iterator[Said]:
    """A8: images from disk, loaded in the training process. Data in memory is slower with workers: nothing is said."""
    reads = {script.blocks[call].owner for call in script.find_calls(*_DISK_READS)}
    reads |= {script.blocks[c].owner for c in script.find_calls("open") if re.search(r"Image\.open$", dotted(c.func))}
    for call in script.find_calls("DataLoader"):
        number = call.args[5] if len(call.args) > 5 else keyword(call, "num_workers")
        if is_constant(number, 0) or (number is None and not may_have(call, "num_workers")):
            data = call.args[0] if call.args else keyword(call, "dataset")
            held = script.held(data, dotted(data)) if data is not None and dotted(data) else [data]
            names = {last_word(v.func) for v in held if isinstance(v, ast.Call)}
            if names & (_DISK_SETS | reads - {""}):
                what = "DataLoader without worker processes reads images in the training process, which waits for each"
                yield Said(call.lineno, what, "num_workers=OMP_NUM_THREADS or so, persistent_workers=True")


def no_set_epoch(script: TrainingScript) -> Iterator[Said]:
    """A11: a DistributedSampler that never learns the epoch: each epoch has the same order."""
    if script.has_framework() or "set_epoch" in script.uses or not _step_loops(script, epochs=True):
        return
    for call in script.find_calls(_SAMPLER):
        again = script.blocks[call].loop or _is_called_in_loop(script, call)  # a new sampler each time, of other data
        if not again and not _is_for_test(script, call) and not is_constant(_shuffle(call), False):
            what = "set_epoch is never called: DistributedSampler gives the same order in every epoch"
            yield Said(call.lineno, what, "sampler.set_epoch(epoch) at the start of each epoch; rt.epochs() does it")
            return


def shuffle_beside_sampler(script: TrainingScript) -> Iterator[Said]:
    """A12: DataLoader takes shuffle or a sampler."""
    for call in script.find_calls("DataLoader"):
        sampler = keyword(call, "sampler")
        if (
            sampler is not None
            and is_constant(keyword(call, "shuffle"), True)
            and not _may_be_none(script, call, sampler)
        ):
            what = "shuffle=True beside a sampler: DataLoader raises ValueError"
            yield Said(call.lineno, what, "the sampler alone: DistributedSampler(dataset) shuffles")


def never_shuffled(script: TrainingScript) -> Iterator[Said]:
    """A13: training data that is never shuffled."""
    if not _step_loops(script, epochs=True):
        return
    for call in script.find_calls(_SAMPLER):
        name = dotted(call.args[0]) if call.args else ""
        if is_constant(_shuffle(call), False) and re.search("train", name) and not _TEST.search(name):
            what = f"shuffle=False for {name}: each epoch trains in the order of the files"
            yield Said(
                call.lineno, what, "DistributedSampler(dataset), and set_epoch(epoch) at the start of each epoch"
            )


def whole_data_on_each_rank(script: TrainingScript) -> Iterator[Said]:
    """A14: DDP or FSDP, but each rank draws from all of the data. Ranks of one tensor parallel group share a batch."""
    wrapper = "DDP" if script.wraps_ddp() else "FSDP" if script.has(*SHARDERS) else ""
    if not wrapper or script.has("parallelize_module") or script.has_framework() or "deepspeed" in script.modules:
        return
    if any("sampler" in name.lower() for name in script.uses) or script.has("split_dataset_by_node", "shard"):
        return
    for call in script.find_calls("DataLoader") if _step_loops(script, epochs=False) else ():
        shuffled = is_constant(keyword(call, "shuffle"), True) and not {w.arg for w in call.keywords} & _GIVEN
        if shuffled and not _is_for_test(script, call) and not _is_made_up(script, call) and script.on_every_rank(call):
            what = f"no DistributedSampler under {wrapper}: every rank goes through all of the data in each epoch"
            yield Said(call.lineno, what, "sampler=DistributedSampler(dataset), or rt.prepare(…, loader)")


def mean_of_means(script: TrainingScript) -> Iterator[Said]:
    """A16: an evaluation that gives a short last batch the weight of a full one."""
    keywords = {w.arg for calls in script.calls.values() for call in calls for w in call.keywords}
    if script.has_framework() or keywords & {"drop_last", "reduction", "size_average"}:
        return
    divided = set(_divisions(script))
    for loop in script.nodes:
        loader = _loader_of(loop.iter) if isinstance(loop, ast.For) else ""
        if not isinstance(loop, ast.For) or not loader or not _is_evaluation(script, loop):
            continue
        for node in loop.body:
            name = dotted(node.target) if isinstance(node, ast.AugAssign) and _is_mean(script, node) else ""
            if name and (script.blocks[loop].function, name, loader) in divided:
                what = f"{name} / len({loader}) is a mean of batch means: the last batch is smaller and counts as much"
                yield Said(
                    node.lineno, what, f"{name} += loss.item() * len(batch), divided by the samples of all ranks"
                )


def _shuffle(call: ast.Call) -> ast.expr | None:
    return call.args[3] if len(call.args) > 3 else keyword(call, "shuffle")


def _is_for_test(script: TrainingScript, call: ast.Call) -> bool:
    """Whether a sampler is for data that is not trained on, by the names around it."""
    block = script.blocks[call]
    around = [*words(call), *(getattr(b.node, "name", "") for b in block.outward())]
    around += [script.targets.get(call, ""), *(word for test in block.conditions() for word in words(test))]
    return any(_TEST.search(word) for word in around)


def _may_be_none(script: TrainingScript, call: ast.Call, sampler: ast.expr) -> bool:
    """Whether a sampler may be None, which goes with shuffle."""
    if isinstance(sampler, ast.Call):
        return False
    held = script.held(call, dotted(sampler)) if dotted(sampler) else []
    return not held or not all(isinstance(v, ast.Call) and last_word(v.func).endswith("Sampler") for v in held)


def _is_made_up(script: TrainingScript, call: ast.Call) -> bool:
    """Whether a data set is made of random numbers, or may be a rank's own part."""
    if not call.args and not keyword(call, "dataset"):
        return True
    data = call.args[0] if call.args else keyword(call, "dataset")
    names = words(data) if data is not None else []
    held = [word for name in names for value in script.held(call, name) for word in words(value)]
    return not held or any(_MADE_UP.search(word) or "rank" in word for word in (*names, *held))


def _step_loops(script: TrainingScript, epochs: bool) -> list[ast.AST]:
    """The innermost loops around a backward pass; with `epochs` those that another loop, or a call in one, repeats."""
    found = dict.fromkeys(script.blocks[call].loop for call in script.find_calls("backward"))
    return [loop for loop in found if loop and (not epochs or _is_repeated(script, loop))]


def _is_repeated(script: TrainingScript, loop: ast.AST) -> bool:
    outer = script.blocks[loop]
    if outer.loop is not None:
        return True
    return _is_called_in_loop(script, loop)


def _is_called_in_loop(script: TrainingScript, node: ast.AST) -> bool:
    """Whether the function around a line is called in a loop, or by a function that is, or by one that calls that."""
    functions = {script.blocks[node].function}
    for _ in range(3):
        uses = [use for f in functions for use in script.uses.get(getattr(f, "name", ""), [])]
        uses = [
            use for use in uses if isinstance(use, ast.Name) or dotted(use).startswith("self.")
        ]  # not model.train()
        if any(script.blocks[use].loop is not None for use in uses):
            return True
        functions = {script.blocks[use].function for use in uses} - {None}
    return False


def _is_evaluation(script: TrainingScript, loop: ast.For) -> bool:
    """Whether a loop stands under no_grad."""
    block = script.blocks[loop]
    quiet = {"no_grad", "inference_mode"}
    items = [item.context_expr for b in block.outward() if isinstance(b.node, ast.With) for item in b.node.items]
    decorators = getattr(block.function, "decorator_list", [])
    inner = [i.context_expr for n in loop.body if isinstance(n, ast.With) for i in n.items]
    return any(quiet & set(words(node)) for node in (*items, *decorators, *inner))


def _loader_of(node: ast.expr) -> str:
    """`loader` in loader, enumerate(loader), tqdm(enumerate(loader))."""
    for _ in range(3):
        if isinstance(node, ast.Call) and last_word(node.func) in {"enumerate", "tqdm", "trange"} and node.args:
            node = node.args[0]
    return dotted(node)


def _is_mean(script: TrainingScript, node: ast.AugAssign) -> bool:
    """`total += loss` or `loss.item()`, where the loss comes from a function of that name."""
    value = node.value
    if isinstance(value, ast.Call) and last_word(value.func) == "item" and isinstance(value.func, ast.Attribute):
        value = value.func.value
    made = [value] if isinstance(value, ast.Call) else script.held(value, dotted(value)) if dotted(value) else []
    return (
        isinstance(node.op, ast.Add)
        and bool(made)
        and all(
            isinstance(v, ast.Call) and re.search(r"criterion|loss|entropy", last_word(v.func), re.IGNORECASE)
            for v in made
        )
    )


def _divisions(script: TrainingScript) -> Iterator[tuple[ast.AST | None, str, str]]:
    """(function, name, loader) of each name / len(loader) and name /= len(loader)."""
    for node in script.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            left, right = node.left, node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            left, right = node.target, node.value
        else:
            continue
        if isinstance(right, ast.Call) and last_word(right.func) == "len" and len(right.args) == 1:
            yield script.blocks[node].function, dotted(left), dotted(right.args[0])
