"""What is in a batch?  Introduced in chapter 8.

A batch may be a tensor, a tuple, a list, a dictionary, a dataclass, a named tuple or any object
that keeps tensors as attributes, nested as you like.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def items_in(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor | np.ndarray]]:
    """Each tensor, and each array and number that can hold a NaN, with the expression that reads
    it: ``batch[0]``, ``batch['x']``. Numbers come as arrays."""
    if isinstance(batch, Tensor | np.ndarray):
        if isinstance(batch, Tensor) or batch.dtype.kind in "fc":
            yield path, batch
    elif isinstance(batch, float):
        yield path, np.array(batch)
    elif isinstance(batch, Mapping):
        for key, item in batch.items():
            yield from items_in(item, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        names = getattr(batch, "_fields", None)
        for k, item in enumerate(batch):
            yield from items_in(item, f"{path}.{names[k]}" if names else f"{path}[{k}]")
    elif hasattr(batch, "__dict__") and not isinstance(batch, type | nn.Module):
        for name, item in vars(batch).items():
            yield from items_in(item, f"{path}.{name}")


def tensors_in(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors among them."""
    return ((path, item) for path, item in items_in(batch) if isinstance(item, Tensor))


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
    if hasattr(batch, "__dict__") and not isinstance(batch, type | nn.Module):
        made = copy.copy(batch)
        for name, value in vars(batch).items():
            object.__setattr__(made, name, replaced(value, change, f"{path}.{name}"))
        return made
    return batch


def entries(tensor: Tensor) -> Tensor:
    """The numbers that a tensor holds: of a sparse one those that are written down, of a nested
    one those of all its parts in a row."""
    if tensor.layout == torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.is_nested and tensor.layout == torch.strided:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    return tensor if tensor.layout == torch.strided else tensor.values()


def rows(batch: Any) -> int | None:
    """The size of the first dimension that all tensors of the batch with dimensions share."""
    sizes = {tensor.size(0) for _, tensor in tensors_in(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None
