"""What has to be mended in the pages that the theme and its companions write?

Each cure names its finding. Those that a template can hold are in ``_templates``; a test builds the
pages without them and says when one is no longer needed.
"""

import re
from pathlib import Path

import imagesize
from docutils import nodes
from myst_nb import sphinx_ as myst_nb
from sphinx.writers.html5 import HTML5Translator


def drop_thebe(app, config):
    """Page error "THEBE_JS_URL has already been declared", and a script from another host.

    Jupyter Book always loads sphinx-thebe, which talks to a server that this book does without.
    """
    for listeners in app.events.listeners.values():
        listeners[:] = [x for x in listeners if x.handler.__module__ != "sphinx_thebe"]
    styles = app.registry.css_files
    styles[:] = [style for style in styles if style[0] != "sphinx-thebe.css"]


def merge_singlehtml(app):
    """sphinx-exercise registers nodes for the builder singlehtml (the PDF is printed from it), and
    from then on Sphinx does not find there what is registered for html only: hidden cells crash it.
    """
    handlers = app.registry.translation_handlers
    if "singlehtml" in handlers:
        handlers["singlehtml"] = {**handlers.get("html", {}), **handlers["singlehtml"]}


def visit_hidden_cell(self, node):
    """axe label-content-name-mismatch (WCAG 2.5.3): myst-nb's ``<summary>`` carries another name
    than the text one sees.
    """
    start = len(self.body)
    myst_nb.visit_HideCellInput(self, node)
    self.body[start:] = [
        text.replace(' aria-label="Toggle hidden content"', "") for text in self.body[start:]
    ]


def visit_image(self, node):
    """A long page loads all its figures before the first one is looked at, and what stands below
    jumps when one arrives: load late, and reserve the room.
    """
    node["loading"] = "lazy"
    width, height = imagesize.get(Path(self.builder.srcdir) / node["uri"])
    start = len(self.body)
    HTML5Translator.visit_image(self, node)
    if width > 0:
        size = f'<img width="{width}" height="{height}" '
        self.body[start:] = [text.replace("<img ", size, 1) for text in self.body[start:]]


def visit_citation(self, node):
    """axe aria-allowed-role, aria-deprecated-role: the entries of the bibliography, which docutils
    puts into a list without making them its items.
    """
    start = len(self.body)
    HTML5Translator.visit_citation(self, node)
    self.body[start:] = [
        text.replace('role="doc-biblioentry"', 'role="listitem"') for text in self.body[start:]
    ]


NESTED = re.compile(
    r"(<a class=\"[^\"]*\"[^>]*>)((?:(?!</a>).)+)(</a><details[^>]*><summary)>", re.S
)


def name_nested_pages(app, exception):
    """axe summary-name: the arrow that opens a chapter's further pages in the sidebar."""
    if exception or app.builder.format != "html":
        return

    def named(match):
        title = " ".join(re.sub(r"<[^>]+>", "", match[2]).split())
        return f'{match[1]}{match[2]}{match[3]} aria-label="Pages of {title}">'

    for path in Path(app.outdir).rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        if (mended := NESTED.sub(named, text)) != text:
            path.write_text(mended, encoding="utf-8")


def setup(app):
    app.connect("config-inited", drop_thebe)
    app.connect("builder-inited", merge_singlehtml)
    app.add_node(
        myst_nb.HideCodeCellNode,
        override=True,
        html=(visit_hidden_cell, myst_nb.depart_HideCellInput),
    )
    app.add_node(
        nodes.citation, override=True, html=(visit_citation, HTML5Translator.depart_citation)
    )
    app.add_node(nodes.image, override=True, html=(visit_image, HTML5Translator.depart_image))
    app.connect("build-finished", name_nested_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
