"""What is wrong with this model, before I train it?  Introduced in chapter 8.

``checkup`` records a forward and a backward pass on the first batches, makes a few experiments
and some plain training steps, puts everything back, and lets the rules read what was seen.
"""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bpkit.arguments import check, check_values, needs_closure, the_optimizers, uncompiled
from bpkit.batches import entries, replaced, rows, tensors_in
from bpkit.diagnosis import rules_backward, rules_data, rules_forward, rules_update
from bpkit.diagnosis.faults import for_error
from bpkit.diagnosis.forward import Observation, observe
from bpkit.diagnosis.probes import (
    Misaligned,
    Mixing,
    WrongBackward,
    alignment,
    custom_backward,
    doubled,
    mixing,
    random_in_eval,
    recorded,
)
from bpkit.diagnosis.report import Report
from bpkit.diagnosis.wiring import dense, norms, stacked
from bpkit.nonfinite import Origin, find_inplace, find_nonfinite
from bpkit.preserve import preserve
from bpkit.record import Operation

# Enough to meet the odd batch at the end of an epoch, few enough for a coffee-free second.
MOST_BATCHES = 64
STEPS = 20
SECONDS = 20.0


@dataclass
class Checked:
    """What a checkup saw. Everything is plain data; the rules judge.

    Attributes:
        batches: those that were taken.
        observations: recorded steps on untouched parameters, first batches first.
        owned: ids of the parameters that an optimizer is to move.
        start, addresses: each parameter's values and memory address before any step.
        losses, steps: of the plain loop; ``slower`` of the same loop at a tenth of the learning
            rate (or a tenth of that, until it does not diverge), ``faster`` at ``factor`` times
            it, where that was tried.
        early_ratio: largest |change| / |weight| of the first steps, median over the weights.
        update_ratio: median of |change| / |weight| over weights and steps from the third on.
        unmoved: parameters whose values are the same after the loop; ``still_alike`` weights
            whose rows were equal before and are equal after it.
        origins: where non-finite values came from.
        wrapper: the ``DistributedDataParallel`` around the model, if there is one.
    """

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    batches: list[Any] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)
    start: dict[str, Tensor] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    slower: list[float] | None = None
    faster: list[float] | None = None
    steps: int = 0
    factor: float = 1.0
    early_ratio: float = 0.0
    update_ratio: float = math.nan
    unmoved: set[str] = field(default_factory=set)
    still_alike: list[str] = field(default_factory=list)
    activation_growth: float = 1.0
    grows_from: str = ""
    rows: int | None = None
    doubled: float | None = None
    mixing: list[Mixing] | None = None
    wrapper: nn.Module | None = None
    random_in_eval: Operation | None = None
    misaligned: Misaligned | None = None
    shifted: str | None = None
    wrong_backward: list[WrongBackward] = field(default_factory=list)
    origins: list[tuple[str, Origin]] = field(default_factory=list)


def checkup(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> Report:
    """Look for faults in data, forward pass, backward pass and optimizer, before training.

    Args:
        model: the model, on whatever device it lives. One in ``DistributedDataParallel`` is looked
            at without it, on this process's batches, so that processes need not agree; a compiled
            one as it was written, so that nothing is compiled for it.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss.
        batches: an iterable of batches, a DataLoader too; up to 64 are used. A batch may be a
            tensor or nested tuples, dictionaries and dataclasses of tensors.
        optimizer: the optimizer, several of them, or ``None`` (then its part is left out).

    Returns:
        A :class:`~bpkit.diagnosis.report.Report`. Parameters, buffers, gradients, optimizer
        state, flags, hooks, random state and a loader's generator are as before, also after an
        exception or Ctrl-C.

    Raises:
        ValueError: there is no batch (an iterator that was used up), something is on the meta
            device, or ``loss_fn`` returns no scalar tensor.
        TypeError: an argument is of another kind, or ``loss_fn`` can't be called so.
        Exception: what the program itself raises, on the first batch or a later one, unless the
            catalogue knows the fault. If others are found, ``undecided`` tells of a later batch.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> batch = torch.randn(8, 3), torch.arange(8) % 2
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> checkup(model, loss_fn, [batch], torch.optim.SGD(model.parameters(), 0.1)).ok
        True
    """
    check(model, loss_fn)
    optimizers, wrapper = the_optimizers(optimizer), None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # Each process decides by its own losses which experiments to make: nothing may be sent.
        model, wrapper = model.module, model
    check_values(model)
    with preserve(model, *optimizers, others=_generators(batches)), uncompiled():
        warnings.simplefilter("ignore")
        taken = _taken(batches)
        check_values(model, *taken)
        # A backward pass leaves gradients in those, too.
        tracked = [tensor for _, tensor in tensors_in(taken) if tensor.requires_grad]
        with preserve(nn.Module(), others=tracked):
            if any(is_lazy(parameter) for parameter in model.parameters()):
                loss_fn(model, taken[0])
            evidence = _gather(model, loss_fn, taken, optimizers)
            evidence.wrapper = wrapper
            findings = [finding for part in RULES for finding in part.rules(evidence)]
    report = Report(findings, rules_update.undecided(evidence), _summary(evidence, len(taken)))
    if (stopped := _unexplained(evidence)) is not None:
        # An iterator that loss_fn draws from may have ended because of the looks before.
        if report.ok and not isinstance(stopped.error, StopIteration):
            stopped.error.add_note(f"It came of batch {stopped.index}, counted from 0.")
            raise stopped.error
        said = f"{type(stopped.error).__name__}: {stopped.error}".strip(": ")
        report.undecided.append(f"Batch {stopped.index} ends in {textwrap.shorten(said, 180)}")
    return report


RULES = (rules_data, rules_forward, rules_backward, rules_update)


def _taken(batches: Iterable[Any]) -> list[Any]:
    if isinstance(batches, Tensor | Mapping) or not (
        isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    ):
        kind = "one tensor" if isinstance(batches, Tensor) else f"a {type(batches).__name__}"
        raise TypeError(f"batches is {kind}; pass an iterable of batches, such as [batch]")
    taken = list(itertools.islice(iter(batches), MOST_BATCHES))
    if not taken:
        raise ValueError(
            "batches holds no batch; an iterator that was used up before? Pass the loader or a list"
        )
    return taken


def _generators(batches: Any) -> list[torch.Generator]:
    """A loader's and its sampler's."""
    owners = [batches, *(getattr(batches, name, None) for name in ("sampler", "batch_sampler"))]
    owners.append(getattr(owners[-1], "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _gather(model, loss_fn, batches, optimizers) -> Checked:
    evidence = Checked(model, optimizers, batches)
    parameters = dict(model.named_parameters())
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    evidence.owned = {id(p) for group in groups for p in group["params"]}
    if not optimizers:
        evidence.owned = {id(p) for p in parameters.values() if p.requires_grad}
    evidence.start = {name: p.detach().clone() for name, p in parameters.items()}
    evidence.addresses = {name: p.data_ptr() for name, p in parameters.items()}
    for index in _worth_recording(batches):
        with preserve(model, *optimizers):
            seen = observe(model, loss_fn, batches[index], index)
        if seen.error is None and not isinstance(seen.loss, Tensor):
            raise ValueError(
                f"loss_fn returned {type(seen.returned).__name__}; expected a scalar tensor"
            )
        if seen.error is None and seen.loss.numel() != 1:
            raise ValueError(f"loss_fn returned shape {tuple(seen.loss.shape)}; expected a scalar")
        if seen.error is None and seen.loss.is_complex():
            raise ValueError(f"loss_fn returned {seen.loss.dtype}; expected a real scalar")
        evidence.observations.append(seen)
    first = evidence.observations[0]
    known = list(rules_backward.raised(evidence))
    if first.error is not None and not known:
        if all(isinstance(batch, Tensor) for batch in batches):
            first.error.add_note(
                "Each tensor in batches was taken for a batch of its own; one batch is [batch]."
            )
        raise first.error
    for seen in evidence.observations:
        if seen.phase == "backward" and seen.error is not None:
            with preserve(model, *optimizers):
                origin = find_inplace(model, loss_fn, seen.batch)
            known = [other.where for _, other in evidence.origins]
            if origin is not None and origin.where not in known:
                evidence.origins.append((f"batch {seen.index}", origin))
        _look_for_nonfinite(evidence, loss_fn, seen.batch, f"batch {seen.index}", seen)
    if first.error is None:
        _experiment(evidence, loss_fn, first)
        _train(evidence, loss_fn, batches)
    return evidence


def _worth_recording(batches: list[Any]) -> list[int]:
    """The first two, the one with the fewest rows, and the first that is not finite."""
    chosen = [0, 1]
    sizes = [rows(batch) or 0 for batch in batches]
    chosen.append(min(range(len(batches)), key=sizes.__getitem__))
    for index, batch in enumerate(batches):
        floating = [t for _, t in tensors_in(batch) if t.is_floating_point()]
        if not all(bool(t.isfinite().all()) for t in map(entries, floating)):
            chosen.append(index)
            break
    return [index for index in dict.fromkeys(chosen) if index < len(batches)]


def _look_for_nonfinite(evidence, loss_fn, batch, place, seen: Observation | None = None) -> bool:
    """Note where non-finite values come from, if this batch makes any."""
    if seen is not None:
        values = [seen.loss, *seen.gradients.values()]
        values = [v for v in values if isinstance(v, Tensor)]
        if all(bool(v.isfinite().all()) for v in map(dense, values)):
            return False
    try:
        origin = find_nonfinite(evidence.model, loss_fn, batch)
    except Exception:
        return False
    if origin is not None:
        evidence.origins.append((place, origin))
    return origin is not None


def _experiment(evidence: Checked, loss_fn, first: Observation) -> None:
    model, batch = evidence.model, first.batch
    evidence.rows = rows(batch)
    base = recorded(model, loss_fn, batch)
    probes = {"doubled": doubled, "mixing": mixing, "random_in_eval": random_in_eval}
    probes["misaligned"] = alignment
    for name, probe in probes.items() if base is not None else ():
        setattr(evidence, name, probe(model, loss_fn, batch, base))
    functions = {
        cls
        for node in (first.graph.operations if first.graph is not None else ())
        if (cls := getattr(type(node.function), "_forward_cls", None)) is not None
        and not cls.__module__.startswith("torch.")
    }
    if functions:
        with preserve(model):
            evidence.wrong_backward = custom_backward(model, loss_fn, batch, functions)
    spread = [
        (operation.module or "", float(operation.outputs[0].data.detach().double().std()))
        for operation in first.recording
        if operation.index in first.live and operation.name.startswith(("linear", "conv"))
        and operation.outputs and operation.outputs[0].data.numel() > 1
    ]  # fmt: skip
    sizes = [size for _, size in spread]
    if sizes and sizes[0] > 0 and math.isfinite(sizes[-1]):
        evidence.activation_growth = max(sizes) / sizes[0]
        steps = [(b / a, place) for (_, a), (place, b) in itertools.pairwise(spread) if a > 0]
        grown = [place for factor, place in steps if factor > 3]
        evidence.grows_from = f"{grown[0]} and the modules after it" if grown else ""


def _train(evidence: Checked, loss_fn, batches: list[Any]) -> None:
    """The plain loop, and where its loss gives reason, the same at other learning rates."""
    model, optimizers = evidence.model, evidence.optimizers
    if not optimizers:
        return
    with preserve(model, *optimizers):
        evidence.losses, ratios = _loop(evidence, loss_fn, batches)
        evidence.steps = len(evidence.losses)
        first = [[ratio for s, ratio in ratios if s == step] for step in range(5)]
        evidence.early_ratio = max((statistics.median(f) for f in first if f), default=0.0)
        late = [ratio for step, ratio in ratios if step > 2] or [ratio for _, ratio in ratios]
        evidence.update_ratio = (
            float(torch.tensor(late, device="cpu").median()) if late else math.nan
        )
        now = dict(model.named_parameters())
        for name, before in evidence.start.items():
            after = now[name].detach() if name in now else before
            if torch.equal(before, after):
                evidence.unmoved.add(name)
            ours = name in now and id(now[name]) in evidence.owned and now[name].requires_grad
            # The gates of a recurrent weight part at the first step, its units do not.
            most = 4 if after.ndim and len(after) >= 12 else 1
            if ours and _kinds_of_rows(before) == 1 <= _kinds_of_rows(after) <= most:
                evidence.still_alike.append(name)
    evidence.shifted = _shifted(evidence, loss_fn, batches)
    if rules_update.suspiciously_fast(evidence):
        for tenths in range(1, 9):
            evidence.slower = _at_rate(evidence, loss_fn, batches, 0.1**tenths)[0]
            if not rules_update.grew(evidence.slower):
                break
    if rules_update.suspiciously_slow(evidence):
        factor, ratio = 1.0, evidence.update_ratio
        while ratio < 1e-3 and factor < 1e8:
            factor *= 100
            evidence.faster, ratios = _at_rate(evidence, loss_fn, batches, factor)
            ratio = statistics.median(r for _, r in ratios) if ratios else math.inf
        evidence.factor = factor


def _shifted(evidence: Checked, loss_fn, batches: list[Any]) -> str | None:
    """Whether the targets belong to other rows: the loss as given hardly falls, with the targets
    moved by one row, turned round or taken from another batch it falls to less than half."""
    losses = evidence.losses
    if len(losses) < 6 or not all(math.isfinite(loss) for loss in losses):
        return None
    third = len(losses) // 3
    end = statistics.median(losses[-third:])
    if end < 0.85 * statistics.median(losses[:third]) or losses[0] <= 0:
        return None
    paths = {path for path, *_ in rules_data.targets(evidence.observations[0])}
    if len(paths) != 1:
        return None
    path = paths.pop()
    targets = [dict(tensors_in(batch))[path] for batch in batches]
    for name, change in _SHIFTS.items():
        moved = [
            replaced(batch, partial(_instead, path, change(targets, index)))
            for index, batch in enumerate(batches)
        ]
        with preserve(evidence.model, *evidence.optimizers):
            found = _loop(evidence, loss_fn, moved, quiet=True)[0]
        if len(found) == len(losses) and statistics.median(found[-third:]) < min(
            0.5 * end, 0.6 * losses[0]
        ):
            return f"{path} {name}: {statistics.median(found[-third:]):.3g} instead of {end:.3g}"
    return None


_SHIFTS: dict[str, Callable[[list[Tensor], int], Tensor]] = {
    "moved down by one row": lambda targets, i: targets[i].roll(1, 0),
    "moved up by one row": lambda targets, i: targets[i].roll(-1, 0),
    "in reverse order": lambda targets, i: targets[i].flip(0),
    "of the batch before": lambda targets, i: targets[i - 1],
    "of the batch after": lambda targets, i: targets[(i + 1) % len(targets)],
}


def _instead(path: str, other: Tensor, found: str, tensor: Tensor) -> Tensor:
    return other if found == path and other.shape == tensor.shape else tensor


def _at_rate(evidence: Checked, loss_fn, batches, factor: float) -> tuple[list[float], list]:
    """The plain loop again, every learning rate times ``factor``."""
    with preserve(evidence.model, *evidence.optimizers):
        for group in (group for o in evidence.optimizers for group in o.param_groups):
            group["lr"] = group["lr"] * factor
        return _loop(evidence, loss_fn, batches, quiet=True)


def _kinds_of_rows(weight: Tensor) -> int:
    """How many different rows it has, to rounding; 0 if it has no rows to compare."""
    if weight.ndim < 2 or weight.shape[0] < 2 or not weight.numel() or weight.is_complex():
        return 0
    rows = weight.detach().flatten(1).double()
    scale = float(rows.abs().max()) or 1.0
    return len(torch.unique((rows / scale * 1e5).round(), dim=0)) if math.isfinite(scale) else 0


def _loop(evidence, loss_fn, batches, quiet: bool = False) -> tuple[list[float], list]:
    model, optimizers = evidence.model, evidence.optimizers
    weights = [p for p in model.parameters() if p.ndim > 1 and id(p) in evidence.owned]
    losses: list[float] = []
    ratios: list[tuple[int, float]] = []
    begun = time.monotonic()
    for step in range(max(STEPS, min(len(batches), MOST_BATCHES))):
        batch = batches[step % len(batches)]

        def compute(batch=batch) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_fn(model, batch)
            if loss.requires_grad:
                loss.backward()
            return loss

        try:
            loss = compute()
        except Exception as error:
            # Uncatalogued, and on a batch that has gone through before, it may come of repeating.
            if not quiet and (step < len(batches) or for_error(str(error))):
                _note_error(evidence, error, step % len(batches), batch)
            continue
        losses.append(float(loss.detach()))
        finite = math.isfinite(losses[-1]) and all(
            bool(dense(p.grad).isfinite().all()) for p in model.parameters() if p.grad is not None
        )
        if not finite:
            if not quiet and not evidence.origins:
                place = f"batch {step % len(batches)}" + (f", after {step} steps" if step else "")
                _look_for_nonfinite(evidence, loss_fn, batch, place)
            break
        before = [w.detach().clone() for w in weights]
        for optimizer in optimizers:
            optimizer.step(compute) if needs_closure(optimizer) else optimizer.step()
        if weights:
            with torch.no_grad():
                moved = stacked(norms(torch._foreach_sub(weights, before)))
                size = stacked(norms(before))
            fed = [w.grad is not None for w in weights]
            fed = torch.tensor(fed, device=size.device)
            ratio = (moved / size)[(size > 0) & fed]
            ratios += [(step, float(value)) for value in ratio]
        if time.monotonic() - begun > SECONDS:
            break
    return losses, ratios


def _note_error(evidence: Checked, error: Exception, index: int, batch: Any) -> None:
    if all(seen.index != index or seen.error is None for seen in evidence.observations):
        seen = evidence.observations[0]
        later = Observation(index, batch, seen.recording, seen.flow, seen.parameters, error=error)
        evidence.observations.append(later)


def _unexplained(evidence: Checked) -> Observation | None:
    """The first batch on which the program raised something that the catalogue doesn't know."""
    found = (seen for seen in evidence.observations if seen.error is not None)
    unknown = [seen for seen in found if not for_error(str(seen.error))]
    return min(unknown, key=lambda seen: seen.index, default=None)


def _summary(evidence: Checked, count: int) -> str:
    last = f", {evidence.steps} plain steps" if evidence.steps else ""
    return f"Looked at {count} batch{'' if count == 1 else 'es'}{last}; everything is as before."
