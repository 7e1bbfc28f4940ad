"""Are the displayed equations of the page on processes what the code computes?"""

import torch
from torch.nn import functional as F

from formulas import draw, formula, grad


@formula("eq:ddp-shards")
def _():
    for counts in ((4, 4), (5, 1, 2)):
        x, W = draw(8, 3), draw(3, 7)
        y = torch.arange(8) % 7
        shares = zip(x.split(counts), y.split(counts), strict=True)
        parts = [grad(F.cross_entropy(part @ W, labels), W) for part, labels in shares]
        yield {
            r"\frac{\partial L}{\partial W}": grad(F.cross_entropy(x @ W, y), W),
            r"\frac{\partial L_r}{\partial W}": torch.stack(parts),
            "n_r": torch.tensor(counts, dtype=torch.float64), "N": 8,
        }  # fmt: skip


def sent(tensors):
    """Numbers that each process sends in a ring: first the sums go round, then the results."""
    R, counts = len(tensors), [0] * len(tensors)
    pieces = [list(tensor.chunk(R)) for tensor in tensors]
    for step in range(2 * R - 2):
        moving = [(r, (r - step) % R, pieces[r][(r - step) % R]) for r in range(R)]
        for r, k, piece in moving:
            to = (r + 1) % R
            pieces[to][k] = piece + pieces[to][k] if step < R - 1 else piece
            counts[r] += piece.numel()
    for mine in pieces:
        torch.testing.assert_close(torch.cat(mine), sum(tensors))
    assert len(set(counts)) == 1
    return counts[0]


@formula("eq:ddp-ring")
def _():
    for R in (2, 3, 4):
        yield {"S": 8 * sent([draw(24) for _ in range(R)]), "R": R, "P": 24, "b": 8}
