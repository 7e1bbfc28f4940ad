"""Which faults does the diagnosis know, and what do they look like?  Introduced in chapter 8.

The catalogue is ``faults.toml``; ``symptoms.toml`` leads from what is seen on the screen to its
entries. Reports, failure cards and the symptom index take their words from here, so that they say
the same.
"""

import re
import tomllib
from dataclasses import dataclass, fields
from importlib import resources

__all__ = ["FAULTS", "LAYERS", "SYMPTOMS", "Fault", "Symptom", "for_error", "readable"]

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

    def card(self, part: str) -> str:
        """A part of the fault's card in the book, as MyST Markdown: "seen", "decides" or "cause".

        The cards in ``chapters/08*.ipynb`` hold these texts in cells of their own, marked in the
        cell's metadata; ``tests/tools/refresh.py`` writes them, and a test compares them.

        >>> FAULTS["missing-step"].card("seen").splitlines()[:2]
        ['(missing-step)=', '## An optimizer that never steps']
        """
        if part == "seen":
            messages = (f"``{readable(pattern.pattern)}``" for pattern in self.errors)
            seen = "\n".join(f"- {text}" for text in (*self.symptoms, *messages))
            return f"({self.anchor})=\n## {self.title}\n\n**What you see.**\n\n{seen}"
        if part == "decides":
            return f"**The measurement that decides.** {self.decides}"
        if part == "cause":
            return f"**The cause.** {self.cause}\n\n**The repair.** {self.repair}"
        raise ValueError(f"a card has the parts seen, decides and cause, got {part!r}")


@dataclass(frozen=True)
class Symptom:
    """What is seen without a message; its texts are Markdown with inline code."""

    name: str
    title: str
    first: str  # the measurement to begin with
    faults: tuple[str, ...]  # slugs, the most likely one first


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


def load_symptoms(text: str) -> dict[str, Symptom]:
    """Name -> symptom, in the order of `text`; ValueError says which entry is ill-formed."""
    symptoms = {}
    for name, entry in tomllib.loads(text).items():
        if set(entry) != {"title", "first", "faults"}:
            raise ValueError(f"{name}: got {sorted(entry)}, expected title, first and faults")
        slugs = entry["faults"]
        if unknown := [slug for slug in slugs if slug not in FAULTS]:
            raise ValueError(f"{name}: {unknown} are not in the catalogue")
        if len(set(slugs)) != len(slugs):
            raise ValueError(f"{name}: a fault stands twice in {slugs}")
        first = " ".join(entry["first"].split())
        symptoms[name] = Symptom(name, entry["title"], first, tuple(slugs))
    return symptoms


def _read(file: str) -> str:
    return resources.files("bpkit.diagnosis").joinpath(file).read_text("utf-8")


FAULTS = load(_read("faults.toml"))
SYMPTOMS = load_symptoms(_read("symptoms.toml"))


def readable(pattern: str) -> str:
    """A pattern as a person would quote the message, with … for what varies.

    >>> readable(r"Target .+? is out of bounds")
    'Target … is out of bounds'
    """
    text = re.sub(r"\\d\+|\\w\+|(?<!\\)\.[+*]\??", "…", pattern)
    return re.sub(r"\\(.)", r"\1", text)


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
