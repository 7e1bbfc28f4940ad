"""What do the pages and the helpers cost?  Tables out of the records that measurements left.

``{costs}`` writes a table of all pages from ``tests/costs.json``; ``{benchmark} watch`` one of the
ratios in ``tests/benchmarks/watch.json``, ``key :: what it is`` on each line. With the option
``:columns: small | large``, a line is a row of the ratios ``key, small`` and ``key, large``; with
``:decimals: 2``, not three digits but two decimals are shown.
``{growth}`` draws cost against size.
``{stability}`` writes a table of the runs in ``tests/stability.json``.
"""

import itertools
import json
import math
import os
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from markup import Directive

PAGES = "tests/costs.json"
BENCHMARKS = "tests/benchmarks"
MINUS = "\N{MINUS SIGN}"
STABILITY = "tests/stability.json"


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
    """Ratios, each with the middle half of its rounds; all that were measured, good or bad."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"columns": directives.unchanged, "decimals": int}

    def run(self):
        name = self.arguments[0]
        record = self.record(f"{BENCHMARKS}/{name}.json")
        columns = [c.strip() for c in self.options.get("columns", "").split("|")]
        rows, left = [], set(record["spread"])
        for line in self.content:
            key, colon, text = line.partition(" :: ")
            keys = [f"{key}, {column}" if column else key for column in columns]
            if not colon or not left.issuperset(keys):
                raise self.error(
                    f"benchmark {name}: {line!r} is not 'key :: what it is', where"
                    f" {' and '.join(keys)} are among the ratios left: {', '.join(sorted(left))}"
                )
            left.difference_update(keys)
            rows.append(
                [text, *(with_spread(record, key, self.options.get("decimals")) for key in keys)]
            )
        if left:
            raise self.error(f"benchmark {name}: measured and not shown: {', '.join(sorted(left))}")
        table = self.table(["what is compared", *(c or "ratio" for c in columns)], rows)
        rounds = self.paragraph(f"{self.measured(record)} {record['rounds']} rounds.")
        return [table, rounds]


class Growth(Tables):
    """``{growth}``: the times in ``growth.json`` against the size, with the content as caption."""

    has_content = True

    def run(self):
        record = self.record(f"{BENCHMARKS}/growth.json")
        path = Path(self.env.app.doctreedir) / "figures" / "growth.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_growth(record).savefig(path)
        place = os.path.relpath(path, Path(self.env.doc2path(self.env.docname)).parent)
        image = nodes.image(uri=place, alt=growth_in_words(record))
        caption = nodes.caption("", "", *self.inline(" ".join(self.content)))
        figure = nodes.figure("", image, caption)
        # In the frame of a notebook's figure: white in the dark theme, wide on a phone.
        return [
            nodes.container(
                "", nodes.container("", figure, classes=["cell_output"]), classes=["cell"]
            )
        ]


AXES = {
    "parameters": ("Four blocks, made wider", "parameters"),
    "layers": ("32 units wide, made deeper", "blocks"),
}


def draw_growth(record):
    """Two panels with logarithmic axes, a line for each helper, its slope written at its end."""
    import matplotlib as mpl  # only where it is used: it takes a second to load

    from bpkit import style

    colours = [
        style.BLUE, style.GREEN, style.PURPLE, style.YELLOW, style.SKY, style.ORANGE, style.INK,
    ]  # fmt: skip
    with mpl.rc_context():
        style.use()
        figure = mpl.figure.Figure(figsize=(6.4, 8.4), layout="constrained")
        panels = figure.subplots(2, 1)
        for panel, (axis, (title, unit)) in zip(panels, AXES.items(), strict=True):
            series = dict(record["series"][axis])
            sizes = series.pop("sizes")
            # What the helpers are compared with is no colour among theirs.
            panel.plot(sizes, milliseconds(series["step"]), "--", color=style.MUTED, marker="")
            helpers = [name for name in series if name != "step"]
            for name, colour, marker in zip(helpers, colours, "os^DvPX", strict=True):
                panel.plot(sizes, milliseconds(series[name]), "-", color=colour, marker=marker)
            panel.set(xscale="log", yscale="log", xlabel=unit, title=title)
            panel.set_ylabel("milliseconds of processor time")
            panel.xaxis.set_major_formatter("{x:,.0f}")
            panel.yaxis.set_major_formatter("{x:,.10g}")
            ends = {name: milliseconds(times)[-1] for name, times in series.items()}
            for name, height in apart(ends).items():
                panel.annotate(
                    f"{called(name)}  {slope(record, name, axis)}",
                    (sizes[-1], ends[name]),
                    (sizes[-1] * 1.4, height),
                    va="center",
                    arrowprops={"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.8},
                )
    return figure


def apart(heights, factor=1.6):
    """The heights on a logarithmic axis, moved as little as labels of one line need."""
    logs = {name: math.log(height) for name, height in heights.items()}
    for _ in range(100):
        for low, high in itertools.pairwise(sorted(logs, key=logs.get)):
            push = max(0, math.log(factor) - (logs[high] - logs[low])) / 2
            logs[low], logs[high] = logs[low] - push, logs[high] + push
    return {name: math.exp(height) for name, height in logs.items()}


def milliseconds(times):
    return [1e3 * seconds for seconds in times]


def called(name):
    return "training step" if name == "step" else name


def slope(record, name, axis):
    return f"{record['results'][f'{name}, {axis}']:z.1f}".replace("-", MINUS)


def growth_in_words(record):
    said = []
    for axis, (title, unit) in AXES.items():
        series = record["series"][axis]
        small, large = series["sizes"][0], series["sizes"][-1]
        slopes = [f"{called(n)} {slope(record, n, axis)}" for n in series if n != "sizes"]
        said.append(f"{title}, {small:,} to {large:,} {unit}: {', '.join(slopes)}.")
    return (
        "Processor time against size on logarithmic axes, a line for each helper, with its slope"
        f" over the last factor of ten. {' '.join(said)}"
    )


def with_spread(record, key, decimals):
    median, low, high = (
        three_digits(value) if decimals is None else f"{value:z.{decimals}f}".replace("-", MINUS)
        for value in (record["results"][key], *record["spread"][key])
    )
    return f"{median} ({low}–{high})"


class Stability(Tables):
    """Each way in which all tests were run: with which versions, and how it ended."""

    def run(self):
        runs = list(self.record(STABILITY).values())
        rows = [
            [
                run["text"],
                *(run[name] for name in ("python", "numpy", "torch")),
                *(f"{run[name]:,}" for name in ("passed", "failed")),
            ]
            for run in runs
        ]
        heads = ["what differs", "Python", "NumPy", "PyTorch", "passed", "failed"]
        days = sorted({run["date"] for run in runs})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        return [self.table(heads, rows), self.paragraph(f"Run on Linux, {when}.")]


def kilobytes(size):
    return f"{size / 1000:.0f}" if size else "–"


def three_digits(value):
    """Three digits, without an exponent: 0.00278, 1.50, 15,500."""
    digits = float(f"{value:.3g}")
    return f"{digits:,.{max(0, 2 - math.floor(math.log10(digits)))}f}"


def setup(app):
    app.add_directive("costs", Costs)
    app.add_directive("benchmark", Benchmark)
    app.add_directive("growth", Growth)
    app.add_directive("stability", Stability)
    return {"version": "1", "parallel_read_safe": True}
