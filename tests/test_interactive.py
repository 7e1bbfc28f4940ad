"""bpkit.interactive, its frames and the three drawings made with it: they refuse what is not so."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bpkit import record
from bpkit.interactive import nan, nan_walk, network_walk, rate_slider
from bpkit.interactive.frames import Frame, Frames, arrow, svg, text

GRADIENTS = ("S", "A", "Z", "W1", "b1", "W2", "b2")


def network():
    """Values and gradients of a small network, by PyTorch."""
    torch.manual_seed(3)
    draw = {"X": (4, 2), "W1": (2, 5), "b1": (5,), "W2": (5, 3), "b2": (3,)}
    v = {k: torch.randn(shape, dtype=torch.float64).requires_grad_() for k, shape in draw.items()}
    v["T"] = F.one_hot(torch.tensor([2, 0, 1, 2])).double()
    v["Z"] = v["X"] @ v["W1"] + v["b1"]
    v["A"] = v["Z"].relu()
    v["S"] = v["A"] @ v["W2"] + v["b2"]
    v["P"] = v["S"].softmax(1)
    v["L"] = F.cross_entropy(v["S"], v["T"])
    gradients = torch.autograd.grad(v["L"], [v[k] for k in GRADIENTS])
    return {k: t.detach().numpy() for k, t in v.items()}, dict(
        zip(GRADIENTS, gradients, strict=True)
    )


def paths(curvature=4.0):
    return {rate: [(1 - rate * curvature) ** k for k in range(6)] for rate in (0.1, 0.25, 0.5, 0.6)}


def empty_row():
    scores = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False, True], [True, True], [False, False]])
    with record(names={"scores": scores}) as recording:
        weights = scores.masked_fill(mask, -torch.inf).softmax(1)
        loss = (weights * 2).sum()
    return recording, loss


def drawings():
    return {
        "network": network_walk(*network()),
        "nan": nan_walk(*empty_row()),
        "rates": rate_slider(paths(), 4.0, 0.25),
    }


@pytest.mark.parametrize("name", drawings())
def test_drawings_are_well_formed_and_described(name):
    frames = drawings()[name]
    root = ET.fromstring(f"<r>{frames._repr_html_()}</r>")
    assert all(picture.get("aria-label") for picture in root.iter("svg") if picture.get("role"))
    assert len(list(root.iter("li"))) == len(frames.frames)
    marks = [
        int(number)
        for part in root.iter()
        for key in ("data-from", "data-only", "data-on")
        for number in part.get(key, "").split()
    ]
    assert marks
    assert max(marks) <= len(frames.frames)
    assert len(repr(frames).splitlines()) == len(frames.frames)


@pytest.mark.parametrize("name", ["Z", "A", "S", "P", "L"])
def test_a_value_that_does_not_obey_its_formula_is_refused(name):
    values, gradients = network()
    values[name] = values[name] * 1.001
    with pytest.raises(ValueError, match="do not obey"):
        network_walk(values, gradients)


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_does_not_obey_its_formula_is_refused(name):
    values, gradients = network()
    gradients[name] = gradients[name] * 1.001
    with pytest.raises(ValueError, match="do not obey"):
        network_walk(values, gradients)


def test_a_gradient_of_the_wrong_shape_is_refused():
    values, gradients = network()
    gradients["b1"] = gradients["b1"][None]
    with pytest.raises(ValueError, match="∂L/∂b₁"):
        network_walk(values, gradients)


def test_numbers_are_rounded_and_zeros_are_zeros():
    values, gradients = network()
    shown = network_walk(values, gradients).frames[8].detail  # ∂L/∂Z
    *_, table = re.findall(r"<pre>(.*?)</pre>", shown, re.DOTALL)
    rows = [row.replace("−", "-").split() for row in table.split("\n")]
    expected = np.asarray(gradients["Z"])
    assert np.abs(np.array(rows, float) - expected).max() <= 0.0005
    assert {cell for row in rows for cell in row if not float(cell)} == {"0"}
    assert sum(cell == "0" for row in rows for cell in row) == (expected == 0).sum() > 0


def test_the_nan_is_walked_back_to_the_row_that_made_it():
    told = [frame.text for frame in nan_walk(*empty_row()).frames]
    assert [t.split()[0] for t in told[:-1]] == ["sum", "mul", "softmax"]
    assert "It read the result of softmax (NaN in row 1). It only handed the NaN on" in told[1]
    assert "softmax returned NaN in row 1" in told[2]
    assert "masked_fill (−∞ in rows 0, 1): no NaN. So the NaN was born here" in told[2]
    assert "“weights = scores.masked_fill(mask, -torch.inf).softmax(1)”" in told[2]
    assert told[3] == (
        "You looked at 3 of 4 operations. A search from the front stops at masked_fill "
        "(−∞ in rows 0, 1) and accuses the wrong one: 0 come out of softmax in good health."
    )


def test_a_finite_loss_is_refused():
    with record() as recording:
        loss = torch.ones(2, 2).sum()
    with pytest.raises(ValueError, match="the loss is 4, not NaN"):
        nan_walk(recording, loss)


@pytest.mark.parametrize("found", [{"operation": "exp"}, {"line": None}])
def test_two_searches_that_disagree_are_refused(found, monkeypatch):
    """The walk goes back from the loss, find_nonfinite forward from the data."""
    explain = nan.explain
    monkeypatch.setattr(nan, "explain", lambda *given: replace(explain(*given), **found))
    with pytest.raises(ValueError, match="the trail ends at softmax"):
        nan_walk(*empty_row())


def test_a_nan_in_the_data_is_refused():
    x = torch.tensor([[1.0], [torch.nan]], requires_grad=True)
    with record() as recording:
        loss = (x * 2).sum()
    with pytest.raises(ValueError, match="look at the data"):
        nan_walk(recording, loss)


@pytest.mark.parametrize(
    ("rate", "label"),
    [(0, "0.1, it creeps"), (1, "0.25, the best rate"), (2, "0.5, the limit, it stands"),
     (3, "0.6, it blows up")],
)  # fmt: skip
def test_what_a_rate_does_is_said(rate, label):
    frame = rate_slider(paths(), 4.0, 0.25).frames[rate]
    assert frame.label == label
    end = (1 - 4 * float(label.split(",")[0])) ** 5
    assert frame.text.endswith(f"|θ| after 5 steps: {abs(end):.2g}.")


def test_a_rate_that_oscillates_is_said_to():
    frame = rate_slider({0.4: [1.0, -0.6], 0.5: [1.0, -1.0]}, 4.0, 0.5).frames[0]
    assert frame.text.startswith("Rate 0.4, factor 1 − ηλ = −0.6: it oscillates.")
    assert "leaves 60 % of the distance" in frame.text


def test_a_path_of_something_else_is_refused():
    wrong = paths()
    wrong[0.6][3] *= 1.001
    with pytest.raises(ValueError, match=r"at the rate 0\.6 a step does not multiply"):
        rate_slider(wrong, 4.0, 0.25)


@pytest.mark.parametrize("chosen", [0.5, 0.1])
def test_rates_without_the_limit_or_the_chosen_one_are_refused(chosen):
    few = paths()
    del few[chosen]
    with pytest.raises(ValueError, match=f"no path for the rate {chosen:g}"):
        rate_slider(few, 4.0, 0.1)


def test_without_a_script_one_frame_of_a_choice_is_seen():
    root = ET.fromstring(f"<r>{drawings()['rates']._repr_html_()}</r>")
    seen = {e.get("data-only") for e in root.iter() if e.get("data-only") and not e.get("display")}
    assert seen == {"2"}


def test_texts_are_escaped():
    frames = Frames(svg(1, 1, '"<', text(0, 0, "<b>")), [Frame('"', "a < b")], control='"')
    root = ET.fromstring(f"<r>{frames._repr_html_()}</r>")
    assert root.find(".//text").text == "<b>"
    assert root.find(".//li").get("data-label") == '"'


def test_an_arrow_points_where_it_goes():
    head = re.search(r'd="M10 0L(\S+) (\S+)L(\S+) (\S+)z"', arrow(0, 0, 10, 0, "fr-value"))
    assert [float(number) for number in head.groups()] == [3, 3.5, 3, -3.5]


def test_a_frame_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no frame 2 among 1"):
        Frames("", [Frame("a", "b")], chosen=2)
    with pytest.raises(ValueError, match="no frame 1 among 0"):
        Frames("", [])
