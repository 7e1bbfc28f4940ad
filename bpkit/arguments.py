"""Can I work with what I was given, and whose error is this?

The tools call ``loss_fn(model, batch)`` themselves. What can't be called so is refused here, in
the words of the reader's call, before anything runs; and an error of the reader's program leaves
without the frames of those who only listened.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.utils.data import DataLoader

from bpkit.batches import tensors_in
from bpkit.interrupt import together


def check(model: Any, loss_fn: Any) -> None:
    """Refuse what is no module, and what can't be called as ``loss_fn(model, batch)``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module")
    if isinstance(loss_fn, _Loss) or getattr(loss_fn, "__module__", "") == F_NAME:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(
            f"loss_fn is {name}, which takes scores and targets. It is called as "
            "loss_fn(model, batch), so wrap it: lambda model, batch: criterion(model(batch[0]), "
            "batch[1])"
        )
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn is a {type(loss_fn).__name__}, expected a function: loss_fn(model, batch) "
            "runs the model and returns the loss"
        )
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # built in: nobody knows what it takes
        return
    try:
        signature.bind(model, None)
    except TypeError as error:
        raise TypeError(
            f"loss_fn takes {signature}, and is called as loss_fn(model, batch): {error}"
        ) from None


def check_batch(batch: Any) -> None:
    """Refuse what gives batches and is none."""
    if isinstance(batch, Iterator | DataLoader):
        raise TypeError(f"batch is a {type(batch).__name__}: give one batch, next(iter(loader))")


def check_values(model: nn.Module, *batches: Any) -> None:
    """Refuse tensors without data."""
    held = ((f"the model's {n}", t) for n, t in (*model.named_parameters(), *model.named_buffers()))
    given = (pair for batch in batches for pair in tensors_in(batch))
    for name, tensor in itertools.chain(held, given):
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values; give it real ones, on the CPU "
                "for instance. Only bpkit.memory.ledger runs without"
            )


def the_optimizers(given) -> tuple[torch.optim.Optimizer, ...]:
    if given is None:
        return ()
    if isinstance(given, torch.optim.Optimizer):
        return (given,)
    several = isinstance(given, Iterable) and not isinstance(given, str)
    optimizers = tuple(given) if several else (given,)
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer: expected a torch.optim.Optimizer, got {type(one).__name__}"
            )
    return optimizers


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` can't be called without one, as LBFGS can't."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def uncompiled() -> AbstractContextManager[Any]:
    """What ``torch.compile`` made runs as it was written, so that it can be looked into.

    A compiled model would be compiled again for each look, and after eight of these no more.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; the import takes a second
        return nullcontext()
    return together(_eager())


@contextmanager
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def retell(error: RuntimeError) -> None:
    """Say what to do where PyTorch refuses a backward pass that the reader did not ask for."""
    if "use_reentrant=True" in str(error):
        raise RuntimeError(
            "the loss went through torch.utils.checkpoint with use_reentrant=True, whose backward "
            "pass can't be asked for single gradients: use use_reentrant=False"
        ) from error
    if "backward through the graph a second time" in str(error):
        raise RuntimeError(
            "Trying to backward through the graph a second time: an earlier backward pass has "
            "freed it. Look before loss.backward(), leave backward() out of loss_fn, and detach "
            "what it keeps from one call to the next"
        ) from error


def unlisten(trace: TracebackType | None) -> None:
    """Take the frames of ``bpkit`` that only listened out of a traceback, all but the first one.

    An error of the reader's program then ends where it would without ``bpkit``.
    """
    while trace is not None:
        while trace.tb_next is not None and _listens(trace.tb_next):
            trace.tb_next = trace.tb_next.tb_next
        trace = trace.tb_next


def _listens(trace: TracebackType) -> bool:
    code = trace.tb_frame.f_code
    return code.co_filename.startswith(HERE) and (
        code.co_name in ("__torch_function__", "__torch_dispatch__", "wrapper")
        or code.co_name.startswith("_around_")
    )


F_NAME = nn.functional.__name__
HERE = __file__.removesuffix("arguments.py")
