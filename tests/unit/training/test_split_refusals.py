"""What a split of the model over ranks would get wrong without an error is refused; what only looks like it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RunRanks = Callable[..., Any]


#: what is said of a case; empty: nothing
SAID: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("by batch, fsdp", "by batch, copies"),
        ("only 1 of 2 ranks have a gradient for first.weight in this step", "find_unused_parameters=True"),
    ),
    **dict.fromkeys(("unused on all", "passed through"), ()),
    **{f"Adagrad, {split}": () for split in ("ddp", "fsdp", "tensor")},
    "average, fsdp": ("an AveragedModel with parallel fsdp: it has whole weights",),
    "wrapped average, fsdp": (),
    **{f"whole squares, {split}": () for split in ("ddp", "tensor", "fsdp")},
}


def test_what_a_split_would_get_wrong_is_refused_and_what_is_right_is_not(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("split_bodies:refuse_all", 2, {"cases": [*SAID], "folder": str(tmp_path)}).check()
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {case: told[case] for case, words in SAID.items() if not words and told[case]} == {}
        assert {case: told[case] for case, words in SAID.items() if not all(one in told[case] for one in words)} == {}
