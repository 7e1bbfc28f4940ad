"""Programs with a known fault and healthy ones, for judging the diagnosis.

A program is a function ``program(faulty)`` that returns ``model, loss_fn, optimizer, batches`` and,
where the fault lies in the loop, a fifth item ``train(model, loss_fn, optimizer, batches)``. With
``faulty=False`` it is its own healthy twin: the repair, and nothing else, is different.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PROGRAMS: list[Program] = []


@dataclass(frozen=True)
class Program:
    """``expect`` is the slug of the fault, ``also`` slugs that name it as well, ``note`` says that
    a note is enough; a healthy program has ``expect=None`` and no faulty form."""

    name: str
    make: Callable
    expect: str | None = None
    also: tuple[str, ...] = ()
    note: bool = False


def pair(expect: str, *also: str, note: bool = False):
    """Register a program that is faulty or not, by its argument."""

    def register(make: Callable) -> Callable:
        name = f"{make.__module__.rpartition('.')[2]}.{make.__name__}"
        PROGRAMS.append(Program(name, make, expect, also, note))
        return make

    return register


def healthy(make: Callable) -> Callable:
    """Register a program that looks sick and is not: ``program(seed)``, same return value."""
    name = f"{make.__module__.rpartition('.')[2]}.{make.__name__}"
    PROGRAMS.append(Program(name, make))
    return make
