"""Where do the bytes of a training step go?  Introduced in chapter 9.

``ledger`` runs one step and tells parameters, buffers, gradients, optimizer states and activations
apart, with the peak, and with what each remedy would save; :mod:`bpkit.saved` does the counting.

A model that does not fit runs as fake tensors: shapes, dtypes and the real device's choice of
kernels, but no data (the bare ``meta`` device takes other kernels, for attention for instance).

Source: https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import checkpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from bpkit.arguments import check, check_batch, needs_closure, retell, the_optimizers, uncompiled
from bpkit.batches import replaced, rows, tensors_in
from bpkit.graph import _in_order, unseen
from bpkit.interrupt import together, unbroken
from bpkit.preserve import preserve
from bpkit.saved import (
    SavedBytes,
    Watch,
    address_of,
    bytes_of,
    saved_bytes,
    share,
    short,
    size_of,
)
from bpkit.style import Table, wrapped

__all__ = ["Advice", "Ledger", "ledger", "saved_bytes", "size_of"]


@dataclass
class Advice:
    """One remedy: what it ``saves`` at the peak, and the fault in the catalogue that it is for."""

    slug: str
    saves: int
    text: str

    def __str__(self) -> str:
        return f"saves {size_of(self.saves)}: {self.text}"


@dataclass
class Ledger:
    """Where the bytes of one training step go, in a step that is not the first.

    Attributes:
        parts: bytes of parameters, buffers, batch, gradients, optimizer states and activations,
            and, if there is any, of what the forward pass made and somebody else holds: hooks
            inside ``loss_fn``, selective checkpointing, caches. ``notes`` says more of each.
        moments: after forward, after backward and after step, what follows from the parts, and
            what was alive (``None`` where the step could not run).
        peak: the most that was alive at once.
        saved: what the graph keeps, as from :func:`saved_bytes`.
        advice: remedies, the largest first.
        estimated: what was not counted but estimated, and why.
        ran_on: the device, or that no data were used.
    """

    parts: dict[str, int]
    notes: dict[str, str]
    moments: dict[str, tuple[int, int | None]]
    peak: int
    saved: SavedBytes
    advice: list[Advice]
    estimated: list[str]
    ran_on: str

    @property
    def total(self) -> int:
        """All parts together, in bytes. They need not be alive at the same time."""
        return sum(self.parts.values())

    def table(self) -> Table:
        """A row for each part: bytes, share, note."""
        lines = [
            [name, size_of(size), share(size, self.total), self.notes.get(name, "")]
            for name, size in self.parts.items()
        ]
        return Table(["part", "bytes", "share", "what"], lines)

    def moments_table(self) -> Table:
        """A row for each moment: the sum of the parts, and what was alive."""
        lines = [
            [name, size_of(total), "not run" if alive is None else size_of(alive)]
            for name, (total, alive) in self.moments.items()
        ]
        lines.append(["peak", "", size_of(self.peak)])
        return Table(["moment", "sum of the parts", "alive"], lines)

    def _sections(self) -> list[tuple[str, Table | list[str]]]:
        size = self.parts["activations"]
        kept = f"Activations, {size_of(size)} ({share(size, self.total)}), by who keeps them:"
        sections = [
            (f"One training step {self.ran_on}: {size_of(self.peak)} at the peak.", self.table()),
            ("What is alive:", self.moments_table()),
            (kept, self.saved.table() if size else []),
            ("What would help:", [str(each) for each in self.advice]),
            ("Estimated:", self.estimated),
        ]
        return [(head, body) for head, body in sections if body != []]

    def __str__(self) -> str:
        return "\n\n".join(
            f"{head}\n\n{body if isinstance(body, Table) else _items(body)}"
            for head, body in self._sections()
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = []
        for head, body in self._sections():
            parts.append(f"<p><strong>{escape(head)}</strong></p>")
            if isinstance(body, Table):
                parts.append(body._repr_html_())
            else:
                parts.append(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in body)}</ul>")
        return "".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        moments = {n: {"parts": p, "alive": live} for n, (p, live) in self.moments.items()}
        return {
            "parts": dict(self.parts),
            "moments": moments,
            "peak": self.peak,
            "saved": self.saved.to_dict(),
            "advice": [vars(each).copy() for each in self.advice],
            "estimated": list(self.estimated),
            "ran_on": self.ran_on,
        }


def ledger(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    device: str | None = None,
) -> Ledger:
    """Runs one training step and tells where its bytes go, and what each remedy would save.

    Args:
        model: its parameters may be frozen, in part or all.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss.
        batch: one batch, not a loader.
        optimizer: takes one step, which is what makes its states; LBFGS is estimated instead.
            Several of them take one step each.
        device: "meta" to run without data and without memory, which a model on the ``meta``
            device always does, standing in for a CPU. Then ``loss_fn`` can't read values.

    Everything is counted, for a step that finds the optimizer's states in place and no gradients
    in ``.grad``. Up to three more forward and backward passes tell what the peak is with repeated
    blocks checkpointed, with half the batch, and under ``torch.autocast`` in bfloat16. Model,
    batch, gradients, optimizer and random state are left as found;
    :func:`bpkit.preserve.preserve` copies them for that, unless ``device="meta"``, where Ctrl-C is
    heard at the end.

    What ``torch.compile`` made is counted as it was written: compiled, it may keep less.

    Without data, the counts are those of the device, with three exceptions: the workspace of
    ``nn.LSTM`` on a CPU (said under ``estimated``), the peak inside a fused optimizer's step, and
    a few bytes of BatchNorm statistics under ``torch.autocast``.

    Raises:
        ValueError: the model has no parameters or none with a shape; or the loss is no scalar or
            leads back to no parameter though some are trained; or LBFGS is one of several.
        TypeError: ``batch`` is a loader or an iterator, ``loss_fn`` can't be called so, the loss is
            no tensor, or an optimizer's step needs a closure.
        RuntimeError: the batch is on another device than the model; without data, ``loss_fn``
            reads a value, or uses another model than the one it is given.

    Example:
        >>> model = torch.nn.Linear(1000, 1000, bias=False)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> result = ledger(model, lambda m, x: m(x).exp().sum(), torch.ones(50, 1000), optimizer)
        >>> [result.parts[name] for name in ("parameters", "gradients", "activations")]
        [4000000, 4000000, 200000]
        >>> result.parts["optimizer states"]  # two numbers for each parameter, and a step count
        8000004
    """
    check(model, loss_fn)
    check_batch(batch)
    optimizers = the_optimizers(optimizer)
    if not [*model.parameters()]:
        raise ValueError(f"the model, {type(model).__name__}, has no parameters")
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise ValueError("the model has lazy modules without a shape: run one forward pass first")
    if device not in (None, "meta"):
        raise ValueError(f"device={device!r}: expected None, or 'meta' to run without data")
    if device is None and not any(p.is_meta for p in model.parameters()):
        given = [tensor for _, tensor in tensors_in(batch)]
        with preserve(model, *optimizers, others=given), uncompiled():
            return _Step(model, loss_fn, batch, optimizers).ledger()
    made = _Without()
    twin = copy.deepcopy(model, made.memo(model))
    batch = replaced(batch, lambda _, tensor: made.tensor(tensor))
    # Inside `with torch.device("meta")`, what loss_fn makes is to be where the stand-ins are.
    place = torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()
    with preserve(nn.Module()), uncompiled(), together(made.mode, place):  # random state and modes
        # An interrupt inside FakeTensorMode can make PyTorch end the whole process.
        return unbroken(_Step(twin, loss_fn, batch, optimizers, of=model).ledger)()


class _Step:
    """One training step under observation; ``of`` is the model that ``model`` stands in for."""

    def __init__(self, model, loss_fn, batch, optimizers, of: nn.Module | None = None):
        self.model, self.loss_fn, self.batch, self.of = model, loss_fn, batch, of
        self.optimizers, self.estimated = optimizers, []
        self.parameters = [*model.parameters()]
        self.trained = [p for p in self.parameters if p.requires_grad]
        self.parts, seen = {}, []
        given = (self.parameters, model.buffers(), (tensor for _, tensor in tensors_in(batch)))
        for name, tensors in zip(("parameters", "buffers", "batch"), given, strict=True):
            before = bytes_of(seen)  # what two of them share counts for the first
            seen += tensors
            self.parts[name] = bytes_of(seen) - before

    def ledger(self) -> Ledger:
        given, parts = sum(self.parts.values()), self.parts
        for parameter in self.parameters:
            parameter.grad = None
        self.watch = watch = Watch(self.model)
        with together(watch, torch.enable_grad()):
            with together(watch.forward()):
                loss = self.loss()
                self.saved = watch.saved(loss)
            forward = watch.live
            otherwise = forward - self.saved.bytes - bytes_of([loss])
            if loss.requires_grad:
                try:
                    loss.backward()
                except RuntimeError as error:
                    retell(error)
                    raise
            backward, self.highest = watch.live, watch.peak
            self.check_gradients()
            parts["gradients"] = bytes_of(p.grad for p in self.parameters)
            had, step = self.states(), self.stepper()
            before = watch.peak = watch.live  # a stand-in for the optimizer may be among it
            if step is not None:
                step()
            more, most = watch.live - before, watch.peak - before
        states = parts["optimizer states"] = self.states() if step else self.estimate()
        parts["activations"] = self.saved.bytes
        if otherwise > 0:
            parts["held otherwise"] = otherwise
        if self.of and any(row.operation.startswith("mkldnn_rnn") for row in self.saved.rows):
            self.estimated.append("what nn.LSTM keeps: its kernel's workspace is unknown here")

        # Alive is what was there, with the states of a later step, and what was made since.
        self.there, self.at_step = given + states, given + had + backward + most
        alive = [self.there + forward, self.there + backward]
        alive.append(given + had + backward + more if step else None)
        later = self.there + parts["gradients"]
        sums = [sum(parts.values()) - parts["gradients"], later, later]
        names = ("after forward", "after backward", "after step")
        moments = dict(zip(names, zip(sums, alive, strict=True), strict=True))
        kinds = ", ".join(sorted({p.device.type for p in self.parameters}))
        ran_on = f"without data, as on {kinds}" if self.of else f"on {kinds}"
        notes, peak = self.notes(), self.peak(self.highest)
        advice = [each for each in self.advice() if each.saves >= peak / 100]
        advice.sort(key=lambda each: -each.saves)
        return Ledger(parts, notes, moments, peak, self.saved, advice, self.estimated, ran_on)

    def peak(self, highest: int) -> int:
        """Given the most that was made by forward and backward at once."""
        return max(self.there + highest, self.at_step)

    def loss(self) -> Tensor:
        try:
            loss = self.loss_fn(self.model, self.batch)
        except RuntimeError as error:
            here = {str(tensor.device) for _, tensor in tensors_in(self.batch)}
            there = {str(parameter.device) for parameter in self.parameters}
            if self.of is not None:
                raise RuntimeError(
                    f"without data, loss_fn failed: {error}. It can't read values there: .item(), "
                    "float(), `if` on a tensor, nonzero, a boolean index, .numpy()"
                ) from error
            if here and not here & there:
                raise RuntimeError(
                    f"the batch is on {', '.join(here)}, the model on {', '.join(there)}: move one "
                    "to the other"
                ) from error
            raise
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn returned a {type(loss).__name__}, expected a scalar tensor")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}, expected a scalar")
        if loss.is_complex():
            raise ValueError(f"the loss is {loss.dtype}, expected a real scalar")
        if self.trained and not loss.requires_grad:
            raise ValueError(
                f"no gradient can flow: {len(self.trained)} parameters are trained, but the loss "
                "has no graph; look for no_grad, detach or .item() in the forward pass"
            )
        starts = [loss.grad_fn] if loss.grad_fn is not None else []
        leaves = [getattr(function, "variable", None) for function in _in_order(starts)]
        if self.of and not all(isinstance(leaf, FakeTensor | None) for leaf in leaves):
            raise RuntimeError(
                "without data, loss_fn has to use the model and the batch that it is given; the "
                "loss leads to a parameter that is in neither"
            )
        return loss

    def check_gradients(self) -> None:
        if self.trained and all(parameter.grad is None for parameter in self.trained):
            raise ValueError(
                f"the loss leads to none of the model's {len(self.trained)} trained parameters: "
                "loss_fn has to use the model that it is given"
            )

    def states(self) -> int:
        return bytes_of(tree_leaves([[*one.state.values()] for one in self.optimizers]))

    def stepper(self) -> Callable | None:
        """What takes the step; ``None`` for an optimizer that has to run ``loss_fn`` for it."""
        if any(isinstance(one, torch.optim.LBFGS) for one in self.optimizers):
            return None
        for one in self.optimizers:
            if needs_closure(one):
                raise TypeError(
                    f"the step of {type(one).__name__} needs a closure, which is not counted: "
                    "leave this optimizer out"
                )
        if self.of is not None:
            twins = dict(zip(self.of.parameters(), self.parameters, strict=True))
            with together(unset_fake_temporarily()):
                self.optimizers = [_on_meta(one, twins) for one in self.optimizers]

        def step() -> None:
            for one in self.optimizers:
                if self.of is None:
                    one.step()
                    continue
                try:
                    # A step reads its count, which fakes don't have.
                    with together(unset_fake_temporarily()):
                        one.step()
                except RuntimeError as error:
                    raise RuntimeError(
                        f"the step of {type(one).__name__} can't run without data: {error}. "
                        "Leave the optimizer out, or run on the real device"
                    ) from error

        return step

    def estimate(self) -> int:
        if len(self.optimizers) > 1:
            raise ValueError(
                "LBFGS among several optimizers: its step runs loss_fn again and again, so the "
                "others' steps can't be counted with it; give it alone, or leave it out"
            )
        (group,) = self.optimizers[0].param_groups
        history = group["history_size"]
        self.estimated.append(
            f"the states of LBFGS, whose step runs loss_fn again and again: {history} pairs of "
            "past steps and gradients (history_size), direction and last gradient"
        )
        return (2 * history + 2) * bytes_of(group["params"])

    def names(self) -> str:
        return " and ".join(dict.fromkeys(type(one).__name__ for one in self.optimizers))

    def notes(self) -> dict[str, str]:
        sizes: Counter[str] = Counter()
        for parameter in self.parameters:
            sizes[short(parameter.dtype)] += parameter.numel()
        frozen = sum(p.numel() for p in self.parameters if not p.requires_grad)
        notes = {"parameters": ", ".join(f"{n:,} {d}" for d, n in sizes.items())}
        if frozen:
            notes["parameters"] += f"; {frozen:,} frozen: no gradient, no state"
        without = sum(p.grad is None for p in self.trained)
        if without:
            notes["gradients"] = f"{without} of {len(self.trained)} trained tensors get none"
        if self.optimizers:
            groups = [group for one in self.optimizers for group in one.param_groups]
            held = sum(p.numel() for group in groups for p in group["params"])
            each = self.parts["optimizer states"] / max(held, 1)
            name = self.names()
            notes["optimizer states"] = f"{name}: {each:.1f} bytes for each of {held:,} parameters"
        kept = sum(row.kind == "activation" for row in self.saved.rows)
        notes["activations"] = f"kept for backward in {kept} storages"
        notes["held otherwise"] = "other hooks, selective checkpointing, outputs, caches"
        return notes

    def advice(self) -> Iterator[Advice]:
        yield from self.checkpointing()
        yield from self.attention()
        yield from self.fewer_states()
        yield from self.variants()

    def checkpointing(self) -> Iterator[Advice]:
        """The blocks of one kind with the most in them, each checkpointed."""
        groups: dict[tuple[str, type], dict[str, int]] = {}
        for name, module in self.model.named_modules():
            if name and [*module.children()]:
                kept = sum(
                    row.nbytes
                    for row in self.saved.rows
                    if row.kind == "activation" and f"{row.module}.".startswith(f"{name}.")
                )
                kind = (name.rpartition(".")[0], type(module))
                groups.setdefault(kind, {})[name] = kept
        # One block at a time is made again, so that a group of one would save nothing.
        (_, kind), blocks = max(
            groups.items(),
            key=lambda item: sum(item[1].values()) - max(item[1].values()),
            default=((None, None), {}),
        )
        if len(blocks) > 1:
            first, *_, last = blocks
            how = (
                f"checkpoint each of the {len(blocks)} {kind.__name__} ({first} to {last}) with "
                "use_reentrant=False, for one more forward pass of each"
            )
            yield from self.again(how, _checkpointed(self.model, blocks))

    def attention(self) -> Iterator[Advice]:
        """Softmax results with rows for each head, and what else has their shape."""
        made = [row for row in self.saved.rows if row.kind == "activation"]
        softmax = [
            row for row in made if row.operation in ("softmax", "safe_softmax") and row.shape[2:]
        ]
        squares = {(row.module, row.shape[-2:]) for row in softmax}
        size = sum(row.nbytes for row in made if (row.module, row.shape[-2:]) in squares)
        places = ", ".join(sorted({self.saved._place(row.module) for row in softmax}))
        sums = sum(row.nbytes // row.shape[-1] for row in softmax)
        if size:
            text = (
                f"attention probabilities are {share(size, self.saved.bytes)} of the activations "
                f"({places}); F.scaled_dot_product_attention keeps one number for each row of "
                "them, where its fused kernel applies (on a CPU, not with dropout)"
            )
            yield Advice("out-of-memory-activations", size - sums, text)

    def fewer_states(self) -> Iterator[Advice]:
        slug, trained = "out-of-memory-states", sum(p.numel() for p in self.trained)
        states, one = self.parts["optimizer states"], bytes_of(self.trained)
        if one and states > 1.5 * one:
            text = (
                f"one state for each parameter (SGD with momentum, Lion) instead of "
                f"{states / one:.1f} for {self.names()}; plain SGD keeps none"
            )
            yield Advice(slug, states - one, text)
        if 2 * trained > sum(p.numel() for p in self.parameters):
            saves = states + self.parts["gradients"]
            text = (
                f"at the most, by freezing (LoRA): each frozen parameter saves "
                f"{saves / trained:.1f} bytes of gradient and states, but hardly any activations"
            )
            yield Advice(slug, saves, text)

    def variants(self) -> Iterator[Advice]:
        count, dtypes = rows(self.batch), self.saved.by("dtype")
        tensors = [tensor for _, tensor in tensors_in(self.batch)]
        cut = all(t.layout == torch.strided and not t.is_nested for t in tensors)
        if cut and count and count > 1:
            whole, half = self.batch, (count + 1) // 2
            self.batch = replaced(whole, lambda _, t: t[:half] if t.ndim else t)
            yield from self.again(f"{half} of the {count} rows at a time, accumulated")
            self.batch = whole
        if "torch.float32" in dtypes and not {"torch.bfloat16", "torch.float16"} & {*dtypes}:
            kind = self.parameters[0].device.type
            how = f"torch.autocast({kind!r}, torch.bfloat16), copies of the weights included"
            yield from self.again(how, torch.autocast(kind, torch.bfloat16))

    def again(self, how: str, change: AbstractContextManager | None = None) -> Iterator[Advice]:
        """Forward and backward once more, in another way: what is alive at the peak then?"""
        for parameter in self.parameters:
            parameter.grad = None
        watch = Watch(self.model)
        try:
            with together(torch.enable_grad(), watch):
                with together(watch.forward(), change or nullcontext()):
                    loss = self.loss()
                    kept = watch.saved(loss).bytes
                if loss.requires_grad:
                    loss.backward()
        except Exception:  # the loss need not work in this way; there is no advice then
            return
        text = f"{how}: the graph keeps {size_of(kept)} instead of {size_of(self.saved.bytes)}"
        saves = self.peak(self.highest) - self.peak(watch.peak)
        yield Advice("out-of-memory-activations", saves, text)


@contextmanager
def _checkpointed(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    blocks = [model.get_submodule(name) for name in names]
    own = [vars(block).copy() for block in blocks]
    for block in blocks:
        block.forward = partial(checkpoint.checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block, attributes in zip(blocks, own, strict=True):
            del block.forward
            vars(block).update(attributes)


class _Without:
    """Stand-ins without data: fake tensors with the same shapes and shared storages."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)  # for constants of loss_fn
        self._bases: dict[int, Tensor] = {}

    def memo(self, model: nn.Module) -> dict[int, Tensor]:
        """For ``copy.deepcopy``, which takes these instead of copying."""
        memo = {}
        for module in model.modules():
            for tensor in tree_leaves([*vars(module).values()]):
                if isinstance(tensor, Tensor) and id(tensor) not in memo:
                    memo[id(tensor)] = self.tensor(tensor)
        return memo

    @unbroken
    @unseen
    def tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_quantized:
            raise RuntimeError("a quantised tensor has no stand-in without data; use real devices")
        if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
            return self.mode.from_tensor(tensor)
        storage = tensor.untyped_storage()
        with together(self.mode, torch.no_grad()):
            base = self._bases.get(address_of(storage))
            if base is None:
                device = "cpu" if tensor.is_meta else tensor.device
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                self._bases[address_of(storage)] = base
            made = torch.empty(0, dtype=tensor.dtype, device=base.device)
            place = (tensor.storage_offset(), tensor.shape, tensor.stride())
            made.set_(base.untyped_storage(), *place)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)


def _on_meta(optimizer: torch.optim.Optimizer, twins: dict[Tensor, Tensor]) -> Any:
    """A copy of the optimizer on the ``meta`` device, with a gradient where the twin got one."""
    memo: dict[int, Any] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        made = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        twin = twins.get(parameter)
        if twin is not None and twin.grad is not None:
            made.grad = torch.empty_like(made)
        memo[id(parameter)] = made
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and (
                value.ndim or not (parameter.ndim or name in ("step", "mu_product"))
            ):
                memo[id(value)] = torch.empty_like(value, device="meta")
    copied = copy.deepcopy(optimizer, memo)
    for group in copied.param_groups:
        if group.get("fused"):  # the same states, but no kernel for this device
            group["fused"] = False
    return copied


def _items(lines: list[str]) -> str:
    return "\n".join(part for line in lines for part in wrapped(f"- {line}", rest=2, width=88))
