"""Are the displayed equations of section 9b what the code computes?"""

from itertools import product

import torch
from torch import nn

from formulas import draw, formula, grad


def layer():
    """A linear layer with an adapter, through PyTorch's own operations."""
    N, D, H, r, alpha = 5, 7, 3, 2, 3.0
    base, x = nn.Linear(D, H, dtype=torch.float64), draw(N, D).requires_grad_()
    A, B = draw(D, r).requires_grad_(), draw(r, H).requires_grad_()
    Z = base(x) + (alpha / r) * nn.functional.linear(nn.functional.linear(x, A.T), B.T)
    L = torch.sin(Z).sum()
    symbols = {
        "X": x, "W": base.weight.T, "b": base.bias, "A": A, "B": B, "Z": Z,
        r"\alpha": alpha, "r": r, "s": alpha / r, "G": torch.cos(Z),
    }  # fmt: skip
    return base, L, symbols


@formula("eq:lora-forward")
def _():
    return layer()[2]


@formula("eq:lora-gradients")
def _():
    _, L, symbols = layer()
    found = {rf"\frac{{\partial L}}{{\partial {k}}}": grad(L, symbols[k]) for k in "ABX"}
    return {**symbols, **found}


@formula("eq:lora-first-step")
def _():
    # B starts at 0 and takes one step of torch.optim.SGD; A does not move.
    base, x, G = nn.Linear(7, 3, dtype=torch.float64), draw(5, 7), draw(5, 3)
    A = draw(7, 2).requires_grad_()
    B = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    (G * (base(x) + 1.5 * (x @ A @ B))).sum().backward()
    start = A.detach().clone()
    torch.optim.SGD([A, B], lr=0.1).step()
    assert torch.equal(A, start)
    return {
        r"\Delta W": 1.5 * A @ B, "A": A, "B": B, "s": 1.5, r"\eta": 0.1,
        r"\frac{\partial L}{\partial W}": base.weight.grad.T,
    }  # fmt: skip


SIGMA, R, ALPHA = 0.3, 2, 3.0
# All matrices A, 2 by 2, of entries σ and -σ, equally likely: means over them are exact.
ALL_A = SIGMA * torch.tensor([*product((-1, 1), repeat=2 * R)], dtype=torch.float64).view(-1, 2, R)
NUMBERS = {r"\alpha": ALPHA, r"\sigma": SIGMA, "r": R, "s": ALPHA / R}


@formula("eq:lora-factor")
def _():
    mean = (ALPHA / R) ** 2 * (ALL_A @ ALL_A.mT).mean(0)
    assert torch.allclose(mean, mean[0, 0] * torch.eye(2, dtype=torch.float64))
    return {"f": mean[0, 0], **NUMBERS}


@formula("eq:lora-adam")
def _():
    # The first step of torch.optim.Adam moves each entry of B by the rate.
    B = torch.zeros(R, 3, dtype=torch.float64, requires_grad=True)
    B.grad = draw(R, 3)
    torch.optim.Adam([B], lr=0.01, eps=0.0).step()
    changes = ALPHA / R * ALL_A @ B.detach()
    return {r"\Delta_{\text{rms}}": changes.square().mean().sqrt(), r"\eta": 0.01, **NUMBERS}


@formula("eq:lora-merge")
def _():
    # The weight that gives the layer's outputs, solved for from seven inputs.
    base, _, symbols = layer()
    x = torch.eye(7, dtype=torch.float64)
    A, B, s = symbols["A"], symbols["B"], symbols["s"]
    found = base(x) + s * (x @ A) @ B - base.bias
    return {**symbols, "W'": found}
