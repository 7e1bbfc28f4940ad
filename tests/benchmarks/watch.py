"""What does it cost to be watched?  Ratios to the bare loop for chapter 5.

SGD with momentum at batch 128 on three MLPs: bare; under ``bpkit.watch``, entering, leaving and
reading the arrays included; and with the loop that the articles print, which asks each parameter
for norm, mean and standard deviation and reads each number with ``.item()``.

Counted besides, the same on every machine: how often a step waits until one number is read.
"""

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bpkit import watch
from measured import in_turn, ratios

SIZES = {"small": (64, 32, 10), "middle": (784, 256, 128, 10), "large": (784, 1024, 1024, 10)}
STEPS = {"small": 500, "middle": 400, "large": 100}


def setting(sizes):
    torch.manual_seed(0)
    layers = [m for pair in pairwise(sizes) for m in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    batch = torch.randn(128, sizes[0]), torch.randint(sizes[-1], (128,))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batch


def loop(model, optimizer, batch, steps, look=None):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        if look is not None:
            look(model)
        optimizer.step()


def item_by_item(model):
    for p in model.parameters():
        p.grad.norm().item(), p.grad.mean().item(), p.grad.std().item()


def bare(sizes, steps):
    loop(*setting(sizes), steps)


def watched(sizes, steps):
    model, optimizer, batch = setting(sizes)
    with watch(model, optimizer) as log:
        loop(model, optimizer, batch, steps)
    log.to_dict()


def items(sizes, steps):
    loop(*setting(sizes), steps, item_by_item)


RUNS = {"bare loop": bare, "bpkit.watch": watched, "item by item": items}


class Reads(TorchDispatchMode):
    """Counts how often one number is read out of a tensor: on a GPU, the program waits there."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def reads_per_step(run, sizes, steps):
    with Reads() as reads:
        run(sizes, steps)
    return reads.number / steps


def measure(rounds):
    results, counts = {}, {}
    for network, sizes in SIZES.items():
        steps = STEPS[network]
        times = in_turn({name: partial(run, sizes, steps) for name, run in RUNS.items()}, rounds)
        results[f"bare loop, {network}: ms per step"] = np.median(times["bare loop"]) / steps * 1e3
        for name in ("bpkit.watch", "item by item"):
            results[f"{name} / bare loop, {network}"] = ratios(times, name, "bare loop")
        counts[network] = {name: reads_per_step(run, sizes, 20) for name, run in RUNS.items()}
    return {**results, "counts": counts}
