"""What did autograd record?  Introduced in chapter 1.

``trace`` walks from a tensor back along ``grad_fn`` and returns the graph as plain data: which
operations ran, on which inputs, what each of them keeps for its backward pass, and where the
parameters enter. It runs nothing and changes nothing. Autograd's own graph holds neither values
nor source lines; ``bpkit.record`` adds those.

Sources: https://docs.pytorch.org/docs/stable/notes/autograd.html (how the graph is encoded),
https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.Node (its nodes).
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as Function
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Edge", "Graph", "Node", "Saved", "trace"]

Names = Mapping[str, Tensor] | nn.Module | None

# Shown on nodes; every other operation shows its PyTorch name.
SYMBOLS = {"mul": "×", "add": "+", "sub": "−", "div": "÷", "neg": "−(·)", "mm": "@"}
SUPERSCRIPTS = str.maketrans("0123456789.-", "⁰¹²³⁴⁵⁶⁷⁸⁹˙⁻")


@dataclass(frozen=True)
class Saved:
    """A tensor that an operation keeps for its backward pass.

    ``state`` is "kept", "freed" (a backward pass has run and released it), "changed" (modified
    in place since, so that the backward pass will refuse to use it) or "packed" (in the hands of
    ``saved_tensors_hooks`` or of checkpointing: to look would be to unpack or compute it again).
    Shape, dtype, bytes and value are known only while it is kept.
    """

    name: str
    state: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    nbytes: int = 0
    value: Tensor | None = field(default=None, repr=False, compare=False)


@dataclass(eq=False)
class Node:
    """One node of the graph.

    ``kind`` is "operation", "leaf" (a tensor that collects a gradient in ``.grad``), "parameter"
    (a leaf that is an ``nn.Parameter``) or "constant" (an input without a gradient: a number, a
    tensor that is not tracked, or an argument left out). ``outputs`` holds shape (``None`` if
    nested) and dtype of each result. ``value``, ``gradient``, ``module`` and ``line`` are filled
    by ``bpkit.record``.
    """

    index: int
    kind: str
    operation: str = ""
    name: str | None = None
    outputs: tuple[tuple[tuple[int, ...] | None, torch.dtype], ...] = ()
    saved: tuple[Saved, ...] = ()
    function: Function | None = field(default=None, repr=False, compare=False)
    value: Any = field(default=None, repr=False)
    gradient: Tensor | None = field(default=None, repr=False)
    module: str | None = None
    line: Any = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the first result, where known."""
        return self.outputs[0][0] if self.outputs else None

    @property
    def short(self) -> str:
        """``MulBackward0`` -> ``mul``; a leaf or constant -> its name or its kind."""
        if self.kind != "operation":
            return self.name or self.kind
        stem = re.sub(r"Backward\d*$", "", self.operation.rsplit("::", 1)[-1])
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()

    @property
    def exponent(self) -> float | None:
        """The exponent of a power, where it is a number."""
        exponent = self.operation == "PowBackward0" and self.function._saved_exponent
        return None if isinstance(exponent, bool | complex) else exponent

    @property
    def symbol(self) -> str:
        """What a picture writes on the node."""
        if self.exponent is not None:
            return "(·)" + f"{self.exponent:g}".translate(SUPERSCRIPTS)
        return SYMBOLS.get(self.short, self.short) if self.kind == "operation" else self.short

    def __str__(self) -> str:
        shape = "" if self.shape is None else f" {self.shape}"
        return f"{self.kind} {self.short}{shape}"


@dataclass(eq=False)
class Edge:
    """Output ``output`` of node ``source`` is argument ``slot`` of node ``target``.

    Slots count the operation's differentiable arguments in the order in which autograd lists
    them. ``gradient`` is what the target sends back along this edge: one contribution of those
    that are summed at the source.
    """

    source: int
    target: int
    slot: int
    output: int = 0
    gradient: Tensor | None = field(default=None, repr=False)


class Graph:
    """A recorded computation, as :func:`bpkit.trace` and :meth:`bpkit.Recording.graph` return it.

    ``nodes`` are in topological order (inputs before users), ``edges`` point from an input to its
    user. It prints as :meth:`text` and shows as :meth:`draw` in a notebook.
    """

    def __init__(self, nodes: list[Node], edges: list[Edge], outputs: list[tuple[int, int]]):
        self.nodes = nodes
        self.edges = edges
        self.outputs = outputs
        self.backward_order: list[int] = []
        self._inputs: list[list[Edge]] = [[] for _ in nodes]
        self._consumers: list[list[Edge]] = [[] for _ in nodes]
        for edge in edges:
            self._inputs[edge.target].append(edge)
            self._consumers[edge.source].append(edge)

    @property
    def operations(self) -> list[Node]:
        """The operations that ran, in topological order."""
        return [node for node in self.nodes if node.kind == "operation"]

    @property
    def leaves(self) -> list[Node]:
        """Everything that collects a gradient, parameters included."""
        return [node for node in self.nodes if node.kind in ("leaf", "parameter")]

    @property
    def parameters(self) -> list[Node]:
        """The leaves that are parameters."""
        return [node for node in self.nodes if node.kind == "parameter"]

    @property
    def constants(self) -> list[Node]:
        """The inputs that get no gradient."""
        return [node for node in self.nodes if node.kind == "constant"]

    def topological(self) -> list[Node]:
        """Nodes so that each stands after all its inputs: the order of the forward pass."""
        return list(self.nodes)

    def inputs(self, node: Node) -> list[Edge]:
        """Edges into ``node``, by slot."""
        return self._inputs[node.index]

    def consumers(self, node: Node) -> list[Edge]:
        """Edges out of ``node``: one for each time that its result is used."""
        return self._consumers[node.index]

    def find(self, name: str) -> Node:
        """The node with this name; KeyError, with the names there are, if there is none."""
        for node in self.nodes:
            if node.name is not None and name in node.name.split(" = "):
                return node
        known = sorted(node.name for node in self.nodes if node.name)
        raise KeyError(f"no node is named {name!r}; named nodes: {known}")

    def labels(self) -> list[str]:
        """A label for each node: its name, or ``#1``, ``#2``, … for operations as they ran."""
        unnamed = {kind: count(1) for kind in ("operation", "leaf", "parameter")}
        labels = []
        for node in self.nodes:
            label = node.name or node.kind
            if not node.name and node.kind != "constant":
                start = "#" if node.kind == "operation" else f"{node.kind} "
                label = f"{start}{next(unnamed[node.kind])}"
            labels.append(label)
        return labels

    def text(self) -> str:
        """One line for each node, in topological order."""
        labels = self.labels()
        rows = []
        for node, label in zip(self.nodes, labels, strict=True):
            if node.kind == "constant":
                continue
            what = node.kind
            if node.kind == "operation":
                sources = [self.nodes[edge.source] for edge in self.inputs(node)]
                arguments = [
                    (s.kind == "constant" and show(s.value)) or labels[s.index] for s in sources
                ]
                if len(arguments) > 12:  # each row is as wide as the widest
                    arguments[6:] = [f"… {len(arguments) - 6} more"]
                what = f"{node.short}({', '.join(arguments)})"
            size = "?" if node.shape is None else times(node.shape) or "scalar"
            value, gradient = show(node.value), show(node.gradient)
            kept = ", ".join(s.name for s in node.saved if s.state == "kept")
            lost = ", ".join(f"{s.name} ({s.state})" for s in node.saved if s.state != "kept")
            keeps = f"keeps {kept}" if kept else lost and f"kept {lost}"
            shown = (value and f"value {value}", gradient and f"gradient {gradient}", keeps)
            rows.append((label, what, size, *shown))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = (
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w)
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """The graph as data for JSON; tensors become nested lists."""
        told = ("index", "kind", "operation", "short", "symbol", "shape", "value", "gradient")
        nodes = [
            {
                **{key: plain(getattr(node, key)) for key in (*told, "module")},
                "label": label,
                "saved": [
                    {"name": s.name, "state": s.state, "value": plain(s.value)} for s in node.saved
                ],
                "line": None if node.line is None else str(node.line),
            }
            for node, label in zip(self.nodes, self.labels(), strict=True)
        ]
        return {
            "nodes": nodes,
            "edges": [{k: plain(v) for k, v in vars(edge).items()} for edge in self.edges],
            "outputs": [index for index, _ in self.outputs],
            "backward_order": list(self.backward_order),
        }

    def draw(self, **options):
        """A matplotlib figure, read from top to bottom; see :func:`bpkit.drawing.draw`."""
        from bpkit.drawing import draw

        return draw(self, **options)

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.operations)} operations, {len(self.leaves)} leaves, "
            f"{len(self.constants)} constants, {len(self.edges)} edges)"
        )


def unseen(function: Callable | None = None) -> Any:
    """No recording, no other mode and no tensor subclass takes part in what runs in here.

    ``with unseen():`` or ``@unseen``. The context manager is one in C: an interrupt can't come
    between its two ends, as it can in one that is written in Python.
    """
    if function is None:
        return torch._C.DisableTorchFunction()

    @functools.wraps(function)
    def alone(*arguments, **keywords):
        with torch._C.DisableTorchFunction():
            return function(*arguments, **keywords)

    return alone


def shape_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Its shape; ``None`` for a nested tensor, whose parts have one each."""
    return None if tensor.is_nested else tuple(tensor.shape)


def times(shape: tuple[int, ...] | None) -> str:
    """``5×3``."""
    return "×".join(map(str, shape or ()))


@unseen
def show(value: Any, digits: int = 4) -> str:
    """A number as text, an array as its shape; nothing for ``None``."""
    if isinstance(value, Tensor):
        if value.is_nested or value.numel() != 1:
            return times(shape_of(value)) or "nested"
        value = value.to_dense() if value.is_sparse else value
        try:
            value = value.item()
        except RuntimeError:  # a tensor without data: on the meta device, fake
            return "unknown"
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


@unseen
def plain(value: Any) -> Any:
    """Tensors as nested lists, without data as ``None``; complex numbers as [real, imaginary]."""
    if isinstance(value, Tensor):
        try:
            value = value if value.layout == torch.strided else value.to_dense()
            return (
                torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            ).tolist()
        except RuntimeError:
            return None
    if isinstance(value, complex):
        value = (value.real, value.imag)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float | None) else str(value)


@unseen
@_disable_current_modes()  # to look at what is saved is nothing of the reader's
def trace(output: Tensor | Iterable[Tensor] | Mapping[str, Tensor], names: Names = None) -> Graph:
    """Read the graph that autograd recorded behind ``output``.

    Args:
        output: a tensor of any shape, or several (a sequence, or a mapping whose keys name them).
        names: a module (its parameters get their qualified names; a shared parameter gets all of
            them, joined by " = ") or a mapping from names to tensors, leaves or intermediate.

    Returns:
        A :class:`Graph`. Nothing is executed; no hook, flag, gradient or saved tensor changes.
        Reading a graph does not keep its saved tensors from being freed by a backward pass.

    Raises:
        TypeError: ``output`` is no tensor, or ``names`` no module and no mapping to tensors.
        ValueError: an output has no graph behind it.

    Works without recursion, so a chain of 10,000 operations is as fine as a short one. (Somewhere
    beyond 30,000 PyTorch overflows the stack when it frees a chain that Python has looked at.)

    Example:
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> print(trace(x * x, names={"x": x}).text())
        x   leaf       scalar
        #1  mul(x, x)  scalar  keeps other, self
    """
    starts = [_edge_of(tensor) for tensor in tensors_of(output)]
    named = [*named_tensors(names).items()]
    if isinstance(output, Mapping):
        named += named_tensors(output).items()
    known: dict[Any, dict[str, None]] = {}
    for name, tensor in named:
        key = (tensor.grad_fn, tensor.output_nr) if tensor.grad_fn is not None else id(tensor)
        known.setdefault(key, {})[name] = None
    nodes: list[Node] = []
    edges: list[Edge] = []
    index: dict[Any, int] = {}
    for function in _in_order([function for function, _ in starts]):
        arguments = list(enumerate(function.next_functions))
        for slot, (source, _) in arguments:
            if source is None:  # constants stand right before their only user
                index[function, slot] = len(nodes)
                nodes.append(Node(len(nodes), "constant"))
        index[function] = len(nodes)
        nodes.append(_node(function, len(nodes), known))
        for slot, (source, number) in arguments:
            key = (function, slot) if source is None else source
            edges.append(Edge(index[key], index[function], slot, number))
    return Graph(nodes, edges, [(index[function], number) for function, number in starts])


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors that were given: one, several, or those of a mapping."""
    tensors = output.values() if isinstance(output, Mapping) else output
    tensors = [output] if isinstance(output, Tensor) else tensors
    tensors = list(tensors) if isinstance(tensors, Iterable) else []
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise TypeError(
            f"expected a tensor or several of them, got {type(output).__name__}: give the result "
            "itself, such as the loss, or a list or mapping of results"
        )
    return tensors


def named_tensors(names: Names) -> dict[str, Tensor]:
    """What ``names`` says, as a mapping; one tensor may have several names."""
    if isinstance(names, nn.Module):
        return dict(names.named_parameters(remove_duplicate=False))
    if not isinstance(names, Mapping | None):
        raise TypeError(
            f"names is a {type(names).__name__}, expected a module or a mapping from names to "
            "tensors, such as dict(model.named_parameters())"
        )
    for name, tensor in (names or {}).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"names[{name!r}] is a {type(tensor).__name__}, expected a tensor")
    return {str(name): tensor for name, tensor in (names or {}).items()}


def _edge_of(tensor: Tensor) -> tuple[Function, int]:
    if not tensor.requires_grad:
        raise ValueError(
            f"no graph leads to this tensor of shape {shape_of(tensor)}: it has "
            "requires_grad=False. It was made from untracked tensors, inside no_grad or vmap, or "
            "by detach; trace a result of operations on a tensor with requires_grad=True."
        )
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _in_order(starts: list[Function]) -> Iterable[Function]:
    """Functions so that each comes after its inputs, ties broken by creation.

    Leaves are put right before their first user, which is how a reader meets them in the code.
    """
    users: dict[Function, list[Function]] = {}
    missing: dict[Function, int] = {}
    todo = list(starts)
    while todo:
        function = todo.pop()
        if function in missing:
            continue
        sources = [source for source, _ in function.next_functions if source is not None]
        missing[function] = sum(not _is_leaf(source) for source in sources)
        for source in sources:
            users.setdefault(source, []).append(function)
        todo.extend(sources)
    # An operation is created after its inputs, so creation numbers alone would nearly do; they
    # count per thread, though, so the order is taken from the edges and they only break ties.
    tie = count()
    ready = [
        (function._sequence_nr(), next(tie), function)
        for function in missing
        if missing[function] == 0 and not _is_leaf(function)
    ]
    heapq.heapify(ready)
    order: dict[Function, None] = {}
    while ready:
        _, _, function = heapq.heappop(ready)
        order.update(dict.fromkeys(s for s, _ in function.next_functions if _is_leaf(s)))
        order[function] = None
        for user in users.get(function, ()):
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (user._sequence_nr(), next(tie), user))
    return order | dict.fromkeys(filter(_is_leaf, starts))


def _is_leaf(function: Function | None) -> bool:
    return isinstance(function, torch._C._functions.AccumulateGrad)


def _node(function: Function, index: int, known: dict[Any, dict[str, None]]) -> Node:
    if _is_leaf(function):
        variable = function.variable
        return Node(
            index,
            "parameter" if isinstance(variable, nn.Parameter) else "leaf",
            name=" = ".join(known.get(id(variable), ())) or None,
            outputs=((shape_of(variable), variable.dtype),),
            function=function,
        )
    outputs = [
        (None if m.is_nested_tensor else tuple(m.shape), m.dtype) for m in function._input_metadata
    ]
    names = [" = ".join(known.get((function, k), ())) for k in range(max(len(outputs), 1))]
    return Node(
        index,
        "operation",
        # Not function.name(): a custom function may have set an attribute of that name.
        operation=type(function).name(function),
        name=", ".join(filter(None, names)) or None,
        outputs=tuple(outputs),
        saved=tuple(_saved(function)),
        function=function,
    )


def _saved(function: Function) -> Iterable[Saved]:
    """What a function keeps: its ``_saved_*`` attributes, or a custom function's tensors."""
    for attribute in dir(type(function)):
        if not attribute.startswith("_raw_saved_"):
            continue
        stem = attribute.removeprefix("_raw_saved_")
        try:
            raw = getattr(function, attribute)
            several = isinstance(raw, list | tuple)
            packed = [getattr(r, "unpack_hook", None) for r in (raw if several else [raw])]
            if any(packed):
                yield Saved(stem, "packed")
                continue
            value = getattr(function, "saved_tensors" if stem == "tensors" else f"_saved_{stem}")
        except RuntimeError as error:
            yield Saved(stem, "changed" if "inplace operation" in str(error) else "freed")
            continue
        for number, tensor in enumerate(value if several else [value]):
            if isinstance(tensor, Tensor):
                tensor = tensor.detach()
                parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
                yield Saved(
                    f"{stem}[{number}]" if several else stem,
                    "kept",
                    shape_of(tensor),
                    tensor.dtype,
                    sum(part.nbytes for part in parts),
                    tensor,
                )
