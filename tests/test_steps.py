"""bpkit.steps: the walk says, in order, what autograd does."""

import json
import re

import pytest
import torch

from bpkit import record, trace
from bpkit.steps import StepThrough, steps

DOUBLE = {"dtype": torch.float64, "requires_grad": True}


def fan_out():
    f = torch.tensor(1.5, **DOUBLE)
    with record(names={"f": f}) as recording:
        h = f**2
        loss = 3 * h + torch.sin(h)
    return recording.graph(loss, {"h": h, "L": loss}, gradients=True)


def test_the_story_of_a_small_graph():
    x, w = torch.tensor(2.0, **DOUBLE), torch.tensor(3.0, **DOUBLE)
    with record(names={"x": x, "w": w}) as recording:
        loss = (x * w - 4) ** 2
    told = repr(StepThrough(recording.graph(loss, {"L": loss}, gradients=True)))
    assert told.splitlines() == [
        " 1. x is a leaf with the value 2.",
        " 2. w is a leaf with the value 3.",
        " 3. The product reads x = 2 and w = 3 and gives 6. It keeps other = 3 and self = 2.",
        " 4. The difference reads 6 and 4 and gives 2. It keeps nothing.",
        " 5. The square reads 2 and gives L = 4. It keeps self = 2.",
        " 6. The backward pass starts with 1. The square sends 1 · 4 = 4 to the difference. "
        "For that it uses self = 2, which is then freed.",
        " 7. The difference sends 4 · 1 = 4 to the product.",
        " 8. The product sends 4 · 3 = 12 to x and 4 · 2 = 8 to w. "
        "For that it uses other = 3 and self = 2, which are then freed.",
        " 9. The gradient of x is complete: 12.",
        "10. The gradient of w is complete: 8.",
    ]


def test_sums_are_told_before_they_are_passed_on():
    told = [step.sentence for step in steps(fan_out())]
    (summed,) = [s for s in told if s.startswith("All users have reported")]
    # 2.372 · 3 is 7.116: the printed digits alone do not give 7.115, so the sign says so.
    assert "3 + (−0.6282) = 2.372. The square sends 2.372 · 3 ≈ 7.115 to f." in summed


def test_a_leaf_waits_for_all_its_uses():
    a = torch.tensor(2.0, **DOUBLE)
    with record(names={"a": a}) as recording:
        loss = a * a + a
    told = steps(recording.graph(loss, gradients=True))
    assert told[-1].sentence == "The gradient of a is complete: 2 + 2 + 1 = 5."
    assert [step.phase for step in told] == ["forward"] * 3 + ["backward"] * 3


def test_every_edge_with_a_gradient_is_shown_once():
    graph = fan_out()
    shown = [k for step in steps(graph) for k in step.edges]
    expected = [k for k, edge in enumerate(graph.edges) if edge.gradient is not None]
    assert sorted(shown) == expected


def test_data_for_the_page_is_in_the_html_and_cannot_end_the_script():
    walk = StepThrough(fan_out(), figure="fig:x")
    html = walk._repr_html_()
    data = re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)[1]
    assert json.loads(data) == walk.to_dict()
    assert 'data-figure="fig-x"' in html
    assert html.count("<li>") == len(walk.steps)


def test_arrays_are_told_by_their_shapes():
    x = torch.ones(5, 3, **DOUBLE)
    with record(names={"x": x}) as recording:
        loss = x.exp().sum()
    told = [step.sentence for step in steps(recording.graph(loss, gradients=True))]
    assert told[1] == "The exponential reads x = 5×3 and gives 5×3. It keeps result = 5×3."
    assert told[-1] == "The gradient of x is complete: 5×3."


def test_a_graph_without_gradients_is_refused():
    x = torch.tensor(2.0, **DOUBLE)
    with pytest.raises(ValueError, match=r"use recording.graph\(loss, gradients=True\)"):
        steps(trace(x * x))


class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


def test_gradients_that_do_not_come():
    a, b = torch.tensor(2.0, **DOUBLE), torch.ones(2, **DOUBLE)
    with record(names={"a": a, "b": b}) as recording:
        _, second = b.unbind()
        loss = First.apply(a, second) * 1
    told = [step.sentence for step in steps(recording.graph(loss, gradients=True))]
    assert told[-4:] == [
        "The first sends 1 · 2 = 2 to a.",
        "The gradient of a is complete: 2.",
        "The unbind sends nothing.",
        "No gradient reaches b.",
    ]


def test_only_the_second_result_is_used():
    b = torch.tensor([2.0, 3.0], **DOUBLE)
    with record(names={"b": b}) as recording:
        _, second = b.unbind()
        loss = second * 5
    told = [step.sentence for step in steps(recording.graph(loss, gradients=True))]
    assert told[-2:] == ["The unbind sends 2 to b.", "The gradient of b is complete: 2."]


def test_what_was_not_recorded_is_said_to_be_unknown():
    x = torch.tensor(2.0, **DOUBLE)
    inner = x.sin().cos()
    with record() as recording:
        loss = inner * 2
    told = [step.sentence for step in steps(recording.graph(loss, gradients=True))]
    assert told[1].startswith("The sine reads an unknown value and gives an unknown value.")


def test_names_are_escaped():
    x = torch.tensor(2.0, **DOUBLE)
    with record(names={"<b></script>": x}) as recording:
        loss = x * x
    html = StepThrough(recording.graph(loss, gradients=True), figure='">')._repr_html_()
    assert "<li>&lt;b&gt;&lt;/script&gt; is a leaf" in html
    assert html.count("</script>") == 1
    assert html.startswith('<div class="step-through" data-figure="&quot;&gt;">')


def test_the_edges_are_gone_through_once_not_once_for_each_step():
    class Counted(list):
        passes = 0

        def __iter__(self):
            Counted.passes += 1
            return super().__iter__()

    graph = fan_out()
    graph.edges = Counted(graph.edges)
    steps(graph)
    assert Counted.passes == 1


def test_no_factor_is_told_where_nothing_arrives():
    x = torch.tensor(2.0, **DOUBLE)
    with record(names={"x": x}) as recording:
        loss = x.sin() * 0
    told = [step.sentence for step in steps(recording.graph(loss, gradients=True))]
    assert told[-2].startswith("The sine sends −0 to x.")


def test_steps_say_what_they_free():
    graph = fan_out()
    frees = {graph.nodes[s.node].short: s.frees for s in steps(graph) if s.phase == "backward"}
    assert frees == {"add": False, "mul": True, "sin": True, "pow": True, "f": False}
