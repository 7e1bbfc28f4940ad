"""What if Ctrl-C comes while I put things back?

Python raises ``KeyboardInterrupt`` between any two steps of a program, also halfway into
``__enter__`` or ``__exit__``: then a hook is registered that nobody will remove. What is
``Unbroken`` or ``unbroken`` keeps the interrupt waiting until it has come to its end.

Source: https://docs.python.org/3/library/signal.html#note-on-signal-handlers-and-exceptions
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

P, R = ParamSpec("P"), TypeVar("R")


class Unbroken:
    """A context manager that Ctrl-C finds entered or not entered, never halfway.

    Subclasses define ``_enter`` and ``_leave``, which run none of the reader's code. An interrupt
    that comes meanwhile is raised at their end, one inside the block at once, as ever.
    """

    def _enter(self) -> Any:
        raise NotImplementedError

    def _leave(self, *exception: Any) -> bool | None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        self._heard, self._grad = _listen(), torch.is_grad_enabled()
        try:
            value = self._enter()
        except BaseException:
            _stop(self._heard)
            raise
        try:
            if self._heard:
                _hear(_readers(_before), sys._getframe(1))
        except BaseException:
            try:
                self._leave(None, None, None)
            finally:
                _stop(self._heard)
            raise
        return value

    def __exit__(self, *exception: Any) -> bool | None:
        try:
            if isinstance(exception[1], KeyboardInterrupt):
                _finish(exception[2])
                # As one on the edge of a `no_grad` leaves the wrong one.
                torch._C._set_grad_enabled(self._grad)
            return self._leave(*exception)
        finally:
            _stop(self._heard)


class together(Unbroken):
    """``with together(a, b):`` is ``with a, b:``, entered and left in one piece.

    Example:
        >>> with together(torch.no_grad()):
        ...     torch.is_grad_enabled()
        False
    """

    def __init__(self, *managers: AbstractContextManager):
        self._managers = managers

    def _enter(self) -> Any:
        value = None
        with ExitStack() as stack:
            for manager in self._managers:
                value = stack.enter_context(manager)
            self._stack = stack.pop_all()
        return value

    def _leave(self, *exception: Any) -> bool | None:
        return self._stack.__exit__(*exception)


def unbroken(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` runs to its end before Ctrl-C is heard."""

    @functools.wraps(function)
    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        heard = _listen()
        try:
            return function(*arguments, **keywords)
        finally:
            _stop(heard)

    _WHOLE.add(run.__code__)
    return run


def _finish(trace: TracebackType | None) -> None:
    """End the generators whose ``with`` block the interrupt has left without ending them.

    PyTorch takes a mode off its stack with one, for the time of a call, and puts it back behind
    its ``yield``. An interrupt that comes as ``__exit__`` begins keeps it from that until the
    traceback is forgotten, which may be long after the mode has been left.
    """
    for frame, _ in reversed([*traceback.walk_tb(trace)]):
        manager = frame.f_locals.get("self")
        if frame.f_code.co_filename == contextlib.__file__ and hasattr(manager, "gen"):
            manager.gen.close()


_WHOLE = {Unbroken.__enter__.__code__, Unbroken.__exit__.__code__}
_waiting: list[int] = []
_before: list[Any] = []  # for each Unbroken that is entered, the handler that it found


def _whole(frame: FrameType | None) -> bool:
    """Whether something unbroken is running."""
    while frame is not None:
        if frame.f_code in _WHOLE:
            return True
        frame = frame.f_back
    return False


def _interrupted(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT while anything is entered.

    It looks at what is running: a flag set by ``__exit__`` would come too late for an interrupt
    that is the first thing ``__exit__`` meets.
    """
    if _whole(frame):
        _waiting[:] = [number]
    else:
        _readers(_before)(number, frame)


def _readers(handlers: list[Any]) -> Any:
    """The handler that the reader's own code would have now."""
    return next(handler for handler in reversed(handlers) if handler is not _interrupted)


def _listen() -> bool:
    """Keep interrupts waiting, if they come at all: to the main thread, unless switched off."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if not _before:
        _waiting.clear()
    found = signal.getsignal(signal.SIGINT)
    if not callable(found):
        return False
    signal.signal(signal.SIGINT, _interrupted)
    _before.append(found)
    return True


def _stop(heard: bool) -> None:
    """Called last by what is unbroken: back to the handler before, and to what has waited."""
    if not heard:
        return
    reader, found = _readers(_before), _before.pop()
    if signal.getsignal(signal.SIGINT) is _interrupted:  # else the reader has set another
        signal.signal(signal.SIGINT, found)
    _hear(reader, sys._getframe(2))


def _hear(reader: Any, frame: FrameType) -> None:
    """What has waited, if nothing unbroken runs further out. The reader's handler may return."""
    if _waiting and not _whole(frame):
        _waiting.clear()
        reader(signal.SIGINT, frame)
