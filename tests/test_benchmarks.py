"""Measured times: each record is complete. Not that it is fast: that depends on the machine."""

import json
from datetime import date
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks"
RECORDS = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_record_is_complete(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {"processor", "cores", "python", "torch", "numpy"} <= record.keys()
    assert all(record.values())
    assert date.fromisoformat(record["date"]).year >= 2026
    assert record["results"]
    assert all(value > 0 for value in record["results"].values())


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_record_belongs_to_a_program_that_the_readme_lists(path):
    assert path.with_suffix(".py").exists()
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_there_are_records():
    assert {path.stem for path in RECORDS} >= {"autodiff", "graph"}
