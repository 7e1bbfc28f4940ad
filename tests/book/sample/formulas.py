"""The check of the sample notebook's equation, as a chapter registers it in tests/formulas."""

import torch

from formulas import formula, grad, leaf


@formula("eq:sample")
def _():
    x, w = leaf(0.5), leaf(1.2)
    z = w * x
    y = torch.sigmoid(z)
    L = (y - 1) ** 2 / 2
    return {
        "x": x,
        "y": y,
        r"\frac{\partial L}{\partial w}": grad(L, w),
        r"\frac{\partial L}{\partial y}": grad(L, y),
        r"\frac{\partial y}{\partial z}": grad(y, z),
        r"\frac{\partial z}{\partial w}": grad(z, w),
    }
