"""Does the title page let each reader in, and is what it shows the book's own?"""

import base64
import io
import re
from urllib.parse import unquote

import pytest
from PIL import Image, ImageChops

from bpkit.diagnosis.faults import FAULTS, for_error
from site_checks import ROOT, opened, serve
from test_symptoms_page import text_of
from tools import refresh

PAGE = "chapters/index.html"
NOTEBOOKS = sorted((ROOT / "chapters").glob("*.ipynb"))
SAID = "RuntimeError: Trying to backward through the graph a second time\n(50 % & <b>more</b>#x)"


def below(page, height):
    """What of the two doors does not show on a screen of this height, unscrolled."""
    return page.evaluate(
        """height => [...document.querySelectorAll(".door, .ask button, .door-button")]
            .filter(e => e.getBoundingClientRect().bottom > height || !e.checkVisibility())
            .map(e => e.textContent.trim().slice(0, 40))""",
        height,
    )


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (375, 667)])
def test_both_doors_show_before_any_scrolling(book, browser, width, height):
    with opened(browser, f"{book.as_uri()}/", PAGE, "light", width) as (page, problems):
        page.set_viewport_size({"width": width, "height": height})
        assert page.locator(".door").count() == 2
        assert below(page, height) == []
        page.locator(".door").first.evaluate("e => e.style.marginTop = '20rem'")
        assert below(page, height)
        assert problems == []


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_a_message_reaches_the_page_that_looks_it_up(book, browser, scheme):
    with serve(book) as served:
        base = served if scheme == "http" else f"{book.as_uri()}/"
        with opened(browser, base, PAGE) as (page, problems):
            asked = []
            page.on("request", lambda request: asked.append(request.url))
            page.get_by_label("Paste the error or the warning").fill(SAID)
            page.keyboard.press("Tab")
            page.keyboard.press("Enter")
            found = page.locator(".message-found a")
            found.first.wait_for()
            slugs = found.evaluate_all("a => a.map(each => each.dataset.slug)")
            assert slugs == [fault.slug for fault in for_error(SAID)] != []
            assert page.locator("#message").input_value() == SAID
            assert page.url.startswith(f"{base}chapters/symptoms.html#")
            # Behind the # a message stays with the reader.
            assert not [url for url in asked if "backward" in unquote(url.partition("#")[0])]
            assert problems == []


def test_without_a_message_or_without_scripts_the_door_opens_too(book, browser):
    for scripts in (True, False):
        context = browser.new_context(java_script_enabled=scripts)
        page = context.new_page()
        page.goto(f"{book.as_uri()}/{PAGE}")
        page.locator(".ask textarea").fill("" if scripts else SAID)
        page.locator(".ask button").click()
        page.wait_for_url("**/symptoms.html*")
        assert "message" not in page.url
        context.close()


def test_the_first_links_of_the_doors(book):
    page = (book / PAGE).read_text(encoding="utf-8")
    doors = page.partition('class="doors')[2].partition("<figure")[0]
    for link in ("symptoms.html#what-you-see", "08e_diagnosis.html", "01_graphs.html"):
        assert f'href="{link}"' in doors


def test_the_map_lists_every_notebook_with_its_title_and_its_minutes(book):
    page = (book / PAGE).read_text(encoding="utf-8")
    entry = r'<li><p>([\d.]+)\s+<a class="[^"]*" href="(\w+)\.html">(.*?)</p>\s*<p>(.*?)</p>'
    entries = re.findall(entry, page, re.S)
    assert [name for _, name, _, _ in entries] == [path.stem for path in NOTEBOOKS]
    for number, name, head, line in entries:
        nb = refresh.read(ROOT / "chapters" / f"{name}.ipynb")
        title, _, time = text_of(head).partition(" min")[0].rpartition(" ")
        written = re.match(r"# (.*)", nb.cells[0].source)[1].translate(str.maketrans("'", "’"))
        assert (title, int(time)) == (written, refresh.minutes(nb)[0])
        exercises = re.search(r"(\d+) min of exercises", text_of(head))
        assert int(exercises[1] if exercises else 0) == refresh.minutes(nb)[1]
        assert number.split(".")[0] == name[:2].lstrip("0")
        assert len(text_of(line)) > 20


def test_the_picture_is_the_notebooks(book):
    page = (book / PAGE).read_text(encoding="utf-8")
    figure = page.partition('class="of-the-book')[2].partition("</figure>")[0]
    source, alt = (re.search(rf'{key}="([^"]*)"', figure)[1] for key in ("src", "alt"))
    cells = refresh.read(ROOT / "chapters" / "08_failure_modes.ipynb").cells
    (cell,) = (
        c
        for c in cells
        if c.metadata.get("mystnb", {}).get("figure", {}).get("name") == "fig:where"
    )
    assert text_of(alt) == " ".join(cell.metadata.mystnb.image.alt.split())
    (png,) = (o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {}))
    stored = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    with Image.open((book / PAGE).parent / source) as shown:
        difference = ImageChops.difference(shown.convert("RGB"), stored)
    assert max(high for _, high in difference.getextrema()) < 16  # fewer colours, perhaps


def test_a_picture_uses_the_whole_width_of_a_phone(book, browser):
    """So that the 11 points of a figure 720 pixels wide are 9 pixels on the screen."""
    with opened(browser, f"{book.as_uri()}/", "chapters/02_chain_rule.html", "dark", 375) as (
        page,
        _,
    ):
        boxes = page.locator("figure > img").evaluate_all(
            "all => all.map(e => e.getBoundingClientRect()).map(box => [box.left, box.right])"
        )
        assert boxes
        assert all(0 <= left < 3 and 370 < right <= 375 for left, right in boxes), boxes


def test_names_of_faults_are_not_typed_on_the_page():
    """The page leaves the faults to the catalogue, so that none can be out of date."""
    text = (ROOT / "chapters" / "index.md").read_text(encoding="utf-8")
    assert [slug for slug in FAULTS if f"`{slug}`" in text] == []
