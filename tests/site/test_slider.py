"""Pictures with a slider: driven with the keyboard, every number compared with one computed here.

Nothing of ``bpkit`` takes part in what is expected: the network of chapter 3, the model of chapter
8 and the descent of chapter 6 are computed once more, with PyTorch or by their formula.
"""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from site_checks import ROOT, opened, serve

NETWORK = "chapters/03_two_layer.html", "fig-two-layer"
RATES = "chapters/06_optimizers.html", "fig-rates"
NAN = "chapters/08_failure_modes.html", "fig-nan-trail"
FIGURES = (NETWORK, RATES, NAN)


@pytest.fixture
def figure(request, book, browser):
    """The open page and one figure of it."""
    name, label = request.param
    with serve(book) as base, opened(browser, base, name) as (page, problems):
        yield page, page.locator(f"#{label}")
        assert problems == []


def sentence(figure):
    return figure.locator("[aria-live=polite]").inner_text()


def numbers(text):
    return [float(n.replace("−", "-")) for n in re.findall(r"[−-]?\d+(?:\.\d+)?", text)]


def walked(page, figure):
    """From the start, with the keyboard alone: yields after each step, with its number."""
    first, following = (figure.get_by_role("button", name=n) for n in ("Start", "Next"))
    first.focus()
    page.keyboard.press("Enter")
    assert sentence(figure) == "Nothing has been looked at yet. Press Next."
    listed = figure.locator("li p").all_text_contents()
    following.focus()
    for step, expected in enumerate(listed, 1):
        page.keyboard.press("Enter")
        assert sentence(figure) == f"Step {step} of {len(listed)}. {expected}"
        yield step
    assert following.is_disabled()
    assert not figure.locator("svg [data-from][display=none]").count()
    figure.get_by_role("slider").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        "([box, text]) => box.textContent.includes(text)",
        arg=[figure.locator("[aria-live=polite]").element_handle(), listed[-2]],
    )


def two_layers():
    """The network of chapter 3, its seed and sizes read nowhere but here; gradients by autograd."""
    rng = np.random.default_rng(1)
    v = {"X": rng.normal(size=(5, 3)), "T": np.eye(2)[rng.integers(2, size=5)]}
    for name, shape in {"W1": (3, 7), "b1": 7, "W2": (7, 2), "b2": 2}.items():
        v[name] = rng.normal(size=shape)
    v = {k: torch.tensor(a, requires_grad=k[0] in "Wb") for k, a in v.items()}
    v["Z"] = v["X"] @ v["W1"] + v["b1"]
    v["A"] = v["Z"].relu()
    v["S"] = v["A"] @ v["W2"] + v["b2"]
    v["P"] = v["S"].softmax(1)
    loss = F.cross_entropy(v["S"], v["T"])
    wanted = ["S", "A", "Z", "W1", "b1", "W2", "b2"]
    for name, gradient in zip(
        wanted, torch.autograd.grad(loss, [v[k] for k in wanted]), strict=True
    ):
        v[f"∂L/∂{name}"] = gradient
    v |= {"Xᵀ": v["X"].T, "Aᵀ": v["A"].T, "W2ᵀ": v["W2"].T, "1[Z > 0]": (v["Z"] > 0).double()}
    return {k.replace("1", "₁").replace("2", "₂") if "[" not in k else k: t for k, t in v.items()}


@pytest.mark.parametrize("figure", [NETWORK], indirect=True)
def test_every_array_of_the_network_walk_is_autograds(figure):
    page, figure = figure
    expected, shown = two_layers(), []
    for step in walked(page, figure):
        for matrix in figure.locator(".fr-detail:not(.fr-hidden) .fr-matrix").all():
            name, shape = matrix.locator("span").inner_text().rsplit(" ", 1)
            exact = expected[name].detach().numpy()
            assert shape == "×".join(map(str, exact.shape))
            cells = numbers(matrix.locator("pre").inner_text())
            digits = 3 if name.startswith("∂") else 2
            np.testing.assert_allclose(cells, exact.flatten(), atol=0.51 * 10**-digits)
            shown.append((step, name))
        worked = re.search(r"column \d+: (.*) ≈ (\S+)\.$", sentence(figure), re.I)
        if worked:  # the printed factors give the printed result, as far as their digits go
            terms = [np.prod(numbers(term)) for term in worked[1].split(" + ")]
            assert sum(terms) == pytest.approx(numbers(worked[2])[0], abs=0.03)
    made = [name for step, name in shown if (step + 1, name) not in shown]
    for name in ("W₁", "b₁", "W₂", "b₂", "S", "A", "Z"):
        assert f"∂L/∂{name}" in [n for _, n in shown], f"no gradient of {name} in {made}"


@pytest.mark.parametrize("figure", [NAN], indirect=True)
def test_the_nan_walk_finds_what_plain_pytorch_finds(figure):
    page, figure = figure
    notebook = json.loads((ROOT / "chapters/08_failure_modes.ipynb").read_text("utf-8"))
    source = "\n".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code")
    lines = {line.strip() for line in source.split("\n")}
    bad = wrong_rows()
    trail = ["cross_entropy", "linear", "sum", "mul", "unsqueeze", "softmax"]
    words = {word: figure.locator(f"svg text.fr-word:text-is('{word}'):visible") for word in bad}
    for step in walked(page, figure):
        told = sentence(figure)
        if step <= len(trail):
            assert f" {trail[step - 1]} returned NaN" in told
            assert re.search("“(.*)”", told)[1] in lines
            assert words["NaN"].count() == min(step + 1, len(trail))  # the loss, and what it read
            assert words["−∞"].count() == (len(bad["−∞"]) if step == len(trail) else 0)
        if 1 < step <= len(trail):
            assert f"NaN in row {bad['NaN'][0]}," in told.split("It read")[0]
        if step == len(trail):
            rows = ", ".join(map(str, bad["−∞"]))
            assert f"masked_fill (−∞ in rows {rows}): no NaN. So the NaN was born here" in told
            assert "“weights = scores.softmax(1)”" in told
            assert "Repair: " in told


def wrong_rows():
    """Rows of the batch with −∞ after the mask, and with NaN after the softmax."""
    torch.manual_seed(0)
    embed, score = nn.Linear(8, 16).double(), nn.Linear(16, 1).double()
    x = torch.rand(8, 8, 8, dtype=torch.float64) + 0.1  # which pixels does not matter
    x[2, 6:] = x[3, 5:] = x[6, 7:] = 0.0
    x[5] = 0.0
    masked = score(torch.tanh(embed(x))).squeeze(2).masked_fill(x.sum(2) == 0, -torch.inf)
    return {
        "−∞": masked.isneginf().any(1).nonzero().flatten().tolist(),
        "NaN": masked.softmax(1).isnan().any(1).nonzero().flatten().tolist(),
    }


@pytest.mark.parametrize("figure", [RATES], indirect=True)
def test_the_slider_shows_the_path_of_its_rate(figure):
    page, figure = figure
    slider = figure.get_by_role("slider", name="Learning rate η")
    rates = [k / 100 for k in range(1, 26)]
    slider.focus()
    page.keyboard.press("Home")
    fates = {0.01: "creeps", 0.1: "best", 0.19: "oscillates", 0.2: "stands", 0.25: "blows up"}
    for number, rate in enumerate(rates, 1):
        if rate in fates:
            assert slider.get_attribute("aria-valuetext").startswith(f"{rate:g}, ")
            assert fates[rate] in slider.get_attribute("aria-valuetext")
            check_path(figure, rate)
            text = figure.locator("li p").nth(number - 1).text_content()
            figure.page.wait_for_function(
                "([box, text]) => box.textContent === text",
                arg=[figure.locator("[aria-live=polite]").element_handle(), text],
            )
            assert fates[rate] in text
            factor, left = 1 - 10 * rate, abs((1 - 10 * rate) ** 12)
            assert numbers(text)[:3] == pytest.approx([rate, 1, factor], abs=1e-9)
            assert numbers(text)[-1] == pytest.approx(left, rel=0.05, abs=1e-9)
        page.keyboard.press("ArrowRight")
    assert slider.input_value() == "25"
    assert figure.locator("datalist option").get_attribute("value") == str(rates.index(0.2) + 1)
    assert "limit 2/λ = 0.2" in figure.locator(".fr-picture > svg").nth(1).text_content()


def check_path(figure, rate):
    """The visible line goes through (θ, L) of descent on L = 5 θ², as far as it is seen."""
    expected = [1.0]
    while len(expected) <= 12:
        expected.append(expected[-1] - rate * 10 * expected[-1])
    line = figure.locator("svg g.fr-gradient > path:not([display=none])")
    points = numbers(line.get_attribute("d"))
    theta, loss = np.array(points[::2]), np.array(points[1::2])
    np.testing.assert_allclose(theta, expected[: len(theta)], atol=0.005)
    np.testing.assert_allclose(loss, 5 * theta**2, rtol=0.02, atol=1e-3)
    rest = np.abs(expected[len(theta) :])
    assert len(rest) == 0 or abs(theta[-1]) > 1.7 or (rest < 0.01).all()
    mark = figure.locator("svg g.fr-full > g:not([display=none])")
    assert mark.count() == 1
    assert numbers(mark.locator("text").text_content())[-1] == pytest.approx(1 - 10 * rate)


@pytest.mark.parametrize("where", FIGURES, ids=lambda where: where[1])
def test_without_javascript_drawing_and_list_are_there(where, book, browser):
    name, label = where
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((book / name).as_uri())
    figure = page.locator(f"#{label}")
    assert figure.locator("svg").first.is_visible()
    only = figure.locator("svg [data-only]:visible")
    assert len({e.get_attribute("data-only") for e in only.all()}) == (where is RATES)
    assert not figure.locator("svg [data-from]:not([data-only])[display=none]").count()
    figure.locator("summary").click()
    assert figure.locator("li p").last.is_visible()
    assert figure.locator("input, button").count() == 0
    context.close()


CONTRAST = """figure => {
    // Text on the page's own background, or on a cell of the drawing behind it.
    const rgb = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = (colour) => rgb(colour).map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
    const page = getComputedStyle(document.body).backgroundColor;
    const found = [];
    for (const text of figure.querySelectorAll("svg text")) {
        if (!text.checkVisibility() || !text.textContent) continue;
        const cell = text.matches(".fr-word") ? text.parentElement.querySelectorAll("path") : [];
        const grounds = [...cell].filter((c) => !c.matches(".fr-fine"))
            .map((c) => getComputedStyle(c).fill);
        for (const ground of grounds.length ? grounds : [page]) {
            const [a, b] = [light(getComputedStyle(text).fill), light(ground)].sort();
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) found.push(`${text.textContent}: ${ratio.toFixed(2)}`);
        }
    }
    const lines = "svg path[stroke], svg g[stroke] > path, svg rect.fr-box";
    for (const line of figure.querySelectorAll(lines)) {
        if (line.matches(".fr-empty")) continue;  // a grid behind, not to be read
        const [a, b] = [light(getComputedStyle(line).stroke), light(page)];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 3) found.push(`line ${line.getAttribute("class")}: ${ratio.toFixed(2)}`);
    }
    return found;
}"""


TOO_WIDE = """figure => {
    const slider = figure.querySelector("input"), walk = figure.querySelector(".st-walk");
    const wide = [];
    for (slider.value = slider.max; Number(slider.value) > 0; slider.value -= 1) {
        slider.dispatchEvent(new Event("input"));
        if (walk.scrollWidth > walk.clientWidth) wide.push(`frame ${slider.value}`);
        if (slider.value === slider.min) break;
    }
    return wide;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("where", FIGURES, ids=lambda where: where[1])
def test_drawings_are_legible_in_both_themes_and_fit_a_phone(where, scheme, book, browser):
    name, label = where
    with serve(book) as base, opened(browser, base, name, scheme, width=375) as (page, _):
        figure = page.locator(f"#{label}")
        assert figure.evaluate(CONTRAST) == []
        assert figure.evaluate(TOO_WIDE) == []


def test_every_such_figure_of_the_book_is_tested(book):
    found = {
        page.relative_to(book).as_posix()
        for page in (book / "chapters").glob("*.html")
        for _ in re.findall(r'<div class="frames"', page.read_text("utf-8"))
    }
    assert found == {name for name, _ in FIGURES}


def test_nothing_moves_by_itself_and_little_is_loaded(book):
    """One timer, which waits until the slider rests before it says where."""
    css = (book / "_static" / "frames.css").read_text(encoding="utf-8")
    script = (book / "_static" / "frames.js").read_text(encoding="utf-8")
    assert not re.search(r"transition|animation|@keyframes", css)
    assert not re.search(r"setInterval|requestAnimationFrame|\.animate\(", script)
    assert script.count("setTimeout") == 1
    assert len(script) + len(css) < 12_000
    for name, _ in FIGURES:
        page = (book / name).read_text(encoding="utf-8")
        inside = page[page.index('<div class="frames"') : page.index("</ol></details></div>")]
        assert len(inside.encode()) < 25_000
