"""Where do measured times go?  Into a JSON file beside the benchmark, with machine and date."""

import datetime
import json
import os
import platform
from pathlib import Path

import numpy
import torch


def processor() -> str:
    """The processor's model name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def store(script: str, results: dict[str, float]) -> None:
    """Print ``results`` and write them to ``<script>.json`` with the circumstances."""
    record = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "numpy": numpy.__version__,
        "results": {name: float(f"{value:.4g}") for name, value in results.items()},
    }
    for name, value in record["results"].items():
        print(f"{name:32} {value}")
    Path(script).with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
