"""Is the forward pass, from the input to the loss, what was meant?

Each rule takes the evidence of a checkup and yields findings. Exact evidence (which operation
feeds which, which row changes with which, which derivative is 0) comes before any range; where a
rule has a range, it stands beside it with where it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bpkit.diagnosis.forward import Observation
from bpkit.diagnosis.probes import ALONG_A_DIMENSION
from bpkit.diagnosis.report import Finding
from bpkit.diagnosis.rules_data import inputs_of, targets
from bpkit.record import Operation, Value

_RELUS = ("relu", "relu6", "clamp", "clamp_min", "threshold", "hardtanh")


def rules(evidence) -> Iterator[Finding]:
    for rule in (
        nonfinite,
        overflow_in_half,
        double_softmax,
        double_sigmoid,
        nll_on_logits,
        kldiv_on_probabilities,
        flipped_loss_sign,
        sum_reduction,
        shape_broadcast,
        softmax_wrong_dim,
        batch_mixing,
        dropout_in_eval,
        dead_relu,
        saturated_activation,
        symmetric_init,
        initial_loss_off,
        shared_module,
        untied_weights,
        norm_eps_too_small,
    ):
        yield from rule(evidence)


def nonfinite(evidence) -> Iterator[Finding]:
    """Where a NaN or a guilty infinity was born: ``bpkit.find_nonfinite`` says it all."""
    for place, origin in evidence.origins:
        where = ", ".join(part for part in (place, origin.where) if part)
        values = ", ".join(f"{name} {value:.4g}" for name, value in origin.values.items())
        said = f"{origin.node or origin.operation} ({origin.phase}): {origin.why}"
        slug, repair = origin.slug, origin.repair
        bad = _bad_entry(evidence, place) if slug in ("nan-forward", "nan-backward") else None
        if bad is not None:  # an infinity in the data meets the first weights
            slug, repair, where = "nan-input", "", f"{place}, {bad}"
        also = origin.also and origin.also[0].upper() + origin.also[1:]
        said = " ".join(part for part in (said, values and f"{values}.", also) if part)
        yield Finding(slug, where, said, repair=repair)


def _bad_entry(evidence, place: str) -> str | None:
    """The first entry of the batch that is not finite, in a tensor that a module reads."""
    for seen in evidence.observations:
        if f"batch {seen.index}" == place:
            for path, tensor in inputs_of(seen).items():
                bad = (~tensor.isfinite()).nonzero()
                if len(bad):
                    return f"{path}{bad[0].tolist()}, of {len(bad)} that are not finite"
    return None


def overflow_in_half(evidence) -> Iterator[Finding]:
    """A finite input, an infinite result, in half precision: too large for the format, also where
    a later operation turns the infinity into a harmless-looking 0."""
    if evidence.origins:
        return
    for seen in evidence.observations[:1]:
        for operation in seen.recording:
            if operation.index not in seen.live or not operation.outputs:
                continue
            result = operation.outputs[0].data
            if result.dtype not in (torch.float16, torch.bfloat16) or not bool(
                result.isinf().any()
            ):
                continue
            values = [v for v in operation.inputs if isinstance(v, Value)]
            numbers = [v for v in operation.inputs if isinstance(v, float)]
            given = all(bool(v.data.isfinite().all()) for v in values) and values
            if given and all(math.isfinite(n) for n in numbers) and _learned(seen, values[0]):
                yield Finding(
                    "fp16-overflow",
                    seen.line(operation),
                    f"{operation.name} of finite numbers gives {int(result.isinf().sum())} "
                    f"infinities in {result.dtype}, whose largest number is "
                    f"{torch.finfo(result.dtype).max:g}",
                )
                return


def _argument(operation: Operation, place: int = 0) -> Value | None:
    values = [value for value in operation.inputs if isinstance(value, Value)]
    return values[place] if len(values) > place else None


def _class_dimension(data: Tensor) -> int:
    return 1 if data.ndim > 1 else 0


def _first_number(operation: Operation) -> int:
    return next((int(v) for v in operation.inputs[1:] if isinstance(v, int | float)), -1)


def _is_distribution(data: Tensor, dimension: int) -> bool:
    """Non-negative and adding up to 1, to float32 rounding of a few hundred terms."""
    if data.shape[dimension] < 2 or not data.is_floating_point():
        return False
    sums = data.double().sum(dimension)
    near = 1e-4 if data.dtype in (torch.float32, torch.float64) else 2e-2
    return bool((data >= 0).all()) and bool(((sums - 1).abs() < near).all())


def double_softmax(evidence) -> Iterator[Finding]:
    """The loss takes the softmax of what already is one: rows that add up to 1, in every batch,
    made by a softmax. Log-probabilities are safe: a log-softmax of one changes nothing."""
    for name in ("cross_entropy", "log_softmax", "logsumexp"):
        found = []
        for seen in evidence.observations:
            for operation in seen.calls(name):
                value = _argument(operation)
                if value is None or not value.tracked:
                    continue
                dimension = _class_dimension(value.data)
                if name != "cross_entropy" and len(operation.inputs) > 1:
                    dimension = _first_number(operation)
                maker = seen.flow.maker(value)
                soft = maker is not None and maker.name in ("softmax", "div", "sigmoid", "softmin")
                if soft and _is_distribution(value.data, dimension):
                    found.append((seen, operation, maker, value.data.shape[dimension]))
        if found:
            seen, operation, maker, classes = found[0]
            floor = math.log(1 + (classes - 1) / math.e)
            yield Finding(
                "double-softmax",
                f"{seen.line(operation)}; first softmax in {seen.line(maker)}",
                f"every row that reaches {name} is ≥ 0 and adds up to 1; with {classes} classes "
                f"the loss can't fall below {floor:.3f}",
            )
            return


def double_sigmoid(evidence) -> Iterator[Finding]:
    """A loss with a sigmoid inside, or a second sigmoid in front of it, is fed by a sigmoid."""
    for seen in evidence.observations[:1]:
        calls = seen.calls(
            "binary_cross_entropy_with_logits", "logsigmoid", "multilabel_soft_margin_loss"
        )
        for loss in seen.calls("binary_cross_entropy"):
            value = _argument(loss)
            maker = seen.flow.maker(value) if value is not None else None
            if maker is not None and maker.name == "sigmoid":
                calls.append(maker)
        for operation in calls:
            value = _argument(operation)
            maker = seen.flow.maker(value) if value is not None else None
            if maker is not None and _squashed(evidence, operation, maker, value):
                low, high = float(value.data.min()), float(value.data.max())
                yield Finding(
                    "double-sigmoid",
                    f"{seen.line(operation)}; first {maker.name} in {seen.line(maker)}",
                    f"{operation.name} takes a sigmoid of numbers that lie in "
                    f"[{low:.2f}, {high:.2f}] because they come from one: the final probability "
                    "stays between 0.5 and 0.73",
                )
                return


def _squashed(evidence, operation: Operation, maker: Operation, value: Value) -> bool:
    """Made by a sigmoid, also one written out: a quotient whose values all lie in [0, 1]."""
    if maker.name in ("sigmoid", "softmax", "hardsigmoid"):
        return True
    inside = bool(((value.data >= 0) & (value.data <= 1)).all()) and value.data.numel() >= 8
    return inside and maker.name in ("div", "rdiv", "rtruediv", "truediv", "reciprocal", "clamp")


def nll_on_logits(evidence) -> Iterator[Finding]:
    """``nll_loss`` reads log-probabilities. A row whose exponentials add up to more than 1, or
    that holds a positive number, is none. (Less than 1 can be meant: part of a mixture.)"""
    for seen in evidence.observations[:1]:
        calls = [(o, _argument(o)) for o in seen.calls("nll_loss", "ctc_loss")]
        calls += list(_picked(seen))
        for operation, value in calls:
            if value is None or not value.tracked:
                continue
            dimension = -1 if operation.name == "ctc_loss" else _class_dimension(value.data)
            total = value.data.detach().double().logsumexp(dimension).exp()
            maker = seen.flow.maker(value)
            if maker is not None and maker.name == "log_softmax":
                if not bool(((total - 1).abs() < 1e-2).all()):
                    yield Finding(
                        "softmax-wrong-dim",
                        seen.line(maker),
                        f"the classes of {operation.name} lie along dimension {dimension}; there "
                        f"the probabilities add up to {float(total.median()):.3g}, not to 1",
                    )
                    return
            elif bool((total > 1.01).float().mean() > 0.5):
                yield Finding(
                    "nll-on-logits",
                    seen.line(operation),
                    f"the exponentials of a row add up to {float(total.median()):.3g}, "
                    "for log-probabilities they add up to 1",
                )
                return


def _picked(seen: Observation) -> Iterator[tuple[Operation, Value]]:
    """Scores [N, C] of which the labels pick one per row, whose mean, with the sign turned, is the
    loss: the same as nll_loss, written out."""
    for operation in seen.calls("gather", "getitem"):
        values = [value for value in operation.inputs if isinstance(value, Value)]
        if len(values) < 2 or values[0].data.ndim != 2 or not _learned(seen, values[0]):
            continue
        whole = [v for v in values[1:] if v.data.dtype in (torch.int64, torch.int32)]
        if not any(seen.flow.is_data(v) for v in whole) or operation.module is not None:
            continue
        waiting, plain, turned = {operation.index}, True, False
        for later in seen.recording.operations[operation.index + 1 :]:
            given = [v for v in later.inputs if isinstance(v, Value)]
            if any(v.producer in waiting for v in given) and later.index in seen.live:
                waiting.add(later.index)
                turned |= later.name == "neg"
                alone = len(given) == 1
                plain &= alone and later.name in ("neg", "mean", "sum", "squeeze", "view", "div")
        if plain and turned:
            yield operation, values[0]


def kldiv_on_probabilities(evidence) -> Iterator[Finding]:
    """``kl_div`` reads log-probabilities first, and probabilities as the target."""
    for seen in evidence.observations[:1]:
        for operation in seen.calls("kl_div"):
            first, second = _argument(operation), _argument(operation, 1)
            if first is None or second is None:
                continue
            log_target = operation.inputs[2:] and operation.inputs[-1] is True
            sums = [
                first.data.detach().double().logsumexp(d).abs().max()
                for d in range(first.data.ndim)
            ]
            if min(sums, default=0.0) > 0.05 and not bool((first.data >= 0).all()):
                said = "the exponentials of its first argument add up to 1 along no dimension"
            elif log_target and not bool((second.data <= 0).all()):
                said = "log_target=True, and its target holds positive numbers"
            elif log_target and bool((second.data >= 0).all()):
                said = "log_target=True, and its target holds probabilities"
            elif bool((first.data >= 0).all()) and bool((first.data > 0).any()):
                said = "its first argument is nowhere negative: probabilities, not their logarithms"
            elif (
                bool((second.data <= 0).all()) and bool((second.data < 0).any()) and not log_target
            ):
                said = "its target is nowhere positive: log-probabilities, without log_target=True"
            else:
                continue
            yield Finding("kldiv-on-probabilities", seen.line(operation), said)
            return


_LOSS_NODES = (
    "NllLoss", "MseLoss", "BinaryCrossEntropy", "SmoothL1Loss", "HuberLoss", "KlDiv",
    "SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss",
)  # fmt: skip


def flipped_loss_sign(evidence) -> Iterator[Finding]:
    """The optimizer makes the error larger: the loss falls when its error term grows.

    The sign of the derivative of the loss with respect to each error term against targets of the
    batch. A term of its own with the other sign is common (adversarial training), so all terms
    must agree. Targets made by the program are left out: a generator maximises on purpose.
    """
    up = all(g.get("maximize") for o in evidence.optimizers for g in o.param_groups)
    wrong = -1.0 if not (up and evidence.optimizers) else 1.0
    for seen in evidence.observations[:1]:
        if seen.graph is None:
            return
        signs: list[tuple[float, object]] = []
        compared = {operation.index for _, _, operation in targets(seen)}
        for node in seen.nodes(*_LOSS_NODES):
            operation = seen.operation_of(node)
            if node.gradient is not None and operation and operation.index in compared:
                signs += [(_sign(node.gradient), node)]
        if not signs:
            signs = list(_hand_written(seen))
        if signs and all(sign == wrong for sign, _ in signs):
            node = signs[0][1]
            value = float(seen.loss)
            said = "negative" if wrong < 0 else "positive, and the optimizer maximises"
            yield Finding(
                "flipped-loss-sign",
                seen.line(node),
                f"the derivative of the loss ({value:.3g}) with respect to its error term "
                f"({node.short}) is {said}: each step makes the error larger",
            )
            return


def _sign(gradient: Tensor) -> float:
    if bool((gradient >= 0).all()):
        return 1.0 if bool((gradient > 0).any()) else 0.0
    return -1.0 if bool((gradient <= 0).all()) else 0.0


def _hand_written(seen: Observation) -> Iterator[tuple[float, object]]:
    """Error terms written out: a square or absolute value of (prediction - target), which should
    shrink, and logarithms of probabilities picked or weighted by targets, which should grow."""
    for node in seen.graph.operations:
        operation = seen.operation_of(node)
        if node.gradient is None or operation is None:
            continue
        if node.exponent == 2 or node.short in ("abs", "square"):
            value = _argument(operation)
            maker = seen.flow.maker(value) if value is not None else None
            if maker is not None and maker.name in ("sub", "rsub") and _meets_target(seen, maker):
                yield _sign(node.gradient), node
        elif node.short in ("log_softmax", "log", "log_sigmoid_forward", "log_sigmoid"):
            sign = _sign(node.gradient)
            if sign and _weighted_by_target(seen, operation):
                yield -sign, node


def _meets_target(seen: Observation, operation: Operation) -> bool:
    values = [value for value in operation.inputs if isinstance(value, Value)]
    data = [seen.flow.is_data(value) for value in values]
    return len(values) == 2 and any(data) and not all(data)


def _weighted_by_target(seen: Observation, operation: Operation) -> bool:
    """Whether what was computed from this logarithm is next picked or multiplied by data."""
    waiting = {operation.index}
    for later in seen.recording.operations[operation.index + 1 :]:
        values = [value for value in later.inputs if isinstance(value, Value)]
        if not any(value.producer in waiting for value in values):
            continue
        if later.name in ("mul", "gather", "getitem", "einsum", "where", "masked_select", "dot"):
            others = [value for value in values if value.producer not in waiting]
            if any(seen.flow.is_data(value) and value.data.numel() > 1 for value in others):
                return True
            if any(value.tracked for value in others):
                return False
        waiting.add(later.index)
    return False


def sum_reduction(evidence) -> Iterator[Finding]:
    """The same rows twice double the loss: it is a sum over the batch, and step length grows with
    the batch size. For an optimizer whose step does not depend on the gradient's size (Adam) a
    note, since the sum is common there (variational autoencoders)."""
    ratio = evidence.doubled
    if ratio is None or not 1.95 < ratio < 2.05 or not evidence.observations:
        return
    seen = evidence.observations[0]
    count = evidence.rows or 0
    if count < 4:
        return
    plain = any(isinstance(o, torch.optim.SGD) for o in evidence.optimizers)
    where = next((o for o in reversed(seen.recording.operations) if o.index in seen.live), None)
    yield Finding(
        "sum-reduction",
        seen.line(where),
        f"with every row twice the loss is {ratio:.2f} times as large; the gradient of this batch "
        f"of {count} is {count} times that of the mean",
        severity="fault" if plain else "note",
    )


def shape_broadcast(evidence) -> Iterator[Finding]:
    """A prediction [N, 1] against a target [N] gives [N, N]: each with each. Told from a table
    made on purpose ([N, 1] against [1, N]) by the missing dimension."""
    for seen in evidence.observations[:1]:
        for operation in seen.recording:
            values = [value for value in operation.inputs[:2] if isinstance(value, Value)]
            if len(values) != 2 or operation.index not in seen.live or not values[0].shape:
                continue
            if not values[1].shape or not _spreads(values[0].shape, values[1].shape):
                continue
            if seen.flow.behind(values[0]) is seen.flow.behind(values[1]):
                continue  # a table of all pairs, made on purpose
            data = [seen.flow.is_data(value) for value in values]
            learned = [_learned(seen, value) for value in values]
            rows = values[0].shape[0] == values[1].shape[0] == evidence.rows
            batch = [any(s.startswith("batch") for s in seen.flow.of(v)) for v in values]
            one = rows and any(learned) and all(batch)
            both = all(learned) and rows
            if (data[0] and learned[1]) or (data[1] and learned[0]) or both or one:
                shapes = " and ".join(str(list(value.shape)) for value in values)
                made = torch.broadcast_shapes(values[0].shape, values[1].shape)
                yield Finding(
                    "shape-broadcast",
                    seen.line(operation),
                    f"{operation.name} of {shapes} compares each with each: {list(made)}",
                )
                return


def _learned(seen: Observation, value: Value) -> bool:
    return any(source.startswith("parameter") for source in seen.flow.of(value))


def _spreads(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Both begin with the rows of the batch, one has a dimension more, and the result is larger
    than either: [N, 1] against [N], [B, 1, H, W] against [B, H, W]. ([N, C] against [N] with N = C
    is not larger, [N, 1] against [1, N] was written so.)"""
    if len(a) == len(b) or a[0] != b[0] or a[0] < 2:
        return False
    try:
        made = math.prod(torch.broadcast_shapes(a, b))
    except RuntimeError:
        return False
    return made > max(math.prod(a), math.prod(b))


def softmax_wrong_dim(evidence) -> Iterator[Finding]:
    """A softmax over one element is 1 whatever comes in; a softmax over the batch makes rows
    compete with each other."""
    lengths: dict[str, list[int]] = {}
    places: dict[str, tuple[Observation, Operation]] = {}
    for seen in evidence.observations:
        for operation in seen.recording:
            if operation.name not in ("softmax", "log_softmax") or not operation.outputs:
                continue
            value = _argument(operation)
            dimension = next((i for i in operation.inputs[1:] if isinstance(i, int)), -1)
            if value is None or not value.shape or not _learned(seen, value):
                continue
            if not -len(value.shape) <= dimension < len(value.shape):
                continue
            place = seen.line(operation)
            lengths.setdefault(place, []).append(value.shape[dimension])
            places[place] = (seen, operation)
    for place, found in lengths.items():
        if set(found) == {1}:
            yield Finding(
                "softmax-wrong-dim",
                place,
                f"the softmax runs over a dimension of size 1 in {len(found)} of {len(found)} "
                "calls: its result is 1 and its derivative 0 whatever comes in",
            )
            return
    yield from _weights_of_a_mean(evidence)
    for mixed in evidence.mixing or ():
        if mixed.operation.name in ("softmax", "log_softmax"):
            yield Finding(
                "softmax-wrong-dim",
                _place(mixed.operation),
                f"changing row {mixed.rows[0]} of the batch changes {len(mixed.changed)} rows of "
                "the softmax: it runs over the batch",
            )


def _weights_of_a_mean(evidence) -> Iterator[Finding]:
    """A softmax whose result multiplies a matrix from the left gives the weights of a mean: they
    add up to 1 along the dimension that the product sums over."""
    for seen in evidence.observations[:1]:
        for operation in seen.calls("matmul", "bmm"):
            value = _argument(operation)
            maker = seen.flow.maker(value) if value is not None else None
            if maker is None or maker.name != "softmax" or value.data.ndim < 2:
                continue
            sums = [(value.data.detach().sum(d) - 1).abs().max() for d in (-1, -2)]
            if sums[0] > 0.05 and sums[1] < 1e-3:
                yield Finding(
                    "softmax-wrong-dim",
                    seen.line(maker),
                    "the product sums over the last dimension, where the weights add up to "
                    f"between {float(value.data.sum(-1).min()):.2g} and "
                    f"{float(value.data.sum(-1).max()):.2g}; they add up to 1 along the one before",
                )
                return


def _place(operation: Operation) -> str:
    where = f"{operation.module}: " if operation.module else ""
    return f"{where}{operation.line}"


def batch_mixing(evidence) -> Iterator[Finding]:
    """One row's result depends on other rows, in evaluation mode, and no index, neighbourhood or
    table of similarities of the batch says so. A fault where a recurrence, an attention or a change
    of shape does it; statistics of the batch may be meant: a note."""
    for mixed in evidence.mixing or ():
        name = mixed.operation.name
        if name in ("softmax", "log_softmax"):
            continue
        yield Finding(
            "batch-mixing",
            _place(mixed.operation),
            f"changing row {mixed.rows[0]} of the batch changes {len(mixed.changed)} rows of the "
            f"result of {name}, in evaluation mode",
            severity="fault"
            if mixed.reordered or any(word in name for word in ALONG_A_DIMENSION)
            else "note",
        )


def dropout_in_eval(evidence) -> Iterator[Finding]:
    """Two passes in evaluation mode differ because a dropout drops."""
    operation = evidence.random_in_eval
    if operation is not None:
        yield Finding(
            "dropout-in-eval",
            _place(operation),
            "two passes over the same batch in evaluation mode drop different units here",
        )


def _units(seen: Observation, operation: Operation) -> Tensor:
    """The result with units along the last dimension, samples and positions along the first."""
    data = operation.outputs[0].data.detach()
    channels = False
    maker = seen.flow.maker(_argument(operation))
    while maker is not None and maker.name in ("batch_norm", "group_norm", "instance_norm", "add"):
        value = _argument(maker)
        maker = seen.flow.maker(value) if value is not None else None
    if maker is not None and maker.name.startswith("conv") and data.ndim > 2:
        channels = True
    return (data.movedim(1, -1) if channels else data).reshape(
        -1, data.shape[1 if channels else -1]
    )


def _by_place(
    evidence, names: tuple[str, ...]
) -> Iterator[tuple[str, Observation, Operation, list]]:
    """Calls of these functions in all observations, those of one place together."""
    together: dict[tuple, list] = {}
    for seen in evidence.observations:
        for number, operation in enumerate(seen.calls(*names)):
            value = _argument(operation)
            if value is None or not value.data.ndim or not _learned(seen, value):
                continue
            key = (operation.module, str(operation.line), number)
            together.setdefault(key, []).append((seen, operation))
    for calls in together.values():
        seen, operation = calls[0]
        units = [_units(s, o) for s, o in calls]
        if len({unit.shape[1] for unit in units}) == 1:
            yield seen.line(operation), seen, operation, units


def dead_relu(evidence) -> Iterator[Finding]:
    """Units that are 0 for every sample of every batch looked at (not zero entries: half of a
    healthy ReLU's outputs are 0). Healthy models at the start: up to 0.12 of a layer, after
    training 0.38; a fault from 0.75, and only with at least 32 samples."""
    for place, seen, operation, units in _by_place(evidence, _RELUS):
        outputs = torch.cat(units)
        if operation.name in ("clamp", "hardtanh") and not _floor_at_zero(operation):
            continue
        if len(outputs) < 32:
            continue
        dead = (outputs <= 0).all(0)
        share = float(dead.double().mean())
        if share < 0.5 or _feeds_loss_scale(seen, operation):
            continue
        yield Finding(
            "dead-relu",
            place,
            f"{int(dead.sum())} of {dead.numel()} units are 0 for all {len(outputs)} samples and "
            "positions looked at, so no gradient passes them",
            severity="fault" if share >= 0.75 else "note",
        )


def _floor_at_zero(operation: Operation) -> bool:
    return bool(operation.inputs[1:]) and operation.inputs[1] in (0, 0.0)


def _feeds_loss_scale(seen: Observation, operation: Operation) -> bool:
    """A hinge in the loss (outside every module) is 0 when its margin is met: that is its goal."""
    return operation.module is None


def saturated_activation(evidence) -> Iterator[Finding]:
    """Outputs of a tanh beyond ±0.97, of a sigmoid below 0.03 or above 0.97: there the slope is
    under a twelfth of its largest. Hidden layers only; a sigmoid that multiplies something is a
    gate and may shut. Healthy models: 0.00; saturated ones 0.97 and more; a fault from 0.75."""
    for place, seen, operation, units in _by_place(evidence, ("tanh", "sigmoid", "hardtanh")):
        outputs = torch.cat(units)
        if _is_gate(seen, operation) or _is_last(seen, operation):
            continue
        flat = outputs.abs() > 0.97
        if operation.name == "sigmoid":
            flat = (outputs > 0.97) | (outputs < 0.03)
        share = float(flat.double().mean())
        if share < 0.5:
            continue
        size = float(_argument(operation).data.abs().mean())
        yield Finding(
            "saturated-activation",
            place,
            f"{share:.0%} of the outputs of {operation.name} lie where its slope is almost 0; its "
            f"inputs have mean size {size:.3g}",
            severity="fault" if share >= 0.75 else "note",
        )


def _is_gate(seen: Observation, operation: Operation) -> bool:
    return any(
        later.name in ("mul", "lerp", "where", "addcmul")
        and any(isinstance(v, Value) and v.producer == operation.index for v in later.inputs)
        for later in seen.recording.operations[operation.index + 1 :]
    )


def _is_last(seen: Observation, operation: Operation) -> bool:
    """No weights are applied to its result before the loss."""
    waiting = {operation.index}
    for later in seen.recording.operations[operation.index + 1 :]:
        if any(isinstance(v, Value) and v.producer in waiting for v in later.inputs):
            waiting.add(later.index)
            others = [v for v in later.inputs if isinstance(v, Value) and v.producer not in waiting]
            if later.module is not None and any(_learned(seen, v) for v in others):
                return False
    return True


def symmetric_init(evidence) -> Iterator[Finding]:
    """All units of a layer start alike and are still alike after some training steps: they get
    the same gradient for ever. (One layer of zeros alone breaks out at the first step.)"""
    alike = evidence.still_alike
    if alike and evidence.steps >= 3:
        yield Finding(
            "symmetric-init",
            ", ".join(alike[:4]) + (", …" if len(alike) > 4 else ""),
            f"all rows of {len(alike)} weight{'s' if len(alike) > 1 else ''} are equal at the "
            f"start and still equal after {evidence.steps} steps",
        )


def initial_loss_off(evidence) -> Iterator[Finding]:
    """A classifier that knows nothing has the loss log(C). Healthy models start within 6 % of it,
    sick ones at 5 times and more; a note from twice, a fault from 4 times, in the first batches,
    mean reduction only."""
    ratios = []
    for seen in evidence.observations:
        for node in seen.nodes("BinaryCrossEntropy"):
            operation = seen.operation_of(node)
            mean = operation is not None and node.function._saved_reduction == 1
            if mean and operation.outputs and bool(operation.outputs[0].data.isfinite().all()):
                loss = float(operation.outputs[0].data)
                ratios.append((loss / math.log(2), loss, 2, operation))
        for node in seen.nodes("NllLoss"):
            operation = seen.operation_of(node)
            if operation is None or operation.name != "cross_entropy" or not operation.outputs:
                continue
            value, loss = _argument(operation), operation.outputs[0].data
            if value is None or loss.numel() != 1 or node.function._saved_reduction != 1:
                continue
            classes = value.data.shape[_class_dimension(value.data)]
            if classes > 1 and bool(loss.isfinite()):
                ratios.append((float(loss) / math.log(classes), float(loss), classes, operation))
    if ratios and min(ratio for ratio, *_ in ratios) > 2:
        severity = "fault" if min(ratio for ratio, *_ in ratios) > 4 else "note"
        _, loss, classes, operation = min(ratios, key=lambda r: r[0])
        yield Finding(
            "initial-loss-off",
            _place(operation),
            f"the first loss is {loss:.3g}; knowing nothing costs log({classes}) = "
            f"{math.log(classes):.3g}: the model is confidently wrong before it has learned",
            severity=severity,
        )


def shared_module(evidence) -> Iterator[Finding]:
    """One module under several names: its parameters are one set, however often it is used."""
    names: dict[int, list[str]] = {}
    for name, module in evidence.model.named_modules(remove_duplicate=False):
        if name and any(True for _ in module.parameters(recurse=False)):
            names.setdefault(id(module), []).append(name)
    for same in names.values():
        if len(same) > 1:
            yield Finding(
                "shared-module",
                ", ".join(same[:6]),
                f"{len(same)} names, one module: one set of weights and one gradient, the sum "
                "over its uses",
                severity="note",
            )
            return


def untied_weights(evidence) -> Iterator[Finding]:
    """Two parameters with the same numbers that are not the same tensor: each gets only its own
    gradient, and a step pulls them apart (or, with shared memory, moves it twice)."""
    known: dict[tuple, tuple[str, Tensor]] = {}
    for name, parameter in evidence.model.named_parameters():
        if parameter.ndim < 2 or parameter.is_meta or parameter.numel() < 4:
            continue
        data = evidence.start.get(name, parameter.detach())
        if bool((data == data.flatten()[0]).all()):
            continue
        key = (tuple(sorted(data.shape)), f"{float(data.double().sum()):.8g}")
        twin = known.get(key)
        same = twin is not None and any(
            twin[1].shape == d.shape and torch.equal(twin[1], d) for d in (data, data.T)
        )
        if same and not _copies(evidence.model, twin[0], name):
            other = twin[0]
            shared = evidence.addresses.get(name) == evidence.addresses.get(other)
            yield Finding(
                "untied-weights",
                f"{other}, {name}",
                "equal numbers in two parameters"
                + (" that share memory but not their gradient" if shared else ""),
                severity="note",
            )
            return
        known[key] = (name, data)


def _copies(model: nn.Module, first: str, second: str) -> bool:
    """Whether the two stand at the same place of two copies of one module, as the layers of an
    ``nn.TransformerEncoder`` do."""
    parents = []
    for name in (first, second):
        parts = name.split(".")
        above = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts))]
        parents.append(([type(module) for module in above], parts[-1]))
    deep = len(first.split(".")) > 2
    return deep and parents[0] == parents[1]


def norm_eps_too_small(evidence) -> Iterator[Finding]:
    """A normalisation divides by √(variance + ε). Where the variance of a row is far below 1e-8
    and ε does not hold it up, the factor exceeds 1e4 and so does the gradient."""
    for module_name, module in evidence.model.named_modules():
        eps = getattr(module, "eps", None)
        kind = type(module).__name__
        if not isinstance(eps, float) or "Norm" not in kind:
            continue
        dtype = next((p.dtype for p in module.parameters()), torch.float32)
        if eps > 0 and float(torch.tensor(eps, dtype=dtype)) == 0:
            yield Finding(
                "norm-eps-too-small",
                module_name or kind,
                f"eps={eps:g} is 0 in {dtype}: a constant row is divided by 0",
            )
            return
    for seen in evidence.observations:
        for node in seen.nodes("NativeLayerNorm", "NativeBatchNorm", "NativeGroupNorm"):
            scale = next((s.value for s in node.saved if s.name in ("result2",)), None)
            if scale is not None and bool((scale.abs() > 1e4).any()):
                yield Finding(
                    "norm-eps-too-small",
                    seen.line(node),
                    f"1/√(variance + eps) reaches {float(scale.abs().max()):.3g}: a row without "
                    "variance, and an eps that does not hold it up",
                )
                return
