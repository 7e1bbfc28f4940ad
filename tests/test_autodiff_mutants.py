"""Would a mistake in bpkit.autodiff be noticed?  Make it in a copy of the source, and look.

Each mutant is a slip that hand-written engines really contain. `disagreements` is a compact form
of tests/test_autodiff.py: it must be empty for the engine, and for each mutant it must name the
check that is meant to see this slip.
"""

import types
from pathlib import Path

import numpy as np
import pytest
import torch

import bpkit.autodiff

SOURCE = Path(bpkit.autodiff.__file__).read_text(encoding="utf-8")

# slip: (text that occurs once in the source, what the mutant has instead, a check that must fail)
MUTANTS = {
    "sign of a difference": ("lambda g: g, lambda g: -g", "lambda g: g, lambda g: g", "arithmetic"),
    "sign of a quotient": ("-g * a / b**2", "g * a / b**2", "arithmetic"),
    "square of a quotient": ("-g * a / b**2", "-g * a / b", "arithmetic"),
    "factors exchanged": (
        "lambda g, b: g * b, lambda g, a: g * a",
        "lambda g, a: g * a, lambda g, b: g * b",
        "diamond",
    ),
    "exponent not brought down": ("g * b * a ** np.where", "g * a ** np.where", "power"),
    "exponent not lowered": ("np.where(b == 0, 1, b - 1)", "b", "power"),
    "zero to the power zero": ("a ** np.where(b == 0, 1, b - 1)", "a ** (b - 1)", "power at zero"),
    "logarithm of the base left out": (
        "g * out * np.log(np.where(a == 0, 1, a))",
        "g * out",
        "power",
    ),
    "tanh without the square": ("1 - out**2", "1 - out", "functions"),
    "sigmoid half done": ("g * out * (1 - out)", "g * out", "functions"),
    "relu on the wrong side": ("g * (out > 0)", "g * (out <= 0)", "relu"),
    "relu open at zero": ("g * (out > 0)", "g * (out >= 0)", "relu"),
    "square root without its half": ("g / (2 * out)", "g / out", "functions"),
    "missing transpose, left": ("g @ b.swapaxes(-1, -2)", "g @ b", "matmul"),
    "missing transpose, right": ("a.swapaxes(-1, -2) @ g", "a @ g", "matmul"),
    "mean without 1/n": ("lambda g: spread(g) * share", "lambda g: spread(g)", "mean"),
    "ties counted twice": ("largest / largest.sum(axis, keepdims=True)", "largest * 1.0", "max"),
    "reduced axis put back in front": ("np.expand_dims(g, axis)", "np.expand_dims(g, 0)", "sum"),
    "softmax missing": ("g - np.exp(out) * g.sum", "g - g.sum", "log_softmax"),
    "softmax along the wrong axis": (
        "np.exp(out) * g.sum(axis",
        "np.exp(out) * g.sum(0",
        "log_softmax",
    ),
    "softmax overflows": (
        "self.data - self.data.max(axis, keepdims=True)",
        "self.data",
        "log_softmax",
    ),
    "transpose not undone": ("g.transpose(back)", "g.transpose(order)", "transpose"),
    "repeated index overwrites": (
        "np.add.at(total, positions, g)",
        "total[positions] = g",
        "index",
    ),
    "= for += between consumers": (
        "upstream.get(parent, 0) + part",
        "part",
        "diamond",
    ),
    "= for += in the leaf": (
        "g if node.grad is None else np.asarray(node.grad + g)",
        "g",
        "leaf_accumulates",
    ),
    "broadcast not summed": ("part = unbroadcast(part, parent.shape)", "pass", "row"),
    "stretched axes not summed": ("(*range(added), *stretched)", "tuple(range(added))", "column"),
    "wrong axis summed": ("[added + axis for", "[axis for", "missing axis and column"),
    "depth first without waiting for all consumers": (
        "stack.append((node, True))",
        "order.insert(0, node)",
        "diamond",
    ),
    "interior gradients kept": (
        "if node.is_leaf or node.retains_grad:",
        "if True:",
        "interior_released",
    ),
    "saved values never freed": ("if node.saved and not retain_graph:", "if False:", "freed"),
    "in-place changes not noticed": (
        "if _checksum(array) != self._checksums[name]:",
        "if False:",
        "in_place_noticed",
    ),
    "gradients share memory": (
        "upstream.get(parent, 0) + part",
        "upstream[parent] + part if parent in upstream else part",
        "memory_is_own",
    ),
    "data shared with the caller": (
        "array.astype(dtype)",
        "array.astype(dtype, copy=False)",
        "memory_is_own",
    ),
    "NumPy takes over on the left": (
        "__array_ufunc__ = None",
        "__array_ufunc__0 = None",
        "left operand an array",
    ),
    "cross-entropy accepts -1": ("np.all((targets >= 0) & (", "np.all((", "targets_checked"),
}


def load(source):
    module = types.ModuleType("mutant")
    exec(compile(source, "autodiff (changed)", "exec"), module.__dict__)
    return module


def disagreements(engine):
    """The names of all checks in which `engine` differs from torch, or raises."""
    rng = np.random.default_rng(0)
    square, other, row, cube = (rng.uniform(-2, 2, s) for s in [(3, 3), (3, 3), (3,), (2, 3, 4)])
    tied = np.array([[1.0, 4.0, 4.0], [2.0, 2.0, 2.0], [0.0, -1.0, 3.0]])
    zeros = np.array([0.0, 0.0, 2.0])
    softmax, target = torch.nn.functional.log_softmax, torch.tensor([2, 0, 1])
    ours = engine.Tensor
    # name: the operation in the engine, its twin, the operands
    values = {
        "arithmetic": (f := lambda a, b: (a * b - a / (b * b + 1) - b) * a, f, square, other),
        "left operand an array": (lambda a: square - 2 / a, lambda a: -2 / a + T(square), other),
        "power": (f := lambda a, b: (a * a + 0.5) ** b, f, square, other),
        "power at zero": (f := lambda a, b: a**b, f, zeros, np.array([0.0, 2.0, 3.0])),
        "row": (f := lambda a, b: a * b, f, square, row),
        "column": (f := lambda a, b: a * b + b, f, row.reshape(3, 1), square),
        "missing axis and column": (f := lambda a, b: a * b, f, cube, row.reshape(3, 1)),
        "functions": (f := lambda a: a.tanh() * a.sigmoid() + (a * a + 1).sqrt().log(), f, square),
        "exp": (f := lambda a: a.exp(), f, square),
        "relu": (f := lambda a: a.relu(), f, tied),
        "matmul": (f := lambda a, b: a @ b, f, square, other),
        "sum": (f := lambda a: a.sum(1) * a.sum(0), f, square),
        "mean": (f := lambda a: a.mean(1), f, square),
        "max": (lambda a: a.max(1), lambda a: a.amax(1), tied),
        "log_softmax": (lambda a: a.log_softmax(1), lambda a: softmax(a, 1), 1000 * square),
        "log_softmax, mild": (lambda a: a.log_softmax(1), lambda a: softmax(a, 1), square),
        "transpose": (lambda a: a.transpose(1, 2, 0), lambda a: a.permute(1, 2, 0), cube),
        "index": (f := lambda a: a[[0, 0, 2]], f, square),
        "cross_entropy": (
            lambda a: engine.cross_entropy(a, target),
            lambda a: torch.nn.functional.cross_entropy(a, target),
            square,
        ),
        "diamond": (f := lambda a: (b := a + a) + (c := b * b) + c * a, f, square),
    }
    failed = [name for name, case in values.items() if not holds(lambda c=case: same(ours, *c))]
    behaviours = [leaf_accumulates, interior_released, freed, in_place_noticed, memory_is_own]
    behaviours.append(targets_checked)
    return failed + [f.__name__ for f in behaviours if not holds(lambda f=f: f(engine))]


def holds(check):
    try:
        with np.errstate(all="ignore"):
            return bool(check())
    except Exception:
        return False


def T(array):
    return torch.tensor(array, requires_grad=True)


def same(tensor, operation, twin, *arrays):
    mine, other = [tensor(a, requires_grad=True) for a in arrays], [T(a) for a in arrays]
    out, expected = operation(*mine), twin(*other)
    upstream = np.linspace(-1.0, 2.0, out.data.size).reshape(out.shape)
    out.backward(upstream)
    expected.backward(torch.tensor(upstream))
    pairs = [
        (out.data, expected.detach()),
        *((m.grad, o.grad) for m, o in zip(mine, other, strict=True)),
    ]
    return all(
        a.shape == b.shape and np.allclose(a, b.numpy(), rtol=1e-9, atol=1e-11) for a, b in pairs
    )


def leaf_accumulates(engine):
    x = engine.Tensor([1.0, 2.0], requires_grad=True)
    for _ in range(2):
        (x * x).sum().backward()
    return x.grad.tolist() == [4, 8]


def interior_released(engine):
    x = engine.Tensor([1.0, 2.0], requires_grad=True)
    hidden = x * x
    loss = (hidden * hidden).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return hidden.grad is None and x.grad.tolist() == [8, 64]


def freed(engine):
    loss = engine.Tensor(2.0, requires_grad=True) ** 2
    loss.backward()
    return loss.saved is None and "second time" in error_of(loss.backward)


def in_place_noticed(engine):
    x = engine.Tensor([1.0, 2.0], requires_grad=True)
    loss = (x * x).sum()
    x.data[0] = 3
    return "in place" in error_of(loss.backward)


def memory_is_own(engine):
    array = np.ones(2)
    a, b = (engine.Tensor(array, requires_grad=True) for _ in range(2))
    array[0] = 9
    (a + b).backward([1.0, 1.0])
    a.grad += 1
    return a.data[0] == 1 and b.grad.tolist() == [1, 1]


def targets_checked(engine):
    logits = engine.Tensor(np.ones((1, 3)))
    return "targets must lie" in error_of(lambda: engine.cross_entropy(logits, [-1]))


def error_of(action):
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_the_engine_itself_agrees():
    assert disagreements(load(SOURCE)) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_noticed(name):
    text, replacement, check = MUTANTS[name]
    assert SOURCE.count(text) == 1, f"{text!r} must occur once in autodiff.py: adapt the mutant"
    assert check in disagreements(load(SOURCE.replace(text, replacement)))
