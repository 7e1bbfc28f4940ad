"""How does the cost of each helper grow with the model?  Exponents for the cost page.

A residual tanh network on random data, batch 32, made larger in two ways: more parameters at four
blocks (wider), and more blocks at width 32 (deeper). Each helper, and a training step to compare
with, runs once at each size in each round. For a cost like ``size ** k``, k is the slope of a line
through the logarithms; it is fitted over the last factor of ten, for at small sizes what is paid
once hides it.

``watch`` is the time of one watched step. ``record`` is a recorded forward pass with its graph,
``trace`` the tracing alone.

Counted besides, the same on every machine: how often a helper calls the loss function.
"""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bpkit import audit, checkup, find_nonfinite, record, trace, watch
from bpkit.memory import ledger
from measured import in_turn, rounded

INPUTS, CLASSES, BATCH, BATCHES, WATCHED = 16, 10, 32, 4, 20
WIDTHS = (50, 89, 158, 281, 500)  # with four blocks, 10 thousand parameters to a million
DEPTHS = (3, 10, 32, 100)


class Residual(nn.Module):
    """Blocks ``h + tanh(W h + b) / √depth``: as healthy when it is deep."""

    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h)) / len(self.blocks) ** 0.5
        return self.last(h)


class Loss:
    """Cross-entropy, and how often it was asked for."""

    calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return F.cross_entropy(model(batch[0]), batch[1])


def setting(width, depth):
    """The helpers on one model, name -> function, the loss that they call, and the model."""
    torch.manual_seed(0)
    model, loss_fn = Residual(width, depth), Loss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(BATCHES, BATCH, INPUTS)
    batches = list(zip(x, x[..., :CLASSES].argmax(2), strict=True))
    batch = batches[0]

    # What trains is a copy: how much a checkup looks at depends on what the model has learned.
    trained = copy.deepcopy(model)
    trainer = torch.optim.SGD(trained.parameters(), 1e-3)

    def step():
        trainer.zero_grad()
        loss_fn(trained, batch).backward()
        trainer.step()

    def watched():
        with watch(trained, trainer):
            for _ in range(WATCHED):
                step()

    def recorded():
        with record(names=model) as recording:
            loss = loss_fn(model, batch)
        recording.graph(loss)

    loss = loss_fn(model, batch)
    helpers = {
        "step": step,
        "trace": lambda: trace(loss, names=model),
        "record": recorded,
        "watch": watched,
        "find_nonfinite": lambda: find_nonfinite(model, loss_fn, batch),
        "ledger": lambda: ledger(model, loss_fn, batch, optimizer),
        "audit": lambda: audit(model, loss_fn, batch),
        "checkup": lambda: checkup(model, loss_fn, batches, optimizer),
    }
    return helpers, loss_fn, model


def calls(helpers, loss_fn):
    """How often each helper calls the loss function."""
    counted = {}
    for name, run in helpers.items():
        before = loss_fn.calls
        run()
        counted[name] = loss_fn.calls - before
    return counted


def exponents(sizes, seconds):
    """The slope over the last factor of ten, in each round; ``seconds``: (sizes, rounds)."""
    last = np.array(sizes) > 0.09 * sizes[-1]
    return np.polyfit(np.log(sizes)[last], np.log(np.array(seconds)[last]), 1)[0]


def measure(rounds):
    results, series, counts = {}, {}, {}
    for axis, settings in {
        "parameters": [(width, 4) for width in WIDTHS],
        "layers": [(32, depth) for depth in DEPTHS],
    }.items():
        sizes, times = [], []
        series[axis], counts[axis] = {}, []
        for width, depth in settings:
            helpers, loss_fn, model = setting(width, depth)
            parameters = sum(p.numel() for p in model.parameters())
            sizes.append(parameters if axis == "parameters" else depth)
            counts[axis].append(calls(helpers, loss_fn))
            times.append(in_turn(helpers, rounds, {"step": WATCHED, "trace": 5, "record": 5}))
        series[axis]["sizes"] = sizes
        for name in helpers:
            share = WATCHED if name == "watch" else 1
            seconds = np.array([found[name] for found in times]) / share
            results[f"{name}, {axis}"] = list(exponents(sizes, seconds))
            series[axis][name] = [rounded(value) for value in np.median(seconds, axis=1)]
    return {**results, "series": series, "counts": counts}
