"""Which claims of the source articles does the book check, with what result, and where?

The directive ``{claims}`` writes the ledger ``tests/claims.json`` for the chapters in the table of
contents: the counts, then claim by claim. A claim is shown where a notebook cell's metadata
``claims`` names it, and links there.
"""

import json
import re
from collections import Counter
from pathlib import Path

from docutils import nodes
from markup import Directive
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

logger = logging.getLogger(__name__)

LEDGER = "tests/claims.json"
# Beside a claim, in a sentence, and at the head of the table.
VERDICTS = {
    "holds": ("✓ holds", "hold", "✓ holds"),
    "caveat": ("≈ holds with a caveat", "hold with a caveat", "≈ caveat"),
    "wrong": ("✗ wrong", "wrong", "✗ wrong"),
    "untestable": ("– not testable here", "not testable here", "– open"),
}
CHAPTER = re.compile(r"(?:.*/)?(\d\d)[a-z]?_")


class shown_in(nodes.General, nodes.Element):
    """Stands for the links to the places that show the claim ``claim``."""


class Claims(Directive):
    def run(self):
        path = Path(self.env.srcdir) / LEDGER
        self.env.note_dependency(str(path))
        ledger = json.loads(path.read_text(encoding="utf-8"))
        chapters = {}
        for docname in sorted(self.env.found_docs):
            if match := CHAPTER.match(docname):
                chapters.setdefault(int(match[1]), []).append(docname)
                self.env.note_dependency(self.env.doc2path(docname))
        # A chapter is there with its main notebook, 08_… and not 08e_…
        chapters = {n: docs for n, docs in chapters.items() if any(f"/{n:02d}_" in d for d in docs)}
        # A claim of several chapters stands once, under the first of them.
        grouped = {number: [] for number in sorted(chapters)}
        for claim in ledger:
            if claim["verdict"] not in VERDICTS:
                raise self.error(
                    f"{LEDGER}: claim {claim['id']} has the verdict {claim['verdict']!r};"
                    f" expected one of {', '.join(VERDICTS)}"
                )
            present = [number for number in sorted(claim["chapters"]) if number in grouped]
            if present:
                grouped[present[0]].append(claim)
        grouped = {number: claims for number, claims in grouped.items() if claims}
        chapters = [self.chapter(number, claims) for number, claims in grouped.items()]
        return [self.counts(grouped), *chapters]

    def counts(self, grouped):
        """A table: chapters, and how many of their claims have which verdict."""
        rows = [["Chapter", *(text[2] for text in VERDICTS.values())]]
        for number, claims in grouped.items():
            link = nodes.reference("", str(number), refid=f"claims-chapter-{number}")
            rows.append([link, *self.tally(claims)])
        rows.append(["All", *self.tally([c for claims in grouped.values() for c in claims])])
        group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in rows[0]), cols=len(rows[0]))
        lines = [nodes.row("", *map(self.entry, row)) for row in rows]
        group += [nodes.thead("", lines[0]), nodes.tbody("", *lines[1:])]
        return nodes.table("", group, classes=["claims-counts"])

    @staticmethod
    def tally(claims):
        counts = Counter(claim["verdict"] for claim in claims)
        return [str(counts[verdict]) for verdict in VERDICTS]

    @staticmethod
    def entry(content):
        inline = content if isinstance(content, nodes.Node) else nodes.Text(content)
        return nodes.entry("", nodes.paragraph("", "", inline))

    def chapter(self, number, claims):
        section = nodes.section(ids=[f"claims-chapter-{number}"])
        section += nodes.title("", "", *self.inline(f"Chapter {number}"))
        section += self.summary(sorted(claims, key=_order))
        listing = nodes.definition_list(classes=["claims"])
        listing += [self.item(claim) for claim in sorted(claims, key=_order)]
        section += listing
        return section

    @staticmethod
    def summary(claims):
        """How many hold and so on; those that are wrong, as links."""
        counts = Counter(claim["verdict"] for claim in claims)
        parts = [f"{counts[v]} {text[1]}" for v, text in VERDICTS.items() if counts[v]]
        paragraph = nodes.paragraph("", f"Claims: {len(claims)}. Of these {', '.join(parts)}.")
        wrong = [claim["id"] for claim in claims if claim["verdict"] == "wrong"]
        for i, claim in enumerate(wrong):
            paragraph += nodes.Text(", " if i else " Wrong: ")
            paragraph += nodes.reference("", claim, refid=f"claim-{claim.lower()}")
        if wrong:
            paragraph += nodes.Text(".")
        return paragraph

    def item(self, claim):
        verdict = claim["verdict"]
        term = nodes.term("", ids=[f"claim-{claim['id'].lower()}"])
        term += [
            nodes.inline("", claim["id"], classes=["claim-id"]),
            nodes.Text(" "),
            nodes.inline("", VERDICTS[verdict][0], classes=["verdict", f"verdict-{verdict}"]),
            nodes.Text(" "),
            nodes.inline(
                "", f"article {claim['article']}, {claim['section']}", classes=["claim-source"]
            ),
        ]
        body = nodes.definition()
        body += nodes.paragraph("", "", *self.inline(claim["claim"]), classes=["claim-text"])
        if claim.get("finding"):
            label = nodes.strong("", "Found: ")
            body += nodes.paragraph("", "", label, *self.inline(claim["finding"]))
        body += shown_in(claim=claim["id"], verdict=verdict)
        return nodes.definition_list_item("", term, body)


def _order(claim):
    letter, digits = re.fullmatch(r"([A-Z]+)(\d+)", claim["id"]).groups()
    return letter, int(digits)


class ShownIn(SphinxPostTransform):
    """Links to the nearest heading above each cell that names the claim."""

    default_priority = 5

    def run(self, **kwargs):
        pending = list(self.document.findall(shown_in))
        if not pending:
            return
        places = {}
        for docname in sorted(self.env.found_docs):
            if CHAPTER.match(docname):
                self.collect(docname, places)
        for node in pending:
            links = places.get(node["claim"], [])
            if not links and node["verdict"] == "untestable":
                node.replace_self(nodes.paragraph("", "Stands on this page only."))
                continue
            paragraph = nodes.paragraph("", "Shown in: " if links else "Not shown in a notebook.")
            for i, (docname, section) in enumerate(links):
                if i:
                    paragraph += nodes.Text("; ")
                paragraph += self.link(docname, section)
            node.replace_self(paragraph)

    def collect(self, docname, places):
        path = Path(self.env.doc2path(docname))
        if path.suffix != ".ipynb":
            return
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        named = [
            (i, c["metadata"]["claims"]) for i, c in enumerate(cells) if "claims" in c["metadata"]
        ]
        # MyST-NB counts lines as 10000 * (cell + 1) + line, so a heading's line tells its cell.
        sections = [
            (node.line // 10_000 - 1, node)
            for node in self.env.get_doctree(docname).findall(nodes.section)
            if node.line is not None  # the text of an exercise is a section too, without a title
        ]
        for cell, ids in named:
            above = [section for start, section in sections if start <= cell]
            for claim in ids:
                place = (docname, above[-1] if above else sections[0][1])
                if place not in places.setdefault(claim, []):
                    places[claim].append(place)

    def link(self, docname, section):
        anchor = section["ids"][0]
        number = self.env.toc_secnumbers.get(docname, {}).get("", ())
        label = [child.deepcopy() for child in section.next_node(nodes.title).children]
        if number:
            label.insert(0, nodes.Text(f"Chapter {'.'.join(map(str, number))}, "))
        uri = self.app.builder.get_relative_uri(self.env.docname, docname)
        return nodes.reference("", "", *label, internal=True, refuri=f"{uri}#{anchor}")


def setup(app):
    app.add_node(shown_in)
    app.add_directive("claims", Claims)
    app.add_post_transform(ShownIn)
    return {"version": "1", "env_version": 1, "parallel_read_safe": True}
