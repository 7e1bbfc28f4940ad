"""How are costs compared?  The two sides of a ratio take turns; the record names the machine.

A program beside this one has a function ``measure(rounds)`` that returns its numbers by name. A
list holds one number for each round; it is stored as its median, with its quartiles as ``spread``.
"""

import datetime
import gc
import json
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent


def seconds(run, repeats=1):
    """Processor time of one call, which other programs on the machine disturb least."""
    start = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - start) / repeats


def in_turn(runs, rounds, repeats=None):
    """Seconds of each of the ``runs`` (name -> function) in each round, after one to warm up.

    ``repeats`` says how often one is called in a round, where that is more than once: a slow
    machine, or another program, then meets all of them and drops out of their ratio.
    """
    times = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            gc.collect()  # nobody pays for what the one before left
            times[name].append(seconds(run, (repeats or {}).get(name, 1)))
    return times


def ratios(times, first, second):
    """``first / second`` in each round."""
    return [a / b for a, b in zip(times[first], times[second], strict=True)]


def rounded(value):
    return float(f"{value:.4g}")


def processor():
    """The processor's model name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def record(measured, rounds):
    """What is stored: the circumstances, the medians, their quartiles, and what is counted."""
    measured = dict(measured)
    extra = {name: measured.pop(name) for name in ("series", "counts") if name in measured}
    several = {name: value for name, value in measured.items() if isinstance(value, list)}
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": "CPU only",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "numpy": np.__version__,
        "results": {name: rounded(np.median(value)) for name, value in measured.items()},
        "spread": {
            name: [rounded(quartile) for quartile in np.percentile(value, (25, 75))]
            for name, value in several.items()
        },
        **extra,
    }


def path_of(name):
    return FOLDER / f"{name}.json"


def store(name, stored):
    path_of(name).write_text(
        json.dumps(stored, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
