"""`hpcddp advise`: which splits of a model fit on so many nodes, what their memory is, and which one to choose."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from hpcddp.advise.choice import Target, estimate_splits
from hpcddp.advise.memory import OPTIMIZER_STATES, PRECISIONS, Model, Work
from hpcddp.advise.report import GIB, Advice, advice_record, format_advice, parse_memory, parse_parameters
from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_answer
from hpcddp.errors import RequestError
from hpcddp.units import parse_count

_DESCRIPTION = """\
Say which ways to split a model fit into the memory of the GPUs, what each takes per rank, and which one to choose.
Of FILE.py only the function and what it needs runs, on tensors without numbers; --params needs no torch at all."""
_OF_NUMBERS = ("params", "layers", "hidden", "sequence")


def build_parser() -> VerbParser:
    parser = VerbParser(
        "advise",
        _DESCRIPTION,
        example="hpcddp advise --params 7e9 --layers 32 --hidden 4096 --sequence 4096 --site abci3 --nodes 1,2,4\n"
        "hpcddp advise train.py:make_model --input 3,224,224 --max-micro-batch 32 --site abci3",
        exits=(2, 3, 4),
    )
    parser.usage = "hpcddp advise FILE.py:FUNCTION | --params P --layers L --hidden H --sequence S [options]"
    parser.add_argument("target", nargs="?", metavar="FILE.py:FUNCTION", help="a function that returns the model")
    model = parser.add_argument_group("the model")
    model.add_argument("--params", metavar="P", help="parameters of a transformer, such as 7e9 or 350M")
    model.add_argument("--layers", metavar="L", help="its layers")
    model.add_argument("--hidden", metavar="H", help="their width")
    model.add_argument("--heads", metavar="A", help="attention heads, which tensor parallelism divides")
    model.add_argument("--vocabulary", metavar="V", help="tokens that are told apart (50000)")
    model.add_argument("--sequence", metavar="S", help="tokens of one sample; for FILE.py: it takes token numbers")
    model.add_argument("--input", metavar="SHAPE", help="for FILE.py: the shape of one sample, such as 3,224,224")
    training = parser.add_argument_group("the training")
    training.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        default="bf16-mixed",
        metavar="P",
        help="bf16-mixed (the default), bf16, fp32 or fp64",
    )
    training.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZER_STATES),
        default="adamw",
        metavar="O",
        help="adamw (the default), adam, sgd, momentum, rmsprop or adagrad",
    )
    training.add_argument("--max-micro-batch", metavar="N", help="most samples per forward pass of one rank (1)")
    training.add_argument("--global-batch", metavar="B", help="samples per optimizer step, over all ranks")
    training.add_argument("--activation-checkpointing", action="store_true", help="each block keeps its input only")
    place = parser.add_argument_group("where it runs")
    place.add_argument("--site", metavar="S", help="a site's name, or the path of its YAML file (see hpcddp sites)")
    place.add_argument("--queue", metavar="Q", help="queue, partition, QOS or resource type (the site's default)")
    place.add_argument("--nodes", metavar="N,…", default="1", help="nodes, one count or several (1)")
    place.add_argument("--ranks-per-node", metavar="R", help="ranks of each node (one per GPU of the site)")
    place.add_argument("--gpu-memory", metavar="M", help="memory of one GPU, such as 80GB or 79.1GiB (the site's)")
    printed = parser.add_argument_group("what is printed")
    printed.add_argument("--json", action="store_true", help="print the facts as one JSON object; sizes are bytes")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    if args.target is None and not any(getattr(args, name) for name in _OF_NUMBERS):
        raise RequestError("there is no model to advise on", "hpcddp advise train.py:make_model --sequence 1024")
    nodes = dict.fromkeys(parse_count(one, "--nodes") for one in args.nodes.split(","))
    micro_batch = parse_count(args.max_micro_batch or "1", "--max-micro-batch")
    global_batch = parse_count(args.global_batch, "--global-batch") if args.global_batch else None
    gpu, memory, ranks, render = _find_gpu(args, env)
    target = Target(memory, ranks, micro_batch, global_batch)
    model = _make_model(args, micro_batch, recompute=args.activation_checkpointing)
    work = Work(PRECISIONS[args.precision], args.optimizer, micro_batch)
    found = {count: estimate_splits(model, count, target, work) for count in nodes}
    advice = Advice(model, work, target, gpu, render, args.activation_checkpointing, found)
    print_answer(advice_record(advice), format_advice(advice), as_json=args.json, indent=1)
    return 0


def _find_gpu(args: argparse.Namespace, env: Mapping[str, str]) -> tuple[str, float, int, str]:
    """Which GPU in words, its bytes, ranks per node, and the line of `render` as far as it is known by now."""
    memory = parse_memory(args.gpu_memory, "--gpu-memory") if args.gpu_memory else 0.0
    ranks = parse_count(args.ranks_per_node, "--ranks-per-node") if args.ranks_per_node else 0
    of_ranks = f" --ranks-per-node {ranks}" if ranks else ""
    if memory and not args.site:
        return _in_words(memory, "--gpu-memory"), memory, ranks or 1, f"hpcddp render{of_ranks}"
    from hpcddp.script.site import Queue
    from hpcddp.script.site_file import chosen_site, open_site

    choice = chosen_site(args.site, None, "", env)
    if choice is None:
        raise RequestError("how much memory a GPU has is not said", "--site S, or --gpu-memory 80GB --ranks-per-node 4")
    site = open_site(choice, env)
    name = args.queue or site.queue
    queue = site.queues.get(name, Queue())
    where = "--gpu-memory" if memory else f"{queue.gpu or 'GPU'} of queue {name} at {site.name}"
    memory, ranks = memory or (queue.gpu_mem_gb or 0) * 1e9, ranks or queue.gpus or 0
    if not memory or not ranks:
        what = f"site {site.name} does not say which GPUs a node of queue {name or '(no default)'} has"
        others = [name for name, queue in site.queues.items() if queue.gpus and queue.gpu_mem_gb]
        remedy = "--gpu-memory 80GB --ranks-per-node 4"
        raise RequestError(what, f"--queue with one of {', '.join(others)}; or {remedy}" if others else remedy)
    of_queue = f" --queue {args.queue}" if args.queue else ""
    return _in_words(memory, where), memory, ranks, f"hpcddp render --site {choice.site}{of_queue}{of_ranks}"


def _in_words(memory: float, where: str) -> str:
    return f"{memory / 1e9:.4g} GB = {memory / GIB:.1f} GiB each ({where})"


def _make_model(args: argparse.Namespace, micro_batch: int, *, recompute: bool) -> Model:
    given = [f"--{name}" for name in ("params", "layers", "hidden", "heads", "vocabulary") if getattr(args, name)]
    if args.target is None:
        return _by_numbers(args, recompute=recompute)
    if given:
        raise RequestError(
            f"{given[0]} goes without a file: {args.target} says what the model is", f"leave out {given[0]}"
        )
    return _by_function(args, micro_batch, recompute=recompute)


def _by_numbers(args: argparse.Namespace, *, recompute: bool) -> Model:
    from hpcddp.advise.transformer import VOCABULARY, Numbers, make_transformer

    missing = [name for name in _OF_NUMBERS if getattr(args, name) is None]
    if args.input:
        raise RequestError("--input goes with FILE.py:FUNCTION", "leave out --input")
    if missing:
        examples = {"params": "7e9", "layers": "32", "hidden": "4096", "sequence": "4096"}
        what = f"a transformer by numbers still needs {' and '.join(f'--{name}' for name in missing)}"
        raise RequestError(what, " ".join(f"--{name} {examples[name]}" for name in missing))
    counts = {name: parse_count(getattr(args, name), f"--{name}") for name in ("layers", "hidden", "sequence")}
    vocabulary = parse_count(args.vocabulary, "--vocabulary") if args.vocabulary else VOCABULARY
    heads = parse_count(args.heads, "--heads") if args.heads else 0
    parameters = parse_parameters(args.params, "--params")
    numbers = Numbers(parameters, **counts, vocabulary=vocabulary, heads=heads)
    return make_transformer(numbers, args.precision, recompute=recompute)


def _by_function(args: argparse.Namespace, micro_batch: int, *, recompute: bool) -> Model:
    from contextlib import redirect_stdout
    from importlib.util import find_spec

    from hpcddp.advise.source import load_function, parse_target, without_command_line

    file, name = parse_target(args.target)
    if args.sequence and args.input:
        raise RequestError("a sample is either --sequence tokens or an --input", "leave out one of them")
    shape = tuple(parse_count(one, "--input") for one in args.input.split(",")) if args.input else ()
    if args.sequence:
        shape = (parse_count(args.sequence, "--sequence"),)
    if find_spec("torch") is None:
        from hpcddp.errors import LaunchError

        raise LaunchError(
            f"hpcddp advise {args.target} needs torch, which {sys.executable} does not have",
            "pip install 'hpcddp[train]', or say it by numbers: --params 7e9 --layers 32 --hidden 4096 --sequence 4096",
        )
    with redirect_stdout(sys.stderr), without_command_line(file):  # what the file prints is not the answer
        function = load_function(file, name)
        from hpcddp.advise.measure import Sample, measure_model

        sample = Sample(shape, tokens=bool(args.sequence)) if shape else None
        return measure_model(function, name, args.precision, sample, micro_batch, recompute=recompute)
