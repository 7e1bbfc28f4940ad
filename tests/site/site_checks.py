"""What can be wrong with a built page?

Each check returns a list of problems, empty if there are none. It takes an open page (or the folder
of a built book) and nothing else, so the sabotage tests can point it at one broken on purpose.
"""

import functools
import http.server
import threading
from contextlib import contextmanager
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
# WCAG 2.5.3, level A; axe counts the rule as experimental and leaves it off.
RULES = {
    "label-content-name-mismatch": {"enabled": True},
    "empty-table-header": {"enabled": False},  # minor: pandas leaves the corner of a table empty
}
# What a colour scheme or a narrower page can change; the other rules look at the same elements.
OF_THE_VIEW = ["color-contrast", "link-in-text-block", "scrollable-region-focusable"]
AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def serve(folder):
    """Serve a folder on this machine; yields its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def opened(browser, base, name, scheme="light", width=1280):
    """Open page ``name`` below ``base`` without a network; yields the page and what went wrong."""
    problems = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(20_000)

    def gate(route):
        if route.request.url.startswith((base, "data:", "blob:")):
            route.continue_()
        else:
            problems.append(f"request to another place: {route.request.url}")
            route.abort()

    def responded(response):
        if response.status >= 400:
            problems.append(f"status {response.status}: {response.url}")

    def logged(message):
        if message.type == "error":
            problems.append(f"console: {message.text}")

    def failed(request):
        # A page that is left breaks off what it still waits for, its icon for one.
        if request.failure != "net::ERR_ABORTED":
            problems.append(f"request failed: {request.url}")

    context.route("**/*", gate)
    page = context.new_page()
    page.on("requestfailed", failed)
    # What a socket sends meets no route.
    page.on("websocket", lambda socket: problems.append(f"request to another place: {socket.url}"))
    page.on("response", responded)
    page.on("console", logged)
    page.on("pageerror", lambda error: problems.append(f"page error: {error}"))
    try:
        page.goto(base + name, wait_until="load")
        page.evaluate("document.fonts.ready.then(() => null)")
        # Pictures load late; a reader scrolls to them.
        page.evaluate("""Promise.allSettled([...document.images].map(image => {
            image.loading = "eager";
            return image.decode();
        })).then(() => null)""")
        yield page, problems
    finally:
        context.close()


def typeset(page):
    """Formulas are drawn, in the book's font, and no LaTeX is left in the text."""
    return page.evaluate(r"""async () => {
        const problems = [];
        for (const box of document.querySelectorAll(".math")) {
            const formula = box.querySelector("math");
            const size = (formula ?? box).getBoundingClientRect();
            const text = box.textContent.trim().slice(0, 80);
            if (!formula) problems.push(`no <math> in: ${text}`);
            else if (box.checkVisibility() && !(size.width > 1 && size.height > 1))
                problems.push(`an empty <math>: ${text}`);
        }
        for (const error of document.querySelectorAll("merror, .math-error"))
            problems.push(`formula not converted: ${error.textContent.slice(0, 80)}`);
        const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
            const text = texts.currentNode;
            if (text.parentElement.closest("code, pre, kbd, annotation, script, style")) continue;
            const raw = text.data.match(/\$\$|\\[([]|\\(begin|frac|partial|mathbb|sum|nabla)\b/);
            if (raw) problems.push(`LaTeX left in the text: ${text.data.trim().slice(0, 80)}`);
        }
        const formulas = [...document.querySelectorAll("math")].filter(m => m.checkVisibility());
        if (formulas.length) {
            const bare = name => name.split(",")[0].replaceAll('"', "");
            const family = bare(getComputedStyle(formulas[0]).fontFamily);
            const loaded = [...document.fonts].some(
                font => bare(font.family) === family && font.status === "loaded");
            if (!loaded) problems.push(`the font of the formulas is not loaded: ${family}`);
        }
        return problems;
    }""")


def pictures(page):
    """Pictures decode, and say in words what they show."""
    return page.evaluate(r"""async () => {
        const problems = [];
        for (const image of document.images) {
            const name = image.src.slice(-60);
            const decodes = await image.decode().then(() => true, () => false);
            if (!decodes) problems.push(`picture does not decode: ${name}`);
            if (!image.closest("article")) continue;
            const alt = image.alt.trim();
            if (!alt) problems.push(`picture without alt text: ${name}`);
            else if (/(^|\/)_images\/|\.(png|jpe?g|svg|gif|webp)$/i.test(alt))
                problems.push(`a file name as alt text: ${alt}`);
        }
        return problems;
    }""")


def accessible(page, rules=None):
    """axe-core finds nothing (of ``rules``, or at all). Takes the page apart, so it comes last."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    options = {"runOnly": rules} if rules else {"rules": RULES}
    found = page.evaluate(
        """options => {
            // A colour that is still changing has the wrong contrast.
            for (const animation of document.getAnimations())
                if (animation instanceof CSSTransition) animation.finish();
            // Most of axe's time would go into thousands of words of code in a dozen colours, and
            // into the letters of formulas: one of a kind in one kind of place is enough.
            const name = e => `${e.localName}.${e.className}`;
            const place = e => e.closest("article") === e ? "" : place(e.parentElement) + name(e);
            const seen = new Set();
            const words = document.querySelectorAll("article :is(pre span, code, em, math)");
            for (const [word, kind] of [...words].map(word => [word, place(word)])) {
                if (word.localName === "math") word.replaceChildren(word.textContent);
                if (seen.has(kind)) word.replaceWith(...word.childNodes);
                seen.add(kind);
            }
            // preload would fetch the style sheets again, some from a wrong address.
            options = {preload: false, resultTypes: ["violations"], ...options};
            return axe.run(document, options).then(result => result.violations);
        }""",
        options,
    )
    return [
        f"axe {rule['id']} ({rule['impact']}): {' '.join(map(str, node['target']))}"
        for rule in found
        for node in rule["nodes"]
    ]


def sideways(page):
    """The page itself does not scroll sideways; names what sticks out."""
    return page.evaluate("""() => {
        const root = document.documentElement;
        if (root.scrollWidth <= root.clientWidth + 1) return [];
        const scrolls = e => e && e !== root && e !== document.body
            && (getComputedStyle(e).overflowX !== "visible" || scrolls(e.parentElement));
        const out = [...document.body.querySelectorAll("*")].filter(e =>
            e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e.parentElement));
        const names = out.slice(0, 3).map(e => `${e.tagName.toLowerCase()}.${e.className}`);
        const excess = root.scrollWidth - root.clientWidth;
        return [`the page is ${excess} px too wide: ${names.join(", ")}`];
    }""")


def foldable(page):
    """What is hidden opens and closes with the keyboard."""
    page.evaluate("""() => {
        window.turns = new Map();  // of each summary, how often its details opened or closed
        new MutationObserver(records => {
            for (const {target} of records) {
                const summary = target.querySelector("summary");
                turns.set(summary, (turns.get(summary) ?? 0) + 1);
            }
        }).observe(document.body, {subtree: true, attributeFilter: ["open"]});
    }""")
    for summary in page.query_selector_all("article details > summary"):
        if summary.evaluate("e => e.checkVisibility() && (e.focus(), turns.set(e, 0), true)"):
            page.keyboard.press("Enter")
            page.keyboard.press("Enter")
    return page.evaluate("""() => [...turns].filter(([, times]) => times !== 2).map(
        ([e]) => `does not open and close with Enter: ${e.innerText.trim()}`)""")


def scrollable(page):
    """Boxes that scroll sideways can be reached with the keyboard."""
    return page.evaluate("""() => [...document.querySelectorAll("article *")].filter(e =>
            ["auto", "scroll"].includes(getComputedStyle(e).overflowX)
            && e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1
            && e.tabIndex < 0 && !e.querySelector("a, button, [tabindex='0']"))
        .map(e => `scrolls but takes no focus: ${e.tagName.toLowerCase()}.${e.className}`)""")


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        self.links += [attrs[key] for key in ("href", "src") if attrs.get(key)]
        if tag == "meta" and (attrs.get("http-equiv") or "").lower() == "refresh":
            self.links.append(attrs["content"].partition("url=")[2])


def links(folder):
    """Files and ``#fragments`` that the pages of a folder point to exist."""
    folder = Path(folder).resolve()
    pages = {
        path: _Page(path.read_text(encoding="utf-8"))
        for path in folder.rglob("*.html")
        if "_static" not in path.parts
    }
    problems = []
    for path, page in sorted(pages.items()):
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.exists():
                problems.append(f"{path.relative_to(folder)}: no such file: {link}")
            elif (
                url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids
            ):
                problems.append(f"{path.relative_to(folder)}: no such anchor: {link}")
    return problems


def everything(browser, base, name, scheme="light", width=1280, whole=True):
    """All checks of one page in one colour scheme and width; those of the view if not ``whole``."""
    with opened(browser, base, name, scheme, width) as (page, problems):
        found = [*typeset(page), *pictures(page), *sideways(page), *scrollable(page)]
        if whole:
            found += [*foldable(page), *accessible(page)]
        else:
            found += accessible(page, OF_THE_VIEW)
        return problems + found
