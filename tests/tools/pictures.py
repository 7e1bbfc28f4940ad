"""What does the finished book look like?  Takes the README's pictures from the built pages.

    python tests/tools/pictures.py      # after `jupyter-book build .`; writes .github/*.png

Each in light and in dark. They show what the pages show, and are taken again whenever that changes
so much that a reader would notice; nothing compares them.
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "_build" / "html" / "chapters"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MESSAGE = """\
RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn
"""
# Below the bar at the head of the page, which stays where it is.
SCROLL = """(element, from) => scrollTo({
    top: element.getBoundingClientRect().top + scrollY - from, behavior: "instant"})"""


def title(page):
    """The title page as it opens."""


def symptoms(page):
    """The box with a message, and what it finds."""
    page.locator("#message").fill(MESSAGE)
    page.locator("#message").blur()
    return page.locator(".message-box")


def report(page):
    """A report of the diagnosis: two faults in one model."""
    return page.locator("div.output.text_html:has(table.report)").first


def graph(page):
    """A graph with its values and gradients, walked almost to its end, on a phone."""
    walk = page.locator(".st-walk").first
    walk.evaluate(SCROLL, 64)
    slider = walk.locator("input")
    slider.press("ArrowLeft")
    slider.press("ArrowLeft")
    slider.blur()


# Page, width and height of the window, and what is shown of it: nothing stands for all.
PICTURES = {
    "title": ("index", (1280, 960), title),
    "symptoms": ("symptoms", (900, 1200), symptoms),
    "report": ("08e_diagnosis", (900, 1200), report),
    "phone": ("01_graphs", (375, 720), graph),
}
MARGIN = 8  # pixels of page around what is shown


def take(browser, name, scheme):
    """One picture: a PNG of 128 colours, which is a third of the bytes."""
    document, (width, height), prepare = PICTURES[name]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto((PAGES / f"{document}.html").as_uri())
    page.evaluate("document.fonts.ready.then(() => null)")
    shown = prepare(page)
    page.wait_for_timeout(300)  # the pictures that load late
    clip = None
    if shown is not None:
        shown.evaluate(SCROLL, 96)
        box = shown.bounding_box()
        clip = {key: box[key] - MARGIN for key in ("x", "y")}
        clip |= {key: box[key] + 2 * MARGIN for key in ("width", "height")}
    png = page.screenshot(clip=clip)
    page.close()
    return Image.open(io.BytesIO(png)).convert("RGB").quantize(128, dither=Image.Dither.NONE)


def main():
    """Take all of them; returns 1 if there is nothing to take them of, or with."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None or not PAGES.exists():
        print("needs Chromium on the PATH, and the built book: jupyter-book build .")
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        for name in PICTURES:
            for scheme in ("light", "dark"):
                target = ROOT / ".github" / f"{name}-{scheme}.png"
                take(browser, name, scheme).save(target, optimize=True)
                print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1000} KB")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
