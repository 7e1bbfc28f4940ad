"""How do I read a graph at a glance?  Introduced in chapter 1.

``draw`` puts inputs above users, so a picture is read from top to bottom like the code that made
it. Along each edge a solid arrow carries the value down and a dashed one carries the gradient
back up. Rounded boxes are operations, ellipses leaves, rectangles parameters, bare text constants.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, FancyArrowPatch, FancyBboxPatch, Rectangle

from bpkit import style
from bpkit.graph import Edge, Graph, Node, show, times

__all__ = ["draw"]

LIMIT = 40  # nodes; beyond that a picture is a wallpaper
COLUMN, ROW = 1.6, 1.05  # inches between neighbours
# A wide graph moves together, so that a phone need not shrink it until nobody can read it.
NARROWEST, WIDEST = 1.15, 5.8  # inches: between neighbours, and of a picture if it can be
LEFT, RIGHT = 0.75, 1.1  # inches beside the outermost nodes, for what is written there


def draw(
    graph: Graph,
    *,
    values: bool = True,
    gradients: bool = True,
    saved: bool = False,
    title: str | None = None,
    limit: int = LIMIT,
) -> Figure:
    """Draw ``graph`` with matplotlib.

    Args:
        values: write each value (a number, or the shape of an array) on the left of its edge.
        gradients: write the contribution that travels back on the right of its edge, and where
            several meet, their sum at the node.
        saved: write beside each operation what it keeps for its backward pass.
        title: one sentence: what is to be seen.
        limit: refuse graphs with more nodes than this.

    Values and gradients are there only if the graph has them: see ``Recording.graph``.

    Raises:
        ValueError: the graph has more than ``limit`` nodes.

    Example:
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> figure = draw(trace(x * x, names={"x": x}))
        >>> len(figure.axes)
        1
    """
    if len(graph.nodes) > limit:
        raise ValueError(
            f"{len(graph.nodes)} nodes make no readable picture (limit {limit}): "
            "use graph.text(), trace a part of the model, or raise the limit"
        )
    positions = layout(graph)
    column = _column(graph, positions)
    at = {key: np.array([x * column, -y * ROW]) for key, (x, y) in positions.items()}
    crowded = {
        key for key, (x, y) in at.items() if any(b == y and 0 < a - x < 2 for a, b in at.values())
    }
    axes = _axes(at, saved, crowded, title)
    for edge in graph.edges:
        _edge(axes, graph, edge, at, values, gradients)
    for k, (index, output) in enumerate(graph.outputs):
        _exit(axes, graph.nodes[index], output, at[index], at["out", k], values, gradients)
    for node in graph.nodes:
        _node(axes, graph, node, at[node.index], gradients, saved, node.index in crowded)
    _key(axes, graph, values, gradients)
    for text in axes.texts:
        text.set_parse_math(False)  # a name may hold a dollar
    return axes.figure


def layout(graph: Graph) -> dict:
    """Column and row of each node; of each ``("out", k)``, the end of the k-th output's arrow.

    Rows: an operation stands below all its inputs; a leaf, a constant, and an operation on nothing
    but those right above their first user, so that a weight stands beside the layer it belongs to.
    Columns: within each row, in the order that keeps edges short (barycentre sweeps), then pulled
    towards the neighbours without coming closer than one column.
    """
    row: dict = {}
    for node in graph.nodes:
        above = [row[edge.source] for edge in graph.inputs(node)]
        row[node.index] = max(above, default=-1) + 1
    for node in reversed(graph.nodes):
        sources = {graph.nodes[edge.source].kind for edge in graph.inputs(node)}
        if "operation" not in sources and graph.consumers(node):
            row[node.index] = min(row[edge.target] for edge in graph.consumers(node)) - 1
    links = [(edge.source, edge.target) for edge in graph.edges]
    for number, (index, _) in enumerate(graph.outputs):
        row["out", number] = row[index] + 1
        links.append((index, ("out", number)))
    neighbours = _with_bends(row, links)
    # The spine of operations decides where things stand; leaves and constants follow.
    weight = dict.fromkeys(neighbours, 1.0)
    weight.update({node.index: 0.05 for node in graph.nodes if node.kind != "operation"})

    def centre(key) -> float:
        near = neighbours[key]
        return np.average([column[n] for n in near], weights=[weight[n] for n in near])

    rows: dict[int, list] = {}
    for key in sorted(row, key=lambda k: (row[k], isinstance(k, tuple))):
        rows.setdefault(row[key], []).append(key)
    column = {key: float(k) for keys in rows.values() for k, key in enumerate(keys)}
    for sweep in range(12):
        for level in sorted(rows, reverse=sweep % 2 == 1):
            rows[level].sort(key=centre)
            column.update({key: float(k) for k, key in enumerate(rows[level])})
    for _ in range(60):
        for keys in rows.values():
            column.update(zip(keys, _apart([centre(key) for key in keys]), strict=True))
    return {key: (column[key], row[key]) for key in row if not _is_bend(key)}


def _column(graph: Graph, positions: dict) -> float:
    """Inches between neighbours: less in a wide graph, as far as the names in a row have room."""
    xs = [x for x, _ in positions.values()]
    fitting = (WIDEST - LEFT - RIGHT) / max(max(xs) - min(xs), 1e-9)
    needed = [NARROWEST]
    nodes = sorted(graph.nodes, key=lambda node: positions[node.index][::-1])
    for one, other in pairwise(nodes):
        (a, row), (b, other_row) = positions[one.index], positions[other.index]
        if row == other_row:
            needed.append((1.1 * (_half(one) + _half(other)) + 0.1) / (b - a))  # ellipses
    return max(min(COLUMN, fitting), *needed)


def _with_bends(row: dict, links: list[tuple]) -> dict:
    """Neighbours of each node, with a placeholder in every row that a long edge crosses."""
    neighbours: dict = {key: [] for key in row}
    for number, (source, target) in enumerate(links):
        between = [("bend", number, level) for level in range(row[source] + 1, row[target])]
        row.update({key: key[2] for key in between})
        for one, other in pairwise([source, *between, target]):
            neighbours.setdefault(one, []).append(other)
            neighbours.setdefault(other, []).append(one)
    return neighbours


def _is_bend(key) -> bool:
    return isinstance(key, tuple) and key[0] == "bend"


def _apart(wish: list[float], gap: float = 1.0) -> list[float]:
    """The nearest increasing positions at least ``gap`` apart: pool neighbours that collide."""
    pools: list[list[float]] = []  # sum of the wishes, each less its offset; how many
    for k, value in enumerate(wish):
        pools.append([value - k * gap, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    flat = [total / count for total, count in pools for _ in range(int(count))]
    return [value + k * gap for k, value in enumerate(flat)]


def _edge(axes, graph: Graph, edge: Edge, at: dict, values: bool, gradients: bool) -> None:
    source, target = graph.nodes[edge.source], graph.nodes[edge.target]
    # Two uses of one tensor by the same operation are two edges: draw them side by side.
    twins = [e for e in graph.inputs(target) if e.source == edge.source]
    shift = np.array([(twins.index(edge) - (len(twins) - 1) / 2) * 0.95, 0.0])
    start, end = at[edge.source], at[edge.target]
    value = _value(source, edge.output, named=edge is twins[0]) if values else ""
    gradient = minus(show(edge.gradient)) if gradients else ""
    # Labels keep clear of the end where edges meet.
    fork, join = len(graph.consumers(source)) > len(twins), len(graph.inputs(target)) > len(twins)
    where = (0.54 if join else 0.62) if fork else (0.32 if join else 0.5)
    _arrows(axes, start, end, value, gradient, shift, (where, where + 0.16 * fork))


def _value(node: Node, output: int, named: bool) -> str:
    """What a node passes on: its value, or at least its shape, after its name."""
    if node.kind == "constant":
        return ""  # written on the node itself
    text = minus(show(node.value)) if output == 0 else ""
    if not text and output < len(node.outputs):
        text = times(node.outputs[output][0])
    named = named and node.kind == "operation" and node.name and text
    return f"{node.name} = {text}" if named else text


def minus(text: str) -> str:
    """A real minus sign, as wide as a plus."""
    return text.replace("-", "−")


def _exit(axes, node: Node, output: int, start, end, values: bool, gradients: bool) -> None:
    value = _value(node, output, named=False) if values else ""
    gradient = minus(show(node.gradient)) if gradients else ""
    _arrows(axes, start, end + np.array([0, 0.12]), value, gradient, np.zeros(2), (0.5, 0.5))
    axes.text(*end, node.name or "output", ha="center", va="center", style="italic")


def _arrows(axes, start, end, value: str, gradient: str, shift, where) -> None:
    along = (end - start) / np.linalg.norm(end - start)
    left = np.array([along[1], -along[0]])  # the graph runs downwards, so this points left
    start, end = start + 0.28 * along + shift / 2, end - 0.28 * along + shift / 2
    lanes = [(value, 1, style.VALUE, "-", (start, end), where[0])]
    if gradient:
        lanes.append((gradient, -1, style.GRADIENT, (0, (3, 2)), (end, start), where[1]))
    look = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    for text, sign, colour, dashes, (tail, head), at in lanes:
        move = left * sign * (0.06 if gradient else 0)
        arrow = FancyArrowPatch(tail + move, head + move, linestyle=dashes, color=colour, **look)
        axes.add_patch(arrow)
        place = start + at * (end - start) + left * sign * 0.12
        weight = "bold" if sign > 0 else "normal"
        _beside(
            axes, place, text, -sign, 0.8, color=colour, fontweight=weight, fontsize=10, zorder=3
        )


def _beside(axes, place, text: str, side: float, pad: float, **look) -> None:
    """Text on a bit of paper, to the right of ``place`` (``side`` > 0) or to its left."""
    bbox = {"facecolor": style.PAPER, "edgecolor": "none", "pad": pad} if text else None
    axes.text(*place, text, ha="left" if side > 0 else "right", va="center", bbox=bbox, **look)


def _label(node: Node) -> str:
    if node.kind == "constant":
        return node.name or minus(show(node.value)) or "constant"
    return node.symbol


def _half(node: Node) -> float:
    """Half the width of a node, in inches."""
    return max(0.2, 0.05 * len(_label(node)) + 0.1)


def _node(
    axes, graph: Graph, node: Node, place, gradients: bool, saved: bool, crowded_right: bool
) -> None:
    label, half = _label(node), _half(node)
    if node.kind == "operation":
        box, corner = "round,pad=0.06,rounding_size=0.14", place - (half - 0.06, 0.13)
        shape = FancyBboxPatch(corner, 2 * half - 0.12, 0.26, boxstyle=box)
        shape.set(facecolor="#F6F8FA", edgecolor=style.INK)
    elif node.kind == "leaf":
        shape = Ellipse(place, 2.2 * half, 0.42, facecolor="#DDF0FA", edgecolor=style.BLUE)
    elif node.kind == "parameter":
        shape = Rectangle(place - (half, 0.18), 2 * half, 0.36)
        shape.set(facecolor="#DDF5EC", edgecolor=style.GREEN)
    if node.kind != "constant":
        shape.set(linewidth=1.4, zorder=2)
        axes.add_patch(shape)
    colour = style.MUTED if node.kind == "constant" else style.INK
    axes.text(*place, label, ha="center", va="center", color=colour, fontsize=11, zorder=4)

    notes = []
    users = [edge for edge in graph.consumers(node) if edge.gradient is not None]
    if gradients and len(users) > 1:
        notes.append((f"Σ = {minus(show(node.gradient))}", style.GRADIENT))
    if saved and node.kind == "operation":
        kept = [f"{s.name} = {minus(show(s.value))}" for s in node.saved if s.state == "kept"]
        notes.append((f"keeps {', '.join(kept) or 'nothing'}", style.MUTED))
    side = -1 if crowded_right else 1
    for k, (text, colour) in enumerate(notes):
        spot = place + np.array([side * (half + 0.1), 0.17 * ((len(notes) - 1) / 2 - k)])
        _beside(axes, spot, text, side, 0.6, color=colour, fontsize=9.5, zorder=4)


def _axes(at: dict, saved: bool, crowded: set, title: str | None):
    """Axes over the whole figure, one unit an inch, wide enough for notes beside the nodes."""
    xs, ys = np.array(list(at.values())).T
    notes = {key for key in at if saved and not isinstance(key, tuple)}
    left = min([xs.min() - LEFT, *(at[key][0] - 2.1 for key in notes & crowded)])
    right = max([xs.max() + RIGHT, *(at[key][0] + 2.2 for key in notes - crowded)])
    right = max(right, left + 4.6)
    bottom, top = ys.min() - 0.5, ys.max() + (0.75 if title else 0.35)
    # Not through pyplot: a returned figure is shown once, and none is left open.
    figure = Figure(figsize=(right - left, top - bottom))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(bottom, top))
    axes.set_axis_off()
    if title:
        axes.text(left + 0.1, top - 0.08, title, fontsize=11.5, fontweight="bold", va="top")
    return axes


def _key(axes, graph: Graph, values: bool, gradients: bool) -> None:
    (left, _), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    entries = []
    if values and any(node.value is not None for node in graph.nodes):
        entries.append(("solid arrow down: value", style.VALUE))
    if gradients and any(node.gradient is not None for node in graph.nodes):
        entries.append(("dashed arrow up: gradient", style.GRADIENT))
    for k, (text, colour) in enumerate(entries):
        axes.text(left + 0.1 + 2.2 * k, bottom + 0.08, text, color=colour, fontsize=9, va="bottom")
