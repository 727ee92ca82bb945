"""A training script as the rules look at it: its calls, what its names hold, and where each line stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# A condition with such a word chooses among ranks. A word too many here only costs a finding.
_RANK = re.compile(
    r"rank|master|primary|is_?main|main_?proc|process_?(index|id)|proc_?id|is_?(chief|root|leader|first)|global_?zero"
    r"|should_save",
    re.IGNORECASE,
)
_DEVICE = re.compile(r"(gpu|device|worker)(_?id|_?no)?$", re.IGNORECASE)
_GPU = re.compile(r"cuda|gpu|^device$|^xpu$|nccl|accelerator", re.IGNORECASE)
#: What divides a model over the ranks.
SHARDERS = ("FullyShardedDataParallel", "FSDP", "fully_shard")
COMPARED = "=="  # the target of what is not kept but compared
_STEP_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
# These split the data, wrap the model and save from one rank themselves.
_FRAMEWORKS = {
    *("hpcddp", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "composer", "ray", "ignite"),
    *("fastai", "mmcv", "mmengine", "catalyst", "horovod", "torch_xla"),
}


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target and its value; of `a, b = x` each with x."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            for each in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                yield each, node.value
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr


def parameters(function: ast.AST) -> set[str]:
    """The names that a function is called with."""
    arguments = getattr(function, "args", None)
    if not isinstance(arguments, ast.arguments):
        return set()
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {a.arg for a in found if a}


def last_word(node: ast.AST) -> str:
    """`DataLoader` of torch.utils.data.DataLoader; "" of what has no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def word_of(node: ast.AST) -> str:
    """The one word that a node itself holds: a name, an attribute, a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return last_word(node)


def words(node: ast.AST) -> list[str]:
    """Every name, attribute and string in an expression."""
    return [word for inner in ast.walk(node) if (word := word_of(inner))]


def dotted(node: ast.AST) -> str:
    """`self.model` as it is written; "" of an expression. Up to 8 words, so that a long chain costs no more."""
    found: list[str] = []
    while isinstance(node, ast.Attribute) and len(found) < 8:
        found.append(node.attr)
        node = node.value
    return ".".join(reversed([*found, node.id])) if isinstance(node, ast.Name) else ""


def shown(node: ast.AST) -> str:
    """An expression in a message, in short."""
    if isinstance(node, ast.Call):
        return f"{dotted(node.func) or '….' + last_word(node.func)}()"
    return dotted(node) or "…"


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def may_have(call: ast.Call, name: str) -> bool:
    """A keyword argument is given, or may be in **options."""
    return any(word.arg in {name, None} for word in call.keywords)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """The expression is this literal."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


@dataclass(frozen=True, slots=True, eq=False)
class CodeBlock:
    """The place of a line: the nearest block around it (`node`, its `branch`), then the blocks around that."""

    node: ast.AST
    branch: str  # body, orelse, handlers; after: behind `if …: return`
    up: CodeBlock | None
    function: ast.AST | None
    loop: ast.AST | None
    owner: str  # the outermost class or function around it

    def outward(self) -> Iterator[CodeBlock]:
        """This block and those around it, in the same function. Up to 200: thousands of `elif` cost no more."""
        block: CodeBlock | None = self
        for _ in range(200):
            if block is None or block.function is not self.function:
                return
            yield block
            block = block.up

    @property
    def tests(self) -> list[ast.expr]:
        """The tests that decide whether this block runs: of an `if`, a `match`'s subject, what is before an `and`."""
        if isinstance(self.node, ast.BoolOp):
            return self.node.values[:-1]
        if isinstance(self.node, ast.Match):
            return [self.node.subject]
        return [self.node.test] if isinstance(self.node, (ast.If, ast.IfExp)) else []

    def conditions(self) -> Iterator[ast.expr]:
        """The conditions on which the line depends, in the same function."""
        return (test for block in self.outward() for test in block.tests)


@dataclass(frozen=True, slots=True)
class TrainingScript:
    """`calls` by the last word of the function; `values` by function (None: the file) and name."""

    nodes: list[ast.AST] = field(default_factory=list)
    blocks: dict[ast.AST, CodeBlock] = field(default_factory=dict)
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)
    values: dict[tuple[ast.AST | None, str], list[ast.expr]] = field(default_factory=dict)
    attributes: dict[str, list[ast.expr]] = field(default_factory=dict)
    targets: dict[ast.expr, str] = field(default_factory=dict)
    uses: dict[str, list[ast.expr]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    by_rank: set[str] = field(default_factory=set)
    some_ranks: dict[CodeBlock, bool] = field(default_factory=dict)
    reached: set[ast.AST | None] = field(default_factory=set)

    def find_calls(self, *names: str) -> Iterator[ast.Call]:
        """Every call of a function whose last word is one of these."""
        for name in names:
            yield from self.calls.get(name, ())

    def has(self, *names: str) -> bool:
        """A function of such a name is called."""
        return any(name in self.calls for name in names)

    def has_framework(self) -> bool:
        """A framework deals with the ranks, not the script."""
        trainer = "transformers" in self.modules and any(name.endswith("Trainer") for name in self.calls)
        return trainer or bool(self.modules & _FRAMEWORKS)

    def wraps_ddp(self) -> bool:
        return self.has("DistributedDataParallel", "DDP")

    def has_gpu(self) -> bool:
        """The script uses GPUs."""
        backends = [
            call.args[0] if call.args else keyword(call, "backend") for call in self.find_calls("init_process_group")
        ]
        if any(is_constant(backend, "gloo") for backend in backends):
            return False
        nccl = any("nccl" in words(backend) for backend in backends if backend is not None)
        return nccl or any(_GPU.search(name) for name in self.uses) or self.has_framework()

    def is_distributed(self) -> bool:
        """The script opens the process group or wraps a model, without a framework."""
        return not self.has_framework() and (self.has("init_process_group") or self.wraps_ddp())

    def runtimes(self) -> set[str]:
        """The names of hpcddp's runtime, by which the script prepares its model."""
        calls = self.find_calls("prepare") if "hpcddp" in self.modules and self.has("runtime") else ()
        return {dotted(call.func.value) for call in calls if isinstance(call.func, ast.Attribute)} - {""}

    def held(self, node: ast.AST, name: str) -> list[ast.expr]:
        """The values that a name is set to where a line sees it, up to 20; nothing for a parameter. All methods of a
        class see `self.name`."""
        function = self.blocks[node].function
        if function is not None and name in parameters(function):
            return []
        if name.startswith("self."):
            owner = self.blocks[node].owner
            return [v for v in self.attributes.get(name, ()) if self.blocks[v].owner == owner][:20]
        return (self.values.get((function, name)) or self.values.get((None, name)) or [])[:20]

    def chooses_ranks(self, test: ast.AST) -> bool:
        """The condition may hold on some ranks only: by a word, a `gpu == 0`, or a name set from one of these."""
        for node in ast.walk(test):
            if isinstance(node, ast.Compare) and _DEVICE.search(last_word(node.left)):
                return True
            if isinstance(node, (ast.Name, ast.Attribute)) and last_word(node) in self.by_rank:
                return True
            if _RANK.search(word_of(node)):
                return True
        return False

    def on_some_ranks(self, node: ast.AST) -> bool:
        """The line stands under such a condition in its function."""
        block: CodeBlock | None = self.blocks[node]
        passed: list[CodeBlock] = []
        while block is not None and block not in self.some_ranks:  # each block is asked once: time stays linear
            passed.append(block)
            block = block.up if block.up and block.up.function is block.function else None
        under = block is not None and self.some_ranks[block]
        for inner in reversed(passed):
            under = under or any(map(self.chooses_ranks, inner.tests))
            self.some_ranks[inner] = under
        return under

    def on_every_rank(self, node: ast.AST) -> bool:
        """Every rank surely reaches the line, through the calls of this file."""
        return self.blocks[node].function in self.reached and not self.on_some_ranks(node)


def read_training_script(tree: ast.Module) -> TrainingScript:
    """Everything that the rules ask for, in one pass over the tree."""
    script = TrainingScript()
    todo: list[tuple[ast.AST, CodeBlock]] = [(tree, CodeBlock(tree, "body", None, None, None, ""))]
    while todo:
        node, block = todo.pop()
        script.nodes.append(node)
        script.blocks[node] = block
        _record(script, node, block)
        todo += reversed(list(_children(node, block)))
    _find_names_by_rank(script)
    _find_reached(script)
    return script


def _children(node: ast.AST, block: CodeBlock) -> Iterator[tuple[ast.AST, CodeBlock]]:
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            body = isinstance(node, ast.Lambda) and name == "body"
            inner = CodeBlock(node, "body", block, node, None, block.owner) if body else block
            yield value, _inside(node, name, block) if isinstance(node, ast.IfExp) else inner
        elif isinstance(value, list):
            inner = _inside(node, name, block)
            for child in value:
                if isinstance(child, ast.AST):
                    yield child, inner
                if isinstance(child, ast.If) and not child.orelse and _leaves(child.body[-1]):
                    inner = CodeBlock(child, "after", inner, inner.function, inner.loop, inner.owner)


def _inside(node: ast.AST, name: str, block: CodeBlock) -> CodeBlock:
    """The block that a list of statements is: the body of a function, an `else`; otherwise the one around it."""
    if name not in {"body", "orelse", "handlers", "finalbody", "cases", "values"} or isinstance(node, ast.Module):
        return block
    owner = block.owner or getattr(node, "name", None) or ""
    if isinstance(node, _FUNCTIONS):
        return CodeBlock(node, name, block, node, None, owner)
    loop = node if isinstance(node, _LOOPS) and name == "body" else block.loop
    return CodeBlock(node, name, block, block.function, loop, owner)


def _leaves(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return last_word(statement.value.func) in {"exit", "_exit"}
    return isinstance(statement, _STEP_ENDS)


def _record(script: TrainingScript, node: ast.AST, block: CodeBlock) -> None:
    if isinstance(node, ast.Call):
        script.calls.setdefault(last_word(node.func), []).append(node)
    elif isinstance(node, ast.Import):
        script.modules.update(alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        script.modules.add(node.module.split(".")[0])
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        script.uses.setdefault(last_word(node), []).append(node)
    if isinstance(node, ast.Compare):
        script.targets[node.left] = COMPARED
    for target, value in assigned(node):
        script.values.setdefault((block.function, dotted(target)), []).append(value)
        if isinstance(target, ast.Attribute):
            script.attributes.setdefault(dotted(target), []).append(value)
        script.targets[value] = last_word(target)


def _find_names_by_rank(script: TrainingScript) -> None:
    """`save = rank == 0`, a saver that only rank 0 makes: a condition on such a name chooses ranks."""
    pairs = [(node, last_word(target), value) for node in script.nodes for target, value in assigned(node)]
    empty = {name for _, name, value in pairs if isinstance(value, ast.Constant) and not value.value}
    for _ in range(2):  # main = rank == 0; save = main and …
        for node, name, value in pairs:
            answer = isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Call)) and script.chooses_ranks(
                value.func if isinstance(value, ast.Call) else value
            )
            if name and (answer or (name in empty and script.on_some_ranks(node))):
                script.by_rank.add(name)
        script.some_ranks.clear()


def _find_reached(script: TrainingScript) -> None:
    """The functions that every rank enters: used somewhere that every rank reaches, and nowhere on some ranks only."""
    functions: dict[str, list[ast.AST]] = {}
    for node in script.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.setdefault(node.name, []).append(node)
    enters: dict[ast.AST | None, list[ast.AST]] = {}
    for name, bodies in functions.items():
        uses = script.uses.get(name, [])
        if not any(script.on_some_ranks(use) for use in uses):
            for use in uses:
                enters.setdefault(script.blocks[use].function, []).extend(bodies)
    spawned = [last_word(call.args[0]) for call in script.find_calls("spawn", "start_processes") if call.args]
    todo: list[ast.AST | None] = [body for name in spawned for body in functions.get(name, [])]
    todo = todo if spawned else [None]  # what calls spawn is one process, and no rank
    while todo:
        function = todo.pop()
        if function not in script.reached:
            script.reached.add(function)
            todo += enters.get(function, [])
