"""Are the displayed equations of section 9a what the code computes?"""

import numpy as np
import torch
from torch.nn import functional as F

from formulas import draw, formula, grad, leaf

HALF = {torch.float16: 10, torch.bfloat16: 7}


def positive(dtype):
    """All normal positive numbers of a 16-bit type, ascending, made from their bits."""
    x = torch.arange(2**15).to(torch.int16).view(dtype).double()
    return x[x.isfinite() & (x >= torch.finfo(dtype).tiny)]


@formula("eq:precision-format")
def _():
    for dtype, p in HALF.items():
        x = positive(dtype)
        e = x.log2().floor()[:: 2**p]
        for k in (0, len(e) // 2, len(e) - 1):
            block = x[k * 2**p : (k + 1) * 2**p]
            yield {"x": block, "e": e[k], "p": p, "m": torch.arange(2.0**p)}


def beside(w, dtype):
    """The distance from a number to the next one above it."""
    x = positive(dtype)
    at = torch.searchsorted(x, w)
    return x[at + 1] - x[at]


@formula("eq:precision-spacing")
def _():
    for dtype, p in HALF.items():
        for w, e in ((1.0, 0), (1.75, 0), (2.0, 1), (0.375, -2)):
            yield {r"\delta": beside(w, dtype), "e": e, "p": p}


@formula("eq:precision-logits")
def _():
    Z, y = draw(5, 3).requires_grad_(), torch.tensor([0, 2, 1, 1, 0])
    return {
        "G": grad(F.cross_entropy(Z, y), Z), "P": torch.softmax(Z, dim=1),
        "T": F.one_hot(y, 3), "N": 5,
    }  # fmt: skip


@formula("eq:precision-loss-scale")
def _():
    theta = leaf(0.7)
    L = torch.sin(theta).exp()
    return {
        "S": 1024.0,
        r"\frac{\partial (S L)}{\partial \theta}": grad(1024.0 * L, theta),
        r"\frac{\partial L}{\partial \theta}": grad(L, theta),
    }


@formula("eq:precision-lost")
def _():
    # Found by trying: the longest step, in 64ths of the distance, that is lost.
    for dtype, p in HALF.items():
        for w, e in ((1.25, 0), (3.0, 1), (0.375, -2)):
            steps = torch.arange(65) / 64 * beside(w, dtype)
            lost = steps[(w + steps).to(dtype) == w]
            yield {r"\Delta_{\min}": lost.max(), r"\delta": beside(w, dtype), "e": e, "p": p}


@formula("eq:precision-stochastic")
def _():
    # All 2^16 random numbers: the share of those that carry into the upper half.
    for x in (1.001, -0.3141, 5.5):
        bits = torch.tensor(x, dtype=torch.float32).view(torch.int32)
        rounded = ((bits + torch.arange(2**16, dtype=torch.int32)) & -(2**16)).view(torch.float32)
        a, b = rounded.double().aminmax()
        if a == b:
            a = b - 1  # a number of the type itself always stays
        up = (rounded == b).double().mean()
        yield {"q": up, "x": torch.tensor(x, dtype=torch.float32), "a": a, "b": b}


@formula("eq:precision-break-even")
def _():
    # Where the bytes counted in the notebook, as functions of N, meet.
    for D, H, w in ((64, 1024, 267264), (10, 300, 4000)):
        plain, cast = np.array([4 * H, 0]), np.array([2 * (H + D), 2 * w])
        slope, start = plain - cast
        yield {"N": -start / slope, "w": w, "H": H, "D": D}


@formula("eq:precision-code")
def _():
    x = draw(40)
    largest = x.abs().max()
    for k in (1, 4):
        c = (127 * (x.abs() / largest) ** (1 / k)).round()
        yield {"c": c, "k": k, "x": x, "u": x.abs() / largest,
               r"\operatorname{round}": torch.round, r"\max |x|": largest}  # fmt: skip


@formula("eq:precision-eight-bit")
def _():
    return {}
