"""Which gradient is in ``.grad``: fresh, used by a step already, or one on top of the other?

Known without a hook and without a patch: the version counter of a gradient rises with everything
that writes to it and stands still while an optimizer reads it. ``look`` compares what is there
with what was there; between which events it changed says who did it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bpkit.diagnosis.wiring import norms, stacked

_FED = 256  # backwards remembered for one gradient, where nobody ever steps


@dataclass(eq=False)
class Backward:
    """One backward pass, for as long as some gradient holds what it contributed."""

    loss: Tensor | float | None = None  # as given to backward, so with the loss scale
    scale: Tensor | None = None
    holders: int = 0  # gradients that it went into, less those that were zeroed unused
    seen: bool = True  # False stands for gradients that came from elsewhere


@dataclass(eq=False)
class Slot:
    """One parameter and what is in its ``.grad``."""

    parameter: Tensor
    name: str
    owner: dict[str, Any] | None = None  # facts of the optimizer that has it
    mark: tuple[int, int] | None = None  # identity and version of the gradient, when last seen
    other: bool = False  # the last change put another tensor in its place
    fed: list[Backward] = field(default_factory=list)  # what arrived since it was zero
    used: bool = False  # holds a gradient that a step has used
    stale: bool = False  # holds a new one on top of a used one
    moved: bool = False  # written to since the last backward
    scaled: bool = False  # the loss scale is in it
    norm: Tensor | None = None  # as the last backward left it
    held: tuple[Tensor, int, Tensor] | None = None  # a gradient, its version, its norm
    weights: Tensor | None = None  # new room for each copy would cost more than the copy

    def room(self) -> Tensor:
        """Room for a copy of the weights."""
        now = self.parameter
        if self.weights is None or (self.weights.shape, self.weights.dtype) != (
            now.shape,
            now.dtype,
        ):
            self.weights = torch.empty_like(now, requires_grad=False)
        return self.weights

    def hold(self, copy: bool) -> None:
        """Keep the gradient, to compare it with the next one.

        Where ``.grad`` is set to ``None`` before the next backward, nobody else needs the tensor
        any more; where it is zeroed in place only a copy lasts.
        """
        gradient = self.parameter.grad
        norm = norms([gradient])[0] if self.moved or self.norm is None else self.norm
        gradient = gradient.detach().clone() if copy else gradient
        self.held = (gradient, gradient._version, norm)


class Gradients:
    """The slots of all parameters that are watched.

    ``note(name, **details)`` is told what is worth a fact; ``wasted`` counts the backwards whose
    gradient was zeroed before any step had used it, since the last step.
    """

    def __init__(self, note: Callable[..., None]):
        self.note = note
        self.slots: dict[int, Slot] = {}
        self._order: list[Slot] = []  # the same, and their marks, as a look wants them
        self._marks: list[tuple[int, int] | None] = []
        self.wasted = 0
        self.zeroed_in_place = False
        # One for all: however many gradients were assigned, no backward pass was seen.
        self._elsewhere = Backward(seen=False)

    def slot(self, parameter: Tensor, name: str) -> Slot:
        """The slot of ``parameter``, a new one if need be."""
        slot = self.slots.get(id(parameter))
        if slot is None or slot.parameter is not parameter:
            slot = self.slots[id(parameter)] = Slot(parameter, name)
            gradient = parameter.grad
            if gradient is not None:  # from before: nobody knows whether a step has used it
                slot.mark, slot.fed = (id(gradient), gradient._version), [self._elsewhere]
            self._arrange()
        return slot

    def keep(self, parameters: set[int]) -> None:
        """Forget the slots of all others."""
        if not self.slots.keys() <= parameters:
            self.slots = {key: slot for key, slot in self.slots.items() if key in parameters}
            self._arrange()

    def _arrange(self) -> None:
        self._order = list(self.slots.values())
        self._marks = [slot.mark for slot in self._order]

    def look(self) -> list[Slot]:
        """The slots whose gradient is another one, or was written to, since the last look."""
        marks = [
            None if (gradient := slot.parameter.grad) is None else (id(gradient), gradient._version)
            for slot in self._order
        ]
        if marks == self._marks:
            return []
        changed = []
        for slot, mark in zip(self._order, marks, strict=True):
            if mark != slot.mark:
                slot.other = bool(mark and slot.mark and mark[0] != slot.mark[0])
                slot.mark = mark
                changed.append(slot)
        self._marks = marks
        return changed

    def empty(self, slots: Iterable[Slot]) -> None:
        """Their gradients are gone, or zero."""
        lost: dict[Backward, None] = {}
        for slot in slots:
            self.zeroed_in_place |= slot.mark is not None
            for backward in slot.fed:
                backward.holders -= 1
                if backward.holders == 0 and backward.seen:
                    lost[backward] = None
            slot.fed, slot.used, slot.stale = [], False, False
            slot.moved = slot.scaled = False
        if lost:
            self.wasted += len(lost)
            self.note("backward_wasted", backwards=len(lost))

    def outside(self, when: str) -> bool:
        """What the program did to gradients by itself; whether it wrote to a fresh one."""
        changed = self.look()
        if not changed:
            return False
        self.empty(slot for slot in changed if slot.mark is None)
        written = [slot for slot in changed if slot.mark is not None]
        fresh = [slot for slot in written if slot.fed]
        for slot in fresh:
            slot.moved = True
        if any(slot.scaled for slot in fresh):
            self.note("touched_while_scaled", when=when)
        # Whether it was zeroed is a question of values. Clipping right before the step is so
        # frequent that there nobody waits for the answer: the recorder has it later.
        asked = [slot for slot in written if not slot.fed] if when == "before step" else written
        if asked:
            self._ask(asked, when)
        return bool(fresh)

    def _ask(self, slots: list[Slot], when: str) -> None:
        sizes = stacked(norms([slot.parameter.grad for slot in slots])).tolist()
        self.empty(slot for slot, size in zip(slots, sizes, strict=True) if size == 0)
        full = [slot for slot, size in zip(slots, sizes, strict=True) if size != 0]
        full = [slot for slot in full if not slot.fed]
        late = [slot for slot in full if slot.used and not slot.other]
        if late:
            self.note("changed_after_step", when=when, parameters=some(late))
        new = [slot for slot in full if not slot.used or slot.other]
        for slot in new:
            slot.fed, slot.used, slot.moved = [self._elsewhere], False, True
        if new:
            self.note("gradient_from_elsewhere", when=when, parameters=some(new))

    def arrived(self, backward: Backward) -> list[Slot]:
        """The slots that a backward pass has fed."""
        fed = [slot for slot in self.look() if slot.mark is not None]
        for slot in fed:
            slot.stale |= slot.used and not slot.fed
            slot.moved, slot.scaled = False, backward.scale is not None
            slot.fed.append(backward)
            if len(slot.fed) > _FED:
                del slot.fed[: _FED // 2]
        backward.holders += len(fed)
        for slot, norm in zip(fed, norms([slot.parameter.grad for slot in fed]), strict=True):
            slot.norm = norm
        return fed

    def use(self, slots: list[Slot]) -> None:
        """A step has used the gradients of these."""
        for slot in slots:
            slot.used = slot.mark is not None and bool(slot.used or slot.fed)
            slot.fed, slot.stale, slot.moved, slot.scaled = [], False, False, False


def some(slots: Iterable[Slot], number: int = 8) -> list[str]:
    """The first names."""
    return [slot.name for slot in slots][:number]
