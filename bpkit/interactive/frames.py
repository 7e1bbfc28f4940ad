"""How does a picture show one moment, or one choice, at a time?  Introduced in chapter 3.

A ``Frames`` is a drawing in SVG and a list of frames: what a slider says at each place, a sentence,
and perhaps more. In a terminal it prints the sentences. In a notebook, and in a browser without
scripts, the drawing stands complete above the list. In the built book a small script adds the
slider. It shows and hides parts of the drawing and computes nothing, so every number that is ever
seen is in the notebook's output.

The parts of the drawing carry one of three marks: ``data-from="3"`` is there from frame 3 on,
``data-only="3"`` in frame 3 alone, and ``data-on="3 5"`` is emphasised in these frames.
"""

from dataclasses import dataclass
from html import escape
from math import hypot
from typing import Any

from bpkit import style

# The book's style sheet gives these classes the colours of the theme; a notebook has the others.
INK, VALUE, GRADIENT = "fr-ink", "fr-value", "fr-gradient"
COLOURS = {INK: style.MUTED, VALUE: style.VALUE, GRADIENT: style.GRADIENT}


@dataclass(frozen=True)
class Frame:
    """One place of the slider: ``label`` is read out with it, ``text`` is one or two sentences,
    ``detail`` is HTML that stands below them."""

    label: str
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Frames:
    """A drawing, and what is to be said of it at each place of its slider.

    Args:
        picture: SVG elements, as :func:`tag` makes them.
        frames: at least one; the first has number 1.
        control: what the slider is called.
        chosen: the frame that is shown first, if each frame is a picture of its own (a choice).
            ``None`` if they build on one another (a walk): then all of the drawing is shown first.
        ticks: numbers of the frames to mark on the slider.
    """

    picture: str
    frames: list[Frame]
    control: str = "Step"
    chosen: int | None = None
    ticks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.frames or not 1 <= (self.chosen or 1) <= len(self.frames):
            raise ValueError(f"no frame {self.chosen or 1} among {len(self.frames)} frames")

    def __repr__(self) -> str:
        return "\n".join(f"{k:2}. {frame.text}" for k, frame in enumerate(self.frames, 1))

    def _repr_html_(self) -> str:
        items = "".join(
            f'<li data-label="{escape(f.label)}">'
            f"<p>{escape(f.text, quote=False)}</p>{f.detail}</li>"
            for f in self.frames
        )
        marks = f'data-control="{escape(self.control)}"'
        listed = "The steps as a list"
        if self.chosen is not None:
            listed = "All of it as a list"
            marks += f' data-chosen="{self.chosen}" data-ticks="{" ".join(map(str, self.ticks))}"'
        return (
            f'<div class="frames" {marks}><div class="fr-picture">{self.picture}</div>'
            f"<details><summary>{listed}</summary><ol>{items}</ol></details></div>"
        )


def tag(name: str, *inside: str, **attributes: Any) -> str:
    """An SVG element. ``_`` in a name stands for ``-``; numbers are rounded; ``None`` is left out.

    >>> tag("text", "a < b", x=1.23456, text_anchor="end", class_="st-name")
    '<text x="1.235" text-anchor="end" class="st-name">a &lt; b</text>'
    """
    given = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items() if v is not None}
    told = "".join(
        f' {k}="{escape(f"{v:.4g}" if isinstance(v, float) else str(v))}"' for k, v in given.items()
    )
    content = "".join(escape(i, quote=False) if name == "text" else i for i in inside)
    return f"<{name}{told}>{content}</{name}>"


def svg(width: float, height: float, label: str, *inside: str) -> str:
    """A drawing in a box of its own; ``label`` says what it shows to those who don't see it."""
    box = f"0 0 {width:g} {height:g}"
    look = {"font_family": "sans-serif", "font_size": 13, "fill": "none", "stroke_width": 1.5}
    return tag("svg", *inside, viewBox=box, role="img", aria_label=label, **look)


def text(x: float, y: float, words: str, class_: str = INK, anchor: str = "middle", **more) -> str:
    """Words in a colour of the theme."""
    colour = COLOURS.get(class_, style.INK)
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_, fill=colour, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str = INK, **more) -> str:
    """A straight line in a colour of the theme."""
    path = f"M{x1:.4g} {y1:.4g}L{x2:.4g} {y2:.4g}"
    return tag("path", d=path, class_=class_, stroke=COLOURS[class_], **more)


def arrow(x1: float, y1: float, x2: float, y2: float, class_: str, **more) -> str:
    """A line with a head; a gradient's is dashed, so that colour is not the only cue."""
    length = hypot(x2 - x1, y2 - y1)
    along, across = (x2 - x1) / length, (y2 - y1) / length
    a, b = (
        f"{x2 - 7 * along - side * across:.4g} {y2 - 7 * across + side * along:.4g}"
        for side in (3.5, -3.5)
    )
    head = tag(
        "path", d=f"M{x2:.4g} {y2:.4g}L{a}L{b}z", class_=f"{class_} fr-full", fill=COLOURS[class_]
    )
    dash = "4 3" if class_ == GRADIENT else None
    return tag("g", line(x1, y1, x2, y2, class_, stroke_dasharray=dash), head, **more)
