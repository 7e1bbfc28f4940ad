"""How do I leave everything as I found it?  Introduced in chapter 8.

A diagnosis trains the reader's model for a few steps, on the reader's own objects. Afterwards no
bit may differ, whatever happened in between.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from bpkit.graph import unseen
from bpkit.interrupt import Unbroken

__all__ = ["preserve"]


def preserve(
    model: nn.Module, *optimizers: torch.optim.Optimizer, others: Any = ()
) -> AbstractContextManager[None]:
    """Whatever runs in this block, ``model`` and ``optimizers`` come out of it as they went in.

    On exit, also after an exception or Ctrl-C, these are back: parameters and buffers (the same
    objects, bit for bit, also where a name was bound to another one), their ``.grad`` (the same
    object or ``None``) and ``requires_grad``; train/eval flags and all other attributes of the
    modules, also of modules in a plain list; the hooks of modules, parameters and optimizers; the
    optimizers' state and parameter groups; the state of PyTorch's, NumPy's and Python's random
    numbers; grad mode, default dtype, anomaly mode, deterministic algorithms and the filters of
    warnings. The copies take as much memory as all of that. ``others`` may hold further tensors
    and generators, in a list or a dictionary.

    A Ctrl-C that comes while things are put back is heard when they are.

    Not covered: lazy modules that have no shape yet (if the block gives them one, they keep it);
    the graph of a tensor that had one and was changed in place; the inside of attributes that are
    no tensor, array, generator, module, list, tuple, dict or set; and everything that is in none
    of the arguments: files, loaders, other models.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> with preserve(model):
        ...     _ = torch.nn.init.zeros_(model.weight)
        >>> bool((model.weight == 0).all())
        False
    """
    return _Preserved((model, *optimizers, others))


class _Preserved(Unbroken):
    def __init__(self, things: tuple[Any, ...]):
        self._things = things

    def _enter(self) -> None:
        self._undo: list[Callable[[], None]] = []
        _save(self._things, {}, self._undo)
        self._undo.append(_save_modes())

    def _leave(self, *_: Any) -> None:
        failed: Exception | None = None
        for restore in self._undo:
            try:
                restore()
            except Exception as error:  # the others still have to come back
                failed = failed or error
        self._undo.clear()
        if failed is not None:
            raise failed


def _save(value: Any, seen: dict[int, Any], undo: list[Callable[[], None]]) -> None:
    """Note down how to bring ``value``, and all that it holds, back to what it is now."""
    if id(value) in seen:  # shared, or one that contains itself
        return
    inside: Any = ()
    if isinstance(value, Tensor):
        undo.append(_save_tensor(value))
        inside = (getattr(value, "__dict__", {}),)
    elif isinstance(value, nn.Module | torch.optim.Optimizer):
        if isinstance(value, LazyModuleMixin) and value.has_uninitialized_params():
            return
        inside = (vars(value),)
    elif isinstance(value, dict):
        undo.append(_refill(value, value.update))
        inside = [*value, *value.values()]
    elif isinstance(value, set):
        undo.append(_refill(value, value.update))
    elif isinstance(value, list | deque):
        undo.append(_refill(value, value.extend))
        inside = value
    elif isinstance(value, tuple):
        inside = value
    elif isinstance(value, np.ndarray):
        undo.append(partial(np.copyto, value, value.copy()))
    elif isinstance(value, torch.Generator):
        undo.append(partial(value.set_state, value.get_state()))
    elif isinstance(value, np.random.Generator):
        undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
    elif isinstance(value, random.Random):
        undo.append(partial(value.setstate, value.getstate()))
    else:
        return
    seen[id(value)] = value
    for item in list(inside):
        _save(item, seen, undo)


def _refill(holder: Any, fill: Callable[[Any], None]) -> Callable[[], None]:
    """The same container again, for others hold it: a handle that removes a hook, for instance."""
    content = copy.copy(holder)

    def restore() -> None:
        holder.clear()
        fill(content)

    return restore


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@unseen
def _save_tensor(tensor: Tensor) -> Callable[[], None]:
    data, flag, leaf = tensor.data, tensor.requires_grad, tensor.is_leaf
    values = _distinct(data).clone()
    gradient = tensor.grad if leaf else None
    gradient_data = None if gradient is None else gradient.data
    gradient_values = None if gradient is None else gradient_data.clone()
    hooks = {store: copy.copy(getattr(tensor, store)) for store in _HOOKS}

    @unseen
    @torch.no_grad()
    def restore() -> None:
        if leaf and not tensor.is_leaf:  # changed in place by something that is tracked
            tensor.detach_()
        tensor.data = data  # undoes another dtype, device or storage
        if leaf:
            tensor.requires_grad_(flag)
        _distinct(data).copy_(values)
        if gradient is not None:
            # Through `data`: the graph of a second derivative may have kept it, in this version.
            gradient.data = gradient_data
            gradient_data.copy_(gradient_values)
        if leaf:
            tensor.grad = gradient
        for store, content in hooks.items():
            table = getattr(tensor, store)
            if table is not None:
                table.clear()
                table.update(content or {})

    return restore


def _distinct(tensor: Tensor) -> Tensor:
    """Each place in memory once, so that one can write to an expanded tensor."""
    if tensor.layout == torch.strided and not tensor.is_nested:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _save_modes() -> Callable[[], None]:
    """Random numbers, and what holds for this thread."""
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy = np.random.get_state()  # noqa: NPY002  (the global one is what readers' code uses)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filters, content = warnings.filters, warnings.filters[:]

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.autograd.set_detect_anomaly(*anomaly)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        if warnings.filters is not filters or filters != content:
            filters[:] = content
            warnings.filters = filters
            with warnings.catch_warnings():  # says that they have changed
                pass

    return restore
