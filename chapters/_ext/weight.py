"""What does a page carry that nobody sees?  Left out while the book is built.

Colours that look alike share a span, pictures a palette; a page gets only the scripts that it has a
use for, and the style sheets of the theme keep only the rules that can apply. Nothing looks
different: ``tests/site/test_weight.py`` compares with what Sphinx writes by itself.
"""

import functools
import re
from pathlib import Path

import numpy as np
import tinycss2
from docutils import nodes
from fontTools import subset
from PIL import Image
from pygments.formatters import HtmlFormatter
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES
from sphinx.writers.html5 import HTML5Translator

# A script or style sheet, and the classes without which it has nothing to do on a page.
USED_WITH = {
    "design-tabs.js": {"sd-tab-set"},
    "togglebutton.js": {"toggle"},
    "togglebutton.css": {"toggle"},
    "walk.js": {"step-through", "frames"},
    "step-through.js": {"step-through"},
    "step-through.css": {"step-through", "frames"},
    "frames.js": {"frames"},
    "frames.css": {"frames"},
    "symptoms.js": {"message-box", "ask"},
    "landing.css": {"doors"},
}
# Bootstrap's script names the classes of all its components; these are the ones the theme uses.
BOOTSTRAP = re.compile(r"(bs-)?(tooltip|dropdown)|(show|fade|collaps)")
# How much a picture may change, in steps of 255: a pixel, and the root mean square of all pixels.
PIXEL, AREA = 12, 1


# Code: the lexer tells a name from a parenthesis, most styles paint both alike.


class Formatter(HtmlFormatter):
    """Gives one class to all kinds of tokens that look alike in ``styles``, and none to plain text.

    Neighbours of one class share a span, so code becomes less than half as long.
    """

    styles = ()

    @classmethod
    @functools.cache
    def alike(cls):
        """The kind that stands for each kind of token."""
        first, found = {}, {}
        for kind in sorted(STANDARD_TYPES, key=lambda kind: (len(STANDARD_TYPES[kind]), kind)):
            look = tuple(tuple(style.style_for_token(kind).items()) for style in cls.styles)
            found[kind] = first.setdefault(look, kind)
        return found

    def format_unencoded(self, tokensource, outfile):
        alike = self.alike()
        super().format_unencoded(((alike.get(kind, kind), s) for kind, s in tokensource), outfile)


def merge_colours(app):
    if app.builder.format != "html":
        return
    options = {**app.builder.theme.get_options(), **app.config.html_theme_options}
    names = (options["pygments_light_style"], options["pygments_dark_style"])
    app.builder.highlighter.formatter = type(
        "MergingFormatter", (Formatter,), {"styles": tuple(map(get_style_by_name, names))}
    )


def visit_literal(self, node):
    self.context.append(len(self.body))
    HTML5Translator.visit_literal(self, node)


def depart_literal(self, node):
    """Without a span for each word: ``book.css`` lets the words of a long one break anywhere."""
    HTML5Translator.depart_literal(self, node)
    start = self.context.pop()
    text = "".join(self.body[start:])
    self.body[start:] = [re.sub(r'<span class="pre">(.*?)</span>', r"\1", text, flags=re.S)]


# Scripts and style sheets


def drop_unused_scripts(app, pagename, templatename, context, doctree):
    words = words_of_markup(context.get("body", ""))
    for key in ("script_files", "css_files"):
        context[key] = [
            file
            for file in context[key]
            if (name := Path(str(file.filename)).name) not in USED_WITH or USED_WITH[name] & words
        ]


def words_of_markup(html):
    """The classes and ids of elements."""
    values = re.findall(r'\b(?:class|id)="([^"]*)"', html)
    return {word for value in values for word in value.split()}


def drop_unused_rules(app, exception):
    """The theme's style sheets dress all of Bootstrap, Font Awesome and sphinx-design."""
    if exception or app.builder.format != "html":
        return
    out, static = Path(app.outdir), Path(app.outdir) / "_static"
    own = {path.name for path in Path(__file__).parents[1].glob("_static/*")}
    words = set()
    for path in out.rglob("*.html"):
        words |= words_of_markup(path.read_text(encoding="utf-8"))
    for path in static.rglob("*.js"):
        if path.name != "bootstrap.js":
            words |= set(re.findall(r"[\w-]+", path.read_text(encoding="utf-8")))
    for path in static.rglob("*.css"):
        if path.name not in own:
            css = path.read_text(encoding="utf-8")
            path.write_text(purge(css, words), encoding="utf-8")


def purge(css, words):
    """The style sheet without rules for classes and ids that are not among ``words``."""
    rules = tinycss2.parse_stylesheet(css, skip_whitespace=True)
    return tinycss2.serialize(list(_purged(rules, words)))


def _purged(rules, words):
    for rule in rules:
        if rule.type == "qualified-rule":
            kept = [s for s in selectors(rule.prelude) if applies(s, words)]
            if kept:
                comma = tinycss2.ast.LiteralToken(rule.source_line, rule.source_column, ",")
                rule.prelude = [token for s in kept for token in (comma, *s)][1:]
                yield rule
        elif rule.type == "at-rule" and rule.lower_at_keyword in ("media", "supports", "layer"):
            if rule.content is not None:
                inside = tinycss2.parse_rule_list(rule.content, True, True)
                rule.content = list(_purged(inside, words))
            if rule.content != []:
                yield rule
        elif rule.type != "comment" or rule.value.startswith("!"):  # licences stay
            yield rule


def selectors(prelude):
    parts = [[]]
    for token in prelude:
        if token == ",":
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def applies(selector, words):
    """Whether there can be an element with all classes and ids that the selector asks for.

    What stands in ``:not()``, ``:is()`` or ``[]`` is not looked at, so such a rule rather stays.
    """
    asked = [
        token.value
        for before, token in zip([None, *selector], selector, strict=False)
        if token.type == "hash" or (token.type == "ident" and before == ".")
    ]
    return all(name in words or BOOTSTRAP.match(name) for name in asked)


def drop_unused_files(app, exception):
    """fontawesome.js, which the template no longer loads, source maps, languages, logos of hubs."""
    if exception or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    for pattern in ("scripts/fontawesome.js", "**/*.map", "locales/**/*.*", "images/logo_*"):
        for path in static.glob(pattern):
            path.unlink()


def subset_icons(app, exception):
    """300 KB of icon fonts for a dozen icons: those in the rules that are left."""
    if exception or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    css = "".join(path.read_text(encoding="utf-8") for path in static.rglob("*.css"))
    points = {int(code, 16) for code in re.findall(r'"\\([0-9a-f]{2,5})\s?"', css)}
    points |= {ord(character) for character in re.findall(r'"([^"\\])"', css)}
    fonts = static / "vendor" / "fontawesome" / "webfonts"
    options = subset.Options(flavor="woff2", hinting=False)
    for path in fonts.glob("*.woff2"):
        font = subset.load_font(str(path), options)
        subsetter = subset.Subsetter(options)
        subsetter.populate(unicodes=points)
        subsetter.subset(font)
        subset.save_font(font, str(path), options)
    for path in fonts.glob("*.ttf"):
        path.unlink()


# Pictures: matplotlib stores four bytes a pixel, and a plot has some hundred colours.


def rename_pictures(app, env):
    """WebP stores the same pixels in a fifth less than PNG."""
    if app.builder.format == "html":
        for path, (documents, name) in env.images.items():
            if name.endswith(".png"):
                env.images[path] = (documents, f"{name[:-4]}.webp")


def shrink_pictures(app, exception):
    if exception or app.builder.format != "html":
        return
    for name in set(app.builder.images.values()):
        path = Path(app.outdir) / app.builder.imagedir / name
        if path.suffix == ".webp":
            with Image.open(path) as picture:
                small = few_colours(picture)
            small.save(path, lossless=True)


def few_colours(picture):
    """The picture in few colours, if nobody can see the difference, and else as it is."""
    if picture.mode == "RGBA" and picture.getchannel("A").getextrema()[0] < 255:
        return picture.copy()
    full = picture.convert("RGB")
    for colours in (64, 96, 128, 192, 256):
        reduced = full.quantize(
            colours, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE
        ).convert("RGB")
        if looks_like(reduced, full):
            return reduced
    return full


def looks_like(reduced, full):
    """No pixel changes much, and a whole area, which the eye compares with the next, hardly."""
    change = np.abs(np.asarray(reduced, dtype=float) - np.asarray(full, dtype=float)).max(axis=2)
    return change.max() <= PIXEL and (change**2).mean() <= AREA**2


def setup(app):
    app.connect("builder-inited", merge_colours)
    app.add_node(nodes.literal, override=True, html=(visit_literal, depart_literal))
    app.connect("html-page-context", drop_unused_scripts, priority=900)
    app.connect("env-updated", rename_pictures)
    app.connect("build-finished", shrink_pictures)
    app.connect("build-finished", drop_unused_files)
    # after the theme has written pygments.css, and the rest of this book its pages
    app.connect("build-finished", drop_unused_rules, priority=900)
    app.connect("build-finished", subset_icons, priority=901)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
