"""How a training is split over its ranks, in one vocabulary: a word, or the number of ranks along each dimension.

The request side checks it before a job is queued, and training when it opens: the rules are here, once.
"""

from __future__ import annotations

import math

from hpcddp.errors import RequestError, nearest
from hpcddp.record import TYPE_CHECKING, Record
from hpcddp.units import assign, format_count, read_number, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The words for the usual splits.
WORDS = ("ddp", "zero1", "fsdp", "hsdp")
#: copies of the model; ranks that shard one; ranks that compute each layer together
DIMENSIONS = ("data", "shard", "tensor")
_ACROSS = "across_nodes"
_PIPELINE = "jobs/plain/pipeline.yaml, whose script uses torch.distributed.pipelining (docs/articles.md)"
_REST = -1


class Parallel(Record):
    """The requested split: one of WORDS, or degrees (-1: all ranks that are left). `where`: its source, for errors."""

    word: str
    degrees: tuple[tuple[str, int], ...] = ()
    across_nodes: bool = False
    where: str = "parallel"

    def __str__(self) -> str:
        """The value of an option or a variable: `fsdp`, `data=-1,shard=8`."""
        more = [f"{_ACROSS}=true"] if self.across_nodes else []
        return self.word or ",".join([*(f"{name}={degree}" for name, degree in self.degrees), *more])

    def format(self) -> str:
        """The text that is typed at its source: `--parallel fsdp`, `parallel: data=-1,shard=8`, or Python's."""
        if self.where.startswith("--") or " in " in self.where:
            return assign(self.where, str(self))
        return f'parallel="{self}"'

    def typed(self, word: str) -> str:
        """The text that is typed at its source for another word."""
        return self._replace(word=word, degrees=()).format()


class Split(Record):
    """The decided split. `kind`: how the data ranks hold the model, one of WORDS.

    `rows`: the data ranks that hold one copy of the model together, copy by copy. The `tensor` ranks of one data
    rank see the same samples.
    """

    kind: str
    rows: tuple[tuple[int, ...], ...]
    tensor: int = 1

    @property
    def data_size(self) -> int:
        """How many different parts of a global batch there are."""
        return len(self.rows) * len(self.rows[0])

    @property
    def is_sharded(self) -> bool:
        """The data ranks hold shards of the parameters."""
        return self.kind in {"fsdp", "hsdp"}

    @property
    def is_whole(self) -> bool:
        """Each rank holds every parameter with its whole gradient."""
        return not self.is_sharded and self.tensor == 1

    def __str__(self) -> str:
        more = f", tensor {self.tensor}" if self.tensor > 1 else ""
        copies = f" (data {len(self.rows)} x shard {len(self.rows[0])}{more})"
        return self.kind + (copies if self.is_sharded or more else "")


def read_parallel(value: object, where: str) -> Parallel:
    """Read a word, a mapping, or text: `data=-1,shard=8`. RequestError for anything else."""
    if isinstance(value, str) and "=" not in value:
        if value not in WORDS:
            example = Parallel("", (("data", _REST), ("shard", 8)), where=where).format()
            hint = f"one of {', '.join(WORDS)}{nearest(value, [*WORDS])}; or a mesh: {example}"
            raise RequestError(f"{where} {shorten(value)!r} is not known", _PIPELINE if value == "pipeline" else hint)
        return Parallel(value, where=where)
    items = _read_items(value, where)
    for name in items.keys() - {*DIMENSIONS, _ACROSS}:
        hint = f"the dimensions: {', '.join(DIMENSIONS)}{nearest(name, [*DIMENSIONS])}"
        raise RequestError(f"{where} has no dimension {shorten(name)!r}", _PIPELINE if name == "pipeline" else hint)
    across = str(items.pop(_ACROSS, False)).lower() == "true"
    degrees = tuple((name, _read_degree(name, items[name], where)) for name in DIMENSIONS if name in items)
    parallel = Parallel("", degrees, across, where)
    if not degrees:
        raise RequestError(f"{where} names no dimension", parallel._replace(degrees=(("data", _REST),)).format())
    return parallel


def _read_items(value: object, where: str) -> dict[str, object]:
    """The items of a mapping, or of text: `data=-1,shard=8`."""
    if isinstance(value, str):
        pairs = (item.partition("=") for item in value.split(","))
        return {name.strip(): degree.strip() for name, _, degree in pairs}
    items = getattr(value, "items", None)
    if items is None:
        example = Parallel("fsdp", where=where).format()
        raise RequestError(f"{where} is a {type(value).__name__}, neither a word nor a mapping", example)
    return {str(name): degree for name, degree in items()}


def _read_degree(name: str, value: object, where: str) -> int:
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    degree = _REST if text == str(_REST) else read_number(text)
    if not degree:
        example = Parallel("", ((name, 8),), where=where).format()
        what = f"{where}: {name} {shorten(str(value))!r} is no number of ranks"
        raise RequestError(what, f"{example}; -1 takes all ranks left")
    return degree


def plan_split(parallel: Parallel, hosts: Sequence[str]) -> Split:
    """Decide for ranks on these hosts, in the order of the ranks. RequestError for what does not come out even, and for
    what cannot be combined."""
    ranks = len(hosts)
    if parallel.word == "hsdp":
        return Split("hsdp", _rows_by_host(parallel, hosts))
    if parallel.word:
        one_row = (tuple(range(ranks)),)
        return Split(parallel.word, one_row if parallel.word == "fsdp" else tuple((rank,) for rank in range(ranks)))
    degrees = _fill(parallel, hosts)
    data, shard, tensor = degrees["data"], degrees["shard"], degrees["tensor"]
    is_sharded = "shard" in dict(parallel.degrees)
    if data > 1 and tensor > 1 and not is_sharded:
        fitted = parallel._replace(degrees=(("shard", _REST), ("tensor", tensor)))
        raise RequestError(
            f"{parallel.where}: data {data} with tensor {tensor} is DDP over tensor parallel, which DDP gets wrong"
            " without an error: its parameters leave the model, so that it is not trained and its checkpoint is empty",
            f"{fitted.format()}: FSDP over tensor parallel",
        )
    if tensor > 1 and not parallel.across_nodes:
        _check_inside_nodes(parallel, tensor, hosts)
    rows = tuple(tuple(range(copy * shard, (copy + 1) * shard)) for copy in range(data))
    if not is_sharded and tensor == 1:
        return Split("ddp", rows)
    return Split("hsdp" if data > 1 else "fsdp", rows, tensor)


def check_goes_with(split: Split, parallel: Parallel, *, exact: bool) -> None:
    """RequestError for exact mode, which needs whole layers, where ranks have parts of them."""
    if exact and split.tensor > 1:
        what = f"exact mode needs whole layers, and {parallel} divides them over {split.tensor} ranks"
        raise RequestError(what, parallel.typed("fsdp"))


def check_one_gpu(parallel: Parallel, gpus_per_rank: int) -> None:
    """RequestError unless each rank has the whole model, which alone can lie on several GPUs of a rank."""
    if parallel.word == "ddp" or (not parallel.word and all(d == 1 or name == "data" for name, d in parallel.degrees)):
        return
    raise RequestError(
        f"gpus_per_rank {gpus_per_rank} is for a model that its script puts on several GPUs of a rank, which only ddp"
        f" takes, and {parallel.where} is {parallel}",
        f"leave out gpus_per_rank: {parallel} splits the model over ranks of one GPU each; or {parallel.typed('ddp')}",
    )


def _rows_by_host(parallel: Parallel, hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The data ranks of each node."""
    rows = tuple(tuple(rank for rank, here in enumerate(hosts) if here == host) for host in dict.fromkeys(hosts))
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(f"{len(row)} on {hosts[row[0]]}" for row in rows)
        what = f"{parallel.where}: hsdp needs as many ranks on each node; there are {counts}"
        raise RequestError(what, f"{parallel.typed('fsdp')}, or nodes with the same number of ranks")
    return rows


def _fill(parallel: Parallel, hosts: Sequence[str]) -> dict[str, int]:
    """Every dimension's degree. RequestError if they are not as many ranks as there are."""
    degrees = dict.fromkeys(DIMENSIONS, 1) | dict(parallel.degrees)
    ranks, fixed = len(hosts), math.prod(degree for degree in degrees.values() if degree != _REST)
    rests = [name for name, degree in degrees.items() if degree == _REST]
    if len(rests) == 1 and ranks % fixed == 0:
        return degrees | {rests[0]: ranks // fixed}
    if not rests and ranks == fixed:
        return degrees
    raise RequestError(
        f"{parallel.where}: {parallel} does not give {format_count(ranks, 'rank')}, the product of all degrees;"
        f" one of them may be {_REST}",
        parallel.typed("fsdp"),
    )


def _check_inside_nodes(parallel: Parallel, tensor: int, hosts: Sequence[str]) -> None:
    for first in range(0, len(hosts), tensor):
        group = dict.fromkeys(hosts[first : first + tensor])
        if len(group) > 1:
            raise RequestError(
                f"{parallel.where}: tensor {tensor} would be on {' and '.join(group)}, and its ranks exchange in every"
                " layer: it belongs inside a node",
                f"{parallel.typed('fsdp')}; or, to have it so, {_ACROSS}: true beside it",
            )
