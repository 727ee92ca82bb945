"""Batches from the host to the device of this rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def move(thing: Any, device: torch.device) -> Any:
    """The tensors in tuples, lists, named tuples, dicts and dataclasses, copied to the device without waiting.

    Other objects with a `to(device)` method, such as a tokenizer's batch, are moved by it.
    """
    if isinstance(thing, Tensor):
        return thing.to(device, non_blocking=True)
    if isinstance(thing, dict):
        moved = {key: move(value, device) for key, value in thing.items()}
        return moved if type(thing) is dict else _like(thing, moved, device)
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(move(value, device) for value in thing))
    if isinstance(thing, list | tuple):
        return type(thing)(move(value, device) for value in thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = [field for field in dataclasses.fields(thing) if field.init]
        return dataclasses.replace(thing, **{f.name: move(getattr(thing, f.name), device) for f in fields})
    if callable(to := getattr(thing, "to", None)):
        return to(device)
    return thing


def find_tensors(thing: Any) -> list[Tensor] | None:
    """The tensors that `move` copies by itself; None if a part is moved by a `to` of its own, which may copy others."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        return _find_all(thing.values()) if type(thing) is dict or not hasattr(thing, "to") else None
    if isinstance(thing, list | tuple):
        return _find_all(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return _find_all(getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init)
    return None if callable(getattr(thing, "to", None)) else []


def _find_all(parts: Iterable[Any]) -> list[Tensor] | None:
    found: list[Tensor] = []
    for part in parts:
        tensors = find_tensors(part)
        if tensors is None:
            return None
        found += tensors
    return found


def _like(thing: Any, moved: dict[Any, Any], device: torch.device) -> Any:
    """A subclass of dict stays one: by its own `to`, else made from the moved items."""
    return thing.to(device) if callable(getattr(thing, "to", None)) else type(thing)(moved)
