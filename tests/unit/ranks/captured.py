"""Reading tests/captures: environments recorded from real launchers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcddp.ranks.launch import Launch
from hpcddp.ranks.launcher import RankInfo

CAPTURES = Path(__file__).parents[2] / "captures"


def load(name: str) -> Any:
    """One capture, for example `ranks/nested-mpich2-in-openmpi1`."""
    return json.loads((CAPTURES / f"{name}.json").read_text())


def names() -> list[str]:
    """All launches in tests/captures/ranks."""
    return sorted(f"ranks/{path.stem}" for path in (CAPTURES / "ranks").glob("*.json"))


def env_of(name: str, index: int = 0) -> dict[str, str]:
    """The environment of one process of a capture."""
    env: dict[str, str] = dict(load(name)["processes"][index]["env"])
    return env


def resolve(
    env: Mapping[str, str], *, hostname: str | None = None, nodefile: str | None = None, live: bool = False
) -> RankInfo:
    """The place of a process with this environment."""
    return Launch(env, hostname, nodefile, live=live).info
