"""What would one hang on the wall?  The few curves that tell whether a training run is well.

Panels share one axis of steps; a panel without data is left out. Titles say what is to be seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bpkit.style import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, PAPER, PURPLE, SKY, YELLOW

_LINES = [
    (BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (PURPLE, ":"), (YELLOW, (0, (5, 1, 1, 1, 1, 1))),
]  # fmt: skip
_WIDTH, _HEIGHT = 6.2, 1.6  # inches; of a panel
_ROOM = 0.33  # of the width, for the labels at the right


def draw(data: dict[str, Any], baseline: dict[str, Any] | None = None) -> Figure:
    """The dashboard of ``log.to_dict()``."""
    panels = [panel for panel, has in _PANELS if has(data)]
    if not panels:
        raise ValueError("nothing was recorded: no optimizer stepped inside the block")
    size = (_WIDTH, _HEIGHT * len(panels) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)
    for ax, panel in zip(axes[:, 0], panels, strict=True):
        title = panel(ax, data, baseline)
        ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
        ax.tick_params(labelsize=10, colors=MUTED)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color=FAINT, linewidth=0.8)
        ax.set_axisbelow(True)
    last = max(data["step"])
    axes[-1, 0].set_xlim(0, last * (1 + _ROOM))
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[-1, 0].set_xticks([t for t in axes[-1, 0].get_xticks() if 0 <= t <= last])
    axes[-1, 0].set_xlabel("step", fontsize=10)
    return figure


def _loss(ax: Axes, data: dict, baseline: dict | None) -> str:
    step, loss = _floats(data["step"]), _floats(data["loss"])
    ends = [(step, loss, "this run", BLUE)]
    ax.plot(step, loss, color=BLUE, lw=1.4, marker="")
    if baseline:
        before = _floats(baseline["step"]), _floats(baseline["loss"])
        ax.plot(*before, color=MUTED, ls="--", lw=1.2, marker="", zorder=1)
        shown = before[0] <= step[-1]
        ends.append((before[0][shown], before[1][shown], "baseline", MUTED))
    known = loss[np.isfinite(loss)]
    if len(known) == 0:
        return "The loss was never finite"
    if known.min() > 0 and known.max() > 50 * known.min():
        ax.set_yscale("log")
    if baseline:
        _label(ax, ends)
    size = max(1, len(known) // 20)  # the mean of some steps at each end: single batches vary
    first, last = known[:size].mean(), known[-size:].mean()
    what = "fell" if last < first else "rose"
    lost = len(loss) - len(known)
    peak = f", with a peak of {known.max():.3g}" if known.max() > 3 * max(first, last) else ""
    return f"Loss {what} from {first:.3g} to {last:.3g}{peak}" + (
        f"; {lost} not finite" if lost else ""
    )


def _norm(ax: Axes, data: dict, baseline: dict | None) -> str:
    step, norm = _floats(data["step"]), _positive(data["global_norm"])
    applied, clipped = _positive(data["applied_norm"]), np.array(data["clipped"], dtype=bool)
    ax.set_yscale("log")
    ends = [(step, norm, "as computed", BLUE)]
    ax.plot(step, norm, color=BLUE, lw=1.2, marker="")
    title = "Norm over all gradients"
    if baseline:
        usual = _positive(baseline["global_norm"])
        low, high = np.nanquantile(usual, [0.05, 0.95])
        ax.axhspan(low, high, color=SKY, alpha=0.3, lw=0)
        ends.append((step, np.full(len(step), (low * high) ** 0.5), "baseline, 5–95 %", MUTED))
        outside = np.mean((norm < low) | (norm > high))
        title = f"Norm: {outside:.0%} of steps outside the baseline's band"
    elif not clipped.any():
        known = norm[np.isfinite(norm)]
        if len(known):
            title += f": median {np.median(known):.2g}, largest {known.max():.2g}"
    if clipped.any():
        ax.plot(step, applied, color=ORANGE, ls="--", lw=1.2, marker="")
        marked = np.flatnonzero(clipped)[:: 1 + clipped.sum() // 60]  # more would hide the curve
        ax.plot(step[marked], norm[marked], "v", color=ORANGE, ms=3.5, mec="none")
        ends.append((step, applied, "▾ clipped to", ORANGE))
        title += ("; " if baseline else ": ") + f"{clipped.sum()} of {len(step)} clipped"
    if len(ends) > 1:
        _label(ax, ends)
    return title


def _update(ax: Axes, data: dict, baseline: dict | None) -> str:
    names = [name for name in data["update_ratio"] if name in data["weights"]]
    series = {name: _positive(data["update_ratio"][name]) for name in names or data["update_ratio"]}
    ax.set_yscale("log")
    _several(ax, _floats(data["sampled"]), series)
    late = np.concatenate([values[2:] if len(values) > 2 else values for values in series.values()])
    late = late[np.isfinite(late)]
    if len(late) == 0:
        return "No weight moved"
    return (
        f"A step moves a weight by {np.median(late):.2g} of its norm, at most by {late.max():.2g}"
    )


def _cosine(ax: Axes, data: dict, baseline: dict | None) -> str:
    step, cosine = _floats(data["sampled"]), _floats(data["cosine"])
    ax.axhline(0, color=MUTED, lw=0.8)
    ax.plot(step, cosine, color=PURPLE, marker="D", ms=3.5, lw=1.2)
    ax.set_ylim(-1.1, 1.1)
    median = np.nanmedian(cosine)
    return f"Cosine between the gradients of two steps in a row: median {median:.2f}"


def _units(ax: Axes, data: dict, baseline: dict | None) -> str:
    series = {f"{place}, dead": _floats(v) for place, v in data["dead"].items()}
    series |= {f"{place}, saturated": _floats(v) for place, v in data["saturated"].items()}
    _several(ax, _floats(data["sampled"]), series)
    ax.set_ylim(-0.05, 1.05)
    parts = []
    for kind, what in (("dead", "units are dead"), ("saturated", "outputs are saturated")):
        if data[kind]:
            most = np.nanmax(np.concatenate([_floats(v) for v in data[kind].values()]))
            parts.append(f"at most {most:.0%} of the {what}" if most else f"no {what}")
    return ("; ".join(parts)).capitalize()


def _rate(ax: Axes, data: dict, baseline: dict | None) -> str:
    step, rates = _floats(data["step"]), _floats(data["learning_rate"])
    groups = rates.reshape(len(step), -1).T
    for values, (colour, line) in zip(groups, _LINES * len(groups), strict=False):
        ax.plot(step, values, color=colour, ls=line, lw=1.6, marker="")
    low, high = np.nanmin(rates), np.nanmax(rates)
    ax.set_ylim(bottom=0)
    if low == high:
        return f"Learning rate {high:.3g} throughout"
    return f"Learning rate between {low:.3g} and {high:.3g}"


def _several(ax: Axes, step: np.ndarray, series: dict[str, np.ndarray]) -> None:
    """A line for each; of many, only the highest and the lowest stand out."""
    chosen = list(series)
    if len(series) > len(_LINES):
        level = {name: np.nanmedian(v) for name, v in series.items() if np.isfinite(v).any()}
        ranked = sorted(level, key=level.get)
        chosen = list(dict.fromkeys([*ranked[-1:], *ranked[:1]]))
        for name in series:
            ax.plot(step, series[name], color=FAINT, lw=1, marker="", ls="-", zorder=1)
    ends = []
    for name, (colour, line) in zip(chosen, _LINES, strict=False):
        ax.plot(step, series[name], color=colour, ls=line, lw=1.6, marker="")
        ends.append((step, series[name], name, colour))
    _label(ax, ends)


def _label(ax: Axes, ends: list[tuple[np.ndarray, np.ndarray, str, str]]) -> None:
    """The name of each line beside its end, moved apart where they would overlap."""
    ax.autoscale_view()
    log = ax.get_yscale() == "log"
    places = []
    for step, values, text, colour in ends:
        known = np.flatnonzero(np.isfinite(values))
        if len(known):
            places.append((float(values[known[-1]]), float(step[known[-1]]), text, colour))
    low, high = np.log10(ax.get_ylim()) if log else np.array(ax.get_ylim())
    places.sort()
    wanted = [np.log10(value) if log else value for value, *_ in places]
    heights, apart = [], 0.16 * (high - low)
    for value in wanted:
        heights.append(max(value, heights[-1] + apart) if heights else value)
    if heights:  # as far up as down, and inside
        heights = np.array(heights) - (np.array(heights) - wanted).mean()
        inset = 0.06 * (high - low)
        heights += max(0.0, low + inset - heights[0]) - max(0.0, heights[-1] - high + inset)
    for height, (_, step, text, colour) in zip(heights, places, strict=True):
        short = text if len(text) <= 20 else f"…{text[-19:]}"
        ax.annotate(
            short,
            (step, 10**height if log else height),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color=colour,
            annotation_clip=False,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8},
        )


def _floats(values: list) -> np.ndarray:
    return np.array(values, dtype=float)


def _positive(values: list) -> np.ndarray:
    """For a logarithmic axis."""
    array = _floats(values)
    return np.where(array > 0, array, np.nan)


def _some(name: str):
    return lambda data: bool(data[name]) and np.isfinite(_floats(data[name])).any()


_PANELS = [
    (_loss, lambda data: any(value is not None for value in data["loss"])),
    (_norm, _some("global_norm")),
    (_update, lambda data: bool(data["update_ratio"])),
    (_cosine, _some("cosine")),
    (_units, lambda data: bool(data["dead"] or data["saturated"])),
    (_rate, _some("learning_rate")),
]
