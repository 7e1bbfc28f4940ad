"""What is happening in this training loop?  Introduced in chapter 5.

    with watch(model, optimizer) as log:
        ...your own loop, unchanged...

``watch`` writes down what ``recorder`` sees and hands it out as arrays, as a dashboard and as
plain data. Bits of the training do not change, and no hook or wrapped function is left behind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import nn
from torch.optim import Optimizer

from bpkit.diagnosis import rules_loop, rules_update
from bpkit.diagnosis.dashboard import draw
from bpkit.diagnosis.evidence import Evidence
from bpkit.diagnosis.recorder import Recorder
from bpkit.diagnosis.report import Report
from bpkit.interrupt import Unbroken


class watch(Unbroken):
    """Record a training loop: ``with watch(model, optimizer) as log: ...``.

    Args:
        model: the model that the loop trains.
        optimizers: one or several, in the order in which they count: a step is one call of
            ``step()`` of one of them. An optimizer that the loop makes itself is noticed.
        every: how often weights, graph and activations are looked at; the first three steps of an
            optimizer always are. Such a step holds a copy of the weights and of a gradient.

    The log can be read while the loop runs and afterwards; entering it again continues it.
    Exceptions pass through. A log inside another one's block is fine.

    A compiled model is watched from outside: no activations.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with watch(model, optimizer) as log:
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(4, 2)).square().mean().backward()
        ...         optimizer.step()
        >>> log.steps, bool(log.loss[-1] < log.loss[0]), list(log.update_ratio)
        (5, True, ['weight', 'bias'])
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer, every: int = 10):
        self._recorder = Recorder(model, *optimizers, every=every)

    def _enter(self) -> watch:
        self._recorder.__enter__()
        evidence, model = self._recorder.evidence, self._recorder.model
        if not evidence.trainable_at_start:
            flags = {name: p.requires_grad for name, p in model.named_parameters()}
            evidence.trainable_at_start = flags
        return self

    def _leave(self, *exception) -> None:
        self._recorder.__exit__(*exception)

    @property
    def evidence(self) -> Evidence:
        """Everything that was seen, up to now."""
        return self._recorder.settle()

    @property
    def steps(self) -> int:
        """How often an optimizer stepped."""
        return self._recorder.evidence.steps

    def _column(self, name: str, rows: str = "rows", kind: type = float) -> np.ndarray:
        return np.array([row[name] for row in getattr(self.evidence, rows)], dtype=kind)

    @property
    def step(self) -> np.ndarray:
        """Numbers of the steps that were kept, from 1."""
        return self._column("step", kind=int)

    @property
    def loss(self) -> np.ndarray:
        """Mean of the scalars on which ``backward`` was called for the step, nan without one."""
        return self._column("loss")

    @property
    def backwards(self) -> np.ndarray:
        """How many backward passes the gradient of the step holds."""
        return self._column("backwards", kind=int)

    @property
    def global_norm(self) -> np.ndarray:
        """Norm over all gradients as the last backward left them, without a loss scale."""
        return self._column("global_norm")

    @property
    def applied_norm(self) -> np.ndarray:
        """The same as the step found it: after clipping."""
        return self._column("applied_norm")

    @property
    def clipped(self) -> np.ndarray:
        """Whether something shrank the gradients between backward and step."""
        return self._column("clipped", kind=bool)

    @property
    def learning_rate(self) -> np.ndarray:
        """One for each step, or for each step and parameter group (nan beyond an optimizer's)."""
        rates = [row["learning_rate"] for row in self.evidence.rows]
        width = max(map(len, rates), default=1)
        table = np.full((len(rates), width), np.nan)
        for line, values in zip(table, rates, strict=True):
            line[: len(values)] = values
        return table[:, 0] if width == 1 else table

    @property
    def sampled(self) -> np.ndarray:
        """Numbers of the steps that were looked at closely."""
        return self._column("step", "samples", int)

    def _series(self, value) -> dict[str, np.ndarray]:
        """{name: one number for each sampled step, nan where there is none}."""
        found = [value(sample) for sample in self.evidence.samples]
        names = dict.fromkeys(name for one in found for name in one)
        return {name: np.array([one.get(name, np.nan) for one in found]) for name in names}

    @property
    def gradient_norm(self) -> dict[str, np.ndarray]:
        """{parameter: norm of its gradient as backward left it}, at the sampled steps."""
        return self._series(lambda sample: sample["gradient"])

    @property
    def update_ratio(self) -> dict[str, np.ndarray]:
        """{parameter: ‖after − before‖ / ‖before‖}, measured from the weights."""
        return self._series(
            lambda sample: {
                name: change / before if (before := sample["before"][name]) else np.nan
                for name, change in sample["change"].items()
            }
        )

    @property
    def cosine(self) -> np.ndarray:
        """Between the gradient of a sampled step and that of the optimizer's step before."""
        return self._column("cosine", "samples")

    @property
    def dead(self) -> dict[str, np.ndarray]:
        """{place: share of the units that were zero for every sample of the batch}."""
        return self._series(lambda sample: sample.get("dead", {}))

    @property
    def saturated(self) -> dict[str, np.ndarray]:
        """{place: share of tanh and sigmoid outputs in the flat part}: ``|tanh| > 0.97``, sigmoid
        closer than 0.03 to 0 or 1."""
        return self._series(lambda sample: sample.get("saturated", {}))

    def to_dict(self) -> dict[str, Any]:
        """All of these as lists and numbers, ready for JSON; ``plot`` takes it as a baseline."""
        data: dict[str, Any] = {"steps": self.steps}
        for name in _ROWS + _SAMPLES:
            value = getattr(self, name)
            data[name] = (
                {key: _plain(series) for key, series in value.items()}
                if isinstance(value, dict)
                else _plain(value)
            )
        parameters = self.evidence.parameters.items()
        data["weights"] = [name for name, facts in parameters if len(facts["shape"]) > 1]
        return data

    def plot(self, baseline: watch | dict[str, Any] | None = None) -> Figure:
        """The dashboard. ``baseline``: the log of a healthy run, or its ``to_dict()``."""
        if isinstance(baseline, watch):
            baseline = baseline.to_dict()
        return draw(self.to_dict(), baseline)

    def report(self) -> Report:
        """What the loop did wrong, as far as watching it can tell: root causes first."""
        model, optimizers = self._recorder.model, self._recorder.given
        evidence = self.evidence
        findings = list(rules_loop.rules(model, evidence))
        findings += rules_update.decay_on_norms_and_biases(model, optimizers)
        seen = f"Watched {evidence.steps} steps and {evidence.backwards} backward passes."
        return Report(findings, checked=seen)

    def __repr__(self) -> str:
        return f"<watch: {self.steps} steps, {self._recorder.evidence.backwards} backward passes>"


_ROWS = [
    "step", "loss", "backwards", "global_norm", "applied_norm", "clipped", "learning_rate",
]  # fmt: skip
_SAMPLES = ["sampled", "gradient_norm", "update_ratio", "cosine", "dead", "saturated"]


def _plain(array: np.ndarray) -> list:
    """As lists; what is not finite as ``None``, which JSON knows."""
    if array.dtype != float:
        return array.tolist()
    return np.where(np.isfinite(array), array, None).tolist()
