"""What is behind what I see?  The directives of the page ``symptoms``, made from the catalogue.

``{look-up}`` is a box that looks a pasted message up; ``{seen}`` lists what is seen without one;
``{messages}`` lists the errors and warnings that faults raise; ``{cards}`` all faults by layer.
All texts come from ``bpkit/diagnosis``, as those of the reports and of the failure cards do.
"""

import json
import re
from importlib import resources

from docutils import nodes
from markup import Directive
from sphinx import addnodes

LAYERS = {
    "data": ("Data", "Before the model is involved: what goes in."),
    "forward": ("Forward", "From the batch to the loss: what is computed, and from what."),
    "backward": ("Backward", "From the loss to the gradients: what the graph passes on."),
    "update": ("Update", "From the gradients to the weights: the loop around the model."),
    "memory": ("Memory", "What has to be kept, and for how long."),
}
BOX = """
<form class="message-box" hidden>
<label for="message">Paste an error or a warning, with as much around it as you like:</label>
<textarea id="message" rows="4" spellcheck="false" autocomplete="off"></textarea>
<div class="message-found" aria-live="polite"></div>
</form>
<script type="application/json" id="message-patterns">{data}</script>
"""


class Catalogue(Directive):
    """What the three have in common: texts of the catalogue as nodes."""

    def run(self):
        from bpkit.diagnosis import faults  # brings torch along, so only where it is used

        self.faults = faults
        for file in ("faults.toml", "symptoms.toml"):
            self.env.note_dependency(str(resources.files("bpkit.diagnosis").joinpath(file)))
        return self.listing()

    def inline(self, text):
        """MyST inline markup: code, links; the name of a fault is a link to its card."""
        named, children = self.faults.FAULTS, super().inline(text)
        return [self.reference(c.astext(), c) if c.astext() in named else c for c in children]

    def paragraph(self, text, head=""):
        start = [nodes.strong("", f"{head}."), nodes.Text(" ")] if head else []
        return nodes.paragraph("", "", *start, *self.inline(text))

    def link(self, slug):
        """A cross-reference to the card, its title as text."""
        return self.reference(slug, *self.inline(self.faults.FAULTS[slug].title))

    def reference(self, slug, *content):
        """A cross-reference to the card; Sphinx warns if there is none."""
        return addnodes.pending_xref(
            "", nodes.inline("", "", *content), refdomain="std", reftype="ref",
            reftarget=slug, refexplicit=True, refwarn=True, refdoc=self.env.docname,
        )  # fmt: skip

    def candidates(self, slugs):
        """The faults in the order given, each with the measurement that decides."""
        listed = nodes.enumerated_list(enumtype="arabic", prefix="", suffix=".")
        for slug in slugs:
            decides = self.inline(self.faults.FAULTS[slug].decides)
            text = nodes.paragraph("", "", self.link(slug), nodes.Text(": "), *decides)
            listed += nodes.list_item("", text)
        return listed

    def section(self, name, title):
        section = nodes.section(ids=[name], names=[name])
        self.state.document.note_explicit_target(section)
        section += nodes.title("", "", *self.inline(title))
        return section


class LookUp(Catalogue):
    """The box, with the patterns it needs; ``symptoms.js`` makes it work."""

    def listing(self):
        faults = self.faults.FAULTS.values()
        data = [
            [pattern.pattern, fault.slug, fault.title, f"{fault.page}.html#{fault.anchor}"]
            for fault in faults
            for pattern in fault.errors
        ]
        decides = {fault.slug: fault.decides for fault in faults if fault.errors}
        text = json.dumps({"patterns": data, "decides": decides}, ensure_ascii=False)
        return [nodes.raw("", BOX.format(data=text.replace("<", "\\u003c")), format="html")]


class Messages(Catalogue):
    """The messages, each with the faults that can be behind it."""

    def listing(self):
        faults = self.faults.FAULTS.values()
        behind = {}
        for fault in faults:
            for pattern in fault.errors:
                behind.setdefault(pattern.pattern, []).append(fault.slug)
        together = {}  # messages with the same faults behind them stand together
        for pattern, slugs in behind.items():
            together.setdefault(tuple(slugs), []).append(pattern)
        listed = nodes.definition_list(classes=["messages"])
        for slugs, patterns in together.items():
            item = nodes.definition_list_item()
            for pattern in patterns:
                item += nodes.term("", "", nodes.literal("", self.faults.readable(pattern)))
            one = nodes.paragraph("", "", self.link(slugs[0]))
            item += nodes.definition("", one if len(slugs) == 1 else self.candidates(slugs))
            listed += item
        return [listed]


class Seen(Catalogue):
    """What is seen without a message: what to measure first, and the candidates."""

    def listing(self):
        overview, sections = nodes.bullet_list(classes=["overview"]), []
        self.names = {s.title: s.name for s in self.faults.SYMPTOMS.values()}
        for symptom in self.faults.SYMPTOMS.values():
            overview += nodes.list_item("", nodes.paragraph("", "", self.jump(symptom.title)))
            section = self.section(symptom.name, symptom.title)
            head = nodes.strong("", "Measure first.")
            section += nodes.paragraph("", "", head, nodes.Text(" "), *self.linked(symptom.first))
            section += self.candidates(symptom.faults)
            sections.append(section)
        return [overview, *sections]

    def jump(self, title):
        return nodes.reference("", "", *self.inline(title), refid=self.names[title])

    def linked(self, text):
        """Inline markup, in which “the title of another entry” is a link to it."""
        pieces = re.split("“(.+?)”", text)
        for k, piece in enumerate(pieces):
            if k % 2:
                yield from (nodes.Text("“"), self.jump(piece), nodes.Text("”"))
            else:
                before, after = (" " if end.isspace() else "" for end in (piece[:1], piece[-1:]))
                yield from (nodes.Text(before), *self.inline(piece), nodes.Text(after))


class Cards(Catalogue):
    """Every fault, by layer: its name in reports and its card."""

    def listing(self):
        sections = []
        for layer, (title, what) in LAYERS.items():
            section = self.section(f"faults-{layer}", title)
            section += self.paragraph(what)
            listed = nodes.bullet_list()
            faults = [f for f in self.faults.FAULTS.values() if f.layer == layer]
            for fault in faults:
                entry = nodes.paragraph("", "", nodes.literal("", fault.slug), nodes.Text(": "))
                entry += self.link(fault.slug)
                listed += nodes.list_item("", entry)
            section += listed
            sections.append(section)
        return sections


def setup(app):
    app.add_directive("look-up", LookUp)
    app.add_directive("messages", Messages)
    app.add_directive("seen", Seen)
    app.add_directive("cards", Cards)
    return {"version": "1", "parallel_read_safe": True}
