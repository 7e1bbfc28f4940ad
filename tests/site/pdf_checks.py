"""What can be wrong with the book as a PDF?

Each check returns a list of problems, empty if there are none. ``Expected`` reads from the built
pages what has to be in the PDF, by other means than the tool that makes it.
"""

import html
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import unquote

import pikepdf
import pypdfium2
import pypdfium2.raw as pdfium

MARGIN = 57  # points, at the right: nothing is printed there (22 mm less a rule's width and more)
HEADING = re.compile(r"<h([1-6])[^>]*>(.*?)</h\1>", re.S)


def text_of(markup):
    """The text of a piece of HTML, without the sign of a permanent link."""
    markup = re.sub(
        r'<a class="headerlink".*?</a>|<annotation.*?</annotation>', "", markup, flags=re.S
    )
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", markup)).split())


def bare(text):
    """Letters and digits alone: a PDF breaks lines and words, and sets ligatures, as it likes."""
    return re.sub(r"\W+", "", unicodedata.normalize("NFKC", text))


@dataclass
class Expected:
    """What the built pages hold: ``pages`` are the entries of ``pdf.contents``."""

    outline: list = field(default_factory=list)  # (title, depth)
    pictures: Counter = field(default_factory=Counter)  # alt texts
    formulas: Counter = field(default_factory=Counter)  # LaTeX
    last: dict = field(default_factory=dict)  # title of a page: its last paragraph
    targets: set = field(default_factory=set)  # names of what the pages link to

    @classmethod
    def of(cls, folder, pages):
        self = cls()
        for page in pages:
            source = (folder / f"{page['name']}.html").read_text(encoding="utf-8")
            article = source[source.index("<article") : source.index("</article>")]
            if page["part"]:
                self.outline.append((page["part"], 1))
            headings = [(int(n), text_of(text)) for n, text in HEADING.findall(article)]
            self.outline += [(text, level + page["depth"] - 1) for level, text in headings]
            if page["depth"] == 1:
                self.outline.append(("Contents", 1))
            alts = re.findall(r'<img\b[^>]*?\balt="([^"]*)"', article)
            alts += re.findall(r'<svg\b[^>]*?\brole="img"[^>]*?\baria-label="([^"]*)"', article)
            self.pictures.update(html.unescape(alt) for alt in alts)
            sources = re.findall(r"<annotation\b[^>]*>(.*?)</annotation>", article, re.S)
            self.formulas.update(bare_tex(html.unescape(tex)) for tex in sources)
            paragraphs = [text_of(p) for p in re.findall(r"<p>(.*?)</p>", article, re.S)]
            self.last[headings[0][1]] = paragraphs[-1]
            here = page["name"].rsplit("/")[-1]
            for target in re.findall(r'<a class="reference internal"[^>]* href="([^"]+)"', article):
                name, _, place = unquote(html.unescape(target)).partition("#")
                name = name.removesuffix(".html") or here
                self.targets.add(f"{name}.{place}" if place else name)
        self.outline.append(("Hints and answers", 1))
        return self


def bare_tex(tex):
    return "".join(tex.split())


@dataclass
class Book:
    """The PDF, opened for its structure (pikepdf) and for what a reader sees (PDFium)."""

    path: object

    def __post_init__(self):
        self.file = pikepdf.open(self.path)
        self.seen = pypdfium2.PdfDocument(self.path)
        self.root = self.file.Root
        self.number = {page.obj.objgen: k for k, page in enumerate(self.file.pages)}
        self.outline = [
            (mark.get_title(), mark.level + 1, mark.get_dest().get_index())
            for mark in self.seen.get_toc(max_depth=9)
        ]
        self.texts = []
        for page in self.seen:
            text = page.get_textpage()
            self.texts.append(text.get_text_range())
            text.close()
        self.tags = [
            (str(o.S).lstrip("/"), str(o.get("/Alt", "")))
            for o in self.file.objects
            if isinstance(o, pikepdf.Dictionary) and "/S" in o and "/P" in o
        ]

    def close(self):
        self.file.close()
        self.seen.close()


def outline(book, expected):
    """Parts, pages and all headings, in the order of the table of contents, each on its page."""
    shown = [(title, depth) for title, depth, _ in book.outline]
    problems = [
        f"the outline has {b} where the book has {a}"
        for a, b in zip(expected.outline, shown, strict=False)
        if a != b
    ][:3]
    if len(shown) < len(expected.outline):
        problems.append(f"the outline ends before {expected.outline[len(shown)]}")
    problems += [
        f"{title!r} is not on page {page + 1}, where the outline leads"
        for title, _, page in book.outline
        if bare(title) not in bare(book.texts[page])
    ]
    return problems


def metadata(book, title):
    """Title, language, tags: what a reading aid asks for first."""
    found = {
        "title": book.file.docinfo.get("/Title"),
        "language": book.root.get("/Lang"),
        "tagged": book.root.get("/MarkInfo", {}).get("/Marked"),
        "structure": "/StructTreeRoot" in book.root,
        "title shown": book.root.get("/ViewerPreferences", {}).get("/DisplayDocTitle"),
        "author": "/Author" in book.file.docinfo,
    }
    wanted = {"title": title, "language": "en"}
    wanted |= dict.fromkeys(("tagged", "structure", "title shown", "author"), True)
    return [
        f"{key}: {found[key]} instead of {wanted[key]}"
        for key in wanted
        if found[key] != wanted[key]
    ]


def pictures(book, expected):
    """Each picture with its words, and none without."""
    shown = Counter(alt for kind, alt in book.tags if kind == "Figure")
    missing, more = expected.pictures - shown, shown - expected.pictures
    return [f"no picture says: {alt[:80]}" for alt in missing] + [
        f"a picture that no page has: {alt[:80]!r}" for alt in more
    ]


def formulas(book, expected):
    """Each formula, with its LaTeX to be read aloud."""
    shown = Counter(bare_tex(alt) for kind, alt in book.tags if kind == "Formula")
    missing, more = expected.formulas - shown, shown - expected.formulas
    return [f"formula lost: {tex}" for tex in missing] + [f"formula too many: {t}" for t in more]


def links(book, expected):
    """They lead into the book, to the page that carries their target, or to the web."""
    problems = []
    names = book.root.get("/Dests", {})
    first = {bare(title): page for title, _, page in book.outline}
    for k, page in enumerate(book.file.pages, 1):
        for note in page.get("/Annots", []):
            action = note.get("/A", {})
            if "/URI" in action:
                address = str(action.URI)
                if not address.startswith(("https://", "http://")):
                    problems.append(f"page {k} links to {address}")
            elif str(note.get("/Dest")) not in names:
                problems.append(f"page {k}: a link that leads nowhere: {note.get('/Dest')}")
    for name, place in names.items():
        if place[0].objgen not in book.number:
            problems.append(f"{name} is on no page")
    lost = expected.targets - {name.lstrip("/") for name in names}
    problems += [f"no link leads to {name} any more" for name in sorted(lost)]
    for key in ("/OpenAction", "/AA"):
        if key in book.root:
            problems.append(f"opening it does something: {key}")
    if "/EmbeddedFiles" in book.root.get("/Names", {}):
        problems.append("it carries other files")
    return problems + page_numbers(book, first)


def page_numbers(book, first):
    """The numbers in the table of contents are those printed on the pages."""
    start = next(p for title, _, p in book.outline if title == "Contents")
    stop = next(p for title, _, p in book.outline if p > start)
    problems = []
    lines = "\n".join(book.texts[start:stop]).splitlines()
    entries = [match for line in lines if (match := re.fullmatch(r"(.+?)\s*(\d+)", line.strip()))]
    numbers = {(bare(title), page + 1) for title, _, page in book.outline}
    wrong = [
        m[0] for m in entries if bare(m[1]) in first and (bare(m[1]), int(m[2])) not in numbers
    ]
    if len(entries) < 5:
        problems.append("the table of contents is empty")
    for k, text in enumerate(book.texts[1:], 2):
        if str(k) not in (line.strip() for line in text.splitlines()[:2]):  # head, number
            problems.append(f"page {k} does not carry its number")
            break
    return problems + [f"the contents say {line!r}" for line in wrong]


def complete(book, expected):
    """The last words of each page of the book stand before the next one begins."""
    begins = {title: page for title, _, page in reversed(book.outline)}
    starts = sorted(begins[title] for title in expected.last if title in begins)
    answers = begins.get("Hints and answers", len(book.texts))
    problems = []
    for title, words in expected.last.items():
        if title not in begins:
            problems.append(f"there is no {title!r}")
            continue
        stop = min([page for page in starts if page > begins[title]], default=answers)
        texts = book.texts[begins[title] : stop] + book.texts[answers:]
        if bare(words)[-40:] not in bare("".join(texts)):
            problems.append(f"{title!r} does not end with: {words[-60:]}")
    return problems


def blank(book, _):
    """No page is empty but for its head and number."""
    heads = {bare(title) for title, *_ in book.outline}
    problems = []
    for k, text in enumerate(book.texts[1:], 2):
        lines = [line.strip() for line in text.splitlines()]
        rest = [line for line in lines if line and line != str(k) and bare(line) not in heads]
        if not rest:
            problems.append(f"page {k} is blank")
    return problems


def sideways(book, _):
    """Nothing that is painted reaches into the right margin, on every fourth page.

    (The tool looks at every element before it prints; this is about margins and scale.)
    """
    problems = []
    for k in range(1, len(book.seen) + 1, 4):
        page = book.seen[k - 1]
        edge = page.get_width() - MARGIN
        for thing in page.get_objects(filter=[pdfium.FPDF_PAGEOBJ_TEXT, pdfium.FPDF_PAGEOBJ_IMAGE]):
            excess = thing.get_bounds()[2] - edge
            if excess > 0:
                problems.append(f"page {k}: something reaches {excess:.0f} pt into the margin")
                break
    return problems
