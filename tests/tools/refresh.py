"""Which outputs do the notebooks have?  Executes them in place, so that twice gives no diff.

    python tests/tools/refresh.py                            # every notebook in chapters/
    python tests/tools/refresh.py chapters/01_graphs.ipynb   # only this one
    python tests/tools/refresh.py --check                    # execute nothing: are they clean?

Each notebook runs in a fresh kernel, in its own folder, with one thread. What depends on the
machine or the front end is dropped: time stamps, kernel and language versions, other cell
metadata than the book's own, comments inside PNG files, the library frames of a traceback.
Cell ids are kept, so that a diff shows what changed and nothing else.

A Markdown cell with ``"fault": {"slug": ..., "part": ...}`` in its metadata holds a part of a
failure card: its text is the catalogue's, ``bpkit/diagnosis/faults.toml``, and is written here.
So are the minutes in the cell with ``"route": {}``, which says how long the page takes.
"""

import argparse
import base64
import difflib
import hashlib
import os
import re
import struct
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from bpkit.diagnosis.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python"}
KEEP_CELL = ("tags", "mystnb", "jupyter", "claims", "fault", "route", "figure_tolerance",
             "nbval_reason", "editable", "deletable")  # fmt: skip
KEEP_NOTEBOOK = ("myst", "numbers")

# One thread, so that sums are added up in one order; a fixed hash seed, so that sets print alike.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "TQDM_DISABLE": "1",  # a bar would appear on a slow machine only, and on stderr
}

ANSI = re.compile(r"\x1b\[[0-9;]*m")
CELL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
PNG_TYPES = ("image/png", "application/papermill.record/image/png")
PNG_COMMENTS = (b"tEXt", b"iTXt", b"zTXt", b"tIME", b"eXIf")

# How long a page takes, in seconds. Prose is read at 200 words a minute, as technical prose is;
# a formula or a figure is looked at, a line of code or output is read once. Folded cells are not.
SECONDS = {"word": 60 / 200, "code": 3, "output": 1, "equation": 20, "figure": 20}
# Comments, displayed formulas; first and last line of directives, their options; targets.
NO_PROSE = re.compile(
    r"<!--.*?-->|\$\$.*?\$\$(?: \(eq:[\w-]+\))?"
    r"|^\s*(?:`{3,}|:{3,}).*?$|^\s*:[\w-]+:.*?$|^\([\w:-]+\)=$",
    re.DOTALL | re.MULTILINE,
)
RATED = re.compile(r" · (easy, 5|medium, 10|hard, 20) min$")
TIME = re.compile(r"(\*\*Time\.\*\* About) \d+ (minutes to read)(?:, \d+ for the exercises)?\.")


def read(path):
    """The notebook as stored: unlike nbformat.read, nothing is added or repaired."""
    return nbformat.v4.reads(Path(path).read_text(encoding="utf-8"))


def dumps(nb):
    """The one text a notebook is stored as."""
    return nbformat.v4.writes(nb).rstrip("\n") + "\n"


def exercise_titles(cell):
    """The titles of the exercises in a cell."""
    return re.findall(r"^[`:]{3,}\{exercise\} *(.*?) *$", cell.source, re.M)


def minutes(nb):
    """How long a page takes to read, and its exercises to do: the sum of their ratings."""
    seconds, rated, exercise = 0.0, 0, False
    for cell in nb.cells:
        tags = set(cell.metadata.get("tags", []))
        titles = exercise_titles(cell) if cell.cell_type == "markdown" else []
        rated += sum(int(m[1].split()[1]) for title in titles if (m := RATED.search(title)))
        exercise = exercise or bool(titles)  # until its check
        if exercise or "route" in cell.metadata or tags & {"hide-cell", "remove-cell"}:
            exercise &= "check" not in tags
        elif cell.cell_type == "markdown":
            seconds += SECONDS["word"] * len(NO_PROSE.sub(" ", cell.source).split())
            seconds += SECONDS["equation"] * (cell.source.count("$$") // 2)
        else:
            if not tags & {"hide-input", "remove-input"}:
                seconds += SECONDS["code"] * len(cell.source.splitlines())
            if not tags & {"hide-output", "remove-output"}:
                seconds += sum(map(_seconds_of_output, cell.outputs))
    return max(5, 5 * round(seconds / 60 / 5)), rated


def _seconds_of_output(output):
    data = output.get("data", {})
    if "image/png" in data:
        return SECONDS["figure"]
    text = output.get("text") or output.get("evalue") or data.get("text/plain", "")
    return SECONDS["output"] * len(text.splitlines())


def timed(nb, text):
    """The text of a page's route with the minutes that the page takes."""
    read, rated = minutes(nb)
    exercises = f", {rated} for the exercises" if rated else ""
    return TIME.sub(rf"\1 {read} \2{exercises}.", text)


def normalise(nb):
    """Drop all that depends on the machine or the front end; changes and returns `nb`."""
    kept = {key: nb.metadata[key] for key in KEEP_NOTEBOOK if key in nb.metadata}
    nb.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": LANGUAGE, **kept})
    nb.nbformat, nb.nbformat_minor = 4, 5
    seen = set()
    for cell in nb.cells:
        cell.id = _cell_id(cell, seen)
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in KEEP_CELL if key in cell.metadata}
        )
        cell.source = cell.source.strip("\n")
        if "fault" in cell.metadata:
            cell.source = FAULTS[cell.metadata["fault"]["slug"]].card(
                cell.metadata["fault"]["part"]
            )
        for output in cell.get("outputs", []):
            _normalise_output(output)
    for cell in nb.cells:
        if "route" in cell.metadata:
            cell.source = timed(nb, cell.source)
    return nb


def _cell_id(cell, seen):
    """The cell's own id if it is valid and new, else one made from its text."""
    own = str(cell.get("id", ""))
    if not CELL_ID.fullmatch(own) or own in seen:
        base = "cell-" + hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        own = next(name for k in range(10**6) if (name := f"{base}-{k}" if k else base) not in seen)
    seen.add(own)
    return own


def _normalise_output(output):
    if "metadata" in output:  # glue keeps its key here; myst-nb needs it
        output.metadata = nbformat.from_dict(
            {key: value for key, value in output.metadata.items() if key == "scrapbook"}
        )
    if output.output_type == "error":
        output.traceback = _short_traceback(output)
    for mime in PNG_TYPES:
        if mime in output.get("data", {}):
            png = strip_png(base64.b64decode(output.data[mime]))
            output.data[mime] = base64.b64encode(png).decode("ascii")


def _short_traceback(error):
    """Frames of the reader's own cells and the message, without colours and library paths.

    nbval compares only the error's type and message, so this shortens nothing that is checked.
    """
    frames = [ANSI.sub("", entry).strip("\n") for entry in error.traceback]
    own = [frame for frame in frames[:-1] if frame.startswith("Cell In[")]
    return [*own, f"{error.ename}: {ANSI.sub('', error.evalue)}".rstrip()]


def strip_png(data):
    """A PNG without its text and time chunks (matplotlib writes its version there)."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError("an output of type image/png is no PNG file")
    kept, at = [data[:8]], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        end = at + 12 + length
        if data[at + 4 : at + 8] not in PNG_COMMENTS:
            kept.append(data[at:end])
        at = end
    return b"".join(kept)


def execute(path, timeout=600):
    """Run a notebook in a fresh kernel in its own folder; returns it normalised."""
    path = Path(path).resolve()
    nb = normalise(read(path))
    for cell in nb.cells:  # nothing of an earlier run may survive
        if cell.cell_type == "code":
            cell.execution_count, cell.outputs = None, []
    os.environ.update(ENVIRONMENT)
    NotebookClient(
        nb,
        timeout=timeout,
        kernel_name=KERNEL["name"],
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # no word on the transport
        coalesce_streams=True,  # else one print is now and then stored as two outputs
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    normalise(nb)
    nbformat.validate(nb)
    return nb


def differences(path):
    """How a stored notebook differs from its normalised self: empty if it is clean."""
    stored = Path(path).read_text(encoding="utf-8")
    clean = dumps(normalise(read(path)))
    diff = difflib.unified_diff(stored.split("\n"), clean.split("\n"), lineterm="", n=0)
    return [line[:120] for line in diff if not line.startswith(("---", "+++", "@@"))]


def main(arguments=None):
    """Command line; returns 1 if a notebook is not clean or does not run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="execute nothing, report what differs")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in chapters/")
    options = parser.parse_args(arguments)
    failed = False
    for path in options.notebooks or sorted((ROOT / "chapters").glob("*.ipynb")):
        if options.check:
            found = differences(path)
            failed |= bool(found)
            if found:
                print(f"{path}: not as refresh.py stores it:", *found[:6], sep="\n  ")
            continue
        try:
            text = dumps(execute(path))
        except Exception as error:
            failed = True
            print(f"{path}: {ANSI.sub('', str(error)).strip()}", file=sys.stderr)
            continue
        changed = text != path.read_text(encoding="utf-8")
        if changed:
            path.write_text(text, encoding="utf-8")
        print(f"{path}: {'stored' if changed else 'unchanged'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
