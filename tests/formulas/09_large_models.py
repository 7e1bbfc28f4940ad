"""Are the displayed equations of chapter 9 what the code computes?"""

from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bpkit.memory import ledger, saved_bytes
from formulas import formula

SIZES, ROWS = (7, 11, 5, 3), 13


def network():
    layers = []
    for n, m in pairwise(SIZES):
        layers += [nn.Linear(n, m, dtype=torch.float32), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, SIZES[0], generator=generator, dtype=torch.float32)
    return x, torch.arange(ROWS) % SIZES[-1]


def number(model):
    return sum(p.numel() for p in model.parameters())


@formula("eq:parameter-count")
def _():
    return {"P": number(network()), "d": SIZES, "n": 3}


@formula("eq:mlp-activations")
def _():
    return {"A": saved_bytes(loss_fn, network(), batch()).bytes, "N": ROWS, "d": SIZES, "n": 3}


@formula("eq:bill")
def _():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    parts = ledger(model, loss_fn, batch(), optimizer).parts
    counts = 4 * len([*model.parameters()])  # of steps, one for each tensor
    names = ("parameters", "gradients", "optimizer states", "activations")
    total = sum(parts[name] for name in names) - counts
    return {"M": total, "P": number(model), "A": parts["activations"]}


def attention(q, k, v, fused):
    if fused:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


class Block(nn.Module):
    """The block of the page: norm, attention, norm, gated hidden layer."""

    def __init__(self, d, heads, hidden, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(2))
        shapes = [(d, d)] * 4 + [(d, hidden)] * 2 + [(hidden, d)]
        self.maps = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in shapes)

    def forward(self, x):
        q, k, v, out, gate, up, down = self.maps
        h = self.norms[0](x)
        heads = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (q, k, v))
        x = x + out(attention(*heads, self.fused).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + down(F.silu(gate(h)) * up(h))


def for_each_token(fused, texts=2, length=24, d=32, heads=2, hidden=40):
    model = nn.Sequential(*(Block(d, heads, hidden, fused) for _ in range(2))).bfloat16()
    rows = saved_bytes(model, torch.zeros(texts, length, d, dtype=torch.bfloat16)).rows
    last = [row for row in rows if row.kind == "activation" and f"{row.module}.".startswith("1.")]
    return sum(row.nbytes for row in last) / (texts * length)


@formula("eq:per-token")
def _():
    return {
        r"a_{\text{fused}}": for_each_token(True), r"a_{\text{eager}}": for_each_token(False),
        "d": 32, "f": 40, "H": 2, "T": 24,
    }  # fmt: skip


def units(k, each=1, depth=12):
    """Inputs of k checkpointed segments and, beside them, what one segment keeps, in inputs."""
    layers = [nn.Sequential(*[nn.Tanh()] * each) for _ in range(depth)]
    cut = [nn.Sequential(*layers[i : i + depth // k]) for i in range(0, depth, depth // k)]
    x = torch.ones(8, requires_grad=True)

    def forward():
        h = x
        for segment in cut:
            h = checkpoint(segment, h, use_reentrant=False)
        return h

    kept = saved_bytes(forward)
    again = saved_bytes(lambda: cut[0](x))
    return (kept.bytes + kept.inputs + again.bytes) / x.nbytes


@formula("eq:segments")
def _():
    for k in (1, 3, 4, 12):
        yield {"M": lambda k: units(int(k)), "k": k, "n": 12}


@formula("eq:wide-segments")
def _():
    for k in (1, 3, 4, 12):
        yield {"M": lambda k: units(int(k), each=3), "k": k, "a": 3, "n": 12}


def best(depth, each=1):
    """The number of segments with the lowest peak, among all."""
    ks = np.arange(1, depth + 1)
    peaks = ks + each * depth / ks
    return ks[peaks.argmin()], peaks.min()


@formula("eq:sqrt")
def _():
    for depth in (16, 64):
        k, lowest = best(depth)
        yield {"k": k, "n": depth, "M": lambda _, lowest=lowest: lowest}


@formula("eq:wide-best")
def _():
    yield {"k": best(36, 4)[0], "a": 4, "n": 36}
