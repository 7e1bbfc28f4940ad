"""Is the book light, and does it look as if nothing had been left out?

A page has a budget, and so has what all pages load. What ``_ext/weight.py`` leaves out is compared
with the small book as Sphinx and the theme write it.
"""

import json
import re
import shutil
import sys

import pytest
import tinycss2
from PIL import Image

from site_checks import ROOT, opened, serve
from test_pages import PAGE
from tools import costs

sys.path.append(str(ROOT / "chapters" / "_ext"))

import weight

PAGE_BYTES = 400_000  # HTML, pictures, and the scripts and styles that not every page needs
SHARED_BYTES = 340_000  # what every page loads: half of it the theme's style sheet and Bootstrap
SHIFT = 0.05  # half of what web.dev calls a good cumulative layout shift


def heavy(name, files, budget):
    """Empty if the files keep within the budget, else a line with the largest of them."""
    total = sum(files.values())
    if total <= budget:
        return []
    largest = sorted(files, key=files.get, reverse=True)[:4]
    parts = ", ".join(f"{file.rsplit('/')[-1]} {files[file]:,}" for file in largest)
    return [f"{name}: {total:,} bytes, allowed are {budget:,}; the largest: {parts}"]


def over_budget(folder):
    pages, shared = costs.weigh(folder)
    found = [line for name, files in pages.items() for line in heavy(name, files, PAGE_BYTES)]
    return found + heavy("what every page loads", shared, SHARED_BYTES)


def test_budget(book):
    assert over_budget(book) == []


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("chapters/index.html", "chapters/index: "),
        ("_static/book.css", "what every page loads: "),
        ("_images/{picture}", "chapters/01_graphs: "),
    ],
)
def test_what_grows_is_named(book, tmp_path, file, said):
    folder = tmp_path / "html"
    shutil.copytree(book, folder, ignore=shutil.ignore_patterns("_sources", "locales"))
    page = (folder / "chapters" / "01_graphs.html").read_text(encoding="utf-8")
    file = file.format(picture=re.search(r'src="\.\./_images/([^"]+)"', page)[1])
    with (folder / file).open("ab") as stream:
        stream.write(b" " * PAGE_BYTES)
    (line,) = over_budget(folder)
    assert line.startswith(said)
    assert f"the largest: {file.rsplit('/')[-1]} " in line


def test_what_is_weighed_is_what_a_browser_loads(book, browser):
    """Nothing comes on the way that the reading of the HTML does not see."""
    pages, shared = costs.weigh(book)
    name = "chapters/01_graphs"
    asked = set()
    with serve(book) as base:
        page = browser.new_page()
        page.on("request", lambda request: asked.add(re.split("[?#]", request.url)[0]))
        page.goto(f"{base}{name}.html", wait_until="networkidle")
        page.close()
    assert asked <= {f"{base}{file}" for file in {**pages[name], **shared}}


def test_record_of_the_cost_page(book):
    """tests/costs.json says what is there; ``python tests/tools/costs.py`` renews it."""
    record = json.loads(costs.RECORD.read_text(encoding="utf-8"))
    pages, shared = costs.weigh(book)
    assert list(record["pages"]) == list(pages), "other pages: run tests/tools/costs.py"
    said = {"what every page loads": record["shared"]}
    found = {"what every page loads": sum(shared.values())}
    for name, files in pages.items():
        page = record["pages"][name]
        assert page["cells"] == costs.code_cells(name), f"{name}: run tests/tools/costs.py"
        assert (page.get("seconds", 0) > 0) == (page["cells"] > 0), name
        said[name] = page["html"] + page["pictures"] + page["scripts"]
        found[name] = sum(files.values())
    off = {name: (said[name], found[name]) for name in found if not _close(said[name], found[name])}
    assert off == {}, f"recorded and found: {off}; build the book and run tests/tools/costs.py"


def _close(said, found):
    return abs(said - found) <= 0.05 * found + 500  # the cost page itself changes with the record


def test_cost_page_shows_the_record(book):
    page = (book / "chapters" / "cost.html").read_text(encoding="utf-8")
    record = json.loads(costs.RECORD.read_text(encoding="utf-8"))["pages"]
    rows = re.findall(r"<tr\b.*?</tr>", page, re.S)[1 : len(record) + 1]
    for row, (name, numbers) in zip(rows, record.items(), strict=True):
        assert 'href="#"' in row or f'{name.rsplit("/")[-1]}.html"' in row
        cells = re.findall(r'<td class="text-right"><p>(.*?)</p>', row)
        assert cells[0] == (str(numbers["cells"]) if numbers["cells"] else "–")
        assert cells[2] == f"{numbers['html'] / 1000:.0f}"
    shown = {path.stem: path for path in (ROOT / "tests" / "benchmarks").glob("*.json")}
    source = (ROOT / "chapters" / "cost.md").read_text(encoding="utf-8")
    assert set(re.findall(r"{benchmark} (\w+)", source)) == set(shown)


# What is left out is not missed


LOOKS = r"""() => {
    const looks = [];
    const texts = document.createTreeWalker(
        document.querySelector("article"), NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const style = getComputedStyle(texts.currentNode.parentElement);
        const look = [style.color, style.fontWeight, style.fontStyle].join();
        for (const letter of texts.currentNode.data)
            if (letter.trim() && texts.currentNode.parentElement.closest(".cell_input pre"))
                looks.push(`${letter} ${look}`);
    }
    return looks;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_has_the_colours_of_the_theme(browser, small, stock, scheme):
    """Letter by letter, where three quarters of the spans are left out."""
    looks = []
    for folder in (small, stock):
        context = browser.new_context(color_scheme=scheme, offline=True)
        page = context.new_page()
        page.goto((folder / PAGE).as_uri())
        page.evaluate("scheme => document.documentElement.dataset.theme = scheme", scheme)
        looks.append(page.evaluate(LOOKS))
        context.close()
    assert looks[0] == looks[1]
    assert len({look.partition(" ")[2] for look in looks[0]}) >= 5


def test_pictures_look_the_same(small, stock):
    (ours,) = (small / "_images").iterdir()
    (theirs,) = (stock / "_images").iterdir()
    assert ours.stat().st_size < 0.4 * theirs.stat().st_size
    with Image.open(ours) as a, Image.open(theirs) as b:
        assert a.format == "WEBP"
        assert weight.looks_like(a.convert("RGB"), b.convert("RGB"))


def test_a_picture_of_many_colours_keeps_them():
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    bands = [noise.getchannel(0), noise.getchannel(1).rotate(90), noise.getchannel(2).rotate(180)]
    colourful = Image.merge("RGB", bands)
    assert weight.few_colours(colourful).tobytes() == colourful.tobytes()


def test_a_flat_area_keeps_its_colour():
    """A tint that becomes grey shows, be it ever so pale."""
    tint, grey = (Image.new("RGB", (64, 64), colour) for colour in ("#f7fbff", "#f7f7f7"))
    assert not weight.looks_like(grey, tint)
    assert not weight.looks_like(Image.new("RGB", (64, 64), "#f7fbfd"), tint)


def test_rules_that_cannot_apply_are_dropped():
    css = (
        "/* a note *//*! a licence */@font-face{font-family:F}.used,.gone{a:b}.used.gone{c:d}"
        "p>#gone{e:f}@media print{.gone{g:h}.used:not(.gone) p{i:j}}@media screen{.gone{k:l}}"
        "[data-x=gone] a:hover{m:n}.dropdown-menu{o:p}"
    )
    assert weight.purge(css, {"used"}) == (
        "/*! a licence */@font-face{font-family:F}.used{a:b}"
        "@media print{.used:not(.gone) p{i:j}}[data-x=gone] a:hover{m:n}.dropdown-menu{o:p}"
    )


def selectors(rules):
    """All selectors of a style sheet, in media queries too."""
    for rule in rules:
        if rule.type == "qualified-rule":
            yield from (tinycss2.serialize(s).strip() for s in weight.selectors(rule.prelude))
        elif rule.type == "at-rule" and rule.lower_at_keyword == "media":
            yield from selectors(tinycss2.parse_rule_list(rule.content, True, True))


def test_no_script_makes_use_of_a_rule_that_was_dropped(browser, book, stock):
    """Classes that appear while a reader uses the page, which no HTML file has: all are kept."""
    watch = """() => {
        window.seen = new Set();
        const look = e => [...e.classList, e.id].forEach(name => seen.add(name));
        document.querySelectorAll("*").forEach(look);
        new MutationObserver(records => {
            for (const {target} of records) {
                look(target);
                target.querySelectorAll?.("*").forEach(look);
            }
        }).observe(document, {subtree: true, childList: true, attributeFilter: ["class", "id"]});
    }"""
    seen = set()
    with serve(book) as base:
        for name, width in (("chapters/01_graphs.html", 1280), ("chapters/symptoms.html", 375)):
            with opened(browser, base, name, "light", width) as (page, problems):
                page.evaluate(watch)
                page.locator(".theme-switch-button:visible").hover()
                page.locator(".tooltip.show").wait_for()
                for used in (
                    ".dropdown-download-buttons > button",
                    ".theme-switch-button",
                    ".sidebar-toggle",
                    ".copybtn",
                    ".search-button__button",
                    "article summary",
                ):
                    page.locator(used).evaluate_all("all => all.slice(0, 2).map(e => e.click())")
                page.evaluate("scrollTo(0, 5000)")
                page.wait_for_timeout(100)
                seen |= set(page.evaluate("[...seen]"))
                assert problems == []
    assert {"show", "tooltip"} <= seen
    sheets = "styles/pydata-sphinx-theme.css", "styles/sphinx-book-theme.css", "basic.css"
    for sheet in (*sheets, "copybutton.css", "sphinx-design.min.css"):
        theirs, ours = (
            (folder / "_static" / sheet).read_text(encoding="utf-8") for folder in (stock, book)
        )
        needed = set(selectors(tinycss2.parse_stylesheet(weight.purge(theirs, seen))))
        assert needed - set(selectors(tinycss2.parse_stylesheet(ours))) == set()


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_search_finds(browser, book, scheme):
    """From the box of a page, which no longer loads the index itself."""
    with serve(book) as served:
        base = served if scheme == "http" else f"{book.as_uri()}/"
        with opened(browser, base, "chapters/index.html") as (page, problems):
            page.keyboard.press("Control+k")
            page.locator("#pst-search-dialog input").fill("momentum")
            page.keyboard.press("Enter")
            page.wait_for_url("**/search.html?q=momentum*")
            result = page.locator("#search-results a[href*='06_optimizers']").first
            result.wait_for()
            # Excerpts are fetched, which a browser does not do from a folder.
            assert scheme == "file" or problems == []


STEPS = """async () => {
    const wait = () => new Promise(done => setTimeout(done, 20));
    for (let y = 0; y < document.documentElement.scrollHeight; y += innerHeight) {
        scrollTo({top: y, behavior: "instant"});
        await wait();
    }
    await wait();
    return window.shift;
}"""
WATCH = """window.shift = 0;
    new PerformanceObserver(list => list.getEntries().forEach(e => window.shift += e.value))
        .observe({type: "layout-shift", buffered: true});"""


def shift(browser, base, name, width):
    """The sum of all layout shifts from the first paint to the end of the page."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(base + name, wait_until="load")
    found = page.evaluate(STEPS)
    context.close()
    return found


HEAVY = ["chapters/05_training_loop.html", "chapters/06_optimizers.html", "chapters/symptoms.html"]


@pytest.mark.parametrize(("name", "width"), [(HEAVY[0], 1280), (HEAVY[1], 375), (HEAVY[2], 1280)])
def test_nothing_jumps_while_a_page_loads_and_scrolls(browser, book, name, width):
    with serve(book) as base:
        assert shift(browser, base, name, width) < SHIFT


def test_a_picture_without_its_size_makes_the_text_jump(browser, book, tmp_path):
    folder = tmp_path / "html"
    shutil.copytree(book, folder, ignore=shutil.ignore_patterns("_sources", "locales"))
    page = folder / HEAVY[0]
    text = page.read_text(encoding="utf-8")
    late = re.sub(r'<img width="\d+" height="\d+" ', "<img ", text)
    page.write_text(late, encoding="utf-8")
    with serve(folder) as base:  # a picture that comes early enough moves nothing
        assert any(shift(browser, base, HEAVY[0], width) >= SHIFT for width in (1280, 375) * 3)


def test_files_that_nothing_loads(book):
    """No script of a megabyte, no source maps, fonts of the used characters only."""
    files = [path for path in book.rglob("*") if path.is_file()]
    unused = [p for p in files if p.suffix in (".map", ".po", ".mo") or p.name == "fontawesome.js"]
    assert unused == []
    fonts = {p.name: p.stat().st_size for p in files if p.suffix in (".woff2", ".ttf")}
    assert len(fonts) == 4  # three of icons, one of formulas
    assert sum(fonts.values()) < 60_000, fonts
    assert (book / "_static" / "stix-two-math.txt").read_text(encoding="utf-8").count("OFL")


def test_icons_are_in_their_fonts(small):
    """Each icon that a page shows has its character in the cut-down font."""
    font = weight.subset.load_font(
        str(small / "_static/vendor/fontawesome/webfonts/fa-solid-900.woff2"),
        weight.subset.Options(),
    )
    css = (small / "_static/styles/pydata-sphinx-theme.css").read_text(encoding="utf-8")
    page = (small / PAGE).read_text(encoding="utf-8")
    used = set(re.findall(r"\bfa-((?!solid|lg)[a-z-]+)", page))
    assert len(used) > 8
    for name in used:
        character = re.search(rf'\.fa-{name}\b[^{{}}]*{{[^{{}}]*:\s*"(.)"', css)
        assert character, name
        assert ord(character[1]) in font.getBestCmap(), name
