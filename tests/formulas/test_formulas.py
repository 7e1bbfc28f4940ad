"""Does every displayed equation of every notebook compute what it says?"""

import importlib.util
from pathlib import Path

import pytest

from book import checks
from tools import refresh

HERE = Path(__file__).parent
NOTEBOOKS = sorted((HERE.parents[1] / "chapters").glob("*.ipynb"))


def load(path):
    """Checks and definitions that a file registers; none if there is no file."""
    if not path.exists():
        return {}, {}
    spec = importlib.util.spec_from_file_location(f"formulas_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, "CHECKS", {}), getattr(module, "DEFINITIONS", {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_equations(path):
    problems = checks.formulas(refresh.read(path), *load(HERE / f"{path.stem}.py"))
    assert not problems, "\n" + "\n".join(problems)


def test_no_checks_without_a_notebook():
    files = {p.stem for p in HERE.glob("[0-9]*.py")}
    assert files <= {path.stem for path in NOTEBOOKS}
