"""Which faults does the diagnosis know?  The catalogue ``faults.toml``, introduced in chapter 8.

Reports, failure cards and the symptom index take their words from here, so that they say the same.
"""

import re
import tomllib
from dataclasses import dataclass, fields
from importlib import resources

LAYERS = ("data", "forward", "backward", "update", "memory")


@dataclass(frozen=True)
class Fault:
    """One kind of fault; its texts are Markdown with inline code, each on one line."""

    slug: str  # its name in reports, such as "missing-zero-grad"
    layer: str  # where the triage meets it, one of LAYERS
    title: str  # a short noun phrase
    symptoms: tuple[str, ...]  # what is seen on the screen
    errors: tuple[re.Pattern[str], ...]  # what PyTorch says, whatever shapes and names stand in it
    cause: str  # why it happens, on the graph
    repair: str  # what to change
    decides: str  # the measurement that tells it from its look-alikes
    page: str  # where the book explains it: page#anchor
    anchor: str


def load(text: str) -> dict[str, Fault]:
    """Slug -> fault, in the order of the TOML `text`; ValueError says which entry is ill-formed."""
    kinds = {field.name: field.type for field in fields(Fault) if field.name != "slug"}
    catalogue = {}
    for slug, entry in tomllib.loads(text).items():
        if not isinstance(entry, dict) or set(entry) != set(kinds):
            given = sorted(entry) if isinstance(entry, dict) else entry
            raise ValueError(f"{slug}: got {given}, expected the keys {sorted(kinds)}")
        for name, kind in kinds.items():
            texts = [entry[name]] if kind is str else entry[name]
            if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
                raise ValueError(f"{slug}: {name} is {entry[name]!r}, expected text")
            texts = tuple(" ".join(t.split()) for t in texts)  # line breaks are mere wrapping
            entry[name] = texts[0] if kind is str else texts
        if entry["layer"] not in LAYERS or not entry["symptoms"]:
            raise ValueError(f"{slug}: expected one of the layers {LAYERS} and a symptom")
        try:
            entry["errors"] = tuple(map(re.compile, entry["errors"]))
        except re.error as error:
            raise ValueError(f"{slug}: {error.pattern!r} is no pattern: {error}") from error
        catalogue[slug] = Fault(slug, **entry)
    return catalogue


FAULTS = load(resources.files("bpkit.diagnosis").joinpath("faults.toml").read_text("utf-8"))


def for_error(message: str) -> list[Fault]:
    """The faults whose patterns match an error or warning text, most specific first: the one
    whose pattern matches the longest piece, and of equals the one that the triage meets first.

    >>> [fault.slug for fault in for_error("Trying to backward through the graph a second time")]
    ['second-backward']
    """
    message, found = " ".join(message.split()), {}
    for fault in FAULTS.values():
        pieces = [match[0] for pattern in fault.errors if (match := pattern.search(message))]
        if pieces:
            found[fault.slug] = max(map(len, pieces))
    return [FAULTS[slug] for slug in sorted(found, key=found.get, reverse=True)]
