"""Does every public name of bpkit say what it does, and does every example print what it says?"""

import doctest
import importlib
import inspect
import pkgutil
import re
import tomllib
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch

import bpkit

MODULES = {
    module.name: importlib.import_module(module.name)
    for module in pkgutil.walk_packages(bpkit.__path__, "bpkit.")
}
# Functions and classes that a reader calls and that show no example of their own.
NO_EXAMPLE = {
    "bpkit.exercises.Exercise": "the module's docstring shows one",
    "bpkit.graph.Graph": "made by trace",
    "bpkit.record.Recording": "made by record",
    "bpkit.diagnosis.report.Report": "made by checkup and watch",
    "bpkit.optim.Optimizer": "its subclasses show theirs",
    "bpkit.style.use": "changes matplotlib's defaults and shows nothing",
}
# Members that need no docstring.
SILENT = {
    "update": "the docstring of the optimizer's class is its formula",
    "shape": "as in NumPy",
    "ndim": "as in NumPy",
    "parents": "said by the docstring of the class",
    "is_leaf": "as in PyTorch",
}


def public():
    """Every function and class in an ``__all__`` of bpkit, once, by the name of its origin."""
    found = {}
    for module in (bpkit, *MODULES.values()):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isroutine(value) or inspect.isclass(value):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def members(cls):
    """Public methods and properties that a class defines itself."""
    own = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    fields = getattr(cls, "__dataclass_fields__", getattr(cls, "_fields", ()))
    kinds = (property, classmethod, staticmethod)
    return {
        name: value
        for name, value in own.items()
        if name not in fields and (inspect.isroutine(value) or isinstance(value, kinds))
    }


PUBLIC = public()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_examples(name):
    module = MODULES[name]
    namespace = {**vars(bpkit), **vars(module), "torch": torch}
    assert doctest.testmod(module, extraglobs=namespace).failed == 0


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_docstring(name):
    value = PUBLIC[name]
    assert inspect.getdoc(value), f"{name} has no docstring"
    if inspect.isclass(value):
        silent = {key for key, member in members(value).items() if not inspect.getdoc(member)}
        silent -= SILENT.keys()
        assert not silent, f"{name}: no docstring for {', '.join(silent)}"
    result = inspect.isclass(value) and (is_dataclass(value) or hasattr(value, "_fields"))
    if not result and name not in NO_EXAMPLE:
        assert ">>>" in inspect.getdoc(value), f"{name}: no example, nor a reason in NO_EXAMPLE"


def test_reasons_are_needed():
    unneeded = [name for name in NO_EXAMPLE if ">>>" in (inspect.getdoc(PUBLIC[name]) or "")]
    assert not unneeded


def test_modules_say_which_question_they_answer():
    for name, module in MODULES.items():
        first = inspect.getdoc(module).partition("\n")[0]
        assert "?" in first or name.startswith("bpkit.diagnosis."), f"{name}: {first!r}"


def documented():
    """What the reference page shows: names as readers import them, and the objects behind them."""
    page = (Path(__file__).parents[1] / "chapters" / "reference.md").read_text(encoding="utf-8")
    return {
        name: pkgutil.resolve_name(":".join(name.rsplit(".", 1)))
        for name in re.findall(r"^\.\. auto(?:function|class):: ([\w.]+)$", page, re.MULTILINE)
    }


def test_reference_page_shows_every_public_name():
    shown = documented()
    values = list(shown.values())
    assert [name for name, value in PUBLIC.items() if value not in values] == []
    assert [name for name in bpkit.__all__ if f"bpkit.{name}" not in shown] == []
    assert [name for name, value in shown.items() if value not in PUBLIC.values()] == []
    assert [name for name, value in shown.items() if values.count(value) > 1] == []


def test_an_installation_has_all_of_it():
    """Also one that is not editable: setuptools takes the folders that are packages."""
    root = Path(bpkit.__file__).parents[1]
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    settings = declared["tool"]["setuptools"]
    assert settings["packages"] == {"find": {"include": ["bpkit*"]}}
    for path in (root / "bpkit").rglob("*"):
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").is_file(), path
        elif path.is_file() and path.suffix != ".pyc":
            package = path.parent.relative_to(root).as_posix().replace("/", ".")
            assert path.name in settings["package-data"][package], path
