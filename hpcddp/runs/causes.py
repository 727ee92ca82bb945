"""Which recorded differences between two runs can explain that their numbers differ."""

from __future__ import annotations

from typing import Any, NamedTuple


class Context(NamedTuple):
    """Two runs that differ. `begins` is the first step whose loss differs, or would show different weights."""

    begins: int | None
    differed: tuple[str, ...]
    rate_differs_at: int | None
    first: dict[str, tuple[Any, ...]]
    second: dict[str, tuple[Any, ...]]

    def is_plain(self) -> bool:
        """Whether a part of either run was not exact."""
        return any("plain" in run.get("mode", ("plain",)) for run in (self.first, self.second))


class Cause(NamedTuple):
    """`names` are facts; one that ends with a dot stands for all that begin so."""

    names: tuple[str, ...]
    text: str
    acts_from: int = 1  # the first loss that it can change: the loss of step 1 knows nothing of the optimizer
    in_plain_runs: bool = False  # exact runs do not depend on it


_CAUSES = (
    Cause(("seed",), "another seed gives other first weights, another order of the data and other dropout"),
    Cause(("data.",), "the data are not the same"),
    Cause(("model.",), "the models are not the same"),
    Cause(("plan.global_batch",), "with another global batch each step sees other samples"),
    Cause(("matmul_precision", "cudnn_tf32"), "the numbers are computed in another precision"),
    Cause(("mode",), "an exact and a plain run, and exact runs with two ways of summing, add up in different orders"),
    Cause(("plan.slices",), "with another number of slices the samples are grouped, and added up, differently"),
    Cause(
        ("ranks", "plan.accumulation_steps"),
        "on other ranks or micro batches a plain run adds up in another order, takes BatchNorm's statistics over other"
        " samples and draws other dropout; exact runs do not",
        in_plain_runs=True,
    ),
    Cause(("parallel",), "another split of the model adds up in another order", in_plain_runs=True),
    Cause(
        ("nodes", "backend"),
        "the all-reduce of a plain run may add up in another order over other nodes or with another backend",
        in_plain_runs=True,
    ),
    Cause(("optimizer.", "scheduler."), "the updates are not the same", 2),
    Cause(("hpcddp",), "another version of hpcddp may compute differently"),
    Cause(
        ("torch", "torch_build", "torchvision", "cuda", "cudnn", "python"),
        "the kernels of another version may round differently",
    ),
    Cause(
        ("cpu", "cpu_capability", "threads", "gpu", "cudnn_benchmark", "deterministic"),
        "other hardware, threads or switches choose other kernels, which may round differently",
    ),
    Cause(("job.command",), "the commands are not the same"),
)

_UNKNOWN = (
    "nothing that was recorded explains it; not recorded are the training script, the data beyond three samples,"
    " and libraries other than torch"
)


def find_causes(context: Context) -> list[str]:
    """One line for each possible cause, with the facts that point to it; at least one line."""
    begins = context.begins or 1
    found = []
    for cause in _CAUSES:
        names = [name for name in context.differed if _is_among(name, cause.names)]
        if names and begins >= cause.acts_from and (context.is_plain() or not cause.in_plain_runs):
            found.append(f"{', '.join(names)}: {cause.text}")
    if context.rate_differs_at is not None and begins > context.rate_differs_at:
        found.append(f"lr: the learning rates differ from step {context.rate_differs_at} on")
    if any(gpu for run in (context.first, context.second) for gpu in run.get("gpu", ())) and not all(
        all(run.get("deterministic", (False,))) for run in (context.first, context.second)
    ):
        found.append("some GPU kernels add up in no fixed order without torch.use_deterministic_algorithms(True)")
    return found or [_UNKNOWN]


def _is_among(name: str, names: tuple[str, ...]) -> bool:
    return any(name == known or (known.endswith(".") and name.startswith(known)) for known in names)
