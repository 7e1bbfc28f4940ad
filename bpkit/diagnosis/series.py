"""How do thousands of steps fit into bounded memory?  Tensors now, numbers later, thinned rows.

Reading a number out of a tensor makes the program wait for the device, so rows are kept as they
come, tensors included, and turned into numbers some hundred at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bpkit.graph import unseen


class Series:
    """Rows (dictionaries) of a run: all of them up to ``limit``, then every 2nd, every 4th, …"""

    def __init__(self, limit: int = 4096, waiting: int = 256):
        self.limit, self.waiting = limit, waiting
        self.stride, self.count = 1, 0
        self._rows: list[dict[str, Any]] = []
        self._new: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Keep ``row``; returns the rows that became numbers meanwhile, mostly none."""
        self._new.append(row)
        return self.settle() if len(self._new) >= self.waiting else []

    def settle(self) -> list[dict[str, Any]]:
        """Turn the tensors of new rows into numbers, thin if there are too many rows."""
        new, self._new = self._new, []
        numbers(new)
        for row in new:
            if self.count % self.stride == 0:
                self._rows.append(row)
            self.count += 1
        while len(self._rows) > self.limit:
            self._rows, self.stride = self._rows[::2], self.stride * 2
        return new

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._rows


@unseen
def numbers(rows: list[dict[str, Any]]) -> None:
    """Replace the tensors in ``rows`` by floats or lists of floats; one transfer for each kind."""
    kinds: dict[Any, list[tuple[Any, Any, Tensor]]] = {}
    for row in rows:
        for key, value in row.items():
            places = [(None, value)]
            if isinstance(value, dict | list):
                places = value.items() if isinstance(value, dict) else enumerate(value)
            for place, item in places:
                if isinstance(item, Tensor):
                    holder, name = (row, key) if place is None else (value, place)
                    kind = (item.dtype, item.device, tuple(item.shape))
                    kinds.setdefault(kind, []).append((holder, name, item))
    for found in kinds.values():
        values = torch.stack([item for _, _, item in found]).double().tolist()
        for (holder, name, _), value in zip(found, values, strict=True):
            holder[name] = value
