"""What did the training loop do with its gradients?  From the evidence of ``watch``.

Most rules read the order of events, which needs no threshold. A rule that judges a size says where
its range comes from. "Most steps" is at least half of those seen: a first or last step may differ.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator

from torch import nn

from bpkit.diagnosis.evidence import Evidence, Fact
from bpkit.diagnosis.faults import for_error
from bpkit.diagnosis.report import Finding
from bpkit.diagnosis.wiring import listed


def rules(model: nn.Module, evidence: Evidence) -> Iterator[Finding]:
    for rule in (
        missing_zero_grad,
        zeroed_before_step,
        missing_step,
        step_before_backward,
        accumulation_wiped,
        accumulation_unscaled,
        clipping,
        optimizer_recreated,
        ownership,
        reached_nothing,
        unregistered,
        hook_modifies_parameter,
        eval_mode_left_on,
        part_in_eval,
        graph_retained,
        scheduler_per_batch,
        scaler_collapsed,
        learning_rate,
        raised,
    ):
        yield from rule(model, evidence)


def _often(evidence: Evidence, name: str, least: int = 2) -> Fact | None:
    """The fact, if it happened at least so often and on half of the steps."""
    fact = evidence.facts.get(name)
    taking_turns = max(1, sum(bool(o["steps"]) for o in evidence.optimizers))
    seen = fact is not None and fact.count >= least
    seen = seen and 2 * fact.count * taking_turns >= evidence.steps - 1
    return fact if seen else None


def _line(evidence: Evidence, event: str) -> str:
    lines = evidence.lines.get(event)
    return lines.most_common(1)[0][0] if lines else "the loop"


def missing_zero_grad(model, evidence) -> Iterator[Finding]:
    """Steps use gradients that lie on top of one that a step has used already."""
    fact = _often(evidence, "used_again")
    if fact is not None:
        detail = fact.details[0]
        yield Finding(
            "missing-zero-grad",
            f"{_line(evidence, 'backward')}, {listed(detail['parameters'])}",
            f"on {fact.count} of {evidence.steps} steps the gradient still held what an earlier "
            f"step had used ({len(detail['parameters'])} of {detail['of']} parameters at step "
            f"{fact.first})",
        )


def zeroed_before_step(model, evidence) -> Iterator[Finding]:
    """Steps find nothing, though a backward has run for them."""
    fact = _often(evidence, "step_after_wipe")
    if fact is not None:
        yield Finding(
            "zero-grad-before-step",
            _line(evidence, "zero"),
            f"{fact.count} of {evidence.steps} steps found every gradient empty: it was zeroed "
            "after backward and before the step",
        )


def missing_step(model, evidence) -> Iterator[Finding]:
    """Backward after backward, and an optimizer that was handed over never steps."""
    idle = [o for o in evidence.optimizers if o["given"] and not o["steps"]]
    if evidence.backwards >= 4 and idle:
        others = [o for o in evidence.optimizers if o["steps"]]
        # Somebody who clears its gradients again and again means to step.
        number = idle[0]["number"]
        cleared = sum(evidence.lines.get(f"zero:{number}" if number else "zero", {}).values())
        if others and cleared < 3 and not _holds_gradients(evidence, idle[0]):
            return
        if any(_parameters_of(o) & _parameters_of(idle[0]) for o in others):
            return  # another object has taken over: see optimizer_recreated
        if 2 * evidence.count("step_skipped") >= evidence.backwards:
            return
        yield Finding(
            "missing-step",
            _line(evidence, "backward"),
            f"{evidence.backwards} backward passes and no {idle[0]['kind']}.step()",
        )


def _holds_gradients(evidence: Evidence, optimizer) -> bool:
    names = _parameters_of(optimizer)
    return sum(bool(names & set(sample["gradient"])) for sample in evidence.samples) >= 4


def _parameters_of(optimizer) -> set[str]:
    return {name for group in optimizer["groups"] for name in group["parameters"]}


def step_before_backward(model, evidence) -> Iterator[Finding]:
    """The first step comes before any backward: each later one uses the gradient of the batch
    before, or none."""
    fact = evidence.facts.get("step_before_backward")
    if fact is not None and evidence.backwards:
        yield Finding(
            "step-before-backward",
            _line(evidence, "step"),
            "the first step ran before any backward, so each step uses what the batch before it "
            "left, if anything",
        )


def accumulation_wiped(model, evidence) -> Iterator[Finding]:
    """Several backward passes per step, and the gradients of all but the last are thrown away."""
    wasted = [row["wasted"] if row["backwards"] else 0 for row in evidence.rows]
    # Gradients for another purpose (an attack on the inputs, a look at sharpness) are asked for in
    # a line of their own, or followed by a change of the weights.
    lines = evidence.lines.get("backward", {})
    if not wasted or evidence.count("backward_wasted") < 3 or len(lines) > 1:
        return
    if 2 * evidence.count("weights_changed") >= len(evidence.samples) > 0:
        return
    if 2 * sum(count > 0 for count in wasted) >= len(wasted):
        several = statistics.median(count for count in wasted if count)
        line = next((d["line"] for d in evidence.facts["backward_wasted"].details if d["line"]), "")
        yield Finding(
            "accumulation-wiped",
            line or _line(evidence, "zero"),
            f"before each step {several + 1:g} backward passes ran, and zeroing threw away the "
            f"gradients of {several:g} of them unused",
        )


def accumulation_unscaled(model, evidence) -> Iterator[Finding]:
    """The same line runs backward several times per step on the bare loss: the step is that many
    times too long. Several losses of one batch come from several lines, or from one forward."""
    counts = [row["backwards"] for row in evidence.rows if row["backwards"]]
    if len(counts) < 2 or statistics.median(counts) < 2:
        return
    several = statistics.median(counts)
    scale = {value for _, value in evidence.scales}
    bare, looked = 0, 0
    for sample in evidence.samples:
        roots = sample.get("roots", [])
        if len(roots) > 1:
            looked += 1
            bare += all(c is None or c in scale for _, c in roots)
    lines = evidence.lines.get("backward", {})
    scaled = evidence.facts.get("touched_scaled")
    by_hand = [
        c for c in _calls(evidence) if c["in_place"] and not c["function"].startswith("clip")
    ]
    if (
        scaled is not None
        and by_hand
        and all(d["factor"] * several < 1.1 for d in scaled.details if "factor" in d)
    ):
        return
    apart = not evidence.count("retain_graph")
    if looked and bare == looked and len(lines) == 1 and apart and not _reduced_by_hand(evidence):
        yield Finding(
            "accumulation-unscaled",
            _line(evidence, "backward"),
            f"{several:g} backward passes feed one step and none of their losses is divided: the "
            f"gradient is {several:g} times that of the whole batch",
        )


def _reduced_by_hand(evidence: Evidence) -> bool:
    """The loss of a micro-batch is a part of the whole: its last operation divides or multiplies
    by a tensor (a count, a weight)."""
    roots = [name for sample in evidence.samples for name, _ in sample.get("roots", [])]
    return bool(roots) and all(name.startswith(("Div", "Mul")) for name in roots)


def clipping(model, evidence) -> Iterator[Finding]:
    """Gradients written to after the step that used them; clipped while a loss scale is in them;
    or computed anew and thrown away."""
    late = _often(evidence, "changed_after_step")
    if late is not None:
        call = next((c for c in _calls(evidence) if c["phase"] != "gradients"), None)
        yield Finding(
            "clip-after-step",
            call["line"] if call else listed(late.details[0].get("parameters", [])),
            f"after {late.count} of {evidence.steps} steps gradients were written to that the "
            "step had used already, and not to zero them",
        )
    scaled = _often(evidence, "touched_while_scaled")
    if scaled is not None:
        call = next(iter(_calls(evidence)), None)
        largest = max((value for _, value in evidence.scales), default=math.nan)
        yield Finding(
            "clip-before-unscale",
            call["line"] if call else "between backward and step",
            f"on {scaled.count} of {evidence.steps} steps gradients were changed while the loss "
            f"scale, {largest:g}, was still in them",
        )
    if late is None:
        yield from _clipped_too_late(evidence)
    touched = sum(evidence.count(f"touched_{how}") for how in ("scaled", "uneven", "nothing"))
    if late is None and touched <= 2 and evidence.steps > 2 * touched:
        yield from _thrown_away(evidence, touched)


def _clipped_too_late(evidence: Evidence) -> Iterator[Finding]:
    """Gradients that a step has used are shrunk in place before they are dropped."""
    for call in _calls(evidence):
        shrinks = call["function"].strip("_") in _SHRINKING
        often = call["looks"] >= 3 and 2 * call["looks"] >= len(evidence.samples)
        if shrinks and call["in_place"] and call["phase"] == "forward" and often:
            yield Finding(
                "clip-after-step",
                call["line"],
                f"{call['function']} shrinks gradients after the step has used them, on "
                f"{call['looks']} of {len(evidence.samples)} steps looked at",
            )
            return


_SHRINKING = (
    "clamp",
    "clip",
    "clamp_max",
    "clamp_min",
    "mul",
    "div",
    "minimum",
    "maximum",
    "clip_by_norm",
)


def _calls(evidence: Evidence) -> list[dict]:
    return list(evidence.calls.values())


def _thrown_away(evidence: Evidence, touched: int) -> Iterator[Finding]:
    looks = len(evidence.samples)
    for call in _calls(evidence):
        name = call["function"].strip("_")
        utility = call["function"].startswith("clip_grad")
        if utility and not call["parameters"]:
            said = "found no gradient to clip: an iterator that was used up, or other parameters"
        elif utility and touched and looks > 3 and call["looks"] >= looks - 1:
            said = "changes gradients in the first step only: an iterator that was used up by then"
        elif name in _SHRINKING and call["in_place"] and call["last"] == 1 and looks > 3:
            said = "runs in the first step only: over an iterator that was used up by then"
        elif utility and call["phase"] == "forward":
            said = "runs before backward: it clips what the step before left, or nothing"
        elif name in _SHRINKING and call["phase"] == "gradients" and not call["in_place"]:
            if call["read"] or call["alive"] > call["looks"]:  # the loop's variable holds the last
                continue
            said = f"returns a new tensor, which nobody reads: {call['calls']} calls"
        else:
            continue
        yield Finding("clip-noop", call["line"], f"{call['function']} {said}; no gradient changed")
        return


def optimizer_recreated(model, evidence) -> Iterator[Finding]:
    """The parameters go to a new optimizer object again and again, its state lost each time."""
    fact = evidence.facts.get("optimizer_replaced")
    lost = [d for d in fact.details if d.get("state_lost")] if fact is not None else []
    if fact is not None and fact.count >= 2 and (lost or fact.count >= 3):
        steps = ", ".join(str(detail["step"]) for detail in fact.details[:4])
        yield Finding(
            "optimizer-recreated",
            f"{fact.details[0]['kind']}, at steps {steps}",
            f"{fact.count + 1} optimizer objects in {evidence.steps} steps"
            + (": momentum and averages start from nothing each time" if lost else ""),
        )


def ownership(model, evidence) -> Iterator[Finding]:
    """Names of the model that hold another parameter than the one that the optimizer moves, and
    parameters that lost ``requires_grad`` while an optimizer waits for their gradient."""
    fact = evidence.facts.get("rebound")
    if fact is not None:
        known = evidence.parameters
        lost = [d for d in fact.details if known.get(d["name"], {}).get("owner") is None]
        if lost:
            # What made the new tensor inside the forward pass gets no gradient any more.
            others = set(known) - {d["name"] for d in fact.details}
            cut = any(others & set(look["unreached"]) for look in evidence.graphs)
            yield Finding(
                "rewrapped-parameter" if cut else "parameter-rebound",
                listed(list(dict.fromkeys(d["name"] for d in lost))),
                f"seen at step {fact.first}: the name holds another tensor than at the start, one "
                "that no optimizer has",
            )
    before = {name for optimizer in evidence.optimizers for name in optimizer["frozen"]}
    # As their optimizer's last step found them. What was thawed again is frozen in turns.
    at_step = {name for optimizer in evidence.optimizers for name in optimizer["frozen_at_step"]}
    froze = [name for name in evidence.parameters if name in at_step - before]
    if froze:
        yield Finding(
            "frozen-by-accident",
            listed(froze),
            "requires_grad was switched off during the loop; an optimizer holds it",
        )
    fed = [n for n, f in evidence.parameters.items() if f["looks"] > 1 and f["nonzero_gradient"]]
    idle = [
        n for n in fed
        if evidence.parameters[n]["owner"] is None and evidence.parameters[n]["trainable"]
        and not evidence.parameters[n]["moved"]
    ]  # fmt: skip
    thawed = [n for n in idle if evidence.trainable_at_start.get(n) is False]
    if thawed:
        yield Finding(
            "optimizer-missing-params",
            listed(thawed),
            "they became trainable during the loop and get gradients; no optimizer holds them",
        )
    outside = [o for optimizer in evidence.optimizers for o in optimizer["outside"]]
    if idle and outside and fact is None:
        shapes = {tuple(o["shape"]) for o in outside}
        same = [n for n in idle if tuple(evidence.parameters[n]["shape"]) in shapes]
        if same:
            yield Finding(
                "stale-optimizer",
                listed(same),
                f"they got gradients in all {evidence.steps} steps and never moved; the optimizer "
                f"holds {len(outside)} tensors of other objects, of the same shapes",
            )


def reached_nothing(model, evidence) -> Iterator[Finding]:
    """Backward ran and left no gradient anywhere in the model."""
    fact = evidence.facts.get("backward_reached_nothing")
    if fact is None or fact.count < 2 or fact.count < evidence.backwards:
        return
    roots = [name for sample in evidence.samples for name, _ in sample.get("roots", [])]
    trainable = [n for n, f in evidence.parameters.items() if f["trainable"]]
    if trainable and (not roots or all(name == "leaf" for name in roots)):
        yield Finding(
            "detached",
            _line(evidence, "backward"),
            f"{fact.count} of {evidence.backwards} backward passes left no gradient in any "
            "parameter: the loss is a leaf, a new tensor made from a number",
        )


def unregistered(model, evidence) -> Iterator[Finding]:
    """The loss starts at a tensor inside the model that ``parameters()`` does not list."""
    for leaf in evidence.leaves:
        path = leaf["held"]
        if path:
            yield Finding(
                "unregistered-parameter",
                path,
                f"a tensor of shape {list(leaf['shape'])} that collects a gradient, and that "
                "model.parameters() does not list",
            )
            return


def hook_modifies_parameter(model, evidence) -> Iterator[Finding]:
    """Weights differ before and after backward, with no step in between."""
    fact = evidence.facts.get("weights_changed")
    details = [d for d in fact.details if "backward" in d["when"]] if fact is not None else []
    during = [d for d in details if d["when"] in ("in backward", "during backward", "backward")]
    # Between two backwards of one step the program itself may move the weights, on purpose.
    one = len(evidence.lines.get("backward", {})) <= 1 and not evidence.count("backward_wasted")
    if len(during) >= 2 and one:
        hooked = [n for n, f in evidence.parameters.items() if f["hooks"] or f["post_hooks"]]
        yield Finding(
            "hook-modifies-parameter",
            listed(hooked or during[0]["parameters"]),
            f"backward changed the values of {during[0]['number']} parameters "
            f"({listed(during[0]['parameters'])}), on each of {len(during)} steps looked at",
        )


_MODE_MATTERS = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def eval_mode_left_on(model, evidence) -> Iterator[Finding]:
    """Backward passes in evaluation mode, of a model in which the mode makes a difference and
    which was in training mode before, or never was."""
    fact = evidence.facts.get("backward_in_eval")
    acting = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _MODE_MATTERS) and getattr(module, "p", 1.0) > 0
    ]
    if fact is None or not acting or fact.count < 2 or not evidence.steps:
        return
    later = any(d.get("after_train") for d in fact.details)
    share = fact.count / max(evidence.backwards, 1)
    if later or share == 1:
        yield Finding(
            "eval-mode-left-on",
            f"{listed(acting)}, from step {fact.first} on",
            f"{fact.count} of {evidence.backwards} backward passes ran in evaluation mode"
            + (", after training mode" if later else ""),
        )


def part_in_eval(model, evidence) -> Iterator[Finding]:
    """Layers in evaluation mode inside a model in training mode: often done on purpose."""
    acting = {n for n, m in model.named_modules() if isinstance(m, _MODE_MATTERS)}
    parts = [key.removeprefix("eval:") for key in evidence.modes if key.startswith("eval:")]
    parts = [name for name in parts if name in acting]
    if parts:
        yield Finding(
            "eval-mode-left-on",
            listed(parts),
            f"{len(parts)} layers were in evaluation mode while the model was in training mode",
            severity="note",
        )


def graph_retained(model, evidence) -> Iterator[Finding]:
    """The graphs of earlier steps still exist, more of them at each look."""
    seen = [g for g in evidence.graphs if g.get("tagged")]
    kept = [g for g in seen if g["alive"] >= 5]
    if len(kept) > 1 or (kept and kept[0]["alive"] >= 0.8 * kept[0]["tagged"]):
        last = kept[-1]
        yield Finding(
            "graph-retained",
            _line(evidence, "backward"),
            f"at step {last['step']} the graphs of {last['alive']} of {last['tagged']} earlier "
            "backward passes are still in memory: something keeps a tensor that carries them",
        )


def scheduler_per_batch(model, evidence) -> Iterator[Finding]:
    """A schedule that counts epochs is stepped with every batch: the rate comes back up after its
    end, or is used up early in the run."""
    rates = [row["learning_rate"][0] for row in evidence.rows if row["learning_rate"]]
    if len(rates) < 4:
        return
    for kind, facts in evidence.schedulers.items():
        if "Restart" in kind or "Cycl" in kind or "Lambda" in kind:
            continue
        each = facts["steps"] >= 0.9 * evidence.steps
        settings = facts["settings"]
        end = settings.get("T_max")
        if each and end and facts["steps"] > 1.05 * end and rates[-1] >= 0 and _comes_back(rates):
            yield Finding(
                "scheduler-per-batch",
                _line(evidence, "scheduler"),
                f"{kind} is made for T_max={end:g} steps and was stepped {facts['steps']} times, "
                f"once per optimizer step: the rate falls to {min(rates):.2g} and rises again to "
                f"{max(rates[rates.index(min(rates)) :]):.2g}",
            )
            return
        top = rates.index(max(rates))
        gone = next((i for i in range(top, len(rates)) if rates[i] <= 1e-2 * rates[top]), None)
        if each and not end and gone is not None and gone < 0.6 * len(rates):
            yield Finding(
                "scheduler-per-batch",
                _line(evidence, "scheduler"),
                f"{kind} was stepped once per optimizer step: after {gone} of {len(rates)} steps "
                f"the rate is below a hundredth of {max(rates):.2g}",
            )
            return


def _comes_back(rates: list[float]) -> bool:
    low = rates.index(min(rates))
    return max(rates[low:]) > 10 * min(rates) + 1e-12 and low > 0


def scaler_collapsed(model, evidence) -> Iterator[Finding]:
    """The loss scale is halved at step after step: the gradients are not finite whatever it is."""
    fact = evidence.facts.get("step_skipped")
    if fact is None or fact.count < 8:
        return
    total = fact.count + evidence.steps
    if 2 * fact.count >= total:
        yield Finding(
            "scaler-collapsed",
            "GradScaler",
            f"{fact.count} of {total} steps were skipped and the scale fell to "
            f"{evidence.lowest_scale:.3g}: a smaller scale does not make these gradients finite",
        )


def _ratios(evidence: Evidence) -> list[float]:
    """|change| / |weight| of weights with two and more dimensions, from the third step on."""
    return [
        change / sample["before"][name]
        for sample in evidence.samples
        if sample["step"] > 2
        for name, change in sample["change"].items()
        if sample["before"].get(name)
        and name in evidence.parameters
        and len(evidence.parameters[name]["shape"]) > 1
        and evidence.parameters[name]["owner"] is not None
    ]


def _relative_gradients(evidence: Evidence) -> list[float]:
    """|gradient| / |weight| at the steps looked at closely."""
    return [
        norm / sample["before"][name]
        for sample in evidence.samples
        for name, norm in sample["gradient"].items()
        if sample["before"].get(name)
    ]


def learning_rate(model, evidence) -> Iterator[Finding]:
    """Too high: the weights move by more than half of their size per step and the loss of the last
    third lies above that of the first, or is no longer finite after it grew. Too low: they move by
    less than 1e-6 although the gradient is there and no schedule holds the rate down. (Healthy
    models 2e-3 to 8e-2.) One run can't tell a wrong rate from a wrong loss, so these are notes; a
    checkup tries another rate."""
    losses = [row["loss"] for row in evidence.rows]
    ratios = [ratio for ratio in _ratios(evidence) if math.isfinite(ratio)]
    if len(losses) < 8 or not ratios:
        return
    third = len(losses) // 3
    early = [loss for loss in losses[:third] if math.isfinite(loss)]
    late = losses[-third:]
    broke = not all(math.isfinite(loss) for loss in late)
    middle = statistics.median(ratios)
    finite = [loss for loss in losses if math.isfinite(loss)]
    grew = early and (
        max(finite) > 100 * abs(early[0]) + 1e-12
        if broke
        else statistics.median(late) > 1.5 * abs(statistics.median(early)) + 1e-12
    )
    rates = evidence.rows[-1]["learning_rate"]
    where = f"learning rate {', '.join(f'{rate:g}' for rate in rates)}"
    if early and grew and (middle > 0.5 or (broke and max(ratios) > 0.5)):
        end = "no longer finite" if broke else f"{statistics.median(late):.3g}"
        yield Finding(
            "lr-too-high",
            where,
            f"each step moves the weights by {middle:.2g} of their size, and the loss goes from "
            f"{early[0]:.3g} to {end}",
            severity="note",
        )
    # A small step from a gradient of ordinary size: else the gradient is the fault.
    fed = statistics.median(_relative_gradients(evidence) or [0.0]) > 1e-3
    flat = not broke and early and abs(statistics.median(late) - early[0]) < 0.02 * abs(early[0])
    if 0 < middle < 1e-6 and fed and flat and min(rates) > 0 and not evidence.schedulers:
        yield Finding(
            "lr-too-low",
            where,
            f"each step moves the weights by {middle:.1g} of their size, and the loss stays at "
            f"{statistics.median(late):.3g}",
            severity="note",
        )


def raised(model, evidence) -> Iterator[Finding]:
    """The loop ended with an error that the catalogue knows."""
    fact = evidence.facts.get("raised")
    if fact is None:
        return
    detail = fact.details[-1]
    frozen = [name for optimizer in evidence.optimizers for name in optimizer["frozen"]]
    for fault in for_error(detail["error"])[:1]:
        slug = fault.slug
        if slug == "detached" and (frozen or not detail["recording"]):
            slug = "frozen-by-accident" if frozen else "no-grad-block"
        yield Finding(
            slug,
            detail.get("line") or f"step {fact.last}",
            textwrap.shorten(detail["error"].splitlines()[0], 200, placeholder=" …"),
            # Which operation made it, only a checkup or find_nonfinite can tell.
            severity="note" if slug in ("nan-forward", "nan-backward") else "fault",
        )
