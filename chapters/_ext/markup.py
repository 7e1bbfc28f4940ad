"""How does a line of MyST that a directive holds become nodes?"""

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


class Directive(SphinxDirective):
    """What the directives of this book have in common."""

    def inline(self, text):
        """The nodes of one paragraph of MyST: code, formulas, links."""
        return [
            child
            for node in self.parse_text_to_nodes(text)
            for child in (node.children if isinstance(node, nodes.paragraph) else [node])
        ]
