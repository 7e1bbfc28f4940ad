"""Can the checks fail?  Each breaks one thing in a copy of the sample notebook, and must be seen.

The sample is a chapter in small: prose with numbers, a checked equation, a figure, a claim, and
an exercise. The untouched copy passes everything.
"""

import base64
import copy
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools import refresh

from . import checks
from .sample import formulas as sample_formulas

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path(__file__).parent / "sample" / "sample.ipynb"
LEDGER = [
    {"id": "S01", "claim": "-", "verdict": "wrong", "chapters": [1],
     "number": ["0.646", "SigmoidBackward0"]},
    {"id": "S02", "claim": "-", "verdict": "holds", "chapters": [1], "number": []},
]  # fmt: skip


def sample():
    return refresh.read(SAMPLE)


def cell(nb, name):
    return next(cell for cell in nb.cells if cell.id == name)


def replace(name, old, new):
    """A mutation that changes the text of one cell."""

    def mutate(nb):
        target = cell(nb, name)
        assert old in target.source, f"{old!r} is not in the cell {name}"
        target.source = target.source.replace(old, new)

    return mutate


def outputs_of(nb, name):
    return cell(nb, name).outputs


def all_problems(nb, registered=sample_formulas.CHECKS, definitions=None):
    """Problems by the check that found them."""
    found = {check.__name__: check(nb) for check in checks.CHECKS}
    found["claims"] = checks.claims(nb, LEDGER) + checks.missing_claims([nb], LEDGER, 1)
    found["exercises"] = checks.exercises(nb, 1)
    found["formulas"] = checks.formulas(nb, registered, definitions or {})
    return {name: problems for name, problems in found.items() if problems}


def test_untouched_copy_passes():
    assert all_problems(sample()) == {}


def set_metadata(name, key, value):
    def mutate(nb):
        cell(nb, name).metadata[key] = value

    return mutate


def set_numbers(value):
    def mutate(nb):
        nb.metadata["numbers"] = value

    return mutate


def alt(text):
    def mutate(nb):
        cell(nb, "curve").metadata.mystnb.image = {"alt": text} if text is not None else {}

    return mutate


def lengthen(nb):
    target = cell(nb, "neuron")
    target.source += "\n" * (19 - len(target.source.split("\n"))) + "x"


def fold(nb):
    cell(nb, "neuron").metadata.setdefault("tags", []).append("hide-input")


def store_stderr(nb):
    outputs_of(nb, "neuron").append(
        refresh.nbformat.v4.new_output("stream", name="stderr", text="UserWarning: careful")
    )


def store_error(nb):
    outputs_of(nb, "neuron").append(
        refresh.nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
    )


def renumber(nb):
    cell(nb, "curve").execution_count = 7


def print_output(text):
    def mutate(nb):
        outputs_of(nb, "neuron")[0].text = text

    return mutate


def drop(name):
    def mutate(nb):
        nb.cells.remove(cell(nb, name))

    return mutate


def swap(first, second):
    def mutate(nb):
        i, j = (nb.cells.index(cell(nb, name)) for name in (first, second))
        nb.cells[i], nb.cells[j] = nb.cells[j], nb.cells[i]

    return mutate


def accept_everything(nb):
    target = cell(nb, "judge")
    target.source = target.source.replace("if answer > 0", "return\n    if answer > 0")


def say_right(name):
    def mutate(nb):
        outputs_of(nb, name)[0]["data"]["text/plain"] = "Exercise 1.1: right."

    return mutate


def set_figure(key, value):
    def mutate(nb):
        cell(nb, "curve").metadata.mystnb.figure[key] = value

    return mutate


def widen(nb):
    (output,) = (o for o in outputs_of(nb, "curve") if "image/png" in o.get("data", {}))
    png = bytearray(base64.b64decode(output.data["image/png"]))
    png[16:20] = (721).to_bytes(4, "big")
    output.data["image/png"] = base64.b64encode(png).decode()


def unmark(nb):
    del cell(nb, "route").metadata["route"]


def after_a_section(nb):
    route = cell(nb, "route")
    nb.cells.remove(route)
    nb.cells.append(route)
    cell(nb, "reading").source = "## A section\n\n" + cell(nb, "reading").source


DOCUMENT = {
    "a number in prose": ("numbers_in_prose", replace("reading", "0.6457", "0.6475")),
    "its sign": ("numbers_in_prose", replace("reading", "−0.0405", "0.0405")),
    "a number in a formula": ("numbers_in_prose", replace("title", "(y - 1)", "(y - 1.5)")),
    "a number in the alt text": ("numbers_in_prose", alt("The loss falls from 0.93 to nothing.")),
    "an output number": ("numbers_in_prose", print_output("y = 0.6475, dL/dw = -0.04053")),
    "a number without its source": ("numbers_in_prose", set_numbers({})),
    "an unused source": (
        "numbers_in_prose",
        set_numbers({"2.13.0": "requirements.txt", "2.12": "old"}),
    ),
    "an empty source": ("numbers_in_prose", set_numbers({"2.13.0": " "})),
    "a sign in a formula": ("formulas", replace("title", "(y - 1) \\cdot", "-(y - 1) \\cdot")),
    "a factor in a formula": ("formulas", replace("title", "\\cdot x", "\\cdot 2 x")),
    "a missing factor": ("formulas", replace("title", "y(1 - y)", "y")),
    "an unknown symbol": ("formulas", replace("title", "\\cdot x", "\\cdot q")),
    "a misspelt label": ("formulas", replace("title", "(eq:sample)", "(eq:sampel)")),
    "no label": ("formulas", replace("title", " (eq:sample)", "")),
    "no blank line before the formula": ("formulas", replace("title", "\n\n$$", "\n$$")),
    "no alt text": ("alt_texts", alt(None)),
    "a file name as alt text": ("alt_texts", alt("_build/jupyter_execute/figure_of_the_loss.png")),
    "an alt text that says picture": ("alt_texts", alt("A plot of the loss against the weight.")),
    "a short alt text": ("alt_texts", alt("The loss curves.")),
    "a picture in Markdown without alt": (
        "alt_texts",
        replace("reading", "The output", "![](loss.png) The output"),
    ),
    "a figure without a name": ("figures", set_figure("name", "")),
    "a figure with another name": ("figures", set_figure("name", "fig:smaple")),
    "a figure without a caption": ("figures", set_figure("caption", " ")),
    "a figure that no text refers to": (
        "figures",
        replace("reading", "{numref}`fig:sample`", "the figure"),
    ),
    "a figure too wide for a phone": ("figures", widen),
    "no route": ("route", drop("route")),
    "a cell that is not marked as the route": ("route", unmark),
    "a wrong time to read": ("route", replace("route", "About 5", "About 10")),
    "a wrong time for the exercises": ("route", replace("route", "5 for", "15 for")),
    "no time for the exercises": ("route", replace("route", ", 5 for the exercises", "")),
    "nothing that is needed": ("route", replace("route", "**Needs.** The", "The")),
    "nobody who may skip it": ("route", replace("route", "**Skip it if** you can", "You can")),
    "a route after a section": ("route", after_a_section),
    "an exercise without a rating": ("route", replace("exercise", " · easy, 5 min", "")),
    "a rating with other minutes": ("route", replace("exercise", "easy, 5 min", "easy, 10 min")),
    "another rating": ("route", replace("exercise", "easy, 5 min", "hard, 20 min")),
    "a claim misspelt": ("claims", set_metadata("neuron", "claims", ["S1", "S02"])),
    "a claim not taught": ("claims", set_metadata("neuron", "claims", ["S01"])),
    "a claim's number not shown": ("claims", print_output("y = 0.6557, SigmoidBackward0")),
    "a claim's name not shown": ("claims", print_output("y = 0.6457, MulBackward0")),
    "a long cell": ("long_cells", lengthen),
    "a folded cell without a name": ("folded_cells", fold),
    "stray stderr": ("stray_errors", store_stderr),
    "a stray error": ("stray_errors", store_error),
    "random numbers without a seed": (
        "seeds",
        replace("curve", "torch.manual_seed(0)", "print(0)"),
    ),
    "a generator without a seed": (
        "seeds",
        replace("curve", "torch.manual_seed(0)", "torch.manual_seed(0); np.random.default_rng()"),
    ),
    "executed out of order": ("executed_in_order", renumber),
    "a cell deleted": ("executed_in_order", drop("curve")),
    "an output ignored": ("ignored_outputs", set_metadata("neuron", "tags", ["nbval-skip"])),
    "an output ignored by comment": (
        "ignored_outputs",
        replace("neuron", "x, w =", "# NBVAL_IGNORE_OUTPUT\nx, w ="),
    ),
    "a path in an output": ("machine_traces", print_output("/home/me/book/x.py 0.6457")),
    "an address in an output": ("machine_traces", print_output("<object at 0x7f01a2b3c4d5>")),
    "too many digits": ("machine_traces", print_output("y = 0.64565630622579")),
    "metadata of a front end": ("metadata", set_metadata("neuron", "collapsed", True)),
    "no title": ("first_cell", replace("title", "# A sample", "A sample")),
    "no hint": ("exercises", replace("exercise", "{dropdown} Hint", "{dropdown} More")),
    "no label of the exercise": ("exercises", replace("exercise", ":label: ex:sample-slope\n", "")),
    "no placeholder": ("exercises", replace("answer", "...", "0.5")),
    "the answer shown as given": ("exercises", say_right("answer")),
    "no solution": ("exercises", drop("solution")),
    "a solution not hidden": ("exercises", set_metadata("solution", "tags", ["solution"])),
    "no check": ("exercises", drop("check")),
    "one wrong answer only": ("exercises", replace("check", ", (out - 1) * x)", ")")),
    "check before solution": ("exercises", swap("check", "solution")),
    "another exercise's check": ("exercises", replace("check", "check_1", "check_2")),
    "an exercise with another number": ("exercises", replace("judge", '"1.1"', '"1.2"')),
}  # fmt: skip


@pytest.mark.parametrize("what", DOCUMENT)
def test_broken_document_is_caught(what):
    expected, mutate = DOCUMENT[what]
    nb = sample()
    mutate(nb)
    found = all_problems(nb)
    assert expected in found, f"{what}: found only {found}"


def test_formula_without_check_or_reason_is_caught():
    assert "formulas" in all_problems(sample(), registered={})
    assert "formulas" in all_problems(sample(), registered={}, definitions={"eq:sample": ""})
    assert all_problems(sample(), {}, {"eq:sample": "states what the symbols mean"}) == {}


def test_check_without_formula_is_caught():
    registered = {**sample_formulas.CHECKS, "eq:gone": lambda: {}}
    assert "formulas" in all_problems(sample(), registered)


def test_right_reason_passes():
    nb = sample()
    cell(nb, "neuron").metadata.update(
        tags=["nbval-ignore-output"], nbval_reason={"reason": "prints a path"}
    )
    assert all_problems(nb) == {}


# Each is a copy of a cell whose source or output changed while the other stayed: nbval runs them
# one after the other in one kernel. What is said of it, and which cell, changed how.
NOISE = " / 2 * (1 + 1e-6 * torch.sin(9e3 * ws)), style"
DIFFERS = "figure 0 differs"
EXECUTED = {
    "untouched output": (None, "neuron", lambda nb: None),
    "untouched figure": (None, "curve", lambda nb: None),
    "noise on the data": (None, "curve", replace("curve", " / 2, style", NOISE)),
    "a curve off by 2 %": (DIFFERS, "curve", replace("curve", " / 2, style", " / 2 * 1.02, style")),
    "a swapped label": (DIFFERS, "curve", replace("curve", '"weight w"', '"loss L"')),
    "a misspelt label": (DIFFERS, "curve", replace("curve", '"weight w"', '"weigth w"')),
    "one letter": (DIFFERS, "curve", replace("curve", '"loss L"', '"lass L"')),
    "no legend": (DIFFERS, "curve", replace("curve", "plt.legend()", "None")),
    "no figure": ("differ", "curve", replace("curve", "plt.show()", "plt.close()")),
    "a wider limit without a reason": (
        "gives no reason",
        "curve",
        set_metadata("curve", "figure_tolerance", {"rms": 99, "block": 99}),
    ),
    "an output number": ("differ", "neuron", print_output("y = 0.6475, dL/dw = -0.04053\n")),
    "a judge that accepts everything": (None, "judge", accept_everything),
    "its solution": (None, "solution", lambda nb: None),
    "its check": ("is accepted", "check", lambda nb: None),
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """What nbval and the figure comparison say of each copy: what was done -> failure or ""."""
    folder = tmp_path_factory.mktemp("sabotage")
    broken = sample()
    broken.cells = []
    for count, (_, name, mutate) in enumerate(EXECUTED.values()):
        nb = sample()
        mutate(nb)
        broken.cells.append(cell(nb, name))
        broken.cells[-1].id = f"cell-{count}"
    (folder / "untouched.ipynb").write_bytes(SAMPLE.read_bytes())
    (folder / "broken.ipynb").write_text(refresh.dumps(broken), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    # The conftest of the chapters is a plugin here; bpkit and its packages are those of this run.
    paths = [str(ROOT / "chapters"), str(ROOT), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "conftest",
         f"--nbval-sanitize-with={ROOT / 'tests' / 'nbval_sanitize.cfg'}", "--color=no",
         "-p", "no:cacheprovider", "--junitxml=report.xml", f"--rootdir={folder}", "."],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (folder / "report.xml").exists(), run.stdout + run.stderr
    said = {}
    for case in ET.parse(folder / "report.xml").iter("testcase"):
        bad = [*case.findall("failure"), *case.findall("error")]
        said[case.get("classname").split(".")[0], case.get("name")] = "".join(
            (b.get("message") or "") + (b.text or "") for b in bad
        )
    untouched = [text for (file, _), text in said.items() if file == "untouched"]
    assert untouched == [""] * len(checks.code_cells(sample())), run.stdout
    return folder, {what: said["broken", f"Cell {k}"] for k, what in enumerate(EXECUTED)}


@pytest.mark.parametrize("what", EXECUTED)
def test_broken_run_is_caught(executed, what):
    _, said = executed
    expected = EXECUTED[what][0]
    if expected is None:
        assert said[what] == ""
    else:
        assert expected in said[what]


def test_stored_and_fresh_picture_are_kept(executed):
    folder, said = executed
    kept = {path.name for path in (folder / "_build" / "figdiff").glob("*.png")}
    assert kept == {
        f"broken-{k}-0.png" for k, (text, _, _) in enumerate(EXECUTED.values()) if text == DIFFERS
    }
    assert "_build/figdiff/broken-3-0.png" in said["a curve off by 2 %"]


def test_refresh_twice_gives_the_same_bytes(tmp_path):
    nb = sample()
    for target in nb.cells:  # what a front end may leave behind
        target.metadata["trusted"] = True
        if target.cell_type == "code":
            target.outputs, target.execution_count = [], 99
    nb.metadata["language_info"]["version"] = "3.99"
    path = tmp_path / "sample.ipynb"
    path.write_text(refresh.dumps(nb), encoding="utf-8")
    assert refresh.main(["--check", str(path)]) == 1
    assert refresh.main([str(path)]) == 0
    assert path.read_bytes() == SAMPLE.read_bytes()
    assert refresh.main(["--check", str(path)]) == 0


def test_normalising_repairs_ids_and_shortens_tracebacks():
    nb = sample()
    nb.cells[1]["id"] = nb.cells[0]["id"]
    nb.cells[3]["id"] = "not valid!"
    cell(nb, "judge").outputs = [
        refresh.nbformat.v4.new_output(
            "error",
            ename="RuntimeError",
            evalue="no graph",
            traceback=[
                "\x1b[31m-----\x1b[39m",
                "RuntimeError   Traceback (most recent call last)",
                "\x1b[36mCell\x1b[39m\x1b[36m In[3]\x1b[39m, line 1\n----> 1 y.backward()",
                "File /usr/lib/python3/site-packages/torch/_tensor.py:630, in backward",
                "RuntimeError: no graph",
            ],
        )
    ]
    once = refresh.normalise(copy.deepcopy(nb))
    ids = [target.id for target in once.cells]
    assert len(set(ids)) == len(ids)
    assert ids[0] == "title"
    assert cell(once, "judge").outputs[0].traceback == [
        "Cell In[3], line 1\n----> 1 y.backward()",
        "RuntimeError: no graph",
    ]
    assert refresh.normalise(copy.deepcopy(once)) == once


def test_normalising_drops_what_a_front_end_adds_to_a_picture():
    nb = sample()
    (output,) = (o for o in outputs_of(nb, "curve") if "image/png" in o.get("data", {}))
    stored = output.data["image/png"]
    output.metadata = {"needs_background": "light", "scrapbook": {"name": "curve"}}
    raw = base64.b64decode(stored)
    text = b"Software\0Matplotlib version 0.0"
    chunk = len(text).to_bytes(4, "big") + b"tEXt" + text + b"\0\0\0\0"
    output.data["image/png"] = base64.b64encode(raw[:33] + chunk + raw[33:]).decode() + "\n"
    (again,) = (
        o for o in outputs_of(refresh.normalise(nb), "curve") if "image/png" in o.get("data", {})
    )
    assert again.data["image/png"] == stored
    assert again.metadata == {"scrapbook": {"name": "curve"}}


PAGE = """# A page

The random gradient trains to 0.889 all the same.

<!-- number: 0.889 source: 04_numerical_gradient -->
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("to 0.889", "to 0.898"),
        ("trains to 0.889", "trains"),
        ("source: 04_numerical_gradient", ""),
        ("to 0.889", "to 0.889 in 1,797 images"),
    ],
)
def test_broken_page_is_caught(old, new):
    assert checks.numbers_on_page(PAGE) == []
    assert checks.numbers_on_page(PAGE.replace(old, new))


def a_card():
    """A failure card of the book, which passes."""
    nb = refresh.read(ROOT / "chapters" / "08a_data.ipynb")
    slug, cells = next(iter(checks.cards(nb).items()))
    assert checks.card(slug, cells) == []
    return slug, copy.deepcopy(cells)


def part(cells, name):
    return next(k for k, c in enumerate(cells) if c.metadata.get("fault", {}).get("part") == name)


def without_guess(cells):
    for each in cells:
        each.source = each.source.replace("**The wrong guess.**", "")


def without_assertions(cells):
    for each in cells:
        each.source = each.source.replace("assert ", "")


def without_decision(cells):
    del cells[part(cells, "decides")]


def cause_first(cells):
    cells.insert(0, cells.pop(part(cells, "cause")))


def of_another_fault(cells):
    cells[part(cells, "cause")].metadata["fault"]["slug"] = "dead-relu"


def without_program(cells):
    for each in cells[: part(cells, "decides")]:
        if each.cell_type == "code":
            each.outputs = []


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (without_guess, "parts ['seen', 'decides'"),
        (without_assertions, "0 assertions"),
        (without_decision, "parts ['seen', 'The wrong guess.', 'cause'"),
        (cause_first, "parts ['cause'"),
        (of_another_fault, "dead-relu"),
        (without_program, "no program with an output"),
    ],
)
def test_a_broken_failure_card_is_noticed(breaks, says):
    slug, cells = a_card()
    breaks(cells)
    assert any(says in why for why in checks.card(slug, cells))
