r"""Do notation, glossary and claims say what the chapters do?  Functions that return problems.

**Notation.** Each row of ``chapters/notation.md`` holds symbols, and links to the pages on which
they have this meaning. A symbol is a letter with what decorates it: ``\hat m``, ``n_{\text{in}}``.
The letters of an index are symbols too; numbers are not.

**Claims.** A number in a finding stands in an output or in code of a notebook that names the claim.

**Glossary.** An entry's terms stand on a line each, its explanation is indented.
"""

import re

from formulas.latex import TOKEN

from . import checks, markdown, numbers

# What the formulas are built with and nobody looks up.
STRUCTURE = {
    r"\frac{", r"\sqrt{", r"\underbrace{", r"\sum", r"\prod", r"\cdot", r"\times", r"\approx",
    r"\partial", r"\pm", r"\le", r"\ge", r"\leftarrow", r"\to", r"\infty", r"\dots", r"\lvert",
    r"\rvert", r"\rVert", r"\log", r"\exp", r"\sin", r"\cos", r"\tanh", r"\max", r"\min", r"\pi",
}  # fmt: skip
COUNTING = {"i", "j", "k"}  # the page says so: over whatever the formula sums or multiplies
DERIVATIVE = re.compile(r"\\frac\{d(?:\^\d)?\s*([^{}]*)\}\{d([^{}]*)\}")
LAYOUT = re.compile(r"\\(?:begin|end)\{[a-z*]+\}|&|\\\\")


def symbols(tex):
    r"""The symbols of a formula: of ``\hat m_t = \beta m``, ``\hatm``, ``t``, ``\beta``, ``m``."""
    tex = DERIVATIVE.sub(r"\\frac{\\partial \1}{\\partial \2}", LAYOUT.sub(" ", tex))
    found = []
    for match in TOKEN.finditer(tex):
        token = re.sub(r"\s", "", match[0])
        if match["space"] or match["label"] or token.startswith("^"):
            continue
        if token.startswith("_"):
            index = token[1:].strip("{}")
            if found and index.startswith(("\\text", "\\max", "\\min")):
                found[-1] += "_" + re.sub(r"\\text|[{}]", "", index)
            else:
                found += re.findall(r"[A-Za-z]", index)
        elif re.fullmatch(r"d?[A-Za-z]", token):
            found.append(token[-1])
        elif re.match(r"\\[A-Za-z]", token) and token not in STRUCTURE:
            found.append(token.rstrip("["))
    return set(found)


def rows(text):
    """(table, symbols, names in code, pages) for each row of the notation page."""
    found, table = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            table = line[3:]
        elif line.startswith("| $"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            own = set().union(*map(symbols, re.findall(r"\$([^$]+)\$", cells[0])))
            if table == "Signs" and len(cells[0]) > len("$e$"):
                own = {s for s in own if s.startswith("\\")}  # the letters are examples of its use
            pages = re.findall(r"\{doc\}`[^`<]*<([^`>]+)>`", cells[-1])
            meaning = re.sub(r"\{\w+\}`[^`]*`", "", cells[1])
            found.append((table, own, re.findall(r"`([^`]+)`", meaning), pages))
    return found


def notation(text, page, nb, twice=()):
    """Differences between the notation page and the formulas of one notebook.

    Args:
        twice: the symbols that have two meanings on this page, on purpose.
    """
    listed = [symbol for _, own, _, pages in rows(text) if page in pages for symbol in own]
    cells = [cell for _, cell in checks.markdown_cells(nb)]
    numbered = set().union(*(symbols(tex) for cell in cells for _, tex in cell.equations))
    math = (part for cell in cells for kind, part in cell.prose if kind == "math")
    shown = numbered.union(*map(symbols, math))
    again = {symbol for symbol in listed if listed.count(symbol) > 1}
    found = {
        "in a numbered formula, but not on the notation page": numbered - {*listed, *COUNTING},
        "on the notation page, but in no formula here": {*listed} - shown,
        "the notation page gives it two meanings here": again - {*twice},
        "has one meaning here, not two": {*twice} - again,
    }
    return [f"{symbol}: {why}" for why, those in found.items() for symbol in sorted(those)]


def names_in_code(text, notebooks):
    """Names of the notation page that no code cell of their chapters uses.

    Args:
        notebooks: by page.
    """
    code = {
        page: "\n".join(cell.source for _, cell in checks.code_cells(nb))
        for page, nb in notebooks.items()
    }
    return [
        f"{', '.join(sorted(own))}: no cell of {', '.join(pages)} says {name}"
        for _, own, names, pages in rows(text)
        for name in names
        if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code[page]) for page in pages)
    ]


def glossary(text):
    """The entries of the glossary: terms, a tuple for each, and what the entry says."""
    body = re.search(r"^```\{glossary\}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    entries = {}
    for block in re.split(r"\n\s*\n", body.strip("\n")):
        terms = tuple(line for line in block.splitlines() if not line.startswith(" "))
        entries[terms] = " ".join(line.strip() for line in block.splitlines()[len(terms) :])
    return entries


def linked(text):
    """The terms that a text links to, in small letters."""
    found = re.findall(r"\{term\}`([^`]+)`", text)
    targets = (re.search(r"<([^<>]+)>\s*$", term) for term in found)
    return {
        " ".join((target[1] if target else term).lower().split())
        for term, target in zip(found, targets, strict=True)
    }


def form(term):
    """How a term is recognised: any case, singular and plural, hyphen or blank."""
    words = r"[\s-]+".join(map(re.escape, re.split(r"[\s-]", term)))
    return words + ("?" if re.search(r"[^s]s$", term) else "(?:s|es)?")


def prose(nb):
    """What a notebook says, by cell: text that could hold a link to the glossary.

    Headings can't, nor can cells written from the fault catalogue, whose texts reports print too.
    """
    sources = {
        cell.id: re.sub(r"^#+ .*$", "", cell.source, flags=re.MULTILINE)
        for cell in nb.cells
        if cell.cell_type == "markdown" and "fault" not in cell.metadata
    }
    return {
        name: "\n".join(part for kind, part in markdown.read(source).prose if kind == "text")
        for name, source in sources.items()
    }


def first_use(forms, pages):
    """(page, cell) where one of the forms stands first; None if nowhere.

    Args:
        pages: in reading order, what `prose` gives for each.
    """
    word = re.compile(rf"(?<![\w-])(?:{'|'.join(forms)})(?![\w-])", re.IGNORECASE)
    uses = (
        (p, cell) for p, texts in pages.items() for cell, text in texts.items() if word.search(text)
    )
    return next(uses, None)


def findings(ledger, notebooks):
    """Numbers of the ledger's findings that no notebook shows that names the claim."""
    shown, literal, named = {}, {}, {}
    for stem, nb in notebooks.items():
        cells = [cell for _, cell in checks.code_cells(nb)]
        shown[stem] = [n for cell in cells for n in numbers.in_text(checks.output_text(cell))]
        literal[stem] = [n for cell in cells for n in numbers.in_source(cell.source)]
        for claim in checks.taught(nb):
            named.setdefault(claim, []).append(stem)
    problems = []
    for entry in ledger:
        places = named.get(entry["id"], [])
        seen = [n for stem in places for n in shown[stem]]
        written = [n for stem in places for n in literal[stem]]
        problems += [
            f"{entry['id']}: {number.text} is in no output of {', '.join(places) or 'a notebook'}"
            for number in checks._prose_numbers(markdown.read(entry["finding"]).prose)
            if number.must_occur() and not checks._occurs(number, seen, written)
        ]
    return problems
