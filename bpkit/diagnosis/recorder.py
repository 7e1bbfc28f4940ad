"""How does one listen to a training loop without changing it?

``Recorder`` stands around a loop that stays as it is, the reader's own or a plain one, and fills
an ``Evidence``. It hears optimizer steps by PyTorch's global step hooks, and ``backward``,
``zero_grad``, schedulers, loss scalers and data loaders by wrapping their functions for the time
of the block. It sees gradients by their version counters (``gradients``), and weights, graph and
single calls (``closer``) on an optimizer's first three steps and then on every ``every``-th.

Nothing is hooked to the reader's own modules and tensors, so that they can be copied and saved
inside the block, and no number is asked of a device before some hundred have come together.

Not seen: other threads; what a compiled model does inside; ``torch.autograd.backward`` imported
by name before the block (its gradients count as coming from elsewhere).

Sources: https://docs.pytorch.org/docs/stable/optim.html (step hooks),
https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.Node.metadata
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import is_fake
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from bpkit.arguments import unlisten
from bpkit.diagnosis.closer import CloserLook
from bpkit.diagnosis.evidence import Evidence
from bpkit.diagnosis.gradients import Backward, Gradients, Slot, some
from bpkit.diagnosis.series import Series
from bpkit.diagnosis.wiring import norms, parameters_of, products
from bpkit.record import raised_line, reader_line

_MANY = 64  # entries of a kind in the evidence, where nothing else bounds them


@dataclass(eq=False)
class _Owner:
    """One optimizer, while it lives."""

    facts: dict[str, Any]
    reference: weakref.ref
    slots: list[Slot] = field(default_factory=list)
    size: tuple[int, ...] = ()
    waiting: int = 0  # backwards since its last step that reached it
    unscaled: bool = False
    row: dict[str, Any] | None = None  # of the step that is being made
    sample: dict[str, Any] | None = None
    kept: list[Slot] = field(default_factory=list)  # whose weights are kept over this step
    free: list[bool] = field(default_factory=list)  # requires_grad of the slots at its last step
    thawed: set[Slot] = field(default_factory=set)  # frozen at a step, trainable at a later one
    sizes: list[Tensor] = field(default_factory=list)  # and their norms
    held: list[Slot] = field(default_factory=list)  # whose gradient is held for the next step


class Recorder:
    """``with Recorder(model, optimizer) as recorder: ...`` fills ``recorder.evidence``."""

    def __init__(self, model: nn.Module, *optimizers: Optimizer, every: int = 10):
        _check(model, optimizers, every)
        self.model, self.given, self.every = model, optimizers, every
        self.evidence = Evidence(every=every)
        self.running = False
        self._rows, self._samples = Series(), Series(limit=1024, waiting=64)
        self._gradients = Gradients(self._note)
        self._closer = CloserLook(model, self.evidence, self._gradients, self._note)
        self._owners: dict[int, _Owner] = {}  # by id, as long as the optimizer lives
        self._number = 0
        self._names: dict[str, Tensor] = {}
        self._orders: dict[tuple[str, ...], str] = {}
        self._events: list[str] = []

    def __enter__(self) -> Recorder:
        if self.running:
            raise RuntimeError(
                "this log is already running: a loop inside the block needs a log of its own, "
                "watch(model, optimizer)"
            )
        self.running, self._thread = True, threading.get_ident()
        self._hooks: list[Any] = []
        self._patches: list[tuple[Any, str, Any, Any]] = []
        try:
            self._listen()
        except BaseException:  # the block is never entered, so nobody will leave it
            self._fall_silent()
            raise
        return self

    def _listen(self) -> None:
        self._active: set[str] = set()  # wrapped functions that are running
        self._stepping: list[Optimizer] = []
        self._backward: Backward | None = None
        self._in_closure = False
        self._scale: Tensor | None = None
        self._heard: dict[str, Any] = {}
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        self._wrap(torch.autograd, "backward", self._around_backward)
        for kind in (nn.Module, *_family(Optimizer, "zero_grad")):
            self._wrap(kind, "zero_grad", self._around_zero)
        for kind in _family(LRScheduler, "step"):
            self._wrap(kind, "step", self._around_scheduler)
        self._wrap(GradScaler, "scale", self._around_scale)
        self._wrap(GradScaler, "unscale_", self._around_unscale)
        self._wrap(GradScaler, "step", self._around_scaler_step)
        self._wrap(DataLoader, "__iter__", self._around_loader)
        with DisableTorchFunction():
            self._wire()
            for optimizer in self.given:
                self._own(optimizer)
            self._gradients.look()
            self._closer.start()

    def _fall_silent(self) -> None:
        self.running = False
        self._closer.close()
        for hook in self._hooks:
            hook.remove()
        for owner, name, original, wrapper in reversed(self._patches):
            if vars(owner).get(name) is wrapper:  # else wrapped again by others: ours falls silent
                setattr(owner, name, original)

    def __exit__(self, kind, error, trace) -> None:
        self._fall_silent()
        unlisten(trace)
        if error is not None:
            self._note(
                "raised",
                error=_short(error),
                line=str(raised_line(trace)),
                recording=torch.is_grad_enabled(),
            )
        self._closer.count_alive()
        self.settle()

    def settle(self) -> Evidence:
        """Everything up to now, as numbers."""
        for row in self._rows.settle():
            _finish_row(self.evidence, row)
        for sample in self._samples.settle():
            _finish_sample(self.evidence, sample)
        self.evidence.rows, self.evidence.samples = self._rows.rows, self._samples.rows
        return self.evidence

    def _wrap(self, owner: Any, name: str, around: Callable) -> None:
        original, key = vars(owner)[name], around.__name__

        @functools.wraps(original)
        def wrapper(*arguments, **keywords):
            elsewhere = threading.get_ident() != self._thread
            if elsewhere or not self.running or key in self._active:
                return original(*arguments, **keywords)
            self._active.add(key)
            try:
                return around(original, *arguments, **keywords)
            finally:
                self._active.discard(key)

        setattr(owner, name, wrapper)
        self._patches.append((owner, name, original, wrapper))

    @property
    def _now(self) -> int:
        """The number of the step that is being prepared or made."""
        return self.evidence.steps + 1

    def _note(self, name: str, /, **details: Any) -> None:
        known = self.evidence.facts.get(name)
        if known is None or known.count < _MANY:  # reading the line costs more than the rest
            details.setdefault("line", str(reader_line(sys._getframe(1))))
        self.evidence.note(name, self._now, **details)

    def _event(self, name: str, owner: _Owner | None = None) -> None:
        if owner is not None and owner.facts["number"]:
            name = f"{name}:{owner.facts['number']}"
        if len(self._events) < 2 * _MANY:
            self._events.append(name)
        if self._closer.open and self._closer.thorough:
            self._place(name)

    def _place(self, event: str) -> None:
        line = str(reader_line(sys._getframe(1)))
        self.evidence.lines.setdefault(event, Counter())[line] += 1

    def _outside(self, when: str) -> None:
        if self._gradients.outside(when):
            self._event("touch")

    def _before_step(self, optimizer: Optimizer, arguments: tuple, keywords: dict) -> Any:
        if not self.running or threading.get_ident() != self._thread:
            return None
        if self._stepping and self._stepping[-1] is not optimizer:
            self._stepping.append(optimizer)  # an optimizer that is part of another one
            return None
        with DisableTorchFunction():
            owner = self._own(optimizer)
            if owner is None:
                return None
            self._stepping = [optimizer]
            owner.row = owner.sample = None
            if self._looks_at(owner.facts["steps"] + 1):
                owner.sample = {}
                loose = (s for s in self._gradients.slots.values() if s.owner is None)
                owner.kept = list(dict.fromkeys([*owner.slots, *loose]))
                rooms = [slot.room() for slot in owner.kept]
                torch._foreach_copy_(rooms, [slot.parameter.detach() for slot in owner.kept])
                owner.sizes = norms(rooms)
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
        if closure is None:
            with DisableTorchFunction():
                self._found(owner, optimizer)
            return None

        def watched():
            with DisableTorchFunction():
                if owner.row is not None:  # called before, in this step: its gradients are used
                    self._outside("in closure")
                    self._gradients.use(owner.slots)
            self._in_closure = True
            try:
                result = closure()
            finally:
                self._in_closure = False
            with DisableTorchFunction():
                self._found(owner, optimizer)
            return result

        if len(arguments) > 1:
            return (arguments[0], watched, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": watched}

    def _looks_at(self, step: int) -> bool:
        return step <= 3 or step % self.every == 0

    def _found(self, owner: _Owner, optimizer: Optimizer) -> None:
        """The gradients as the step finds them."""
        if self._closer.open and self._backward is None:
            if self._closer.thorough:
                self._place("step")
            self._closer.compare_weights("between backward and step")
            self._heard = self._closer.stop()
        if self._backward is not None:  # a step from within a backward pass, by a hook
            self._arrived(self._backward)
        self._outside("before step")
        self._see_flags(owner)
        fed = [slot for slot in owner.slots if slot.fed]
        backwards = list(dict.fromkeys(b for slot in fed for b in slot.fed))
        stale = [slot for slot in fed if slot.stale]
        if stale:
            self._note("used_again", parameters=some(stale), of=len(fed))
        if owner.row is not None:  # a closure, called again
            owner.row["backwards"] += len(backwards)
            return
        if not fed:
            self._note(self._why_empty(owner), backwards=owner.waiting)
        scale = next((b.scale for b in reversed(backwards) if b.scale is not None), None)
        measured = [slot for slot in fed if slot.norm is not None]
        row = owner.row = {
            "step": self._now,
            "optimizer": owner.facts["number"],
            "backwards": len(backwards),
            "wasted": self._gradients.wasted,
            "losses": [b.loss for b in backwards if b.loss is not None],
            "learning_rate": [float(group["lr"]) for group in optimizer.param_groups],
            "scale": scale,
            "unscaled": owner.unscaled,
            "names": tuple(slot.name for slot in measured),
            "norm": [slot.norm for slot in measured],
        }
        if any(slot.moved for slot in measured):
            gradients = [slot.parameter.grad for slot in measured]
            row["applied"] = norms(gradients)
            if owner.sample is not None:
                row["largest"] = norms(gradients, math.inf)
        if owner.sample is not None:
            owner.sample = {
                "step": self._now,
                "optimizer": owner.facts["number"],
                "scale": scale,
                "gradient": {s.name: s.norm for s in owner.kept if s.fed and s.norm is not None},
                **self._compare(owner, fed),
                **self._heard,
            }
            self._heard = {}
        owner.held = fed if self._looks_at(owner.facts["steps"] + 2) else []
        for slot in owner.held:
            slot.hold(copy=self._gradients.zeroed_in_place)

    def _see_flags(self, owner: _Owner) -> None:
        """Which of its parameters are frozen at this step, those left out that were thawed once.

        At each step: who freezes parts in turn may do so in step with the closer looks.
        """
        free = [slot.parameter.requires_grad for slot in owner.slots]
        if free == owner.free:
            return
        pairs = zip(owner.slots, owner.free, free, strict=False)  # new ones come at the end
        owner.thawed |= {slot for slot, before, now in pairs if now and not before}
        owner.free = free
        frozen = (s for s, now in zip(owner.slots, free, strict=True) if not now)
        owner.facts["frozen_at_step"] = [s.name for s in frozen if s not in owner.thawed]

    def _why_empty(self, owner: _Owner) -> str:
        """The fact of a step that finds nothing new."""
        if any(slot.used for slot in owner.slots):
            return "gradient_used_twice"
        if owner.waiting:
            return "step_after_wipe"
        return "step_without_gradient" if self.evidence.backwards else "step_before_backward"

    def _compare(self, owner: _Owner, fed: list[Slot]) -> dict[str, list[Tensor]]:
        """This gradient with that of the step before: what their cosine is made of."""
        both = [slot for slot in fed if slot in owner.held]
        if any(slot.held[0]._version != slot.held[1] for slot in both):
            self._gradients.zeroed_in_place = True  # overwritten: keep copies from now on
            both = []
        pairs = [(slot.parameter.grad, slot.held[0]) for slot in both]
        now = [slot.norm for slot in both]
        if any(slot.moved or slot.norm is None for slot in both):
            now = norms([gradient for gradient, _ in pairs])
        return {"products": products(pairs), "now": now, "previous": [s.held[2] for s in both]}

    def _after_step(self, optimizer: Optimizer, arguments: tuple, keywords: dict) -> None:
        if not self._stepping or not self.running or threading.get_ident() != self._thread:
            return
        if self._stepping.pop() is not optimizer or self._stepping:
            return
        with DisableTorchFunction():
            owner = self._owners[id(optimizer)]
            if owner.row is None:  # it never called its closure
                self._found(owner, optimizer)
            self._event("step", owner)
            self._count_order()
            self._settle_step(owner)
            if owner.sample is not None:
                self._finish_look(owner)
            for row in self._rows.add(owner.row):
                _finish_row(self.evidence, row)
            self.evidence.steps += 1
            owner.facts |= {"steps": owner.facts["steps"] + 1, "last": self.evidence.steps}
            owner.facts["stateful"] = bool(optimizer.state)
            if any(self._looks_at(o.facts["steps"] + 1) for o in self._owners.values()):
                self._wire()
                if self._backward is None:
                    self._closer.start()

    def _settle_step(self, owner: _Owner) -> None:
        """A step has been made, or a loss scaler has left it out."""
        self._gradients.look()
        self._gradients.use(owner.slots)
        owner.waiting, owner.unscaled = 0, False
        self._gradients.wasted, self._scale = 0, None

    def _finish_look(self, owner: _Owner) -> None:
        """How far the weights went."""
        names, kept = [slot.name for slot in owner.kept], [slot.weights for slot in owner.kept]
        torch._foreach_sub_(kept, [slot.parameter.detach() for slot in owner.kept])
        owner.sample["before"] = dict(zip(names, owner.sizes, strict=True))
        owner.sample["change"] = dict(zip(names, norms(kept), strict=True))
        owner.kept = []
        for sample in self._samples.add(owner.sample):
            _finish_sample(self.evidence, sample)

    def _count_order(self) -> None:
        events, self._events = tuple(self._events), []
        order = self._orders.get(events)
        if order is None:
            runs = ((name, len(list(run))) for name, run in groupby(events))
            order = " ".join(name if number == 1 else f"{name}×{number}" for name, number in runs)
            if len(self._orders) >= _MANY:
                order = "others"
            else:
                self._orders[events] = order
        self.evidence.orders[order] += 1

    def _wire(self) -> None:
        """Which parameters there are now, under which names, and who owns them."""
        evidence, slots, found = self.evidence, self._gradients.slots, {}
        for name, parameter, module in parameters_of(self.model):
            found[name] = parameter
            slot = self._gradients.slot(parameter, name)
            before = self._names.get(name)
            if before is not None and before is not parameter:
                old = slots.get(id(before))
                self._note(
                    "rebound",
                    name=name,
                    shape=tuple(parameter.shape),
                    owned_before=old is not None and old.owner is not None,
                    owned_now=slot.owner is not None,
                )
            facts = evidence.parameters.get(name)
            if facts is None:
                facts = evidence.parameters[name] = {"looks": 0, "with_gradient": 0}
                facts |= {"nonzero_gradient": 0, "moved": 0, "moved_without_gradient": 0}
            facts["shape"], facts["module"] = tuple(parameter.shape), type(module).__name__
            facts["trainable"] = parameter.requires_grad
            facts["owner"] = None if slot.owner is None else slot.owner["number"]
            facts["hooks"] = len(parameter._backward_hooks or ())
            facts["post_hooks"] = len(parameter._post_accumulate_grad_hooks or ())
        self._names = found
        kept = {id(p) for p in found.values()}
        kept |= {id(slot.parameter) for owner in self._owners.values() for slot in owner.slots}
        self._gradients.keep(kept)
        if self.model.training:
            for name, module in self.model.named_modules():
                if not module.training and not module._modules:
                    evidence.modes[f"eval:{name}"] += 1

    def _own(self, optimizer: Optimizer) -> _Owner | None:
        """What is known about this optimizer; ``None`` if it has nothing to do with the model."""
        owner = self._owners.get(id(optimizer))
        size = tuple(len(group["params"]) for group in optimizer.param_groups)
        if owner is not None and owner.size == size:
            return owner
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if owner is None:
            given = any(optimizer is one for one in self.given)
            if not given:
                self._wire()  # perhaps its parameters are in the model only since now
            inside = {id(p) for p in self._names.values()}
            if not given and not any(id(p) in inside for p in parameters):
                return None
            owner = self._meet(optimizer, given)
        owner.size, facts = size, owner.facts
        inside = {id(p) for p in self._names.values()}
        names = (f"optimizer {facts['number']}, parameter {n}" for n in range(len(parameters)))
        owner.slots = list(map(self._gradients.slot, parameters, names))
        previous = next((s.owner for s in owner.slots if s.owner not in (None, facts)), None)
        if previous is not None and facts["replaces"] is None and previous["steps"]:
            facts["replaces"] = previous["number"]
            lost = previous["stateful"] and not optimizer.state
            self._note(
                "optimizer_replaced",
                kind=facts["kind"],
                after_steps=previous["steps"],
                state_lost=lost,
                same_parameters=sum(s.owner is previous for s in owner.slots) == previous["size"],
            )
        for slot in owner.slots:
            slot.owner = facts
        facts["size"] = len(owner.slots)
        facts["groups"] = [
            {key: value for key, value in group.items() if isinstance(value, int | float | tuple)}
            | {"parameters": [self._gradients.slots[id(p)].name for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        facts["outside"] = [
            {"name": s.name, "shape": tuple(s.parameter.shape)}
            for s in owner.slots
            if id(s.parameter) not in inside
        ]
        facts["frozen"] = [s.name for s in owner.slots if not s.parameter.requires_grad]
        self._gradients.look()
        return owner

    def _meet(self, optimizer: Optimizer, given: bool) -> _Owner:
        facts = {
            "number": self._number,
            "kind": type(optimizer).__name__,
            "given": given,
            "steps": 0,
            "first": self._now,
            "last": 0,
            "stateful": bool(optimizer.state),
            "replaces": None,
            "frozen_at_step": [],
        }
        self._number += 1
        if len(self.evidence.optimizers) < _MANY:
            self.evidence.optimizers.append(facts)
        key = id(optimizer)
        gone = weakref.ref(optimizer, lambda _: self._owners.pop(key, None))
        owner = self._owners[key] = _Owner(facts, gone)
        return owner

    def _arrived(self, backward: Backward) -> None:
        self._gradients.arrived(backward)
        for owner in self._owners.values():
            owner.waiting += any(slot.fed and slot.fed[-1] is backward for slot in owner.slots)

    def _around_backward(
        self, original, tensors, grad_tensors=None, retain_graph=None, create_graph=False, *rest,
        **more,
    ):  # fmt: skip
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        roots = [root for root in roots if isinstance(root, Tensor)]
        if not self._in_closure:
            self._stepping = []  # a step that is still there has raised
        with DisableTorchFunction():
            self._outside("before backward")
            self._event("backward")
            self._before_backward(roots, retain_graph, create_graph)
            backward = self._backward = Backward(_loss(roots, grad_tensors), self._scale)
            steps = self.evidence.steps
        try:
            return original(tensors, grad_tensors, retain_graph, create_graph, *rest, **more)
        except Exception as error:
            self._note("backward_raised", error=_short(error))
            raise
        finally:
            self._backward = None
            with DisableTorchFunction():
                self._arrived(backward)
                if not backward.holders:
                    self._note("backward_reached_nothing")
                if self.evidence.steps == steps:
                    self._closer.after_backward()
                else:  # steps made by hooks, from within: see there
                    self._closer.mute()

    def _before_backward(self, roots: list[Tensor], retain_graph, create_graph) -> None:
        evidence, training = self.evidence, self.model.training
        evidence.backwards += 1
        evidence.modes["train" if training else "eval"] += 1
        if not training:
            self._note("backward_in_eval", after_train=evidence.modes["train"] > 0)
        if create_graph:
            self._note("create_graph")
        elif retain_graph:
            self._note("retain_graph")
        self._closer.before_backward(roots)

    def _around_zero(self, original, thing, *arguments, **keywords):
        with DisableTorchFunction():
            self._outside("before zero_grad")
        try:
            return original(thing, *arguments, **keywords)
        finally:
            with DisableTorchFunction():
                changed = self._gradients.look()
                self._gradients.empty(changed)
                owner = self._owners.get(id(thing))
                if changed or owner is not None or thing is self.model:
                    self._event("zero", owner)

    def _around_scheduler(self, original, scheduler, *arguments, **keywords):
        result = original(scheduler, *arguments, **keywords)
        if not getattr(scheduler, "_is_initial", False):
            self._event("scheduler")
            facts = self.evidence.schedulers.setdefault(
                type(scheduler).__name__,
                {"steps": 0, "first": self._now, "last": 0, "settings": _plain(scheduler)},
            )
            facts["steps"], facts["last"] = facts["steps"] + 1, self._now
        return result

    def _around_scale(self, original, scaler, outputs):
        result = original(scaler, outputs)
        if scaler.is_enabled() and scaler._scale is not None:
            self._scale = scaler._scale.detach().clone()
        return result

    def _around_unscale(self, original, scaler, optimizer):
        owner = self._owners.get(id(optimizer))
        if owner is None or not scaler.is_enabled():
            return original(scaler, optimizer)
        with DisableTorchFunction():
            self._outside("before unscale_")
        result = original(scaler, optimizer)
        with DisableTorchFunction():
            self._gradients.look()
            for slot in owner.slots:  # it does not count as a new version
                slot.moved, slot.scaled = bool(slot.fed), False
        owner.unscaled = True
        self._event("unscale", owner)
        return result

    def _around_scaler_step(self, original, scaler, optimizer, *arguments, **keywords):
        steps = self.evidence.steps
        result = original(scaler, optimizer, *arguments, **keywords)
        owner = self._owners.get(id(optimizer))
        if owner is not None and scaler.is_enabled() and self.evidence.steps == steps:
            self._note("step_skipped")
            self.evidence.lowest_scale = min(self.evidence.lowest_scale, scaler.get_scale())
            self._event("skipped", owner)
            self._settle_step(owner)
        return result

    def _around_loader(self, original, loader):
        if len(self.evidence.epochs) < 4 * _MANY:
            batches = len(loader) if hasattr(loader.dataset, "__len__") else None
            self.evidence.epochs.append({"step": self._now, "batches": batches})
        return original(loader)


def _finish_row(evidence: Evidence, row: dict[str, Any]) -> None:
    """Work out what a row says, now that its tensors are numbers."""
    step, scale = row["step"], row["scale"]
    names, norm, largest = row.pop("names"), row.pop("norm"), row.pop("largest", None)
    applied, unscaled = row.pop("applied", None), row.pop("unscaled")
    if scale is not None and (not evidence.scales or evidence.scales[-1][1] != scale):
        evidence.scales.append((step, scale))
        del evidence.scales[4 * _MANY :]
    left = 1 / (scale or 1)
    found = [value * left for value in norm]
    used = found if applied is None else [v * (1 if unscaled else left) for v in applied]
    row["losses"] = losses = [loss * left for loss in row["losses"]]
    row["loss"] = sum(losses) / len(losses) if losses else math.nan
    row["global_norm"] = math.hypot(*found) if found else math.nan
    row["applied_norm"] = math.hypot(*used) if used else math.nan
    row["clipped"] = row["applied_norm"] < row["global_norm"] * (1 - 1e-5)
    if not all(map(math.isfinite, losses)):
        evidence.note("loss_not_finite", step, loss=row["loss"])
    bad = [name for name, value in zip(names, found, strict=True) if not math.isfinite(value)]
    if bad:
        finite = len(found) - len(bad)
        evidence.note("gradient_not_finite", step, parameters=bad[:8], finite=finite)
    ratios = [b / a for a, b in zip(found, used, strict=True) if a > 0]
    if applied is None or bad or not ratios:
        return
    low, high = min(ratios), max(ratios)
    if high == 0:
        evidence.note("step_after_wipe", step, backwards=row["backwards"])
    elif high - low < 1e-4 * high:
        nothing = abs(high - 1) < 1e-5
        evidence.note("touched_nothing" if nothing else "touched_scaled", step, factor=high)
    else:
        top = max(largest) * (1 if unscaled else left) if largest else math.nan
        at_top = sum(value == max(largest) for value in largest or ())
        evidence.note("touched_uneven", step, largest=top, at_largest=at_top)


def _finish_sample(evidence: Evidence, sample: dict[str, Any]) -> None:
    scale = sample.pop("scale") or 1
    gradient = sample["gradient"] = {n: v / scale for n, v in sample["gradient"].items()}
    places = sample.pop("alive", {}).items()
    sample["dead"] = {p: 1 - alive / evidence.activations[p]["units"] for p, alive in places}
    lengths = math.hypot(*sample.pop("now")) * math.hypot(*sample.pop("previous"))
    product = sum(sample.pop("products"))
    sample["cosine"] = product / lengths if lengths else math.nan
    for name, change in sample["change"].items():
        facts = evidence.parameters.get(name)
        if facts is not None:
            moved, there = change != 0, gradient.get(name, 0) != 0
            facts["looks"] += 1
            facts["with_gradient"] += name in gradient
            facts["nonzero_gradient"] += there
            facts["moved"] += moved
            facts["moved_without_gradient"] += moved and not there


def _check(model: Any, optimizers: tuple, every: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected the model first, got {type(model).__name__}: watch(model, optimizer)"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"expected torch.optim optimizers after the model, got {type(optimizer).__name__}: "
                "watch(model, optimizer), or watch(model, first, second)"
            )
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every!r}, expected a number of steps, at least 1")
    empty = [name for name, parameter, _ in parameters_of(model) if parameter.is_meta]
    if empty:
        raise ValueError(
            f"parameter {empty[0]} is on the meta device and has no values to watch: give the "
            "model real ones first, by model.to_empty(device=...) and an initialisation"
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(is_lazy(parameter) for group in groups for parameter in group["params"]):
        raise ValueError(
            "the optimizer holds parameters of lazy modules, which have no shape yet: run one "
            "forward pass first, then make the optimizer"
        )


def _family(kind: type, name: str) -> list[type]:
    """``kind`` and its subclasses that have a ``name`` of their own."""
    below = [found for sub in kind.__subclasses__() for found in _family(sub, name)]
    return list(dict.fromkeys([kind] * (name in vars(kind)) + below))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _loss(roots: list[Tensor], weights: Any) -> Tensor | float | None:
    """The scalar on which backward is called."""
    if not roots or any(root.is_complex() or is_fake(root) or root.is_meta for root in roots):
        return None
    weights = [weights] if isinstance(weights, Tensor) or weights is None else list(weights)
    weights += [None] * (len(roots) - len(weights))
    total: Any = 0.0
    for root, weight in zip(roots, weights, strict=True):
        value = root.detach() if weight is None else root.detach() * weight.detach()
        value = value.sum() if value.ndim else value
        # On the CPU nobody waits for the number; elsewhere it is read later, with others.
        total = total + (value.item() if value.device.type == "cpu" else value)
    return total


def _plain(scheduler: Any) -> dict[str, Any]:
    """Its attributes that are numbers, words or short lists of numbers."""
    kinds = (int, float, str)
    return {
        name: value
        for name, value in vars(scheduler).items()
        if isinstance(value, kinds)
        or (isinstance(value, list | tuple) and all(isinstance(v, kinds) for v in value[:20]))
    }
