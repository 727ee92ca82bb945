"""Mistakes of a training script in finding its ranks: the address, the device, processes of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hpcddp.lint.script import Problem
from hpcddp.lint.training_script import (
    COMPARED,
    SHARDERS,
    CodeBlock,
    TrainingScript,
    dotted,
    is_constant,
    keyword,
    last_word,
    may_have,
    shown,
    words,
)

_URL = re.compile(r"tcp://(?P<host>[^:/]+)(:(?P<port>\d+))?")
_GPUS = re.compile(r"device_count|(n|num)_?gpus?(_per_node)?$|gpus_per_node|gpu_count|devices_per_node", re.IGNORECASE)
_DRAWN = re.compile(r"rand(int|range|om)?$|free_?port|open_?port|available_?port|choice$")
_GLOBAL = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}
_OF_FRAMEWORK = {"process_index", "global_rank"}  # Accelerate's and Lightning's
_LAUNCHERS = re.compile(r"\b(torchrun|torch\.distributed\.(run|launch)|accelerate launch|deepspeed)\b")
_NO_PORT = "nothing: the launcher sets MASTER_PORT, and hpcddp exec picks it from the job id"
_LOCAL_RANK = "the launcher's local rank: int(os.environ['LOCAL_RANK']), or hpcddp.env().local_rank"
_SAMPLER = "DistributedSampler"
_DISK_SETS = {"ImageFolder", "DatasetFolder", "CocoDetection", "ImageNet"}
_DISK_READS = ("imread", "decode_image", "read_image", "read_video", "decode_jpeg")
_TEST = re.compile(r"test|val|eval|dev|infer|predict|gallery|query|memory|knn|fid", re.IGNORECASE)
_MADE_UP = re.compile(
    r"random|fake|dummy|synth|toy|iter|stream|shard|subset|chunk|partition|TensorDataset", re.IGNORECASE
)
_GIVEN = {"sampler", "batch_sampler", None}
_WRAPPERS = ("DistributedDataParallel", "DDP")
_COLLECTIVES = {
    *("barrier", "all_reduce", "broadcast", "all_gather", "gather", "scatter", "reduce", "reduce_scatter"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "monitored_barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
}  # fmt: skip
_OF_ONE_RANK = re.compile(r"rank|gpu|pid|shard|BytesIO|TemporaryFile", re.IGNORECASE)
_CHECKPOINT = re.compile(r"ckpt|check_?point|state|resume|snapshot|weights|pretrain|model", re.IGNORECASE)


def device_modulo(script: TrainingScript) -> Iterator[Problem]:
    """A3: the device as rank modulo device count. In a script that starts a node's ranks, the rank is the local one."""
    if script.has("spawn", "start_processes"):
        return
    for node in script.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not is_text(node.left):
            if script.targets.get(node) == COMPARED or isinstance(node.left, ast.BinOp):
                continue  # rank % gpus == 0: once on each node
            left, right = words(node.left), words(node.right)
            rank = any(re.search(r"rank|PROCID|process_index", word, re.IGNORECASE) for word in left)
            local = any(re.search(r"local|LOCALID", word, re.IGNORECASE) for word in left)
            held = [word for value in script.held(node, dotted(node.right)) for word in words(value)]
            if rank and not local and any(_GPUS.search(word) for word in (*right, *held)):
                what = f"{shown(node.left)} % {shown(node.right)}: wrong wherever ranks are not dealt node by node"
                yield Problem(node.lineno, what, _LOCAL_RANK)


def fixed_master_port(script: TrainingScript) -> Iterator[Problem]:
    """A5: a port in the script instead of the job's."""
    for line, _, port in _addresses(script):
        if port:
            what = f"port {port} is fixed in the script: two jobs on one node collide, and the launcher's port is lost"
            yield Problem(line, what, _NO_PORT)


def data_parallel(script: TrainingScript) -> Iterator[Problem]:
    """A6: one process that copies the model to all GPUs in every step."""
    if any(re.search("DDP|DistributedDataParallel", name) for name in script.uses):  # for both: the user chooses
        return
    for call in script.find_calls("DataParallel"):
        if not re.search(r"geometric|balanced", dotted(call.func)) and "torch_geometric" not in script.modules:
            what = "DataParallel is one process for all GPUs of one node, and slower than DistributedDataParallel"
            yield Problem(call.lineno, what, "DistributedDataParallel, one rank per GPU")


def fixed_address(script: TrainingScript) -> Iterator[Problem]:
    """A9: an address in the script instead of the launcher's."""
    for line, host, _ in _addresses(script):
        if host:
            local = host in {"localhost", "127.0.0.1", "::1"}
            there = "on a second node, ranks look for rank 0 on their own host" if local else "a job gets other hosts"
            right = "nothing: the launcher sets MASTER_ADDR; os.environ.setdefault to run without one"
            yield Problem(line, f"the address {host} is fixed in the script: {there}", right)


def global_rank_as_device(script: TrainingScript) -> Iterator[Problem]:
    """A10: the device by the global rank. The first line in the file."""
    if script.has("spawn", "start_processes", "notebook_launcher"):  # one node: the global rank is the local one
        return
    for node in script.nodes:
        device = _device_of(node)
        if device is not None and _is_global_rank(script, device):
            what = "the global rank chooses the device: from the second node on there is no GPU with that number"
            yield Problem(device.lineno, what, _LOCAL_RANK)
            return


def port_of_each_rank(script: TrainingScript) -> Iterator[Problem]:
    """A29: a port that each rank draws for itself. A script that starts its ranks draws it once."""
    if script.has("spawn", "start_processes", "Process"):
        return
    found = [(node, variable) for node in script.nodes if (variable := _environment_variable(node))]
    drawn = [(node, value) for node, (name, value) in found if name == "MASTER_PORT"]
    for call in script.find_calls("init_process_group"):
        url, size = keyword(call, "init_method"), keyword(call, "world_size")
        drawn += [(call, url)] if url is not None and not is_constant(size, 1) else []
    for node, value in drawn:
        choice = any(_is_choice(block.node) for block in script.blocks[node].outward())
        if _is_drawn(script, value) and script.on_every_rank(node) and not choice:
            what = "each rank draws a MASTER_PORT of its own: they never meet"
            yield Problem(value.lineno, what, _NO_PORT)


def _is_drawn(script: TrainingScript, value: ast.expr, names: int = 3) -> bool:
    """The expression holds a random number, itself or by names that are only ever set to such ones."""
    if any(re.search(r"bcast|broadcast|recv|scatter|gather", word) for word in words(value)):
        return False
    if any(_DRAWN.search(word) for word in words(value)):
        return True
    held = [script.held(node, node.id) for node in ast.walk(value) if isinstance(node, ast.Name)] if names else []
    return any(each and all(_is_drawn(script, one, names - 1) for one in each) for each in held)


def starts_processes(script: TrainingScript) -> Iterator[Problem]:
    """A20: a script that starts its ranks itself."""
    for call in find_spawning(script):
        what = f"{last_word(call.func)} starts a node's ranks: too many where a launcher starts one per GPU already"
        yield Problem(call.lineno, what, "one launcher: mpirun, srun or torchrun, and the rank from its environment")
    for call in script.find_calls("run", "call", "check_call", "Popen", "system", "execvp"):
        text = " ".join(str(node.value) for node in _strings(call))
        if _LAUNCHERS.search(text) and re.match(r"subprocess\.|os\.|Popen", dotted(call.func)):
            what = "the script calls a launcher: too many processes where a launcher starts one per GPU already"
            yield Problem(call.lineno, what, "one launcher, in the job script")


def find_spawning(script: TrainingScript) -> Iterator[ast.Call]:
    """The calls that start a node's ranks, under no option."""
    mp = [
        call
        for call in script.find_calls("spawn")
        if re.search(r"^mp\.|multiprocessing|^spawn$|xmp", dotted(call.func))
    ]
    functions = (script.blocks[call].function for call in script.find_calls("init_process_group"))
    opening = {function.name for function in functions if isinstance(function, ast.FunctionDef)}
    targets = ((call, keyword(call, "target")) for call in script.find_calls("Process"))
    by_hand = [call for call, target in targets if target is not None and opening.intersection(words(target))]
    for call in [*mp, *by_hand, *script.find_calls("notebook_launcher", "debug_launcher", "elastic_launch")]:
        if not _is_optional(script, call):
            yield call


def is_text(node: ast.AST) -> bool:
    """The expression is a string, so that % formats."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _strings(call: ast.Call) -> Iterator[ast.Constant]:
    for argument in call.args[:1]:
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node


def _is_optional(script: TrainingScript, node: ast.AST) -> bool:
    """The line depends on a condition other than the number of GPUs and `__name__`."""
    names = [word for test in script.blocks[node].conditions() for word in words(test)]
    return any(
        not re.search(r"__name__|__main__|world_size|gpu|device_count|cuda|is_available|torch|nprocs", w) for w in names
    )


def _addresses(script: TrainingScript) -> Iterator[tuple[int, str, str]]:
    """(line, host, port) wherever the script fixes one of them for any number of ranks."""
    variables = [(n, *found) for n in script.nodes if (found := _environment_variable(n))]
    if any(name == "WORLD_SIZE" and _literal(script, value) == "1" for _, name, value in variables):
        return  # a rendezvous of one
    for node, name, value in variables:
        block = script.blocks[node]
        if name in {"MASTER_ADDR", "MASTER_PORT"} and not any(_is_choice(b.node) for b in block.outward()):
            literal = _literal(script, value)
            host = literal if name == "MASTER_ADDR" else ""
            yield value.lineno, host, literal if name == "MASTER_PORT" else ""
    for call in script.find_calls("init_process_group"):
        method, size = keyword(call, "init_method"), keyword(call, "world_size")
        url = _URL.match(_beginning(script, method)) if method is not None and not is_constant(size, 1) else None
        if url and method is not None and not any(_is_choice(b.node) for b in script.blocks[call].outward()):
            yield method.lineno, url["host"], url["port"] or ""


def _is_choice(node: ast.AST) -> bool:
    """A block that is left out where the launcher has set the variable, as far as one can see."""
    main = isinstance(node, ast.If) and "__name__" in words(node.test)
    return isinstance(node, (ast.If, ast.ExceptHandler, ast.Try)) and not main


def _environment_variable(node: ast.AST) -> tuple[str, ast.expr] | None:
    """NAME and value of os.environ["NAME"] = value."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
        if last_word(target.value) == "environ" and isinstance(target.slice, ast.Constant):
            return str(target.slice.value), node.value
    return None


def _literal(script: TrainingScript, node: ast.expr) -> str:
    """The text that an expression always is; "" if it depends on something."""
    if isinstance(node, ast.Call) and dotted(node.func) == "str" and len(node.args) == 1:
        node = node.args[0]
    held = script.held(node, node.id) if isinstance(node, ast.Name) else []
    node = held[0] if len(held) == 1 else node
    return str(node.value) if isinstance(node, ast.Constant) and node.value not in (None, "") else ""


def _beginning(script: TrainingScript, node: ast.expr) -> str:
    """The same, or what an f-string begins with: tcp://localhost:{port}."""
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
        return str(node.values[0].value)
    return _literal(script, node)


def _device_of(node: ast.AST) -> ast.expr | None:
    """The number in set_device(…), device_ids=[…], torch.device("cuda", …), f"cuda:{…}", .to(…), .cuda(…),
    CUDA_VISIBLE_DEVICES."""
    if isinstance(node, ast.Call):
        name = last_word(node.func)
        ids = keyword(node, "device_ids") if name in {"DistributedDataParallel", "DDP"} else None
        if isinstance(ids, ast.List) and len(ids.elts) == 1:
            return ids.elts[0]
        moves = isinstance(node.func, ast.Attribute) and name in {"to", "cuda"}
        if (moves or name in {"set_device", "set_device_index"}) and (node.args or moves):
            return node.args[0] if node.args else keyword(node, "device")
        if name == "device" and len(node.args) == 2 and not may_have(node, ""):
            return node.args[1]
    if isinstance(node, ast.JoinedStr) and len(node.values) == 2 and is_constant(node.values[0], "cuda:"):
        last = node.values[1]
        return last.value if isinstance(last, ast.FormattedValue) else None
    variable, value = _environment_variable(node) or ("", None)
    return value if variable == "CUDA_VISIBLE_DEVICES" else None


def _is_global_rank(script: TrainingScript, node: ast.expr) -> bool:
    """The expression is the global rank, itself or by a name that is only ever set to it."""
    if isinstance(node, ast.Call) and last_word(node.func) in {"int", "str"} and len(node.args) == 1:
        node = node.args[0]
    held = script.held(node, dotted(node)) if dotted(node) else []
    return all(map(_reads_global_rank, held or [node]))


def _reads_global_rank(value: ast.expr) -> bool:
    if isinstance(value, ast.Attribute):
        return value.attr in _OF_FRAMEWORK
    if isinstance(value, ast.Call) and last_word(value.func) == "get_rank":
        return not value.args and not value.keywords and not re.search("local|node", dotted(value.func))
    environment = isinstance(value, (ast.Subscript, ast.Call)) and "environ" in words(value)
    return environment and bool(_GLOBAL & set(words(value))) and not any("LOCAL" in word for word in words(value))


def no_workers(script: TrainingScript) -> Iterator[Problem]:
    """A8: images from disk, loaded in the training process. Data in memory is slower with workers: no finding."""
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
                yield Problem(call.lineno, what, "num_workers=OMP_NUM_THREADS or so, persistent_workers=True")


def no_set_epoch(script: TrainingScript) -> Iterator[Problem]:
    """A11: a DistributedSampler that never learns the epoch: each epoch has the same order."""
    if script.has_framework() or "set_epoch" in script.uses or not _step_loops(script, epochs=True):
        return
    for call in script.find_calls(_SAMPLER):
        again = script.blocks[call].loop or _is_called_in_loop(script, call)  # a new sampler each time, of other data
        shuffle = call.args[3] if len(call.args) > 3 else keyword(call, "shuffle")
        if not again and not _is_for_test(script, call) and not is_constant(shuffle, False):
            what = "set_epoch is never called: DistributedSampler gives the same order in every epoch"
            yield Problem(call.lineno, what, "sampler.set_epoch(epoch) at the start of each epoch; rt.epochs() does it")
            return


def whole_data_on_each_rank(script: TrainingScript) -> Iterator[Problem]:
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
            yield Problem(call.lineno, what, "sampler=DistributedSampler(dataset), or rt.prepare(…, loader)")


def _is_for_test(script: TrainingScript, call: ast.Call) -> bool:
    """The sampler is for data that is not trained on, by the names around it."""
    block = script.blocks[call]
    around = [*words(call), *(getattr(b.node, "name", "") for b in block.outward())]
    around += [script.targets.get(call, ""), *(word for test in block.conditions() for word in words(test))]
    return any(_TEST.search(word) for word in around)


def _is_made_up(script: TrainingScript, call: ast.Call) -> bool:
    """The data set is made of random numbers, or may be the part of one rank."""
    if not call.args and not keyword(call, "dataset"):
        return True
    data = call.args[0] if call.args else keyword(call, "dataset")
    names = words(data) if data is not None else []
    held = [word for name in names for value in script.held(call, name) for word in words(value)]
    return not held or any(_MADE_UP.search(word) or "rank" in word for word in (*names, *held))


def _step_loops(script: TrainingScript, epochs: bool) -> list[ast.AST]:
    """The innermost loops around a backward pass; with `epochs` those that another loop, or a call in one, repeats."""
    found = dict.fromkeys(script.blocks[call].loop for call in script.find_calls("backward"))
    loops = [loop for loop in found if loop is not None]
    if epochs:
        return [loop for loop in loops if script.blocks[loop].loop is not None or _is_called_in_loop(script, loop)]
    return loops


def _is_called_in_loop(script: TrainingScript, node: ast.AST) -> bool:
    """The function around a line is called in a loop, or by a function that is, or by one that calls that."""
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


def item_in_loop(script: TrainingScript) -> Iterator[Problem]:
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
            if loss and loop is not None and _is_each_step(script, call, loop) and (read := _reads(call, loss)):
                yield Problem(call.lineno, f"{read} in every step waits for the GPU in every step",
                           "total += loss.detach(), and item() where it is printed, every 100 steps or so")  # fmt: skip


def no_rank_check(script: TrainingScript) -> Iterator[Problem]:
    """A15: every rank writes the same file."""
    if not (script.is_distributed() or script.runtimes()) or "deepspeed" in script.modules:
        return
    for call in script.find_calls("save"):
        if dotted(call.func) == "torch.save" and len(call.args) > 1 and script.on_every_rank(call):
            held = [w for name in words(call) for value in script.held(call, name) for w in words(value)]
            state = any(_CHECKPOINT.search(word) for word in words(call.args[0]))
            if not state or any(_OF_ONE_RANK.search(word) for word in (*words(call), *held)):
                continue
            what = "torch.save on every rank: all of them write the same file, and a reader may find a half of it"
            yield Problem(call.lineno, what, "if rank == 0: torch.save(…), or rt.save_model(…)")


def optimizer_before_sharding(script: TrainingScript) -> Iterator[Problem]:
    """A17: an optimizer over parameters that FSDP then replaces. DDP keeps them: no finding."""
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
            right = f"the optimizer behind {last_word(call.func)}, over the wrapped model's parameters"
            yield Problem(line, what, right)


def bare_model_called(script: TrainingScript) -> Iterator[Problem]:
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
                yield Problem(call.lineno, what, f"{outer}(…)")


def collective_on_some_ranks(script: TrainingScript) -> Iterator[Problem]:
    """A22: a collective that some ranks never reach."""
    for name in _COLLECTIVES:
        calls = [c for c in script.find_calls(name) if re.match(r"(torch\.)?(distributed|dist)\.", dotted(c.func))]
        # if rank != 0: barrier(); …; if rank == 0: barrier()
        branches: dict[ast.AST | None, set[tuple[ast.AST, str]]] = {}
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
                yield Problem(call.lineno, what, f"{name} on every rank, outside of the condition on the rank")


def _reads(call: ast.Call, losses: set[str]) -> str:
    """`loss.item()`, `float(loss)` or `print(loss)` as it stands; "" for something else."""
    name = last_word(call.func)
    if name == "item" and isinstance(call.func, ast.Attribute):
        of = dotted(call.func.value)
        return f"{of}.item()" if of in losses or of.split(".")[-1] == "loss" else ""
    printed = [v for a in call.args for v in (a.values if isinstance(a, ast.JoinedStr) else [a])]
    inside = [a.value if isinstance(a, ast.FormattedValue) else a for a in printed]
    of = next((dotted(a) for a in inside if dotted(a) in losses), "")
    return f"{name}({of})" if of else ""


def _is_each_step(script: TrainingScript, call: ast.Call, loop: ast.AST) -> bool:
    """The line runs in every pass of the loop, on some rank."""
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
