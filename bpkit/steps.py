"""How does a forward and a backward pass go, step by step?  Introduced in chapter 1.

``steps`` tells a recorded graph as a sequence of sentences: each value as it is computed, what is
kept for later, each gradient as it is sent, what is freed. In a terminal, a ``StepThrough`` prints
them; in the built book a small script turns the same data into a figure to be walked with the
keyboard. Every number comes from the graph, so picture and code cannot disagree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from math import prod
from typing import Any

from bpkit.drawing import layout, minus
from bpkit.graph import Edge, Graph, Node, plain, show, unseen

__all__ = ["Step", "StepThrough", "steps"]

NOUNS = {
    "mul": "product", "add": "sum", "sub": "difference", "div": "quotient", "mm": "matrix product",
    "pow": "power", "exp": "exponential", "log": "logarithm", "sin": "sine", "cos": "cosine",
    "neg": "negative",
}  # fmt: skip


@dataclass
class Step:
    """One moment: which node acts, in a sentence, and what becomes visible or is freed by it."""

    phase: str  # "forward" or "backward"
    node: int
    sentence: str
    edges: list[int] = field(default_factory=list)  # whose gradient becomes visible
    frees: bool = False


@unseen
def steps(graph: Graph) -> list[Step]:
    """The forward and the backward pass over ``graph``, one step for each leaf and operation.

    Args:
        graph: from ``recording.graph(loss, gradients=True)``, with values and gradients.

    Raises:
        ValueError: the graph has no gradients (which only a graph with one output can have).

    Example:
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> with record(names={"x": x}) as recording:
        ...     y = x * 3
        >>> [step.phase for step in steps(recording.graph(y, gradients=True))]
        ['forward', 'forward', 'backward', 'backward']
    """
    if not graph.backward_order:
        raise ValueError(
            "a step-through needs one scalar output and its gradients: "
            "use recording.graph(loss, gradients=True)"
        )
    told = [
        Step("forward", n.index, _forward(graph, n)) for n in graph.nodes if n.kind != "constant"
    ]
    waiting = {leaf.index: len(graph.consumers(leaf)) for leaf in graph.leaves}
    number = {edge: k for k, edge in enumerate(graph.edges)}
    for index in graph.backward_order:
        node = graph.nodes[index]
        sent = [edge for edge in graph.inputs(node) if edge.gradient is not None]
        sentence = _backward(graph, node, sent)
        told.append(Step("backward", index, sentence, [number[e] for e in sent], bool(node.saved)))
        for edge in graph.inputs(node):
            if edge.source in waiting:
                waiting[edge.source] -= 1
                if waiting[edge.source] == 0:
                    leaf = graph.nodes[edge.source]
                    told.append(Step("backward", leaf.index, _arrived(graph, leaf)))
    return told


class StepThrough:
    """The steps of a graph, to be read as text, or walked in the built book.

    Args:
        graph: as for :func:`steps`.
        figure: the label of the figure that the walk stands in for, such as ``"fig:first-graph"``.
            Without JavaScript, that figure is what the page shows.

    Example:
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> with record(names={"x": x}) as recording:
        ...     y = x * 3
        >>> walk = StepThrough(recording.graph(y, gradients=True))
        >>> len(walk.to_dict()["steps"])
        4
    """

    def __init__(self, graph: Graph, figure: str = ""):
        self.graph = graph
        self.figure = figure
        self.steps = steps(graph)

    def __repr__(self) -> str:
        return "\n".join(f"{k:2}. {step.sentence}" for k, step in enumerate(self.steps, 1))

    def to_dict(self) -> dict[str, Any]:
        """What the page's script draws: nodes with places, edges, steps; all numbers as text."""
        places, labels = layout(self.graph), self.graph.labels()
        ((output, _),) = self.graph.outputs
        return {
            "nodes": [
                {
                    "kind": node.kind,
                    "name": "" if node.kind == "constant" else labels[node.index],
                    "symbol": minus(show(node.value)) if node.kind == "constant" else node.symbol,
                    "value": minus(show(node.value)),
                    "gradient": minus(show(node.gradient)),
                    "keeps": ", ".join(_kept(node)),
                    "sums": len(_received(self.graph, node)) > 1,
                    "at": [round(places[node.index][0], 3), places[node.index][1]],
                }
                for node in self.graph.nodes
            ],
            "edges": [
                {"from": e.source, "to": e.target, "gradient": minus(show(e.gradient))}
                for e in self.graph.edges
            ],
            "output": output,
            "steps": [vars(step) for step in self.steps],
        }

    def _repr_html_(self) -> str:
        data = json.dumps(self.to_dict(), ensure_ascii=False).replace("</", "<\\/")
        items = "".join(f"<li>{escape(step.sentence, quote=False)}</li>" for step in self.steps)
        return (
            f'<div class="step-through" data-figure="{escape(self.figure.replace(":", "-"))}">'
            f'<script type="application/json">{data}</script>'
            f"<details><summary>The steps as a list</summary><ol>{items}</ol></details></div>"
        )


def _forward(graph: Graph, node: Node) -> str:
    value = _number(node.value)
    if node.kind != "operation":
        return f"{node.name or 'A leaf'} is a {node.kind} with the value {value}."
    read = _series([_named(graph.nodes[edge.source]) for edge in graph.inputs(node)])
    kept = _series(_kept(node)) or "nothing"
    return f"The {_noun(node)} reads {read} and gives {_named(node)}. It keeps {kept}."


def _backward(graph: Graph, node: Node, sent: list[Edge]) -> str:
    users = _received(graph, node)
    start = ""
    if graph.outputs[0][0] == node.index:
        start = "The backward pass starts with 1. "
    elif len(users) > 1:
        start = f"All users have reported: {_sum(users, node.gradient)}. "
    sends = _series([_sent(graph, node, edge) for edge in sent]) or "nothing"
    kept = _kept(node)
    which = "which is" if len(kept) == 1 else "which are"
    freed = f" For that it uses {_series(kept)}, {which} then freed." if kept else ""
    return f"{start}The {_noun(node)} sends {sends}.{freed}"


def _sent(graph: Graph, node: Node, edge: Edge) -> str:
    """``6 · 3 = 18 to x``: what arrived, times the local factor, where that is one number."""
    target = graph.nodes[edge.source]
    arrived, leaving = node.gradient, edge.gradient
    told = _number(leaving)
    if arrived is not None and arrived.numel() == leaving.numel() == 1 and plain(arrived.sum()):
        factor = leaving / arrived
        equals = _equals([arrived, factor], leaving, prod)
        told = f"{_number(arrived)} · {_bracketed(_number(factor))} {equals} {told}"
    return f"{told} to {target.name or f'the {_noun(target)}'}"


def _arrived(graph: Graph, leaf: Node) -> str:
    users = _received(graph, leaf)
    name = leaf.name or "the leaf"
    if not users:
        return f"No gradient reaches {name}."
    total = _sum(users, leaf.gradient) if len(users) > 1 else _number(leaf.gradient)
    return f"The gradient of {name} is complete: {total}."


def _received(graph: Graph, node: Node) -> list[Edge]:
    return [edge for edge in graph.consumers(node) if edge.gradient is not None]


def _sum(edges: list[Edge], total: Any) -> str:
    parts = [edge.gradient for edge in edges]
    told = " + ".join(_bracketed(_number(part)) for part in parts)
    return f"{told} {_equals(parts, total, sum)} {_number(total)}"


def _equals(parts: list[Any], result: Any, operation: Callable) -> str:
    """``=`` if the printed digits say so, ``≈`` if only the digits left out do."""
    try:
        printed = operation([float(show(part)) for part in parts])
    except ValueError:  # arrays, which are printed as shapes
        return "="
    return "=" if show(printed) == show(result) else "≈"


def _kept(node: Node) -> list[str]:
    return [f"{s.name} = {_number(s.value)}" for s in node.saved if s.state == "kept"]


def _noun(node: Node) -> str:
    return "square" if node.exponent == 2 else NOUNS.get(node.short, node.short)


def _named(node: Node) -> str:
    return f"{node.name} = {_number(node.value)}" if node.name else _number(node.value)


def _number(value: Any) -> str:
    return minus(show(value)) or "an unknown value"


def _bracketed(number: str) -> str:
    return f"({number})" if number.startswith("−") else number


def _series(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
