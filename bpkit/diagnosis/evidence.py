"""What did the steps of a training loop do?  Plain data, without a verdict.

``recorder`` fills it, around the reader's own loop (``watch``) or a plain one (``checkup``), and
the rules read it. Step numbers count calls of ``optimizer.step()``, from 1; what happens between
two steps belongs to the later one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# What can become a fact, and what its details say beside ``step`` and ``line`` (of the reader's
# code). Some of it is a fault, some is done on purpose.
FACTS = {
    "used_again": "a step used a gradient that held one an earlier step had used: parameters, of",
    "gradient_used_twice": "a step found only gradients that an earlier step had used",
    "step_before_backward": "a step before any backward",
    "step_after_wipe": "a step found gradients zeroed that backward had left: backwards",
    "step_without_gradient": "a step found no gradient, and no backward had run for it",
    "backward_wasted": "gradients were zeroed before any step had used them: backwards",
    "changed_after_step": "used gradients were written to and are not zero: when, parameters",
    "gradient_from_elsewhere": "gradients appeared without a backward: when, parameters",
    "touched_scaled": "between backward and step all gradients were multiplied by factor",
    "touched_uneven": "between backward and step some shrank more: largest entry, at_largest",
    "touched_nothing": "between backward and step gradients were written to, norms are the same",
    "touched_while_scaled": "gradients were written to with a loss scale in them: when",
    "step_skipped": "the loss scaler left out a step",
    "weights_changed": "weights changed outside a step: when, parameters, number",
    "rebound": "a name holds another parameter than before: name, shape, owned_before, owned_now",
    "optimizer_replaced": "another optimizer object took over: kind, after_steps, state_lost",
    "backward_in_eval": "the model was in eval mode at backward: after_train",
    "backward_reached_nothing": "a backward left no gradient in any watched parameter",
    "retain_graph": "backward was called with retain_graph=True",
    "create_graph": "backward was called with create_graph=True",
    "loss_not_finite": "loss",
    "gradient_not_finite": "parameters that were not, and how many were finite",
    "backward_raised": "error",
    "raised": "the loop ended with an exception: error, recording (is gradient mode on now?)",
}
_DETAILS = 6


@dataclass
class Fact:
    """Something that happened: how often, on which step first and last, and the first details."""

    count: int = 0
    first: int = 0
    last: int = 0
    details: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Evidence:
    """What was seen.

    Attributes:
        every: a closer look was taken on each optimizer's steps 1 to 3 and every so many.
        steps, backwards: how many there were.
        rows: for each step (thinned on long runs) ``step``, ``optimizer`` (number), ``backwards``
            (that the gradient held), ``wasted``, ``losses`` and their mean ``loss``,
            ``global_norm``, ``applied_norm``, ``clipped``, ``scale``, ``learning_rate`` (one for
            each parameter group).
        samples: for each closer look ``step``, ``optimizer``, ``gradient`` {name: norm},
            ``before`` and ``change`` {name: norm of the weights and of their change}, ``cosine``,
            ``dead`` and ``saturated`` {place: share}, ``forwards`` (calls of the model that led to
            this step), ``roots`` (for each backward the last operation and the constant that it
            multiplied by, or ``None``).
        facts: {name: Fact}; the names stand in ``FACTS``.
        orders: how often each order of events from one step to the next: ``"zero backward step"``.
        lines: {event: {line of the reader's code: how often}}.
        parameters: {name: facts} of the model's parameters, as last seen.
        optimizers: facts of each, those made in the loop included.
        schedulers: {class: steps, first, last, settings}.
        modes: at backward, how often the model was in "train" and "eval"; also
            ``"eval:<module>"`` for parts that were in eval mode while the model was not.
        trainable_at_start: {name: requires_grad} of the model's parameters at the first step.
        leaves: tensors the loss depends on that collect a gradient and belong to no parameter.
        graphs: ``step``, ``nodes`` behind a loss, ``complete``, ``unreached`` parameters, and
            ``tagged`` and ``alive``: graphs of earlier steps, and how many of these still exist.
        activations: {place: function, units and samples, gate, followers}.
        calls: calls that the program made on gradients, between backward and step and after it.
        epochs: ``step`` and ``batches`` for each time that a ``DataLoader`` was started.
        scales: (step, value) each time that the loss scale changed.
        lowest_scale: of all skipped steps.
    """

    every: int
    steps: int = 0
    backwards: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)
    orders: Counter[str] = field(default_factory=Counter)
    lines: dict[str, Counter[str]] = field(default_factory=dict)
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    modes: Counter[str] = field(default_factory=Counter)
    trainable_at_start: dict[str, bool] = field(default_factory=dict)
    leaves: list[dict[str, Any]] = field(default_factory=list)
    graphs: list[dict[str, Any]] = field(default_factory=list)
    activations: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: dict[tuple, dict[str, Any]] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    scales: list[tuple[int, float]] = field(default_factory=list)
    lowest_scale: float = float("inf")

    def note(self, name: str, step: int, /, **details: Any) -> None:
        """One more time that ``name``, one of ``FACTS``, happened."""
        assert name in FACTS, name
        fact = self.facts.setdefault(name, Fact(first=step))
        fact.count, fact.last = fact.count + 1, step
        if len(fact.details) < _DETAILS:
            fact.details.append({"step": step, **details})

    def count(self, name: str) -> int:
        """How often it happened."""
        return self.facts[name].count if name in self.facts else 0
