"""Where does a reader begin?  The directives of the title page, made from what the book holds.

``{ask}`` is a box for a message, which ``symptoms.js`` carries to the page that looks it up;
``{map}`` lists the pages of ``_toc.yml``, a line on each, and how long it takes, from the page
itself; ``{figure-of}`` shows a figure of a notebook, with the notebook's own alt text.
"""

import base64
import json
import os
import re
from pathlib import Path

import yaml
from docutils import nodes
from markup import Directive
from sphinx import addnodes

TIME = re.compile(r"About (\d+) minutes to read(?:, (\d+) for the exercises)?")
# The text area has no name: without scripts the form leads to the page, and sends nothing.
BOX = """
<form class="ask" action="symptoms.html">
<label for="ask">Paste the error or the warning</label>
<textarea id="ask" rows="2" spellcheck="false" autocomplete="off"></textarea>
<button type="submit">What can be behind it?</button>
</form>
"""


class Ask(Directive):
    """The box; not in print, where nothing can be pasted."""

    def run(self):
        return [nodes.raw("", BOX, format="html")]


class Landing(Directive):
    """What the two others have in common."""

    def notebook(self, name):
        """The cells of a notebook beside this page; the page is made again when it changes."""
        path = Path(self.env.doc2path(self.env.docname)).parent / f"{name}.ipynb"
        self.env.note_dependency(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["cells"]


class Map(Landing):
    """``{map}``: each line of its content is ``page: what it is about``, one for every page of the
    numbered parts. Parts, order, numbers and titles are the contents', the minutes the page's.
    """

    has_content = True

    def run(self):
        lines = dict(line.split(": ", 1) for line in self.content if line.strip())
        contents = Path(self.env.srcdir) / "_toc.yml"
        self.env.note_dependency(str(contents))
        parts = yaml.safe_load(contents.read_text(encoding="utf-8"))["parts"]
        shown, number = [], 0
        for part in parts:
            if not part.get("numbered"):
                continue
            shown.append(nodes.rubric("", part["caption"], **{"heading-level": 3}))
            listed = nodes.bullet_list(classes=["map"])
            for chapter in part["chapters"]:
                number += 1
                item = self.page(chapter["file"], str(number), lines)
                below = nodes.bullet_list()
                for k, section in enumerate(chapter.get("sections", []), start=1):
                    below += self.page(section["file"], f"{number}.{k}", lines)
                item += below if below.children else []
                listed += item
            shown.append(listed)
        if lines:
            raise self.error(f"the map has lines of pages not in _toc.yml: {', '.join(lines)}")
        return shown

    def page(self, document, number, lines):
        """The entry of one page."""
        name = Path(document).name
        if name not in lines:
            raise self.error(f"the map needs a line on {name}: '{name}: what it is about'")
        link = addnodes.pending_xref(
            "", nodes.inline(), refdomain="std", reftype="doc", reftarget=f"/{document}",
            refexplicit=False, refwarn=True, refdoc=self.env.docname,
        )  # fmt: skip
        head = nodes.paragraph("", "", nodes.Text(f"{number}\N{NO-BREAK SPACE}"), link)
        if time := self.time(name):
            head += [nodes.Text(" "), nodes.inline("", time, classes=["map-time"])]
        return nodes.list_item("", head, nodes.paragraph("", "", *self.inline(lines.pop(name))))

    def time(self, name):
        """What the page says of its length."""
        for cell in self.notebook(name):
            if "route" in cell["metadata"]:
                found = TIME.search("".join(cell["source"]))
                read, exercises = found.groups()
                return f"{read} min" + (f" + {exercises} min of exercises" if exercises else "")
        return ""


class FigureOf(Landing):
    """``{figure-of} notebook name``: the figure of that name, with the content as its caption."""

    has_content = True
    required_arguments = 2

    def run(self):
        name, figure = self.arguments
        for cell in self.notebook(name):
            mystnb = cell["metadata"].get("mystnb", {})
            if mystnb.get("figure", {}).get("name") == figure:
                (png,) = (
                    output["data"]["image/png"]
                    for output in cell["outputs"]
                    if "image/png" in output.get("data", {})
                )
                image = nodes.image(
                    uri=self.picture(f"{name}-{figure.replace(':', '-')}.png", "".join(png)),
                    alt=mystnb["image"]["alt"],
                )
                caption = nodes.caption("", "", *self.inline("\n".join(self.content)))
                return [nodes.figure("", image, caption, classes=["of-the-book"])]
        raise self.error(f"no figure {figure} in {name}.ipynb")

    def picture(self, name, data):
        """Write a picture beside the builder's other files; its place as seen from this page."""
        path = Path(self.env.app.doctreedir) / "figures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))
        return os.path.relpath(path, Path(self.env.doc2path(self.env.docname)).parent)


def setup(app):
    app.add_directive("ask", Ask)
    app.add_directive("map", Map)
    app.add_directive("figure-of", FigureOf)
    return {"version": "1", "parallel_read_safe": True}
