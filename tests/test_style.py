"""bpkit.style: tables, and defaults that hold for every figure of the book."""

import matplotlib
import pytest
from matplotlib import pyplot as plt

from bpkit import style

matplotlib.use("Agg")


def test_a_table_is_aligned_text_and_html_with_headings():
    table = style.Table(["a", "value"], [["long name", 1], ["<b>", None]])
    assert repr(table) == "a          value\nlong name  1\n<b>        None"
    html = table._repr_html_()
    assert '<th scope="col">value</th>' in html
    assert '<th scope="row">&lt;b&gt;</th><td>None</td>' in html


def test_a_short_row_is_refused():
    with pytest.raises(ValueError, match="a row has 1 cells, the header 2"):
        style.Table(["a", "b"], [["x"]])


def test_colour_is_never_the_only_cue():
    with plt.rc_context():
        style.use()
        cycle = list(plt.rcParams["axes.prop_cycle"])
        assert plt.rcParams["savefig.facecolor"] == style.PAPER
    for cue in ("color", "linestyle", "marker"):
        assert len({str(entry[cue]) for entry in cycle}) == len(cycle)
