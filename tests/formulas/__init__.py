"""Is a displayed formula what the code computes?

Every displayed equation of ``chapters/NN_name.ipynb`` has a label and a check of that label in
``tests/formulas/NN_name.py``. The check returns an environment: what each symbol of the formula
is, in float64. The test reads the LaTeX that the page shows, evaluates every side of every
``=`` as printed (``latex.py`` says which LaTeX it reads), and demands that they agree to 1e-9.

    from formulas import draw, formula, grad, leaf

    @formula("eq:chain")
    def _():
        x, w = leaf(0.7), leaf(-1.3)
        y = x * w
        L = (y - 1) ** 2
        return {"x": x, "w": w, "y": y, r"\\frac{dL}{dw}": grad(L, w)}

    DEFINITIONS = {"eq:convention": "states notation, nothing to compute"}

Symbols are written as on the page; spaces and the braces of ``W_{2}`` or ``\\hat{m}`` don't
matter. A side that is a symbol of the environment as a whole, such as a derivative, is looked
up; anything else is computed. So take derivatives from autograd (`grad`), and let the formula's
other side be evaluated from the values it names.

* ``yield`` several environments to check several cases.
* An index that stands free in the formula gets its range: ``{"i": range(1, 4)}``; every entry is
  then compared. An array's entries are reached as ``x_i`` or ``W_{ij}`` (counted from 1), or
  through the whole symbol: ``{r"\\frac{\\partial L}{\\partial W_{ij}}": array}``.
* Functions are callables: ``{"f": torch.sin}``; ``\\exp``, ``\\sigma`` and others are known.
* Choose values that are not zero or one and shapes that are unequal: they hide no mistake.
* An equation that computes nothing goes to ``DEFINITIONS`` with its reason.
"""

import torch

from .equations import chains, compare
from .latex import LatexError, evaluate

__all__ = ["LatexError", "chains", "compare", "draw", "evaluate", "formula", "grad", "leaf"]

_generator = torch.Generator().manual_seed(0)


def formula(label):
    """Register a check for the equation with this label in the module that defines it."""

    def register(check):
        checks = check.__globals__.setdefault("CHECKS", {})
        if label in checks:
            raise ValueError(f"two checks for the equation {label!r}; remove one")
        checks[label] = check
        return check

    return register


def leaf(value):
    """A float64 leaf that requires a gradient, from a number, list, or array."""
    return torch.as_tensor(value, dtype=torch.float64).clone().requires_grad_()


def draw(*shape):
    """A float64 leaf of this shape with random normal entries, new ones at each call."""
    return torch.randn(*shape, dtype=torch.float64, generator=_generator).requires_grad_()


def grad(output, of, upstream=None):
    """The gradient of `output` with respect to `of`, from autograd; the graph is kept."""
    return torch.autograd.grad(output, of, upstream, retain_graph=True)[0]
