"""What does a learning rate do on a parabola?  Introduced in chapter 6.

``rate_slider`` makes :class:`~bpkit.interactive.Frames` of the paths that you have computed, one
for each rate: the path on the parabola, and the factor by which each step multiplies the distance
from the minimum.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bpkit import style
from bpkit.drawing import minus
from bpkit.interactive.frames import (
    COLOURS,
    GRADIENT,
    INK,
    VALUE,
    Frame,
    Frames,
    line,
    svg,
    tag,
    text,
)

REACH = 1.75  # the largest |θ| that there is room for
NONE = 1e-12  # rounding


def rate_slider(paths: Mapping[float, Sequence[float]], curvature: float, chosen: float) -> Frames:
    """Gradient descent on ``L = curvature/2 · θ²``, one path for each learning rate.

    Args:
        paths: rate -> θ after each step, the start first. The limit ``2/curvature`` is a rate.
        curvature: the second derivative of the parabola.
        chosen: the rate that is shown first.

    Raises:
        ValueError: the limit or ``chosen`` is missing, or a path is not one of gradient descent.

    >>> paths = {0.1: [1, 0.5, 0.25], 0.4: [1, -1, 1]}
    >>> print(rate_slider(paths, curvature=5, chosen=0.1).frames[0].label)
    0.1, it comes fast
    """
    rates, limit = list(paths), 2 / curvature
    for rate in (limit, chosen):
        if rate not in rates:
            raise ValueError(f"no path for the rate {rate:g}; there are {rates}")
    frames = []
    for rate, path in paths.items():
        theta, factor = np.asarray(path), 1 - rate * curvature
        if not np.allclose(theta[1:], factor * theta[:-1], rtol=1e-9, atol=NONE):
            raise ValueError(f"at the rate {rate:g} a step does not multiply θ by {factor:g}")
        word, told = _fate(factor)
        frames.append(
            Frame(
                f"{rate:g}, {word}",
                f"Rate {rate:g}, factor 1 − ηλ = {_factor(factor)}: {told} "
                f"|θ| after {len(theta) - 1} steps: {_distance(theta[-1])}.",
            )
        )
    start = rates.index(chosen) + 1
    picture = _parabola(paths, curvature, start) + _factors(rates, curvature, start)
    ticks = (rates.index(limit) + 1,)
    return Frames(picture, frames, "Learning rate η", chosen=start, ticks=ticks)


def _factor(factor: float) -> str:
    return minus(f"{factor:.2g}") if abs(factor) > NONE else "0"


def _distance(theta: float) -> str:
    size = abs(theta)
    if NONE < size < 0.001:
        return "less than 0.001"
    return f"{size:.0f}" if size >= 10 else f"{size:.2g}" if size > NONE else "0"


def _fate(factor: float) -> tuple[str, str]:
    """What the factor does: in a word, and in a sentence."""
    size = abs(factor)
    share = f"{size * 100:.0f} % of the distance"
    if size < NONE:
        return "the best rate", "the best rate. One step arrives."
    if abs(size - 1) < NONE:
        return "the limit, it stands", (
            "the limit 2/λ. It jumps from side to side and stands: no step brings it nearer."
        )
    if size > 1:
        return "it blows up", (
            f"it blows up. Each step lands on the other side, {size:.2g} times as far away."
        )
    if factor < 0:
        return "it oscillates", (
            f"it oscillates. Each step jumps over the minimum and leaves {share}."
        )
    if factor > 0.5:
        return "it creeps", f"it creeps. Each step leaves {share}."
    return "it comes fast", f"it comes fast, from one side. Each step leaves {share}."


def _only(number: int, start: int) -> dict:
    """Without a script, one frame is seen."""
    return {"data_only": number, "display": None if number == start else "none"}


def _parabola(paths: Mapping[float, Sequence[float]], curvature: float, start: int) -> str:
    """The points are written as θ and L themselves; the inner drawing has these for units."""
    wide, high, top = 330, 190, curvature / 2 * REACH**2
    fixed = {"vector_effect": "non-scaling-stroke"}

    def points(thetas):
        return [f"{t + 0.0:.3g} {curvature / 2 * t * t:.4g}" for t in thetas]

    ends = points([-REACH, REACH])
    curve = f"M{ends[0]}Q0 {-top:.4g} {ends[1]}"  # a quadratic Bézier curve is a parabola
    lines, dots, words = [], [], []
    for number, path in enumerate(paths.values(), 1):
        inside = [t for t in path if abs(t) <= REACH]
        seen = path[: len(inside) + 1]  # one more: the line that leaves the picture
        # What has arrived stands in one place: once is enough.
        seen = [t for k, t in enumerate(seen) if k < 2 or abs(t - seen[k - 1]) > 0.004]
        only = _only(number, start)
        lines.append(tag("path", d="M" + "L".join(points(seen)), **fixed, **only))
        # A line of no length with a round cap is a dot that no change of units squeezes.
        spots = "".join(f"M{p}h0" for p in points(t for t in seen if abs(t) <= REACH))
        dots.append(tag("path", d=spots, **fixed, **only))
        left = f"step {len(inside)} leaves the picture"
        end = f"after {len(path) - 1} steps |θ| = {_distance(path[-1])}".replace(
            "= less", "is less"
        )
        words.append(tag("tspan", left if len(inside) < len(path) else end, **only))
    room = {"x": 8, "y": 4, "width": wide, "height": high + 8, "preserveAspectRatio": "none",
            "viewBox": f"{-REACH} {-top:.5g} {2 * REACH} {top * (1 + 8 / high):.5g}"}  # fmt: skip
    drawing = tag(
        "svg",
        tag(
            "g",
            tag("path", d=curve, class_=INK, stroke=COLOURS[INK], **fixed),
            tag("g", *lines, class_=GRADIENT, stroke=COLOURS[GRADIENT], stroke_dasharray="4 3"),
            tag("g", *dots, class_=VALUE, stroke=COLOURS[VALUE], stroke_width=8,
                stroke_linecap="round"),
            transform="scale(1 -1)",
        ),
        **room,
    )  # fmt: skip
    end = tag("g", tag("text", x=wide / 2 + 8, y=26, text_anchor="middle").replace(
        "></text>", f">{''.join(words)}</text>"), class_="fr-words", fill=style.INK)  # fmt: skip
    label = "A parabola, and on it the points that gradient descent visits at the chosen rate."
    return svg(
        wide + 16,
        high + 32,
        label,
        line(8, high + 4, wide + 8, high + 4),
        drawing,
        end,
        text(wide / 2 + 8, high + 22, "θ, minimum at 0"),
        text(14, 26, "loss", anchor="start"),
    )


def _factors(rates: list[float], curvature: float, start: int) -> str:
    """The factor against the rate: a falling line, and the band in which it shrinks θ."""
    wide, high, left, top = 290, 176, 30, 26
    last, lowest = rates[-1], 1 - rates[-1] * curvature
    best, limit = 1 / curvature, 2 / curvature

    def x(rate):
        return left + wide * rate / last

    def y(factor):
        return top + high * (1 - factor) / (1 - lowest)

    band = {"x": left, "y": y(1), "width": wide, "height": y(-1) - y(1), "class_": "fr-band",
            "fill": style.FAINT, "fill_opacity": 0.5}  # fmt: skip
    marks = []
    for number, rate in enumerate(rates, 1):
        factor = 1 - rate * curvature
        # The line falls from left to right, so there is room above it and below it.
        above = rate < limit * 0.75
        place = (x(rate) + 9, y(factor) - 6) if above else (x(rate) - 12, y(factor) + 8)
        anchor = None if above else "end"
        dot = tag("circle", cx=x(rate), cy=y(factor), r=5.5)
        told = tag(
            "text", f"1 − ηλ = {_factor(factor)}", x=place[0], y=place[1], text_anchor=anchor
        )
        marks.append(tag("g", dot, told, **_only(number, start)))
    label = (
        f"The factor 1 − ηλ falls with the rate: 1, then 0 at {best:g}, −1 at the limit {limit:g}."
    )
    return svg(
        left + wide + 8,
        high + top + 20,
        label,
        tag("rect", **band),
        line(left, y(0), left + wide, y(0)),
        line(x(0), y(1), x(last), y(lowest), stroke_width=2),
        line(x(limit), y(1), x(limit), y(lowest), GRADIENT, stroke_dasharray="2 3"),
        line(x(best), y(0) - 4, x(best), y(0) + 4, VALUE),
        text(x(limit), top - 9, f"limit 2/λ = {limit:g}", GRADIENT, font_weight="bold"),
        text(x(best) - 5, y(0) + 16, f"best 1/λ = {best:g}", VALUE, "end"),
        text(left + wide - 4, y(1) + 24, "shaded: steps help", anchor="end"),
        text(left + wide, y(lowest) + 16, "rate η", anchor="end"),
        *(text(left - 5, y(f) + 4, minus(str(f)), anchor="end") for f in (1, 0, -1)),
        tag("g", *marks, class_="fr-value fr-full", fill=style.VALUE, font_weight="bold"),
    )
