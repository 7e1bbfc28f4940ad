"""What is worth a look on some steps only: weights, graph, and single calls.

A closer look lasts from the end of one step to the moment at which the next one finds its
gradients.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bpkit.diagnosis.calls import Calls
from bpkit.diagnosis.evidence import Evidence
from bpkit.diagnosis.gradients import Gradients, Slot, some
from bpkit.diagnosis.wiring import deepest, held_at, is_compiled, norms, root_of, stacked, walk
from bpkit.interrupt import unbroken

# Nodes that are looked at, all in all, and earlier graphs that are remembered: freeing a chain of
# more than some 30,000 nodes that Python has seen overflows the stack.
_NODES, _TAGS = 20_000, 300
_MANY = 64  # entries of a kind in the evidence


class _Tag:
    """Left in a graph's metadata; a weak reference to it tells whether the graph still exists."""


class CloserLook:
    """Fills ``graphs``, ``leaves``, ``activations`` and ``calls`` of the evidence."""

    def __init__(
        self, model: nn.Module, evidence: Evidence, gradients: Gradients, note: Callable[..., None]
    ):
        self.model, self.evidence, self.gradients, self.note = model, evidence, gradients, note
        self.open = False
        self._compiled = any(is_compiled(module) for module in model.modules())
        self._number = self._looked = 0
        self._muted = False
        self._tags: deque[tuple[int, weakref.ref]] = deque(maxlen=_TAGS)
        self._calls: Calls | None = None

    @unbroken
    def start(self) -> None:
        if self.open or self._muted:
            return
        self.open, self._inspected, self._roots = True, False, []
        self._number += 1
        # Lines, and four more norms of all weights: not each time.
        self.thorough = self._number <= 5 or self._number % 10 == 0
        self._weights = self._weigh() if self.thorough else {}
        if not self._compiled:  # a mode would make it compile once more
            self._calls = Calls({id(m): name for name, m in self.model.named_modules()})
            self._tell_gradients()
            self._calls.start()

    @unbroken
    def stop(self) -> dict[str, Any]:
        """End the look, if there is one; returns its part of a sample."""
        if not self.open:
            return {}
        self.open, calls, self._calls = False, self._calls, None
        heard: dict[str, Any] = {"roots": self._roots}
        if calls is None:
            return heard
        calls.stop()
        heard |= {"forwards": calls.forwards, "alive": {}, "saturated": {}}
        for place, activation in calls.activations.items():
            for what in ("alive", "saturated"):
                if what in activation:
                    heard[what][place] = activation.pop(what)
            self.evidence.activations.setdefault(place, {}).update(activation)
        step = self.evidence.steps + 1
        for key, call in calls.gradient_calls.items():
            if key in self.evidence.calls:
                known = self.evidence.calls[key]
                known |= {name: known[name] + call[name] for name in ("calls", "read", "alive")}
                known |= {"looks": known["looks"] + 1, "last": step}
            elif len(self.evidence.calls) < 4 * _MANY:
                self.evidence.calls[key] = call | {"looks": 1, "first": step, "last": step}
        return heard

    def mute(self) -> None:
        """No more closer looks: steps are made within backward passes.

        A backward pass is itself a call that the mode hears, and no mode can be taken off the
        stack, or put on it, from within such a call.
        """
        self._muted, self.open = True, False
        if self._calls is not None:
            self._calls.phase = "backward"

    def close(self) -> None:
        """The block is left."""
        self.stop()
        if self._calls is not None:
            self._calls.stop()
        self._muted, self._calls = False, None

    def before_backward(self, roots: list[Tensor]) -> None:
        """Weights and graph, right before the first backward."""
        if self.open or self.evidence.steps < 50:
            for root in roots:
                self._tag(root)
        if not self.open:
            return
        if self._calls is not None:
            self._calls.phase = "backward"
        if len(self._roots) < _MANY:
            self._roots += [root_of(root) for root in roots]
        if not self._inspected:
            self._inspected = True
            self.compare_weights("before backward")
            self._read_graph([root for root in roots if root.grad_fn is not None])

    def after_backward(self) -> None:
        if self.open:
            self.compare_weights("during backward")
            self._tell_gradients()
            if self._calls is not None:
                self._calls.phase = "gradients"

    def _tell_gradients(self) -> None:
        if self._calls is not None:
            known = {slot.name: slot.parameter.grad for slot in self.gradients.slots.values()}
            self._calls.know({name: g for name, g in known.items() if g is not None})

    def _weigh(self) -> dict[Slot, float]:
        slots = list(self.gradients.slots.values())
        sizes = stacked(norms([slot.parameter for slot in slots]))
        return dict(zip(slots, [] if sizes is None else sizes.tolist(), strict=True))

    def compare_weights(self, when: str) -> None:
        """Note the weights that changed since the last comparison: no step was made."""
        if not self.thorough:
            return
        before, self._weights = self._weights, self._weigh()
        other = [
            slot
            for slot, size in self._weights.items()
            if slot in before and before[slot] != size and not math.isnan(size)
        ]
        if other:
            self.note("weights_changed", when=when, parameters=some(other), number=len(other))

    def _read_graph(self, roots: list[Tensor]) -> None:
        seen = {"step": self.evidence.steps + 1, "nodes": None, "complete": False, "unreached": []}
        left, slots = _NODES - self._looked, self.gradients.slots
        if left > 0:
            nodes, leaves, complete = walk([root.grad_fn for root in roots], left)
            self._looked += nodes
            seen |= {"nodes": nodes, "complete": complete}
            if complete:
                reached = {id(leaf) for leaf in leaves}
                trainable = (s for s in slots.values() if s.parameter.requires_grad)
                seen["unreached"] = [s.name for s in trainable if id(s.parameter) not in reached]
            for leaf in leaves:
                if id(leaf) not in slots:
                    self._stranger(leaf)
        if len(self.evidence.graphs) >= 4 * _MANY:
            del self.evidence.graphs[_MANY : 2 * _MANY]
        self.evidence.graphs.append(seen)
        self.count_alive()

    def _stranger(self, leaf: Tensor) -> None:
        facts = {
            "shape": tuple(leaf.shape),
            "parameter": isinstance(leaf, nn.Parameter),
            "held": held_at(self.model, leaf),
        }
        known = next((one for one in self.evidence.leaves if facts.items() <= one.items()), None)
        if known is not None:
            known["looks"] += 1
        elif len(self.evidence.leaves) < _MANY:
            first = self.evidence.steps + 1
            self.evidence.leaves.append({**facts, "first": first, "looks": 1})

    def _tag(self, root: Tensor) -> None:
        """Remember this graph without keeping it."""
        if root.grad_fn is None:
            return
        tag = _Tag()
        for node in (root.grad_fn, deepest(root.grad_fn)):
            node.metadata["bpkit"] = tag
        self._tags.append((self.evidence.steps + 1, weakref.ref(tag)))

    def count_alive(self) -> None:
        """How many graphs of steps that are long over still exist."""
        if self.evidence.graphs:
            over = self.evidence.steps - 2
            old = [tag() is not None for step, tag in self._tags if step <= over]
            self.evidence.graphs[-1] |= {"tagged": len(old), "alive": sum(old)}
