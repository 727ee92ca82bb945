"""A training script is read before its job is queued: whether its ranks will meet, and whether a chain can go on.

It speaks only of a script that it has read whole, with all modules of its own, and whose other imports it knows. What
starts programs, runs code that it makes, or has a word about ranks is left alone.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence

from hpcddp.login.planning import find_python_file
from hpcddp.ranks.launch_commands import find_agent
from hpcddp.record import Record
from hpcddp.script.jobplan import JobPlan
from hpcddp.sweep import find_code, find_placeholders

_MOST_FILES = 200
_MOST_BYTES = 2**20

# Packages that join no ranks: with them alone a script trains in one process.
_ALONE = set(
    """
    torch torchvision torchaudio torchtext torchinfo torchmetrics torchsummary torch_geometric numpy scipy pandas
    polars pyarrow xarray h5py zarr netCDF4 numba joblib einops sklearn skimage PIL cv2 imageio albumentations
    matplotlib seaborn plotly tqdm rich yaml toml click omegaconf psutil requests packaging typing_extensions
    tensorboard tensorboardX wandb mlflow datasets tokenizers safetensors sentencepiece tiktoken nltk transformers
    timm gym gymnasium nibabel rdkit ase soundfile librosa
    """.split()  # noqa: SIM905  # as a list literal it would take a line for each name
)
# Packages that join ranks themselves. They save, but write no word for the next job of a chain.
_FRAMEWORKS = set(
    """
    accelerate lightning pytorch_lightning lightning_fabric deepspeed composer torchtune trl torchtitan peft
    horovod jax flax mpi4py ignite fastai mmengine mmcv detectron2 torch_xla fairscale colossalai bitsandbytes
    evaluate optax
    """.split()  # noqa: SIM905  # as a list literal it would take a line for each name
)
# Of the standard library: what may start other programs or load what is not seen here.
_HIDDEN = {"subprocess", "multiprocessing", "importlib", "runpy", "pty", "pkgutil", "imp", "ctypes", "code"}
_HIDDEN_CALLS = {"exec", "eval", "__import__"}
_OF_OS = re.compile(r"system|popen|fork\w*|exec[lv]\w*|spawn[lv]\w*|posix_spawnp?")
# A name or a word with which a script speaks of ranks, or of what joins them.
_RANKS = re.compile(
    r"(?i:.*(distributed|process_?group|world_?size|multiprocessing|init_?method|master_?(addr|port)).*|env://.*"
    r"|((local|global|node|world|proc|process|group|my|is|get|set|mpi|dist|ddp)_?)*_?ranks?(_\w+)?"
    r"|(num|n|all)_?(ranks|procs|processes)|ddp|fsdp|fully_?shard)"
    r"|.*(RANK|PROCID|LOCALID|NODEID|TASK_?ID|ARRAY_?I|NODEFILE|NODELIST).*"
)
_TRAINERS = re.compile(r"\w*(Trainer|TrainingArguments)")  # of transformers: they join ranks


class _Program(Record):
    """What the files of a program say together. `other_modules`: those that are no files of its own."""

    other_modules: frozenset[str]
    names: frozenset[str]
    called: frozenset[str]
    steps_at: str

    @property
    def trains_alone(self) -> bool:
        """Whether it trains, and nothing in it can have to do with other ranks."""
        trains = bool(self.steps_at) and "backward" in self.called and "torch" in self.other_modules
        trains = trains and self.other_modules <= _ALONE | _STANDARD
        if "transformers" in self.other_modules and any(map(_TRAINERS.fullmatch, self.names)):
            return False
        return trains and not any(map(_RANKS.fullmatch, self.names))


_STANDARD = frozenset(sys.stdlib_module_names) - _HIDDEN


#: Programs that were read, by their path and the folders of their modules: a sweep has a plan for each point.
ReadPrograms = dict[tuple[str, ...], _Program | None]


def check_training_script(plan: JobPlan, read: ReadPrograms) -> list[str]:
    """Remarks on a script of this machine whose ranks never meet, or that cannot tell the next job of a chain where it
    stopped; each with what to do. Nothing where the script cannot be judged."""
    is_agent = bool(plan.own_ranks) and find_agent(plan.command) is not None
    joins = plan.world_size > 1 and not plan.spec.independent and (is_agent or not plan.own_ranks)
    joins = joins and not {"rank", "local_rank", "node_rank", "world_size"} & {*find_placeholders(plan.command)}
    if not joins and not plan.options.chain:
        return []
    if joins and _clears_environment(plan.command):
        return [
            f"env -i hides from the program which of the {plan.world_size} ranks it is: each would run alone"
            "\nhint: env -u NAME for single variables in place of -i; for ranks that are to train alone:"
            " --set independent=true"
        ]
    folder = plan.spec.workdir or ""
    path = "" if find_code(plan.command) is not None else find_python_file(plan.command, folder)
    roots = (folder, *(os.path.join(folder, one) for one in plan.spec.pythonpath or ()))
    key = (path, *roots)
    if path and key not in read:
        read[key] = _read_program(path, folder, roots)
    program = read.get(key)
    if program is None:
        return []
    remarks = []
    if joins and program.trains_alone:
        remarks.append(
            f"{program.steps_at} takes optimizer steps, and nothing in the script joins its {plan.world_size} ranks:"
            " each would train a whole copy of the model"
            "\nhint: hpcddp.runtime() and its loop (README.md), or init_process_group(), DistributedDataParallel and"
            " DistributedSampler; for ranks that are to train alone: --set independent=true"
        )
    if plan.options.chain and program.other_modules <= _ALONE | _FRAMEWORKS | _STANDARD:
        remarks.append(
            f"{path} saves nothing by hpcddp: it cannot stop before the walltime, and the second job of the chain"
            f" ends at once, for it finds no word of the first"
            "\nhint: hpcddp.runtime(), or one line of hpcddp.integrations (docs/frameworks.md); or leave out chain"
        )
    return remarks


def _clears_environment(command: Sequence[str]) -> bool:
    """Whether Python, or what makes a node's ranks, is behind an `env -i` that sets no RANK again."""
    agent = find_agent(command)
    ends = [i for i, word in enumerate(command) if re.fullmatch(r"(.*/)?python[\d.]*", word)]
    end = min([*ends, *([agent[0]] if agent else [])], default=0)
    before = [i for i, word in enumerate(command[:end]) if re.fullmatch("(.*/)?env", word)]
    words = command[before[0] + 1 : end] if before else ()
    is_cleared = any(re.fullmatch(r"-|-[v0]*i.*|--ignore-env\w*", word) for word in words)
    return is_cleared and not any(word.startswith("RANK=") for word in words)


def _read_program(path: str, folder: str, roots: tuple[str, ...]) -> _Program | None:
    """The script and all modules of its own; None where a file cannot be read, or may hide something."""
    found: dict[str, ast.Module] = {}
    others: set[str] = set()
    # python puts the script's folder on its path, and with -m the one that it is started in
    roots = (os.path.dirname(os.path.join(folder, path)), *roots)
    todo = [os.path.join(folder, path)]
    while todo:
        file = todo.pop()
        if file in found:
            continue
        tree = _parse(file) if len(found) < _MOST_FILES else None
        if tree is None:
            return None
        found[file] = tree
        for modules in _imports(tree, os.path.dirname(file)):
            files = [one for module, base in modules for one in _find_module(module, [base] if base else roots)]
            todo += files
            if not files:
                module, base = modules[0]
                if base:  # of its own package, and not here
                    return None
                others.add(module.partition(".")[0])
    return _sum_up(found, others, folder)


def _parse(file: str) -> ast.Module | None:
    try:
        with open(file, "rb") as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = stream.read(_MOST_BYTES + 1)
            return ast.parse(text) if len(text) <= _MOST_BYTES else None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _imports(tree: ast.Module, folder: str) -> Iterator[list[tuple[str, str]]]:
    """Of each import the modules that it may load, the first one in any case, and the folder of a relative one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield [(alias.name, "")]
        elif isinstance(node, ast.ImportFrom):
            base = os.path.join(folder, *[".."] * (node.level - 1)) if node.level else ""
            module = node.module or ""
            inner = [(f"{module}.{alias.name}".lstrip("."), base) for alias in node.names]
            yield [(module or "__init__", base), *inner]


def _find_module(module: str, folders: Sequence[str]) -> list[str]:
    """The files that are read when a module is imported: its own, and those of the packages around it."""
    words = module.split(".")
    for folder in folders:
        own: list[str] = []
        files = []
        for i in range(len(words)):
            path = os.path.join(folder, *words[: i + 1])
            own = [one for one in (f"{path}.py", f"{path}/__init__.py") if os.path.isfile(one)]
            files += own
        if own:
            return files
    return []


def _sum_up(found: dict[str, ast.Module], others: set[str], folder: str) -> _Program | None:
    names: set[str] = set()
    called: set[str] = set()
    steps: dict[bool, str] = {}
    for file, tree in found.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                function = node.func
                if isinstance(function, ast.Name) and function.id in _HIDDEN_CALLS:
                    return None
                if isinstance(function, ast.Attribute):
                    called.add(function.attr)
                    is_optimizer = re.search("opt|scaler", ast.unparse(function.value)) is not None
                    if function.attr == "step" and (is_optimizer or not node.args):
                        steps.setdefault(is_optimizer, f"{os.path.relpath(file, folder or '.')}:{node.lineno}")
            names |= set(_names(node))
    if _HIDDEN & others or any(map(_OF_OS.fullmatch, names)) or any("hpcddp" in name for name in (*names, *others)):
        return None
    return _Program(frozenset(others), frozenset(names), frozenset(called), steps.get(True) or steps.get(False, ""))


def _names(node: ast.AST) -> Iterator[str]:
    """The names in a node, and the words of texts that are no sentences, such as "--local-rank" and "LOCAL_RANK"."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")
    elif isinstance(node, (ast.arg, ast.keyword)):
        yield node.arg or ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search(r"\s", node.value):
        yield node.value.lstrip("-").replace("-", "_")
