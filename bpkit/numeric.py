"""Is this gradient right?  Introduced in chapter 4.

A ruler that knows nothing of backpropagation: move a parameter a little, see how the loss moves,
compare with the gradient. ``audit`` does so for a whole model and says which parameter is off.

Sources: Press et al., Numerical Recipes, 3rd ed. (2007), section 5.7 (step sizes);
https://cs231n.github.io/neural-networks-3/#gradcheck (relative error, float64, kinks);
https://docs.pytorch.org/docs/stable/notes/gradcheck.html (PyTorch's own check).
"""

import copy
import math
import pickle
import random
import time
from dataclasses import dataclass
from functools import partial
from html import escape

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from bpkit.arguments import check, check_batch, check_values, retell, uncompiled
from bpkit.graph import _in_order
from bpkit.interrupt import together
from bpkit.preserve import preserve
from bpkit.style import Table

EPSILON = torch.finfo(torch.float64).eps
# Between what a right gradient comes to (1e-7 or less) and a wrong one (a factor 1.01 to 1e-2).
__all__ = ["AuditReport", "Reading", "Row", "audit", "default_step", "directional_check",
           "numerical_gradient", "step_size_curve"]  # fmt: skip

TOLERANCE = 1e-5
CLOSER = 32  # a reading that disagrees is taken again with a step so many times smaller
# "auto" checks all of so many entries, in at most so many seconds; else so many entries and
# directions in all, which takes less than 200 forward passes.
FULL, SECONDS, ENTRIES, DIRECTIONS = 1000, 30, 60, 20
RANDOM = (  # where random numbers come from: how to take the state and how to put it back
    (torch.get_rng_state, torch.set_rng_state),
    (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


def default_step(dtype, scheme="central"):
    """The step at which truncation and rounding are about equally large, for numbers around 1.

    By Taylor's theorem, with derivatives around 1 and f rounded by a relative ε, the error is::

        forward   h/2 + 2ε/h   smallest near h = ε^(1/2), where it is about ε^(1/2)
        central   h²/6 + ε/h   smallest near h = ε^(1/3), where it is about ε^(2/3)
        complex   h²/6         nothing is subtracted, so h may be as small as 1e-20

    Args:
        dtype: a real floating-point dtype.
        scheme: "central", "forward" or "complex".

    Sources: Numerical Recipes; Squire & Trapp (1998), https://doi.org/10.1137/S003614459631241X.

    Example:
        >>> f"{default_step(torch.float64):.1e}, {default_step(torch.float32):.1e}"
        '6.1e-06, 4.9e-03'
    """
    if not dtype.is_floating_point:
        raise TypeError(f"finite differences need a floating-point dtype, got {dtype}")
    epsilon = torch.finfo(dtype).eps
    steps = {"forward": epsilon ** (1 / 2), "central": epsilon ** (1 / 3), "complex": 1e-20}
    if scheme not in steps:
        raise ValueError(f"scheme is {scheme!r}, expected one of {', '.join(steps)}")
    return steps[scheme]


def numerical_gradient(f, x, h=None, scheme="central"):
    """The gradient of f at x, entry by entry, in the precision of x; a tensor like x.

    Args:
        f: takes a tensor like x and returns one number.
        x: a floating-point tensor of any shape and layout; left unchanged.
        h: the step; by default :func:`~bpkit.numeric.default_step`, times ``|x|`` for entries
            larger than 1.
        scheme: "central", (f(x+h) - f(x-h)) / 2h; "forward", (f(x+h) - f(x)) / h; or "complex",
            Im f(x+ih) / h, for an analytic f that accepts complex numbers.

    Divided by the step really taken, since x+h is rounded as well; where rounding swallows it,
    the slope is 0.

    Raises:
        TypeError, ValueError: x is no float tensor, or f(x) not one finite number.

    Example:
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> numerical_gradient(lambda x: (x**3).sum(), x)
        tensor([ 3.0000, 12.0000], dtype=torch.float64)
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}, expected a floating-point tensor")
    step = default_step(x.dtype, scheme) if h is None else h
    if not step > 0:
        raise ValueError(f"h is {h}, expected a positive step, or None for the default")
    point = x.detach().clone()
    gradient = torch.empty_like(point)
    with together(torch.no_grad()):
        middle = _number(f(point), "f(x)")
        if scheme == "complex":
            point = point.to(torch.promote_types(x.dtype, torch.complex64))
        cells, slopes = _cells(point), _cells(gradient)
        for i in range(point.numel()):
            index = np.unravel_index(i, x.shape)
            move = _mover(cells, index, scaled=h is None)
            if scheme == "complex":
                way, value = move(1j * step).imag, f(point)
                if not value.is_complex():
                    raise ValueError("f of complex numbers is real, so it is not analytic")
                change = value.imag.item()
            else:
                way, change = move(step), f(point).item() - middle
            if scheme == "central":
                way, change = way - move(-step), change + middle - f(point).item()
            slopes[index] = change / way if way else 0.0
            move(0.0)
    return gradient


def step_size_curve(f, x, exact, steps, scheme="central"):
    """How the error of a difference depends on the step.

    ``f``, ``x`` and ``scheme`` are as for :func:`bpkit.numerical_gradient`.

    Args:
        exact: the true gradient, a tensor like x.
        steps: the steps to try.

    Returns:
        For each step the relative error ‖numerical - exact‖ / ‖exact‖, a float.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64)
        >>> errors = step_size_curve(lambda x: x.exp().sum(), x, x.exp(), [1e-2, 1e-5])
        >>> [f"{error:.0e}" for error in errors]
        ['2e-05', '2e-11']
    """
    exact = exact.detach().double()
    numeric = (numerical_gradient(f, x, float(h), scheme).double() for h in steps)
    return [((gradient - exact).norm() / exact.norm()).item() for gradient in numeric]


@dataclass(frozen=True)
class Reading:
    """A slope of the loss from the gradient, the same slope measured, and their relative error."""

    analytic: float
    numeric: float
    relative_error: float


@dataclass(frozen=True)
class Row:
    """What :func:`bpkit.audit` found for one parameter.

    ``norm`` is of its gradient, ``checked`` how many entries were measured; the worst errors are
    those of the entry ``where``, and ``directional`` is the worst along a direction.
    """

    name: str
    shape: tuple
    norm: float | None = None
    checked: int = 0
    worst_absolute: float | None = None
    worst_relative: float | None = None
    where: tuple | None = None
    directional: float | None = None
    kink: bool = False
    verdict: str = "frozen"


@dataclass(frozen=True, repr=False)
class AuditReport:
    """What :func:`bpkit.audit` found: a :class:`~bpkit.numeric.Row` for each parameter."""

    rows: list[Row]
    tolerance: float
    forwards: int

    @property
    def faults(self):
        """The parameters whose verdict is "wrong" or "path cut"."""
        return [row.name for row in self.rows if row.verdict in ("wrong", "path cut")]

    @property
    def ok(self):
        """Whether there is no such parameter."""
        return not self.faults

    def _error(self, error):
        if error is None:
            return "–"
        # Digits below the tolerance are rounding errors: another machine has others.
        return f"{error:.1e}" if error > self.tolerance else f"< {self.tolerance:g}"

    def _shown(self):
        head = "parameter, shape, ‖gradient‖, checked, entries, where, directions, kink, verdict"
        table = []
        for row in self.rows:
            shape = "×".join(map(str, row.shape)) or "scalar"
            norm = "–" if row.norm is None else f"{row.norm:.3g}"
            checked = f"{row.checked} of {math.prod(row.shape)}"
            where = list(row.where) if (row.worst_relative or 0) > self.tolerance else ""
            errors = self._error(row.worst_relative), where, self._error(row.directional)
            kink = "yes" if row.kink else ""
            table.append((row.name, shape, norm, checked, *errors, kink, row.verdict))
        found = f"at fault: {', '.join(self.faults)}" if self.faults else "no fault found"
        header = head.split(", ")
        # A column without a word in it only makes the table too wide for a page.
        kept = [k for k in range(len(header)) if any(str(row[k]) for row in table)]
        rows = [[row[k] for k in kept] for row in table]
        table = Table([header[k] for k in kept], rows)
        return table, f"{found} (tolerance {self.tolerance:g})"

    def __repr__(self):
        return "{!r}\n{}".format(*self._shown())

    def _repr_html_(self):
        table, found = self._shown()
        return f"{table._repr_html_()}<p>{escape(found)}</p>"


def audit(model, loss_fn, batch, *, samples="auto", directions=4, seed=0, tolerance=None):
    """Compare autograd's gradient of each parameter with central differences, in float64.

    Args:
        model: any module, in the mode (train or eval) that it is in.
        loss_fn: ``loss_fn(model, batch)`` returns the loss; it is handed float64 copies of both.
        batch: what ``loss_fn`` takes, of any structure; left unchanged.
        samples: ``None`` checks every entry, a number so many of each parameter. "auto" checks
            up to 1000 entries all (if in half a minute), of more than that 60, with fewer
            directions if there are over 5 parameters: less than 200 forward passes for up to 32.
        directions: random unit directions for each parameter; every entry takes part in each.
        seed: for what is drawn, here and in the model: dropout drops the same units each time.
        tolerance: the largest relative error that passes; by default 1e-5.

    Returns:
        An :class:`AuditReport`. Model, gradients, buffers, modes and random state stay as they
        were: what runs is a deep copy (hooks on parameter tensors do not come along), or, if it
        cannot be copied, the model itself with other data, put back at the end.

    The relative error is ``|a - n| / max(|a|, |n|, floor)``, a from autograd and n measured. The
    floor keeps the ruler's noise below the tolerance: rounding, ``16 ε|loss|/h``, and truncation,
    for which 1e-9 of the model's largest gradient is allowed. Along a direction it is at least
    ‖g‖/√n, the root mean square of g·v. What exceeds the tolerance is measured again with h/32.
    A tied parameter is one row with all its names. Verdicts:

    * "ok"; with ``kink``, only the smaller step agrees: a kink, or strong curvature, within h.
    * "kink?": neither agrees, but the gradient lies between the slopes to the left and the right,
      as at a kink, or where something inside computes in less than float64.
    * "wrong": a fault. The gradient disagrees with both.
    * "no gradient": autograd has none, none is measured; "path cut", a fault: one is measured.
    * "too small": all of it is below the ruler's noise, as for a bias before a BatchNorm.
    * "frozen" (``requires_grad=False``), "empty": not checked.

    Raises:
        TypeError, ValueError: a parameter is integer, complex, lazy or on the meta device, none
            is trained, ``loss_fn`` can't be called so, or the loss is not one finite float64
            number, depends on no parameter, or changes by itself.
        RuntimeError: ``loss_fn`` runs the backward pass itself.

    Example:
        >>> def loss_fn(model, x):
        ...     return model(x).square().mean() + model.bias.detach().square().sum()
        >>> audit(torch.nn.Linear(3, 1), loss_fn, torch.ones(4, 3)).faults  # cut by detach()
        ['bias']
    """
    if not (samples in (None, "auto") or (type(samples) is int and samples > 0)):
        raise ValueError(f'samples is {samples!r}, expected "auto", None (all) or a positive int')
    tolerance = TOLERANCE if tolerance is None else tolerance
    subject, kept = _subject(model, loss_fn, batch)
    with preserve(kept), uncompiled():
        bench = _prepared(subject, loss_fn, batch, seed)
        sizes = {name: p.numel() for name, p in bench.trained.items()}
        counts, total = dict(sizes), sum(sizes.values())
        if isinstance(samples, int):
            counts = {name: min(size, samples) for name, size in sizes.items()}
        elif samples and (total > FULL or 2 * total * bench.seconds > SECONDS):
            directions = min(directions, max(1, DIRECTIONS // len(sizes)))
            left = ENTRIES
            for k, name in enumerate(sorted(sizes, key=sizes.get)):
                counts[name] = min(sizes[name], max(1, math.ceil(left / (len(sizes) - k))))
                left -= counts[name]
        rng, rows = np.random.default_rng(seed), []
        work = sum(counts.values()) + directions * len(counts)
        with tqdm(total=work, desc="audit", delay=2, leave=False) as bar:
            for name, p in bench.parameters.items():
                row = Row(name, tuple(p.shape), verdict="empty" if p.requires_grad else "frozen")
                if name in counts:
                    row = bench.row(name, counts[name], directions, tolerance, rng, bar)
                rows.append(row)
        return AuditReport(rows, tolerance, bench.forwards)


def directional_check(model, loss_fn, batch, *, directions=4, seed=0, h=None):
    """Readings along random unit directions v in the space of all parameters together.

    Two forward passes for each, however many parameters there are: g·v against
    (L(θ + hv) - L(θ - hv)) / 2h. Which parameter is wrong :func:`bpkit.audit` says.

    ``model``, ``loss_fn``, ``batch`` and ``seed`` are as for :func:`bpkit.audit`, and left
    unchanged as there.

    Args:
        directions: how many.
        h: the step; by default that of :func:`~bpkit.numeric.default_step` for float64.

    Returns:
        A list with one :class:`~bpkit.numeric.Reading` for each direction.

    Raises:
        TypeError, ValueError: as :func:`bpkit.audit`.

    Example:
        >>> def loss_fn(model, x):
        ...     return model(x).square().mean()
        >>> readings = directional_check(torch.nn.Linear(3, 1), loss_fn, torch.ones(4, 3))
        >>> max(reading.relative_error for reading in readings) < 1e-6
        True
    """
    subject, kept = _subject(model, loss_fn, batch)
    with preserve(kept), uncompiled():
        bench = _prepared(subject, loss_fn, batch, seed)
        rng, readings = np.random.default_rng(seed), []
        for _ in range(directions):
            slope, floor, move = bench.direction(list(bench.trained), rng)
            look = bench.look(move, default_step(torch.float64) if h is None else h)
            numeric, _, error, _ = bench.compare(slope, floor, look, TOLERANCE)
            readings.append(Reading(slope, float(numeric), float(error)))
        return readings


class _Bench:
    """The loss as a function of the parameters: the same at every call, and counted."""

    def __init__(self, model, loss_fn, batch):
        self.model, self.loss_fn, self.batch, self.forwards = model, loss_fn, batch, 0
        names = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        self.parameters = {" = ".join(several): p for p, several in names.items()}
        self.trained = {n: p for n, p in self.parameters.items() if p.requires_grad and p.numel()}
        if not self.trained:
            raise ValueError(
                f"nothing to check: none of {len(names)} parameters has entries and "
                "requires_grad=True; give a model with parameters, or unfreeze one"
            )
        states = [(put, take()) for take, put in RANDOM]
        buffers = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        for module, name in buffers:
            buffer = getattr(module, name)
            states.append((partial(_put_buffer, module, name, buffer), buffer.clone()))
        self.resets = []
        with torch.enable_grad():
            tracked = self.differentiate()
        now = [take() for take, _ in RANDOM]
        now += [getattr(module, name) for module, name in buffers]
        # Put back before each evaluation what the first one has moved, and only that.
        self.resets = [
            (put, state)
            for (put, state), moved in zip(states, now, strict=True)
            if pickle.dumps(state) != pickle.dumps(moved)
        ]
        self.grad_mode = torch.no_grad
        try:
            first, self.loss = self.twice()
        except RuntimeError:  # the loss takes a gradient itself, as a gradient penalty does
            self.grad_mode = torch.enable_grad
            first, self.loss = self.twice()
        rounding = 4 * EPSILON * abs(first)
        # With a graph, a layer may take another way (transformers do) and round differently.
        if not (abs(self.loss - first) <= rounding and abs(tracked - first) <= 1e6 * rounding):
            raise ValueError(
                f"the loss came out as {tracked}, {first} and {self.loss} for the same batch: it "
                "changes by itself. Buffers and the random numbers of torch, numpy and random are "
                "reset each time; keep fixed what else it depends on"
            )

    def evaluate(self):
        for put, state in self.resets:
            put(state)
        self.forwards += 1
        return self.loss_fn(self.model, self.batch)

    def differentiate(self):
        try:
            loss = self.evaluate()
        except RuntimeError as error:
            error.add_note(
                "The audit hands loss_fn a float64 copy of the model and of the batch. Tensors "
                "from elsewhere, such as class weights, must be float64 as well."
            )
            raise
        value = _number(loss, "the loss")
        if loss.dtype != torch.float64:
            raise ValueError(
                f"the loss is {loss.dtype}, from a float64 model and batch: too coarse for small "
                "steps; remove what casts it, such as .float()"
            )
        found = [None]
        if loss.requires_grad:
            found = self.backward(loss)
        if all(g is None for g in found):
            raise ValueError(
                "the loss depends on no parameter: loss_fn must use the model it is handed, and "
                "something must be left of the path to it (detach, item or no_grad cut it)"
            )
        found = [None if g is None else g.detach().to_dense() for g in found]
        self.gradients = dict(zip(self.trained, found, strict=True))
        self.largest = max(g.abs().max().item() for g in found if g is not None)
        return value

    def backward(self, loss):
        parameters = [*self.trained.values()]
        names = {type(function).name(function) for function in _in_order([loss.grad_fn])}
        if "CheckpointFunctionBackward" not in names:
            try:
                return torch.autograd.grad(loss, parameters, allow_unused=True)
            except RuntimeError as error:
                retell(error)
                raise
        # Reentrant checkpoints want a backward pass that ends in .grad.
        before = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            loss.backward()
            return [p.grad for p in parameters]
        finally:
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient

    def twice(self):
        losses, times = [], []
        with self.grad_mode():
            for _ in range(2):
                start = time.perf_counter()
                losses.append(self.evaluate().item())
                times.append(time.perf_counter() - start)
        self.seconds = min(times)  # either may have waited for its turn on a busy machine
        return losses

    def look(self, move, h):
        """The losses on both sides, and the distance between the two."""
        ahead, upper = move(h), self.evaluate().item()
        behind, lower = move(-h), self.evaluate().item()
        move(0.0)
        return upper, lower, ahead - behind

    def direction(self, names, rng):
        """A random unit direction: the slope along it by the gradient, its floor, how to move."""
        parts, slope, squares = [], 0.0, 0.0
        for name in names:
            p, g = self.trained[name], self.gradients[name]
            v = torch.as_tensor(rng.standard_normal(p.shape), dtype=p.dtype, device=p.device)
            parts.append((p, p.data.clone(), v))
            if g is not None:
                slope += (g * v).sum().item()
                squares += g.square().sum().item()
        length = math.sqrt(sum(v.square().sum().item() for _, _, v in parts))

        def move(h):
            for p, start, v in parts:
                torch.add(start, v, alpha=h / length, out=p.data)
            return h

        return slope / length, math.sqrt(squares / sum(v.numel() for *_, v in parts)), move

    def compare(self, slope, floor, look, tolerance):
        """Measured slope, absolute and relative error, and whether a kink may be the reason.

        A slope measured across a kink is between those to the left and to the right, and off by
        at most half their difference. Works for numbers and for arrays.
        """
        upper, lower, width = look
        numeric = (upper - lower) / width
        jump = abs(upper - 2 * self.loss + lower) / (width / 2)
        noise = 16 * EPSILON * abs(self.loss) / (width / 2) + 1e-9 * self.largest
        absolute = abs(slope - numeric)
        scale = np.maximum(np.maximum(abs(slope), abs(numeric)), floor)
        scale = np.maximum(scale, noise / tolerance)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(absolute == 0, 0.0, np.nan_to_num(absolute / scale, nan=np.inf))
        return numeric, absolute, relative, absolute <= jump / 2 + noise

    def row(self, name, count, directions, tolerance, rng, bar):
        """Measure ``count`` entries and some directions of one parameter, and judge."""
        p, g = self.trained[name], self.gradients[name]
        known = torch.zeros_like(p) if g is None else g
        chosen, cells = np.arange(p.numel()), _cells(p.data)
        if count < p.numel():
            chosen = np.sort(rng.choice(p.numel(), count, replace=False))
        along = [self.direction([name], rng) for _ in range(directions)]
        slope = np.append(known.cpu().numpy().reshape(-1)[chosen], [s for s, _, _ in along])
        floor = np.append(np.zeros(count), [least for _, least, _ in along])

        def mover(k):
            if k >= count:
                return along[k - count][2]
            return _mover(cells, np.unravel_index(chosen[k], p.shape))

        step, looks = default_step(p.dtype), np.empty((3, count + directions))
        for k in range(count + directions):
            looks[:, k] = self.look(mover(k), step)
            bar.update()
        _, absolute, relative, _ = self.compare(slope, floor, looks, tolerance)
        kink, verdicts = bool(relative.max() > tolerance), set()
        for k in sorted(range(count + directions), key=lambda k: (k >= count, -relative[k])):
            if "wrong" in verdicts:
                break
            if relative[k] <= tolerance:
                continue
            closer = self.look(mover(k), step / CLOSER)
            _, absolute[k], relative[k], excused = self.compare(
                slope[k], floor[k], closer, tolerance
            )
            # Across several kinks at once the slopes to both sides need not enclose that of the
            # gradient; but a gradient that is right in all entries is right along directions.
            excused |= k >= count == p.numel() and "kink?" in verdicts
            if relative[k] > tolerance:
                verdicts.add("kink?" if excused else "wrong")
        noise = 16 * EPSILON * abs(self.loss) / step + 1e-9 * self.largest
        if "wrong" in verdicts:
            verdict = "wrong" if g is not None else "path cut"
        elif verdicts:
            verdict = "kink?"
        elif g is None:
            verdict = "no gradient"
        else:
            verdict = "too small" if 0 < known.abs().max() <= noise else "ok"
        worst = relative[:count].argmax()
        where = tuple(map(int, np.unravel_index(chosen[worst], p.shape)))
        errors = float(absolute[worst]), float(relative[worst]), where
        along = float(relative[count:].max()) if directions else None
        kink = kink and "wrong" not in verdicts
        return Row(name, tuple(p.shape), known.norm().item(), count, *errors, along, kink, verdict)


def _subject(model, loss_fn, batch):
    """What is measured: a copy, or else the model itself; and what has to be kept as it is."""
    check(model, loss_fn)
    check_batch(batch)
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p) or not p.is_floating_point():
            kind = "lazy" if nn.parameter.is_lazy(p) else p.dtype
            raise TypeError(
                f"parameter {name} is {kind}, expected real floating-point numbers: run a lazy "
                "module once, make integers a buffer, split complex numbers in two"
            )
    check_values(model, batch)
    try:
        return copy.deepcopy(model), nn.Module()
    except Exception:  # whatever it holds that cannot be copied
        return model, model


def _prepared(subject, loss_fn, batch, seed):
    """A bench in float64. Call inside :func:`bpkit.preserve.preserve`."""
    torch.set_default_dtype(torch.float64)  # for what forward creates
    for seed_generator in (torch.manual_seed, random.seed, np.random.seed):
        seed_generator(seed)
    for tensor in (*subject.parameters(), *subject.buffers()):
        tensor.data = _double(tensor.data)
    bench = _Bench(subject, loss_fn, tree_map(_double, batch))
    torch.set_grad_enabled(bench.grad_mode is torch.enable_grad)
    return bench


def _rebind(module, buffers):
    """Give names their buffers back. (A script has no dictionary of them to write to.)"""
    for name, buffer in buffers.items():
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)


def _put_buffer(module, name, buffer, values):
    buffer.data.copy_(values)
    _rebind(module, {name: buffer})


def _double(value):
    """A copy of a tensor in double precision; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    inexact = value.is_floating_point() or value.is_complex()
    dtype = torch.promote_types(value.dtype, torch.float64) if inexact else value.dtype
    return value.detach().to(dtype, copy=True).requires_grad_(value.requires_grad)


def _number(value, what):
    """The one finite number that must be in value."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} is a {type(value).__name__}, expected a tensor with one number")
    if value.numel() != 1 or value.is_complex():
        raise ValueError(
            f"{what} has shape {tuple(value.shape)} and {value.dtype}, expected one real number: "
            "reduce it, with .mean() for instance"
        )
    if not math.isfinite(value.item()):
        raise ValueError(f"{what} is {value.item()}, expected a finite number: mend that first")
    return value.item()


def _cells(tensor):
    """Something to index and write into that shares the tensor's memory.

    NumPy is ten times faster at it. (`flatten()` of a tensor that is not contiguous is a copy:
    what is written there is lost.)
    """
    try:
        return tensor.detach().numpy()
    except (TypeError, RuntimeError):  # bfloat16, or not on the CPU
        return tensor.detach()


def _mover(cells, index, scaled=True):
    """How to move one entry: by h, times its size if that is over 1; returns the way it went."""
    start = cells[index].item()
    scale = max(1.0, abs(start)) if scaled else 1.0

    def move(h):
        cells[index] = start + h * scale
        return cells[index].item() - start

    return move
