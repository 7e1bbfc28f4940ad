"""Which faults are there, by layer?  The directive ``{faults}`` writes the catalogue as a page.

The texts come from ``bpkit/diagnosis/faults.toml``, as those of the reports do. Each fault is a
section whose anchor is its slug.
"""

import re
from importlib import resources

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

LAYERS = {
    "data": ("Data", "Before the model is involved: what goes in."),
    "forward": ("Forward", "From the batch to the loss: what is computed, and from what."),
    "backward": ("Backward", "From the loss to the gradients: what the graph passes on."),
    "update": ("Update", "From the gradients to the weights: the loop around the model."),
    "memory": ("Memory", "What has to be kept, and for how long."),
}


def readable(pattern):
    """A pattern as a person would quote the message, with … for what varies.

    >>> readable(r"Target .+? is out of bounds")
    'Target … is out of bounds'
    """
    text = re.sub(r"\\d\+|\\w\+|(?<!\\)\.[+*]\??", "…", pattern)
    return re.sub(r"\\(.)", r"\1", text)


class Faults(SphinxDirective):
    def run(self):
        from bpkit.diagnosis.faults import FAULTS  # brings torch along, so only where it is used

        self.env.note_dependency(str(resources.files("bpkit.diagnosis").joinpath("faults.toml")))
        sections = []
        for layer, (title, what) in LAYERS.items():
            section = nodes.section(ids=[f"faults-{layer}"])
            section += [nodes.title("", title), nodes.paragraph("", what)]
            section += [self.fault(f) for f in FAULTS.values() if f.layer == layer]
            sections.append(section)
        return sections

    def fault(self, fault):
        section = nodes.section(ids=[fault.slug], names=[fault.slug], classes=["fault"])
        self.state.document.note_explicit_target(section)
        section += nodes.title("", "", *self.inline(fault.title))
        seen = nodes.bullet_list()
        for symptom in fault.symptoms:
            seen += nodes.list_item("", nodes.paragraph("", "", *self.inline(symptom)))
        for pattern in fault.errors:
            said = nodes.literal("", readable(pattern.pattern))
            seen += nodes.list_item("", nodes.paragraph("", "", said))
        section += [nodes.paragraph("", "", nodes.literal("", fault.slug)), seen]
        for label, text in (
            ("What decides", fault.decides),
            ("Why", fault.cause),
            ("Repair", fault.repair),
        ):
            head = nodes.strong("", f"{label}. ")
            section += nodes.paragraph("", "", head, *self.inline(text))
        return section

    def inline(self, text):
        """MyST inline markup: code, links."""
        return [
            child
            for node in self.parse_text_to_nodes(text)
            for child in (node.children if isinstance(node, nodes.paragraph) else [node])
        ]


def setup(app):
    app.add_directive("faults", Faults)
    return {"version": "1", "parallel_read_safe": True}
