"""What did the program call?  Activations and gradients, heard on the steps looked at closely.

A ``TorchFunctionMode`` hears functional and method calls as well as modules, whatever name they
were imported under. It costs a few microseconds for each call, so it listens on a few steps only,
and keeps numbers, no activations.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode

from bpkit.record import reader_line, take_off

# Results that are exactly zero where the unit is off, and those that flatten out on both sides.
_CUTTING = frozenset(
    ("relu", "relu6", "threshold", "clamp", "clip", "clamp_min", "maximum", "hardtanh", "hardswish")
)
_FLATTENING = {"tanh": (0.0, 0.97), "sigmoid": (0.5, 0.47)}  # centre, and how far is flat
_WEIGHTED = frozenset(
    (
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "einsum",
        "lstm",
        "gru",
    )
)
_PLACES = 256  # of activations, and of calls on gradients, that are told apart


class Calls(TorchFunctionMode):
    """Between :meth:`start` and :meth:`stop`, hears the calls of this thread.

    ``phase`` is set from outside: "forward", "backward" (nothing is heard) or "gradients", the
    time between backward and step.
    """

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.module_names = names
        self._gradients: dict[int, tuple[weakref.ref, str]] = {}
        self.phase = "forward"
        self.forwards = 0
        self.activations: dict[str, dict[str, Any]] = {}
        self.gradient_calls: dict[tuple, dict[str, Any]] = {}
        self._results: list[tuple[weakref.ref, dict[str, Any]]] = []
        self._made: dict[int, tuple[weakref.ref, dict[str, Any]]] = {}
        self._weighted = 0
        self._stack: list[nn.Module] = []
        self._hooks: list = []

    def start(self) -> None:
        self.process, thread = os.getpid(), threading.get_ident()

        def entered(module, arguments):
            if not is_compiling() and threading.get_ident() == thread:
                self._stack.append(module)
                first = self.phase != "backward" and torch.is_grad_enabled()
                self.forwards += first and self.module_names.get(id(module)) == ""

        def left(module, arguments, output):
            if not is_compiling() and self._stack and threading.get_ident() == thread:
                self._stack.pop()

        self._hooks = [
            register_module_forward_pre_hook(entered),
            register_module_forward_hook(left, always_call=True),
        ]
        # Below the reader's modes: these come and go in their own order, while this one stays.
        # Only the default device insists on being further down.
        default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        stack = [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
        lowest = int(bool(stack) and stack[0] is default)
        for mode in [*stack[:lowest], self, *stack[lowest:]]:
            _push_mode(mode)

    def know(self, gradients: dict[str, Tensor]) -> None:
        """The gradients that there are now. Not kept: only recognised while they live."""
        self._gradients = {id(g): (weakref.ref(g), name) for name, g in gradients.items()}

    def _owner(self, item: Any) -> str | None:
        reference, name = self._gradients.get(id(item), (None, None))
        return name if reference is not None and reference() is item else None

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        take_off(self)
        for activation in self.activations.values():
            activation["followers"] = self._weighted - activation["followers"]
        for result, call in self._results:
            call["alive"] += result() is not None
        self._hooks, self._stack, self._made, self._results = [], [], {}, []

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        name = getattr(function, "__name__", "")
        if name == "__get__" or self.phase == "backward" or is_compiling():
            return result
        # A worker of a DataLoader inherits the mode when it is forked; nobody reads it there.
        if os.getpid() == self.process:
            with DisableTorchFunction():
                self._hear(name, [*arguments, *keywords.values()], result, sys._getframe(1))
        return result

    def _hear(self, name: str, given: list[Any], result: Any, frame: Any) -> None:
        stem = name.strip("_")
        if frame.f_code.co_filename == clip_grad.__file__:
            listed = [t for item in given if isinstance(item, list | tuple) for t in item]
            self._on_gradient(name, [*given, *listed], None, frame)
        elif any(self._owner(item) for item in given):
            self._on_gradient(name, given, result, frame)
        for reference, call in self._results:
            call["read"] += any(item is not None and reference() is item for item in given)
        if self.phase != "forward" or not isinstance(result, Tensor) or not result.requires_grad:
            return
        if stem in _WEIGHTED:
            self._weighted += 1
        elif stem in ("mul", "rmul", "imul"):
            for item in given:
                reference, activation = self._made.get(id(item), (None, None))
                if activation is not None and reference() is item:
                    activation["gate"] = True
        elif (stem in _CUTTING or stem in _FLATTENING) and len(self.activations) < _PLACES:
            self._activation(stem, result, frame)

    def _activation(self, stem: str, result: Tensor, frame: Any) -> None:
        if not result.is_floating_point() or result.numel() == 0 or result.is_nested:
            return
        if is_functorch_wrapped_tensor(result):  # what is counted of it dies with its vmap
            return
        values = result.detach()
        activation = {"function": stem, "gate": False, "followers": self._weighted}
        if stem in _FLATTENING:
            centre, flat = _FLATTENING[stem]
            activation["saturated"] = (values - centre).abs().gt(flat).float().mean()
        else:
            unit = _unit_dimension(result)
            others = [d for d in range(result.ndim) if d != unit]
            values = values if stem == "relu" else values.abs()
            peaks = values.amax(others) if others else values
            activation["alive"] = torch.count_nonzero(peaks)
            activation["units"] = peaks.numel()
            activation["samples"] = result.numel() // peaks.numel()
        place, number = self._place(frame), 2
        key = place
        while key in self.activations:  # one place, used several times in a forward pass
            key, number = f"{place} ({number})", number + 1
        self.activations[key] = activation
        self._made[id(result)] = (weakref.ref(result), activation)

    def _place(self, frame: Any) -> str:
        module = self._stack[-1] if self._stack else None
        name = self.module_names.get(id(module), type(module).__name__) if module else ""
        if module is not None and type(module).__module__.startswith("torch.nn.modules."):
            return name
        line = reader_line(frame)
        return f"{name}: {line}" if name else str(line)

    def _on_gradient(self, name: str, given: list[Any], result: Any, frame: Any) -> None:
        utility = None  # a function of torch.nn.utils.clip_grad, if it is one that called
        outer = frame
        while outer is not None and outer.f_code.co_filename == clip_grad.__file__:
            name_here, outer = outer.f_code.co_name, outer.f_back
            utility = utility if name_here.startswith("_") else name_here
        line, kind = str(reader_line(frame)), utility or name
        key = (self.phase, kind, line)
        if key not in self.gradient_calls and len(self.gradient_calls) >= _PLACES:
            return
        call = self.gradient_calls.setdefault(
            key,
            {
                "function": kind, "line": line, "phase": self.phase, "calls": 0, "read": 0,
                "alive": 0, "in_place": False, "parameters": [],
            },
        )  # fmt: skip
        call["calls"] += 1
        call["in_place"] |= name.endswith("_") and not name.endswith("__")
        for item in given:
            owner = self._owner(item)
            if (
                owner is not None
                and owner not in call["parameters"]
                and len(call["parameters"]) < 8
            ):
                call["parameters"].append(owner)
        if isinstance(result, Tensor) and not any(result is item for item in given):
            self._results.append((weakref.ref(result), call))


def _unit_dimension(result: Tensor) -> int:
    """Which dimension counts the units: channels of a convolution, features otherwise."""
    function = result.grad_fn
    for _ in range(6):  # past a normalisation, a reshape, a sum
        if function is None:
            break
        name = function.name()
        if "Convolution" in name or "BatchNorm" in name:
            return min(1, result.ndim - 1)
        if "mmBackward" in name or "MmBackward" in name:
            return result.ndim - 1
        function = function.next_functions[0][0] if function.next_functions else None
    return 1 if result.ndim > 3 else result.ndim - 1
