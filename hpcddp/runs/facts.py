"""What a run ran with, as flat facts by name: `torch`, `plan.global_batch`, `data.sha256`, `optimizer.momentum`."""

from __future__ import annotations

from typing import Any

# of plan.json, which also holds what only matters to a scheduler
_OF_JOB = ("site", "launcher", "command")


def describe_attempt(versions: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """The facts of an attempt's two files. What is not there is left out."""
    facts = {name: value for name, value in versions.items() if name not in {"ranks", "plan", "exact"}}
    plan = versions.get("plan") or {}
    facts |= _with_prefix("plan", {name: value for name, value in plan.items() if name != "data_size"})
    if ranks := versions.get("ranks"):
        hosts = list(dict.fromkeys(rank.get("host") for rank in ranks))
        facts |= {"ranks": len(ranks), "nodes": len(hosts), "hosts": ", ".join(map(str, hosts))}
    if versions:
        facts["mode"] = _mode(versions.get("exact"), plan)
    return facts | _with_prefix("data", data)


def describe_job(plan: dict[str, Any]) -> dict[str, Any]:
    """The facts of the job that plan.json has."""
    return _with_prefix("job", {name: plan[name] for name in _OF_JOB if name in plan})


def list_object_facts(objects: dict[str, Any]) -> dict[str, Any]:
    """The facts of the tracked objects in a checkpoint's manifest."""
    return {name: value for thing, about in objects.items() for name, value in _with_prefix(thing, about).items()}


def _mode(exact: Any, plan: dict[str, Any]) -> str:
    """`plain`, `exact`, or exact with its way of summing."""
    if isinstance(exact, str):
        return f"exact ({exact})"
    return "exact" if exact or plan.get("slices") else "plain"


def _with_prefix(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in values.items()}
