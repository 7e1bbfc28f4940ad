"""How does a diagnosis read?  Findings, root causes first, with what they cause folded under them.

A report is plain data: text in a terminal, a table in a notebook, ``to_dict()`` for a file, and
``raise_if_faults()`` for CI.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from html import escape
from typing import Any

from bpkit.diagnosis.faults import FAULTS
from bpkit.style import wrapped

__all__ = ["Finding", "Report"]

# What each cause brings about: a finding is folded under the first one present that explains it.
# A consequence is listed here only if repairing the cause removes it.
_SYMPTOMS = frozenset((
    "vanishing-gradient", "exploding-gradient", "dead-relu", "saturated-activation",
    "lr-too-high", "lr-too-low", "initial-loss-off", "oscillating-loss", "nan-forward",
    "nan-backward", "symmetric-init",
))  # fmt: skip
_NAN = frozenset((
    "nan-forward", "nan-backward", "lr-too-high", "exploding-gradient", "oscillating-loss",
    "initial-loss-off", "scaler-collapsed", "vanishing-gradient", "saturated-activation",
))  # fmt: skip
_LAYERS = ("data", "forward", "backward", "update", "memory")
_STARVED = frozenset((
    "unused-parameter", "vanishing-gradient", "lr-too-low", "optimizer-missing-params",
    "dead-relu", "zero-init-both", "frozen-by-accident", "missing-step", "label-misaligned",
))  # fmt: skip
_CAUSES: dict[str, frozenset[str]] = {
    "nan-input": _NAN | {"unscaled-input"},
    "all-zero-input": _SYMPTOMS | {"zero-init-both", "constant-labels"},
    "all-targets-ignored": _NAN,
    "unscaled-input": _SYMPTOMS,
    "constant-labels": frozenset({"lr-too-low", "vanishing-gradient"}),
    "flipped-loss-sign": _SYMPTOMS,
    "double-softmax": _SYMPTOMS,
    "double-sigmoid": _SYMPTOMS,
    "nll-on-logits": _SYMPTOMS | {"flipped-loss-sign"},
    "kldiv-on-probabilities": _SYMPTOMS | {"flipped-loss-sign"},
    "sum-reduction": _SYMPTOMS | _NAN | {"norm-eps-too-small"},
    "shape-broadcast": _SYMPTOMS,
    "softmax-wrong-dim": _SYMPTOMS | {"batch-mixing", "nondifferentiable-term", "zero-init-both"},
    "batch-mixing": frozenset({"label-misaligned"}),
    "symmetric-init": _SYMPTOMS - {"symmetric-init"},
    "dead-relu": frozenset({"vanishing-gradient", "lr-too-low", "saturated-activation"}),
    "saturated-activation": frozenset({"vanishing-gradient", "lr-too-low", "initial-loss-off"}),
    "norm-eps-too-small": _NAN,
    "zero-init-both": frozenset(
        {"vanishing-gradient", "lr-too-low", "symmetric-init", "dead-relu"}
    ),
    "vanishing-gradient": frozenset({"lr-too-low"}),
    "exploding-gradient": frozenset(
        {"vanishing-gradient", "lr-too-high", "initial-loss-off", "oscillating-loss",
         "nan-forward", "nan-backward"}
    ),
    "hook-modifies-parameter": _SYMPTOMS | {"clip-noop"},
    "wrong-backward": _SYMPTOMS,
    "missing-zero-grad": frozenset({"lr-too-high", "oscillating-loss", "exploding-gradient"}),
    "accumulation-unscaled": frozenset({"lr-too-high", "oscillating-loss", "exploding-gradient"}),
    "clip-noop": frozenset({"exploding-gradient", "lr-too-high", "oscillating-loss"}),
    "clip-after-step": frozenset({"exploding-gradient", "lr-too-high", "oscillating-loss"}),
    "clip-before-unscale": frozenset({"lr-too-low", "vanishing-gradient"}),
    "lr-too-high": frozenset(
        {"nan-forward", "nan-backward", "oscillating-loss", "dead-relu", "saturated-activation"}
    ),
    "stale-optimizer": frozenset({"optimizer-missing-params", "lr-too-low", "parameter-rebound"}),
    "optimizer-recreated": frozenset({"stale-optimizer"}),
    "zero-grad-before-step": frozenset({"lr-too-low", "missing-step"}),
    "missing-step": frozenset({"lr-too-low", "missing-zero-grad"}),
    "step-before-backward": frozenset({"zero-grad-before-step"}),
    "rewrapped-parameter": frozenset(
        {"stale-optimizer", "optimizer-missing-params", "unregistered-parameter",
         "parameter-rebound", "detached", *_STARVED}
    ),
    "parameter-rebound": frozenset({"stale-optimizer", "optimizer-missing-params", *_STARVED}),
    "unregistered-parameter": _STARVED | {"second-backward"},
    "detached": _STARVED,
    "missing-create-graph": _STARVED,
    "no-grad-block": _STARVED | {"detached"},
    "nondifferentiable-term": _STARVED | {"detached"},
    "checkpoint-input-no-grad": _STARVED | {"detached", "no-grad-block"},
    "batchnorm-single-sample": frozenset({"nan-forward", "batch-mixing"}),
    "frozen-by-accident": _STARVED - {"frozen-by-accident"} | {"detached"},
}  # fmt: skip


def _explains(cause: str, symptom: str) -> bool:
    if symptom in _CAUSES.get(cause, ()):
        return True
    # Any named NaN is the reason for the symptoms that come with NaN.
    named = cause.startswith(("nan-", "log-", "div-", "std-", "fp16-"))
    return named and cause not in ("nan-forward", "nan-backward") and symptom in _NAN


@dataclass
class Finding:
    """One thing that is wrong, or worth a look.

    Attributes:
        slug: the fault's name in the catalogue, such as ``missing-zero-grad``.
        where: parameter, module, batch and row, or line of your code.
        evidence: what was measured, with its numbers.
        severity: "fault", or "note" for what may well be intended.
        title, cause, repair, link: from the catalogue; ``link`` is a page and anchor of the book.
        follows: consequences of this cause.
    """

    slug: str
    where: str
    evidence: str
    severity: str = "fault"
    repair: str = ""
    title: str = field(init=False)
    cause: str = field(init=False)
    link: str = field(init=False)
    follows: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        fault = FAULTS[self.slug]
        self.title, self.cause = fault.title, fault.cause
        self.repair = self.repair or fault.repair
        self.link = f"{fault.page}#{fault.anchor}"

    @property
    def consequences(self) -> list[Finding]:
        """Those of the consequences too."""
        return [each for follower in self.follows for each in (follower, *follower.consequences)]

    @property
    def layer(self) -> str:
        """Where the triage meets the fault: data, forward, backward, update or memory."""
        return FAULTS[self.slug].layer

    def __str__(self) -> str:
        head = f"{self.severity.upper()}  {self.title}  [{self.slug}]"
        lines = wrapped(head, rest=9)
        parts = {"where": self.where, "seen": self.evidence, "why": self.cause, "do": self.repair}
        if self.severity == "note":
            parts.pop("why")
        for name, text in parts.items():
            lines += _wrapped(name, text)
        for follower in self.consequences:
            lines += _wrapped("then", f"{follower.title}: {follower.evidence}")
        return "\n".join([*lines, f"  {'read':5}  {self.link}"])


def _wrapped(name: str, text: str) -> list[str]:
    return wrapped(f"  {name:5}  {' '.join(text.split())}", rest=9)


class Report:
    """What a diagnosis found: ``findings``, root causes first, and ``undecided``.

    ``undecided`` says in sentences what the evidence could not decide and what would.
    """

    def __init__(self, findings: list[Finding], undecided: list[str] = (), checked: str = ""):
        self.findings = _folded(findings)
        self.undecided = list(undecided)
        self.checked = checked

    @property
    def faults(self) -> list[Finding]:
        """The findings that are faults, without the notes."""
        return [finding for finding in self.findings if finding.severity == "fault"]

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def __str__(self) -> str:
        head = "No fault found." if self.ok else f"{_count(len(self.faults), 'fault')} found."
        parts = [f"{head} {self.checked}".strip(), *map(str, self.findings)]
        parts += ["\n".join(_wrapped("open", sentence)) for sentence in self.undecided]
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "No fault found." if self.ok else f"{_count(len(self.faults), 'fault')} found."
        parts = [f"<p><strong>{head}</strong> {escape(self.checked)}</p>"]
        for finding in self.findings:
            rows = {"where": finding.where, "seen": finding.evidence}
            if finding.severity == "fault":
                rows["why"] = finding.cause
            rows["do"] = finding.repair
            if finding.follows:
                texts = (f"{f.title}: {f.evidence}" for f in finding.consequences)
                rows["then"] = "; ".join(texts)
            rows["read"] = finding.link
            body = "".join(
                f'<tr><th scope="row">{name}</th><td>{_html(text)}</td></tr>'
                for name, text in rows.items()
            )
            title = f"{finding.severity}: {finding.title} ({finding.slug})"
            parts.append(
                f'<table class="dataframe report"><thead><tr><th colspan="2" scope="colgroup">'
                f"{escape(title)}</th></tr></thead><tbody>{body}</tbody></table>"
            )
        parts += [f"<p>Open: {escape(sentence)}</p>" for sentence in self.undecided]
        return "".join(parts)

    def summary(self) -> str:
        """Slug, place and evidence of each finding, without the catalogue's words on it."""
        lines = []
        for finding in self.findings:
            note = "" if finding.severity == "fault" else "note: "
            lines += wrapped(f"{note}{finding.slug} at {finding.where}", rest=2)
            lines += wrapped(" " * 4 + finding.evidence, rest=4)
        return "\n".join(lines) or "No fault found."

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "ok": self.ok,
            "findings": [_plain(finding) for finding in self.findings],
            "undecided": self.undecided,
        }

    def raise_if_faults(self) -> None:
        """For CI: raise ``RuntimeError`` with the report as its message if there is a fault."""
        if not self.ok:
            raise RuntimeError(str(self))


def _html(text: str) -> str:
    """Escaped, with the code in backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick of its own
        return escape(text)
    return "".join(
        f"<code>{escape(part)}</code>" if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _plain(finding: Finding) -> dict[str, Any]:
    names = ["slug", "title", "where", "severity", "evidence", "cause", "repair", "link"]
    plain = {name: getattr(finding, name) for name in names}
    return plain | {"follows": [_plain(follower) for follower in finding.follows]}


def _folded(findings: list[Finding]) -> list[Finding]:
    """One finding per slug, in the order of the triage, consequences under their causes."""
    first: dict[str, Finding] = {}
    places: dict[str, dict[str, None]] = {}  # in order, each once
    for given in findings:
        finding = copy.copy(given)
        finding.follows = []
        places.setdefault(finding.slug, {})[finding.where] = None
        known = first.setdefault(finding.slug, finding)
        if known.severity == "note" and finding.severity == "fault":
            first[finding.slug] = finding
    for slug, finding in first.items():
        finding.where = "; ".join(places[slug])
    causes = list(first.values())
    roots = []
    for finding in causes:
        cause = next(
            (
                other
                for other in causes
                if other.severity == "fault"
                and _explains(other.slug, finding.slug)
                and not _explains(finding.slug, other.slug)
            ),
            None,
        )
        (roots if cause is None else cause.follows).append(finding)
    order = {"fault": 0, "note": 1}
    return sorted(roots, key=lambda f: (order[f.severity], _LAYERS.index(f.layer)))
