"""Are the displayed equations of the page on sequences what the code computes?"""

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from formulas import draw, formula, grad

LENGTHS = (2, 5, 3)


def attention():
    """Weights, values and outputs of a causal row of two texts, as the page's network has them."""
    owner = torch.tensor([0, 0, 0, 1, 1])
    mask = (owner[:, None] == owner) & torch.ones(5, 5, dtype=torch.bool).tril()
    scores, v = draw(5, 5), draw(5, 3)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return mask.double(), scores, weights, v


@formula("eq:seq-weights")
def _():
    mask, scores, weights, _ = attention()
    return {"m": mask, "s": scores, "a": weights, "i": range(1, 6), "j": range(1, 6)}


@formula("eq:seq-values")
def _():
    _, _, weights, v = attention()
    o = weights @ v
    L = torch.sin(o).sum()
    return {
        "a": weights,
        "j": range(1, 6),
        r"\frac{\partial L}{\partial v_j}": grad(L, v),
        r"\frac{\partial L}{\partial o_i}": grad(L, o),
    }


@formula("eq:seq-means")
def _():
    scores = [draw(n, 7) for n in LENGTHS]
    targets = [torch.arange(n) for n in LENGTHS]
    pairs = list(zip(scores, targets, strict=True))
    means = torch.stack([F.cross_entropy(s, t) for s, t in pairs])
    return {
        r"L_{\text{words}}": F.cross_entropy(torch.cat(scores), torch.cat(targets)),
        r"L_{\text{texts}}": means.mean(),
        "n_r": torch.tensor(LENGTHS, dtype=torch.float64), "L_r": means, "R": len(LENGTHS),
    }  # fmt: skip


def generated(T, use_cache, width=4):
    """Operations of one layer, `x W` and then attention, and what the cache holds in the end."""
    x, W = draw(T, width), draw(width, 3 * width)
    keys = values = torch.empty(0, width, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        for t in range(1, T + 1):
            q, k, v = (x[t - 1 : t] if use_cache else x[:t]).matmul(W).chunk(3, dim=-1)
            if use_cache:
                k, v = keys, values = torch.cat([keys, k]), torch.cat([values, v])
            (q @ k.T).softmax(-1) @ v
    return counter.get_total_flops(), keys.nbytes + values.nbytes


@formula("eq:seq-operations")
def _():
    for T in (1, 3, 8):
        yield {
            r"F_{\text{without}}": generated(T, False)[0],
            r"F_{\text{with}}": generated(T, True)[0],
            "c_1": 2 * 4 * 12, "c_2": 2 * 2 * 4, "T": T,
        }  # fmt: skip


@formula("eq:seq-cache")
def _():
    for T in (1, 5):
        yield {"M": generated(T, True)[1], "T": T, "d": 4, "b": 8}
