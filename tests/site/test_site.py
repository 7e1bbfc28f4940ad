"""Does every page of the built book open offline, whole, and for everybody?"""

import html
import json
import re
import sys
from collections import Counter

import nbformat
import pytest
import yaml
from markdown_it import MarkdownIt
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.colon_fence import colon_fence_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin

import site_checks as checks
from site_checks import ROOT

sys.path.append(str(ROOT / "chapters" / "_ext"))

import mathml


def documents():
    """The documents in ``_toc.yml``, in its order."""
    found = []

    def walk(item):
        if isinstance(item, dict):
            found.extend(item[key] for key in ("root", "file") if key in item)
            item = list(item.values())
        if isinstance(item, list):
            for part in item:
                walk(part)

    walk(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))
    return found


DOCUMENTS = documents()
PAGES = [f"{name}.html" for name in DOCUMENTS] + ["search.html", "genindex.html"]
# Each page in light and in dark, on a desk and on a phone; every fourth in all combinations, since
# what the scheme and what the width change is the same style sheet's work on all pages. The whole
# of the checks once for each page, and in every view of every fourth.
VIEWS = [
    (name, scheme, width, k % 4 == 0 or scheme == "light")
    for k, name in enumerate(PAGES)
    for scheme, width in (("light", 1280), ("dark", 375), ("dark", 1280), ("light", 375))
    if (scheme == "light") == (width == 1280) or k % 4 == 0
]


@pytest.fixture(scope="module")
def server(book):
    with checks.serve(book) as address:
        yield address


@pytest.mark.parametrize(("name", "scheme", "width", "whole"), VIEWS)
def test_page(browser, server, name, scheme, width, whole):
    assert checks.everything(browser, server, name, scheme, width, whole) == []


@pytest.mark.parametrize("name", PAGES)
def test_page_from_a_folder(browser, book, name):
    with checks.opened(browser, f"{book.as_uri()}/", name) as (page, problems):
        assert problems + checks.typeset(page) + checks.pictures(page) == []


def test_links(book):
    assert checks.links(book) == []


def test_every_page_is_known(book):
    pages = {
        path.relative_to(book).as_posix()
        for path in book.rglob("*.html")
        if "_static" not in path.parts
    }
    assert pages - set(PAGES) == {"index.html"}  # it leads to the first page
    assert set(PAGES) <= pages


@pytest.mark.parametrize("document", DOCUMENTS)
def test_formulas_of_the_source(book, document):
    """Each formula written in a source is on its page, and none was lost or changed. A letter or a
    number alone carries no LaTeX."""
    written = Counter(map(_bare, formulas(source_text(document))))
    written = {tex: n for tex, n in written.items() if not mathml.PLAIN.fullmatch(tex)}
    page = (book / f"{document}.html").read_text(encoding="utf-8")
    found = re.findall(r"<annotation\b[^>]*>(.*?)</annotation>", page, re.S)
    shown = Counter(_bare(html.unescape(tex)) for tex in found)
    assert Counter(written) - shown == Counter()


def _bare(tex):
    return "".join(tex.split())


def source_text(document):
    """The Markdown of a document: of a notebook, its cells and captions."""
    path = ROOT / f"{document}.ipynb"
    if not path.exists():
        return (ROOT / f"{document}.md").read_text(encoding="utf-8")
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        parts.append(cell.metadata.get("mystnb", {}).get("figure", {}).get("caption", ""))
    return "\n\n".join(parts)


def formulas(text):
    """LaTeX of the formulas in a Markdown text, boxes included, headings not (they carry none)."""
    parser = MarkdownIt("commonmark").enable("table")
    parser.use(dollarmath_plugin, allow_labels=True).use(amsmath_plugin).use(colon_fence_plugin)
    found, in_heading = [], False
    for token in parser.parse(text):
        in_heading = token.type == "heading_open" or (in_heading and token.type != "heading_close")
        if token.type in ("math_block", "math_block_label", "amsmath"):
            found.append(token.content)
        elif token.type in ("fence", "colon_fence"):
            if token.info.startswith("{") and not token.info.startswith(("{code", "{math")):
                title = token.info.partition("}")[2]
                found += formulas(f"{title}\n\n{token.content}")
        elif not in_heading:
            inline = token.children or []
            found += [child.content for child in inline if child.type.startswith("math_inline")]
    return found


def test_claims_link_to_what_shows_them(book):
    """Each claim of a chapter in the book has its anchor; a cell that names it is linked."""
    page = (book / "chapters" / "claims.html").read_text(encoding="utf-8")
    numbers = (re.match(r"\d\d(?=_)", name.rsplit("/")[-1]) for name in DOCUMENTS)
    present = {int(number[0]) for number in numbers if number}
    ledger = json.loads((ROOT / "tests" / "claims.json").read_text(encoding="utf-8"))
    expected = [c for c in ledger if present & set(c["chapters"])]
    assert [c["id"] for c in expected if f'id="claim-{c["id"].lower()}"' not in page] == []
    for document in DOCUMENTS:
        path = ROOT / f"{document}.ipynb"
        if not path.exists():
            continue
        for cell in nbformat.read(path, as_version=4).cells:
            for claim in cell.metadata.get("claims", []):
                start = page.find(f'id="claim-{claim.lower()}"')
                assert start >= 0, f"{document}: claim {claim} is not on the claims page"
                item = page[start : page.index("</dd>", start)]
                assert f'href="{document.rsplit("/")[-1]}.html#' in item, claim


def test_no_other_host_and_no_mathjax(book):
    """Nothing that a page loads by itself is elsewhere, in pages no browser test opens too."""
    for path in book.rglob("*.html"):
        text = path.read_text(encoding="utf-8").lower()
        for sign in ("mathjax@", "window.mathjax", "mathjax.js", "thebe", 'src="http', "//cdn"):
            assert sign not in text, f"{path.relative_to(book)} holds {sign}"
