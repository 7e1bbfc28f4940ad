"""What only an experiment shows: the same model run again with one thing changed.

Each probe runs the reader's own ``loss_fn`` once or twice more and compares recordings. A probe
that can't be made (a model that takes no other batch size, an error on the way) returns ``None``:
undecided. Call inside :func:`bpkit.preserve.preserve`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bpkit.batches import replaced, rows, tensors_in
from bpkit.diagnosis.forward import Flow
from bpkit.interrupt import together
from bpkit.numeric import numerical_gradient
from bpkit.preserve import preserve
from bpkit.record import Operation, Recording, Value, record

LossFn = Callable[[nn.Module, Any], Tensor]


@contextmanager
def evaluating(model: nn.Module):
    """Evaluation mode without gradients, and every flag as it was afterwards."""
    flags = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def recorded(model: nn.Module, loss_fn: LossFn, batch: Any, seed: int = 0) -> Recording | None:
    """A recording of ``loss_fn`` in evaluation mode, from the same random state each time."""
    # A state that the model keeps (a hidden state, a memory) is the same at each start.
    with preserve(model), together(evaluating(model)):
        torch.manual_seed(seed)
        try:
            with record(model) as recording:
                recording.loss = loss_fn(model, batch)
        except Exception:
            return None
    return recording


def random_in_eval(
    model: nn.Module, loss_fn: LossFn, batch: Any, base: Recording
) -> Operation | None:
    """The first dropout that is still at work in evaluation mode, if there is one.

    A random mask that multiplies activations counts; noise that is added (the sample of a
    variational autoencoder) or drawn from learned probabilities does not.
    """
    second = recorded(model, loss_fn, batch, seed=1)
    if second is None or len(base) != len(second):
        return None
    masks: set[int] = set()
    for a, b in zip(base, second, strict=True):
        if a.module is None or not a.outputs or not b.outputs:
            continue
        makers = {v.producer for v in a.inputs if isinstance(v, Value)}
        if a.name in ("mul", "div", "where") and makers & masks and len(makers) > 1:
            return a
        if _same(a.outputs[0].data, b.outputs[0].data):
            continue
        if "dropout" in a.name or "attention" in a.name:
            before = [[v.data for v in o.inputs if isinstance(v, Value)] for o in (a, b)]
            if all(_same(x, y) for x, y in zip(*before, strict=False)):
                return a
        drawn = a.name in ("rand", "rand_like", "bernoulli") or "empty" in a.name
        alone = not any(v.producer not in masks for v in a.inputs if isinstance(v, Value))
        by_rate = a.name in ("bernoulli", "rand_like") and _constant(a)
        gaussian = a.name.rstrip("_") in ("normal", "randn", "randn_like")  # noise, never a mask
        if (drawn or makers & masks) and (alone or by_rate) and not gaussian:
            masks.add(a.index)
    return None


def _constant(operation: Operation) -> bool:
    """Every entry of its first argument is the same: a rate, nothing learned."""
    value = next((v.data for v in operation.inputs if isinstance(v, Value)), None)
    return (
        operation.name == "rand_like" or value is None or bool((value == value.flatten()[0]).all())
    )


@dataclass
class Mixing:
    """Rows of the batch that meet: where first, and what they do there."""

    operation: Operation
    rows: list[int]
    changed: list[int]
    reordered: bool = False  # by an operation that only changes the shape


def mixing(model: nn.Module, loss_fn: LossFn, batch: Any, base: Recording) -> list[Mixing] | None:
    """Whether a row of the model's result depends on other rows of its input.

    Changes one row of the batch and looks, operation by operation inside the model, which rows
    change. The batch lies along dimension 0, or along dimension 1 where the targets say so; only
    a model that mixes rows along every dimension that can be the batch is reported.

    Returns:
        ``[]`` if rows stay apart, one :class:`Mixing` for the place where they first meet, or
        ``None`` if that can't be decided.
    """
    if not _in_rows(batch):
        return None
    given = [(path, t) for path, t in tensors_in(batch) if t.ndim and not t.is_complex()]
    inputs = [(path, t) for path, t in given if _read_by_module(base, t)]
    count = _count(batch)
    if not inputs or count is None or count < 3:
        return None
    found: list[Mixing] = []
    tried = False
    for dimension in (0, 1):
        if not all(t.ndim > dimension and t.shape[dimension] == count for _, t in inputs):
            continue
        met = _met(model, loss_fn, batch, base, {path for path, _ in inputs}, dimension, count)
        if met is None:
            return None
        tried = True
        if met == "apart":
            return []
        found += [met] if isinstance(met, Mixing) else []
    return found[:1] if tried else None


def _in_rows(batch: Any) -> bool:
    """Whether rows can be taken out and put in: not of sparse and nested tensors."""
    return all(t.layout == torch.strided and not t.is_nested for _, t in tensors_in(batch))


def _count(batch: Any) -> int | None:
    """How many examples: the length that the targets (integers, or the shortest tensors) have."""
    tensors = [t for _, t in tensors_in(batch) if t.ndim and t.numel()]
    if len(tensors) < 2:
        return tensors[0].shape[0] if tensors else None
    fewest = min(t.ndim for t in tensors)
    sizes = {t.shape[0] for t in tensors if t.ndim == fewest}
    return sizes.pop() if len(sizes) == 1 else None


def _read_by_module(recording: Recording, tensor: Tensor) -> bool:
    return any(
        isinstance(value, Value) and value.tensor == id(tensor)
        for operation in recording
        if operation.module is not None
        for value in operation.inputs
    )


def _met(model, loss_fn, batch, base, paths, dimension, count) -> Mixing | str | None:
    """Where rows along this dimension first meet, or "apart"; "elsewhere" if no result has such
    rows, as when the features happen to be as many as the examples."""
    row = count // 2

    def moved(path: str, tensor: Tensor) -> Tensor:
        if path not in paths:
            return tensor
        made = tensor.detach().clone()
        other = made.select(dimension, row)
        if not made.is_floating_point():  # the tokens of another row
            other.copy_(tensor.select(dimension, row - 1))
            return made
        other.copy_(other.flip(0) * 0.5 + 0.37 if other.ndim else other * 0.5 + 0.37)
        return made

    other = recorded(model, loss_fn, replaced(batch, moved))
    if other is None or len(other) != len(base):
        return None
    apart = -1
    for a, b in zip(base, other, strict=True):
        if a.module is None or a.name != b.name or not a.outputs or "empty" in a.name:
            continue  # what an empty tensor holds is chance
        before, after = a.outputs[0].data, b.outputs[0].data
        if (
            before.shape != after.shape
            or before.ndim <= dimension
            or not before.is_floating_point()
        ):
            continue
        if before.shape[dimension] != count:
            continue
        changed = _changed(before, after, dimension)
        if any(index != row for index in changed):
            along = any(word in a.name for word in ALONG_A_DIMENSION)
            design = any(_by_design(o, count) for o in base if o.index <= a.index) and not along
            between = base.operations[apart + 1 : a.index + 1]
            shaped = any(o.name in ("view", "reshape", "flatten", "unflatten") for o in between)
            shaped &= not any(o.name in _SUMMING for o in between)
            return "apart" if design else Mixing(a, [row], changed, shaped)
        if changed:
            apart = a.index
    return "elsewhere" if apart < 0 else "apart"


_SUMMING = frozenset((
    "mean", "sum", "var", "std", "var_mean", "std_mean", "cov", "max", "amax", "min", "amin",
    "norm", "matmul", "mm", "bmm", "einsum", "logsumexp", "cumsum",
))  # fmt: skip


# They run along a dimension that may be the wrong one.
ALONG_A_DIMENSION = (
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "attention",
    "cumsum",
    "roll",
    "softmax",
)


def _changed(before: Tensor, after: Tensor, dimension: int) -> list[int]:
    difference = (before - after).abs().nan_to_num().movedim(dimension, 0)
    difference = difference.reshape(len(difference), -1).amax(1)
    scale = before.abs().nan_to_num(posinf=0).max().clamp_min(1e-30)
    # What a different blocking of a matrix product does to other rows is rounding.
    return (difference > 1e-5 * scale).nonzero().flatten().tolist()


def _by_design(operation: Operation, count: int) -> bool:
    """Rows are brought together because the program says so: by an index, by a sparse matrix, by
    a matrix of one row and column per row of the batch (neighbours, similarities)."""
    values = [value.data for value in operation.inputs if isinstance(value, Value)]
    whole = [v for v in values if v.dtype in (torch.int64, torch.int32) and v.ndim]
    if operation.name.startswith(("index", "scatter", "segment", "getitem", "gather")) and whole:
        return True
    if operation.name in ("cdist", "spmm") or any(v.layout != torch.strided for v in values):
        return True
    square = [v for v in (*values, *(o.data for o in operation.outputs)) if v.ndim > 1]
    return any(v.shape[-1] == v.shape[-2] == count for v in square)


def doubled(model: nn.Module, loss_fn: LossFn, batch: Any, base: Recording) -> float | None:
    """How the loss changes when every row of the batch stands in it twice: 1 for a mean over
    rows, 2 for a sum. In evaluation mode, so that batch statistics can't hide it.

    A loss that draws random numbers may double by chance, the more easily the closer it is to
    zero. Near 2 it is therefore asked with other draws too; the answer farthest from 2 counts.
    """
    if rows(batch) is None or not _in_rows(batch):
        return None
    twice = replaced(batch, lambda path, t: torch.cat([t, t]) if t.ndim else t)
    ratios: list[float] = []
    for seed in range(3):
        one = base if seed == 0 else recorded(model, loss_fn, batch, seed)
        two = recorded(model, loss_fn, twice, seed)
        losses = [recording.loss for recording in (one, two) if recording is not None]
        usable = (isinstance(v, Tensor) and v.numel() == 1 and v.isfinite().all() for v in losses)
        if len(losses) < 2 or not all(usable) or not float(losses[0]):
            return None
        ratios.append(float(losses[1] / losses[0]))
        if abs(ratios[-1] - 2) > 0.1:
            break
    return max(ratios, key=lambda ratio: abs(ratio - 2))


def alignment(model: nn.Module, loss_fn: LossFn, batch: Any, base: Recording) -> Misaligned | None:
    """Whether row i of the prediction is compared with row i of the target.

    Changes one example in the inputs and looks which rows of the loss's first argument change;
    changes the same example in the targets and looks which rows of its second argument change.
    """
    count = rows(batch)
    if count is None or count < 3 or not _in_rows(batch):
        return None
    names = {id(t): path for path, t in tensors_in(batch)}
    flow = Flow(base, names)
    for operation in base:
        values = [v for v in operation.inputs[:2] if isinstance(v, Value)]
        if operation.name not in LOSSES or len(values) != 2 or not all(v.shape for v in values):
            continue
        predicted, target = values
        if predicted.shape[0] != target.shape[0] or not flow.is_data(target):
            continue
        inputs = {s for s in flow.of(predicted) if s.startswith("batch")} - flow.of(target)
        row = count // 2
        moved = [
            recorded(model, loss_fn, replaced(batch, _changer(paths, row)))
            for paths in (inputs, flow.of(target))
        ]
        if not inputs or any(m is None or len(m) != len(base) for m in moved):
            return None
        sets = [
            _rows_of(operation, other.operations[operation.index], place)
            for other, place in zip(moved, (0, 1), strict=True)
        ]
        total = predicted.shape[0]
        # Rows in another order: as many of them, and others. Nothing to learn from a prediction
        # that depends on every row.
        if 0 < len(sets[0]) == len(sets[1]) < total and sets[0] != sets[1]:
            return Misaligned(operation, row, sorted(sets[0]), sorted(sets[1]))
        return None
    return None


@dataclass
class Misaligned:
    """Example ``row`` of the inputs reaches ``predicted`` rows of the loss, its target others."""

    operation: Operation
    row: int
    predicted: list[int]
    targets: list[int]


LOSSES = frozenset((
    "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss",
    "multi_margin_loss", "poisson_nll_loss", "gaussian_nll_loss",
    "multilabel_soft_margin_loss",
))  # fmt: skip


def _changer(paths: set[str], row: int) -> Callable[[str, Tensor], Tensor]:
    def change(path: str, tensor: Tensor) -> Tensor:
        if path not in paths or not tensor.ndim:
            return tensor
        made = tensor.detach().clone()
        if made.is_floating_point():
            made[row] = made[row] * 0.5 + 0.37
        elif made.dtype == torch.bool:
            made[row] = ~made[row]
        else:  # another class or token that occurs in the batch
            made[row] = torch.where(made[row] == made.max(), made.min(), made.max())
        return made

    return change


def _rows_of(before: Operation, after: Operation, place: int) -> set[int]:
    values = [[v for v in o.inputs if isinstance(v, Value)][place].data for o in (before, after)]
    if values[0].shape != values[1].shape:
        return set()
    return set(_changed(values[0].double(), values[1].double(), 0))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _identity(function: type, inputs: list, place: int, result: Tensor) -> bool:
    """Returns what comes in, here and for an input of another size."""
    if inputs[place].shape != result.shape or not torch.equal(inputs[place], result):
        return False
    moved = [a.detach() if isinstance(a, Tensor) else a for a in inputs]
    moved[place] = 10 * moved[place] + 1
    return torch.equal(function.apply(*moved), moved[place])


@contextmanager
def _logged(functions: set[type]) -> Iterator[dict[type, tuple]]:
    """The arguments of the first call of each custom function, as far as it is called."""
    calls: dict[type, tuple] = {}
    kept = {function: vars(function).get("forward") for function in functions}
    for function in functions:

        @functools.wraps(function.forward)  # with setup_context, PyTorch asks for its signature
        def logged(*arguments, function=function, forward=function.forward):
            calls.setdefault(function, arguments)
            return forward(*arguments)

        function.forward = staticmethod(logged)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield calls
    finally:
        for function, own in kept.items():
            if own is None:
                del function.forward
            else:
                function.forward = own


@dataclass
class WrongBackward:
    """What a custom function's backward returned, and what differences say, at one entry."""

    name: str
    argument: int
    returned: float
    measured: float


def custom_backward(
    model: nn.Module, loss_fn: LossFn, batch: Any, functions: set[type]
) -> list[WrongBackward]:
    """Compare the backward of custom functions with central differences, entry by entry.

    What is meant that way is left alone: an identity forward (a reversed or scaled gradient) and
    entries whose true derivative is zero (straight-through and surrogate gradients).
    """
    try:
        with together(_logged(functions)) as calls:
            loss_fn(model, batch)
    except Exception:
        return []
    found = []
    for function, arguments in calls.items():
        if function.setup_context is torch.autograd.Function.setup_context:
            arguments = arguments[1:]  # the context came first
        try:
            found += _checked(function, arguments)
        except Exception:
            continue
    return found


def _checked(function: type, arguments: tuple) -> list[WrongBackward]:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        a.detach().double().requires_grad_()
        if isinstance(a, Tensor) and a.is_floating_point()
        else a
        for a in arguments
    ]
    result = function.apply(*inputs)
    if not isinstance(result, Tensor) or not result.requires_grad:
        return []
    tracked = [i for i, a in enumerate(inputs) if isinstance(a, Tensor) and a.requires_grad]
    if any(_identity(function, inputs, i, result) for i in tracked):
        return []  # its backward is the point of it
    weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    returned = torch.autograd.grad(result, [inputs[i] for i in tracked], weights, allow_unused=True)

    found = []
    for place, gradient in zip(tracked, returned, strict=True):
        flat = inputs[place].detach().flatten()
        entries = torch.randperm(len(flat), generator=generator)[:12]

        def value(part: Tensor, place=place, flat=flat, entries=entries) -> Tensor:
            moved = [a.detach() if isinstance(a, Tensor) else a for a in inputs]
            moved[place] = flat.index_put((entries,), part).view_as(inputs[place])
            return (function.apply(*moved) * weights).sum()

        point = flat[entries]
        measured = numerical_gradient(value, point)
        right = numerical_gradient(value, point, scheme="forward")
        got = torch.zeros_like(point) if gradient is None else gradient.flatten()[entries]
        size = measured.abs()
        # Left out: kinks, where the two schemes disagree, and a true derivative of 0.
        asked = ((right - measured).abs() <= 5e-3 * size) & (size > 1e-7)
        bad = asked & ((got - measured).abs() > 1e-3 * torch.maximum(got.abs(), size))
        if bad.any() and 10 * bad.sum() >= asked.sum():
            worst = int((got - measured).abs().where(bad, torch.zeros_like(size)).argmax())
            pair = float(got[worst]), float(measured[worst])
            found.append(WrongBackward(function.__name__, place, *pair))
    return found
