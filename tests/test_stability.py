"""Is the table of other orders, threads and versions whole, and of the configurations there are?

The runs themselves take four minutes each: ``python tests/tools/stability.py`` (see there).
"""

import json
from datetime import date
from types import SimpleNamespace

import pytest

from tools import stability

RECORD = json.loads(stability.STORE.read_text(encoding="utf-8"))


def test_every_configuration_was_run():
    assert list(RECORD) == list(stability.CONFIGURATIONS), (
        "tests/stability.json and CONFIGURATIONS differ: run what is missing, delete what is gone"
    )


@pytest.mark.parametrize("name", RECORD)
def test_it_is_a_run_of_this_configuration_and_nothing_failed(name):
    run, configuration = RECORD[name], stability.CONFIGURATIONS[name]
    assert (run["text"], run["command"]) == (configuration.text, configuration.command())
    assert run["failed"] == 0
    assert run["passed"] > (500 if configuration.tests is stability.BPKIT else 2500)
    assert date.fromisoformat(run["date"]).year >= 2026
    assert run["seconds"] > 0
    for package, version in configuration.needs.items():
        assert f"{run[package]}.".startswith(f"{version}.")


def items_named(*names):
    return [
        SimpleNamespace(path=stability.ROOT / name.partition("::")[0], nodeid=name)
        for name in names
    ]


def test_files_and_tests_are_shuffled_and_cells_are_not(monkeypatch):
    names = [f"{file}::{k}" for file in ("a.py", "b.ipynb", "c.py", "d.ipynb") for k in range(20)]
    orders = []
    for seed in (1, 1, 2):
        monkeypatch.setenv("STABILITY_SEED", str(seed))
        items = items_named(*names)
        stability.pytest_collection_modifyitems(items)
        orders.append([item.nodeid for item in items])
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(order) == sorted(names) != order
        for file in ("a.py", "b.ipynb", "c.py", "d.ipynb"):
            places = [k for k, name in enumerate(order) if name.startswith(file)]
            assert places == list(range(places[0], places[0] + 20)), "a file is torn apart"
            in_order = [order[k] for k in places] == [f"{file}::{k}" for k in range(20)]
            assert in_order == file.endswith(".ipynb")


def test_outcomes_are_counted(tmp_path):
    (tmp_path / "report.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="a" name="good"/>
        <testcase classname="a" name="bad"><failure/></testcase>
        <testcase classname="a" name="broken"><error/></testcase>
        <testcase classname="a" name="skipped"><skipped/></testcase>
        </testsuite></testsuites>"""
    )
    numbers, failures = stability.counts(tmp_path / "report.xml")
    assert numbers == {"passed": 1, "failed": 2, "skipped": 1}
    assert failures == ["a::bad", "a::broken"]


def test_a_missing_version_is_named():
    absent = stability.Configuration("", needs={"python": "2.7"})
    assert stability.cannot_run(absent).startswith("needs python 2.7, here is 3.")
    assert stability.cannot_run(stability.Configuration("", needs={"python": "3"})) == ""
