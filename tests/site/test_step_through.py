"""The walk through a graph: driven with the keyboard, every number compared with autograd's.

The numbers expected here are computed with plain PyTorch, without `bpkit`, so that the walk cannot
agree with itself only.
"""

import re
from collections import Counter

import pytest
import torch

from site_checks import opened, serve

DOUBLE = {"dtype": torch.float64, "requires_grad": True}


def leaves(*values):
    return [torch.tensor(value, **DOUBLE) for value in values]


def expected(loss, values, contributions, leaf_tensors):
    """What the walk must show at its end.

    Args:
        values: the tensors that flow along the edges, once for each edge, and the loss.
        contributions: pairs (user, tensor): what ``user`` sends back to ``tensor``.
    """
    everything = list({id(t): t for t in [*values, loss]}.values())
    gradients = torch.autograd.grad(loss, everything, retain_graph=True)
    of = {id(t): gradient for t, gradient in zip(everything, gradients, strict=True)}
    up = [
        torch.autograd.grad(user, t, of[id(user)], retain_graph=True)[0]
        for user, t in contributions
    ]
    return {
        "down": Counter(shown(value) for value in [*values, loss]),
        "up": Counter(shown(gradient) for gradient in [*up, of[id(loss)]]),
        "grad": Counter(shown(of[id(leaf)]) for leaf in leaf_tensors),
        "sums": Counter(
            shown(of[i])  # of a leaf that is used twice, the sum is its gradient
            for i, uses in Counter(map(id, values)).items()
            if uses > 1 and i not in map(id, leaf_tensors)
        ),
    }


def shown(number):
    return f"{number.item():.4g}".replace("-", "−")


def first_graph():
    x, w, b = leaves(2.0, 3.0, 1.0)
    t = x * w
    y = t + b
    e = y - 4
    L = e**2
    edges = [(t, x), (t, w), (y, t), (y, b), (e, y), (L, e)]
    return expected(L, [x, w, t, b, y, e], edges, [x, w, b])


def fan_out():
    (f,) = leaves(1.5)
    h = f**2
    p, s = 3 * h, torch.sin(h)
    L = p + s
    return expected(L, [f, h, h, p, s], [(h, f), (p, h), (s, h), (L, p), (L, s)], [f])


def neuron():
    start = torch.tensor(0.3, dtype=torch.float64).logit().item() - 0.5
    w, b = leaves(1.0, start)
    p = w * 0.5
    z = p + b
    y = torch.sigmoid(z)
    e = y - 1.0
    L = e**2
    edges = [(p, w), (z, p), (z, b), (y, z), (e, y), (L, e)]
    return expected(L, [w, p, b, z, y, e], edges, [w, b])


def two_uses():
    (w,) = leaves(3.0)
    p = w * 2.0
    e = p - 5.0
    fit, square = e**2, w**2
    small = square * 0.1
    L = fit + small
    edges = [(p, w), (e, p), (fit, e), (square, w), (small, square), (L, fit), (L, small)]
    return expected(L, [w, p, e, w, square, fit, small], edges, [w])


WALKS = {
    ("chapters/01_graphs.html", "fig-first-graph"): first_graph,
    ("chapters/01_graphs.html", "fig-fan-out"): fan_out,
    ("chapters/02_chain_rule.html", "fig-neuron"): neuron,
    ("chapters/02_chain_rule.html", "fig-two-uses"): two_uses,
}


@pytest.fixture(params=WALKS, ids=lambda walk: walk[1])
def walk(request, book, browser):
    """The open page, the figure, and what it has to show."""
    name, figure = request.param
    with serve(book) as base, opened(browser, base, name) as (page, problems):
        yield page, page.locator(f"#{figure}"), WALKS[request.param]()
        assert problems == []


def visible(figure, selector):
    return [text for text in figure.locator(selector).all_inner_texts() if text.strip()]


def seen(figure, way):
    """Numbers beside the visible arrows of one direction; the name before = is left out."""
    texts = figure.locator(f"g.st-{way}:not(.st-off) text").all_text_contents()
    return Counter(text.split(" = ")[-1] for text in texts if text)


def test_every_walk_of_the_book_is_tested(book):
    found = {
        (page.relative_to(book).as_posix(), figure)
        for page in (book / "chapters").glob("*.html")
        for figure in re.findall(
            r'class="step-through" data-figure="([^"]+)"', page.read_text("utf-8")
        )
    }
    assert found == set(WALKS)


def test_it_opens_complete_and_shows_autograds_numbers(walk):
    _, figure, numbers = walk
    assert seen(figure, "down") == numbers["down"]
    assert seen(figure, "up") == numbers["up"]
    notes = figure.locator("text.st-note").all_text_contents()
    gradients = Counter(note.split(" = ")[1] for note in notes if note.startswith(".grad"))
    assert gradients == numbers["grad"]
    sums = Counter(note.split(" = ")[1] for note in notes if note.startswith("Σ"))
    assert sums == numbers["sums"]
    assert not any(note.startswith("keeps") for note in notes)  # all freed by then


def test_the_keyboard_walks_it_there_and_back(walk):
    page, figure, numbers = walk
    sentence = figure.locator("[aria-live=polite]")
    figure.get_by_role("button", name="Start").focus()
    page.keyboard.press("Enter")
    assert seen(figure, "down") == seen(figure, "up") == Counter()
    assert sentence.inner_text() == "Nothing has run yet. Press Next."

    figure.get_by_role("button", name="Next").focus()
    told, kept = [], 0
    for step in range(1, 100):
        page.keyboard.press("Enter")
        told.append(sentence.inner_text())
        assert told[-1].startswith(f"Step {step} of ")
        assert seen(figure, "down") <= numbers["down"]
        assert seen(figure, "up") <= numbers["up"]
        notes = figure.locator("text.st-note").all_text_contents()
        kept = max(kept, sum(note.startswith("keeps") for note in notes))
        if figure.get_by_role("button", name="Next").is_disabled():
            break
    assert seen(figure, "down") == numbers["down"]
    assert seen(figure, "up") == numbers["up"]
    assert kept > 0
    assert len(set(told)) == len(told)
    assert told[-1].startswith(f"Step {len(told)} of {len(told)}, backward.")

    slider = figure.get_by_role("slider")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert sentence.inner_text() == told[-2]
    assert slider.get_attribute("aria-valuetext") == f"{len(told) - 1} of {len(told)}"
    page.keyboard.press("Home")
    assert sentence.inner_text() == "Nothing has run yet. Press Next."


def test_the_sentences_are_those_that_the_notebook_printed(walk):
    page, figure, _ = walk
    walks = page.locator(f"[data-figure={figure.get_attribute('id')}] li")
    printed = [text.strip() for text in walks.all_text_contents()]
    figure.get_by_role("button", name="Start").click()
    for sentence in printed:
        figure.get_by_role("button", name="Next").click()
        assert figure.locator("[aria-live=polite]").inner_text().endswith(sentence)


@pytest.mark.parametrize("where", WALKS, ids=lambda walk: walk[1])
def test_without_javascript_the_figure_is_there(where, book, browser):
    name, figure = where
    with serve(book) as base:
        context = browser.new_context(java_script_enabled=False)
        page = context.new_page()
        page.goto(base + name)
        assert page.locator(f"#{figure} img").count() == 1
        assert page.locator(f"[data-figure={figure}] li").count() > 5
        context.close()


def test_nothing_moves_by_itself(book):
    """No transition or animation, so there is nothing to reduce."""
    css = (book / "_static" / "step-through.css").read_text(encoding="utf-8")
    script = (book / "_static" / "step-through.js").read_text(encoding="utf-8")
    assert not re.search(r"transition|animation|@keyframes", css)
    assert not re.search(r"setInterval|setTimeout|requestAnimationFrame|\.animate\(", script)
    assert len(script) < 10_000
