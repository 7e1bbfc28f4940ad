"""What do the pages and the helpers cost?  Tables out of the records that measurements left.

``{costs}`` writes a table of all pages from ``tests/costs.json``; ``{benchmark} watch`` one of the
results in ``tests/benchmarks/watch.json`` that its lines name, ``key :: what it is`` each.
"""

import json
from pathlib import Path

from docutils import nodes
from markup import Directive

PAGES = "tests/costs.json"
BENCHMARKS = "tests/benchmarks"


class Tables(Directive):
    def record(self, name):
        path = Path(self.env.srcdir) / name
        if not path.exists():
            raise self.error(f"no record {name}; the command that writes it is on the page")
        self.env.note_dependency(str(path))
        return json.loads(path.read_text(encoding="utf-8"))

    def paragraph(self, text):
        return nodes.paragraph("", "", *self.inline(text))

    def table(self, heads, rows):
        """A table whose first column is text and whose other columns are numbers."""
        group = nodes.tgroup(cols=len(heads))
        group += [nodes.colspec(colwidth=1) for _ in heads]
        head, body = nodes.thead(), nodes.tbody()
        head += self.row(heads)
        body += [self.row(row) for row in rows]
        group += [head, body]
        return nodes.table("", group, classes=["costs"])

    def row(self, cells):
        row = nodes.row()
        for place, cell in enumerate(cells):
            content = cell if isinstance(cell, nodes.Node) else self.paragraph(cell)
            row += nodes.entry("", content, classes=["text-right"] if place else [])
        return row

    def measured(self, record):
        return (
            f"Measured on {record['date']}: {record['processor']} with {record['cores']} cores,"
            f" Python {record['python']}, PyTorch {record['torch']}."
        )


class Costs(Tables):
    """Each page in the order of the book, and the sum of the notebooks."""

    def run(self):
        record = self.record(PAGES)
        rows = [
            [
                self.paragraph(f"{{doc}}`/{name}`"),
                str(page["cells"] or "–"),
                f"{page['seconds']:.0f}" if page["cells"] else "–",
                *(kilobytes(page[kind]) for kind in ("html", "pictures", "scripts")),
                kilobytes(page["html"] + page["pictures"] + page["scripts"]),
            ]
            for name, page in record["pages"].items()
        ]
        run = [page for page in record["pages"].values() if page["cells"]]
        cells = sum(page["cells"] for page in run)
        seconds = sum(page["seconds"] for page in run)
        rows.append(["all notebooks", str(cells), f"{seconds:.0f}", "", "", "", ""])
        heads = ["page", "code cells", "seconds", "HTML", "pictures", "scripts", "kB together"]
        shared = f"What every page loads besides, once: {kilobytes(record['shared'])} kB. "
        return [self.table(heads, rows), self.paragraph(shared + self.measured(record))]


class Benchmark(Tables):
    required_arguments = 1
    has_content = True

    def run(self):
        record = self.record(f"{BENCHMARKS}/{self.arguments[0]}.json")
        rows = []
        for line in self.content:
            key, colon, text = line.partition(" :: ")
            if not colon or key not in record["results"]:
                raise self.error(
                    f"benchmark {self.arguments[0]}: {line!r} is not 'key :: what it is' with one"
                    f" of the keys {', '.join(record['results'])}"
                )
            rows.append([text, three_digits(record["results"][key])])
        table = self.table(["what is compared", "ratio"], rows)
        return [table, self.paragraph(self.measured(record))]


def kilobytes(size):
    return f"{size / 1000:.0f}" if size else "–"


def three_digits(value):
    """Three digits, without an exponent: 0.00278, 1.54, 15,500."""
    digits = float(f"{value:.3g}")
    return f"{digits:,.0f}" if digits >= 100 else f"{digits:g}"


def setup(app):
    app.add_directive("costs", Costs)
    app.add_directive("benchmark", Benchmark)
    return {"version": "1", "parallel_read_safe": True}
