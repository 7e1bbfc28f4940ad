"""Are the displayed equations of chapter 8 what the code computes?"""

import torch
from torch.nn import functional as F

from formulas import draw, formula, grad, leaf


@formula("eq:rows")
def _():
    X, W = draw(5, 3), draw(3, 2)
    W.requires_grad_()
    t = torch.tensor([0, 1, 1, 0, 1])
    losses = F.cross_entropy(X @ W, t, reduction="none")
    each = torch.stack([grad(loss, W) for loss in losses])
    return {
        "N": 5, r"\frac{\partial \ell_n}{\partial W}": each,
        r"\frac{\partial L}{\partial W}": grad(F.cross_entropy(X @ W, t), W),
    }  # fmt: skip


@formula("eq:where")
def _():
    # As where computes it, at an entry that is taken and at one that is not.
    for z, m in ((leaf(0.7), 1.0), (leaf(-0.4), 0.0)):
        y = torch.where(z > 0, torch.sin(z), 0.3)
        L = y**2
        yield {
            "z": z, "m": m, "g": 2 * y, "f'": torch.cos,
            r"\frac{\partial L}{\partial z}": grad(L, z),
        }  # fmt: skip


@formula("eq:sure")
def _():
    for z in (-1.3, 0.4):
        yield {"z": z, r"\sigma": torch.sigmoid}
