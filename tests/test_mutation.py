"""Do the tests still notice small faults?  A fixed dozen of the 300 stored in ``mutants.json``.

Each is made in a copy of the project, and the test that noticed it when all were run must notice
it again. The whole run takes forty minutes: ``python tests/tools/mutate.py`` (see there).
"""

import ast
import json
import os

import pytest

from tools import mutants, mutate, refresh

RECORD = json.loads(mutate.STORE.read_text(encoding="utf-8"))
ENTRIES = RECORD["mutants"]
FIXED = [entry for entry in ENTRIES if entry.get("ci")]


def named(entry):
    return f"{entry['file'].rpartition('/')[2]}:{entry['line']}-{entry['operator']}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    os.environ.update(refresh.ENVIRONMENT)
    return mutate.copy_of_the_project(tmp_path_factory.mktemp("mutation"))


def arguments(by):
    """Of pytest: the test alone, or the notebook up to the cell that fails."""
    file = by.partition("::")[0]
    return ["--nbval", file] if file.endswith(".ipynb") else [by]


@pytest.mark.parametrize("entry", FIXED, ids=named)
def test_killed(entry, copy):
    by, _ = mutate.judge(mutate.mutant_of(entry), copy, [(arguments(entry["by"]), 10)])
    assert by == entry["by"], f"{entry['by']} does not notice {entry['after'].strip()!r} any more"


def test_the_dozen_is_of_all_kinds():
    assert len(FIXED) == 12
    assert {entry["kind"] for entry in FIXED} == set(mutants.SHARES)


def test_an_unharmed_copy_passes(copy):
    """Else every mutant would count as killed."""
    tests = [entry["by"] for entry in FIXED if not entry["by"].startswith("chapters/")]
    assert mutate.run(copy, tests, 300) is None


def test_at_least_95_percent_are_killed_and_no_survivor_is_without_a_reason():
    assert len(ENTRIES) == RECORD["count"] >= 300
    assert RECORD["table"] == mutate.table(ENTRIES)
    assert RECORD["table"]["all"]["killed"] >= 0.95 * len(ENTRIES)
    for entry in ENTRIES:
        assert (entry["result"] == "killed") != ("reason" in entry), named(entry)


def test_the_readme_tells_how_many():
    killed, made = RECORD["table"]["all"]["killed"], len(ENTRIES)
    said = (mutate.ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    assert f"makes {made} small faults" in said
    assert f"notice {killed} of them; for each of the other {made - killed}, `tests/mut" in said


def test_the_stored_mutants_are_of_this_code():
    """A few may be outdated by later changes; when many are, their figures say nothing."""
    outdated = [named(entry) for entry in ENTRIES if not applies(mutate.mutant_of(entry))]
    assert len(outdated) <= 0.1 * len(ENTRIES), (
        f"{len(outdated)} of {len(ENTRIES)} mutants are of lines that have changed; make them "
        f"anew: {RECORD['command']}. They are: {', '.join(outdated)}"
    )


def applies(mutant):
    text = (mutate.ROOT / mutant.file).read_text(encoding="utf-8")
    if mutant.cell is not None:
        cells = [cell for cell in json.loads(text)["cells"] if cell.get("id") == mutant.cell]
        text = "".join(cells[0]["source"]) if cells else ""
    try:
        mutant.changed(text)
    except ValueError:
        return False
    return True


PROGRAM = '''
def step(p, g, rate=0.1, axis=0):
    """Not a docstring's 1 + 1."""
    if p is None or not g.any():
        raise ValueError(f"p is {p + 1}, expected 2 + 2")
    p -= rate * g.sum(axis=0).T @ p[1:]
    p.touched = True
    return clip(p, -g) if rate < 0.5 else p
'''

FAULTS = [
    ("and/or", "    if p is None and not g.any():"),
    ("arithmetic", "    p -= rate / g.sum(axis=0).T @ p[1:]"),
    ("assignment", "    p += rate * g.sum(axis=0).T @ p[1:]"),
    ("assignment", "    p = rate * g.sum(axis=0).T @ p[1:]"),
    ("boolean", "    p.touched = False"),
    ("comparison", "    if p is not None or not g.any():"),
    ("comparison", "    return clip(p, -g) if rate <= 0.5 else p"),
    ("comparison", "    return clip(p, -g) if rate >= 0.5 else p"),
    ("condition", "    if p is None or g.any():"),
    ("constant", "    return clip(p, -g) if rate < 5.0 else p"),
    ("constant", "def step(p, g, rate=0.1, axis=1):"),
    ("constant", "def step(p, g, rate=1.0, axis=0):"),
    ("dropped statement", "        pass"),
    ("dropped statement", "    pass"),
    ("dropped statement", "    pass"),
    ("index", "    p -= rate * g.sum(axis=0).T @ p[2:]"),
    ("index", "    p -= rate * g.sum(axis=1).T @ p[1:]"),
    ("sign", "    return clip(p, g) if rate < 0.5 else p"),
    ("swapped arguments", "    p -= p[1:] @ rate * g.sum(axis=0).T"),
    ("swapped arguments", "    return clip(-g, p) if rate < 0.5 else p"),
    ("transpose", "    p -= rate * g.sum(axis=0) @ p[1:]"),
]


def test_which_faults_are_made_in_a_program():
    found = mutants.python(PROGRAM, "bpkit", "step.py")
    assert sorted((mutant.operator, mutant.after) for mutant in found) == FAULTS
    for mutant in found:
        changed = mutant.changed(PROGRAM)
        ast.parse(changed)
        assert "1 + 1" in changed
        assert mutant.changed("import torch\n" + PROGRAM) == "import torch\n" + changed
    with pytest.raises(ValueError, match=r"step\.py has changed"):
        found[0].changed("pass")


def test_the_sample_depends_on_the_seed_alone():
    places = mutants.python(PROGRAM, "bpkit", "step.py")
    drawn = [mutants.draw(places, 4, mutants.random.Random(seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({mutant.line for mutant in drawn[0]}) == 4
    assert mutants.quotas({"a": [0] * 90, "b": [0] * 9, "c": [0]}, 20) == {"a": 16, "b": 3, "c": 1}
