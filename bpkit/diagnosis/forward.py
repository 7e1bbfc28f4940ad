"""What did one step of this model do?  A recorded forward and backward, and who depends on whom.

``observe`` runs ``loss_fn(model, batch)`` under ``bpkit.record``, then a backward pass, and keeps
values, graph, gradients, warnings and errors. ``Flow`` answers, from the recording alone, which
parameters and which tensors of the batch an operation's result depends on, also where autograd
lost track of it. Nothing here judges.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bpkit.batches import tensors_in
from bpkit.graph import Graph, Node
from bpkit.interrupt import together
from bpkit.record import Operation, Recording, Value, record

# They read a tensor but nothing of its values.
_ABOUT = frozenset((
    "size", "dim", "shape", "numel", "nelement", "is_floating_point", "stride", "new_zeros",
    "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like",
    "empty_like", "rand_like", "randn_like", "len", "bool_", "is_contiguous", "device",
    "type", "dtype", "is_complex", "element_size", "data_ptr", "storage", "untyped_storage",
    "requires_grad", "register_hook", "retain_grad", "backward", "get_device", "format",
    "repr", "str", "requires_grad_", "_version",
))  # fmt: skip
# They change shape, dtype or device, and no number.
SHAPING = frozenset((
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute",
    "contiguous", "clone", "to", "float", "double", "half", "bfloat16", "type", "t", "T",
    "mT", "movedim", "getitem", "select", "narrow", "expand", "expand_as", "view_as",
    "reshape_as", "unflatten", "cpu", "cuda", "identity", "swapaxes", "type_as", "ravel",
    "long", "int", "detach", "split", "chunk", "unbind", "requires_grad_", "stack", "cat",
    "data",
))  # fmt: skip


class Flow:
    """Dependencies between the operations of a recording.

    Names are ``parameter:fc.weight``, ``buffer:bn.running_mean``, ``batch[0]`` and, for a tensor
    that came from elsewhere, ``outside:<id>``.
    """

    def __init__(self, recording: Recording, names: dict[int, str]):
        self.recording = recording
        self.names = names
        self.operations = recording.operations
        self.sources: list[frozenset[str]] = []
        for operation in self.operations:
            found: frozenset[str] = frozenset()
            if operation.name not in _ABOUT:
                for value in operation.inputs:
                    if isinstance(value, Value):
                        found |= self.of(value)
            self.sources.append(found)

    def of(self, value: Value) -> frozenset[str]:
        """What ``value`` depends on."""
        if value.producer is not None:
            return self.sources[value.producer]
        if value.tensor in self.names:
            return frozenset({self.names[value.tensor]})
        tensor = self.recording._known.get(value.tensor, (None,))[0]
        if tensor is not None and tensor.grad_fn is not None:
            return self._behind(tensor)
        return frozenset({f"outside:{value.tensor}"})

    def _behind(self, tensor: Tensor) -> frozenset[str]:
        """Through custom functions, which the recording does not see: by autograd's graph."""
        found: frozenset[str] = frozenset()
        seen, todo = set(), [tensor.grad_fn]
        while todo:
            function = todo.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            made = self.recording._makers.get(function)
            if made is not None and made < len(self.sources):
                found |= self.sources[made]
            elif hasattr(function, "variable"):
                leaf = id(function.variable)
                found |= {self.names.get(leaf, f"outside:{leaf}")}
            else:
                todo += [source for source, _ in function.next_functions]
        return found

    def ancestors(self, value: Value | None) -> set[int]:
        """Indices of the operations from which ``value`` was computed."""
        seen: set[int] = set()
        todo = [value.producer] if value is not None else []
        while todo:
            index = todo.pop()
            if index is None or index in seen:
                continue
            seen.add(index)
            todo += [v.producer for v in self.operations[index].inputs if isinstance(v, Value)]
        return seen

    def behind(self, value: Value, through: Iterable[str] = SHAPING) -> Value:
        """``value`` before reshaping, casting and indexing."""
        while value.producer is not None:
            operation = self.operations[value.producer]
            given = [v for v in operation.inputs if isinstance(v, Value)]
            if operation.name not in through or not given:
                break
            value = given[0]
        return value

    def maker(self, value: Value) -> Operation | None:
        """The operation that computed ``value``, reshaping left out."""
        value = self.behind(value)
        return None if value.producer is None else self.operations[value.producer]

    def is_data(self, value: Value) -> bool:
        """Whether ``value`` is a tensor of the batch, perhaps reshaped or cast or embedded in
        one-hot form, and nothing that a model computed."""
        sources = self.of(value)
        return bool(sources) and all(source.startswith("batch") for source in sources)


@dataclass
class Observation:
    """One recorded forward and backward on one batch.

    Attributes:
        index: number of the batch; ``batch`` the batch itself.
        recording, flow: of the forward pass.
        returned: what ``loss_fn`` returned; ``loss`` the same if it is a tensor.
        graph: autograd's graph behind it, ``None`` if there is none.
        gradients: for each parameter name the gradient of this loss alone, or ``None``.
        parameters: name -> parameter, as before the forward pass.
        rebound: names that hold another tensor after the forward pass than before.
        written: names whose values changed during the backward pass.
        error: what forward or backward raised, ``phase`` says in which of the two.
        messages: warnings given on the way.
        modules: ids of the modules whose forward ran.
    """

    index: int
    batch: Any
    recording: Recording
    flow: Flow
    parameters: dict[str, nn.Parameter]
    returned: Any = None
    loss: Tensor | None = None
    loss_value: Value | None = None
    graph: Graph | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    rebound: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    error: BaseException | None = None
    phase: str = "forward"
    messages: list[str] = field(default_factory=list)
    modules: set[int] = field(default_factory=set)

    @cached_property
    def live(self) -> set[int]:
        """Indices of the operations from which the loss was computed."""
        return self.flow.ancestors(self.loss_value)

    def operation_of(self, node: Node) -> Operation | None:
        """The recorded call that left this node of the graph."""
        index = self.recording._makers.get(node.function)
        return None if index is None else self.recording.operations[index]

    def calls(self, *names: str) -> list[Operation]:
        """The calls of these functions that the loss depends on."""
        return [o for o in self.recording if o.name in names and o.index in self.live]

    def nodes(self, *starts: str) -> list[Node]:
        """The nodes of the graph whose operation begins so: ``"NllLoss"``."""
        if self.graph is None:
            return []
        return [n for n in self.graph.operations if n.operation.startswith(starts)]

    @property
    def starved(self) -> list[str]:
        """Trainable parameters to which the loss sent no gradient."""
        return [
            name
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and self.gradients.get(name) is None
        ]

    def line(self, operation: Operation | Node | None) -> str:
        """Where it stands, as text for a finding."""
        if operation is None:
            return "unknown line"
        where = f"{operation.module}: " if operation.module else ""
        return (
            f"{where}{operation.line}" if operation.line else where.rstrip(": ") or "unknown line"
        )


def observe(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    index: int = 0,
    backward: bool = True,
) -> Observation:
    """Run and record ``loss_fn(model, batch)``, then its backward pass.

    Leaves its gradients in ``.grad`` (added to what is there) and whatever else the model does:
    call it inside :func:`bpkit.preserve.preserve`.
    """
    parameters = dict(model.named_parameters())
    names = {id(p): f"parameter:{n}" for n, p in parameters.items()}
    names |= {id(b): f"buffer:{n}" for n, b in model.named_buffers()}
    names |= {id(t): path for path, t in tensors_in(batch)}
    ran: set[int] = set()

    def entered(module, given):
        ran.add(id(module))

    plain = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    hooks = [m.register_forward_pre_hook(entered) for m in plain]
    loss = error = None
    with together(warnings.catch_warnings(record=True)) as caught:
        warnings.simplefilter("always")
        try:
            with record(model) as recording:
                loss = loss_fn(model, batch)
        except Exception as raised:
            error = raised
        finally:
            for hook in hooks:
                hook.remove()
        seen = Observation(
            index, batch, recording, Flow(recording, names), parameters, error=error, modules=ran
        )
        seen.returned = loss
        after = dict(model.named_parameters())
        seen.rebound = [n for n, p in parameters.items() if after.get(n) is not p]
        if isinstance(loss, Tensor):
            seen.loss = loss
            seen.loss_value = recording._known.get(id(loss), (None, None, None))[2]
            if loss.requires_grad:
                backward &= loss.numel() == 1 and not loss.is_complex()
                if backward:
                    _backward(seen)
                whole = backward and seen.error is None
                try:
                    seen.graph = recording.graph(loss, gradients=whole)
                except RuntimeError:  # reentrant checkpoints refuse to be asked for gradients
                    seen.graph = recording.graph(loss)
    seen.messages = [str(warning.message) for warning in caught]
    return seen


def _backward(seen: Observation) -> None:
    before = {name: p.grad for name, p in seen.parameters.items()}
    values = {name: p.detach().clone() for name, p in seen.parameters.items()}
    for parameter in seen.parameters.values():
        parameter.grad = None
    try:
        seen.loss.backward(retain_graph=True)
    except Exception as raised:
        seen.error, seen.phase = raised, "backward"
    for name, parameter in seen.parameters.items():
        seen.gradients[name] = parameter.grad
        parameter.grad = before[name]
        if not torch.equal(values[name].nan_to_num(), parameter.detach().nan_to_num()):
            seen.written.append(name)
