"""Are the displayed equations of chapter 3 what the code computes?"""

import torch
import torch.nn.functional as F

from formulas import draw, formula, grad

N, D, H, C = 5, 3, 7, 2


def layer():
    X, W, b = draw(N, D), draw(D, H), draw(H)
    Z = F.linear(X, W.T, b)
    return {
        "X": X, "W": W, "b": b, "Z": Z, "D": D, r"\mathbf{1}": torch.ones(N),
        "n": range(1, N + 1), "h": range(1, H + 1),
    }  # fmt: skip


formula("eq:layer-index")(layer)


@formula("eq:layer-matrix")
def _():
    return {name: value for name, value in layer().items() if name not in ("n", "h")}


def network():
    X, W1, b1, W2, b2 = draw(N, D), draw(D, H), draw(H), draw(H, C), draw(C)
    T = F.one_hot(torch.tensor([0, 1, 1, 0, 1])).double()
    A = F.relu(F.linear(X, W1.T, b1))
    S = F.linear(A, W2.T, b2)
    L = F.cross_entropy(S, T)
    return {
        "X": X, "W_1": W1, "b_1": b1, "W_2": W2, "b_2": b2, "A": A, "S": S, "T": T, "L": L,
        "P": F.softmax(S, dim=1), "N": N, "C": C, r"\mathbf{1}": torch.ones(N),
        r"\frac{\partial L}{\partial S}": grad(L, S),
    }  # fmt: skip


formula("eq:network")(network)
formula("eq:score-gradient")(network)


@formula("eq:softmax")
def _():
    env = network()
    return {**env, "n": range(1, N + 1), "c": range(1, C + 1)}


def scores():
    s = draw(4)
    return {
        "s": s, "C": 4, "m": s.max(), "s_t": s[2], "u": s.exp().sum(),
        "p_t": F.softmax(s, dim=0)[2],
    }  # fmt: skip


formula("eq:log-sum-exp")(scores)
formula("eq:shifted")(scores)


def sent():
    A, W, b = draw(N, H), draw(H, C), draw(C)
    S = F.linear(A, W.T, b)
    L = torch.sin(S).sum()
    return {
        "A": A, "W": W, "G": grad(L, S), "N": N, "C": C, r"\mathbf{1}": torch.ones(N),
        r"\frac{\partial L}{\partial W}": grad(L, W),
        r"\frac{\partial L}{\partial A}": grad(L, A),
        r"\frac{\partial L}{\partial b}": grad(L, b),
        r"\frac{\partial L}{\partial W_{hc}}": grad(L, W),
        r"\frac{\partial L}{\partial A_{nh}}": grad(L, A),
        r"\frac{\partial L}{\partial b_c}": grad(L, b),
    }  # fmt: skip


formula("eq:weight-matrix")(sent)


@formula("eq:weight-index")
def _():
    return {**sent(), "h": range(1, H + 1), "c": range(1, C + 1)}


@formula("eq:input")
def _():
    return {**sent(), "n": range(1, N + 1), "h": range(1, H + 1)}


@formula("eq:bias")
def _():
    return {**sent(), "c": range(1, C + 1)}


def activation(function):
    def check():
        Z = draw(N, H)
        A = function(Z)
        L = torch.sin(3 * A).sum()
        return {
            "Z": Z, "A": A,
            r"\frac{\partial L}{\partial Z}": grad(L, Z),
            r"\frac{\partial L}{\partial A}": grad(L, A),
        }  # fmt: skip

    return check


formula("eq:relu")(activation(torch.relu))
formula("eq:sigmoid-layer")(activation(torch.sigmoid))


@formula("eq:first-layer")
def _():
    X, W, b = draw(N, D), draw(D, H), draw(H)
    Z = F.linear(X, W.T, b)
    L = torch.sin(Z).sum()
    return {
        "X": X, r"\mathbf{1}": torch.ones(N),
        r"\frac{\partial L}{\partial Z}": grad(L, Z),
        r"\frac{\partial L}{\partial W_1}": grad(L, W),
        r"\frac{\partial L}{\partial b_1}": grad(L, b),
    }  # fmt: skip


@formula("eq:mse")
def _():
    S, Y = draw(N, C), draw(N, C)
    L = F.mse_loss(S, Y)
    return {"S": S, "Y": Y, "N": N, "C": C, "L": L, r"\frac{\partial L}{\partial S}": grad(L, S)}


@formula("eq:initialisation")
def _():
    n_in, n_out = 784, 128
    # PyTorch draws from intervals of this half-width: a standard deviation times the root of 3.
    weight = torch.empty(n_out, n_in, dtype=torch.float64)
    gain = torch.nn.init.calculate_gain("relu")
    fan_in, fan_out = torch.nn.init._calculate_fan_in_and_fan_out(weight)
    return {
        r"n_{\text{in}}": fan_in, r"n_{\text{out}}": fan_out,
        r"s_{\text{He}}": gain / fan_in**0.5,
        r"s_{\text{Xavier}}": (2 / (fan_in + fan_out)) ** 0.5,
    }  # fmt: skip
