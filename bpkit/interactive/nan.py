"""How does one walk back from a NaN, operation by operation?  Introduced in chapter 8.

``nan_walk`` makes :class:`~bpkit.interactive.Frames` of a recording whose loss is NaN: what each
operation read, which of it is finite, and where to go next, until one has read no NaN.
:func:`bpkit.find_nonfinite` finds the same place by itself; the two are compared here.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from bpkit import style
from bpkit.graph import named_tensors, unseen
from bpkit.interactive.frames import GRADIENT, Frame, Frames, arrow, svg, tag, text
from bpkit.nonfinite import Origin, explain
from bpkit.record import Operation, Recording, Value

WIDE, HIGH, LEFT, TOP = 27, 17, 20, 84  # of a cell; of the cells
LOOK = {"": ("fr-fine", style.FAINT), "NaN": ("fr-nan", "#FFC18F")}
INFINITE = ("fr-inf", "#A9D8F5")


@unseen
def nan_walk(recording: Recording, loss: Tensor) -> Frames:
    """From a NaN loss back to the operation that made it, one operation at a time.

    Args:
        recording: of the forward pass. Operations whose result has a row for each example are
            drawn as columns, with a cell for each row.
        loss: the scalar that was computed in it, and is NaN.

    Raises:
        ValueError: the loss is not NaN, or the NaN came with the data or a weight.

    >>> from bpkit import record
    >>> x = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    >>> with record() as recording:
    ...     loss = (x / x.norm(dim=1, keepdim=True)).sum()
    >>> len(nan_walk(recording, loss).frames)
    3
    """
    if not loss.isnan().any():
        raise ValueError(f"the loss is {loss.item():.4g}, not NaN: there is nothing to walk back")
    trail = _trail(recording, recording._value(loss))
    culprit = trail[-1]
    origin = explain(recording, loss)
    if origin.operation != culprit.name or origin.line != culprit.line:
        raise ValueError(f"the trail ends at {culprit}, find_nonfinite at {origin.where}")
    shaped = [op for op in recording if op.outputs[0].shape]
    batch = max(len(op.outputs[0].data) for op in shaped)
    columns = [op for op in shaped if len(op.outputs[0].data) == batch]
    sentences = [_passed_on(recording, *pair) for pair in pairwise(trail)]
    sentences += [_born(recording, culprit, origin), _from_the_front(recording, trail, columns)]
    frames = [Frame(f"step {k} of {len(sentences)}", s) for k, s in enumerate(sentences, 1)]
    return Frames(_grid(recording, columns, trail, batch), frames)


def _trail(recording: Recording, value: Value) -> list[Operation]:
    """The operations from the loss to the one that read no NaN."""
    trail: list[Operation] = []
    while value is not None:
        if value.producer is None:
            raise ValueError("the NaN was made by no operation: look at the data and the weights")
        trail.append(recording.operations[value.producer])
        value = next((v for v in _read(trail[-1]) if v.data.isnan().any()), None)
    return trail


def _read(op: Operation) -> list[Value]:
    return [given for given in op.inputs if isinstance(given, Value)]


def _worst(data: Tensor) -> str:
    if data.isnan().any():
        return "NaN"
    return "−∞" if data.isneginf().any() else "∞" if data.isinf().any() else ""


def _bad_rows(value: Value) -> list[int]:
    return [k for k, row in enumerate(value.data) if _worst(row)] if value.shape else []


def _state(value: Value) -> str:
    """``NaN in row 5``."""
    rows = _bad_rows(value)
    where = f" in row{'s' * (len(rows) > 1)} {_series(rows)}" if rows else ""
    return f"{_worst(value.data) or 'finite'}{where}"


def _series(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _states(recording: Recording, op: Operation) -> str:
    names = {id(tensor): name for name, tensor in named_tensors(recording.names).items()}
    told = []
    for value in _read(op):
        whose = names.get(value.tensor, "a tensor from outside")
        if value.producer is not None:
            whose = f"the result of {recording.operations[value.producer].name}"
        told.append(f"{whose} ({_state(value)})")
    return ", ".join(told)


def _passed_on(recording: Recording, op: Operation, giver: Operation) -> str:
    return (
        f"{op.name} returned {_state(op.outputs[0])}, in “{op.line.text}”. It read "
        f"{_states(recording, op)}. It only handed the NaN on: go to {giver.name}."
    )


def _born(recording: Recording, op: Operation, origin: Origin) -> str:
    why = origin.why.rstrip(".")
    return (
        f"{op.name} returned {_state(op.outputs[0])}, and read {_states(recording, op)}: no NaN. "
        f"So the NaN was born here, in “{op.line.text}”. {why[0].upper()}{why[1:]}. "
        f"Repair: {origin.repair.rstrip('.')}."
    )


def _from_the_front(recording: Recording, trail: list[Operation], columns: list[Operation]) -> str:
    culprit = trail[-1]
    first = next(op for op in columns if _worst(op.outputs[0].data))
    told = f"You looked at {len(trail)} of {len(recording)} operations. "
    if first is culprit:
        return f"{told}It is also the first whose result is not finite."
    told += f"A search from the front stops at {first.name} ({_state(first.outputs[0])})"
    lost = _bad_rows(culprit.outputs[0])
    passed = [row for row in _bad_rows(first.outputs[0]) if row not in lost]
    if not passed:
        return f"{told}."
    return (
        f"{told} and accuses the wrong one: {_series(passed)} come out of {culprit.name} in good "
        "health."
    )


def _grid(
    recording: Recording, columns: list[Operation], trail: list[Operation], batch: int
) -> str:
    """A column stays blank until it is looked at: as a result, or as something that was read."""
    everything = [*columns, *(op for op in trail if op not in columns)]
    at = {op.index: LEFT + WIDE * k for k, op in enumerate(everything)}
    acts = {op.index: [k] for k, op in enumerate(trail, 1)}
    is_read: dict[int, list[int]] = {}
    for k, op in enumerate(trail, 1):
        for value in _read(op):
            if value.producer in at:
                is_read.setdefault(value.producer, []).append(k)
    parts = [text(LEFT - 4, TOP - 7, "row", anchor="end", font_size=10)]
    for row in range(batch):
        parts.append(text(LEFT - 4, TOP + HIGH * row + 12.5, str(row), anchor="end", font_size=11))
    boxes = []  # above all columns
    for op in everything:
        x, own, others = at[op.index], acts.get(op.index, []), is_read.get(op.index, [])
        parts.append(_column(x, op, min([*own, *others, len(trail) + 1]), batch))
        turn = {"transform": f"rotate(-50 {x + 17} {TOP - 6})", "data_on": _steps(own)}
        parts.append(text(x + 17, TOP - 6, op.name, "fr-name", "start", font_size=11, **turn))
        box = {"x": x - 0.5, "y": TOP - 1.5, "width": WIDE + 1, "height": HIGH * batch + 3, "rx": 3}
        for class_, steps in (("fr-read", others), ("fr-here", own)):
            if steps:
                boxes.append(tag("rect", class_=class_, data_on=_steps(steps), **box))
    parts += boxes
    level, middle = TOP + HIGH * batch + 14, WIDE / 2
    for k, (op, giver) in enumerate(pairwise(trail), 1):
        ends = at[op.index] + middle - 4, level, at[giver.index] + middle + 4, level
        parts.append(arrow(*ends, GRADIENT, data_from=k))
    right = LEFT + WIDE * len(everything)
    parts.append(text(right, level + 20, "from the loss", GRADIENT, "end"))
    parts.append(
        text(at[trail[-1].index] + WIDE, level + 20, f"born in {trail[-1].name}", GRADIENT, "end",
             data_from=len(trail), font_weight="bold")
    )  # fmt: skip
    label = (
        f"A column for each operation: {', '.join(op.name for op in everything)}. A row for each "
        f"of {batch} examples. The NaN leads from the loss back to {trail[-1].name}, no further."
    )
    return svg(right + 52, level + 28, label, *parts)


def _steps(numbers: list[int]) -> str | None:
    return " ".join(map(str, numbers)) or None


def _column(x: float, op: Operation, step: int, batch: int) -> str:
    """Cells of one result, those of a kind as one path; the loss is one cell for all rows."""
    data = op.outputs[0].data
    high, rows = (HIGH, list(data)) if data.dim() else (HIGH * batch, [data])
    blank, filled, words = "", {}, []
    for k, row in enumerate(rows):
        cell = f"M{x + 1} {TOP + high * k + 1}h{WIDE - 2}v{high - 2}h{2 - WIDE}z"
        blank, word = blank + cell, _worst(row)
        look = LOOK.get(word, INFINITE)
        filled[look] = filled.get(look, "") + cell
        if word:
            place = x + WIDE / 2, TOP + high * (k + 0.5) + 4
            words.append(text(*place, word, "fr-word", font_size=11, font_weight="bold"))
    cells = [tag("path", d=d, class_=class_, fill=fill) for (class_, fill), d in filled.items()]
    shown = tag("g", *cells, *words, data_from=step)
    return tag("path", d=blank, class_="fr-empty", stroke=style.FAINT) + shown
