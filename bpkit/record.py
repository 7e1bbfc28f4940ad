"""With which values, and where in my code?  Introduced in chapter 1.

Autograd's graph keeps no values beyond what a backward pass needs, and no source lines. A
``torch.overrides.TorchFunctionMode`` sees every public PyTorch call with both: ``record`` writes
them down while your code runs, and ``Recording.graph`` joins them to the graph. Graph pictures,
memory accounts and the diagnosis all read this one recording.

Cost: a copy of every result, and 10 to 20 microseconds per operation on small tensors; copies,
results and their graph live as long as the recording. Blind spots: what runs inside one public
call (``cross_entropy`` is one call, two graph nodes: the inner one gets the call's line and
module, but no value), custom and compiled functions (their nodes get no line), other threads, and
what ``.data`` or NumPy write into a tensor behind autograd's back. PyTorch's transformer layers
leave their inference fast path while any mode is on: the same result up to rounding.

Source: https://docs.pytorch.org/docs/stable/torch.overrides.html
"""

from __future__ import annotations

import linecache
import math
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as Function
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import (
    TorchFunctionMode,
    _len_torch_function_stack,
    _pop_mode,
    _push_mode,
    resolve_name,
)

from bpkit.arguments import retell, unlisten
from bpkit.graph import Graph, Names, Node, named_tensors, shape_of, tensors_of, trace, unseen
from bpkit.interrupt import Unbroken, together

__all__ = ["Line", "Operation", "Recording", "Value", "record"]

# Frames of these packages are not the reader's code.
_LIBRARIES = tuple(os.path.dirname(m.__file__) + os.sep for m in (torch, sys.modules["bpkit"]))
# Reading any other attribute computes nothing.
_COMPUTED = (".T", ".mT", ".H", ".mH", ".real", ".imag", ".data")
_READ = (Tensor, int, float, complex)
# Operations with a place in the graph for their second operand, even where it is a number.
_ARITHMETIC = {"add", "sub", "mul", "div"}


@dataclass(frozen=True)
class Line:
    """A line of the reader's code. For a notebook cell, ``number`` counts within the cell."""

    filename: str
    function: str
    number: int
    text: str

    @property
    def in_notebook(self) -> bool:
        """Whether the line stands in a notebook cell or was typed in."""
        return "ipykernel" in self.filename or self.filename.startswith("<")

    def __str__(self) -> str:
        # A cell's temporary file is called differently in each session; its name helps nobody.
        place = "" if self.in_notebook else f"{os.path.basename(self.filename)} "
        inside = "" if self.function == "<module>" else f" in {self.function}"
        return f"{place}line {self.number}{inside}: {self.text}"


@dataclass(eq=False)
class Value:
    """A tensor as it was when an operation read or made it.

    ``data`` is a detached copy. ``producer`` is the index of the operation that made it, or
    ``None`` if it came from outside the recording. ``tensor`` is the ``id`` of the tensor.
    """

    data: Tensor
    tracked: bool
    producer: int | None
    tensor: int

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape; ``None`` for a nested tensor."""
        return shape_of(self.data)


@dataclass(eq=False)
class Operation:
    """One public PyTorch call: ``function`` (such as ``torch.Tensor.mul``), what went in, what came
    out, the line it stands in, and the qualified name of the module whose forward called it.

    ``inputs`` holds a :class:`Value` for each tensor and the number itself for each number, in
    the order of the arguments. ``outputs`` holds the results, then what else the call changed in
    place. ``result`` is set where the call left the world of tensors, as ``.item()`` does.
    """

    index: int
    function: str
    inputs: list[Value | int | float | bool | complex]
    outputs: list[Value]
    line: Line | None
    module: str | None
    result: Any = None

    @property
    def name(self) -> str:
        """``torch.Tensor.mul`` -> ``mul``."""
        return self.function.rsplit(".", 1)[-1].strip("_")

    def __str__(self) -> str:
        where = f" [{self.module}]" if self.module else ""
        return f"{self.name}{where} at {self.line}"


class Recording:
    """What ran inside the ``with`` block of :func:`record`: ``operations`` in order."""

    def __init__(self, names: Names):
        named_tensors(names)  # complains now rather than after the run
        self.names = names
        self.operations: list[Operation] = []
        # By id, with the tensor itself: so long as it is here, no other gets its id.
        self._known: dict[int, tuple[Tensor, Any, Value]] = {}
        # For each graph node met: the first result, and the operation that left it, if recorded.
        self._values: dict[Function, Value] = {}
        self._makers: dict[Function, int | None] = {}
        self._starts: list[int] = []  # autograd's number for the next node, before each operation

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def graph(
        self, output: Tensor, names: dict[str, Tensor] | None = None, gradients: bool = False
    ) -> Graph:
        """The graph behind ``output``, with the recorded values, lines and modules on its nodes.

        Args:
            output: a tensor computed inside the block (scalar if ``gradients``).
            names: further names, for intermediate results.
            gradients: also run one backward pass and write on every node the gradient of
                ``output`` with respect to its first result, on every edge the contribution that
                travels along it, and in ``graph.backward_order`` the order in which the
                operations ran. ``.grad`` is left alone and the graph is kept for your own
                backward; hooks that you registered on tensors do fire.

        Raises:
            ValueError: ``gradients`` is asked for of anything but one real number.
            RuntimeError: ``gradients`` is asked for after a backward pass has freed the graph.
        """
        graph = trace(output, named_tensors(self.names) | named_tensors(names))
        self._fill(graph, tensors_of(output))
        if gradients:
            fill_gradients(graph, output)
        return graph

    @unseen
    def _fill(self, graph: Graph, outputs: list[Tensor]) -> None:
        for tensor in outputs:
            self._value(tensor)
        makers: dict[int, Operation] = {}
        reads: dict[int, dict[int, Value]] = {}
        for node in reversed(graph.nodes):
            users = [makers[e.target] for e in graph.consumers(node) if e.target in makers]
            if node.kind in ("leaf", "parameter"):
                # As this graph's operations read it: an optimizer may have changed it since.
                key = id(node.function.variable)
                read = [reads[user.index][key] for user in users if key in reads[user.index]]
                value = read[0] if read else self._known.get(key, (None, None, None))[2]
                node.value = None if value is None else value.data
            elif node.kind == "operation":
                value = self._values.get(node.function)
                saved = (s.value for s in node.saved if s.name == "result")
                node.value = next(saved, None) if value is None else value.data
                maker = self._maker(node.function, users)
                if maker is None:
                    continue
                makers[node.index] = maker
                if maker.index not in reads:
                    given = (v for v in maker.inputs if isinstance(v, Value))
                    reads[maker.index] = {v.tensor: v for v in given}
                node.line, node.module = maker.line, maker.module
                if node.function in self._makers:
                    self._fill_constants(graph, node, maker)

    def _maker(self, function: Function, users: list[Operation]) -> Operation | None:
        """The operation that left this node.

        One call may leave several (linear: a transpose and a product). Those inside were never in
        the reader's hands, and were created after the call began.
        """
        if function in self._makers:
            index = self._makers[function]
            return None if index is None else self.operations[index]
        born = function._sequence_nr()
        return next((user for user in users if born >= self._starts[user.index]), None)

    def _fill_constants(self, graph: Graph, node: Node, operation: Operation) -> None:
        """Values of the inputs without a gradient, if it is certain which argument is which."""
        given = [v for v in operation.inputs if isinstance(v, Value)]
        if node.short in _ARITHMETIC:
            given = operation.inputs[:2]
        elif operation.name == "linear":
            given = given[2:] + given[:2]  # the graph has the bias first
        sources = [graph.nodes[edge.source] for edge in graph.inputs(node)]
        tracked = [isinstance(v, Value) and v.tracked for v in given]
        if tracked != [source.kind != "constant" for source in sources]:
            return
        for source, value in zip(sources, given, strict=True):
            if source.kind == "constant" and isinstance(value, Value):
                source.value, source.outputs = value.data, ((value.shape, value.data.dtype),)
            elif source.kind == "constant":
                source.value = value

    def _value(self, tensor: Tensor, producer: int | None = None) -> Value:
        """The value of ``tensor`` now: copied unless already known in this state."""
        state = None if tensor.is_inference() else (tensor._version, tensor.requires_grad)
        _, known, value = self._known.get(id(tensor), (None, None, None))
        if producer is None and value is not None:
            if state is not None and state == known:
                return value
            if state is None:  # inference tensors do not count their changes
                producer = value.producer
        data = tensor.detach().clone()
        while is_functorch_wrapped_tensor(data):  # inside vmap: the whole batch
            data = get_unwrapped(data)
        value = Value(data, tensor.requires_grad, producer, id(tensor))
        self._known[id(tensor)] = (tensor, state, value)
        if tensor.grad_fn is not None:
            self._makers.setdefault(tensor.grad_fn, producer)
            if tensor.output_nr == 0:
                self._values.setdefault(tensor.grad_fn, value)
        return value

    def _changed(self, given: list[Tensor], results: list[Tensor]) -> list[Tensor]:
        """What a call changed in place and did not return; the base of a changed view too."""
        seen = {id(tensor) for tensor in results}
        changed = []
        for tensor in [*given, *(t._base for t in given if t._base is not None)]:
            entry = self._known.get(id(tensor))
            if entry and entry[1] and entry[1][0] != tensor._version and id(tensor) not in seen:
                seen.add(id(tensor))
                changed.append(tensor)
        return changed


class record(Unbroken):
    """``with record(names=model) as recording: ...`` writes down every operation in the block.

    Args:
        names: as for :func:`bpkit.trace`: a module or a mapping from names to tensors. With a
            module, operations also carry the qualified name of the submodule that ran them.

    Nothing of the reader's objects changes: hooks and mode are removed on exit, also after an
    exception. One recording cannot be entered while it runs.

    Example:
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> with record(names={"x": x}) as recording:
        ...     y = x * 3
        >>> (operation,) = recording.operations
        >>> operation.name, float(operation.outputs[0].data)
        ('mul', 6.0)
    """

    def __init__(self, names: Names = None):
        self.recording = Recording(names)
        self._mode = _Recorder(self.recording, names if isinstance(names, nn.Module) else None)

    def _enter(self) -> Recording:
        if self._mode.hooks:
            raise RuntimeError("this recording is already running; make another record(...)")
        self._mode.watch_modules()
        self._mode.__enter__()
        return self.recording

    def _leave(self, *exception) -> None:
        self._mode.stop()
        take_off(self._mode)
        unlisten(exception[2])


def take_off(mode: TorchFunctionMode) -> None:
    """Off the stack of modes, wherever it stands there.

    It need not be the last one, nor there at all: PyTorch takes modes off for the time of a call,
    and an interrupt in that moment loses one.
    """
    stack = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for other in reversed(stack):
        if other is not mode:
            _push_mode(other)


class _Recorder(TorchFunctionMode):
    def __init__(self, recording: Recording, model: nn.Module | None):
        super().__init__()
        self.recording = recording
        self.hooks: list = []
        self.stack: list[str] = []
        named = model.named_modules() if model is not None else ()
        self.module_names = {id(module): name for name, module in named}

    def watch_modules(self) -> None:
        self.process, thread = os.getpid(), threading.get_ident()

        def entered(module, arguments):
            if not is_compiling() and threading.get_ident() == thread:
                self.stack.append(self.module_names.get(id(module), type(module).__name__))

        def left(module, arguments, output):
            if not is_compiling() and self.stack and threading.get_ident() == thread:
                self.stack.pop()

        self.hooks = [
            register_module_forward_pre_hook(entered),
            register_module_forward_hook(left, always_call=True),
        ]

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.stack = [], []

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if is_compiling():  # torch.compile reads this function, and takes it into the program
            return function(*arguments, **keywords)
        name = _name(function)
        attribute = name.endswith(("__get__", "__set__"))
        name = name.removesuffix(".__get__")
        # A worker of a DataLoader inherits the mode when it is forked; nobody reads it there.
        if (attribute and not name.endswith(_COMPUTED)) or os.getpid() != self.process:
            return function(*arguments, **keywords)

        recording = self.recording
        index = len(recording.operations)
        given = _flat((arguments, keywords))
        tensors = [item for item in given if isinstance(item, Tensor)]
        start = torch.autograd._get_sequence_nr()
        # Neither a recording around this one nor a tensor subclass is to notice the copies.
        with DisableTorchFunction():
            inputs = [recording._value(i) if isinstance(i, Tensor) else i for i in given]
        result = function(*arguments, **keywords)
        results = [item for item in _flat(result) if isinstance(item, Tensor)]
        if not results and not tensors:
            return result
        with DisableTorchFunction():
            results += recording._changed(tensors, results)
            outputs = [recording._value(tensor, producer=index) for tensor in results]
        line, module = reader_line(sys._getframe(1)), self.stack[-1] if self.stack else None
        left = None if outputs else result
        recording._starts.append(start)
        recording.operations.append(Operation(index, name, inputs, outputs, line, module, left))
        return result


@lru_cache(maxsize=4096)
def _name(function: Any) -> str:
    function = getattr(function, "overloadpacket", function)  # aten.mul.Tensor -> aten.mul
    return resolve_name(function) or getattr(function, "__name__", repr(function))


def _flat(value: Any) -> list[Any]:
    """Tensors and numbers in nested arguments, in order."""
    if isinstance(value, _READ):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [found for item in value for found in _flat(item)]


def reader_line(frame: FrameType | None) -> Line | None:
    """The innermost line outside PyTorch and ``bpkit``, or ``None``."""
    while frame is not None:
        line = line_of(frame, frame.f_lineno)
        if line is not None:
            return line
        frame = frame.f_back
    return None


def raised_line(trace: TracebackType | None) -> Line | None:
    """The innermost line outside PyTorch and ``bpkit`` in a traceback, or ``None``."""
    lines = [line_of(frame, number) for frame, number in traceback.walk_tb(trace)]
    return next((line for line in reversed(lines) if line is not None), None)


def line_of(frame: FrameType, number: int) -> Line | None:
    """Line ``number`` of this frame if it is the reader's code."""
    filename = frame.f_code.co_filename
    if filename.startswith(_LIBRARIES):
        return None
    return Line(filename, frame.f_code.co_name, number, linecache.getline(filename, number).strip())


def fill_gradients(graph: Graph, output: Tensor) -> None:
    """One backward pass over ``graph``, its gradients written on nodes and edges."""
    given = [graph.nodes[index].outputs[number] for index, number in graph.outputs]
    ((shape, dtype), *others) = given
    if others or shape is None or math.prod(shape) != 1 or dtype.is_complex:
        listed = ", ".join(f"{shape} of {dtype}" for shape, dtype in given)
        raise ValueError(
            f"gradients need one real scalar output, got shape {listed}: sum it, or take its "
            "product with a vector first"
        )
    leaves = [GradientEdge(leaf.function, 0) for leaf in graph.leaves]  # even if frozen since
    try:
        with together(_heard(graph)):
            # A custom function may send None to one of them.
            found = torch.autograd.grad(
                tensors_of(output), leaves, retain_graph=True, allow_unused=True
            )
    except RuntimeError as error:
        retell(error)
        raise
    for leaf, gradient in zip(graph.leaves, found, strict=True):
        leaf.gradient = _copy(gradient)


@contextmanager
def _heard(graph: Graph) -> Iterator[None]:
    """What a backward pass sends is written on nodes and edges."""
    handles = []
    try:
        for node in graph.operations:

            def ran(sent, arrived, node=node):
                node.gradient = _copy(arrived[0])
                graph.backward_order.append(node.index)
                for edge, gradient in zip(graph.inputs(node), sent, strict=False):
                    edge.gradient = _copy(gradient)

            handles.append(node.function.register_hook(ran))
        yield
    finally:
        for handle in handles:
            handle.remove()


@unseen
def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
