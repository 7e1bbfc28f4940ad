"""What does autograd keep for the backward pass, and where?  Introduced in chapter 9.

``saved_bytes`` runs a function and tells what its graph keeps. A storage counts once, however many
tensors look at it, and with all its bytes. Sizes are decimal: 1 MB = 1,000,000 bytes.

A ``TorchDispatchMode`` sees each storage when an operation returns it, and a weak reference when
it goes; ``saved_tensors_hooks`` see what the graph keeps. Nothing is kept alive for the count.

Blind spots: scratch memory inside a kernel, what an allocator rounds up or holds in reserve, and
what was made outside PyTorch.

Source: https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from bpkit.arguments import unlisten
from bpkit.batches import tensors_in
from bpkit.graph import Node, _in_order, plain, unseen
from bpkit.interrupt import together
from bpkit.preserve import preserve
from bpkit.record import Line, Recording, _Recorder, reader_line
from bpkit.style import Table

__all__ = ["Kept", "SavedBytes", "saved_bytes", "size_of"]


@dataclass
class Kept:
    """One storage that the graph keeps.

    ``kind`` is "activation" (made by the forward pass), "parameter" or "input" (was there before,
    so that to keep it costs nothing). ``operation`` and ``name`` say which node of the graph keeps
    it as what (softmax, result); ``also`` says so for the others. ``module`` and ``line`` are
    where the forward pass stood. ``shape`` and ``dtype`` are of the tensor, ``nbytes`` of its
    storage.
    """

    kind: str
    operation: str
    name: str
    module: str | None
    line: Line | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    also: list[str] = field(default_factory=list)

    @property
    def keeper(self) -> str:
        """Operation and name in one, such as "softmax result"."""
        return f"{self.operation} {self.name}".strip()


@dataclass
class SavedBytes:
    """What a graph keeps for its backward pass: ``rows`` in the order of the forward pass."""

    rows: list[Kept]
    # Modules that consist of no others; their number in a path tells more than a star.
    _single: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def bytes(self) -> int:
        """Of the activations: what the graph costs on top of what was there before."""
        return self._of("activation")

    @property
    def parameters(self) -> int:
        """Bytes of kept parameters, which were there before."""
        return self._of("parameter")

    @property
    def inputs(self) -> int:
        """Bytes of kept inputs, which were there before."""
        return self._of("input")

    def _of(self, kind: str) -> int:
        return sum(row.nbytes for row in self.rows if row.kind == kind)

    def by(self, what: str) -> dict[str, int]:
        """Bytes of the activations by "operation", "module", "line" or "dtype", largest first."""
        if what not in ("operation", "module", "line", "dtype"):
            raise ValueError(f"by={what!r}: expected 'operation', 'module', 'line' or 'dtype'")
        sums: Counter[str] = Counter()
        for row in self.rows:
            if row.kind == "activation":
                sums[str(row.keeper if what == "operation" else getattr(row, what))] += row.nbytes
        return dict(sums.most_common())

    def table(self, most: int = 8) -> Table:
        """The largest places among the activations; blocks that repeat count together."""
        groups: dict[tuple[str, str], list[Kept]] = {}
        for row in self.rows:
            if row.kind == "activation":
                groups.setdefault((self._place(row.module), row.keeper), []).append(row)
        ranked = sorted(groups.items(), key=lambda item: -sum(row.nbytes for row in item[1]))
        lines = []
        for (place, keeper), kept in ranked[:most]:
            size, first = sum(row.nbytes for row in kept), max(kept, key=lambda row: row.nbytes)
            what = f"{len(kept)} × {first.shape} {short(first.dtype)}"
            lines.append([place, keeper, size_of(size), share(size, self.bytes), what])
        if len(ranked) > most:
            rest = sum(row.nbytes for _, kept in ranked[most:] for row in kept)
            told = f"{len(ranked) - most} smaller places"
            lines.append(["(others)", told, size_of(rest), share(rest, self.bytes), ""])
        return Table(["kept in", "by", "bytes", "share", "what"], lines)

    def _place(self, module: str | None) -> str:
        if not module:
            return "(outside of modules)" if module is None else "(model)"
        *path, last = module.split(".")
        stars = [re.sub(r"^\d+$", "*", part) for part in path]
        return ".".join([*stars, last if module in self._single else re.sub(r"^\d+$", "*", last)])

    def __str__(self) -> str:
        return f"{self._head()}\n\n{self.table()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._head())}</p>{self.table()._repr_html_()}"

    def _head(self) -> str:
        count = sum(row.kind == "activation" for row in self.rows)
        return (
            f"The graph keeps {size_of(self.bytes)} of activations in {count} storages; beside "
            f"them, at no cost, {size_of(self.parameters)} of parameters and "
            f"{size_of(self.inputs)} that was there before."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        rows = [
            {
                **vars(row),
                "line": row.line and str(row.line),
                "shape": plain(row.shape),
                "dtype": str(row.dtype),
                "also": list(row.also),
            }
            for row in self.rows
        ]
        sizes = {"bytes": self.bytes, "parameters": self.parameters, "inputs": self.inputs}
        return {**sizes, "rows": rows}


def saved_bytes(fn: Callable, *args: Any, **kwargs: Any) -> SavedBytes:
    """Runs ``fn(*args, **kwargs)`` once and tells what autograd keeps for its backward pass.

    Counts what is still kept when ``fn`` returns, through the tensors it returns or that it stored
    elsewhere; if ``fn`` ran its backward pass, that is nothing. Of a checkpointed block only the
    inputs are kept. ``saved_tensors_hooks`` inside ``fn`` hide what they take.

    If ``fn`` is a module, it comes out as it went in; otherwise random state, grad mode and
    default dtype do. The graph is the one you would get without counting: kept tensors that were
    changed in place are refused by a backward pass inside ``fn`` as always.

    Example:
        >>> x = torch.ones(1000, requires_grad=True)
        >>> saved = saved_bytes(lambda: x.exp().sin().sum())
        >>> saved.bytes, saved.by("operation")
        (4000, {'exp result': 4000})
    """
    model = fn if isinstance(fn, nn.Module) else None
    watch = Watch(model)
    kept = nn.Module() if model is None else model
    with preserve(kept), together(watch, watch.forward()):
        output = fn(*args, **kwargs)
        return watch.saved(output)


class _Packed:
    """A tensor in the hands of the graph; gone when the graph lets go of it."""

    def __init__(self, tensor: Tensor, **told: Any):
        # Detached: a result that points to its own graph node would never be freed.
        self.tensor, self.version = tensor.detach(), tensor._version
        self.told = told

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:  # autograd leaves this check to the hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: shape {tuple(self.tensor.shape)}, kept in {self.told['line']}"
            )
        return self.tensor


class Watch(TorchDispatchMode):
    """Storages as they come and go, and inside :meth:`forward` also what the graph keeps."""

    def __init__(self, model: nn.Module | None = None):
        super().__init__()
        self.model = model
        self.live = self.peak = 0
        self._made: dict[int, list] = {}  # address -> [bytes, weak reference], while it is there
        self._packed: list[weakref.ref[_Packed]] = []
        self._owned = set(map(address_of, all_storages(model.parameters()))) if model else set()
        self._single: set[str] = set()
        if model is not None:
            self._name_single(model)

    def _name_single(self, model: nn.Module, start: str = "") -> None:
        parts = model.named_modules()
        self._single |= {f"{start}{name}" for name, part in parts if not [*part.children()]}

    def __exit__(self, kind, error, trace) -> None:
        super().__exit__(kind, error, trace)
        unlisten(trace)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        storages = all_storages(tree_leaves(result))
        if not self._made.keys() >= set(map(address_of, storages)):
            # torch.tensor(...) is first seen here, as the argument and the result.
            fresh = function is torch.ops.aten.lift_fresh.default
            given = () if fresh else all_storages(tree_leaves((arguments, keywords)))
            given = set(map(address_of, given))
            storages = [storage for storage in storages if address_of(storage) not in given]
        for storage in storages:
            self._seen(storage)
        return result

    def _seen(self, storage: torch.UntypedStorage) -> None:
        address, size = address_of(storage), storage.nbytes()
        if address not in self._made:
            self._made[address] = [0, weakref.ref(storage, lambda _: self._gone(address))]
        self.live += size - self._made[address][0]  # `out=` and resize_ change the size
        self._made[address][0] = size
        self.peak = max(self.peak, self.live)

    def _gone(self, address: int) -> None:
        self.live -= self._made.pop(address)[0]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What autograd keeps is noted in here, with module and line."""
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():
            raise RuntimeError(
                "saved_tensors_hooks are disabled here, and what autograd keeps is counted by "
                "them: call this outside of disable_saved_tensors_hooks"
            )
        modules = _Recorder(Recording(None), self.model)
        self._modules = modules.stack

        def entered(module: nn.Module, _: Any) -> None:
            """Names for the parts of a model that was not given, when it is called."""
            names = modules.module_names
            if not modules.stack and id(module) not in names and [*module.children()]:
                start = f"{type(module).__name__}." if names else ""
                for name, part in module.named_modules():
                    names[id(part)] = f"{start}{name}".rstrip(".")
                self._name_single(module, start)

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(entered).remove)
            stack.callback(modules.stop)
            modules.watch_modules()
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._pack, _Packed.unpack)
            )
            yield

    def _pack(self, tensor: Tensor) -> _Packed:
        frame = sys._getframe(1)
        line, inside = reader_line(frame), False
        while frame is not None and not inside:
            inside = frame.f_code.co_filename == checkpoint.__file__
            frame = frame.f_back
        with unseen():
            owned = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
            packed = _Packed(
                tensor,
                owned=owned,
                line=line,
                module=self._modules[-1] if self._modules else None,
                keeper=("checkpoint", "input") if inside else ("unknown", ""),
            )
        self._packed.append(weakref.ref(packed))
        return packed

    @unseen
    def saved(self, output: Any) -> SavedBytes:
        """What is kept now, while ``output`` is held; names from the graph behind it."""
        keepers, attributes = _keepers(output)
        alive = [packed for packed in (ref() for ref in self._packed) if packed is not None]
        kept = [(p.tensor, keepers.get(id(p), p.told["keeper"]), p.told) for p in alive]
        # A custom function may put a tensor on `ctx` itself, past the hooks.
        nowhere = {"owned": False, "line": None, "module": None}
        kept += [(tensor, keeper, nowhere) for tensor, keeper in attributes]
        found: list[Kept] = []
        first: dict[int, Kept] = {}
        for tensor, (operation, name), told in kept:
            sizes = {address_of(s): s.nbytes() for s in storages(tensor)}
            new = sizes.keys() - first.keys()
            if not new:
                for owner in {id(first[a]): first[a] for a in sizes}.values():
                    owner.also.append(f"{operation} {name}".strip())
                continue
            owned = told["owned"] or self._owned & sizes.keys()
            kind = "activation" if new <= self._made.keys() else "input"
            place = (told["module"], told["line"], tuple(tensor.shape), tensor.dtype)
            size = sum(sizes[address] for address in new)
            row = Kept("parameter" if owned else kind, operation, name, *place, size)
            first.update(dict.fromkeys(new, row))
            found.append(row)
        return SavedBytes(found, frozenset(self._single))


def _keepers(output: Any) -> tuple[dict[int, tuple[str, str]], list[tuple[Tensor, tuple]]]:
    """For each packed tensor the node that keeps it, and as what; tensors on ``ctx``."""
    starts = [tensor.grad_fn for _, tensor in tensors_in(output) if tensor.grad_fn is not None]
    keepers, attributes = {}, []
    for function in _in_order(starts):
        node = Node(0, "operation", type(function).name(function))
        for attribute in dir(type(function)):
            if attribute.startswith("_raw_saved_"):
                name = attribute.removeprefix("_raw_saved_")
                raw = getattr(function, attribute)
                several = isinstance(raw, list | tuple)
                for number, saved in enumerate(raw if several else [raw]):
                    told = f"{name}[{number}]" if several else name
                    keepers[id(getattr(saved, "data", None))] = (node.short, told)
        for name, value in getattr(function, "__dict__", {}).items():
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, Tensor):
                    attributes.append((item, (node.short, f"ctx.{name}")))
    return keepers, attributes


@unseen
def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Where the data is: several places for a sparse tensor or a wrapper around tensors."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return all_storages(getattr(tensor, name) for name in names)
    if tensor.layout == torch.sparse_coo:
        return all_storages([tensor._indices(), tensor._values()])
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return all_storages([tensor.crow_indices(), tensor.col_indices(), tensor.values()])
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return all_storages([tensor.ccol_indices(), tensor.row_indices(), tensor.values()])
    try:
        return [tensor.untyped_storage()]
    except (NotImplementedError, RuntimeError):
        return []  # without a storage that one could look at: mkldnn, functorch wrappers


def all_storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Of all tensors among ``values``, each once."""
    found = (s for value in values if isinstance(value, Tensor) for s in storages(value))
    return list({address_of(storage): storage for storage in found}.values())


def address_of(storage: torch.UntypedStorage) -> int:
    return storage._cdata


def bytes_of(values: Iterable[Any]) -> int:
    return sum(storage.nbytes() for storage in all_storages(values))


def size_of(size: float) -> str:
    """A number of bytes as text, in decimal units.

    >>> size_of(1234567)
    '1.23 MB'
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    places = 0 if units[0] == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{places}f} {units[0]}"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
