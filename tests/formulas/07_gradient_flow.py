"""Are the displayed equations of chapter 7 what the code computes?"""

from itertools import product

import numpy as np
import torch
from torch import nn

from formulas import draw, formula, grad, leaf


def chain(n=4):
    x, w, h = leaf(0.7), draw(n), []
    for k in range(n):
        h.append(w[k] * (h[-1] if h else x))
    return x, w, h


@formula("eq:chain")
def _():
    x, w, h = chain()
    return {"w": w, "n": 4, r"\frac{dy}{dx}": grad(h[-1], x)}


@formula("eq:power")
def _():
    # A hundred factors one after another, as the layers apply them.
    for w in (0.9, 1.1):
        yield {"w": w, "n": 100, "w^n": np.prod([w] * 100)}


@formula("eq:same-gradient")
def _():
    _, w, h = chain()
    y = h[-1]
    return {
        "y": y, "w": w, "h": torch.stack(h), "k": range(2, 5),
        r"\frac{\partial y}{\partial h_k}": torch.stack([grad(y, each) for each in h]),
        r"\frac{\partial y}{\partial w_k}": grad(y, w),
    }  # fmt: skip


def layer():
    before, W, b = draw(5, 3), draw(3, 7), draw(7)
    after = torch.tanh(before) @ W + b
    L = torch.sin(after).sum()
    return {
        r"\phi": torch.tanh, r"\phi'": lambda z: 1 - torch.tanh(z) ** 2,
        "Z_{k-1}": before, "W_k": W, "G_k": grad(L, after), "G_{k-1}": grad(L, before),
        r"\frac{\partial L}{\partial W_k}": grad(L, W),
    }  # fmt: skip


formula("eq:walk")(layer)
formula("eq:weight")(layer)


@formula("eq:quarter")
def _():
    def slope(z):
        return torch.func.grad(torch.sigmoid)(z)

    for z in (-1.3, 0.4):
        yield {"z": z, r"\sigma'": slope}


S, X = 0.7, torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)
# All weights that are s or -s, equally likely: the means over them are exact.
WEIGHTS = S * torch.tensor(list(product((-1, 1), repeat=3)), dtype=torch.float64)


@formula("eq:forward-variance")
def _():
    return {
        r"\operatorname{E}[z^2]": (WEIGHTS @ X).square().mean(),
        r"\operatorname{E}[w_i w_j]": WEIGHTS.T @ WEIGHTS / len(WEIGHTS),
        "x": X, "s": S, r"n_{\text{in}}": 3, "q": X.square().mean(),
    }  # fmt: skip


@formula("eq:half")
def _():
    z = WEIGHTS @ X
    return {
        r"\operatorname{E}[\operatorname{relu}(z)^2]": torch.relu(z).square().mean(),
        r"\operatorname{E}[z^2]": z.square().mean(),
    }


@formula("eq:backward-variance")
def _():
    # What one input gets, from autograd, averaged over all weights from it to three outputs.
    squares = []
    for w in WEIGHTS:
        x = leaf(0.4)
        squares.append(grad(x * w, x, X).square())
    return {
        r"\operatorname{E}[g_i^2]": torch.stack(squares).mean(),
        r"n_{\text{out}}": 3, "s": S, "r": X.square().mean(),
    }  # fmt: skip


def variance(init, **options):
    """The variance of an initialisation, from its draw and the same draw, unscaled."""
    drawn, plain = torch.empty(4, 9, dtype=torch.float64), torch.empty(4, 9, dtype=torch.float64)
    torch.manual_seed(0)
    init(drawn, **options)
    torch.manual_seed(0)
    nn.init.normal_(plain)
    return (drawn / plain).square().mean()


@formula("eq:inits")
def _():
    he, xavier = nn.init.kaiming_normal_, nn.init.xavier_normal_
    return {
        r"s^2_{\text{LeCun}}": variance(he, nonlinearity="linear"),
        r"s^2_{\text{Xavier}}": variance(xavier),
        r"s^2_{\text{He}}": variance(he, nonlinearity="relu"),
        r"n_{\text{in}}": 9, r"n_{\text{out}}": 4,
    }  # fmt: skip


@formula("eq:residual")
def _():
    x = leaf(0.7)
    y = x + torch.sin(x)
    L = torch.exp(y)
    return {
        "x": x, "F'": torch.cos,
        r"\frac{\partial L}{\partial x}": grad(L, x),
        r"\frac{\partial L}{\partial y}": grad(L, y),
    }  # fmt: skip


@formula("eq:norm-scale")
def _():
    norm = nn.LayerNorm(5, eps=0.0, dtype=torch.float64)
    return {r"\operatorname{LN}": norm, "c": 0.03, "z": draw(5)}


def integral(f):
    """The mean of f(z) over a standard normal z, for an f that is 0 for negative z."""
    at, weight = np.polynomial.legendre.leggauss(200)
    z = 6 * (at + 1)  # from 0 to 12
    return 6 * np.sum(weight * f(z) * np.exp(-(z**2) / 2)) / np.sqrt(2 * np.pi)


@formula("eq:relu-variance")
def _():
    return {
        r"\operatorname{E}[h^2]": integral(np.square),
        r"\operatorname{E}[h]": integral(lambda z: z),
    }


def half_over_variance():
    """The square of a gradient, through a ReLU's mask and a division by the deviation behind it."""
    return 0.5 / (integral(np.square) - integral(lambda z: z) ** 2)


@formula("eq:batchnorm")
def _():
    return {r"\frac{\pi}{\pi - 1}": half_over_variance()}


@formula("eq:telescope")
def _():
    for n in (3, 100):
        yield {"n": n}


@formula("eq:rnn")
def _():
    x, before, U, W, b = draw(3), draw(5), draw(3, 5), draw(5, 5), draw(5)
    inside = x @ U + before @ W + b
    after = torch.tanh(inside)
    L = torch.sin(after).sum()
    return {
        r"\frac{\partial L}{\partial h_{t-1}}": grad(L, before),
        r"\frac{\partial L}{\partial z_t}": grad(L, inside),
        r"\frac{\partial L}{\partial h_t}": grad(L, after),
        "h_t": after, "W": W,
    }  # fmt: skip


def cell():
    """PyTorch's LSTM cell over one step, and its gates, read from its parameters."""
    torch.manual_seed(0)
    lstm = nn.LSTMCell(3, 5, dtype=torch.float64)
    x, h, c = draw(1, 3), draw(1, 5), draw(1, 5)
    with torch.no_grad():
        gates = x @ lstm.weight_ih.T + lstm.bias_ih + h @ lstm.weight_hh.T + lstm.bias_hh
    i, f, g, _ = gates[0].chunk(4)
    return {
        "c_t": lstm(x, (h, c))[1][0], "c_{t-1}": c[0],
        "f_t": f.sigmoid(), "i_t": i.sigmoid(), "g_t": g.tanh(),
    }  # fmt: skip


formula("eq:cell")(cell)


@formula("eq:carousel")
def _():
    f, c0 = torch.sigmoid(draw(6)), leaf(0.4)
    c = c0
    for each in f:
        c = each * c + 0.3
    return {"f": f, "n": 6, r"\frac{\partial c_n}{\partial c_0}": grad(c, c0)}


@formula("eq:homogeneous")
def _():
    return {"c": 2.7, "z": draw(5)}
