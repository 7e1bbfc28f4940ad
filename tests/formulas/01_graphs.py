"""Are the displayed equations of chapter 1 what the code computes?"""

import torch

from formulas import formula, grad, leaf


def line():
    x, w, b = leaf(1.7), leaf(-0.6), leaf(0.4)
    t = x * w
    y = t + b
    L = (y - 4) ** 2
    return {"x": x, "w": w, "b": b, "t": t, "y": y, "L": L,
            r"\frac{\partial L}{\partial w}": grad(L, w)}  # fmt: skip


formula("eq:two-steps")(line)
formula("eq:loss")(line)
formula("eq:product-of-factors")(line)


def two_users():
    f = leaf(1.3)
    h = f**2
    users = torch.stack([3 * h, torch.sin(h)])
    L = users.sum()
    return {
        "f": f, "h": h, "L": L,
        r"\frac{dL}{dh}": grad(L, h),
        r"\frac{dL}{df}": grad(L, f),
        r"\frac{\partial L}{\partial u_j}": grad(L, users),
        r"\frac{\partial u_j}{\partial h}": torch.stack([grad(u, h) for u in users]),
    }  # fmt: skip


formula("eq:two-users")(two_users)
formula("eq:sum-over-users")(two_users)
formula("eq:two-paths")(two_users)


@formula("eq:paths")
def _():
    return {}


@formula("eq:sigmoid-derivative")
def _():
    z = leaf(0.3)
    y = torch.sigmoid(z)
    return {"y": y, r"\frac{dy}{dz}": grad(y, z)}
