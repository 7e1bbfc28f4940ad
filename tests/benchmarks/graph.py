"""What does a graph cost, and what does compiling it gain?  Ratios for chapter 1.

    python tests/benchmarks/graph.py    # prints the ratios and stores them in graph.json

Recording: the forward pass of five layers (tanh of a matrix product) with gradient mode on,
against the same under no_grad. Compiling: a chain of 32 elementwise operations on two million
float32 numbers, eager against torch.compile (which needs a C++ compiler). CPU time of one thread,
the two sides of a ratio measured in turn, medians.
"""

import os
import time
from statistics import median

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # the first call compiles, each time

import torch

from measured import store


def seconds(run, repeats):
    start = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - start) / repeats


def recording_ratio(size, repeats, rounds=15):
    weight, batch = torch.randn(size, size, requires_grad=True), torch.randn(size, size)

    def forward():
        h = batch
        for _ in range(5):
            h = torch.tanh(h @ weight)
        return h

    ratios = []
    for _ in range(rounds):
        recorded = seconds(forward, repeats)
        with torch.no_grad():
            ratios.append(recorded / seconds(forward, repeats))
    return median(ratios)


def chain(x):
    for _ in range(8):
        x = torch.sin(x) * 0.5 + x * 0.1
    return x


def fusion(rounds=9):
    x = torch.randn(2_000_000)
    compiled = torch.compile(chain)
    start = time.perf_counter()
    with torch.no_grad():
        difference = (compiled(x) - chain(x)).abs().max().item()
        first_call = time.perf_counter() - start
        ratios = [
            seconds(lambda: chain(x), 1) / seconds(lambda: compiled(x), 1) for _ in range(rounds)
        ]
    return median(ratios), first_call, difference


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gain, first_call, difference = fusion()
    store(
        __file__,
        {
            "recording_ratio_1": recording_ratio(1, 2000),
            "recording_ratio_64": recording_ratio(64, 1500),
            "recording_ratio_1024": recording_ratio(1024, 3),
            "compiled_speedup": gain,
            "compiled_first_call_seconds": first_call,
            "compiled_difference": difference,
        },
    )


if __name__ == "__main__":
    main()
