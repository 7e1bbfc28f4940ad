"""What does a page cost?  Writes tests/costs.json, which the page ``cost`` of the book shows.

    python tests/tools/costs.py            # weigh the pages of _build/html
    python tests/tools/costs.py --times    # and run every notebook: seconds of processor time

Weights are bytes as stored in the built book, without the compression that a server may add. Times
are measured once, on the machine that the record names; a notebook whose number of code cells has
changed is measured again in any case.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from benchmarks.measured import processor  # noqa: E402
from tools import refresh  # noqa: E402

RECORD = ROOT / "tests" / "costs.json"
KINDS = {".webp": "pictures", ".png": "pictures", ".svg": "pictures", ".jpg": "pictures"}


def documents():
    """The pages of the book in the order of ``_toc.yml``, such as ``chapters/01_graphs``."""
    return re.findall(r"(?:root|file): (\S+)", (ROOT / "_toc.yml").read_text(encoding="utf-8"))


def loaded(page):
    """The files of the book that an HTML page loads, and what its style sheets load in turn."""
    html = page.read_text(encoding="utf-8")
    tags = re.findall(r"<(?:script|img|link)\b[^>]*>", html)
    urls = [
        url[1]
        for tag in tags
        if not re.search(r'rel="(?:index|search|next|prev|canonical)"', tag)
        and (url := re.search(r'(?:src|href)="([^"#?]+)', tag))
    ]
    found = {(page.parent / url).resolve() for url in urls if not re.match(r"\w+:", url)}
    for sheet in [path for path in found if path.suffix == ".css"]:
        found |= _with_sheet(sheet)
    return found


@functools.cache
def _with_sheet(sheet):
    """The fonts and further style sheets that a style sheet names."""
    css = sheet.read_text(encoding="utf-8")
    urls = re.findall(r'url\("?([^")?#]+\.woff2)|@import (?:url\()?"([^")]+\.css)', css)
    paths = {(sheet.parent / "".join(url)).resolve() for url in urls}
    return frozenset(path for path in paths if path.exists())


def weigh(folder):
    """Bytes of each page by file, and of what all pages load: ``pages, shared``."""
    folder = Path(folder).resolve()
    files = {name: loaded(folder / f"{name}.html") for name in documents()}
    everywhere = set.intersection(*files.values())

    def sizes(paths):
        return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(paths)}

    pages = {
        name: sizes([folder / f"{name}.html", *(paths - everywhere)])
        for name, paths in files.items()
    }
    return pages, sizes(everywhere)


def by_kind(files):
    """Bytes of a page as HTML, pictures, and scripts with styles."""
    sums = {"html": 0, "pictures": 0, "scripts": 0}
    for name, size in files.items():
        suffix = Path(name).suffix
        sums["html" if suffix == ".html" else KINDS.get(suffix, "scripts")] += size
    return sums


def code_cells(name):
    """How many code cells a page has; 0 if it is no notebook."""
    path = ROOT / f"{name}.ipynb"
    if not path.exists():
        return 0
    return sum(cell.cell_type == "code" for cell in refresh.read(path).cells)


def seconds(path):
    """Processor time of a notebook's kernel, the start and the imports included."""
    before = os.times()
    refresh.execute(path)
    after = os.times()
    spent = after.children_user + after.children_system
    return round(spent - before.children_user - before.children_system, 1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", action="store_true", help="run all notebooks")
    parser.add_argument("--html", type=Path, default=ROOT / "_build" / "html", help="built book")
    options = parser.parse_args(arguments)
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"pages": {}}
    weights, shared = weigh(options.html)
    pages = {}
    for name, files in weights.items():
        old = record["pages"].get(name, {})
        pages[name] = {**by_kind(files), "cells": code_cells(name)}
        if cells := pages[name]["cells"]:
            again = options.times or old.get("cells") != cells
            pages[name]["seconds"] = seconds(ROOT / f"{name}.ipynb") if again else old["seconds"]
            print(name, pages[name], flush=True)
            if again:
                record |= {
                    "date": datetime.date.today().isoformat(),
                    "processor": processor(),
                    "cores": os.cpu_count(),
                    "python": platform.python_version(),
                    "torch": version("torch").split("+")[0],
                }
    record |= {"shared": sum(shared.values()), "pages": pages}
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
