"""Where was this NaN born?  Introduced in chapter 8.

``find_nonfinite`` runs your loss once, forward and backward, and walks back from what went wrong
(a non-finite loss or gradient) to the first operation that made it from harmless inputs. An
infinity is guilty only if it leads there: the −inf of an attention mask is harmless until a whole
row of it meets a softmax. Forward, the walk follows the values that ``bpkit.record`` wrote down;
backward, the gradients on the edges of the graph. Neither source text nor your names decide.

What ``torch.compile`` made runs as it was written. It can't know what it can't see: of a script no
more than what it was given and returned; and reentrant checkpointing refuses the backward pass it
needs (use ``use_reentrant=False``). A batch row is read off the shapes, and ``None`` where they do
not tell.
"""

from __future__ import annotations

import html
import inspect
import linecache
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from bpkit.arguments import check, check_batch, check_values, uncompiled
from bpkit.batches import items_in
from bpkit.graph import Edge, Graph, Node, shape_of, trace, unseen
from bpkit.interrupt import together
from bpkit.nonfinite_rules import (
    ALIASES,
    DROPPED,
    GIVEN,
    INF,
    MEETINGS,
    NAN,
    SELECTIONS,
    Case,
    first_entry,
    is_inf,
    is_nan,
    is_wrong,
    reach,
)
from bpkit.preserve import preserve
from bpkit.record import (
    _LIBRARIES,
    Line,
    Operation,
    Recording,
    Value,
    _flat,
    reader_line,
    record,
)

__all__ = ["Origin", "explain", "find_inplace", "find_nonfinite"]
from bpkit.style import wrapped


@dataclass(repr=False)
class Origin:
    """The operation, input or parameter that a NaN or a guilty infinity comes from.

    ``phase`` is "input", "parameter" (or buffer), "forward" or "backward"; ``slug`` the fault's
    name in the catalogue; ``node`` what the graph calls the operation. ``index`` is the first of
    ``count`` wrong entries in the operation's result (forward) or in the gradient that it sends
    back (backward), ``values`` is what stood there. ``also`` tells of a second place.
    """

    phase: str
    slug: str
    operation: str
    why: str
    repair: str
    node: str | None = None
    path: str | None = None
    module: str | None = None
    line: Line | None = None
    row: int | None = None
    index: tuple[int, ...] | None = None
    count: int = 0
    values: dict[str, float] = field(default_factory=dict)
    also: str | None = None

    @property
    def where(self) -> str:
        """The place in one line: entry, module and line of your code, as far as known."""
        row = None if self.row is None else f"batch row {self.row}"
        module = f"module {self.module}" if self.module else None
        return ", ".join(str(part) for part in (self.path, row, module, self.line) if part)

    def _table(self) -> dict[str, str]:
        node = f" ({self.node})" if self.node else ""
        entry = f"first wrong entry {self.index}, of {self.count}" if self.index else None
        rows = {
            "fault": f"{self.slug}: {self.operation}{node}, {self.phase}",
            "where": self.where,
            "entry": entry,
            "values": ", ".join(f"{name} {value:.4g}" for name, value in self.values.items()),
            "why": self.why,
            "also": self.also,
            "repair": self.repair,
        }
        return {name: text for name, text in rows.items() if text}

    def __str__(self) -> str:
        rows = self._table().items()
        return "\n".join(line for name, text in rows for line in wrapped(f"{name:7} {text}", 8))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        left = 'style="text-align:left"'
        rows = (
            f"<tr><th {left}>{name}</th><td {left}>{html.escape(text)}</td></tr>"
            for name, text in self._table().items()
        )
        return f"<table>{''.join(rows)}</table>"


def find_nonfinite(model: nn.Module, loss_fn: Callable, batch: Any) -> Origin | None:
    """The first operation that made the loss or a gradient NaN or infinite; ``None`` if none did.

    Args:
        model: any module.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss.
        batch: what ``loss_fn`` takes; tensors in it, however nested, count as input.

    Parameters, buffers, gradients, random state, flags and hooks are left as found; random
    numbers are drawn from the present state.

    Raises:
        TypeError: the loss is no tensor, ``loss_fn`` can't be called so, or ``batch`` is a loader.
        ValueError: something is on the meta device.
        RuntimeError: there is no backward pass to be had, as after reentrant checkpointing.
        Exception: what your own code raises, but for BatchNorm's refusal of a single value, which
            is explained.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> origin = find_nonfinite(model, lambda m, x: (m(x) * 0).sqrt().sum(), torch.ones(1, 1))
        >>> origin.slug, origin.node
        ('nan-backward-sqrt', 'SqrtBackward0')
    """
    check(model, loss_fn)
    check_batch(batch)
    check_values(model, batch)
    with preserve(model), uncompiled():
        try:
            with torch.enable_grad(), record(model) as recording:
                loss = loss_fn(model, batch)
        except ValueError as error:
            origin = _single_value(error, model)
            if origin is None:
                raise
            return origin
        return explain(recording, loss, model, batch)


def explain(
    recording: Recording, loss: Tensor, model: nn.Module | None = None, batch: Any = None
) -> Origin | None:
    """As :func:`bpkit.find_nonfinite`, for a ``loss`` already computed inside ``recording``.

    Runs no forward; its backward pass leaves ``.grad`` alone and keeps the graph, so that yours
    can follow. Without ``model`` and ``batch`` it can't name parameters, inputs and rows.

    Raises:
        TypeError: ``loss`` is no tensor.
        ValueError, RuntimeError: as :meth:`bpkit.Recording.graph`.

    Example:
        >>> x = torch.zeros(1, requires_grad=True)
        >>> with record() as recording:
        ...     loss = x.sqrt().sum()
        >>> explain(recording, loss).slug
        'nan-backward-sqrt'
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss is a {type(loss).__name__}, expected a scalar tensor")
    search = _Search(recording, model, batch)
    with unseen():
        value = recording._value(loss)
        if is_wrong(value.data).any():
            return search.forward(value)
    if not loss.requires_grad:
        return None
    graph = recording.graph(loss, gradients=True)
    with unseen():
        return search.backward(graph)


def find_inplace(model: nn.Module, loss_fn: Callable, batch: Any) -> Origin | None:
    """The line that changed a tensor which an operation had kept for its backward pass.

    For the errors "modified by an inplace operation" and "backward through the graph a second
    time": ``None`` if the backward pass has all that it needs. Arguments as for
    :func:`bpkit.find_nonfinite`; everything is left as found.

    Example:
        >>> def loss_fn(model, x):
        ...     y = model(x).sigmoid()
        ...     loss = y.sum()
        ...     y.mul_(2)
        ...     return loss
        >>> find_inplace(nn.Linear(1, 1), loss_fn, torch.ones(1, 1)).operation
        'mul'
    """
    check(model, loss_fn)
    check_batch(batch)
    check_values(model, batch)
    with (
        preserve(model),
        uncompiled(),
        torch.enable_grad(),
        record(model) as recording,
        together(_Changes(recording)) as log,
    ):
        loss = loss_fn(model, batch)
    graph = recording.graph(loss)
    makers = _makers(recording, graph)
    for node in reversed(graph.operations):  # as the backward pass meets them
        lost = next((saved for saved in node.saved if saved.state in ("changed", "freed")), None)
        if lost is None:
            continue
        op, place = makers.get(node.index), f" at {node.line}" if node.line else ""
        keeper = f"{node.short} ({node.operation})"
        if lost.state == "freed":
            why = f"The loss depends on {keeper}{place}, which an earlier backward pass has freed."
            repair = "detach what one step hands to the next: state = state.detach()"
            told = (node.operation, None, node.module, node.line)
            return Origin("backward", "second-backward", node.short, why, repair, *told)
        parts = [] if op is None else op.outputs if lost.name == "result" else op.inputs
        kept = {_storage(recording._known[v.tensor][0]) for v in parts if isinstance(v, Value)}
        index = next(i for i, s in log.seen if (op is None or i > op.index) and s in kept)
        change = recording.operations[index]
        return Origin(
            "backward",
            "inplace-modified",
            change.name,
            f"It changes in place what {keeper} kept for its backward pass ({lost.name}).",
            "make a new tensor, x = x * 2 instead of x *= 2, or change x.clone()",
            module=change.module,
            line=change.line,
            also=f"kept{place}" if place else None,
        )
    return None


class _Changes(TorchFunctionMode):
    """Which operation of ``recording`` changed which storage in place."""

    def __init__(self, recording: Recording):
        super().__init__()
        self.recording, self.seen = recording, []

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        given = [item for item in _flat((arguments, keywords)) if isinstance(item, Tensor)]
        with unseen():
            before = [None if t.is_inference() else t._version for t in given]
        index = len(self.recording)
        result = function(*arguments, **keywords)
        with unseen():
            for tensor, version in zip(given, before, strict=True):
                if version is not None and tensor._version != version:
                    self.seen.append((index, _storage(tensor)))
        return result


class _End(NamedTuple):
    """Where wrong values begin: in the result of ``op``, or outside of what was recorded."""

    index: int
    op: Operation | None
    value: Value
    entries: Tensor

    @property
    def given(self) -> bool:
        """From outside, or an infinity that somebody wrote down: not one that was computed."""
        numbers = [] if self.op is None else [i for i in self.op.inputs if isinstance(i, float)]
        return self.op is None or INF in map(abs, numbers)


class _Search:
    """One recording, and what is needed to walk through it backwards."""

    def __init__(self, recording: Recording, model: nn.Module | None, batch: Any):
        self.recording, self.batch = recording, dict(items_in(batch))
        self.named = {id(item): ("input", path) for path, item in self.batch.items()}
        self.given = {id(t): t for t in self.batch.values() if isinstance(t, Tensor)}
        if model is not None:
            self.given |= {id(buffer): buffer for buffer in model.buffers()}
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                self.named[id(tensor)] = ("parameter", name)
        shapes = {
            id(x): shape_of(x) if isinstance(x, Tensor) else x.shape for x in self.batch.values()
        }
        sizes = Counter(shape[0] for shape in shapes.values() if shape)
        self.size = sizes.most_common(1)[0][0] if sizes else 0
        # Shapes of the tensors that still have the rows of the batch, as far as shapes tell.
        self.rowed = {key: shape for key, shape in shapes.items() if shape}
        arrays = [x.shape for x in self.batch.values() if isinstance(x, np.ndarray)]
        self.made: dict[int, list[tuple[Operation, Value]]] = {}
        for op in recording:
            read = [self.rowed.get(v.tensor) for v in op.inputs if isinstance(v, Value)] or arrays
            for value in op.outputs:
                self.made.setdefault(value.tensor, []).append((op, value))
                shape, size = value.shape or (), math.prod(value.shape or ())
                if any(r and shape and (r[0] == shape[0] or math.prod(r) == size) for r in read):
                    self.rowed[value.tensor] = shape

    def forward(self, value: Value) -> Origin:
        """Where a non-finite value comes from."""
        now = len(self.recording)
        if not is_nan(value.data).any():
            end = self.first([(value, is_inf(value.data), now)], is_inf)
            return self._tell(self._loss_of_masked(end) if end.given else end)
        end = self.first([(value, is_nan(value.data), now)], is_nan)
        infinite = self._read(end, is_inf) if end.op else []
        told = self._tell(end)
        if not infinite:
            return told
        # The infinity is to blame if it was computed; if it was meant, then what it met is.
        source = self.first(infinite, is_inf)
        born = self._tell(source)
        met = told.slug in MEETINGS and born.slug != "div-zero-norm"
        if met or (source.given and source.op):
            return replace(told, also=f"the infinity comes from {self._place(source, told)}")
        return replace(born, also=f"it turns into NaN in {self._place(end, born)}")

    def first(self, todo: list, wrong: Callable) -> _End:
        """Where these wrong values begin.

        The first place that computed them; if they were given, the place that gave most of them.
        """
        seen, ends = set(), []
        while todo:
            value, entries, before = todo.pop()
            if id(value) not in seen:
                seen.add(id(value))
                op = self.maker(value, before)
                end = _End(op.index if op else before, op, value, entries)
                read = self._read(end, wrong)
                todo += read
                meant = wrong is is_inf and end.given
                if meant or not read:
                    ends.append((meant, meant * -first_entry(entries)[1], end.index, end))
        return min(ends, key=lambda item: item[:3])[3]

    def _read(self, end: _End, wrong: Callable) -> list[tuple[Value, Tensor, int]]:
        """The inputs that can be behind the wrong entries, each with its own wrong entries."""
        if end.op:
            inputs = [v for v in end.op.inputs if isinstance(v, Value)]
        else:  # a custom function or compiled code: what its node in the graph read
            inputs = [*self._behind(self._tensor(end.value).grad_fn)]
        bad = [(v, wrong(v.data), end.index) for v in inputs]
        bad = [item for item in bad if item[1].any()]
        hidden = not end.op and self._tensor(end.value).grad_fn is not None
        if not bad and hidden and wrong is is_nan:  # it may have read what nobody else did
            read = {v.tensor for op in self.recording for v in op.inputs if isinstance(v, Value)}
            unread = (t for key, t in self.given.items() if key not in read)
            bad = [(v, wrong(v.data), end.index) for v in map(self.recording._value, unread)]
            bad = [item for item in bad if item[1].any()]
        hit = [(v, mask & reach(end.entries, mask), index) for v, mask, index in bad]
        return [item for item in hit if item[1].any()] or bad

    def _behind(self, function: Any) -> Iterator[Value]:
        """What an operation out of sight read: recorded values, and parameters of a script."""
        seen, todo = set(), [function]
        while todo:
            function = todo.pop()
            for source, _ in function.next_functions if function else ():
                if source is None or source in seen:
                    continue
                seen.add(source)
                if source in self.recording._values:
                    yield self.recording._values[source]
                elif hasattr(source, "variable"):
                    yield self.recording._value(source.variable)
                else:  # as little in sight
                    todo.append(source)

    def maker(self, value: Value, before: int) -> Operation | None:
        """The operation that a value comes from; ``None`` if it comes from outside."""
        if value.producer is not None:
            return self.recording.operations[value.producer]
        # Met again in another state: handed on by a custom function, or written to through another
        # tensor that shares its memory.
        made = [(op, v) for op, v in self.made.get(value.tensor, ()) if op.index < before]
        if not made:
            return None
        op, last = made[-1]
        if not is_wrong(last.data).any():
            memory = _storage(self._tensor(value))
            for later in reversed(self.recording.operations[op.index : before]):
                shared = (v for v in later.outputs if _storage(self._tensor(v)) == memory)
                if any(is_wrong(v.data).any() for v in shared):
                    return later
        return op

    def _tensor(self, value: Value) -> Tensor:
        return self.recording._known[value.tensor][0]

    def _loss_of_masked(self, end: _End) -> _End:
        """A −∞ that was meant has made the loss infinite: the loss function is the place."""
        for op in self.recording:
            if op.name in ("cross_entropy", "nll_loss") and is_inf(op.outputs[0].data).any():
                return _End(op.index, op, op.outputs[0], is_inf(op.outputs[0].data))
        return end

    def _place(self, end: _End, told: Origin) -> str:
        if end.op is None:
            return self.named.get(end.value.tensor, ("", "outside of what was recorded"))[1]
        return _second(end.op.name, end.op.line, told)

    def row(self, index: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
        """The batch row, if the first dimension (or its outer part, or the second) is the batch."""
        if not index or not self.size:
            return None
        if shape[0] % self.size == 0:
            return index[0] * self.size // shape[0]
        return index[1] if shape[1:2] == (self.size,) else None

    def _tell(self, end: _End) -> Origin:
        """What is to say of the place where a value went wrong in the forward pass."""
        op, value, function = end.op, end.value, self._tensor(end.value).grad_fn
        if op is None and function is not None:  # a custom function, or compiled code
            name = type(function).name(function)
            return self._origin(Case("forward", name, (), value.data, end.entries, None, function))
        if op is None or not (end.given or any(isinstance(v, Value) for v in op.inputs)):
            return self._tell_given(end)
        made = (f for f, index in self.recording._makers.items() if index == op.index)
        function = next(made, None)
        told = (op.inputs, value.data, end.entries, op, function, None, self.maker)
        case = Case("forward", op.name, *told)
        if case.rule.names == "*" and function is not None:  # several operations in one call?
            for node in trace(self._tensor(value)).operations:
                saved = next((s.value for s in node.saved if s.name == "result"), None)
                inside = node.function._sequence_nr() >= self.recording._starts[op.index]
                if inside and saved is not None and is_wrong(saved).any():
                    told = (op.inputs, saved, is_wrong(saved), op, node.function, None, self.maker)
                    return self._origin(Case("forward", node.short, *told))
        return self._origin(case)

    def _origin(self, case: Case, rowed: bool = True) -> Origin:
        op, function, rule = case.op, case.function, case.rule
        values = {"input": case.a, "second input": case.b if case.a == case.a else NAN}
        values |= {"gradient from above": case.g}
        values = {name: value for name, value in values.items() if value == value}
        values["result" if case.phase == "forward" else "gradient sent back"] = case.value
        rowed = rowed and (op is None or any(v.tensor in self.rowed for v in op.outputs))
        general = case.phase == "forward" and rule.slug.startswith("nan-backward")
        return Origin(
            case.phase,
            "nan-forward" if general else rule.slug,
            ALIASES.get(op.name, op.name) if op and case.phase == "forward" else case.name,
            case.told,
            rule.repair,
            node=None if function is None else type(function).name(function),
            module=op.module if op else None,
            line=_class_line(function, case.phase) or (op.line if op else None),
            row=self.row(case.index, case.result.shape) if rowed else None,
            index=case.index,
            count=case.count,
            values=values,
        )

    def _tell_given(self, end: _End) -> Origin:
        """A value that was wrong before the first operation read it."""
        value, entries = end.value, end.entries
        phase, path = self.named.get(value.tensor, ("input", "a tensor from outside the batch"))
        if value.tensor not in self.named:  # made from an array or a number of the batch?
            arrays = {n: a for n, a in self.batch.items() if isinstance(a, np.ndarray)}
            wrong = [(n, torch.from_numpy(~np.isfinite(a))) for n, a in arrays.items()]
            path, entries = next(((n, w) for n, w in wrong if w.any()), (path, entries))
        index, count = first_entry(entries)
        reader = next((op for op in self.recording if op.index >= end.index), None)
        return Origin(
            phase,
            "nan-input" if phase == "input" else "nan-forward",
            "NaN" if is_nan(value.data).any() else "infinity",
            *GIVEN[phase],
            path=path + (str(list(index)) if index else ""),
            module=reader.module if reader else None,
            line=reader.line if reader else None,
            row=self.row(index, entries.shape) if phase == "input" else None,
            index=index,
            count=count,
        )

    def backward(self, graph: Graph) -> Origin | None:
        """Where a non-finite gradient comes from; ``None`` if every leaf has a finite one."""
        sent = [e for e in graph.edges if e.gradient is not None]
        wrong = {id(e) for e in sent if is_wrong(e.gradient).any()}
        todo = [n for n in graph.leaves if n.gradient is not None and is_wrong(n.gradient).any()]
        seen, ends = set(), []
        while todo:
            node = todo.pop()
            if node.index not in seen:
                seen.add(node.index)
                users = [graph.nodes[e.target] for e in graph.consumers(node) if id(e) in wrong]
                todo += users
                ends += [] if users else [node]  # at most the sum of what arrives is wrong
        if not ends:
            return None
        rank = {index: k for k, index in enumerate(graph.backward_order)}
        node = min(ends, key=lambda node: rank.get(node.index, len(rank)))
        edge = next((e for e in graph.inputs(node) if id(e) in wrong), None)
        return self._tell_backward(graph, node, edge)

    def _tell_backward(self, graph: Graph, node: Node, edge: Edge | None) -> Origin:
        op = _makers(self.recording, graph).get(node.index)
        sent = node.gradient if edge is None else edge.gradient
        saved = {s.name: s.value for s in node.saved if s.value is not None}
        given = []
        for e in graph.inputs(node):
            known = graph.nodes[e.source].value if e.output == 0 else None
            given.append(saved.get("other" if e.slot else "self") if known is None else known)
        given += [] if node.exponent is None else [node.exponent]
        told = (op, node.function, node.gradient, self.maker)
        case = Case("backward", node.short, given, sent, is_wrong(sent), *told)
        rowed = edge is not None and graph.nodes[edge.source].kind != "parameter"
        origin = self._origin(case, rowed)
        index = case.above if case.g == 0 else None
        if any(is_wrong(value).any() for value in saved.values()):
            born, wrong = self._hurt(case, node)
            origin = born or origin
            if born and wrong.shape == node.gradient.shape and not node.gradient[wrong].any():
                index = first_entry(wrong)[0]
        dropped = None if index is None else self._dropped(graph, node, index)
        if dropped is None or origin.slug == "nan-forward-masked-softmax":
            return origin
        why = DROPPED[0].format(drops=dropped.short, name=origin.operation)
        also = f"dropped by {_second(dropped.short, dropped.line, origin)}"
        changes = {"phase": "backward", "slug": "nan-backward-where", "why": why, "also": also}
        return replace(origin, repair=DROPPED[1], **changes)

    def _hurt(self, case: Case, node: Node) -> tuple[Origin | None, Tensor]:
        """Where what the operation keeps was wrong already, though the loss is not; and which."""
        for value in (*case.op.outputs, *case.op.inputs) if case.op else ():
            wrong = is_wrong(value.data) if isinstance(value, Value) else torch.tensor(False)
            wrong = wrong & reach(case.entries, wrong)
            if not wrong.any():
                continue
            if not (is_nan(value.data) & wrong).any():
                end = self.first([(value, wrong, case.op.index + 1)], is_inf)
                if end.given:  # meant, as in a mask
                    continue
            origin = self.forward(value)
            here = _second(node.short, node.line, origin)
            also = f"the loss is finite, but not the gradient from {here} on"
            given = origin.phase != "forward"
            return None if given else replace(origin, also=also), wrong
        return None, case.entries

    def _dropped(self, graph: Graph, node: Node, index: tuple[int, ...]) -> Node | None:
        """The selection that sends 0 to this entry: its value was not used after all."""
        todo, shape = [node], node.gradient.shape

        def here(gradient: Tensor) -> Tensor:
            return gradient[index] if gradient.shape == shape else gradient

        for node in todo:
            for edge in graph.consumers(node):
                user = graph.nodes[edge.target]
                if edge.gradient is None or user.gradient is None or user in todo:
                    continue
                if (here(edge.gradient) == 0).any():
                    if not (here(user.gradient) != 0).any():
                        todo.append(user)
                    elif user.short in SELECTIONS.split():
                        return user
        return None


def _single_value(error: ValueError, model: nn.Module) -> Origin | None:
    """BatchNorm refuses a single value per channel while training: where, and of which shape."""
    names = {id(module): name for name, module in model.named_modules()}
    module = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = names.get(id(frame.f_locals.get("self")), module)
        x = frame.f_locals.get("input")
        if frame.f_code is F.batch_norm.__code__ and x.numel() == x.shape[1]:
            return Origin(
                "forward",
                "batchnorm-single-sample",
                "batch_norm",
                f"In training it needs several values for each channel, and got shape "
                f"{tuple(x.shape)}: one.",
                "DataLoader(..., drop_last=True), or skip batches of one row",
                module=module,
                line=reader_line(frame),
            )
    return None


def _second(name: str, line: Line | None, told: Origin) -> str:
    """A second place in a report: its line only if it is not the one already told."""
    return f"{name} in the same line" if line == told.line else f"{name} at {line}"


def _makers(recording: Recording, graph: Graph) -> dict[int, Operation]:
    """The operation behind each node of the graph, also those inside one call."""
    makers: dict[int, Operation] = {}
    for node in reversed(graph.operations):
        users = [makers[e.target] for e in graph.consumers(node) if e.target in makers]
        maker = recording._maker(node.function, users)
        if maker is not None:
            makers[node.index] = maker
    return makers


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _class_line(function: Any, method: str) -> Line | None:
    """Where a custom function's forward or backward is written."""
    if not isinstance(function, BackwardCFunction):
        return None
    code = inspect.unwrap(getattr(type(function)._forward_cls, method)).__code__
    if code.co_filename.startswith(_LIBRARIES):  # compiled code is a custom function too
        return None
    number = code.co_firstlineno
    while linecache.getline(code.co_filename, number).lstrip().startswith("@"):
        number += 1
    text = linecache.getline(code.co_filename, number).strip()
    return Line(code.co_filename, code.co_name, number, text)
