"""What makes an operation non-finite, and what to do about it?  Introduced in chapter 8.

``TABLE`` says for each operation which arguments are its undoing, why, and the usual repair;
``WHEN`` holds the conditions it speaks of, asked of a ``Case``: one wrong entry and what stood
around it. ``bpkit.nonfinite`` finds the place, this module explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bpkit.record import Operation, Value


class Rule(NamedTuple):
    """What is known of operations: ``names`` as in a recording or a graph, ``*`` for any."""

    names: str
    when: str
    slug: str
    why: str
    repair: str


class Case:
    """One wrong entry and what stood around it: what the conditions ``WHEN`` ask about.

    ``a`` and ``b`` are the first two arguments at that entry, ``g`` the gradient from above (at its
    entry ``above``); NaN if there is none, or the shapes do not tell.
    """

    def __init__(
        self,
        phase: str,
        name: str,
        given: Sequence[Any],
        result: Tensor,
        entries: Tensor,
        op: Operation | None = None,
        function: Any = None,
        upstream: Tensor | None = None,
        maker: Callable[[Value, int], Operation | None] | None = None,
    ):
        self.phase, self.name = phase, ALIASES.get(name, name)
        self.result, self.entries, self.upstream = result, entries, upstream
        self.op, self.function, self.maker = op, function, maker
        self.index, self.count = first_entry(entries)
        self.tensors = [v.data for v in op.inputs if isinstance(v, Value)] if op else []
        order = slice(None, None, -1 if name in ("rtruediv", "rpow") else 1)
        # The arguments themselves, unless this node is a part of a larger call.
        same = op is not None and ALIASES.get(op.name, op.name) == self.name
        self.read = op.inputs[:2][order] if same else [None, None]
        arguments = [entry(item, self.index, result.shape) for item in [*given][:2][order]]
        self.a, self.b = [*arguments, NAN, NAN][:2]
        self.value = entry(result, self.index, result.shape)
        self.g, self.above = NAN, None
        if upstream is not None:  # of all the entries from above that can go into this one
            here = torch.zeros_like(dense(result), dtype=torch.bool)
            here[self.index] = True
            reached = reach(here, dense(upstream))
            above, self.above = dense(upstream)[reached], first_entry(reached)[0]
            self.g = above[0].item() if (above == above[0]).all() else NAN

    @property
    def rule(self) -> Rule:
        rules = (rule for rule in RULES if self.name in rule.names.split() or rule.names == "*")
        return next(rule for rule in rules if all(WHEN[w](self) for w in rule.when.split(", ")))

    @property
    def told(self) -> str:
        """The rule's explanation, with the numbers of this case."""
        dtype = self.result.dtype
        limit = torch.finfo(dtype).max if dtype.is_floating_point else INF
        shown = {"name": self.name, "dtype": str(dtype).removeprefix("torch."), "limit": limit}
        return self.rule.why.format(a=self.a, b=self.b, **shown)

    @property
    def n(self) -> int:
        """How many entries went into one of the result."""
        return self.tensors[0].numel() // max(self.result.numel(), 1) if self.tensors else 1

    @property
    def masked(self) -> bool:
        """Does the softmax of a row of nothing but −∞ come in here?"""
        first = self.tensors[0] if self.tensors else torch.zeros(())
        if first.shape == self.result.shape:
            return bool((first[self.entries] == -INF).all())
        if self.name == "cross_entropy":
            return bool((first == -INF).all(min(1, first.ndim - 1)).any())
        return any(t.dtype == torch.bool or bool((t == -INF).any()) for t in self.tensors)

    @property
    def ignored(self) -> bool:
        """Is every target one of the numbers that the call was given, or of weight 0?"""
        target = next((t for t in self.tensors[1:] if t.dtype == torch.int64), None)
        if target is None:
            return False
        numbers = [i for i in self.op.inputs if type(i) is int]  # ignore_index is among them
        counted = [label for label in target.unique().tolist() if label not in numbers]
        weight = next((t for t in self.tensors[1:] if t.is_floating_point()), None)
        return not counted or (weight is not None and not weight[counted].any())

    @property
    def nothing_counted(self) -> bool:
        """Is one number divided by one number, both sums over nothing?"""
        counted = isinstance(self.read[-1], int | float) or self.fed(1, "sum count_nonzero")
        return self.a == self.b == 0 and self.result.numel() == 1 and bool(counted)

    @property
    def by_own_sum(self) -> bool:
        """Is a tensor divided by the sum of its own entries, or of their sizes?"""
        total = self.fed(1, "sum")
        summed = total and total.inputs[0]
        size = summed and self.maker(summed, total.index)
        own = (summed, *(size.inputs if size else ()))
        parts = [v.tensor for v in (*own, self.read[0]) if isinstance(v, Value)]
        return self.result.numel() > 1 and parts[-1:] != [] and parts[-1] in parts[:-1]

    def fed(self, slot: int, names: str) -> Operation | None:
        """The one of these operations that makes this argument, up to reshaping and the like."""
        todo = self.read[slot : slot + 1]
        for value in todo:
            op = self.maker(value, self.op.index) if isinstance(value, Value) else None
            if op is not None and op.name in names.split():
                return op
            if op is not None and op.name in PASSES.split() and len(todo) < 50:
                todo += op.inputs
        return None


NAN, INF = float("nan"), float("inf")
MEETINGS = ("nan-forward-masked-softmax", "nan-forward-zero-times-inf")
ALIASES = {
    **dict.fromkeys(("truediv", "itruediv", "rtruediv", "true_divide", "divide"), "div"),
    **dict.fromkeys(("rmul", "imul", "multiply"), "mul"),
    **dict.fromkeys(("ipow", "rpow"), "pow"),
    **{"arccos": "acos", "arcsin": "asin", "linalg_svd": "svd", "linalg_eigh": "eigh"},
    **{"native_layer_norm": "layer_norm", "native_group_norm": "group_norm"},
    **{"native_batch_norm": "batch_norm", "std_mean": "std", "var": "std", "var_mean": "std"},
}
SELECTIONS = "where masked_fill masked_select masked_scatter index index_put copy_slices nan_to_num"
PASSES = """getitem gather select index_select squeeze unsqueeze view reshape flatten expand
    expand_as transpose T mT to float double half contiguous clone clamp clamp_min add sub rsub
    mul neg detach"""
NORMS = "norm vector_norm sqrt std var amax max"
GIVEN = {
    "input": (
        "It is in the data before the first operation reads it.",
        "repair or drop such rows: keep = x.isfinite().flatten(1).all(1); find out who makes them",
    ),
    "parameter": (
        "The model had it before this batch: an earlier step wrote it.",
        "look at an earlier step: load the last good checkpoint and search on the batches after it",
    ),
}
DROPPED = (
    "{drops} drops this value in the forward pass, but the backward pass still runs through "
    "{name}: 0 from above times an infinite or undefined slope is NaN.",
    "make the input safe first: torch.where(ok, f(torch.where(ok, x, 1.0)), 0.0)",
)
WHEN: dict[str, Callable[[Case], bool]] = {
    "always": lambda c: True,
    "backward": lambda c: c.phase == "backward",
    "a = 0": lambda c: c.a == 0,
    "a < 0": lambda c: c.a < 0,
    "a = -1": lambda c: c.a == -1,
    "a < -1": lambda c: c.a < -1,
    "a = ±1": lambda c: abs(c.a) == 1,
    "a beyond ±1": lambda c: abs(c.a) > 1,
    "a outside": lambda c: c.a < 1 if c.name == "acosh" else abs(c.a) >= 1,
    "b = 0": lambda c: c.b == 0,
    "b not whole": lambda c: c.b % 1 != 0,
    "b a norm": lambda c: c.fed(1, NORMS) or c.by_own_sum,
    "after a norm": lambda c: c.fed(0, NORMS + " sum mean"),
    "0 times inf": lambda c: {abs(c.a), abs(c.b)} == {0, INF},
    "inf in": lambda c: c.phase == "backward" and any(is_inf(t).any() for t in c.tensors),
    "inf out": lambda c: abs(c.value) == INF,
    "finite in": lambda c: all(not is_wrong(t).any() for t in c.tensors),
    "float16": lambda c: c.result.dtype == torch.float16,
    "n = 0": lambda c: c.n == 0,
    "n = 1": lambda c: c.n == 1,
    "after softmax": lambda c: c.fed(0, "softmax"),
    "after sigmoid": lambda c: c.fed(0, "sigmoid"),
    "after selection": lambda c: c.fed(0, "getitem masked_select"),
    "masked": lambda c: c.value != c.value and c.masked,
    "ignored": lambda c: c.ignored,
    "nothing counted": lambda c: c.nothing_counted,
    "sum arrives": lambda c: c.upstream is not None and bool(is_wrong(c.upstream).any()),
    "unseen": lambda c: (
        c.op is None and (c.phase == "forward" or hasattr(c.function, "saved_tensors"))
    ),
}
# In blocks of three lines: operations | conditions | slug, why, repair. The first that fits counts.
# A slug of the backward pass becomes nan-forward where the value itself goes wrong.
TABLE = """
softmax log_softmax logsumexp cross_entropy | masked | nan-forward-masked-softmax
Every score of a row is −∞: the softmax has nothing to share out, and −∞ − (−∞) is NaN.
leave one entry unmasked: mask = mask & ~mask.all(-1, keepdim=True); or drop such rows
mul | 0 times inf | nan-forward-zero-times-inf
0 · ∞ is NaN: multiplying by 0 does not discard what stands beside it.
torch.where(mask, x, 0.0) instead of mask * x; torch.xlogy(p, p) for p * log(p)
cross_entropy nll_loss | ignored | all-targets-ignored
No target of this batch counts: the mean over nothing is 0/0.
F.cross_entropy(x, y, reduction="sum") / (y != ignore_index).sum().clamp(min=1); or skip the batch
cross_entropy nll_loss | inf out | nan-backward
The right class has score −∞, that is probability 0: its loss is ∞.
do not mask the class that is the target, or leave such rows out
ctc_loss | inf out | nan-backward
The target is too long for its input: no alignment exists, and the loss is ∞.
F.ctc_loss(..., zero_infinity=True), and check the lengths
log log2 log10 | a = 0, after softmax | log-zero
The softmax has rounded to 0, and log 0 is −∞.
F.log_softmax(x, dim) instead of log(softmax(x)); with targets, F.cross_entropy(x, y)
log log2 log10 | a = 0, after sigmoid | log-zero
The sigmoid has rounded to 0 or 1, and log 0 is −∞.
F.logsigmoid(x), or F.binary_cross_entropy_with_logits(x, y)
log log2 log10 logit | a = 0 | log-zero
log 0 is −∞, and its slope 1/x is infinite there.
torch.log(x.clamp_min(1e-8)), or compute the logarithm itself (log_softmax, logsigmoid)
xlogy | b = 0 | log-zero
log 0 is −∞, and its slope 1/x is infinite there.
torch.xlogy(x, y.clamp_min(1e-8))
log log2 log10 | a < 0 | log-negative
The logarithm of a negative number, {a:.4g}, is not defined.
keep x positive: F.softplus(x) + 1e-6 before the log
log1p | a = -1 | log-zero
log(1 + x) is log 0 at x = −1: −∞, with an infinite slope.
torch.log1p(x.clamp_min(-1 + 1e-6))
log1p | a < -1 | log-negative
log(1 + x) is the logarithm of a negative number for x = {a:.4g}: not defined.
torch.log1p(x.clamp_min(-1 + 1e-6))
sqrt | a < 0 | nan-backward
The square root of a negative number, {a:.4g}, is not defined.
x.clamp_min(1e-12).sqrt(); a variance written as E[x²] − E[x]² can round below 0
sqrt | a = 0 | nan-backward-sqrt
√x has slope 1/(2√x), infinite at x = 0; times a 0 in the chain it is NaN.
put a constant inside the root: (x + 1e-12).sqrt(); or use x.norm(), whose slope at 0 is 0
pow | a = 0 | nan-backward-pow
x^p has slope p·x^(p−1), infinite at x = 0 for p = {b:.4g}.
x.clamp_min(1e-8) ** p
pow | a < 0, b not whole | nan-backward-pow
A negative base, {a:.4g}, with the exponent {b:.4g} is not defined.
x.clamp_min(1e-8) ** p, or x.sign() * x.abs().clamp_min(1e-8) ** p
acos asin | a = ±1 | nan-backward-acos
{name} has slope 1/√(1 − x²), infinite at x = ±1.
clamp inside of the border, x.clamp(-1 + 1e-6, 1 - 1e-6): clamping to [-1, 1] leaves the 1
acos asin | a beyond ±1 | nan-backward
{name} is defined from −1 to 1; rounding has carried x to {a:.9g}.
x.clamp(-1 + 1e-6, 1 - 1e-6) before it
logit | a = ±1 | log-zero
logit x is log x − log(1 − x), infinite at 0 and 1.
keep the number that went into the sigmoid; or torch.logit(x, eps=1e-6)
atanh acosh erfinv | a outside | nan-backward
x = {a:.9g} is at the border of where {name} is defined, or beyond it.
keep x inside: x.clamp(-1 + 1e-6, 1 - 1e-6); for acosh x.clamp_min(1 + 1e-6)
div | b = 0, b a norm | div-zero-norm
{a:.4g} is divided by a norm or spread of exactly 0: of a zero vector, or of equal values.
F.normalize(x, dim=-1), or x / norm.clamp_min(1e-8); in float16 use 1e-4, 1e-8 rounds to 0
normalize cosine_similarity | finite in | div-zero-norm
A zero vector is divided by its norm; the eps that prevents it rounds to 0 in {dtype}.
F.normalize(x.float(), dim=-1), or eps=1e-4
div | nothing counted | all-targets-ignored
A sum over nothing is divided by its count, 0: no entry of this batch counts.
total / count.clamp(min=1), or skip the batch
div | b = 0 | nan-backward
{a:.4g} is divided by 0.
x / y.clamp_min(1e-8) for y ≥ 0; in float16 use 1e-4, 1e-8 rounds to 0
reciprocal rsqrt | a = 0, after a norm | div-zero-norm
Something is divided by a norm or spread of exactly 0: of a zero vector, or of equal values.
F.normalize(x, dim=-1), or clamp_min(1e-8) before it; in float16 1e-4, 1e-8 rounds to 0
reciprocal rsqrt | a = 0 | nan-backward
{name} of 0 is infinite, and so is its slope.
x.clamp_min(1e-8) before it
remainder fmod | b = 0 | nan-backward
The remainder of a division by 0 is not defined.
keep the divisor away from 0
mean | n = 0, after selection | all-targets-ignored
The selection is empty: the mean over nothing is 0/0.
x[keep].sum() / keep.sum().clamp(min=1), or skip the batch
mean std | n = 0 | nan-backward
The tensor is empty: the mean over nothing is 0/0.
x.sum() / max(x.numel(), 1)
std | n = 1 | std-single-element
The spread of a single value divides by 1 − 1.
x.std(dim, correction=0), or skip groups of one
svd eigh linalg_eig | backward | nan-backward-svd
The slope of the vectors divides by differences of singular values: two are equal, or one is 0.
use the values alone (torch.linalg.svdvals, eigvalsh), or add a little noise to the matrix
hypot linalg_vector_norm | backward, a = 0 | nan-backward
The length of a zero vector has no slope here: 0/0.
(x * x + y * y + 1e-12).sqrt()
layer_norm group_norm batch_norm rms_norm | finite in | norm-eps-too-small
The values to be normalised are all equal, and eps is 0 in {dtype}: they are divided by √0.
eps=1e-5, PyTorch's default; in float16 everything below 6e-8 is 0
* | sum arrives | nan-backward
Each part that arrives here is finite, but their sum is not, or a hook has changed it.
compute this in float32, or scale the loss down; look at hooks on this tensor
* | unseen | nan-backward
{name} returned it, though all that it was given is finite; it can't be seen from inside.
check its formula at this entry (torch.autograd.gradcheck); run compiled code uncompiled
* | inf out, float16, finite in | fp16-overflow
The result is beyond the largest float16, 65504.
compute this in float32, x.float(), or in bfloat16; or scale x down before
* | backward, inf out, finite in | nan-backward
The slope of {name} at {a:.4g} is infinite, or times what arrives beyond {limit:.3g}.
keep x away from this point before it: clamp it, or add a small constant
* | inf out, finite in | nan-backward
The result of {name} is beyond the largest {dtype}, {limit:.3g}.
keep x bounded before it, or use the stable form (log_softmax, logsumexp, softplus)
* | inf in | nan-backward
An infinity from the forward pass meets a gradient of 0, and 0 · ∞ is NaN.
mask last, after all products: masked_fill(mask, -torch.inf) right before the softmax
* | always | nan-backward
For these values {name} comes down to 0/0, 0 · ∞ or ∞ − ∞.
keep its input where it is defined: clamp it, or choose with torch.where before the call
"""


def _rules() -> Iterator[Rule]:
    lines = TABLE.strip().splitlines()
    for head, why, repair in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        yield Rule(*head.split(" | "), why, repair)


RULES = [*_rules()]


def dense(tensor: Tensor) -> Tensor:
    if tensor.is_nested or tensor.is_meta:
        return tensor.new_zeros(()) if tensor.is_meta else tensor.values()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def is_nan(tensor: Tensor) -> Tensor:
    return dense(tensor).isnan()


def is_inf(tensor: Tensor) -> Tensor:
    return dense(tensor).isinf()


def is_wrong(tensor: Tensor) -> Tensor:
    return ~dense(tensor).isfinite()


def first_entry(wrong: Tensor) -> tuple[tuple[int, ...], int]:
    """The first wrong entry, and how many there are."""
    places = wrong.nonzero()
    return tuple(places[0].tolist()), len(places)


def reach(wrong: Tensor, like: Tensor) -> Tensor:
    """Which entries of ``like`` can be behind the wrong ones, as far as the shapes tell."""
    shape = (1,) * (wrong.ndim - like.ndim) + tuple(like.shape)
    if len(shape) == wrong.ndim and all(
        a in (1, b) for a, b in zip(shape, wrong.shape, strict=True)
    ):
        dims = [d for d, size in enumerate(shape) if size != wrong.shape[d]]
        return (wrong.any(dims, keepdim=True) if dims else wrong).reshape(like.shape)
    same = 0  # leading dimensions in common, such as the batch
    while same < min(wrong.ndim, like.ndim) and wrong.shape[same] == like.shape[same]:
        same += 1
    rows = wrong.flatten(same).any(-1) if same < wrong.ndim else wrong
    return rows.reshape(*rows.shape, *[1] * (like.ndim - same)).expand(like.shape)


def entry(item: Any, index: tuple[int, ...], shape: tuple[int, ...]) -> float:
    """The entry of an argument that stands beside this entry of the result; NaN if unknown."""
    item = item.data if isinstance(item, Value) else item
    if isinstance(item, Tensor):
        try:
            item = dense(item).broadcast_to(shape)[index].item()
        except (RuntimeError, IndexError):
            return NAN
    return NAN if item is None or isinstance(item, complex) else float(item)
