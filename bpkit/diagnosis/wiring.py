"""What holds what?  Parameters of a model, leaves of a graph, gradients as norms.

Looks only: nothing here changes or keeps a tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as Function
from torch.nn.parameter import is_lazy

_PLAIN = (torch.float32, torch.float64)
_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers"}


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Name, parameter and module of each parameter that has a shape; shared ones once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen or is_lazy(parameter):
                continue
            seen.add(id(parameter))
            yield f"{prefix}.{name}" if prefix else name, parameter, module


def is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def norms(tensors: list[Tensor], order: float = 2.0) -> list[Tensor]:
    """The norm of each, as tensors: nobody waits for a device."""
    if not all(t.dtype in _PLAIN and t.layout is torch.strided for t in tensors):
        tensors = [_values(tensor) for tensor in tensors]
    if any(t.requires_grad for t in tensors):
        tensors = [tensor.detach() for tensor in tensors]
    if order != 2 and not all(t.numel() for t in tensors):
        return [torch.linalg.vector_norm(t, order) if t.numel() else t.sum() for t in tensors]
    return list(torch._foreach_norm(tensors, order)) if tensors else []


def _values(tensor: Tensor) -> Tensor:
    """As real numbers with room for a norm: half precision has none for a large gradient."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor if tensor.dtype in _PLAIN else tensor.float()


def dense(tensor: Tensor) -> Tensor:
    """A sparse gradient with its zeros; others as they are."""
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def listed(names: Iterable[str], most: int = 4) -> str:
    """For a finding: the first few of them."""
    names = list(names)
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def stacked(values: list[Tensor]) -> Tensor | None:
    """One tensor of the numbers, on the device of the first."""
    if not values:
        return None
    device, dtype = values[0].device, values[0].dtype
    return torch.stack([v if v.device == device else v.to(device) for v in values]).to(dtype)


def products(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The scalar product of each pair."""
    found = []
    for a, b in pairs:
        if a.is_sparse or b.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        found.append(torch.dot(_values(a).reshape(-1), _values(b).reshape(-1)))
    return found


def walk(roots: Iterable[Function], limit: int) -> tuple[int, list[Tensor], bool]:
    """The graph behind ``roots``: how many operations, which leaves, and whether that is all."""
    seen: set[Function] = set()
    leaves: dict[int, Tensor] = {}
    todo = list(roots)
    while todo and len(seen) < limit:
        function = todo.pop()
        if function is None or function in seen:
            continue
        if hasattr(function, "variable"):
            leaves[id(function.variable)] = function.variable
            continue
        seen.add(function)
        todo += [source for source, _ in function.next_functions]
    return len(seen), list(leaves.values()), not todo


def deepest(function: Function, hops: int = 20) -> Function:
    """An operation far behind ``function``, close to the data."""
    for _ in range(hops):
        sources = (source for source, _ in function.next_functions)
        below = [s for s in sources if s is not None and not hasattr(s, "variable")]
        if not below:
            break
        function = below[0]
    return function


def root_of(tensor: Tensor) -> tuple[str, float | None]:
    """The operation that made a loss, and the constant that it multiplied by, if one did."""
    function = tensor.grad_fn
    if function is None:
        return "leaf", None
    name = function.name()
    if not name.startswith(("DivBackward", "MulBackward")):
        return name, None
    others = [source for source, _ in function.next_functions if source is None]
    try:
        constants = (function._saved_other, function._saved_self if name[0] == "M" else None)
    except RuntimeError:  # its saved tensors are freed
        return name, None
    known = [
        c for c in constants if isinstance(c, Tensor) and c.numel() == 1 and not c.requires_grad
    ]
    if not others or not known:
        return name, None
    value = float(known[0])
    return name, value if name[0] == "M" else 1 / value if value else None


def registered(parameter: Tensor) -> list[tuple[str, bool]]:
    """Under which name, and in training mode or not, modules anywhere hold this parameter."""
    return [
        (next(name for name, value in held.items() if value is parameter), owner["training"])
        for held in gc.get_referrers(parameter)
        if isinstance(held, dict)
        for owner in gc.get_referrers(held)
        if isinstance(owner, dict) and owner.get("_parameters") is held
    ]


def held_at(model: nn.Module, leaf: Tensor) -> str | None:
    """Under which attribute of the model a leaf is found that is no parameter of it."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _INTERNAL:
                continue
            for path, tensor in _tensors(value, name if name != "_buffers" else ""):
                if tensor is leaf or (
                    tensor.grad_fn is not None
                    and any(found is leaf for found in walk([tensor.grad_fn], 50)[1])
                ):
                    path = path.lstrip(".")
                    return f"{prefix}.{path}" if prefix else path
    return None


def _tensors(value: Any, path: str, depth: int = 4) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            yield f"{path}.{name}", parameter
    elif depth and isinstance(value, dict):
        for key, item in list(value.items()):
            yield from _tensors(item, f"{path}[{key!r}]" if path else str(key), depth - 1)
    elif depth and isinstance(value, list | tuple | set):
        for index, item in enumerate(list(value)[:1000]):
            yield from _tensors(item, f"{path}[{index}]", depth - 1)
    elif (
        depth and type(value).__module__ not in ("builtins", "torch") and hasattr(value, "__dict__")
    ):
        for key, item in list(vars(value).items()):
            yield from _tensors(item, f"{path}.{key}", depth - 1)
