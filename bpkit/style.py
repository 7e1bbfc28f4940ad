"""How does a figure or a table of this book look?  Introduced in chapter 1.

One palette (Okabe and Ito's, which readers with any common form of colour blindness can tell
apart), opaque white so that a picture reads the same in the dark theme, and line styles and
markers that vary together with the colour, so that colour is never the only cue.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from cycler import cycler
from matplotlib import pyplot as plt

__all__ = ["Table", "use"]

# Okabe & Ito (2008), https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW = (
    "#0072B2", "#D55E00", "#009E73", "#AA4488", "#56B4E9", "#B8860B",
)  # fmt: skip
INK, MUTED, FAINT, PAPER = "#1B1F24", "#57606A", "#D0D7DE", "#FFFFFF"

# What a colour means wherever a graph is drawn: values flow forward, gradients flow back. Where
# two runs are compared, the healthy one is blue and solid, the faulty one orange and dashed.
VALUE, GRADIENT = BLUE, ORANGE


def wrapped(text: str, rest: int = 0, width: int = 76) -> list[str]:
    """Lines that fit into a terminal and a page, the later ones indented by ``rest``; a name or a
    path is not torn apart.

    >>> wrapped("a long sentence", rest=2, width=8)
    ['a long', '  sentence']
    """
    return textwrap.wrap(
        text, width, subsequent_indent=" " * rest, break_long_words=False, break_on_hyphens=False
    )


def use() -> None:
    """Set matplotlib's defaults for the rest of this process: fonts, sizes, palette, grid."""
    # Loads the back end now: in a notebook, that is what lets a returned figure show itself.
    plt.switch_backend(plt.get_backend())
    plt.rcParams.update(
        {
            "figure.figsize": (6.4, 3.6),
            "figure.dpi": 110,
            "savefig.dpi": 110,
            "figure.facecolor": PAPER,
            "savefig.facecolor": PAPER,
            "font.size": 11,
            "axes.titlesize": 12,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "axes.edgecolor": MUTED,
            "axes.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": FAINT,
            "grid.linewidth": 0.8,
            "text.color": INK,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "lines.linewidth": 2.0,
            "lines.markersize": 5,
            "legend.frameon": False,
            "axes.prop_cycle": (
                cycler(color=[BLUE, ORANGE, GREEN, PURPLE, YELLOW])
                + cycler(linestyle=["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))])
                + cycler(marker=["o", "s", "^", "D", "v"])
            ),
        }
    )


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header: aligned text in a terminal, a real table in a notebook.

    Args:
        header: one heading for each column.
        rows: as many cells in each; the first of each row names it.

    Example:
        >>> Table(["operation", "keeps"], [["add", "nothing"], ["exp", "result"]])
        operation  keeps
        add        nothing
        exp        result
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"a row has {len(row)} cells, the header {len(self.header)}: {list(row)}"
                )

    def __repr__(self) -> str:
        lines = [[str(cell) for cell in line] for line in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in self.header)
        body = "".join(
            f'<tr><th scope="row">{escape(str(row[0]))}</th>'
            + "".join(f"<td>{escape(str(cell))}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        # The class "dataframe" is laid out well by notebooks and by the book's theme.
        head, body = f"<thead><tr>{head}</tr></thead>", f"<tbody>{body}</tbody>"
        return f'<table class="dataframe">{head}{body}</table>'
