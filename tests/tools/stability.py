"""Do all tests pass elsewhere too: in another order, on other versions, on a busy machine?

    python tests/tools/stability.py --list              # the configurations, and what each changes
    python tests/tools/stability.py pinned random-1      # run these, one after another
    python tests/tools/stability.py                     # run all that this Python can

Each runs in a clone of the last commit, without the tests of the built site, and its result
replaces the one in ``tests/stability.json``, which the page ``cost`` of the book shows. The Python
that runs this file runs the tests: for ``python-3.13`` make an environment with that version.
A run takes four minutes on two cores, twice that under load.

Pytest loads this file as a plugin as well (``-p tests.tools.stability``), since two things have to
happen after the tests are collected. The files are shuffled, and the tests in them; the cells of a
notebook stay in their order, which pytest-randomly and pytest-random-order would not leave them
in. And the number of threads is set, which the tests themselves set to one.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "tests" / "stability.json"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
PLUGIN = ["-p", "tests.tools.stability"]
SPREAD = ["-n", "2", "--dist", "loadfile"]
# The built site is the same everywhere; the test of the table waits for the runs that make it.
SUITE = ["--nbval", *SPREAD, "--ignore=tests/site", "--ignore=tests/test_stability.py"]
BPKIT = ["tests", *SUITE[1:], "--ignore=tests/book", "--ignore=tests/formulas",
         "--ignore=tests/test_mutation.py"]  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """What differs from the command of the README.

    ``packages`` are laid over the environment, ``needs`` are versions that it must have already.
    """

    text: str
    tests: list[str] = field(default_factory=lambda: SUITE)
    environment: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    needs: dict[str, str] = field(default_factory=dict)
    busy: int = 0

    def arguments(self):
        if not self.environment.keys() & {"STABILITY_SEED", "STABILITY_THREADS"}:
            return self.tests
        # Without it, xdist starts the files with the most tests first, in whatever order.
        order = ["--no-loadscope-reorder"] if "STABILITY_SEED" in self.environment else []
        return [*PLUGIN, *self.tests, *order]

    def command(self):
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join([*settings, "python", "-m", "pytest", *self.arguments()])


def shuffled(seed, text="", **environment):
    return Configuration(
        f"random order, seed {seed}{text}; two more processes compute all the time",
        environment={"STABILITY_SEED": str(seed), **environment},
        busy=2,
    )


CONFIGURATIONS = {
    "pinned": Configuration("nothing: the pinned versions, one thread"),
    "random-1": shuffled(1),
    "random-2": shuffled(2),
    "random-3": shuffled(3, ", no vector instructions", ATEN_CPU_CAPABILITY="default"),
    # A thread that waits gives its core away: four of them share two.
    "2-threads": Configuration(
        "two threads in each process",
        environment={"STABILITY_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    ),
    "numpy-oldest": Configuration(
        "the oldest NumPy that `bpkit` allows", packages=("numpy==1.26.0", "scikit-learn")
    ),
    "python-3.12": Configuration("Python 3.12", needs={"python": "3.12"}),
    "python-3.13": Configuration(
        "Python 3.13, the newest NumPy", needs={"python": "3.13", "numpy": "2.5"}
    ),
    "torch-newest": Configuration(
        "`bpkit`'s own tests, the newest PyTorch", tests=BPKIT, needs={"torch": "2.14"}
    ),
}


def pytest_collection_modifyitems(items):
    """Shuffle the files, and in each file the tests unless they are cells of a notebook."""
    seed = os.environ.get("STABILITY_SEED")
    if seed is None:
        return
    draw = random.Random(int(seed))
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = list(files)
    draw.shuffle(order)
    for path in order:
        if path.suffix != ".ipynb":
            draw.shuffle(files[path])
    items[:] = [item for path in order for item in files[path]]


def pytest_collection_finish():
    """Set the threads again, of this process and of the kernels, after both ``conftest.py``."""
    count = os.environ.get("STABILITY_THREADS")
    if count is None:
        return
    import torch

    torch.set_num_threads(int(count))
    os.environ.update(dict.fromkeys(THREADS, count))


def versions(*overlays):
    """Of Python, PyTorch and NumPy, those in ``overlays`` first."""
    path = [*map(str, overlays), *sys.path]
    found = {
        name: next(iter(distributions(name=name, path=path))).version.partition("+")[0]
        for name in ("torch", "numpy")
    }
    return {"python": platform.python_version(), **found}


def cannot_run(configuration):
    """What this environment lacks for it: "" if nothing."""
    have = versions()
    lacking = [
        f"{name} {wanted}, here is {have[name]}"
        for name, wanted in configuration.needs.items()
        if not f"{have[name]}.".startswith(f"{wanted}.")
    ]
    return "needs " + " and ".join(lacking) if lacking else ""


def spin():
    while True:
        pass


@contextlib.contextmanager
def busy(count):
    """So many processes that compute, as long as the block runs."""
    processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def counts(report):
    """Passed, failed and skipped tests, and the names of those that failed, of a JUnit report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = sorted({f"{case.get('classname')}::{case.get('name')}" for case in bad})
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
    }, names


def run(name, log=None, load=True):
    """The record of one run. Its output goes into the file ``log``, or is shown."""
    configuration = CONFIGURATIONS[name]
    with tempfile.TemporaryDirectory(prefix="stability-") as folder:
        folder = Path(folder)
        clone, overlay, report = folder / "repo", folder / "packages", folder / "report.xml"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        paths = [str(clone)]
        if configuration.packages:
            install = [sys.executable, "-m", "pip", "install", "-q", "--target", overlay]
            subprocess.run([*install, *configuration.packages], check=True)
            paths.append(str(overlay))
        environment = {
            **os.environ,
            **dict.fromkeys(THREADS, configuration.environment.get("STABILITY_THREADS", "1")),
            **configuration.environment,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [sys.executable, "-m", "pytest", *configuration.arguments(), "-q"]
        start = time.monotonic()
        with busy(configuration.busy if load else 0):
            subprocess.run(
                [*command, f"--junitxml={report}"],
                cwd=clone,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
            )
        seconds = time.monotonic() - start
        if not report.exists():
            raise SystemExit(f"{name}: pytest ended without a report; its output says why")
        numbers, failures = counts(report)
        used = versions(*([overlay] if configuration.packages else []))
    return {
        "date": datetime.date.today().isoformat(),
        "text": configuration.text,
        **used,
        "command": configuration.command(),
        **numbers,
        "seconds": round(seconds),
        **({"failures": failures} if failures else {}),
    }


def store(name, record):
    """Put a record among the others, in the order of ``CONFIGURATIONS``."""
    old = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    old[name] = record
    ordered = {key: old[key] for key in CONFIGURATIONS if key in old}
    STORE.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations; all if none")
    parser.add_argument("--list", action="store_true", help="print the configurations and stop")
    parser.add_argument("--log", type=Path, help="folder for the output of the runs")
    parser.add_argument("--no-load", action="store_true", help="the machine is busy without it")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - CONFIGURATIONS.keys():
        parser.error(
            f"no configuration {', '.join(unknown)}; there are {', '.join(CONFIGURATIONS)}"
        )
    if options.list:
        for name, configuration in CONFIGURATIONS.items():
            print(f"{name:14}{configuration.text} {cannot_run(configuration)}".rstrip())
        return 0
    failed = 0
    for name in options.names or CONFIGURATIONS:
        if why := cannot_run(CONFIGURATIONS[name]):
            print(f"{name}: left out, {why}", flush=True)
            failed += name in options.names
            continue
        if options.log:
            options.log.mkdir(parents=True, exist_ok=True)
            with open(options.log / f"{name}.log", "w", encoding="utf-8") as log:
                record = run(name, log, load=not options.no_load)
        else:
            record = run(name, load=not options.no_load)
        store(name, record)
        print(f"{name}: {record['passed']} passed, {record['failed']} failed", flush=True)
        failed += record["failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
