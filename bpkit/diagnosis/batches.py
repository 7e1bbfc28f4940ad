"""What is in a batch?  Tensors in whatever a DataLoader or a list hands over.

A batch may be a tensor, a tuple, a list, a dictionary, a dataclass, a named tuple or any object
that keeps tensors as attributes, nested as you like.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Each tensor in ``batch`` with the expression that reads it: ``batch[0]``, ``batch['x']``."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors_in(value, f"{path}[{key!r}]")
    elif hasattr(batch, "_fields"):
        for name in batch._fields:
            yield from tensors_in(getattr(batch, name), f"{path}.{name}")
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from tensors_in(value, f"{path}[{index}]")
    elif hasattr(batch, "__dict__") and not isinstance(batch, torch.nn.Module | type):
        for name, value in vars(batch).items():
            yield from tensors_in(value, f"{path}.{name}")


def replaced(batch: Any, change: Callable[[str, Tensor], Tensor], path: str = "batch") -> Any:
    """A copy of ``batch`` in which each tensor is ``change(path, tensor)``."""
    if isinstance(batch, Tensor):
        return change(path, batch)
    if hasattr(batch, "_fields"):
        return type(batch)(
            *(replaced(getattr(batch, n), change, f"{path}.{n}") for n in batch._fields)
        )
    if isinstance(batch, list | tuple):
        items = [replaced(value, change, f"{path}[{i}]") for i, value in enumerate(batch)]
        return items if isinstance(batch, list) else tuple(items)
    if isinstance(batch, Mapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = replaced(value, change, f"{path}[{key!r}]")
        return made
    if hasattr(batch, "__dict__") and not isinstance(batch, torch.nn.Module | type):
        made = copy.copy(batch)
        for name, value in vars(batch).items():
            object.__setattr__(made, name, replaced(value, change, f"{path}.{name}"))
        return made
    return batch


def rows(batch: Any) -> int | None:
    """The size of the first dimension that all tensors of the batch with dimensions share."""
    sizes = {tensor.shape[0] for _, tensor in tensors_in(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None
