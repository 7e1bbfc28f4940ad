"""What does a graph cost, and what does compiling it gain?  Ratios for chapter 1.

Recording: the forward pass of five layers (tanh of a matrix product) with gradient mode on,
against the same under no_grad. Compiling: a chain of 32 elementwise operations on two million
float32 numbers, eager against torch.compile (which needs a C++ compiler).
"""

import os
import time

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # the first call compiles, each time

import torch

from measured import in_turn, ratios

REPEATS = {1: 2000, 64: 1500, 1024: 3}  # by the width of the layers


def recording(size, rounds):
    weight, batch = torch.randn(size, size, requires_grad=True), torch.randn(size, size)

    def forward():
        for _ in range(REPEATS[size]):
            h = batch
            for _ in range(5):
                h = torch.tanh(h @ weight)

    times = in_turn({"recorded": forward, "bare": torch.no_grad()(forward)}, rounds)
    return ratios(times, "recorded", "bare")


def chain(x):
    for _ in range(8):
        x = torch.sin(x) * 0.5 + x * 0.1
    return x


@torch.no_grad()
def fusion(rounds):
    x = torch.randn(2_000_000)
    compiled = torch.compile(chain)
    start = time.perf_counter()
    difference = (compiled(x) - chain(x)).abs().max().item()
    first_call = time.perf_counter() - start
    times = in_turn({"eager": lambda: chain(x), "compiled": lambda: compiled(x)}, rounds)
    return ratios(times, "eager", "compiled"), first_call, difference


def measure(rounds):
    recorded = {f"recording_ratio_{size}": recording(size, rounds) for size in REPEATS}
    gain, first_call, difference = fusion(rounds)
    return {
        **recorded,
        "compiled_speedup": gain,
        "compiled_first_call_seconds": first_call,
        "compiled_difference": difference,
    }
