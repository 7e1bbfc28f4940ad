"""What does it cost to be watched?  Ratios to the bare loop for chapter 5.

    python tests/benchmarks/watch.py    # prints a table and stores the numbers in watch.json

500 steps of SGD with momentum at batch 128 on three MLPs: bare; under ``bpkit.watch``, entering,
leaving and reading the arrays included; and with the loop that the articles print, which asks each
parameter for norm, mean and standard deviation and reads each number with ``.item()``. CPU time of
one thread, the three in turn, medians of the ratios.
"""

import time
from itertools import pairwise
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from bpkit import watch
from bpkit.style import Table
from measured import store

SIZES = {"small": (64, 32, 10), "middle": (784, 256, 128, 10), "large": (784, 1024, 1024, 10)}


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


def seconds(run, *arguments):
    start = time.process_time()
    run(*arguments)
    return time.process_time() - start


def measure(sizes, steps, rounds=9):
    """Milliseconds of a bare step, and the ratios of the other two to it."""
    for run in (bare, watched, items):
        run(sizes, 20)
    times = []
    for _ in range(rounds):
        times.append([seconds(run, sizes, steps) for run in (bare, watched, items)])
    alone = median(row[0] for row in times) / steps * 1e3
    return alone, median(w / b for b, w, _ in times), median(i / b for b, _, i in times)


def main():
    torch.set_num_threads(1)
    results, rows = {}, []
    for name, sizes in SIZES.items():
        alone, ratio, by_item = measure(sizes, 200 if name == "large" else 500)
        results |= {f"{name}_bare_step_ms": alone, f"{name}_watched": ratio}
        results[f"{name}_item_by_item"] = by_item
        rows.append(
            ["-".join(map(str, sizes)), f"{alone:.2f} ms", f"{ratio:.2f}", f"{by_item:.2f}"]
        )
    print(Table(["network", "bare step", "bpkit.watch", "item by item"], rows), "\n")
    store(__file__, results)


if __name__ == "__main__":
    main()
