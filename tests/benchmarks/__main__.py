"""What do the helpers cost, next to what one would use instead?  All of it in one run.

    python tests/benchmarks                  # everything, into the JSON files and one table
    python tests/benchmarks watch checkup    # these two
    python tests/benchmarks --rehearse       # one round of each, printed and not stored

Run it on a machine that does nothing else.
"""

import argparse
import gc
import importlib
import os
import time

os.environ["TQDM_DISABLE"] = "1"  # read when it is imported

import torch
from threadpoolctl import threadpool_limits

from bpkit.style import Table
from measured import record, store

# What compiles comes last: nothing that is timed runs beside the compiler.
ROUNDS = {"autodiff": 15, "numeric": 5, "watch": 9, "checkup": 7, "growth": 5, "graph": 15}


def rows(name, stored):
    """The ratios and exponents of a record; times and counts are in its file."""
    for key, value in stored["results"].items():
        if key in stored["spread"]:
            low, high = map(three_digits, stored["spread"][key])
            yield [name, key, three_digits(value), f"{low} to {high}"]


def three_digits(value):
    return f"{float(f'{value:.3g}'):,.10g}"  # without an exponent: 0.00278, 15,500


def main():
    parser = argparse.ArgumentParser(
        prog="python tests/benchmarks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(ROUNDS))
    parser.add_argument("--rehearse", action="store_true", help="one round, nothing stored")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in ROUNDS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(ROUNDS)}")
    torch.set_num_threads(1)
    table = []
    gc.freeze()  # what is imported is not searched again before each measurement
    with threadpool_limits(1):
        for name in options.names or ROUNDS:
            start = time.perf_counter()
            rounds = 1 if options.rehearse else ROUNDS[name]
            torch.manual_seed(0)
            stored = record(importlib.import_module(name).measure(rounds), rounds)
            print(f"{name}: {time.perf_counter() - start:.0f} seconds", flush=True)
            if not options.rehearse:
                store(name, stored)
            table += rows(name, stored)
    print(Table(["benchmark", "ratio", "median", "middle half"], table))


if __name__ == "__main__":
    main()
