"""Every example in a docstring of bpkit runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import bpkit

MODULES = [f"bpkit.{module.name}" for module in pkgutil.iter_modules(bpkit.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    namespace = {**vars(bpkit), **vars(module)}
    result = doctest.testmod(
        module, extraglobs={**namespace, "torch": importlib.import_module("torch")}
    )
    assert result.failed == 0


def test_there_are_examples_to_run():
    attempted = sum(
        doctest.testmod(importlib.import_module(name), report=False).attempted
        for name in ("bpkit.graph", "bpkit.record")
    )
    assert attempted >= 5
