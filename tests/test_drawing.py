"""bpkit.drawing: a picture that says what the graph says."""

import io
from itertools import pairwise

import matplotlib
import pytest
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Ellipse, FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import nn

from bpkit import record, trace
from bpkit.drawing import _apart, layout

matplotlib.use("Agg")
DOUBLE = {"dtype": torch.float64, "requires_grad": True}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def small_graph():
    f = torch.tensor(1.5, **DOUBLE)
    with record(names={"f": f}) as recording:
        h = f**2
        loss = 3 * h + torch.sin(h)
    return recording.graph(loss, {"h": h, "L": loss}, gradients=True)


def texts(figure):
    return [t.get_text() for t in figure.axes[0].texts if t.get_text()]


def shapes(figure, kind):
    return [p for p in figure.axes[0].patches if type(p) is kind]


def test_every_value_and_contribution_is_written():
    written = texts(small_graph().draw())
    for expected in (
        "1.5",
        "h = 2.25",
        "6.75",
        "0.7781",
        "7.528",
        "7.115",
        "3",
        "−0.6282",
        "Σ = 2.372",
    ):
        assert expected in written


def test_what_is_drawn_unless_asked_for():
    graph = small_graph()
    plain, whole = texts(graph.draw()), texts(graph.draw(saved=True))
    assert plain == texts(graph.draw(values=True, gradients=True, saved=False))
    assert any(text.startswith("keeps") for text in whole)
    assert not any(text.startswith("keeps") for text in plain)


def test_values_flow_down_and_gradients_up():
    figure = small_graph().draw()
    arrows = shapes(figure, FancyArrowPatch)
    down = [a for a in arrows if a._posA_posB[0][1] > a._posA_posB[1][1]]
    up = [a for a in arrows if a._posA_posB[0][1] < a._posA_posB[1][1]]
    assert len(down) == 7  # six edges, and the loss
    assert len(up) == 6  # nothing goes back to the constant
    assert {a.get_linestyle() for a in down} == {"-"}
    assert len({a.get_edgecolor() for a in down} | {a.get_edgecolor() for a in up}) == 2


def test_leaves_parameters_and_operations_differ_in_shape_and_colour():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = torch.randn(5, 3, requires_grad=True)
    figure = trace(model(x).sum(), names=model).draw()
    ellipses, boxes = shapes(figure, Ellipse), shapes(figure, Rectangle)
    rounded = shapes(figure, FancyBboxPatch)
    assert (len(ellipses), len(boxes), len(rounded)) == (1, 2, 3)
    assert len({p.get_facecolor() for p in (ellipses[0], boxes[0], rounded[0])}) == 3


def test_what_is_kept_can_be_shown():
    x, w = torch.tensor(2.0, **DOUBLE), torch.tensor(3.0, **DOUBLE)
    written = texts(trace((x * w).exp() + 1, names={"x": x, "w": w}).draw(saved=True))
    assert "keeps other = 3, self = 2" in written
    assert "keeps nothing" in written
    y = x.exp()
    y.backward()
    assert "keeps nothing" in texts(trace(y).draw(saved=True))


def test_rows_go_down_and_nothing_overlaps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    loss = F.cross_entropy(model(torch.randn(5, 3)), torch.zeros(5, dtype=torch.long))
    graph = trace(loss, names=model)
    places = layout(graph)
    assert all(places[e.source][1] < places[e.target][1] for e in graph.edges)
    by_row = {}
    for x, y in places.values():
        by_row.setdefault(y, []).append(x)
    gaps = [b - a for xs in by_row.values() for a, b in pairwise(sorted(xs))]
    assert min(gaps) >= 1 - 1e-9


def test_apart_moves_as_little_as_it_must():
    assert _apart([0.0, 5.0]) == [0.0, 5.0]
    assert _apart([1.0, 1.0]) == [0.5, 1.5]
    assert _apart([2.0, 1.0, 0.0]) == [0.0, 1.0, 2.0]


def test_a_large_graph_is_refused_with_advice():
    x = torch.tensor(1.0, **DOUBLE)
    y = x
    for _ in range(50):
        y = y.sin()
    with pytest.raises(
        ValueError, match=r"51 nodes make no readable picture \(limit 40\).*text\(\)"
    ):
        trace(y).draw()
    assert trace(y).draw(limit=60) is not None


def test_names_are_not_read_as_formulas():
    x = torch.tensor(2.0, **DOUBLE)
    figure = trace(x * x, names={"$x^{$": x}).draw(title="$")
    figure.savefig(io.BytesIO())
    assert "$x^{$" in texts(figure)


def test_one_leaf_and_several_outputs():
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).requires_grad_()
    assert texts(trace({"x": x}).draw()) == ["2×3", "x", "x"]
    with record() as recording:
        left, right = x.split([1, 2], dim=1)
        small = right.sum()
    written = texts(recording.graph([left, right]).draw())
    assert (written.count("2×1"), written.count("2×2"), written.count("output")) == (1, 1, 2)
    whole = recording.graph(small, gradients=True)
    assert texts(whole.draw()).count("2×2") == 2  # the value and its gradient, not those of left


def test_rows_are_close_and_leaves_stand_right_above_their_first_user():
    x, w, b = (torch.tensor(v, **DOUBLE) for v in (2.0, 3.0, 1.0))
    graph = trace((x * w).sin() + b, names={"x": x, "w": w, "b": b})
    rows = {node.name or node.short: layout(graph)[node.index][1] for node in graph.nodes}
    assert rows == {"x": 0, "w": 0, "mul": 1, "sin": 2, "b": 2, "add": 3}


def test_values_stand_on_the_left_and_gradients_on_the_right():
    x = torch.tensor(1.5, **DOUBLE)
    with record(names={"x": x}) as recording:
        y = x.sin()
    figure = recording.graph(y, gradients=True).draw()
    place = {t.get_text(): t.get_position()[0] for t in figure.axes[0].texts}
    assert place["1.5"] < place["x"] < place["0.07074"]
    assert not [text for text in texts(figure) if "Σ" in text]


def test_two_uses_by_one_operation_and_two_outputs_are_drawn_apart():
    x = torch.tensor(1.5, **DOUBLE)
    y = x * x
    figure = trace([y, y.sin()]).draw()
    arrows = [a._posA_posB for a in shapes(figure, FancyArrowPatch)]
    assert len({(*start, *end) for start, end in arrows}) == len(arrows) == 5
    ends = [t.get_position() for t in figure.axes[0].texts if t.get_text() == "output"]
    assert len(set(map(tuple, ends))) == 2


def test_notes_of_neighbours_turn_away_from_each_other_and_stay_inside():
    x, w = torch.tensor(2.0, **DOUBLE), torch.tensor(3.0, **DOUBLE)
    figure = trace(x.exp() * w.sin()).draw(saved=True)
    notes = {t.get_text(): t for t in figure.axes[0].texts if t.get_text().startswith("keeps")}
    sides = [notes[text].get_ha() for text in ("keeps result = 7.389", "keeps self = 3")]
    assert sides == ["right", "left"]
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [note.get_window_extent(renderer) for note in notes.values()]
    assert min(box.x0 for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= renderer.width


def test_edges_that_need_not_cross_do_not():
    x, w = torch.tensor(2.0, **DOUBLE), torch.tensor(3.0, **DOUBLE)
    first, second = x.sin(), w.cos()
    graph = trace(second.exp() * first.tanh())
    column = {node.short: layout(graph)[node.index][0] for node in graph.operations}
    assert (column["sin"] < column["cos"]) == (column["tanh"] < column["exp"])


def test_a_wide_graph_moves_together_but_its_names_do_not_touch():
    model = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 2))
    loss = F.cross_entropy(model(torch.randn(5, 3)), torch.tensor([0, 1, 1, 0, 1]))
    assert trace(loss, names=model).draw().get_size_inches()[0] < 6.4
    long = {f"a_parameter_with_a_long_name_{k}": torch.ones(1, requires_grad=True) for k in "abcd"}
    figure = trace(sum(torch.stack(list(long.values()))), names=long).draw()
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = sorted(tuple(p.get_window_extent(renderer).intervalx) for p in shapes(figure, Ellipse))
    assert len(boxes) == 4
    assert all(left < right for (_, left), (right, _) in pairwise(boxes))
