"""Is the data what the model needs?  Batches and targets, before anything is computed.

Each rule takes the evidence of a checkup and yields findings. Ranges were seen to separate sick
programs from healthy ones; where a rule has one, it says so beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bpkit.batches import entries, tensors_in
from bpkit.diagnosis.forward import SHAPING, Observation
from bpkit.diagnosis.probes import LOSSES
from bpkit.diagnosis.report import Finding
from bpkit.diagnosis.wiring import listed
from bpkit.record import Operation, Value

_NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
_WEIGHTED = ("linear", "conv", "matmul", "addmm", "mm", "bmm", "bilinear", "gru", "lstm", "rnn")


def rules(evidence) -> Iterator[Finding]:
    yield from all_zero_input(evidence)
    yield from constant_labels(evidence)
    yield from unscaled_input(evidence)
    yield from label_misaligned(evidence)


def inputs_of(seen: Observation, whole: bool = False) -> dict[str, Tensor]:
    """Floating-point tensors of the batch that some module reads, and tokens if ``whole``."""
    read = {
        value.tensor
        for operation in seen.recording
        if operation.module is not None
        for value in operation.inputs
        if isinstance(value, Value)
    }
    return {
        path: tensor
        for path, tensor in tensors_in(seen.batch)
        if id(tensor) in read and (tensor.is_floating_point() or (whole and tensor.numel() > 7))
    }


def all_zero_input(evidence) -> Iterator[Finding]:
    """Every number that reaches the model is 0, in every batch looked at."""
    zero: dict[str, int] = {}
    read: dict[str, int] = {}
    for seen in evidence.observations:
        for path, tensor in inputs_of(seen, whole=True).items():
            read[path] = read.get(path, 0) + 1
            zero[path] = zero.get(path, 0) + (not bool(entries(tensor.detach()).any()))
    for path, count in read.items():
        # A first hidden state or a padding tensor is 0 too: it counts if nothing else comes in.
        if zero[path] == count and all(zero[other] == read[other] for other in read):
            yield Finding(
                "all-zero-input", path, f"all entries are 0 in {count} of {count} batches"
            )


def targets(seen: Observation) -> Iterator[tuple[str, Tensor, Operation]]:
    """Tensors of the batch that the loss compares with: path, values, the loss's call."""
    for operation in seen.recording:
        if operation.name not in LOSSES:
            continue
        values = [value for value in operation.inputs[:2] if isinstance(value, Value)]
        if len(values) == 2 and seen.flow.is_data(values[1]) and not seen.flow.is_data(values[0]):
            yield min(seen.flow.of(values[1])), values[1].data, operation


def constant_labels(evidence) -> Iterator[Finding]:
    """One value in all targets: nothing to tell apart. Targets that the program itself makes
    (``ones_like`` in a GAN) are no data and are not asked."""
    kept: dict[str, list[Tensor]] = {}
    for seen in evidence.observations:
        for path, values, operation in targets(seen):
            if not _judges_ours(evidence, seen, operation):
                continue
            wanted = values
            if operation.name in ("cross_entropy", "nll_loss") and not values.is_floating_point():
                ignored = next((v for v in operation.inputs[2:] if isinstance(v, int)), -100)
                wanted = values[values != ignored]
            kept.setdefault(path, []).append(wanted.detach().flatten())
        for path, values in _class_indices(seen):
            kept.setdefault(path, []).append(values)
    for path, parts in kept.items():
        # The recorded batches are the first ones; a sorted data set begins with one class.
        whole = [t for batch in evidence.batches for p, t in tensors_in(batch) if p == path]
        mixed = any(bool((t != t.flatten()[0]).any()) for t in whole if t.numel())
        firsts = {float(t.flatten()[0]) for t in whole if t.numel() and not t.is_complex()}
        if whole and parts[0].numel() == whole[0].numel() and (mixed or len(firsts) > 1):
            continue
        values = torch.cat([part.double() for part in parts])
        if values.numel() >= 8 and bool((values == values[0]).all()) and values[0].isfinite():
            yield Finding(
                "constant-labels",
                path,
                f"all {values.numel()} targets in {len(parts)} batches are {float(values[0]):g}",
            )


def _judges_ours(evidence, seen: Observation, operation: Operation) -> bool:
    """The last weights before this loss are trained here: not those of a fixed network that an
    input is made to fool."""
    value = next((v for v in operation.inputs if isinstance(v, Value)), None)
    while value is not None and value.producer is not None:
        maker = seen.recording.operations[value.producer]
        values = [v for v in maker.inputs if isinstance(v, Value)]
        held = [seen.flow.names.get(v.tensor, "") for v in values]
        ours = [n.removeprefix("parameter:") for n in held if n.startswith("parameter:")]
        if ours:
            return any(id(seen.parameters[n]) in evidence.owned for n in ours)
        if maker.name.startswith(_WEIGHTED) and len(values) > 1:
            return any(any(s.startswith("parameter") for s in seen.flow.of(v)) for v in values[1:])
        value = values[0] if values else None
    return True


def _class_indices(seen: Observation) -> Iterator[tuple[str, Tensor]]:
    """Labels that pick entries of a prediction (``log_p[range(n), y]``, ``gather``, one-hot)."""
    labels = {id(t): path for path, t in tensors_in(seen.batch) if t.ndim == 1}
    for operation in seen.recording:
        if operation.name not in ("getitem", "gather", "one_hot") or operation.module is not None:
            continue
        for value in operation.inputs:
            if isinstance(value, Value):
                source = seen.flow.behind(value)
                whole = value.data.dtype in (torch.int64, torch.int32)
                if source.tensor in labels and source.producer is None and whole:
                    yield labels[source.tensor], value.data.flatten()


def unscaled_input(evidence) -> Iterator[Finding]:
    """What the first layer with weights reads, from the data alone, is far from size 1.

    A root mean square above 30 (0 to 255 pixels: about 130; years: 2,000; standardised data: 1)
    or no entry above 0.01. A normalisation between the data and the activation takes care of it,
    before the layer or right after it.
    """
    for seen in evidence.observations[:1]:
        for operation in seen.recording:
            value = _first_read(seen, operation)
            if value is None:
                continue
            data = entries(value.data.detach())
            size = float(data.float().square().mean().sqrt())
            most = float(data.abs().max())
            if not torch.isfinite(data).all() or (most > 1e-2 and size <= 30):
                continue
            if most == 0 or _normalised_after(seen, operation):
                continue
            spread = f"root mean square {size:.3g}, largest {most:.3g}"
            yield Finding(
                "unscaled-input",
                f"{min(seen.flow.of(value))}, read by {seen.line(operation)}",
                f"{spread}; the first weights see numbers of this size, and their gradient is "
                "multiplied by it",
            )
            return


def _first_read(seen: Observation, operation: Operation) -> Value | None:
    if operation.index not in seen.live or not operation.name.startswith(_WEIGHTED):
        return None
    values = [value for value in operation.inputs if isinstance(value, Value)]
    weights = any(source.startswith("parameter") for source in seen.flow.sources[operation.index])
    if not weights or not values:
        return None
    first = values[0]
    plain = first.data.is_floating_point() and seen.flow.is_data(first) and not first.tracked
    return first if plain and first.data.numel() else None


def _normalised_after(seen: Observation, operation: Operation) -> bool:
    waiting = {operation.index}
    for later in seen.recording.operations[operation.index + 1 :]:
        if any(isinstance(v, Value) and v.producer in waiting for v in later.inputs):
            if later.name in _NORMS:
                return True
            if later.name in SHAPING or later.name.startswith(("add", "conv")):
                waiting.add(later.index)
    return False


def label_misaligned(evidence) -> Iterator[Finding]:
    """Example i of the inputs and example i of the targets meet in different rows of the loss; or
    the targets fit other rows: the loss falls only when they are moved."""
    if evidence.shifted is not None:
        where, said = evidence.shifted.split(" ", 1)
        yield Finding(
            "label-misaligned", where, f"the loss hardly falls; it does with the targets {said}"
        )
    found = evidence.misaligned
    if found is not None:
        yield Finding(
            "label-misaligned",
            str(found.operation.line),
            f"changing example {found.row} changes rows {listed(map(str, found.predicted))} of the "
            f"prediction, changing its target changes rows {listed(map(str, found.targets))}",
        )
