"""Which small faults can be made in this project?  Finds the places, and draws a seeded sample.

Four kinds of source, each with its own operators:

* ``bpkit``: all modules. Signs, operators, transposes, indices and axes, ``+=``, comparisons,
  conditions, and/or, booleans, constants, swapped arguments, dropped statements.
* ``gradients``: the same, in the lines of the notebooks that compute a gradient or an update.
* ``catalogue``: ``faults.toml`` and ``symptoms.toml``: swapped names, texts and pages, patterns.
* ``formulas``: signs, numbers, indices, transposes and fractions of the labelled equations.

Left out is what says nothing about the program: strings and docstrings, the text of errors,
annotations, imports, and ``strict=`` of zip and ``frozen=`` of dataclasses, which guard against
mistakes in the code itself.
"""

import ast
import random
import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One fault: the lines `before` of a file (or of a notebook's cell) become `after`."""

    kind: str
    file: str
    cell: str | None  # the cell's id
    line: int  # where `before` stood when the mutant was made, from 1
    operator: str
    before: str
    after: str

    def changed(self, text):
        """The `text` with the fault in it; ValueError if the lines are not there any more."""
        lines, old = text.split("\n"), self.before.split("\n")
        at = [k for k in range(len(lines)) if lines[k : k + len(old)] == old]
        if not at:
            raise ValueError(f"{self.file} has changed, these lines are gone: {self.before!r}")
        k = min(at, key=lambda k: abs(k + 1 - self.line))
        return "\n".join([*lines[:k], *self.after.split("\n"), *lines[k + len(old) :]])

    def to_dict(self):
        return asdict(self)


# Python


COMMUTE = {"max", "min", "maximum", "minimum", "allclose", "isclose", "equal", "logaddexp"}
TRIVIAL = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "print", "zip"}
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.Pow: ("**", "*"), ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "//"),
}  # fmt: skip
COMPARISON = {
    ast.Lt: ("<", ("<=", ">=")), ast.LtE: ("<=", ("<", ">")), ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")), ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)), ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)), ast.NotIn: ("not in", ("in",)),
}  # fmt: skip
ASSIGNED = {ast.Add: ("+=", ("=", "-=")), ast.Sub: ("-=", ("=", "+=")), ast.Mult: ("*=", ("/=",)),
            ast.Div: ("/=", ("*=",)), ast.BitOr: ("|=", ("=",))}  # fmt: skip
GUARDS = {"strict", "frozen", "slots", "kw_only"}


class Source:
    """A text whose places are given as Python's parser does, by line and UTF-8 byte."""

    def __init__(self, text):
        self.text = text
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.split(b"\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def at(self, line, column):
        return self.starts[line - 1] + column

    def part(self, start, end):
        return self.data[start:end].decode()

    def lines(self, start, end, new):
        """(number of the first line, the lines that hold start:end, the same with `new`)."""
        first = self.data.rfind(b"\n", 0, start) + 1
        last = self.data.find(b"\n", end)
        last = len(self.data) if last < 0 else last
        before = self.part(first, last)
        after = self.part(first, start) + new + self.part(end, last)
        return self.data.count(b"\n", 0, first) + 1, before, after


class Sites(ast.NodeVisitor):
    """Collects (operator, start, end, new text) of all places in a module or a cell."""

    def __init__(self, source):
        self.source, self.found, self.role = source, [], "constant"

    def add(self, operator, start, end, new):
        self.found.append((operator, start, end, new))

    def between(self, left, right, old, new, operator):
        """Replace the sign that stands between two nodes."""
        start, end = self.source.span(left)[1], self.source.span(right)[0]
        words = r"\s+".join(map(re.escape, old.split()))
        match = re.search(words, self.source.part(start, end))
        if match:
            text = self.source.part(start, end)
            offset = len(text[: match.start()].encode())
            size = len(match[0].encode())
            self.add(operator, start + offset, start + offset + size, new)

    def replace(self, node, new, operator):
        self.add(operator, *self.source.span(node), new)

    def code(self, node):
        return self.source.part(*self.source.span(node))

    # What is left out.
    def visit_JoinedStr(self, node):
        pass

    def visit_Import(self, node):
        pass

    visit_ImportFrom = visit_Import

    def visit_arguments(self, node):
        for default in [*node.defaults, *filter(None, node.kw_defaults)]:
            self.visit(default)

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node):
        self.visit(node.args)
        for child in node.body:
            self.visit(child)

    def visit_ClassDef(self, node):
        for child in node.body:
            self.visit(child)

    def visit_Raise(self, node):
        self.replace(node, "pass", "dropped statement")

    def visit_Assert(self, node):
        self.visit(node.test)

    def visit_keyword(self, node):
        if node.arg in GUARDS:
            return
        before, self.role = self.role, "axis" if node.arg in ("axis", "dim", "dims") else self.role
        self.visit(node.value)
        self.role = before

    # What is changed.
    def visit_BinOp(self, node):
        if type(node.op) in ARITHMETIC and not isinstance(node.left, ast.JoinedStr):
            old, new = ARITHMETIC[type(node.op)]
            text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
            if not text:
                self.between(node.left, node.right, old, new, "arithmetic")
        if isinstance(node.op, ast.MatMult):
            both = f"{self.code(node.right)} @ {self.code(node.left)}"
            self.replace(node, both, "swapped arguments")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self.replace(node, self.code(node.operand), "condition")
        if isinstance(node.op, ast.USub):
            self.replace(node, self.code(node.operand), "sign")
        self.generic_visit(node)

    def visit_Compare(self, node):
        values = [node.left, *node.comparators]
        for (left, right), op in zip(pairwise(values), node.ops, strict=True):
            old, options = COMPARISON[type(op)]
            for new in options:
                self.between(left, right, old, new, "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            self.between(left, right, old, new, "and/or")
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        for kind, (old, options) in ASSIGNED.items():
            if isinstance(node.op, kind):
                for new in options:
                    self.between(node.target, node.value, old, new, "assignment")
        self.replace(node, "pass", "dropped statement")
        self.generic_visit(node)

    def visit_Attribute(self, node):
        if node.attr in ("T", "mT"):
            self.replace(node, self.code(node.value), "transpose")
        self.generic_visit(node)

    def visit_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("warn", "add_argument", "TypeVar"):
            return
        if name in ("transpose", "swapaxes", "t", "permute") and isinstance(
            node.func, ast.Attribute
        ):
            self.replace(node, self.code(node.func.value), "transpose")
        if name not in COMMUTE | TRIVIAL:
            for a, b in pairwise(node.args):
                plain = not any(isinstance(x, ast.Starred | ast.Constant) for x in (a, b))
                if plain and self.code(a) != self.code(b):
                    (start, middle), (other, end) = self.source.span(a), self.source.span(b)
                    new = self.code(b) + self.source.part(middle, other) + self.code(a)
                    self.add("swapped arguments", start, end, new)
        self.generic_visit(node)

    def visit_Subscript(self, node):
        self.visit(node.value)
        before, self.role = self.role, "index"
        self.visit(node.slice)
        self.role = before

    def visit_Constant(self, node):
        value = node.value
        if isinstance(value, bool):
            self.replace(node, str(not value), "boolean")
        elif isinstance(value, int | float) and self.role in ("index", "axis"):
            self.replace(node, repr(value + 1), "index")
        elif isinstance(value, int | float):
            new = {0: 1, 1: 2}.get(value, value * 10)
            self.replace(node, repr(type(value)(new)), "constant")

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        if isinstance(node.value, ast.Call):
            self.replace(node, "pass", "dropped statement")
        self.generic_visit(node)

    def visit_Assign(self, node):
        target = node.targets[0]
        if isinstance(target, ast.Attribute | ast.Subscript):
            self.replace(node, "pass", "dropped statement")
        if isinstance(target, ast.Tuple) and len(target.elts) == 2:
            a, b = map(self.code, target.elts)
            if not any(isinstance(x, ast.Starred) for x in target.elts):
                (start, _), (_, end) = map(self.source.span, target.elts)
                self.add("swapped arguments", start, end, f"{b}, {a}")
        if getattr(target, "id", "") != "__all__":
            self.generic_visit(node)

    def visit_Continue(self, node):
        self.replace(node, "pass", "dropped statement")

    def visit_If(self, node):
        if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.NamedExpr):
            self.replace(node.test, f"not {self.code(node.test)}", "condition")
        self.generic_visit(node)

    visit_IfExp = visit_If


def python(text, kind, file, cell=None, wanted=None):
    """All mutants of a Python text; `wanted` says of a statement's source whether it counts."""
    tree, source = ast.parse(text), Source(text)
    finder = Sites(source)
    finder.visit(tree)
    spans = [source.span(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    mutants = []
    for operator, start, end, new in finder.found:
        around = min((s for s in spans if s[0] <= start and end <= s[1]), key=lambda s: s[1] - s[0])
        if wanted and not wanted(source.part(*around)):
            continue
        line, before, after = source.lines(start, end, new)
        if before != after:
            mutants.append(Mutant(kind, file, cell, line, operator, before, after))
    return mutants


def package():
    for path in sorted((ROOT / "bpkit").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        yield from python(path.read_text(encoding="utf-8"), "bpkit", file)


# Notebooks

# A statement computes a gradient or an update if it names one of these and computes something.
GRADIENT = re.compile(
    r"\b(?:d[A-Z]\w*|d[bwxy]\d?|[Gg]\d?|grad\w*|upstream|by_hand|hand|local|factors?|slope|"
    r"lr|rate|velocity|momentum|beta\w*|v_?hat|m_?hat|update|theta|eta|jacobian|J)\b|\.grad\b"
)
NOT_COMPUTED = re.compile(r"^(?:print|axis\.|figure|def |class |for |with |if |while )")
SETTINGS = {"judge", "answer", "check", "remove-cell"}  # of exercises; figures no reader sees


def gradients():
    from . import refresh  # it imports bpkit, which a worker must not do

    def wanted(statement):
        return GRADIENT.search(statement) and not NOT_COMPUTED.match(statement)

    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        for cell in refresh.read(path).cells:
            tags = set(cell.metadata.get("tags", []))
            if cell.cell_type == "code" and not tags & SETTINGS:
                file = path.relative_to(ROOT).as_posix()
                yield from python(cell.source, "gradients", file, cell.id, wanted)


# Formulas

TEX = [
    ("sign", r"(?<=[\w})\]] )\+(?= )", "-"),
    ("sign", r"(?<=[\w})\]] )-(?= )", "+"),
    ("sign", r"(?<=[=(] )-|(?<=[{(])-(?=[^\d])", ""),
    ("transpose", r"\^\\top", ""),
    ("number", r"(?<![\w.,}^_{])\d+(?:\.\d+)?(?![\w.]|\{,)", None),
    ("exponent", r"(?<=\^)\d", None),
    ("exponent", r"(?<=\^\{)\d+(?=\})", None),
    ("index", r"(?<=_)[a-z](?![\w])", None),
    ("index", r"(?<=_\{)[a-z]{2}(?=\})", None),
    ("index", r"(?<=[a-z]) ?[-+] ?1(?=\})", ""),
    ("index", r"(?<==)1(?=\})", "2"),
    ("fraction", r"\\frac\{(?!\\partial|d)([^{}]*)\}\{([^{}]*)\}", None),
    ("function", r"(?<!_)(?<!_\{)\\(?:sin|cos|exp|log|max|min)(?![a-z])", None),
    ("product", r"\\odot|\\cdot|\\times", "+"),
]
OTHER = {"sin": "cos", "cos": "sin", "exp": "log", "log": "exp", "max": "min", "min": "max"}


def formulas():
    from book import checks

    from . import refresh

    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        nb = refresh.read(path)
        for k, label, tex in checks.equations(nb):
            cell = nb.cells[k]
            start = cell.source.find(tex.strip())
            if start < 0:
                raise ValueError(f"{path.name}: {label} is not in its cell as it was read")
            source, shift = Source(cell.source), len(cell.source[:start].encode())
            letters = sorted(set(re.findall(r"_\{?([a-z])", tex)))
            for operator, pattern, new in TEX:
                for match in re.finditer(pattern, tex.strip()):
                    text = replacement(operator, match, new, letters)
                    at = shift + len(tex.strip()[: match.start()].encode())
                    line, before, after = source.lines(at, at + len(match[0].encode()), text)
                    if before != after:
                        file = path.relative_to(ROOT).as_posix()
                        yield Mutant("formulas", file, cell.id, line, operator, before, after)


def replacement(operator, match, new, letters):
    text = match[0]
    if new is not None:
        return new
    if operator in ("number", "exponent"):
        return re.sub(r"\d+", lambda m: str(int(m[0]) + 1), text, count=1)
    if operator == "index" and len(text) == 2:
        return text[::-1]
    if operator == "index":
        return next((letter for letter in letters if letter != text), text)
    if operator == "function":
        return "\\" + OTHER[text[1:]]
    return rf"\frac{{{match[2]}}}{{{match[1]}}}"


# The catalogue


def catalogue():
    folder = ROOT / "bpkit" / "diagnosis"
    for name in ("faults.toml", "symptoms.toml"):
        file, text = f"bpkit/diagnosis/{name}", (folder / name).read_text(encoding="utf-8")
        entries = list(re.finditer(r"^\[[\w-]+\]\n(?:(?!^\[[\w-]+\]\n).*\n?)*", text, re.M))
        for this, other in pairwise(entries):
            yield from _entry(file, text, this, other)


def _entry(file, text, this, other):
    """Faults in one entry, some of them by what the next one says."""

    def mutant(operator, start, end, new):
        line, before, after = Source(text).lines(len(text[:start].encode()),
                                                 len(text[:end].encode()), new)  # fmt: skip
        if before != after:
            yield Mutant("catalogue", file, None, line, operator, before, after)

    def value(entry, key):
        return re.search(rf'^{key} = (""".*?"""|"[^"\n]*"|\[.*?\]$)', entry[0], re.M | re.S)

    head, begin = re.match(r"\[([\w-]+)\]", this[0]), this.start()
    other_slug = re.match(r"\[([\w-]+)\]", other[0])[1]
    yield from mutant("slug", begin + head.start(1), begin + head.end(1), other_slug + "-2")
    for key in ("title", "page", "anchor", "layer", "cause", "repair", "decides", "first"):
        mine, theirs = value(this, key), value(other, key)
        if mine and theirs:
            yield from mutant(key, begin + mine.start(1), begin + mine.end(1), theirs[1])
    for pattern in re.finditer(r"'''(.+?)'''", this[0]):
        words = list(re.finditer(r"[A-Za-z]{4,}", pattern[1]))
        if words:
            word = words[len(words) // 2]
            start = begin + pattern.start(1) + word.start()
            yield from mutant("pattern", start, start + len(word[0]), word[0][::-1])
    if errors := re.search(r"^errors = (\[.+?\])$", this[0], re.M | re.S):
        yield from mutant("pattern", begin + errors.start(1), begin + errors.end(1), "[]")
    if slugs := re.search(r"^faults = \[(.*?)\]$", this[0], re.M | re.S):
        found = list(re.finditer(r'"[\w-]+"', slugs[1]))
        at = begin + slugs.start(1)
        for a, b in pairwise(found):
            both = b[0] + slugs[1][a.end() : b.start()] + a[0]
            yield from mutant("order", at + a.start(), at + b.end(), both)
        for slug in found:
            yield from mutant("slug", at + slug.start(), at + slug.end(), f'"{other_slug}"')


# The sample

SHARES = {"bpkit": 0.6, "gradients": 0.2, "catalogue": 0.08, "formulas": 0.12}
SOURCES = {"bpkit": package, "gradients": gradients, "catalogue": catalogue, "formulas": formulas}


def sample(count, seed):
    """About `count` mutants: shares of the kinds fixed, each file with at least one, and within a
    file every operator as likely as the others, however often it occurs."""
    chosen = []
    for kind, share in SHARES.items():
        by_file = defaultdict(list)
        for mutant in SOURCES[kind]():
            by_file[mutant.file].append(mutant)
        for file, number in quotas(by_file, round(count * share)).items():
            chosen += draw(by_file[file], number, random.Random(f"{seed} {kind} {file}"))
    return chosen


def quotas(by_file, total):
    """How many of each file: one, and the rest in proportion to its places, largest rest first."""
    places = {file: len(mutants) for file, mutants in by_file.items()}
    rest = max(total - len(places), 0)
    ideal = {file: rest * n / sum(places.values()) for file, n in places.items()}
    number = {file: 1 + int(share) for file, share in ideal.items()}
    by_rest = sorted(ideal, key=lambda file: ideal[file] % 1, reverse=True)
    for file in by_rest[: max(total - sum(number.values()), 0)]:
        number[file] += 1
    return {file: min(n, places[file]) for file, n in number.items()}


def draw(mutants, number, rng):
    """Some of one file's mutants, no two in the same line."""
    by_operator = defaultdict(list)
    for mutant in mutants:
        by_operator[mutant.operator].append(mutant)
    chosen, lines = [], set()
    while by_operator and len(chosen) < number:
        operator = rng.choice(sorted(by_operator))
        mutant = by_operator[operator].pop(rng.randrange(len(by_operator[operator])))
        if not by_operator[operator]:
            del by_operator[operator]
        if (mutant.cell, mutant.line) not in lines:
            lines.add((mutant.cell, mutant.line))
            chosen.append(mutant)
    return sorted(chosen, key=lambda mutant: (mutant.cell or "", mutant.line))
