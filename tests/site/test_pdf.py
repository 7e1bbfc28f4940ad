"""Is the whole book in its PDF, in order, with its words for pictures and formulas, and no wider?

The PDF of the book is made once and taken apart; small ones, broken in one way each, show that the
checks would notice.
"""

import importlib.util
import shutil

import pytest

import pdf_checks as checks
import site_checks
from site_checks import ROOT

TITLE = "Follow the Gradient"
NAMES = ("outline", "pictures", "formulas", "links", "complete", "blank", "sideways")


def _tool():
    spec = importlib.util.spec_from_file_location("pdf", ROOT / "tests" / "tools" / "pdf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pdf = _tool()


@pytest.fixture(scope="module")
def printed(browser, book, tmp_path_factory):
    """The PDF of the book, what should be in it, and what was too wide for it."""
    path = tmp_path_factory.mktemp("pdf") / "book.pdf"
    wide = pdf.make(browser, book, path)
    opened = checks.Book(path)
    yield opened, checks.Expected.of(book, pdf.contents()), wide
    opened.close()


def test_nothing_is_wider_than_the_paper(printed):
    assert printed[2] == []


def test_metadata(printed):
    assert checks.metadata(printed[0], TITLE) == []


@pytest.mark.parametrize("name", NAMES)
def test_book(printed, name):
    assert getattr(checks, name)(printed[0], printed[1]) == []


def test_size(printed):
    """A file one can send, and a number of pages one can hold."""
    assert printed[0].path.stat().st_size < 25_000_000
    assert len(printed[0].texts) < 800


@pytest.fixture(scope="module")
def source(small):
    """The folder that the small book was built from."""
    return small.parents[1] / "source"


def problems(browser, html, source, path, expected):
    wide = pdf.make(browser, html, path, source)
    opened = checks.Book(path)
    found = wide + checks.metadata(opened, "A small book")
    for name in NAMES:
        found += getattr(checks, name)(opened, expected)
    opened.close()
    return found


@pytest.fixture(scope="module")
def expected(small, source):
    return checks.Expected.of(small, pdf.contents(source))


def test_untouched(browser, small, source, expected, tmp_path):
    assert problems(browser, small, source, tmp_path / "small.pdf", expected) == []


# what to replace on the page, by what, and what a check must then say
END = "</article>"
BREAKAGES = {
    "too wide": (END, f'<div class="w" style="width: 900px">.</div>{END}', "div.w is"),
    "cut": (
        END,
        '<div class="c" style="width: 9em; overflow: hidden"><p style="width: 30em">.</p></div>'
        + END,
        "div.c is",
    ),
    "no margin": (END, f"<style>@page {{ margin-right: 5mm }}</style>{END}", "into the margin"),
    "no alt text": ('alt="A straight line', 'alt="" data-was="', "no picture says: A straight"),
    "lost formula": (
        r"f'(x_i) = \sqrt{\frac{a}{b}}</annotation>",
        "</annotation>",
        "formula lost",
    ),
    "hidden heading": ("<h2>Boxes", '<h2 aria-hidden="true">Boxes', "in the outline of the PDF"),
    "lost heading": ("<h2>Boxes", "<h2>Bottles", "'Boxes'"),
    "lost text": ("It falls", "It rises", "does not end with"),
    "a blank page": (
        END,
        '<div style="break-before: page"></div><div style="break-before: page">.</div>' + END,
        "is blank",
    ),
    "link elsewhere": (END, f'<a href="mailto:x@example.org">x</a>{END}', "links to mailto:"),
    "lost link": (
        'href="#equation-eq-sum">(1.1)',
        ">(1.1)",
        "no link leads to 01_one.equation-eq-sum",
    ),
    "another host": (
        END,
        f'<img alt="" src="https://cdn.example.org/x.png">{END}',
        "loads what is not in",
    ),
    "no language": ('"en"', '""', "language: None"),
}


@pytest.mark.parametrize(("old", "new", "said"), BREAKAGES.values(), ids=BREAKAGES)
def test_broken(browser, small, source, expected, tmp_path, old, new, said):
    html = tmp_path / "html"
    shutil.copytree(small, html, ignore=shutil.ignore_patterns("locales", "_sources"))
    name = "index.html" if said.startswith("language") else "01_one.html"
    page = html / "chapters" / name
    text = page.read_text(encoding="utf-8")
    assert old in text
    page.write_text(text.replace(old, new, 1), encoding="utf-8")
    try:
        found = problems(browser, html, source, tmp_path / "broken.pdf", expected)
    except ValueError as error:
        found = [str(error)]
    assert [problem for problem in found if said in problem], found


def paper(page):
    """What a page printed from the dark screen still shows of the screen."""
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    return page.evaluate("""() => {
        const problems = [];
        const light = colour => {
            const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
            return a === 0 ? null : (0.299 * r + 0.587 * g + 0.114 * b) / 255;
        };
        const article = document.querySelector("article");
        for (const e of document.querySelectorAll("body *")) {
            const text = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
            const control = e.matches("button, input, nav, aside, footer, .headerlink");
            if (!text && !control || !e.checkVisibility() || !e.getClientRects().length) continue;
            if (control || !article.contains(e))
                problems.push(`${e.tagName} ${e.className} is printed`);
            else if (light(getComputedStyle(e).color) > 0.6)
                problems.push(`pale: ${e.tagName} ${e.textContent.slice(0, 20)}`);
            const ground = light(getComputedStyle(e).backgroundColor);
            if (ground !== null && ground < 0.8) problems.push(`dark ground: ${e.className}`);
        }
        if (!(light(getComputedStyle(document.body).backgroundColor) > 0.99))
            problems.push("the paper is not white");
        return problems;
    }""")


def test_page_printed_from_the_dark_screen(browser, small):
    """White paper, dark ink, the article and nothing around it; the screen is as before."""
    name = "chapters/01_one.html"
    with site_checks.opened(browser, f"{small.as_uri()}/", name, scheme="dark") as (page, _):
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert paper(page) == []
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("lost", ["print.css", "print.js"])
def test_paper_needs_it(browser, small, tmp_path, lost):
    shutil.copytree(small, tmp_path / "html", ignore=shutil.ignore_patterns("locales", "_sources"))
    (tmp_path / "html" / "_static" / lost).write_text("", encoding="utf-8")
    base, name = f"{(tmp_path / 'html').as_uri()}/", "chapters/01_one.html"
    with site_checks.opened(browser, base, name, scheme="dark") as (page, _):
        assert paper(page) != []
