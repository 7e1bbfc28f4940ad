"""Does every gradient arrive where it is needed, and is it the right one?

Each rule takes the evidence of a checkup and yields findings. What was frozen, detached or left
out on purpose shows in the optimizer: a parameter that no optimizer is to move needs no gradient.
"""

from __future__ import annotations

import inspect
import math
import textwrap
import traceback
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bpkit.batches import tensors_in
from bpkit.diagnosis.faults import for_error
from bpkit.diagnosis.forward import SHAPING, Observation
from bpkit.diagnosis.report import Finding
from bpkit.diagnosis.wiring import dense, held_at, listed, registered
from bpkit.record import Operation, Value, raised_line

_LEAVES_TENSORS = frozenset((
    "item", "tolist", "numpy", "float", "int", "bool", "array", "detach", "data",
))  # fmt: skip


def rules(evidence) -> Iterator[Finding]:
    for rule in (
        raised,
        rebound_in_forward,
        unregistered_parameter,
        starved,
        constant_term,
        gradient_without_graph,
        unused_parameter,
        frozen_by_accident,
        hook_modifies_parameter,
        wrong_backward,
        zero_init_both,
        nondifferentiable_step,
        vanishing_gradient,
        exploding_gradient,
    ):
        yield from rule(evidence)


def raised(evidence) -> Iterator[Finding]:
    """PyTorch said so itself: its message is matched with the catalogue's patterns. Where an origin
    was found, ``nonfinite`` tells of it with the line that is to be changed."""
    found = {origin.slug for _, origin in evidence.origins}
    for seen in evidence.observations:
        if seen.error is None:
            continue
        text = str(seen.error)
        for fault in for_error(text)[:1]:
            if fault.slug in found:
                return
            yield Finding(
                fault.slug,
                f"{_raised_at(seen.error, evidence.model)}, batch {seen.index}",
                textwrap.shorten(
                    f"{type(seen.error).__name__}: {text.splitlines()[0]}", 180, placeholder=" …"
                ),
            )
            return


def _raised_at(error: BaseException, model: nn.Module) -> str:
    """The module of the model in which it was raised, and the innermost line of the reader's."""
    names = {id(module): name for name, module in model.named_modules()}
    place, line = "", raised_line(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            place = f"{names[id(owner)]} ({type(owner).__name__})"
    return ", ".join(part for part in (place, str(line or "")) if part) or "the forward pass"


def rebound_in_forward(evidence) -> Iterator[Finding]:
    """A parameter's name holds another tensor after the forward pass than before, or the graph
    starts at a tensor that was wrapped anew on the way: nobody optimises that one."""
    for seen in evidence.observations[:1]:
        if seen.rebound:
            yield Finding(
                "rewrapped-parameter",
                ", ".join(seen.rebound),
                "the forward pass put a new tensor in this name; the optimizer holds the old one, "
                "and the graph ends at the new one",
            )
            return
        for leaf in strange_leaves(evidence, seen):
            made = _source_of(seen, leaf)
            if made is None:
                continue
            sources = seen.flow.sources[made.index]
            rooted = [s for s in sources if s.startswith("parameter")]
            if rooted and not any(s.startswith("batch") for s in sources):
                yield Finding(
                    "rewrapped-parameter",
                    seen.line(made),
                    f"a new leaf {list(leaf.shape)} made from {_names(rooted)} inside the forward "
                    "pass: the gradient ends there",
                )
                return


def strange_leaves(evidence, seen: Observation) -> list[Tensor]:
    """Leaves of the graph that want a gradient and belong neither to the model, nor to an
    optimizer, nor to the batch."""
    known = {id(p) for p in seen.parameters.values()} | evidence.owned
    known |= {id(p) for p in evidence.model.parameters()}
    known |= {id(t) for _, t in tensors_in(seen.batch)}
    # What a gradient was asked for, inside the loss, is an input of that question.
    asked = (v for o in seen.recording if o.name == "grad" for v in o.inputs)
    known |= {v.tensor for v in asked if isinstance(v, Value)}
    leaves = [] if seen.graph is None else [n.function.variable for n in seen.graph.leaves]
    return [leaf for leaf in leaves if id(leaf) not in known]


def _source_of(seen: Observation, leaf: Tensor) -> Operation | None:
    """The operation inside the forward pass that made this leaf, or the tensor whose memory it
    shares (``nn.Parameter(w * mask)`` is no call that a recording sees)."""
    known = seen.recording._known
    same = {id(leaf)} | {
        key
        for key, (tensor, *_) in known.items()
        if leaf.numel() and tensor.layout == torch.strided and tensor.data_ptr() == leaf.data_ptr()
    }
    for operation in reversed(seen.recording.operations):
        if any(value.tensor in same for value in operation.outputs):
            return operation
    return None


def unregistered_parameter(evidence) -> Iterator[Finding]:
    """The graph starts at a tensor that ``model.parameters()`` does not list: an optimizer made
    from it leaves that tensor alone."""
    for seen in evidence.observations[:1]:
        for leaf in strange_leaves(evidence, seen):
            if _source_of(seen, leaf) is not None:
                continue
            path = held_at(evidence.model, leaf)
            if path is None and (not isinstance(leaf, nn.Parameter) or registered(leaf)):
                continue  # an outside tensor that collects a gradient may be somebody's aim
            yield Finding(
                "unregistered-parameter",
                path or f"a parameter of shape {list(leaf.shape)}",
                f"the loss depends on this tensor of shape {list(leaf.shape)}, which wants a "
                f"gradient; model.parameters() does not list it ({len(seen.parameters)} listed)",
            )
            return


def _names(sources: list[str]) -> str:
    return listed(sorted(source.removeprefix("parameter:") for source in sources), 3)


def starved(evidence) -> Iterator[Finding]:
    """Parameters that an optimizer is to move, whose operations ran, and to which the loss sends
    nothing: the place where the way from them to the loss stops being recorded."""
    for seen in evidence.observations[:1]:
        wanted = [n for n in seen.starved if id(seen.parameters[n]) in evidence.owned]
        wanted = [n for n in wanted if n not in seen.rebound]
        # Several optimizers take turns: this loss may not be the one for all of an optimizer.
        if len(evidence.optimizers) > 1:
            starving = {id(seen.parameters[n]) for n in seen.starved}
            for optimizer in evidence.optimizers:
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                if held <= starving:
                    wanted = [n for n in wanted if id(seen.parameters[n]) not in held]
        if (seen.phase == "forward" and seen.error is not None) or not wanted:
            return
        groups: dict[tuple[str, str], list[str]] = {}
        for name in wanted:
            found = _cut(seen, name)
            if found is not None:
                groups.setdefault(found, []).append(name)
        if any("None of the inputs have requires_grad" in text for text in seen.messages):
            yield Finding(
                "checkpoint-input-no-grad",
                _names(list(wanted)),
                f"checkpoint() got no input that wants a gradient; {len(wanted)} parameters inside "
                "get none",
            )
            return
        for (slug, place), names in groups.items():
            count = len(seen.parameters)
            yield Finding(
                slug,
                place,
                f"no gradient reaches {_names(names)}: {len(names)} of {count} parameters are on "
                "the far side of this line",
            )


def _cut(seen: Observation, name: str) -> tuple[str, str] | None:
    """The first operation that reads a tracked value of this parameter and returns an untracked
    one on the way to the loss."""
    source = f"parameter:{name}"
    reached = [i for i, sources in enumerate(seen.flow.sources) if source in sources]
    if not reached:
        return None
    cuts = []
    for index in reached:
        operation = seen.recording.operations[index]
        tracked = [
            v
            for v in operation.inputs
            if isinstance(v, Value) and v.tracked and source in seen.flow.of(v)
        ]
        if not tracked or any(v.tracked for v in operation.outputs):
            continue
        if not operation.outputs and operation.name not in _LEAVES_TENSORS:
            continue
        cuts.append(operation)
    on_the_way = [o for o in cuts if o.index in seen.live]
    if not on_the_way and any(
        source in s for i, s in enumerate(seen.flow.sources) if i in seen.live
    ):
        return None
    # Numbers that left the world of tensors leave no trace to the loss: take those, if any.
    left = [o for o in cuts if o.name in _LEAVES_TENSORS]
    chosen = on_the_way or left
    if not chosen:
        return None
    first = chosen[0]
    return _kind(first), seen.line(first)


def _kind(operation: Operation) -> str:
    if operation.name == "grad":
        return "missing-create-graph"
    if operation.name in ("detach", "data", "item", "tolist", "numpy", "float", "array"):
        return "detached"
    outputs = [value.data for value in operation.outputs]
    whole = outputs and not any(o.is_floating_point() or o.is_complex() for o in outputs)
    if whole or operation.name in ("bernoulli", "heaviside", "histc"):
        return "nondifferentiable-term"
    if operation.name in ("tensor", "as_tensor", "from_numpy"):
        return "detached"
    return "no-grad-block"


def constant_term(evidence) -> Iterator[Finding]:
    """The loss is a sum, and one of its terms was computed from parameters but carries no graph:
    it changes the number on the screen and nothing else. A ``detach`` deeper inside a term is
    common and may be meant."""
    for seen in evidence.observations[:1]:
        yield from _number_in_the_loss(evidence)
        for term in _terms(seen):
            sources = seen.flow.of(term)
            learned = [s for s in sources if s.startswith("parameter")]
            names = [s.removeprefix("parameter:") for s in learned]
            if term.tracked or term.producer is None or not names:
                continue
            if not any(seen.parameters[n].requires_grad for n in names):
                continue
            cut = _cut_behind(seen, term)
            if cut is None:
                continue
            slug = _kind(cut)
            yield Finding(
                slug,
                seen.line(cut),
                f"a term of the loss, {float(term.data.double().mean()):.3g}, depends on "
                f"{_names(learned)} but carries no gradient: whatever its weight, it changes no "
                "update",
            )
            return


def _number_in_the_loss(evidence) -> Iterator[Finding]:
    """A Python number added to the loss that follows an ``.item()`` of something learned: the two
    have the same ratio on two batches, though both differ."""
    if len(evidence.observations) < 2:
        return
    first, second = evidence.observations[:2]
    if len(first.recording) != len(second.recording):
        return
    numbers = [dict(_added_numbers(seen)) for seen in (first, second)]
    for left, other in zip(first.recording, second.recording, strict=True):
        if not isinstance(left.result, float) or not isinstance(other.result, float):
            continue
        value = next((v for v in left.inputs if isinstance(v, Value)), None)
        learned = value is not None and any(s.startswith("parameter") for s in first.flow.of(value))
        if not learned or not left.result or not other.result or left.result == other.result:
            continue
        for index, number in numbers[0].items():
            twin = numbers[1].get(index, 0.0)
            if number and abs(number / left.result - twin / other.result) <= 1e-6 * abs(
                number / left.result
            ):
                yield Finding(
                    "detached",
                    first.line(left),
                    f"the number {number:.3g} in the loss follows this .item(): it changes with "
                    "the parameters but carries no gradient to them",
                )
                return


_SUMS = ("add", "sub", "iadd", "isub", "radd", "rsub")


def _added_numbers(seen: Observation) -> Iterator[tuple[int, float]]:
    """Numbers that the sums in front of the loss add, by operation."""
    todo = [seen.loss_value] if seen.loss_value is not None else []
    while todo:
        value = todo.pop()
        operation = None if value.producer is None else seen.recording.operations[value.producer]
        if operation is None or operation.name not in _SUMS:
            continue
        for given in operation.inputs:
            if isinstance(given, Value):
                todo.append(given)
            elif isinstance(given, float):
                yield operation.index, given


def gradient_without_graph(evidence) -> Iterator[Finding]:
    """The loss uses a gradient that ``torch.autograd.grad`` returned without a graph of its own."""
    for seen in evidence.observations[:1]:
        for operation in seen.calls("grad"):
            tracked = any(isinstance(v, Value) and v.tracked for v in operation.inputs)
            bare = operation.outputs and not any(v.tracked for v in operation.outputs)
            meets = any(s.startswith("parameter") for s in seen.flow.sources[operation.index])
            if tracked and bare and meets and not _only_steers(seen, operation):
                yield Finding(
                    "missing-create-graph",
                    seen.line(operation),
                    "the loss depends on the gradient returned here, which has no graph: it is a "
                    "constant for the backward pass",
                )
                return


def _only_steers(seen: Observation, operation: Operation) -> bool:
    """The gradient moves an input (an adversarial example) or a copy of the weights (an inner
    step of first order), which then goes through the model: no penalty on itself."""
    waiting = {operation.index}
    for later in seen.recording.operations[operation.index + 1 :]:
        if any(isinstance(v, Value) and v.producer in waiting for v in later.inputs):
            if later.module is not None or later.name.startswith(("linear", "conv")):
                return True
            waiting.add(later.index)
    return False


def _terms(seen: Observation) -> Iterator[Value]:
    """What the loss adds up: through sums, products with numbers, means of stacks."""
    todo = [seen.loss_value] if seen.loss_value is not None else []
    while todo:
        value = todo.pop()
        operation = None if value.producer is None else seen.recording.operations[value.producer]
        values = [] if operation is None else [v for v in operation.inputs if isinstance(v, Value)]
        through = operation is not None and (
            operation.name in (*_SUMS, "neg", "stack", "sum")
            or (
                operation.name
                in (
                    "mul",
                    "div",
                    "imul",
                    "rmul",
                    "truediv",
                    "mean",
                    *(SHAPING - {"detach", "data"}),
                )
                and all(not v.data.ndim for v in values)
            )
        )
        if through and all(
            v.data.numel() == 1 or operation.name in ("sum", "mean") for v in values
        ):
            if operation.name in ("sum", "mean") and any(v.data.numel() > 1 for v in values):
                maker = seen.flow.maker(values[0])
                if maker is None or maker.name not in ("stack", "cat"):
                    yield value
                    continue
            todo += values
        else:
            yield value


def _cut_behind(seen: Observation, term: Value) -> Operation | None:
    for index in sorted(seen.flow.ancestors(term)):
        operation = seen.recording.operations[index]
        values = [v for v in operation.inputs if isinstance(v, Value)]
        if any(v.tracked for v in values) and not any(v.tracked for v in operation.outputs):
            return operation
    return None


def unused_parameter(evidence) -> Iterator[Finding]:
    """A parameter that the optimizer holds and no batch looked at touches. A whole module that is
    never called may be a head for another task: a note. A module that ran without one of its own
    parameters, or that was skipped though it fits into the chain, is a fault."""
    if not evidence.observations or evidence.observations[0].error is not None:
        return
    first = evidence.observations[0]
    flows = [
        (seen, i, s) for seen in evidence.observations for i, s in enumerate(seen.flow.sources)
    ]
    read = set().union(*(s for _, _, s in flows))
    used = set().union(*(s for seen, i, s in flows if i in seen.live))
    ran = set().union(*(seen.modules for seen in evidence.observations))
    unused = [
        n
        for n, p in first.parameters.items()
        if p.requires_grad and id(p) in evidence.owned and f"parameter:{n}" not in used
        and all(seen.gradients.get(n) is None for seen in evidence.observations)
    ]  # fmt: skip
    if not unused or len(unused) == len(first.parameters):
        return
    owners = dict(evidence.model.named_modules())
    skipped, forgotten, idle, ignored = [], [], [], []
    for name in unused:
        owner = owners.get(name.rpartition(".")[0], evidence.model)
        if f"parameter:{name}" in read:
            ignored.append(name)
        elif id(owner) in ran and _calls_own(owner):
            forgotten.append(name)
        elif _would_fit(first, owner):
            skipped.append(name)
        else:
            idle.append(name)
    if evidence.wrapper is not None and not evidence.wrapper.find_unused_parameters:
        yield Finding("ddp-unused-parameter", _names(unused), f"{len(unused)} parameters unused")
        return
    for names, said, severity in (
        (forgotten, "its module ran without reading it", "fault"),
        (skipped, "its module is never called, though it fits between two that are", "fault"),
        (ignored, "it was read, and the result does not reach the loss", "note"),
        (idle, "its module is never called in these batches", "note"),
    ):
        if names:
            yield Finding("unused-parameter", _names(names), said, severity=severity)


def _calls_own(owner: nn.Module) -> bool:
    """Containers run only through their children; this asks for a forward of the module's own."""
    return any(True for _ in owner.parameters(recurse=False))


def _would_fit(seen: Observation, owner: nn.Module) -> bool:
    size = getattr(owner, "in_features", None) or getattr(owner, "in_channels", None)
    result = getattr(owner, "out_features", None) or getattr(owner, "out_channels", None)
    if size is None or size != result:
        return False
    return any(
        operation.module is not None and operation.outputs
        and size in (operation.outputs[0].shape or ())[1:]
        for operation in seen.recording
    )  # fmt: skip


def frozen_by_accident(evidence) -> Iterator[Finding]:
    """``requires_grad=False`` on what an optimizer is asked to move. A fault where nothing else
    is left to train, where somebody made it a parameter group of its own, or where it is the last
    layer; a note where a frozen part is handed over with everything else, which PyTorch allows."""
    first = evidence.observations[0] if evidence.observations else None
    if first is None:
        return
    frozen = [
        n for n, p in first.parameters.items() if not p.requires_grad and id(p) in evidence.owned
    ]
    if not frozen:
        return
    trainable = [n for n, p in first.parameters.items() if p.requires_grad]
    ids = {id(first.parameters[n]) for n in frozen}
    groups = [g["params"] for o in evidence.optimizers for g in o.param_groups]
    own = len(groups) > 1 and any(g and all(id(p) in ids for p in g) for g in groups)
    weights = [
        n
        for operation in first.recording
        if operation.index in first.live
        for v in operation.inputs
        if isinstance(v, Value)
        and (n := first.flow.names.get(v.tensor, "")).startswith("parameter:")
    ]
    last = bool(weights) and weights[-1].removeprefix("parameter:") in frozen and bool(trainable)
    severity = "fault" if own or last or not trainable else "note"
    said = "an optimizer holds it, and requires_grad is False"
    if not trainable:
        said += "; nothing in the model is trainable"
    elif own:
        said += ", though it has a parameter group of its own"
    elif last:
        said += ", though it is the last layer before the loss"
    yield Finding("frozen-by-accident", _names(frozen), said, severity=severity)


def hook_modifies_parameter(evidence) -> Iterator[Finding]:
    """The values of a parameter differ before and after ``backward()`` alone."""
    for seen in evidence.observations[:1]:
        if seen.written:
            hooked = [n for n in seen.written if _hooks(seen.parameters[n])]
            names = hooked or seen.written
            yield Finding(
                "hook-modifies-parameter",
                _hooks(seen.parameters[names[0]]) or _names(names),
                f"backward() alone changed the values of {len(seen.written)} parameters "
                f"({_names(seen.written)}); only a step may",
            )


def _hooks(parameter: Tensor) -> str:
    """Name and line of the first hook registered on the parameter."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in [*hooks.values(), *(parameter._backward_hooks or {}).values()]:
        hook = inspect.unwrap(hook)
        code = getattr(hook, "__code__", None)
        if code is not None:
            return f"hook {hook.__qualname__}, line {code.co_firstlineno}"
    return ""


def wrong_backward(evidence) -> Iterator[Finding]:
    """A custom backward that differences contradict; a ``backward`` written on a module, which
    autograd never calls."""
    for wrong in evidence.wrong_backward:
        yield Finding(
            "wrong-backward",
            f"{wrong.name}.backward, argument {wrong.argument}",
            f"backward returns {wrong.returned:.4g}, central differences of its forward give "
            f"{wrong.measured:.4g}",
        )
    ran = set().union(*(seen.modules for seen in evidence.observations), set())
    for name, module in evidence.model.named_modules():
        method = getattr(type(module), "backward", None)
        own = method is not None and not (method.__module__ or "").startswith(
            ("torch.", "lightning")
        )
        if name and own and inspect.isfunction(method) and id(module) in ran:
            yield Finding(
                "wrong-backward",
                f"{name} ({type(module).__name__})",
                "its class defines backward(); autograd calls backward only of "
                "torch.autograd.Function, so the layer passes the ordinary gradient",
            )


def zero_init_both(evidence) -> Iterator[Finding]:
    """Two factors of one product are both 0, so each gets a gradient of exactly 0, for ever."""
    zero = []
    for seen in evidence.observations[:1]:
        for name, parameter in seen.parameters.items():
            gradient = seen.gradients.get(name)
            start = evidence.start.get(name)
            if gradient is None or start is None or parameter.ndim < 2:
                continue
            if not bool(start.any()) and not bool(dense(gradient).any()):
                zero.append(name)
    if len(zero) > 1 and all(n in evidence.unmoved for n in zero):
        # With every weight zero the units are alike as well: that is the better name.
        weights = [n for n, p in seen.parameters.items() if p.ndim > 1 and p.requires_grad]
        if set(zero) == set(weights) and evidence.still_alike and not _low_rank(evidence, zero):
            return
        yield Finding(
            "zero-init-both",
            ", ".join(zero[:6]),
            f"{len(zero)} weights are exactly 0 and so are their gradients, after "
            f"{evidence.steps} steps still",
        )


def _low_rank(evidence, names: list[str]) -> bool:
    """Zero factors beside weights that are not zero: an adapter."""
    return any(
        bool(value.any()) and value.ndim > 1
        for name, value in evidence.start.items()
        if name not in names
    )


def nondifferentiable_step(evidence) -> Iterator[Finding]:
    """A rounding or a sign on the only way: the graph is whole and its derivative 0."""
    for seen in evidence.observations[:1]:
        if seen.graph is None:
            return
        zero = [
            n
            for n, g in seen.gradients.items()
            if g is not None
            and id(seen.parameters[n]) in evidence.owned
            and not bool(dense(g).any())
        ]
        for node in seen.graph.operations:
            operation = seen.operation_of(node)
            if node.short not in _FLAT or operation is None or operation.index not in seen.live:
                continue
            if node.gradient is not None and not bool(node.gradient.any()):
                continue
            blocked = [n for n in zero if f"parameter:{n}" in seen.flow.sources[operation.index]]
            alone = not blocked and not _goes_around(seen, operation)
            if blocked or alone:
                names = blocked or [
                    s.removeprefix("parameter:") for s in _learned_by(seen, operation)
                ]
                yield Finding(
                    "nondifferentiable-term",
                    seen.line(node),
                    f"the derivative of {node.short} is 0 everywhere: through it no gradient "
                    f"reaches {_names(names)}",
                )
                return


_FLAT = ("round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside")


def _learned_by(seen: Observation, operation: Operation) -> list[str]:
    return [s for s in seen.flow.sources[operation.index] if s.startswith("parameter")]


def _goes_around(seen: Observation, operation: Operation) -> bool:
    """Straight-through and quantisation: what was rounded meets its own input again before the
    loss (``x + (x.round() - x)``), or the step hides inside the model."""
    if operation.module is not None:
        return True
    inputs = {v.producer for v in operation.inputs if isinstance(v, Value)}
    waiting = {operation.index}
    for later in seen.recording.operations[operation.index + 1 :]:
        makers = {v.producer for v in later.inputs if isinstance(v, Value)}
        if makers & waiting:
            if makers & inputs and later.name in ("add", "sub"):
                return True
            waiting.add(later.index)
    return False


def _relative(evidence) -> list[tuple[str, float]]:
    """|gradient| / |weight| for each weight, first to last in the order of the forward pass; the
    largest over the batches looked at."""
    order: dict[str, float] = {}
    for seen in evidence.observations:
        if seen.error is not None:
            continue
        for operation in seen.recording:
            if operation.index not in seen.live:
                continue
            for value in operation.inputs:
                name = seen.flow.names.get(getattr(value, "tensor", None), "")
                name = name.removeprefix("parameter:")
                parameter, gradient = seen.parameters.get(name), seen.gradients.get(name)
                if parameter is None or gradient is None or parameter.ndim < 2:
                    continue
                if not parameter.requires_grad or id(parameter) not in evidence.owned:
                    continue
                size = float(evidence.start.get(name, parameter).double().norm())
                if size:
                    ratio = float(dense(gradient).double().norm()) / size
                    order[name] = max(order.get(name, 0.0), ratio)
    return list(order.items())


def _signals(seen: Observation) -> list[tuple[str, float]]:
    """The size of the gradient at the result of each layer with weights, first layer first."""
    found = []
    for node in seen.graph.operations if seen.graph is not None else ():
        operation = seen.operation_of(node)
        if operation is None or node.gradient is None or operation.index not in seen.live:
            continue
        names = [seen.flow.names.get(getattr(v, "tensor", None), "") for v in operation.inputs]
        weights = [n.removeprefix("parameter:") for n in names if n.startswith("parameter:")]
        weights = [n for n in weights if seen.parameters[n].ndim > 1]
        if weights and node.gradient.is_floating_point():
            found.append((weights[0], float(node.gradient.double().norm())))
    return found


def vanishing_gradient(evidence) -> Iterator[Finding]:
    """The gradient shrinks on its way: at the result of the first layer, or relative to the
    weights in it, under 1e-4 of what it is at the last. Healthy models: 3.5e-3 to 2; vanishing or
    saturated ones 5e-14 to 7.5e-5. Gradients of exactly 0 have other causes."""
    ratios = [(name, ratio) for name, ratio in _relative(evidence) if ratio == ratio]
    signals = _signals(evidence.observations[0]) if evidence.observations else []
    for kind, sizes in (("|gradient| / |weight|", ratios), ("|gradient| at the result", signals)):
        if len(sizes) < 3 or not all(math.isfinite(size) for _, size in sizes):
            continue
        name, first = sizes[0]
        last = max(size for _, size in sizes[-2:])
        small = [n for n, size in sizes if size < 1e-4 * last]
        if last > 0 and small and 0 < first < 1e-4 * last:
            yield Finding(
                "vanishing-gradient",
                f"{small[0]} to {small[-1]}" if len(small) > 1 else small[0],
                f"{kind} is {first:.1e} in {name} and {last:.1e} at the end; in healthy networks "
                "the two lie within a factor of 1,000",
            )
            return


def exploding_gradient(evidence) -> Iterator[Finding]:
    """|gradient| / |weight| above 1,000 at the first batches and growing from the loss to the
    input. A large loss alone makes every layer's gradient large, which is no explosion."""
    ratios = [(name, ratio) for name, ratio in _relative(evidence) if ratio == ratio]
    if len(ratios) < 3:
        return
    worst, most = max(ratios, key=lambda pair: pair[1])
    where = evidence.grows_from or worst
    last = ratios[-1][1]
    grows = evidence.activation_growth
    if most > 1e3 and (most > 30 * last or grows > 1e3):
        yield Finding(
            "exploding-gradient",
            where,
            f"|gradient| / |weight| is {most:.1e} in {worst} and {last:.1e} in the last layer; "
            f"activations grow {grows:.1e}-fold from the first layer to the last",
        )
