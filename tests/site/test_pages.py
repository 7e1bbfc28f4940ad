"""Do our extensions do what they say, and is each cure of the theme still needed?

The second half opens the small book as Jupyter Book and its theme alone write it. A test that fails
there says that a cure can be dropped.
"""

import re
import sys

import pytest

import site_checks as checks
from site_books import build, write_small_book, write_stock_book
from site_checks import ROOT

sys.path.append(str(ROOT / "chapters" / "_ext"))

import mathml
from math_core import LatexError

PAGE = "chapters/01_one.html"


def text_of(folder, page=PAGE):
    return (folder / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "tex",
    [
        r"\frac{\partial L}{\partial w} = \sum_{j=1}^{N} o_j",
        r"\begin{cases} x & x > 0 \\ 0 & \text{otherwise} \end{cases}",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\left. f \right|_{x = 0} \in \RR^{N \times D}",
        r"\mathbb{1}[Z > 0] \odot \bm{W} \cdot \operatorname{softmax}(z)",
    ],
)
def test_formula(tex):
    assert mathml.to_mathml(tex, display=True).startswith('<math display="block"><semantics>')
    assert mathml.to_mathml(tex, annotate=False).startswith("<math><m")


@pytest.mark.parametrize("name", ["align", "align*", "equation", "gather", "split", "multline"])
def test_environment_carries_no_number_of_its_own(name):
    formula = mathml.to_mathml(rf"\begin{{{name}}} a = b \end{{{name}}}", display=True)
    assert "<mi>a</mi>" in formula
    assert "(1)" not in formula


def test_lines_without_an_environment_become_lines():
    assert mathml.to_mathml(r"a &= b \\ c &= d", display=True).count("<mtr>") == 2


@pytest.mark.parametrize(
    "tex", [r"\nope", r"\frac{a", r"a & b", r"a \\ b", r"\begin{nope} a \end{nope}"]
)
def test_a_formula_that_cannot_be_set_is_an_error(tex):
    with pytest.raises(LatexError):
        mathml.to_mathml(tex)


def test_macro():
    assert mathml.to_mathml(r"\NN", {r"\NN": r"\mathbb{N}"}, annotate=False) == (
        "<math><mi>ℕ</mi></math>"
    )


def test_double_bars_stay_low_around_low_content():
    low = mathml.to_mathml(r"\left\lVert \bar g \right\rVert", annotate=False)
    high = mathml.to_mathml(r"\left\lVert \frac{a}{b} \right\rVert", annotate=False)
    assert low.count('<mo stretchy="false">‖</mo>') == 2
    assert 'stretchy="false"' not in high


def test_root_signs_stand_on_the_line():
    strut = '<mspace height="0.8em"></mspace></msqrt>'
    assert strut in mathml.to_mathml(r"2\sqrt{x}", annotate=False)
    assert strut not in mathml.to_mathml(r"\sqrt{\frac{2}{n}}", annotate=False)


def test_characters_of_a_page():
    page = "<p>z</p><math><mi>x</mi><mo>&lt;</mo><annotation>q</annotation></math>"
    assert mathml.characters(page) == {ord(c) for c in "√x𝑥<"}


def test_font_has_what_formulas_need(small):
    font = mathml.ttLib.TTFont(small / "_static" / "stix-two-math.woff2")
    characters = font.getBestCmap()
    assert {ord(c) for c in "√∑𝑥′‖"} <= characters.keys()
    whole = mathml.ttLib.TTFont(mathml.FONT)
    prime, script_prime = font["glyf"][characters[ord("′")]], whole["glyf"]["minute.ssty"]
    assert (prime.yMin, prime.yMax) == (script_prime.yMin, script_prime.yMax)
    variants = font["MATH"].table.MathVariants
    place = variants.VertGlyphCoverage.glyphs.index(characters[ord("(")])
    assert len(variants.VertGlyphConstruction[place].MathGlyphVariantRecord) > 10


def test_equations_are_numbered_and_linked(small):
    page = text_of(small)
    block = page.partition('id="equation-eq-sum"')[2].partition("</div>\n")[0]
    assert '<span class="eqno">(1.1)<a class="headerlink" href="#equation-eq-sum"' in block
    assert 'href="#equation-eq-sum">(1.1)</a>' in page


def test_title_holds_no_latex(small):
    assert re.search(r"<title>\s*1\. One of everything, x2 ", text_of(small))


@pytest.mark.parametrize(("book", "theme"), [("small", "dark"), ("stock", "")])
def test_dark_before_the_script_of_the_theme(browser, request, book, theme):
    """Ours is dark from the first paint; stock has no colours until the script has run."""
    context = browser.new_context(color_scheme="dark")
    context.route(re.compile("pydata-sphinx-theme.js|^https:"), lambda route: route.abort())
    page = context.new_page()
    page.goto((request.getfixturevalue(book) / PAGE).as_uri())
    found = page.evaluate("document.documentElement.dataset.theme")
    context.close()
    assert found == theme, "drop the script in layout.html?"


def test_a_broken_formula_fails_the_build(tmp_path):
    write_small_book(tmp_path / "source")
    index = tmp_path / "source" / "chapters" / "index.md"
    index.write_text("# A small book\n\nText.\n\nBroken: $\\nope{x}$.\n", encoding="utf-8")
    run = build(tmp_path / "source", tmp_path)
    assert run.returncode
    assert re.search(r"index\.md:5: WARNING: formula cannot be typeset: \\nope\{x\}", run.stderr)


def test_claims(small):
    page = text_of(small, "chapters/claims.html")
    items = re.findall(r'<dt id="claim-(\w+)">(.*?)</dd>', page, re.S)
    assert [name for name, _ in items] == ["a01", "b02"]  # C03 belongs to a chapter to come
    shown, untestable = (text for _, text in items)
    assert "✗ wrong" in shown
    assert "<code" in shown
    assert "<math>" in shown
    assert 'href="01_one.html#formulas"' in shown
    assert "on this page only" in untestable


def test_single_page_for_printing(tmp_path):
    write_small_book(tmp_path / "source")
    run = build(tmp_path / "source", tmp_path, "singlehtml")
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def stock_problems(browser, stock):
    """What is wrong with the page of the stock book."""
    with checks.serve(stock) as address, checks.opened(browser, address, PAGE) as (page, problems):
        page.wait_for_timeout(500)
        return problems + checks.accessible(page)


@pytest.mark.parametrize(
    ("sign", "cure"),
    [
        ("THEBE_JS_URL", "pages.drop_thebe"),
        ("invalid theme mode", "html_context in _config.yml"),
        ("request to another place: https://cdn.jsdelivr.net/npm/mathjax", "the renderer mathml"),
        ("label-content-name-mismatch (serious): .search-button-field", "search-button-field.html"),
        ("label-content-name-mismatch (serious): .theme-switch-button", "theme-switcher.html"),
        ("label-content-name-mismatch (serious): summary", "pages.visit_hidden_cell"),
        ("aria-allowed-role (minor)", "pages.visit_citation"),
        ("region (moderate): .sidebar-primary-item", "navbar-logo.html"),
        ("summary-name (serious)", "pages.name_nested_pages"),
    ],
)
def test_cure_is_needed_in_the_browser(stock_problems, sign, cure):
    assert [p for p in stock_problems if sign in p], f"drop {cure}? found: {stock_problems}"


def test_cure_is_needed_in_the_files(stock):
    page = text_of(stock)
    static = stock / "_static"
    assert "scripts/fontawesome.js" in page, "drop the block css of layout.html"
    assert "searchindex.js" in page, "drop the block extrahead of layout.html"
    assert "jb-print-docs-body" in page, "drop the block docs_body of layout.html"
    for name in ("*.map", "*.po", "logo_*"):
        assert list(static.rglob(name)), f"drop {name} in weight.drop_unused_files"
    for name in ("design-tabs.js", "togglebutton.js", "togglebutton.css"):
        assert f"/{name}" in page, f"drop {name} in weight.USED_WITH"
    assert '<span class="n">' in page, "drop weight.Formatter"
    assert '<span class="pre">' in page, "drop weight.depart_literal"
    assert list((stock / "_images").glob("*.png")), "drop weight.rename_pictures"
    sheets = sum(path.stat().st_size for path in static.rglob("*.css"))
    assert sheets > 400_000, "drop weight.drop_unused_rules"
    assert 'rel="icon"' not in page, "drop the favicon in _config.yml"
    assert 'loading="lazy"' not in page, "drop that line of pages.visit_image"
    assert not re.search(r"<img[^>]* height=", page), "drop the sizes in pages.visit_image"
    fonts = sum(path.stat().st_size for path in static.rglob("*.woff2"))
    assert fonts > 200_000, "drop weight.subset_icons"


def test_cure_of_the_single_page_is_needed(tmp_path):
    write_stock_book(tmp_path / "source")
    run = build(tmp_path / "source", tmp_path, "singlehtml")
    assert "unknown node type" in run.stderr, "drop pages.merge_singlehtml"
