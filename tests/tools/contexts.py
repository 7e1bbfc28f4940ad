"""Which test runs which line, and how long does it take?  A pytest plugin for ``mutate.py``.

It runs under coverage, names the context after the test, and writes the seconds of each test that
passed to the file that the environment variable MUTATION_SECONDS names.
"""

import importlib
import json
import os
import pkgutil
import time
from pathlib import Path

import coverage
import pytest

import bpkit

seconds, passed = {}, set()


def pytest_sessionstart():
    """What an import runs belongs to no test: so import all before the first one."""
    import_all()


def import_all():
    for module in pkgutil.walk_packages(bpkit.__path__, "bpkit."):
        importlib.import_module(module.name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    begun = time.perf_counter()
    coverage.Coverage.current().switch_context(item.nodeid)
    result = yield
    coverage.Coverage.current().switch_context("")
    seconds[item.nodeid] = round(time.perf_counter() - begun, 3)
    return result


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        passed.add(report.nodeid)


def pytest_sessionfinish():
    kept = {name: spent for name, spent in seconds.items() if name in passed}
    Path(os.environ["MUTATION_SECONDS"]).write_text(json.dumps(kept), encoding="utf-8")
