"""How does the whole book become one PDF?  The built pages, joined in Chromium and printed there.

    jupyter-book build .            # the pages first
    python tests/tools/pdf.py       # then _build/follow-the-gradient.pdf

The joined document takes the article of each built page in the order of ``_toc.yml``, so the PDF
cannot say anything else than the pages do, and needs no second build. Ids that occur on several
pages ("check-yourself") get their page's name in front, and the links follow. What a page folds
away because the reader should think first (hints, solutions, answers of the blind cases) moves
behind the chapters, with a link and a page number in its place; folded code of a figure or a
helper stays where it is, unfolded. Step-throughs and the symptom box need a script, so the static
figure and the lists stand for them.

Chromium writes tags, alt texts, outline and links; pikepdf adds what it does not know.
It prints twice: page numbers in the table of contents are known only after the first time.
"""

import argparse
import shutil
import sys
from pathlib import Path

import pikepdf
import yaml
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"
PDF = ROOT / "_build" / "follow-the-gradient.pdf"
STYLE = Path(__file__).with_name("pdf.css")
SCRIPT = Path(__file__).with_name("pdf.js")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
SUBJECT = "Executable lessons on computation graphs, backpropagation and gradient debugging"
PRINTABLE = round((210 - 2 * 22) / 25.4 * 96)  # CSS pixels between the margins of pdf.css
LINKS_ONLY = "article * { visibility: hidden } article a, article a * { visibility: visible }"
FORMULA = "formula: "  # marks the alt texts that are LaTeX, see pdf.js


def contents(root=ROOT):
    """The pages in reading order: dictionaries of name, depth (2: chapter) and part, if one begins.

    ``[{"name": "chapters/index", "depth": 1, "part": ""}, ...]``
    """
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    pages = [{"name": toc["root"], "depth": 1, "part": ""}]

    def add(entries, depth, part=""):
        for entry in entries:
            pages.append({"name": entry["file"], "depth": depth, "part": part})
            part = ""
            add(entry.get("sections", []), depth + 1)

    for part in toc["parts"]:
        add(part["chapters"], 2, part["caption"])
    return pages


def join(page, html, root=ROOT):
    """Turn an open browser page into the whole book; what it says in print media is the PDF."""
    pages = contents(root)
    for entry in pages:
        path = html / f"{entry['name']}.html"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing: build the pages first, with jupyter-book build ."
            )
        entry["html"] = path.read_text(encoding="utf-8")
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    strange = []

    def gate(route):
        if not route.request.url.startswith((html.as_uri(), "data:")):
            strange.append(route.request.url)
        # The theme's scripts have nothing to do on paper.
        if strange or route.request.resource_type == "script":
            route.abort()
        else:
            route.continue_()

    page.route("**/*", gate)
    page.goto((html / f"{pages[0]['name']}.html").as_uri())
    page.emulate_media(media="print", color_scheme="light")
    page.add_style_tag(content=STYLE.read_text(encoding="utf-8"))
    facts = {"pages": pages, "author": config["author"], "subject": SUBJECT}
    try:
        page.evaluate(SCRIPT.read_text(encoding="utf-8"), facts)
    finally:
        if strange:
            raise ValueError(f"the book loads what is not in {html}: {', '.join(strange[:3])}")
    page.evaluate("document.fonts.ready.then(() => null)")


def overflow(page):
    """What would stick out of the printed page: tag, class and pixels of each such element.

    (Chromium would print the whole book smaller, to make room for it.) A wide formula is set
    smaller before, down to half its size.
    """
    page.set_viewport_size({"width": PRINTABLE, "height": 900})
    return page.evaluate("""() => {
        for (const box of document.querySelectorAll("div.math > .formula")) {
            const share = box.clientWidth / box.scrollWidth;
            if (share < 1) box.style.fontSize = `${Math.max(0.5, 0.98 * share)}em`;
        }
        const edge = document.querySelector("article").getBoundingClientRect().right + 1;
        return [...document.querySelectorAll("article *")].flatMap(e => {
            const box = e.getBoundingClientRect();
            // What a box hides or scrolls is cut on paper.
            const cut = e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0
                && getComputedStyle(e).overflowX !== "visible";
            if (box.right <= edge && !cut) return [];
            const where = e.closest("section[id]")?.id;
            const hidden = cut ? e.scrollWidth - e.clientWidth : 0;
            const excess = Math.round(Math.max(box.right - edge, hidden));
            return [`${where}: ${e.tagName.toLowerCase()}.${e.className} is ${excess} px too wide`];
        });
    }""")


def number_pages(page, raw):
    """Write the page of its target into each reference to a page."""
    with pikepdf.open(raw) as document:
        number = {leaf.objgen: k for k, leaf in enumerate((p.obj for p in document.pages), 1)}
        numbers = {
            name.lstrip("/"): number[place[0].objgen] for name, place in document.Root.Dests.items()
        }
    lost = page.evaluate(
        """numbers => [...document.querySelectorAll("[data-page-of]")].filter(e => {
            e.textContent = numbers[e.dataset.pageOf] ?? "?";
            return e.textContent === "?";
        }).map(e => e.dataset.pageOf)""",
        numbers,
    )
    if lost:
        raise ValueError(f"no page number for {', '.join(lost[:5])}: no such id in the book")


def headings(page):
    """Text and level of each heading, in reading order."""
    return page.evaluate("""() => [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map(
        h => [h.textContent.replace(/\\s+/g, " ").trim(), Number(h.ariaLevel)])""")


def print_pdf(page, path, **options):
    """Print without a limit on time: a whole book takes longer than a page."""
    page.pdf(path=path, prefer_css_page_size=True, print_background=True, **options)


def finish(raw, path, titles, author):
    """Add to the printed file what a browser does not write, and store it in half the room."""
    with pikepdf.open(raw) as document:
        # Chromium loses blanks and repeats words where a heading is wrapped.
        with document.open_outline() as outline:
            entries = list(flat(outline.root))
            if len(entries) != len(titles):
                raise ValueError(
                    f"{len(titles)} headings, {len(entries)} of them in the outline of the PDF: "
                    "is one hidden in print?"
                )
            for entry, (title, _) in zip(entries, titles, strict=True):
                entry.title = title
        for element in document.objects:
            if not isinstance(element, pikepdf.Dictionary) or element.get("/S") != "/Figure":
                continue
            alt = str(element.get("/Alt", ""))
            if alt.startswith(FORMULA):
                element.Alt = alt.removeprefix(FORMULA)
                element.S = pikepdf.Name.Formula
            elif not alt and any_below(element, "/Figure"):
                element.S = pikepdf.Name.Div  # <figure>, around the picture and its caption
        document.Root.ViewerPreferences = pikepdf.Dictionary(DisplayDocTitle=True)
        document.Root.PageMode = pikepdf.Name.UseOutlines
        with document.open_metadata() as metadata:
            metadata.load_from_docinfo(document.docinfo)
            metadata["dc:title"] = titles[0][0]
            metadata["dc:creator"] = [author]
            metadata["dc:description"] = SUBJECT
            metadata["dc:language"] = [str(document.Root.get("/Lang", ""))]
            metadata["xmp:CreatorTool"] = "Follow the Gradient, tests/tools/pdf.py"
        document.save(path, object_stream_mode=pikepdf.ObjectStreamMode.generate)


def any_below(element, kind):
    """Is there an element of this kind among the children?"""
    children = element.get("/K")
    children = children if isinstance(children, pikepdf.Array) else [children]
    return any(isinstance(c, pikepdf.Dictionary) and c.get("/S") == kind for c in children)


def flat(entries):
    """The entries of an outline with those below them, in order."""
    for entry in entries:
        yield entry
        yield from flat(entry.children)


def make(browser, html=HTML, path=PDF, root=ROOT):
    """Print the book in ``html`` to ``path``; returns what is too wide for the paper."""
    author = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))["author"]
    raw = path.with_suffix(".raw.pdf")
    page = browser.new_page(color_scheme="light")
    page.set_default_timeout(600_000)
    try:
        join(page, html, root)
        wide = overflow(page)
        # The first time only the places of the links matter, and painting nothing else is faster.
        unseen = page.add_style_tag(content=LINKS_ONLY)
        print_pdf(page, raw)
        unseen.evaluate("style => style.remove()")
        number_pages(page, raw)
        print_pdf(page, raw, tagged=True, outline=True)
        finish(raw, path, headings(page), author)
    finally:
        page.close()
        raw.unlink(missing_ok=True)
    return wide


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--html", type=Path, default=HTML, help="the built pages")
    parser.add_argument("--output", type=Path, default=PDF)
    arguments = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        sys.exit(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        wide = make(browser, arguments.html, arguments.output)
        browser.close()
    for line in wide:
        print(line, file=sys.stderr)
    with pikepdf.open(arguments.output) as document:
        size = arguments.output.stat().st_size / 1e6
        print(f"{arguments.output}: {len(document.pages)} pages, {size:.1f} MB")
    return bool(wide)


if __name__ == "__main__":
    sys.exit(main())
