"""Which numbers meet in a two-layer network, on the way forward and back?  Introduced in chapter 3.

``network_walk`` makes :class:`~bpkit.interactive.Frames` of the arrays that you have computed: one
frame for each formula, with the numbers that go into it and one entry worked out. It computes each
formula once more and refuses arrays that do not obey it, so no formula can stand beside numbers
that are not its own.
"""

from collections.abc import Mapping
from html import escape
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bpkit import style
from bpkit.drawing import minus
from bpkit.graph import show, times
from bpkit.interactive.frames import GRADIENT, VALUE, Frame, Frames, arrow, svg, tag, text


class Named(NamedTuple):
    """An array and what the page calls it."""

    name: str
    array: np.ndarray

    @property
    def size(self) -> str:
        return times(self.array.shape)


def network_walk(values: Mapping[str, ArrayLike], gradients: Mapping[str, ArrayLike]) -> Frames:
    """The passes of ``S = relu(X W1 + b1) W2 + b2``, then softmax and cross-entropy.

    Args:
        values: X (N, D), T one-hot (N, C), W1 (D, H), b1 (H,), Z and A (N, H), W2 (H, C), b2 (C,),
            S and P (N, C), and the loss L, under these names.
        gradients: of the loss, with respect to S, A, Z and the four parameters.

    Raises:
        ValueError: an array is not what its formula makes of the others.

    >>> v = dict(X=[[1]], T=[[1]], W1=[[1]], b1=[0], Z=[[1]], A=[[1]], W2=[[1]], b2=[0])
    >>> v |= dict(S=[[1]], P=[[1]], L=0)  # one class: nothing to learn, so all gradients are 0
    >>> g = dict(S=[[0]], A=[[0]], Z=[[0]], W1=[[0]], b1=[0], W2=[[0]], b2=[0])
    >>> print(network_walk(v, g).frames[0].text.partition(".")[0])
    Z = X W₁ + b₁, and b₁ is added to every row
    """
    v = {k: Named(_sub(k), np.asarray(a)) for k, a in values.items()}
    g = {k: Named(f"∂L/∂{_sub(k)}", np.asarray(a)) for k, a in gradients.items()}
    x, t, w1, b1, z, a, w2, b2, s, p = (
        v[k] for k in ("X", "T", "W1", "b1", "Z", "A", "W2", "b2", "S", "P")
    )
    mask = Named("1[Z > 0]", (z.array > 0).astype(float))
    n = len(x.array)
    steps = [
        _product("Z = X W₁ + b₁, and b₁ is added to every row", x, w1, z, b1),
        _entries("A = relu(Z): what is negative becomes 0",
                 [z, "→"], a, np.maximum(z.array, 0)),
        _product("S = A W₂ + b₂", a, w2, s, b2),
        _loss(s, p, t, v["L"].array),
        _entries(f"∂L/∂S = (P − T)/N, with N = {n}: softmax and logarithm in one",
                 [p, "−", t, f"÷ {n} ="], g["S"], (p.array - t.array) / n),
        _sums("∂L/∂b₂: b₂ was added to every row, so the rows of ∂L/∂S are summed",
              g["S"], g["b2"]),
        _product("∂L/∂W₂ = Aᵀ ∂L/∂S: upstream is ∂L/∂S, local is A",
                 Named("Aᵀ", a.array.T), g["S"], g["W2"]),
        _product("∂L/∂A = ∂L/∂S W₂ᵀ: upstream is ∂L/∂S, local is W₂",
                 g["S"], Named("W₂ᵀ", w2.array.T), g["A"]),
        _entries("∂L/∂Z = ∂L/∂A ⊙ 1[Z > 0]: what relu had set to 0 gets no gradient",
                 [g["A"], "⊙", mask, "="], g["Z"], g["A"].array * mask.array),
        _sums("∂L/∂b₁: the rows of ∂L/∂Z are summed", g["Z"], g["b1"]),
        _product("∂L/∂W₁ = Xᵀ ∂L/∂Z: upstream is ∂L/∂Z, local is X",
                 Named("Xᵀ", x.array.T), g["Z"], g["W1"]),
    ]  # fmt: skip
    frames = [Frame(f"step {k} of {len(steps)}", *step) for k, step in enumerate(steps, 1)]
    return Frames(_drawing(v), frames)


def _product(formula: str, left: Named, right: Named, result: Named, bias: Named | None = None):
    """A matrix product, and its largest entry worked out."""
    added = 0 if bias is None else bias.array
    _check(formula, left.array @ right.array + added, result.array)
    i, j = np.unravel_index(np.abs(result.array).argmax(), result.array.shape)
    terms = [
        f"{_term(left, a)}·{_term(right, b)}"
        for a, b in zip(left.array[i], right.array[:, j], strict=True)
        if a and b
    ]
    row, column, one = (np.zeros(n.array.shape) for n in (left, right, result))
    row[i], column[:, j], one[i, j] = 1, 1, 1
    parts = [_matrix(left, row), "·", _matrix(right, column)]
    if bias is not None:
        terms.append(_term(bias, bias.array[j]))
        parts += ["+", _matrix(bias, one[i])]
    told = (
        f"{formula}. {left.size} times {right.size} gives {result.size}. Row {i + 1}, column "
        f"{j + 1}: {' + '.join(terms)} ≈ {_number(result, result.array[i, j])}."
    )
    return told, _side_by_side(*parts, "=", _matrix(result, one))


def _entries(formula: str, given: list, result: Named, exact: np.ndarray):
    """Entry by entry: no number meets another one's."""
    _check(formula, exact, result.array)
    parts = [_matrix(g) if isinstance(g, Named) else g for g in given]
    told = f"{formula}. Entry by entry, so {result.size} stays {result.size}."
    return told, _side_by_side(*parts, _matrix(result))


def _sums(formula: str, given: Named, result: Named):
    _check(formula, given.array.sum(axis=0), result.array)
    j = int(np.abs(result.array).argmax())
    column, one = np.zeros(given.array.shape), np.zeros(result.array.shape)
    column[:, j], one[j] = 1, 1
    terms = " + ".join(_term(given, number) for number in given.array[:, j] if number)
    told = (
        f"{formula}. {given.size} becomes {result.size}. Column {j + 1}: {terms} "
        f"≈ {_number(result, result.array[j])}."
    )
    return told, _side_by_side(_matrix(given, column), "summed", _matrix(result, one))


def _loss(s: Named, p: Named, t: Named, loss: np.ndarray):
    e = np.exp(s.array - s.array.max(axis=1, keepdims=True))
    _check("P = softmax(S)", e / e.sum(axis=1, keepdims=True), p.array)
    right = (p.array * t.array).sum(axis=1)
    _check("L = the mean of −log(P) at the right classes", -np.log(right).mean(), loss)
    told = (
        "P = softmax(S): each row adds up to 1. The probabilities of the right classes are marked. "
        f"L is the mean of minus their logarithms: {show(loss.item())}."
    )
    return told, _side_by_side(_matrix(s), "→", _matrix(p, t.array))


def _check(formula: str, exact: ArrayLike, given: np.ndarray) -> None:
    if np.shape(exact) != given.shape or not np.allclose(exact, given, rtol=1e-9, atol=1e-12):
        raise ValueError(
            f"the arrays do not obey {formula}: does one of them belong to another network?"
        )


def _number(named: Named, value: float) -> str:
    """Gradients with one digit more. An exact 0 or 1 is written as such, so a mask is seen."""
    value = float(value) + 0.0  # no minus before a zero
    return minus(
        f"{value:.0f}" if value in (0, 1) else f"{value:.{3 if _is_gradient(named) else 2}f}"
    )


def _is_gradient(named: Named) -> bool:
    return named.name.startswith("∂")


def _term(named: Named, value: float) -> str:
    number = _number(named, value)
    return f"({number})" if number.startswith("−") else number


def _sub(name: str) -> str:
    return name.replace("1", "₁").replace("2", "₂")


def _matrix(named: Named, marked: np.ndarray | None = None) -> str:
    """Numbers in columns; those marked are bold."""
    array = np.atleast_2d(named.array)
    marked = np.zeros(array.shape) if marked is None else np.atleast_2d(marked)
    cells = [[_number(named, value) for value in row] for row in array]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row, marks in zip(cells, marked, strict=True):
        padded = map(str.rjust, row, widths)
        lines.append(
            " ".join(f"<b>{c}</b>" if m else c for c, m in zip(padded, marks, strict=True))
        )
    head = f"<span>{escape(named.name)} <small>{named.size}</small></span>"
    kind = " fr-back" if _is_gradient(named) else ""
    numbers = "\n".join(lines)
    return f'<div class="fr-matrix{kind}">{head}<pre>{numbers}</pre></div>'


def _side_by_side(*parts: str) -> str:
    """Matrices, each with the sign before it, so that a line never ends with a sign."""
    told, sign = [], ""
    for part in parts:
        if part.startswith("<"):
            told.append(f'<div class="fr-part">{sign}{part}</div>')
            sign = ""
        else:
            sign = f'<span class="fr-sign">{part}</span>'
    return f'<div class="fr-detail">{"".join(told)}</div>'


# Where the boxes stand, from which step on their values and gradients are there, and the steps in
# which they take part.
ARRAYS = {"X": (30, 0, 0, "1 11"), "Z": (118, 1, 9, "1 2 9 10 11"), "A": (200, 2, 8, "2 3 7 8 9"),
          "S": (288, 3, 5, "3 4 5 6 7 8"), "L": (374, 4, 0, "4 5")}  # fmt: skip
PARAMETERS = {"W1": ("Z", -26, 11, "1 11"), "b1": ("Z", 26, 10, "1 10"),
              "W2": ("S", -26, 7, "3 7 8"), "b2": ("S", 26, 6, "3 6")}  # fmt: skip


def _drawing(v: Mapping[str, Named]) -> str:
    """Arrays in a row, parameters above them. Values go right and down, gradients come back."""
    parts = []
    for (left, (a, _, back, _)), (right, (b, there, _, _)) in pairwise(ARRAYS.items()):
        parts.append(arrow(a + 22, 105, b - 22, 105, VALUE, data_from=there))
        if left == "Z":
            parts.append(text((a + b) / 2, 94, "relu", font_size=11))
        if back:  # nobody asks for the gradient of X
            parts.append(arrow(b - 22, 117, a + 22, 117, GRADIENT, data_from=back))
        if right == "L":
            parts.append(_box(b, 40, "T", v["T"].size, 0, "4 5"))
            parts.append(arrow(b, 61, b, 88, VALUE, data_from=there))
    for name, (target, aside, back, steps) in PARAMETERS.items():
        x, there, _, _ = ARRAYS[target]
        parts.append(arrow(x + aside - 5, 61, x + aside / 3 - 5, 88, VALUE, data_from=there))
        parts.append(arrow(x + aside / 3 + 5, 88, x + aside + 5, 61, GRADIENT, data_from=back))
        parts.append(_box(x + aside, 40, _sub(name), v[name].size, 0, steps))
        label = f"∂L/∂{_sub(name)}"
        parts.append(text(x + aside, 14, label, GRADIENT, data_from=back, font_size=11))
    for name, (x, there, back, steps) in ARRAYS.items():
        size = show(v["L"].array.item()) if name == "L" else v[name].size
        parts.append(_box(x, 110, name, size, there, steps))
        if back:
            label = f"∂L/∂{name} {size}"
            parts.append(text(x, 146, label, GRADIENT, data_from=back, font_size=11))
    parts.append(arrow(10, 170, 32, 170, VALUE) + text(38, 174, "values", VALUE, "start"))
    parts.append(
        arrow(122, 170, 100, 170, GRADIENT) + text(128, 174, "gradients", GRADIENT, "start")
    )
    label = (
        "X, Z, A, S and the loss L in a row, W₁ and b₁ above Z, W₂ and b₂ above S, T above L. "
        "Solid arrows carry values towards L, dashed ones carry gradients back from it; each "
        "gradient stands beside its array and has its shape. None goes to X or T."
    )
    return svg(404, 182, label, *parts)


def _box(x: float, y: float, name: str, size: str, there: int, steps: str) -> str:
    parameter = name[0] in "Wb"
    look = {"rx": 2 if parameter else 12, "class_": "fr-box", "stroke": style.INK}
    return (
        tag("rect", x=x - 21, y=y - 20, width=42, height=40, data_on=steps, **look)
        + text(x, y - 3, name, "fr-name", font_weight="bold", font_size=15)
        + text(x, y + 12, size, font_size=11, data_from=there)
    )
