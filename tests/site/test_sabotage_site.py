"""Would the checks of the site notice? Pages broken in one way each, and the untouched page."""

import shutil

import pytest

import site_checks as checks

PAGE = "chapters/01_one.html"

# what to replace, by what, and what a check must then say
BREAKAGES = {
    "no alt text": ('alt="A straight line', 'alt="" data-was="', "picture without alt text"),
    "file name as alt text": (
        "A straight line falls from one to zero.",
        "../_images/loss.png",
        "a file name as alt text",
    ),
    "missing picture": ('src="../_images/', 'src="../_images/gone-', "picture does not decode"),
    "dead anchor": ('href="#formulas"', 'href="#formulae"', "no such anchor: #formulae"),
    "dead link": ('href="claims.html"', 'href="claim.html"', "no such file: claim.html"),
    "another host": (
        "</article>",
        '<script src="https://cdn.example.org/x.js"></script></article>',
        "request to another place: https://cdn.example.org/x.js",
    ),
    "a socket": (
        "</article>",
        "<script>new WebSocket('wss://log.example.org/')</script></article>",
        "request to another place: wss://log.example.org/",
    ),
    "error in a script": (
        "</article>",
        "<script>noSuchFunction()</script></article>",
        "page error: noSuchFunction is not defined",
    ),
    "message on the console": (
        "</article>",
        "<script>console.error('oh no')</script></article>",
        "console: oh no",
    ),
    "low contrast": (
        "</article>",
        '<p style="color: #999; background: #aaa">pale</p></article>',
        "axe color-contrast",
    ),
    "low contrast of code": (
        "</head>",
        "<style>.highlight .k { color: #bbb !important }</style></head>",
        "axe color-contrast",
    ),
    "button without a name": ("</article>", "<button></button></article>", "axe button-name"),
    "formula not typeset": (
        "</article>",
        '<span class="math">\\(x^2\\)</span></article>',
        "no <math> in: \\(x^2\\)",
    ),
    "LaTeX in the text": ("</article>", "<p>$$ x^2 $$</p></article>", "LaTeX left in the text"),
    "formula that failed": (
        "</article>",
        "<math><merror><mtext>x</mtext></merror></math></article>",
        "formula not converted",
    ),
    "too wide": (
        "</article>",
        '<div class="wide" style="width: 900px; height: 9px"></div></article>',
        "px too wide: div.wide",
    ),
    "box without focus": (
        "</article>",
        '<div class="box" style="overflow-x: auto"><p style="width: 2000px">long</p></div>'
        "</article>",
        "scrolls but takes no focus: div.box",
    ),
    "cell that does not open": (
        "<summary>",
        '<summary onkeydown="event.preventDefault()">',
        "does not open and close with Enter: Show the solution",
    ),
    "no font for formulas": (
        "</head>",
        "<style>math { font-family: Nowhere }</style></head>",
        "the font of the formulas is not loaded: Nowhere",
    ),
    "missing style sheet": ("_static/book.css", "_static/boot.css", "status 404"),
}


def problems(browser, folder):
    with checks.serve(folder) as address:
        found = checks.everything(browser, address, PAGE, width=375)
    return found + checks.links(folder)


def test_untouched(browser, small):
    assert problems(browser, small) == []


@pytest.mark.parametrize(("old", "new", "expected"), BREAKAGES.values(), ids=BREAKAGES)
def test_broken(browser, small, tmp_path, old, new, expected):
    folder = tmp_path / "html"
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns("locales", "_sources"))
    page = folder / PAGE
    text = page.read_text(encoding="utf-8")
    assert old in text
    page.write_text(text.replace(old, new, 1), encoding="utf-8")
    found = problems(browser, folder)
    assert [problem for problem in found if expected in problem], found


def test_a_page_that_is_left_owes_no_answer(browser, small):
    """What was asked for and not yet there is broken off; what fails on a page is a fault."""
    with checks.serve(small) as address, checks.opened(browser, address, PAGE) as (page, found):
        page.route("**/lost.png", lambda route: route.abort())
        page.route("**/slow.png", lambda route: None)
        with page.expect_event("requestfailed"):
            page.evaluate("new Image().src = 'lost.png'")
        with page.expect_request("**/slow.png"):
            page.evaluate("new Image().src = 'slow.png'")
        with page.expect_event("requestfailed"):
            page.goto(f"{address}chapters/claims.html")
        assert [problem for problem in found if "slow.png" in problem] == []
        assert [problem for problem in found if "request failed" in problem] == [
            f"request failed: {address}chapters/lost.png"
        ]
