"""Does each step move the right parameters, by a sensible amount?

What a checkup can see without the reader's loop: who owns what, and how far plain steps move the
weights. What only the loop itself shows, the order of its calls, stands in ``rules_loop``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from torch import nn

from bpkit.diagnosis.forward import Observation
from bpkit.diagnosis.report import Finding
from bpkit.diagnosis.rules_backward import strange_leaves
from bpkit.diagnosis.rules_data import targets
from bpkit.diagnosis.wiring import dense, held_at, listed, registered
from bpkit.record import Value


def rules(evidence) -> Iterator[Finding]:
    yield from ownership(evidence)
    yield from decay_on_norms_and_biases(evidence.model, evidence.optimizers)
    yield from learning_rate(evidence)


def undecided(evidence) -> list[str]:
    """What this checkup could not decide, and what would."""
    said = []
    if not evidence.optimizers:
        said.append(
            "Nothing was trained: no optimizer was given, so ownership and step size are unknown."
        )
    return said


def ownership(evidence) -> Iterator[Finding]:
    """Which trainable parameters no optimizer moves, and which of its parameters are not the
    model's. A parameter that gets no gradient needs no owner (a generator while the discriminator
    learns), nor does a trunk in front of everything that is trained (a linear probe), nor an
    adversary behind it whose targets the program made itself."""
    if not evidence.optimizers:
        return
    parameters = {n: p for n, p in evidence.model.named_parameters() if p.requires_grad}
    missing = [n for n, p in parameters.items() if id(p) not in evidence.owned]
    own = {id(p) for p in evidence.model.parameters()}
    groups = [g for o in evidence.optimizers for g in o.param_groups]
    foreign = [p for g in groups for p in g["params"] if id(p) not in own]
    rebound = {n for seen in evidence.observations for n in seen.rebound}
    missing = [n for n in missing if n not in rebound]
    if missing and foreign:
        shapes = {tuple(p.shape) for p in foreign}
        same = [n for n in missing if tuple(parameters[n].shape) in shapes]
        if same:
            yield Finding(
                "stale-optimizer",
                listed(same),
                f"the optimizer holds {len(foreign)} tensors that the model no longer has and "
                f"lacks {len(missing)} that it has, of the same shapes",
            )
            return
    fed = [n for n in missing if _fed(evidence, n)]
    if fed:
        yield from _missing(evidence, fed, len(parameters))
    yield from _outside(evidence)


def _fed(evidence, name: str) -> bool:
    for seen in evidence.observations:
        gradient = seen.gradients.get(name)
        if gradient is not None and bool(dense(gradient).any()):
            return True
    return False


def _missing(evidence, missing: list[str], total: int) -> Iterator[Finding]:
    seen = evidence.observations[0]
    order = _order(seen)
    at = {name: place for place, name in enumerate(order)}
    owned = [at[n] for n, p in seen.parameters.items() if id(p) in evidence.owned and n in at]
    if not owned and at:
        return
    # Where no parameter is read in sight (a script) nothing is behind or between: a note.
    behind = [n for n in missing if owned and at.get(n, -1) > max(owned)]
    between = [n for n in missing if owned and min(owned) < at.get(n, -1) < max(owned)]
    supervised = any(True for _ in targets(seen))
    few = len(missing) <= len(owned)
    severity = "fault" if (behind and supervised) or (between and few) else "note"
    yield Finding(
        "optimizer-missing-params",
        listed(missing),
        f"{len(missing)} of {total} trainable parameters get a gradient and belong to no optimizer",
        severity=severity,
    )


def _order(seen: Observation) -> list[str]:
    """Parameters in the order in which the forward pass last reads them."""
    last: dict[str, int] = {}
    for operation in seen.recording:
        if operation.index not in seen.live:
            continue
        for value in operation.inputs:
            name = seen.flow.names.get(value.tensor, "") if isinstance(value, Value) else ""
            if name.startswith("parameter:"):
                last[name.removeprefix("parameter:")] = operation.index
    return sorted(last, key=last.__getitem__)


def _outside(evidence) -> Iterator[Finding]:
    """Parameters of a module beside the model, such as a loss with weights of its own."""
    for seen in evidence.observations[:1]:
        if seen.graph is None:
            return
        strange = [p for p in strange_leaves(evidence, seen) if isinstance(p, nn.Parameter)]
        strange = [p for p in strange if held_at(evidence.model, p) is None]
        for parameter in strange:
            # A fixed network, for features to compare, is in evaluation mode.
            names = [name for name, training in registered(parameter) if training]
            if names:
                yield Finding(
                    "optimizer-missing-params",
                    f"{names[0]} {list(parameter.shape)}, of a module beside the model",
                    "the loss depends on it and sends it a gradient; no optimizer holds it",
                )
                return


_NORMS = (
    nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm,
)  # fmt: skip


def decay_on_norms_and_biases(model, optimizers) -> Iterator[Finding]:
    """Weight decay pulls gains of normalisations and biases towards 0, where they do no harm by
    being large. Common practice leaves them out; small decays make little difference: a note."""
    names = {id(p): n for n, p in model.named_parameters()}
    gains = {
        id(p): n
        for name, module in model.named_modules()
        if isinstance(module, _NORMS)
        for n, p in module.named_parameters(prefix=name, recurse=False)
    }
    for optimizer in optimizers:
        hit, most = [], 0.0
        for group in optimizer.param_groups:
            decay = group.get("weight_decay") or 0.0
            for parameter in group["params"]:
                one = parameter.ndim == 1 and id(parameter) in names
                if decay > 0 and parameter.requires_grad and (one or id(parameter) in gains):
                    hit.append(gains.get(id(parameter)) or names[id(parameter)])
                    most = max(most, decay)
        if hit and any(n in gains.values() for n in hit) and most * _rate(optimizer) >= 1e-6:
            yield Finding(
                "weight-decay-on-norm-bias",
                listed(hit),
                f"weight_decay={most:g} acts on {len(hit)} gains and biases",
                severity="note",
            )
            return


def _rate(optimizer) -> float:
    return max(float(group["lr"]) for group in optimizer.param_groups)


def _mean(losses: list[float], last: bool) -> float:
    """Over the first or the last third: single batches differ."""
    count = max(1, len(losses) // 3)
    part = losses[-count:] if last else losses[:count]
    return statistics.median(part)


def suspiciously_fast(evidence) -> bool:
    """Whether the plain loop gives reason to repeat it at a lower learning rate."""
    if len(evidence.losses) < 2:
        return False
    alarms = grew(evidence.losses), _shot_up(evidence), _struck(evidence)
    return evidence.update_ratio > 0.2 or any(alarms)


def suspiciously_slow(evidence) -> bool:
    """Whether it gives reason to repeat it at a higher one."""
    waiting = any(_warming_up(o) for o in evidence.optimizers)
    return len(evidence.losses) > 1 and evidence.update_ratio < 1e-5 and not waiting


def grew(losses: list[float]) -> bool:
    if not losses:
        return False
    if not math.isfinite(losses[-1]):
        return math.isfinite(losses[0])
    return len(losses) >= 6 and _mean(losses, True) > 1.5 * abs(_mean(losses, False))


def _shot_up(evidence) -> bool:
    """Steps of the size of the weights at the start, and a loss that leapt and has not come down
    to where it began."""
    losses = evidence.losses
    leapt = max(losses[:10]) > 3 * abs(losses[0]) and _mean(losses, True) > 0.8 * abs(losses[0])
    return evidence.early_ratio > 0.5 and leapt


def _struck(evidence) -> bool:
    """Steps of the size of the weights at the start, and a loss that rests where it began: what
    such steps kill (a layer of ReLU) does not learn any more."""
    losses = evidence.losses
    return evidence.early_ratio > 0.5 and _mean(losses, True) > 0.9 * abs(losses[0])


def _warming_up(optimizer) -> bool:
    """A scheduler is attached and has lowered the rate for the start."""
    return any(
        g["lr"] < g.get("initial_lr", g["lr"]) or g["lr"] == 0 for g in optimizer.param_groups
    )


def _has_gradient(evidence) -> bool:
    """Small steps because of the rate, not because there is no gradient."""
    for seen in evidence.observations[:1]:
        for name, gradient in seen.gradients.items():
            if gradient is not None and evidence.start[name].ndim > 1:
                size = float(evidence.start[name].double().norm())
                norm = float(dense(gradient).double().norm())
                if norm > 1e-6 * size > 0:
                    return True
    return False


def learning_rate(evidence) -> Iterator[Finding]:
    """By experiment: too high if the loss breaks at this rate, or grows and ends higher, and falls
    at a tenth (or less) of it; too low if the weights hardly move at this rate and the loss ends
    lower at 100 times it (or more). The
    update ratio |change| / |weight| only says when to try: above 0.2 or below 1e-5 (healthy
    models: 2e-3 to 8e-2, from the third step on, measured from the weights)."""
    losses = evidence.losses
    rates = ", ".join(f"{_rate(o):g}" for o in evidence.optimizers)
    if evidence.slower is not None and len(evidence.slower) >= len(losses):
        slow = evidence.slower
        start = abs(_mean(slow, False)) + 1e-12
        broke = not math.isfinite(losses[-1])
        # Its last batches may be harder ones than its first; both runs end with the same.
        higher = broke or _mean(losses, True) > 1.3 * abs(_mean(slow, True))
        worse = (grew(losses) and higher) or _shot_up(evidence)
        stuck = evidence.update_ratio > 0.2 and higher
        fine = math.isfinite(slow[-1]) and _mean(slow, True) < 1.05 * start
        killed = _struck(evidence) and _mean(slow, True) < 0.8 * _mean(losses, True)
        if fine and (worse or stuck or killed):
            end = "is no longer finite" if broke else f"ends at {_mean(losses, True):.3g}"
            yield Finding(
                "lr-too-high",
                f"learning rate {rates}",
                f"in {len(losses)} plain steps the loss goes from {losses[0]:.3g} and {end}; at a "
                f"lower rate it ends at {_mean(slow, True):.3g}. Update ratio up to "
                f"{evidence.early_ratio:.2g} in the first steps, {evidence.update_ratio:.2g} later",
            )
    if evidence.faster is not None and len(losses) >= 6 and _has_gradient(evidence):
        pairs = list(zip(losses, evidence.faster, strict=False))[-max(2, len(losses) // 3) :]
        better = statistics.mean((slow - fast) / (abs(slow) + 1e-12) for slow, fast in pairs)
        if better > 0.03:
            yield Finding(
                "lr-too-low",
                f"learning rate {rates}",
                f"{len(losses)} steps move the weights by {evidence.update_ratio:.1g} of their "
                f"size each; at {evidence.factor:g} times the rate the loss of the same batches "
                f"is {better:.0%} lower by then",
            )
