"""Would the tests notice a small fault?  Makes one after another in a copy, and runs the tests.

    python tests/tools/mutate.py --count 300 --seed 0   # draw, run all, store tests/mutants.json
    python tests/tools/mutate.py --again                # without those that are judged already
    python tests/tools/mutate.py --only bpkit/optim.py  # those of one file, the others as stored

``mutants.py`` says which faults. The first run measures which test runs which line, with coverage,
and keeps it in ``_build/mutation/``. A fault in ``bpkit`` then meets only the tests that run its
line, the fastest first, and after them the notebooks that run it; a fault in a notebook meets
nbval and the comparison of pictures; one in the catalogue or in a formula the tests of those.
The first test that fails ends it. A fault that no test notices survives: either a test is missing,
or the store gives it a ``reason``, with ``"equivalent": true`` where no test could tell.

Why not a well-kept tool? Cosmic Ray and mutmut change Python modules only: no notebooks, no TOML,
no LaTeX. mutmut 3 leaves out all code outside functions, and so every table and threshold; Cosmic
Ray runs all tests for each mutant, eight minutes here. Neither draws a stratified sample.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from datetime import date
from itertools import count
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]

from tools import mutants  # noqa: E402

STORE = ROOT / "tests" / "mutants.json"
CACHE = ROOT / "_build" / "mutation"
CLOCK = count(10**9)
BUDGET = 300.0  # seconds of tests, as measured, that a mutant meets at the most
LEFT_OUT = ("_build", ".venv", ".pins", ".git", "__pycache__", ".*_cache", ".hypothesis", "*.egg-*")
# They compare source texts, or are about mutants themselves: any change at all would fail them.
NOT_USED = {"test_mutation", "test_autodiff_mutants"}
PROGRAMS = "tests/test_diagnosis.py"
CATALOGUE_TESTS = ["tests/test_faults.py", "tests/book/test_pages.py", "tests/test_report.py",
                   "tests/test_readme.py"]  # fmt: skip
PRELOADED = ["torch", "torch.utils.checkpoint", "numpy", "matplotlib.pyplot", "sklearn.datasets",
             "hypothesis", "pytest", "nbval.plugin", "nbformat", "PIL.Image"]  # fmt: skip


# One mutant


def copy_of_the_project(folder):
    """A copy of the working tree in which faults are made; the tree itself stays untouched."""
    copy = Path(folder) / "project"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return copy


def put(mutant, copy):
    """Make the fault in the copy; returns a function that takes it back."""
    path = copy / mutant.file
    original = path.read_text(encoding="utf-8")
    if mutant.cell is None:
        changed = mutant.changed(original)
    else:
        notebook = json.loads(original)
        (cell,) = [cell for cell in notebook["cells"] if cell["id"] == mutant.cell]
        cell["source"] = mutant.changed("".join(cell["source"])).splitlines(keepends=True)
        changed = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"

    def write(text):
        path.write_text(text, encoding="utf-8")
        moment = next(CLOCK)  # a new time stamp: compiled files of the last mutant are outdated
        os.utime(path, (moment, moment))

    write(changed)
    return lambda: write(original)


def attempt(copy, arguments, log):
    """Run pytest on the copy; the body of a process that has torch and pytest loaded."""
    os.setsid()
    os.nice(10)
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests")]
    sys.path[:] = [p for p in sys.path if p not in (str(ROOT), str(ROOT / "tests"))]
    os.environ |= {"PYTHONPATH": str(copy), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    import pytest

    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    options += ["-p", "nbval.plugin", "-p", "_hypothesis_pytestplugin"]
    with open(log, "w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        code = pytest.main([*options, *arguments])
        import bpkit

        if not Path(bpkit.__file__).is_relative_to(copy):
            code = 99
    os._exit(int(code))


def run(copy, arguments, timeout):
    """What fails: a test, "timeout", "crash" or "import"; None if nothing does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", suffix=".log") as log:
        process = context.Process(target=attempt, args=(copy, arguments, log.name))
        process.start()
        process.join(timeout)
        if process.is_alive():
            os.killpg(process.pid, 9)
            process.join()
            return "timeout"
        text = Path(log.name).read_text(encoding="utf-8")
    if process.exitcode == 0:
        return None
    if process.exitcode < 0:
        return "crash"
    if "ImportError while loading conftest" in text:
        return "import"
    files = sorted({name.partition("::")[0] for name in arguments})
    if process.exitcode == 4 and files != arguments:  # a file can't be imported, or has other tests
        return run(copy, files, timeout)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.M)
    if not failed or process.exitcode not in (1, 2):
        raise RuntimeError(f"pytest {arguments} ended with {process.exitcode}:\n{text[-2000:]}")
    return failed[1]


def judge(mutant, copy, stages):
    """The first test that notices the mutant, and the seconds it took; None if none does."""
    begun, take_back = time.monotonic(), put(mutant, copy)
    try:
        for arguments, expected in stages:
            if by := run(copy, arguments, 60 + 6 * expected):
                return by, round(time.monotonic() - begun, 1)
    finally:
        take_back()
    return None, round(time.monotonic() - begun, 1)


# Which tests


class Reach:
    """Which tests run which lines of bpkit, measured once for each file of tests."""

    def __init__(self):
        self.lines = defaultdict(lambda: defaultdict(set))  # file -> line -> tests
        self.seconds = {}

    def add(self, measured):
        self.seconds |= measured["seconds"]
        for file, lines in measured["lines"].items():
            for line, tests in lines.items():
                self.lines[file][int(line)] |= {t for t in tests if t in self.seconds}

    def of(self, mutant):
        """Names of tests for a mutant, the fastest first.

        Code that runs at import time belongs to no test: then those that run a line with the name
        that the statement defines, or else all that run anything of the file.
        """
        size = mutant.before.count("\n") + 1
        here = self.lines[mutant.file]
        found = set().union(*(here[k] for k in range(mutant.line, mutant.line + size)))
        if not found:
            found = self.by_name(mutant) or set().union(*here.values())
        return sorted(found, key=self.seconds.get)

    def by_name(self, mutant):
        name = re.match(r"(?:def |class )?(\w+)", mutant.before.strip())
        if not name or name[1] in ("return", "if", "for"):
            return set()
        word, found = re.compile(rf"\b{name[1]}\b"), set()
        for file, lines in self.lines.items():
            text = (ROOT / file).read_text(encoding="utf-8").split("\n")
            found.update(*(tests for k, tests in lines.items() if word.search(text[k - 1])))
        return found


def measured(path, package):
    """Tests or a notebook, run under coverage: seconds of each test, lines that each runs."""
    key = hashlib.sha256(path.read_bytes() + package).hexdigest()[:12]
    cached = CACHE / f"{path.stem}-{key}.json"
    if not cached.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        data = CACHE / f"{path.stem}.coverage"
        seconds = (of_notebook if path.suffix == ".ipynb" else of_tests)(path, data)
        cached.write_text(json.dumps({"seconds": seconds, "lines": contexts(data)}))
    return json.loads(cached.read_text(encoding="utf-8"))


def contexts(data):
    import coverage

    found, stored = {}, coverage.CoverageData(str(data))
    stored.read()
    for name in stored.measured_files():
        lines = {
            line: sorted(filter(None, tests))
            for line, tests in stored.contexts_by_lineno(name).items()
        }
        found[Path(name).relative_to(ROOT).as_posix()] = {k: v for k, v in lines.items() if v}
    return found


def of_tests(path, data):
    seconds = data.with_suffix(".seconds")
    command = [sys.executable, "-m", "coverage", "run", "--source=bpkit", f"--data-file={data}",
               "-m", "pytest", "-q", "-p", "contexts", "-p", "no:xdist", str(path)]  # fmt: skip
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "tools")))
    environment = os.environ | {"MUTATION_SECONDS": str(seconds), "PYTHONPATH": folders}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the tests must pass before faults are made:\n{done.stdout[-3000:]}")
    return json.loads(seconds.read_text(encoding="utf-8"))


def of_notebook(path, data):
    """As one test: nbval's kernel is killed at its end, so that it could not write its coverage."""
    import nbformat
    from nbclient import NotebookClient

    from tools import refresh

    name = path.relative_to(ROOT).as_posix()
    notebook, begun = refresh.read(path), time.monotonic()
    head = (
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "import contexts, coverage\n"
        "contexts.import_all()\n"
        f"_cov = coverage.Coverage({str(data)!r}, source=['bpkit'], config_file=False)\n"
        f"_cov.start()\n_cov.switch_context({name!r})"
    )
    new = nbformat.v4.new_code_cell
    notebook.cells = [new(head), *notebook.cells, new("_cov.stop()\n_cov.save()")]
    NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # no word on the transport
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    return {name: round(time.monotonic() - begun, 1)}


def reach():
    files = sorted((ROOT / "bpkit").rglob("*.py"))
    package = b"".join(path.read_bytes() for path in files)
    found = Reach()
    tests = [p for p in sorted((ROOT / "tests").glob("test_*.py")) if p.stem not in NOT_USED]
    for path in [*tests, *sorted((ROOT / "chapters").glob("*.ipynb"))]:
        found.add(measured(path, package))
    return found


def stages(mutant, reach, budget):
    """What a mutant meets, one after another: pairs (arguments of pytest, seconds expected)."""
    stem = Path(mutant.file).stem
    if mutant.kind == "gradients":
        return [(["--nbval", mutant.file], 60)]
    if mutant.kind == "formulas":
        equations = f"tests/formulas/test_formulas.py::test_equations[{stem}]"
        return [([equations], 5), (["tests/book/test_pages.py", "-k", stem], 30)]
    if mutant.kind == "catalogue":
        return [(CATALOGUE_TESTS, 60)]
    names, spent, found = reach.of(mutant), 0.0, []
    notebooks = [name for name in names if name.endswith(".ipynb")]
    tests = [name for name in names if name not in notebooks]
    for name in tests:
        spent += reach.seconds[name]
        if spent < budget:
            found.append(name)
    # Two calls of pytest: the second one collects a thousand programs, and is rarely needed.
    programs = [name for name in found if name.startswith(PROGRAMS)]
    parts = [part for part in ([n for n in found if n not in programs], programs) if part]
    pairs = [(part, sum(map(reach.seconds.get, part))) for part in parts]
    for name in notebooks:
        spent += reach.seconds[name]
        if spent < budget:
            pairs.append((["--nbval", name], reach.seconds[name]))
    return pairs


# All mutants


def judge_all(entries, reach, budget, workers, done):
    """Judge the entries in `workers` copies; calls `done` after each."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        copies = Queue()
        for k in range(workers):
            copies.put(copy_of_the_project(Path(folder) / str(k)))

        def one(entry):
            copy = copies.get()
            try:
                mutant = mutant_of(entry)
                by, spent = judge(mutant, copy, stages(mutant, reach, budget))
            except RuntimeError as error:  # say so, and go on with the others
                print(f"not judged: {mutant}\n{error}", file=sys.stderr)
                return
            finally:
                copies.put(copy)
            entry |= {"result": "killed" if by else "survived", "by": by, "seconds": spent}
            if by:
                entry.pop("reason", None), entry.pop("equivalent", None)
            done(entry)

        for _ in pool.map(one, entries):
            pass


def mutant_of(entry):
    fields = mutants.Mutant.__dataclass_fields__
    return mutants.Mutant(**{name: entry[name] for name in fields})


def key(entry):
    return tuple(entry[name] for name in ("file", "cell", "line", "before", "after"))


def table(entries):
    """Rows (part, mutants, killed, equivalent, survivors), the sum last."""
    counts = defaultdict(Counter)
    for entry in entries:
        for part in (f"{entry['kind']}: {entry['file']}", f"{entry['kind']}, all", "all"):
            kind = "equivalent" if entry.get("equivalent") else entry["result"]
            counts[part] += Counter({"mutants": 1, kind: 1})
    columns = ("mutants", "killed", "equivalent", "survived")
    return {part: {name: found[name] for name in columns} for part, found in counts.items()}


def store(entries, number, seed):
    import torch

    entries = [entry for entry in entries if "result" in entry]
    record = {
        "command": f"python tests/tools/mutate.py --count {number} --seed {seed}",
        "count": number,
        "seed": seed,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "table": table(entries),
        "mutants": entries,
    }
    STORE.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="not the killed and explained")
    parser.add_argument("--only", default="", help="those whose kind or file has this in its name")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of tests for one")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)

    from tools import refresh

    os.environ.update(refresh.ENVIRONMENT)
    stored = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {"mutants": []}
    known = {key(entry): entry for entry in stored["mutants"]}
    drawn = [mutant.to_dict() for mutant in mutants.sample(options.count, options.seed)]
    entries = [known.get(key(entry), {}) | entry for entry in drawn]
    wanted = [
        entry
        for entry in entries
        if options.only in f"{entry['kind']}: {entry['file']}"
        and not (options.again and ("reason" in entry or entry.get("result") == "killed"))
    ]
    wanted.sort(key=lambda entry: "result" in entry)  # those never judged first
    begun, lock, number = time.monotonic(), threading.Lock(), count(1)

    def done(entry):
        with lock:
            print(f"{time.monotonic() - begun:6.0f} s  {next(number)}/{len(wanted)} "
                  f"{entry['result']:8} {entry['seconds']:5.1f} s  {entry['file']}:{entry['line']} "
                  f"{entry['operator']}  {entry['by'] or ''}", flush=True)  # fmt: skip
            store(entries, options.count, options.seed)

    reached = reach() if any(entry["kind"] == "bpkit" for entry in wanted) else None
    judge_all(wanted, reached, options.budget, options.workers, done)
    for part, row in table([entry for entry in entries if "result" in entry]).items():
        print(f"{part:50}", *(f"{name} {number:3}" for name, number in row.items()))


if __name__ == "__main__":
    main()
