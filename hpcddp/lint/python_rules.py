"""Mistakes of a training script in finding its ranks: the address, the device, processes of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hpcddp.lint.expression import dotted, is_constant, keyword, last_word, may_have, parameters, shown, words
from hpcddp.lint.finding import Said
from hpcddp.lint.training_script import COMPARED, TrainingScript

_URL = re.compile(r"tcp://(?P<host>[^:/]+)(:(?P<port>\d+))?")
_GPUS = re.compile(r"device_count|(n|num)_?gpus?(_per_node)?$|gpus_per_node|gpu_count|devices_per_node", re.IGNORECASE)
_DRAWN = re.compile(r"rand(int|range|om)?$|free_?port|open_?port|available_?port|choice$")
_GLOBAL = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}
_OF_FRAMEWORK = {"process_index", "global_rank"}  # Accelerate's and Lightning's
_LAUNCHERS = re.compile(r"\b(torchrun|torch\.distributed\.(run|launch)|accelerate launch|deepspeed)\b")
_LOCAL_RANK = "the launcher's local rank: int(os.environ['LOCAL_RANK']), or hpcddp.env().local_rank"


def device_modulo(script: TrainingScript) -> Iterator[Said]:
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
                yield Said(node.lineno, what, _LOCAL_RANK)


def fixed_port(script: TrainingScript) -> Iterator[Said]:
    """A5: a port in the script instead of the job's."""
    for line, _, port in _addresses(script):
        if port:
            what = f"port {port} is fixed in the script: two jobs on one node collide, and the launcher's port is lost"
            yield Said(line, what, "nothing: the launcher sets MASTER_PORT, and hpcddp exec picks it from the job id")


def data_parallel(script: TrainingScript) -> Iterator[Said]:
    """A6: one process that copies the model to all GPUs in every step."""
    if any(re.search("DDP|DistributedDataParallel", name) for name in script.uses):  # for both: the user chooses
        return
    for call in script.find_calls("DataParallel"):
        if not re.search(r"geometric|balanced", dotted(call.func)) and "torch_geometric" not in script.modules:
            what = "DataParallel is one process for all GPUs of one node, and slower than DistributedDataParallel"
            yield Said(call.lineno, what, "DistributedDataParallel, one rank per GPU")


def fixed_address(script: TrainingScript) -> Iterator[Said]:
    """A9: an address in the script instead of the launcher's."""
    for line, host, _ in _addresses(script):
        if host:
            local = host in {"localhost", "127.0.0.1", "::1"}
            there = "on a second node, ranks look for rank 0 on their own host" if local else "a job gets other hosts"
            what = f"the address {host} is fixed in the script: {there}"
            yield Said(line, what, "nothing: the launcher sets MASTER_ADDR; os.environ.setdefault to run without one")


def global_rank_as_device(script: TrainingScript) -> Iterator[Said]:
    """A10: the device by the global rank. The first line in the file."""
    if script.has("spawn", "start_processes", "notebook_launcher"):  # one node: the global rank is the local one
        return
    for node in script.nodes:
        device = _device_of(node)
        if device is not None and _is_global_rank(script, device):
            what = "the global rank chooses the device: from the second node on there is no GPU with that number"
            yield Said(device.lineno, what, _LOCAL_RANK)
            return


def port_of_each_rank(script: TrainingScript) -> Iterator[Said]:
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
            right = "nothing: the launcher sets MASTER_PORT, and hpcddp exec picks it from the job id"
            yield Said(value.lineno, what, right)


def _is_drawn(script: TrainingScript, value: ast.expr, names: int = 3) -> bool:
    """Whether an expression holds a number drawn here, itself or by names that are only ever set to such ones."""
    if any(re.search(r"bcast|broadcast|recv|scatter|gather", word) for word in words(value)):
        return False
    if any(_DRAWN.search(word) for word in words(value)):
        return True
    held = [script.held(node, node.id) for node in ast.walk(value) if isinstance(node, ast.Name)] if names else []
    return any(each and all(_is_drawn(script, one, names - 1) for one in each) for each in held)


def starts_processes(script: TrainingScript) -> Iterator[Said]:
    """A20: a script that starts its ranks itself."""
    for call in find_spawning(script):
        what = f"{last_word(call.func)} starts a node's ranks: too many where a launcher starts one per GPU already"
        yield Said(call.lineno, what, "one launcher: mpirun, srun or torchrun, and the rank from its environment")
    for call in script.find_calls("run", "call", "check_call", "Popen", "system", "execvp"):
        text = " ".join(str(node.value) for node in _strings(call))
        if _LAUNCHERS.search(text) and re.match(r"subprocess\.|os\.|Popen", dotted(call.func)):
            what = "the script calls a launcher: too many processes where a launcher starts one per GPU already"
            yield Said(call.lineno, what, "one launcher, in the job script")


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
    """Whether an expression is a string, so that % formats."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _strings(call: ast.Call) -> Iterator[ast.Constant]:
    for argument in call.args[:1]:
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node


def _is_optional(script: TrainingScript, node: ast.AST) -> bool:
    """Whether a line stands under a condition that is more than the number of GPUs or `__name__`."""
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
    """The number in set_device(…), device_ids=[…], torch.device("cuda", …), f"cuda:{…}"."""
    if isinstance(node, ast.Call):
        name = last_word(node.func)
        ids = keyword(node, "device_ids") if name in {"DistributedDataParallel", "DDP"} else None
        if isinstance(ids, ast.List) and len(ids.elts) == 1:
            return ids.elts[0]
        if name in {"set_device", "set_device_index"} and len(node.args) == 1:
            return node.args[0]
        if name == "device" and len(node.args) == 2 and not may_have(node, ""):
            return node.args[1]
    if isinstance(node, ast.JoinedStr) and len(node.values) == 2 and is_constant(node.values[0], "cuda:"):
        last = node.values[1]
        return last.value if isinstance(last, ast.FormattedValue) else None
    return None


def _is_global_rank(script: TrainingScript, node: ast.expr, calls: int = 3) -> bool:
    """Whether an expression is the global rank, by what it is set to in this file, through parameters of so many
    calls."""
    name, function = dotted(node), script.blocks[node].function
    if function is not None and name in parameters(function):
        given = script.arguments(function, name) if calls and not script.values.get((function, name)) else []
        return bool(given) and all(_is_global_rank(script, value, calls - 1) for value in given)
    is_set = not isinstance(node, ast.Attribute) or any(name == target for _, target in script.values)
    held = script.held(node, name) if name and is_set else [node]
    return bool(held) and all(_reads_global_rank(value) for value in held)


def _reads_global_rank(value: ast.expr) -> bool:
    if isinstance(value, ast.Attribute):
        return value.attr in _OF_FRAMEWORK
    if isinstance(value, ast.Call) and last_word(value.func) == "int" and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, ast.Call) and last_word(value.func) == "get_rank":
        return not value.args and not value.keywords and not re.search("local|node", dotted(value.func))
    environment = isinstance(value, (ast.Subscript, ast.Call)) and "environ" in words(value)
    return environment and bool(_GLOBAL & set(words(value))) and not any("LOCAL" in word for word in words(value))
