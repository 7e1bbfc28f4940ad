"""Can every notebook be downloaded, and does it run where nothing but ``bpkit`` is installed?"""

import ast
import os
import re
import subprocess
import sys
import zipfile

import nbformat
import pytest
from nbclient import NotebookClient

import site_checks as checks
from site_checks import ROOT
from test_site import DOCUMENTS

NOTEBOOKS = [name for name in DOCUMENTS if (ROOT / f"{name}.ipynb").exists()]
BUTTON = ".dropdown-download-buttons > button"
LINK = "a.btn-download-source-button"
INSTALLED = {"bpkit", "torch", "numpy", "matplotlib"} | sys.stdlib_module_names
# Paths out of the notebook's own folder, or into those of the repository.
ELSEWHERE = re.compile(r"(^|/)\.\.(/|$)|^/|^~|^(tests|chapters|bpkit)/")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_page_offers_its_notebook(book, name):
    """The file behind the button is the committed one, byte by byte."""
    page = book / f"{name}.html"
    text = page.read_text(encoding="utf-8")
    links = re.findall(r'<a href="([^"]+)"[^>]*btn-download-source-button', text, re.S)
    assert len(links) == 1, f"{name}: {len(links)} buttons to download it"
    assert (page.parent / links[0]).read_bytes() == (ROOT / f"{name}.ipynb").read_bytes()


@pytest.mark.parametrize("width", [1280, 375])
def test_button_works_with_keys_from_a_folder(browser, book, width):
    name = NOTEBOOKS[0]
    with checks.opened(browser, f"{book.as_uri()}/", f"{name}.html", width=width) as (page, _):
        page.locator(BUTTON).first.focus()
        page.keyboard.press("Enter")
        page.locator(LINK).first.wait_for(state="visible")
        page.keyboard.press("ArrowDown")
        assert page.evaluate(f"document.activeElement.matches('{LINK}')"), "arrow down leads to it"
        address = page.evaluate("document.activeElement.href")
    assert address == (book / "_sources" / f"{name}.ipynb").as_uri()


def foreign(notebook):
    """Imports and paths in a notebook that exist in the repository only."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "."]
            elif isinstance(node, ast.Call):
                names = []
                texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
                call = ast.unparse(node.func).rsplit(".")[-1]
                if call in ("open", "Path", "load", "loadtxt", "read_csv", "imread", "chdir"):
                    found += [
                        f"cell {cell.id}: {call}({text!r}) is a file of the repository"
                        for text in texts
                        if isinstance(text, str) and ELSEWHERE.search(text)
                    ]
            else:
                continue
            found += [
                f"cell {cell.id}: imports {name}"
                for name in names
                if name.split(".")[0] not in INSTALLED
            ]
    return found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_needs_only_what_bpkit_installs(name):
    assert foreign(nbformat.read(ROOT / f"{name}.ipynb", as_version=4)) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pandas as pd", "imports pandas"),
        ("from tests.cases import judge", "imports tests.cases"),
        ("from .helper import f", "imports helper"),
        ("text = Path('../tests/cases/results.json').read_text()", "is a file of the repository"),
        ("with open('/data/x') as file:\n    pass", "is a file of the repository"),
        ("import json, torch.nn\nPath(folder, 'script.py')", None),
    ],
)
def test_foreign_things_are_found(source, expected):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    found = foreign(notebook)
    assert bool(found) == bool(expected), found
    assert expected is None or expected in found[0]


@pytest.fixture(scope="module")
def wheel(book):
    """The package that the pages carry."""
    (found,) = (book / "_static").glob("bpkit-*.whl")
    return found


def test_wheel_holds_the_package(wheel):
    """All of it, as it is in the repository, and small."""
    package = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "bpkit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {n: archive.read(n) for n in archive.namelist() if ".dist-info/" not in n}
    assert packed == package
    assert wheel.stat().st_size < 300_000


def test_downloaded_notebook_runs(book, wheel, tmp_path, monkeypatch):
    """In an empty folder, with the package out of the wheel and nothing of the repository."""
    target, folder = tmp_path / "site", tmp_path / "empty"
    folder.mkdir()
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    monkeypatch.setenv("PYTHONPATH", str(target))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(book / "_sources" / f"{NOTEBOOKS[0]}.ipynb", as_version=4)
    first = "import bpkit\nprint(bpkit.__file__)"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    assert notebook.cells[0].outputs[0].text.startswith(str(target) + os.sep)
    assert list(folder.iterdir()) == []
