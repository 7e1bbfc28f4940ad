r"""How are formulas typeset without a script on the page?

LaTeX becomes MathML Core while the book is built (package ``math_core``), browsers draw it
themselves, and the font comes with the page: STIX Two Math out of the package ``ziamath``, cut down
to the characters the pages use. A formula that cannot be converted is a Sphinx warning with page,
place and text, so a build with ``-W`` fails.

In ``_config.yml``: ``html_math_renderer: mathml``; more macros with ``mathml_macros: {'\NN':
'\mathbb{N}'}`` (no arguments needed; ``#1`` stands for the first one where there are some).
"""

import html
import re
import unicodedata
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from docutils import nodes
from fontTools import subset, ttLib
from math_core import LatexError, LatexToMathML
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

logger = logging.getLogger(__name__)

MACROS = {r"\RR": r"\mathbb{R}"}
# A letter or a number says what it is; LaTeX beside it would say the same in ninety bytes.
PLAIN = re.compile(r"\\?[A-Za-z]+|[\d.]+")
FONT = Path(find_spec("ziamath").origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
# Sphinx numbers an equation once, on the right, so numbered environments become their inner forms.
INNER = {
    "equation": None,
    "align": "aligned",
    "eqnarray": "aligned",
    "split": "aligned",
    "gather": "gathered",
    "multline": "gathered",
}
ENVIRONMENT = re.compile(rf"\\(begin|end)\{{({'|'.join(INNER)})\*?\}}")
TALL = {"mfrac", "mtable", "munder", "mover", "munderover", "msqrt", "mroot"}
# A letter alone in <mi> is drawn with the character of the mathematical italic alphabet.
ITALIC = {
    unicodedata.normalize("NFKC", chr(c)): c
    for c in (*range(0x1D434, 0x1D468), *range(0x1D6E2, 0x1D71C))
    if unicodedata.name(chr(c), "")
} | {"h": 0x210E}


def to_mathml(tex, macros=MappingProxyType({}), display=False, annotate=True):
    """The LaTeX formula as a ``<math>`` element; ``math_core.LatexError`` if that is impossible."""
    source = ENVIRONMENT.sub(_inner, tex)
    if _breaks_line(source):
        if not display:
            raise LatexError(r"a line break \\ in an inline formula")
        source = rf"\begin{{aligned}}{source}\end{{aligned}}"
    names = {name.lstrip("\\"): body for name, body in {**MACROS, **macros}.items()}
    converter = LatexToMathML(macros=names, fancy_error=False)
    text = converter.convert_with_local_state(source, displaystyle=display)
    # HTML's named characters (&nbsp;) mean nothing to an XML parser.
    math = ET.fromstring(re.sub(r"&(?!amp;|lt;|gt;)\w+;", lambda m: html.unescape(m[0]), text))
    for element in math.iter():
        _repair(element)
    if annotate and not PLAIN.fullmatch(tex.strip()):
        row = ET.Element("mrow")
        row.extend(list(math))
        for child in list(math):
            math.remove(child)
        semantics = ET.SubElement(math, "semantics")
        semantics.append(row)
        ET.SubElement(semantics, "annotation", encoding="application/x-tex").text = tex.strip()
    return ET.tostring(math, encoding="unicode", short_empty_elements=False)


def _inner(match):
    name = INNER[match[2]]
    return rf"\{match[1]}{{{name}}}" if name else ""


def _breaks_line(tex):
    depth = 0
    for token in re.findall(r"\\begin\b|\\end\b|\\\\", tex):
        if token == r"\\" and depth == 0:
            return True
        depth += {r"\begin": 1, r"\end": -1}.get(token, 0)
    return False


def _repair(element):
    """What math_core 0.9 and this font do not draw well in Chromium."""
    children = list(element)
    # The double bar has no size between one line and two: keep it small around low content.
    tall = any(e.tag in TALL and "accent" not in e.attrib for e in element.iter())
    if element.tag == "mrow" and children and not tall:
        for child in (children[0], children[-1]):
            if child.tag == "mo" and child.text in ("|", "‖") and "minsize" not in child.attrib:
                child.set("stretchy", "false")
    # The smallest root sign is made for digits: over a low letter it would hang below the line.
    if element.tag == "msqrt" and not any(e.tag in TALL for c in children for e in c.iter()):
        ET.SubElement(element, "mspace", height="0.8em")
    # Combining characters are drawn beside their base; math_core uses the low line for both bars.
    if element.tag in ("mover", "munder") and len(children) == 2:
        mark = children[1].text
        if mark == "\u20d7":
            children[1].text = "→"
            children[1].set("style", "font-size: 0.7em")
        elif mark == "\u0332":
            element.remove(children[1])
            element.set("class", "overline" if element.tag == "mover" else "underline")
            element.tag = "mrow"
            del element.attrib["accent" if "accent" in element.attrib else "accentunder"]


def _place(node):
    """Page and line of the nearest ancestor that knows them; in a notebook, cell and line."""
    while node is not None and node.line is None:
        node = node.parent
    if node is None or node.line < 10_000:  # MyST-NB counts lines as 10000 * cell + line
        return node, ""
    cell, line = divmod(node.line, 10_000)
    return node, f" (cell {cell}, line {line} of the cell)"


def _formula(translator, node, display=False):
    tex = node.astext()
    in_title = isinstance(node.parent, (nodes.title, nodes.reference))  # shown as text elsewhere
    try:
        return to_mathml(tex, translator.config.mathml_macros, display, annotate=not in_title)
    except (LatexError, ET.ParseError) as error:
        location, where = _place(node)
        logger.warning(
            "formula cannot be typeset: %s%s; math_core says %s",
            " ".join(tex.split()),
            where,
            str(error).strip(),
            location=location,
            type="mathml",
        )
        return f'<code class="math-error">{html.escape(tex)}</code>'


def visit_math(self, node):
    self.body.append(self.starttag(node, "span", "", CLASS="math notranslate nohighlight"))
    self.body.append(_formula(self, node) + "</span>")
    raise nodes.SkipNode


def visit_math_block(self, node):
    self.body.append(self.starttag(node, "div", CLASS="math notranslate nohighlight"))
    # book.js gives the box a tab stop where the formula is wider than the page.
    self.body.append(f'<div class="formula">{_formula(self, node, display=True)}</div>')
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append("</div>\n")
    raise nodes.SkipNode


def characters(text):
    """Code points that the formulas of an HTML page need from the font."""
    found = {"√"}  # <msqrt> draws it without naming it
    for formula in re.findall(r"<math\b.*?</math>", text, re.S):
        shown = re.sub(r"<annotation\b.*?</annotation>", "", formula, flags=re.S)
        found |= set(html.unescape(re.sub(r"<[^>]*>", "", shown)))
    return {ord(c) for c in found} | {ITALIC[c] for c in found if c in ITALIC}


def write_font(points, path):
    """Write STIX Two Math as woff2 with these code points only, and its licence beside it."""
    options = subset.Options()
    options.flavor = "woff2"
    options.layout_features = ["ccmp", "dtls", "flac", "ssty"]
    options.name_IDs = ["*"]
    options.hinting = False
    options.drop_tables += ["DSIG"]
    font = subset.load_font(str(FONT), options)
    # Primes only occur as superscripts, where Firefox takes the variant for scripts by itself and
    # Chromium does not: without this f′ has a speck in place of a prime.
    for table in font["cmap"].tables:
        for point in (0x2032, 0x2033, 0x2034, 0x2057):
            name = getattr(table, "cmap", {}).get(point)
            if name and f"{name}.ssty" in font.getGlyphSet():
                table.cmap[point] = f"{name}.ssty"
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=points)
    subsetter.subset(font)
    subset.save_font(font, str(path), options)
    name = ttLib.TTFont(FONT, lazy=True)["name"]
    notice = [str(name.getDebugName(i)) for i in (4, 0, 5, 7, 13)]
    path.with_suffix(".txt").write_text("\n\n".join(notice) + "\n", encoding="utf-8")


def _build_finished(app, exception):
    if exception or app.builder.format != "html":
        return
    pages = Path(app.outdir).rglob("*.html")
    points = set().union(*(characters(p.read_text(encoding="utf-8")) for p in pages))
    write_font(points | {ord(" ")}, Path(app.outdir) / "_static" / "stix-two-math.woff2")


def setup(app):
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.add_config_value("mathml_macros", {}, "html", types=[dict])
    app.connect("build-finished", _build_finished)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
