"""Are the displayed equations of chapter 2 what the code computes?"""

import torch

from formulas import draw, formula, grad, leaf


@formula("eq:gears")
def _():
    x = leaf(0.7)
    return {"x": x, r"\frac{dL}{dx}": grad(torch.exp(torch.sin(x**2)), x)}


def neuron():
    x, w, b, t = leaf(0.5), leaf(1.3), leaf(-0.8), leaf(0.9)
    y = torch.sigmoid(w * x + b)
    L = (y - t) ** 2
    return {
        "x": x, "y": y, "t": t, "L": L,
        r"\frac{\partial L}{\partial w}": grad(L, w),
        r"\frac{\partial L}{\partial b}": grad(L, b),
    }  # fmt: skip


formula("eq:neuron-loss")(neuron)
formula("eq:neuron")(neuron)


@formula("eq:local-rule")
def _():
    h = draw(3)
    u = torch.stack([h[0] * h[1], torch.sin(h[2]) * h[0]])
    L = (u**2).sum()
    return {
        r"\frac{\partial L}{\partial h_i}": grad(L, h),
        r"\frac{\partial L}{\partial u_j}": grad(L, u),
        r"\frac{\partial u_j}{\partial h_i}": torch.stack([grad(each, h) for each in u]),
        "i": range(1, 4),
    }


def vjp():
    W, v = draw(3, 4), draw(4)
    u = torch.tanh(W @ v)
    L = (u**3).sum()
    return {
        "J": torch.stack([grad(each, v) for each in u]),
        r"\frac{\partial L}{\partial u}": grad(L, u),
        r"\frac{\partial L}{\partial u_j}": grad(L, u),
        r"\frac{\partial L}{\partial v}": grad(L, v),
        r"\frac{\partial L}{\partial v_i}": grad(L, v),
        "i": range(1, 5),
    }


formula("eq:vjp-index")(vjp)
formula("eq:vjp")(vjp)


@formula("eq:tanh-vjp")
def _():
    x, g = draw(3), draw(3)
    y = torch.tanh(x)
    return {"J": torch.autograd.functional.jacobian(torch.tanh, x), "y": y, "g": g}


@formula("eq:second")
def _():
    x = leaf(1.4)
    (first,) = torch.autograd.grad(x**3, x, create_graph=True)
    return {"x": x, r"\frac{d^2}{dx^2} x^3": grad(first, x)}


@formula("eq:bias-sum")
def _():
    Z, b = draw(5, 2), draw(2)
    out = Z + b
    L = torch.sin(out).sum()
    return {r"\frac{\partial L}{\partial b_k}": grad(L, b), "G": grad(L, out), "k": range(1, 3)}
