"""What can be wrong with a notebook as a document?  Pure functions that return lists of problems.

Each takes a notebook as `refresh.read` gives it, so that a test can break a copy and look. What
an author has to do is said at each check; the tests in this folder run them over ``chapters/``.
"""

import ast
import base64
import copy
import json
import re
import struct
from decimal import Decimal
from pathlib import Path

from formulas import compare
from tools import refresh

from . import markdown, numbers

ROOT = Path(__file__).resolve().parents[2]
LONGEST_CELL = 18
LONGEST_FLOAT = 10
SHORTEST_ALT = 25
# 375 pixels of a phone show a picture of this width with its 11 points at 9 pixels.
WIDEST_FIGURE = 720
ROUTE = re.compile(
    r"\*\*Time\.\*\* About \d+ minutes to read(, \d+ for the exercises)?\."
    r"( \*\*Needs\.\*\* \S.*\. \*\*Skip it if\*\* you can \S.*\.)?"
)
HIDING = ("nbval-ignore-output", "nbval-skip", "nbval-check-output", "skip-execution",
          "pytest-validate-ignore-output")  # fmt: skip
FIGURE = ("image/png", "image/jpeg", "image/svg+xml")
REMOVED = {"remove-cell", "remove-output"}
SHOWN_PROMPT = "Show the solution"


def code_cells(nb):
    """Pairs (position, cell) of the code cells."""
    return [(k, cell) for k, cell in enumerate(nb.cells) if cell.cell_type == "code"]


def markdown_cells(nb):
    """Pairs (position, page) of the Markdown cells."""
    return [
        (k, markdown.read(cell.source))
        for k, cell in enumerate(nb.cells)
        if cell.cell_type == "markdown"
    ]


def tags(cell):
    """The cell's tags."""
    return set(cell.metadata.get("tags", []))


def output_text(cell):
    """All text that a cell's stored outputs show."""
    shown = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            shown.append(output.text)
        elif output.output_type == "error":
            shown += [output.ename, output.evalue, *output.traceback]
        else:
            data = output.data
            picture = any(mime in data for mime in FIGURE)
            for mime in ("text/plain", "text/markdown", "text/latex"):
                if mime in data and not (mime == "text/plain" and picture):
                    shown.append(data[mime])
            if "text/html" in data:
                shown.append(markdown.without_tags(data["text/html"]))
    return "\n".join(shown)


def first_cell(nb):
    """The first cell is Markdown and begins with the title, ``# ...``."""
    first = nb.cells[0] if nb.cells else None
    if first is None or first.cell_type != "markdown" or not re.match(r"# \S", first.source):
        return ["the first cell is no title: it must be Markdown and begin with '# '"]
    return []


def executed_in_order(nb):
    """Code cells are executed 1, 2, ... n and not empty. Cure: tests/tools/refresh.py."""
    problems = []
    for count, (k, cell) in enumerate(code_cells(nb), start=1):
        if not cell.source.strip():
            problems.append(f"cell {k}: empty")
        if cell.execution_count != count:
            problems.append(f"cell {k}: execution count {cell.execution_count}, expected {count}")
        problems += [
            f"cell {k}: its result has number {output.execution_count}, expected {count}"
            for output in cell.outputs
            if output.output_type == "execute_result" and output.execution_count != count
        ]
    return problems


def stray_errors(nb):
    """An error is stored only where the tag raises-exception announces it; stderr nowhere."""
    problems = []
    for k, cell in code_cells(nb):
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in tags(cell):
                problems.append(f"cell {k}: {output.ename} without the tag raises-exception")
            if output.output_type == "stream" and output.name == "stderr":
                problems.append(f"cell {k}: stderr: {output.text.strip()[:60]!r}")
    return problems


def ignored_outputs(nb):
    """No output is kept from nbval, unless metadata say why: ``nbval_reason: {"reason": ...}``."""
    problems = []
    for k, cell in enumerate(nb.cells):
        found = [tag for tag in tags(cell) if tag.lower() in HIDING]
        if cell.cell_type == "code":
            comments = re.findall(
                r"^\s*#+\s*((?:NBVAL|PYTEST_VALIDATE)_\w+)\s*$", cell.source, re.M
            )
            found += [comment for comment in comments if "RAISES" not in comment]
        reason = cell.metadata.get("nbval_reason", {}).get("reason", "").strip()
        if found and not reason:
            problems.append(f"cell {k}: {', '.join(found)} without nbval_reason in its metadata")
        if reason and not found:
            problems.append(f"cell {k}: nbval_reason, but nothing is ignored")
    return problems


def long_cells(nb):
    """A code cell has at most 18 lines."""
    return [
        f"cell {k}: {lines} lines, at most {LONGEST_CELL} are allowed"
        for k, cell in code_cells(nb)
        if (lines := len(cell.source.strip().split("\n"))) > LONGEST_CELL
    ]


def folded_cells(nb):
    """A folded cell says what is in it: ``mystnb.code_prompt_show``, such as "Show the model"."""
    return [
        f"cell {k}: folded without a name"
        for k, cell in code_cells(nb)
        if tags(cell) & {"hide-input", "hide-cell"}
        and not cell.metadata.get("mystnb", {}).get("code_prompt_show", "").strip()
    ]


def alt_text(alt):
    """What is wrong with an alt text: "" if nothing."""
    alt = alt.strip()
    if not alt:
        return "no alt text"
    if re.search(r"\.(png|jpe?g|svg|gif)$|^\S*[/\\]\S*$", alt, re.IGNORECASE):
        return f"a file name as alt text: {alt!r}"
    if re.match(r"(an?|the)?\s*(image|picture|plot|figure|graphic|screenshot)\b(:| of)", alt, re.I):
        return f"the alt text says that it is a picture, not what it shows: {alt[:40]!r}"
    if len(alt) < SHORTEST_ALT:
        return f"an alt text of {len(alt)} characters does not say what is seen: {alt!r}"
    return ""


def alt_texts(nb):
    """Every picture says in words what it shows: ``mystnb.image.alt``, or Markdown's own."""
    problems = []
    for k, page in markdown_cells(nb):
        problems += [f"cell {k}: {why}" for _, alt in page.images if (why := alt_text(alt))]
    for k, cell in code_cells(nb):
        if tags(cell) & REMOVED:
            continue
        data = [output.data for output in cell.outputs if "data" in output]
        if any(mime in d for d in data for mime in FIGURE):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            problems += [f"cell {k}: {why}"] if (why := alt_text(alt)) else []
        for html in (d["text/html"] for d in data if "text/html" in d):
            found = markdown.html_images(html)
            problems += [f"cell {k}: {why}" for _, alt in found if (why := alt_text(alt))]
            if re.search(r"<svg\b", html) and not re.search(r"<title\b|aria-label", html):
                problems.append(f"cell {k}: an SVG without <title> or aria-label")
        if any("image/svg+xml" in d for d in data):
            problems.append(f"cell {k}: an SVG output; figures are stored as PNG")
    return problems


def figures(nb):
    """Every figure has a number, a caption and a reference, and is legible on a phone:
    ``mystnb.figure`` with ``caption`` and a ``name`` fig:..., {numref} in the text, and a width of
    720 pixels at the most, which is ``figsize=(6.4, ...)``."""
    referenced = {
        target
        for cell in nb.cells
        if cell.cell_type == "markdown"
        for target in re.findall(r"\{numref\}`(?:[^`<>]*<)?([^`<>]+)>?`", cell.source)
    }
    problems = []
    for k, cell in code_cells(nb):
        pictures = [
            output.data["image/png"]
            for output in cell.outputs
            if "image/png" in output.get("data", {})
        ]
        if not pictures or tags(cell) & REMOVED:
            continue
        figure = cell.metadata.get("mystnb", {}).get("figure", {})
        name = figure.get("name", "")
        if not name.startswith("fig:"):
            problems.append(f"cell {k}: a figure without a name fig:..., but {name!r}")
        elif name not in referenced:
            problems.append(f"cell {k}: no text refers to {{numref}}`{name}`")
        if not figure.get("caption", "").strip():
            problems.append(f"cell {k}: a figure without a caption")
        for picture in pictures:
            width = struct.unpack(">I", base64.b64decode(picture[:64])[16:20])[0]
            if width > WIDEST_FIGURE:
                problems.append(
                    f"cell {k}: {name} is {width} pixels wide, at most {WIDEST_FIGURE} are allowed:"
                    " its text is too small on a phone; figsize=(6.4, ...), labels included"
                )
    return problems


def route(nb):
    """What a page asks of its reader: one Markdown cell before the first section, with the
    metadata ``"route": {}``, in one paragraph:

        **Time.** About 0 minutes to read, 0 for the exercises. **Needs.** {doc}`02_chain_rule`
        and ... **Skip it if** you can ...

    A page without exercises may stop after the first sentence. The title of each exercise ends in
    one of `` · easy, 5 min``, `` · medium, 10 min``, `` · hard, 20 min``. The numbers are
    computed from the page. Cure: tests/tools/refresh.py."""
    problems = []
    cells = [k for k, cell in enumerate(nb.cells) if "route" in cell.metadata]
    titles = [
        (k, title)
        for k, cell in enumerate(nb.cells)
        if cell.cell_type == "markdown"
        for title in refresh.exercise_titles(cell)
    ]
    for k, title in titles:
        if not refresh.RATED.search(title):
            problems.append(
                f"cell {k}: the exercise {title!r} is not rated: it must end in"
                " ' · easy, 5 min', ' · medium, 10 min' or ' · hard, 20 min'"
            )
    if len(cells) != 1 or nb.cells[cells[0]].cell_type != "markdown":
        return [*problems, f"{len(cells)} Markdown cells with metadata route, expected one"]
    (k,) = cells
    for section, cell in enumerate(nb.cells[:k]):
        if cell.cell_type == "markdown" and re.search(r"^## ", cell.source, re.M):
            problems.append(f"cell {k}: the route stands after the section of cell {section}")
    text = " ".join(nb.cells[k].source.split())
    match = ROUTE.fullmatch(text)
    if not match:
        problems.append(f"cell {k}: not of the form **Time.** ... **Needs.** ... **Skip it if**"
                        f" you can ...: {text[:60]!r}")  # fmt: skip
    elif titles and not match[2]:
        problems.append(f"cell {k}: a page with exercises says what it needs and who may skip it")
    if text != (right := refresh.timed(nb, text)):
        problems.append(f"cell {k}: {text[:70]!r}, expected {right[:70]!r}")
    return problems


def machine_traces(nb):
    """No output shows a path of a machine, an object's address, or digits of pure noise."""
    path = re.compile(
        r"(?<![\w.:/])/(?:tmp|home|root|usr|opt|var|mnt|Users)/\S*|site-packages\S*"
        r"|ipykernel_\d+|\b[A-Z]:\\\S+|\b0x[0-9a-f]{8,16}\b"
    )
    problems = []
    for k, cell in code_cells(nb):
        text = output_text(cell)
        problems += [f"cell {k}: output shows {match[0]!r}" for match in path.finditer(text)]
        for match in re.finditer(r"(?<![\w.])\d*\.\d+(?:[eE][-+]?\d+)?", text):
            digits = re.sub(r"[eE].*|\.", "", match[0]).lstrip("0")
            if len(digits) > LONGEST_FLOAT:
                problems.append(f"cell {k}: {match[0]} has {len(digits)} digits: round it")
    return problems


def metadata(nb):
    """Metadata, ids and outputs are as tests/tools/refresh.py stores them."""
    before = refresh.dumps(nb)
    after = refresh.dumps(refresh.normalise(nb_copy(nb)))
    if before == after:
        return []
    changed = [b for b, a in zip(before.split("\n"), after.split("\n"), strict=False) if a != b]
    return [f"not as refresh.py stores it, first at {(changed or ['the end'])[0].strip()[:60]!r}"]


def nb_copy(nb):
    """An independent copy of a notebook."""
    return copy.deepcopy(nb)


DRAWS = {
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson",
    "rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_",
    "exponential_", "random_", "dropout", "random_split",
}  # fmt: skip
LAYERS = re.compile(
    r"(Lazy)?(Linear|Bilinear|Conv(Transpose)?[123]d|Embedding(Bag)?|RNN|LSTM|GRU)(Cell)?$"
    r"|MultiheadAttention$|Transformer\w*$|(Alpha|Feature)?Dropout[123]?d?$"
)
NO_DRAW = {"default_rng", "Generator", "SeedSequence", "PCG64", "manual_seed", "seed",
           "zeros_", "ones_", "constant_", "eye_", "calculate_gain", "get_state"}  # fmt: skip


def seeds(nb):
    """Before random numbers are drawn, their generator is seeded: ``torch.manual_seed(0)`` for
    PyTorch (layers and dropout draw too), ``np.random.default_rng(0)`` for NumPy."""
    problems, seeded = [], set()
    for k, cell in code_cells(nb):
        try:
            tree = ast.parse(cell.source)
        except SyntaxError:
            continue
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: (node.end_lineno, node.end_col_offset)):
            name = ast.unparse(call.func)
            kind, does = _random(name, call)
            if does == "seed":
                if not call.args or not isinstance(call.args[0], ast.Constant | ast.Name):
                    problems.append(f"cell {k}: {name} without a literal seed")
                seeded.add(kind)
            elif does == "draw" and kind not in seeded:
                problems.append(f"cell {k}: {name} draws before {kind} is seeded")
                seeded.add(kind)  # one report is enough
    return problems


def _random(name, call):
    """Which generator a call concerns, and whether it seeds it or draws from it."""
    *_, last = parts = name.split(".")
    if last == "manual_seed":
        return "torch", "seed"
    if last in ("default_rng",) or name.endswith("random.seed"):
        return ("numpy" if parts[0] != "random" else "random"), "seed"
    if last in NO_DRAW:
        return "", ""
    if (parts[0] in ("rng", "generator") and len(parts) > 1) or "np.random." in name:
        return "numpy", "draw"
    if parts[0] == "random" and len(parts) == 2:
        return "random", "draw"
    shuffled = any(
        word.arg == "shuffle" and getattr(word.value, "value", None) is True
        for word in call.keywords
    )
    if last in DRAWS or "init" in parts[:-1] or (last == "DataLoader" and shuffled):
        return "torch", "draw"
    if LAYERS.fullmatch(last):
        return "torch", "draw"
    return "", ""


def _prose_numbers(pieces):
    for kind, text in pieces:
        yield from (numbers.in_math if kind == "math" else numbers.in_text)(text)


def numbers_in_prose(nb):
    """Every decimal, percentage, or number of three or more digits in Markdown, captions and alt
    texts occurs, rounded alike, in an output or in code of the notebook, or in its metadata:
    ``"numbers": {"2.13.0": "requirements.txt"}``, each as printed, with its source; a source
    of the form ``tests/benchmarks/graph.json: compiled_speedup`` is looked up and compared."""
    prose, shown, literal = [], [], []
    for k, page in markdown_cells(nb):
        if "route" in nb.cells[k].metadata:
            continue  # its minutes are computed
        prose += [(k, number) for number in _prose_numbers(page.prose)]
    for k, cell in code_cells(nb):
        mystnb = cell.metadata.get("mystnb", {})
        caption = mystnb.get("figure", {}).get("caption", "")
        prose += [(k, number) for number in _prose_numbers(markdown.read(caption).prose)]
        prose += [(k, n) for n in numbers.in_text(mystnb.get("image", {}).get("alt", ""))]
        shown += numbers.in_text(output_text(cell))
        literal += numbers.in_source(cell.source)
    return _unsourced(prose, shown, literal, nb.metadata.get("numbers", {}))


def numbers_on_page(text):
    """The same for a Markdown page, whose list of numbers are comments, each on its own line:
    ``<!-- number: 0.889 source: chapter 3 -->``."""
    page, listed, problems = markdown.read(text), {}, []
    for comment in page.comments:
        match = re.fullmatch(r"\s*number:\s*(.+?)\s+source:\s*(.+?)\s*", comment, re.DOTALL)
        if match:
            listed[match[1]] = match[2]
        elif "number:" in comment:
            problems.append(f"a comment not of the form number: ... source: ...: {comment!r}")
    found = [(None, number) for number in _prose_numbers(page.prose)]
    return problems + _unsourced(found, [], [], listed)


def _unsourced(prose, shown, literal, listed):
    problems, used = [], set()
    for k, number in prose:
        keys = [key for key in listed if numbers.same_print(key, number)]
        used.update(keys)
        if keys or not number.must_occur():
            continue
        if not _occurs(number, shown, literal):
            where = "" if k is None else f"cell {k}: "
            problems.append(
                f"{where}{number.text} stands in no output or code line, nor in the list of numbers"
            )
    for key, source in listed.items():
        if key not in used:
            problems.append(f"the list of numbers has {key!r}, which no text prints")
        if not str(source).strip():
            problems.append(f"the list of numbers gives no source for {key!r}")
        problems += _disagrees(key, str(source))
    return problems


def _disagrees(key, source):
    """A source such as ``tests/benchmarks/graph.json: compiled_speedup`` is looked up."""
    match = re.fullmatch(r"(tests/\S+\.json): (.+)", source)
    if not match:
        return []
    try:
        stored = json.loads((ROOT / match[1]).read_text(encoding="utf-8"))["results"][match[2]]
    except (OSError, KeyError) as error:
        return [f"the source of {key!r} is not there: {error!r}"]
    (measured,) = numbers.in_text(repr(stored))
    (printed,) = numbers.in_text(key)
    return [] if printed.matches(measured) else [f"{key!r} is {stored} in {source}"]


def _occurs(number, shown, literal):
    if any(number.matches(other) for other in shown):
        return True
    if any(number.matches(other, exact=True) for other in literal):
        return True
    if not re.fullmatch(r"-?\d+(,\d+)+", number.text):
        return False
    values = {other.value for other in shown + literal}
    return all(Decimal(piece) in values for piece in number.text.split(","))  # 784,128: two


def equations(nb):
    """Triples (cell, label, LaTeX) of the displayed equations."""
    return [(k, label, tex) for k, page in markdown_cells(nb) for label, tex in page.equations]


def formulas(nb, checks, definitions):
    """Every displayed equation has a label, and a check or a reason why there is nothing to check.

    Args:
        checks: label -> function that returns an environment or yields several.
        definitions: label -> reason.
    """
    problems, labels = [], set()
    for k, page in markdown_cells(nb):
        for kind, text in page.prose:
            if kind == "text" and ("$$" in text or re.search(r"\$ \(eq:", text)):
                problems.append(f"cell {k}: $$ without a blank line before it is no equation")
    for k, label, tex in equations(nb):
        if not label or not label.startswith("eq:"):
            problems.append(f"cell {k}: an equation without a label (eq:...): {tex[:50]!r}")
            continue
        if label in labels:
            problems.append(f"cell {k}: the label {label} stands twice")
        labels.add(label)
        if label in checks and label in definitions:
            problems.append(f"{label}: both checked and in DEFINITIONS; keep one")
        elif label in definitions:
            if len(definitions[label].strip()) < 10:
                problems.append(f"{label}: DEFINITIONS gives no reason")
        elif label in checks:
            problems += [f"{label}: {why}" for why in check_formula(tex, checks[label])]
        else:
            problems.append(f"cell {k}: {label} has no check in tests/formulas")
    for label in sorted({*checks, *definitions} - labels):
        problems.append(f"{label}: registered in tests/formulas, but no equation has this label")
    return problems


def check_formula(tex, check):
    """Problems of one equation in every environment that its check gives."""
    environments = check()
    if isinstance(environments, dict):
        environments = [environments]
    environments = list(environments or [])
    if not environments:
        return ["its check returns no environment"]
    found = [why for environment in environments for why in compare(tex, environment)]
    return list(dict.fromkeys(found))


def taught(nb):
    """Claim id -> the cells of a notebook that teach it."""
    cells = {}
    for cell in nb.cells:
        for claim in cell.metadata.get("claims", []):
            cells.setdefault(claim, []).append(cell)
    return cells


def claims(nb, ledger):
    """Each id in a cell's metadata ``"claims": ["A05"]`` exists; if the claim is wrong, that cell's
    output shows what is right: every entry of the ledger's ``number``."""
    known = {entry["id"]: entry for entry in ledger}
    problems = []
    for claim, cells in taught(nb).items():
        if claim not in known:
            problems.append(f"no claim {claim!r} in tests/claims.json")
            continue
        entry = known[claim]
        if entry["verdict"] != "wrong":
            continue
        if not entry["number"]:
            problems.append(f"{claim} is wrong in the source: claims.json needs its right number")
        text = "\n".join(output_text(cell) for cell in cells)
        problems += [
            f"{claim} is taught on a cell whose output does not show {wanted}"
            for wanted in entry["number"]
            if not _shows(text, wanted)
        ]
    return problems


def _shows(text, wanted):
    text, wanted = text.replace("−", "-"), wanted.replace("−", "-")
    asked = numbers.in_text(wanted)
    if len(asked) == 1 and asked[0].text == wanted.strip():
        return any(asked[0].matches(number) for number in numbers.in_text(text))
    return wanted in text


def missing_claims(notebooks, ledger, chapter):
    """Claims of a chapter that none of its notebooks teaches."""
    shown = {claim for nb in notebooks for claim in taught(nb)}
    return [
        f"chapter {chapter} teaches {entry['id']} on no cell: {entry['claim'][:60]}"
        for entry in ledger
        if chapter in entry["chapters"]
        and entry["verdict"] != "untestable"
        and entry["id"] not in shown
    ]


def exercises(nb, chapter=None, before=0):
    """Each ``{exercise}`` is followed, before the next one, by a hint, an answer cell, a solution
    and a check, in this order:

    * Markdown: the directive with ``:label: ex:...`` and the statement;
    * ``{dropdown} Hint`` in the same or a later Markdown cell;
    * code tagged ``answer``: holds ``...`` and calls the check; output "not answered yet";
    * code tagged ``solution``, ``hide-cell``, with ``mystnb.code_prompt_show`` "Show the solution":
      calls the check; output "right";
    * code tagged ``check``, ``remove-cell``: ``.rejects(`` with two wrong answers or more.

    Before the answer a cell tagged ``judge`` and hidden or removed makes
    ``check_1 = Exercise("1.1", judge)``; numbers count up over the pages of a chapter, of which
    ``before`` stand on earlier pages.
    """
    starts = [
        (k, directive)
        for k, page in markdown_cells(nb)
        for directive in page.directives
        if directive.name == "exercise"
    ]
    if len({k for k, _ in starts}) < len(starts):
        return ["two exercises in one Markdown cell"]
    problems = []
    for count, (start, directive) in enumerate(starts, start=1):
        end = starts[count][0] if count < len(starts) else len(nb.cells)
        number = f"{chapter}.{before + count}" if chapter else None
        where = f"exercise {number or count} (cell {start})"
        problems += [f"{where}: {why}" for why in _exercise(nb, start, end, directive, number)]
    used = {"answer", "solution", "check"}
    first = starts[0][0] if starts else len(nb.cells)
    for k, cell in code_cells(nb)[:]:
        if k < first and tags(cell) & used:
            problems.append(f"cell {k}: tagged {tags(cell) & used} before any exercise")
    return problems


def _exercise(nb, start, end, directive, number):
    problems = []
    if not directive.options.get("label", "").startswith("ex:"):
        problems.append("no label ex:...")
    if len(directive.body.split()) < 4:
        problems.append("no statement")
    hints = [
        k
        for k, page in markdown_cells(nb)
        if start <= k < end
        and any(d.name == "dropdown" and d.argument.startswith("Hint") for d in page.directives)
    ]
    cells = dict(code_cells(nb))
    found = {
        tag: [k for k, cell in cells.items() if start < k < end and tag in tags(cell)]
        for tag in ("answer", "solution", "check")
    }
    for tag, places in found.items():
        if len(places) != 1:
            problems.append(f"{len(places)} cells tagged {tag}, expected one")
    if not hints:
        problems.append("no {dropdown} Hint")
    if problems:
        return problems
    (answer,), (solution,), (check,) = found.values()
    if not start <= hints[0] < answer < solution < check:
        problems.append("not in the order statement, hint, answer, solution, check")
    name = _checker(cells, answer, number, problems)
    problems += _answer(cells[answer], name)
    problems += _solution(cells[solution], name)
    problems += _rejection(cells[check], name)
    return problems


def _checker(cells, before, number, problems):
    """The variable that holds the exercise with this number."""
    for k, cell in cells.items():
        for node in ast.walk(_tree(cell)):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            call = node.value
            if ast.unparse(call.func).split(".")[-1] != "Exercise" or not call.args:
                continue
            given = getattr(call.args[0], "value", None)
            if k >= before or (number and given != number):
                continue
            target = ast.unparse(node.targets[0])
            called = _calls(cells[before])
            if not number and target not in called:
                continue
            if "judge" not in tags(cell) or not tags(cell) & {
                "hide-input", "hide-cell", "remove-input", "remove-cell"
            }:  # fmt: skip
                problems.append(f"cell {k} makes it, but is not tagged judge and hidden")
            return target
    problems.append(f"no hidden cell before the answer makes Exercise({number!r}, judge)")
    return None


def _tree(cell):
    try:
        return ast.parse(cell.source)
    except SyntaxError:
        return ast.Module([], [])


def _calls(cell):
    return [ast.unparse(n.func) for n in ast.walk(_tree(cell)) if isinstance(n, ast.Call)]


def _has_placeholder(cell):
    return any(
        isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(_tree(cell))
    )


def _answer(cell, name):
    problems = []
    if not _has_placeholder(cell):
        problems.append("the answer cell has no placeholder ...")
    if name and name not in _calls(cell):
        problems.append(f"the answer cell does not call {name}")
    if "not answered yet" not in output_text(cell):
        problems.append("the answer cell's output is not 'not answered yet'")
    return problems


def _solution(cell, name):
    problems = []
    if "hide-cell" not in tags(cell):
        problems.append("the solution is not tagged hide-cell")
    if cell.metadata.get("mystnb", {}).get("code_prompt_show") != SHOWN_PROMPT:
        problems.append(f"the solution's mystnb.code_prompt_show is not {SHOWN_PROMPT!r}")
    if _has_placeholder(cell):
        problems.append("the solution still has the placeholder ...")
    if name and name not in _calls(cell):
        problems.append(f"the solution does not call {name}")
    if not re.search(r": right\.$", output_text(cell), re.M):
        problems.append("the solution's output does not say 'right'")
    return problems


def _rejection(cell, name):
    problems = []
    if "remove-cell" not in tags(cell):
        problems.append("the check is not tagged remove-cell")
    calls = [
        node
        for node in ast.walk(_tree(cell))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.rejects"
    ]
    starred = any(isinstance(arg, ast.Starred) for call in calls for arg in call.args)
    if not calls or (sum(len(call.args) for call in calls) < 2 and not starred):
        problems.append(f"the check does not call {name}.rejects with two wrong answers")
    if "wrong answers are rejected" not in output_text(cell):
        problems.append("the check's output does not say that wrong answers are rejected")
    return problems


CARD = ("seen", "The wrong guess.", "decides", "cause", "Prevention.")


def cards(nb):
    """Slug -> the cells of its failure card: from the heading to the next card, or the end."""
    found, current = {}, None
    for cell in nb.cells:
        fault = cell.metadata.get("fault", {})
        if fault.get("part") == "seen":
            current = found.setdefault(fault["slug"], [])
        elif cell.cell_type == "markdown" and re.match(r"#{1,2} ", cell.source):
            current = None  # a section that is no card
        if current is not None:
            current.append(cell)
    return found


def card(slug, cells):
    """A card has its six parts in order; a program that shows the fault stands before the guess,
    and a measurement, with assertions on the sick and the healthy program, after what decides."""
    parts, asserted, programs = [], 0, 0
    for cell in cells:
        fault = cell.metadata.get("fault", {})
        bold = re.findall(r"^\*\*(.+?)\*\*", cell.source, re.M)
        if fault:
            parts.append(fault["part"] if fault["slug"] == slug else str(fault))
        elif cell.cell_type == "markdown":
            parts += [head for head in bold if head in CARD]
        elif cell.cell_type == "code":
            programs += bool(output_text(cell) or _has_figure(cell)) and parts == ["seen"]
            if "decides" in parts:
                asserted += sum(isinstance(n, ast.Assert) for n in ast.walk(_tree(cell)))
    problems = [] if tuple(parts) == CARD else [f"{slug}: parts {parts}, expected {list(CARD)}"]
    if not programs:
        problems.append(f"{slug}: no program with an output before the guess")
    if asserted < 2:
        problems.append(f"{slug}: {asserted} assertions, expected one on the sick program and one"
                        " on its healthy twin")  # fmt: skip
    return problems


def _has_figure(cell):
    return any(mime in output.get("data", {}) for output in cell.outputs for mime in FIGURE)


# Every check that needs nothing but the notebook.
CHECKS = (
    first_cell,
    executed_in_order,
    stray_errors,
    ignored_outputs,
    long_cells,
    folded_cells,
    alt_texts,
    figures,
    route,
    machine_traces,
    metadata,
    seeds,
    numbers_in_prose,
)
