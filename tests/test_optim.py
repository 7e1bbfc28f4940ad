"""Do the optimizers of bpkit compute what PyTorch's do, step by step, and would an error show?

Gradients come in three sizes, because an epsilon in the wrong place cannot be seen at size 1 and
rules at 1e-6. A mutant is a copy of the source with a slip that hand-written optimizers contain.
"""

import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bpkit import optim

STEPS = 200
SCALES = [1.0, 1e-3, 1e-6]
SAME = 1e-12  # parameters are around 1 and moved 200 times: rounding leaves some 1e-14
SOURCE = Path(optim.__file__).read_text(encoding="utf-8")
SHAPES = [(5, 3), (7,)]


def start():
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in SHAPES
    ]


def gradients(scale, steps=STEPS):
    """Different in each step, with a size that varies from entry to entry over three decades."""
    generator = torch.Generator().manual_seed(2)
    sizes = [torch.logspace(-2, 1, int(np.prod(shape))).view(shape).double() for shape in SHAPES]
    for _ in range(steps):
        yield [
            scale * size * (torch.randn(size.shape, generator=generator).double() + 0.3)
            for size in sizes
        ]


def path(make, scale):
    """All parameters after each step, as one tensor with a row for each step."""
    params, rows = start(), []
    optimizer = make(params)
    for step_gradients in gradients(scale):
        for p, g in zip(params, step_gradients, strict=True):
            p.grad = g.clone()
        optimizer.step()
        rows.append(torch.cat([p.detach().flatten() for p in params]))
    return torch.stack(rows)


def apart(make, reference, scale):
    return (path(make, scale) - path(reference, scale)).abs().max().item()


class NumPyLion:
    """Chen et al. (2023), algorithm 2, line by line; torch.optim has no Lion."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        self.params, self.eta, self.betas, self.decay = params, lr, betas, weight_decay
        self.m = [np.zeros(p.shape) for p in params]

    def step(self):
        beta1, beta2 = self.betas
        for k, p in enumerate(self.params):
            if p.grad is None:
                continue
            theta, g = p.detach().numpy().copy(), p.grad.numpy()
            c = beta1 * self.m[k] + (1 - beta1) * g
            theta = theta - self.eta * (np.sign(c) + self.decay * theta)
            self.m[k] = beta2 * self.m[k] + (1 - beta2) * g
            with torch.no_grad():
                p.copy_(torch.from_numpy(theta))


PAIRS = {
    "SGD": ("SGD", torch.optim.SGD, {"lr": 0.1}),
    "SGD, L2": ("SGD", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": ("SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "momentum, L2": ("SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Nesterov": ("SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Nesterov, L2": (
        "SGD", torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "RMSProp": ("RMSProp", torch.optim.RMSprop, {"lr": 0.01}),
    "RMSProp, L2": ("RMSProp", torch.optim.RMSprop, {"lr": 0.01, "weight_decay": 0.1}),
    "Adam": ("Adam", torch.optim.Adam, {"lr": 0.01}),
    "Adam, betas": ("Adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}),
    "Adam, L2": ("Adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW": ("AdamW", torch.optim.AdamW, {"lr": 0.01}),
    "AdamW, decay": ("AdamW", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Lion": ("Lion", NumPyLion, {"lr": 0.003}),
    "Lion, decay": ("Lion", NumPyLion, {"lr": 0.003, "weight_decay": 0.1}),
}  # fmt: skip


def makers(name, module=optim):
    ours, reference, options = PAIRS[name]
    return partial(getattr(module, ours), **options), partial(reference, **options)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", PAIRS)
def test_same_as_the_reference_at_every_step(name, scale):
    assert apart(*makers(name), scale) < SAME


def test_defaults_are_those_of_pytorch():
    for ours, theirs in (("RMSProp", "RMSprop"), ("Adam", "Adam"), ("AdamW", "AdamW")):
        own, reference = getattr(optim, ours), getattr(torch.optim, theirs)
        assert apart(own, reference, 1e-3) < SAME


# What is replaced, by what, and the pairs that must notice.
MUTANTS = {
    "epsilon inside the root": (
        "((s / (1 - beta2**t)).sqrt() + self.eps)",
        "(s / (1 - beta2**t) + self.eps).sqrt()", ["Adam", "AdamW"],
    ),
    "epsilon before the bias correction": (
        "((s / (1 - beta2**t)).sqrt() + self.eps)",
        "((s.sqrt() + self.eps) / (1 - beta2**t) ** 0.5)", ["Adam", "AdamW"],
    ),
    "epsilon outside the quotient": (
        "/ ((s / (1 - beta2**t)).sqrt() + self.eps)",
        "/ (s / (1 - beta2**t)).sqrt() + self.eps", ["Adam", "AdamW"],
    ),
    "epsilon inside RMSProp's root": (
        "(s.sqrt() + self.eps)", "(s + self.eps).sqrt()", ["RMSProp"],
    ),
    "no bias correction": (
        "m / (1 - beta1**t) / ((s / (1 - beta2**t)).sqrt()", "m / (s.sqrt()", ["Adam", "AdamW"],
    ),
    "no bias correction of the mean": ("m / (1 - beta1**t) /", "m /", ["Adam", "AdamW"]),
    "a step counter that stays at 1": (
        'state["t"] = state.get("t", 0) + 1', "1", ["Adam", "AdamW"],
    ),
    "momentum with 1 - beta": (
        'state.get("v", 0.0) + g', 'state.get("v", 0.0) + (1 - self.momentum) * g',
        ["momentum", "Nesterov"],
    ),
    "Nesterov without the look-ahead": (
        "g + self.momentum * v if self.nesterov else v", "v", ["Nesterov"],
    ),
    "L2 for decoupled": (
        "        p *= 1 - self.lr * self.weight_decay\n"
        "        p -= self.lr * self.direction(g, state)",
        "        p -= self.lr * self.direction(self.penalised(p, g), state)", ["AdamW, decay"],
    ),
    "decoupled for L2": (
        "        p -= self.lr * self.direction(self.penalised(p, g), state)",
        "        p *= 1 - self.lr * self.weight_decay\n"
        "        p -= self.lr * self.direction(g, state)", ["Adam, L2"],
    ),
    "decay without the rate": (
        "p *= 1 - self.lr * self.weight_decay", "p *= 1 - self.weight_decay",
        ["AdamW, decay", "Lion, decay"],
    ),
    "no L2 in the velocity": (
        "        g = self.penalised(p, g)\n        v =", "        v =",
        ["momentum, L2", "Nesterov, L2"],
    ),
    "Lion's betas exchanged": ("(beta1, beta2), m =", "(beta2, beta1), m =", ["Lion"]),
}  # fmt: skip


@pytest.mark.parametrize("slip", MUTANTS)
def test_a_slip_is_told_apart_at_gradients_of_1e_6(slip):
    old, new, names = MUTANTS[slip]
    assert old in SOURCE, "the mutant no longer fits the source"
    module = types.ModuleType("mutant")
    exec(compile(SOURCE.replace(old, new), "mutant", "exec"), module.__dict__)
    for name in names:
        assert apart(*makers(name, module), 1e-6) > 1000 * SAME


def test_epsilon_is_what_hides_at_gradients_of_size_1():
    # Why the small sizes are needed: at size 1 this slip is below what a float32 test would see.
    slip = MUTANTS["epsilon before the bias correction"]
    module = types.ModuleType("mutant")
    exec(compile(SOURCE.replace(*slip[:2]), "mutant", "exec"), module.__dict__)
    assert apart(*makers("Adam", module), 1.0) < 1e-5 < 1e-3 < apart(*makers("Adam", module), 1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_a_parameter_without_gradient_is_left_alone(name):
    ends = []
    for build in makers(name):
        params = start()
        optimizer = build(params)
        for k, step_gradients in enumerate(gradients(1e-3, steps=6)):
            for p, g in zip(params, step_gradients, strict=True):
                p.grad = g.clone()
            if k in (0, 3):  # also before its first step, so that the parameters' counts differ
                params[1].grad = None
            before = params[1].detach().clone()
            optimizer.step()
            assert torch.equal(before, params[1]) == (k in (0, 3))
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    assert (ends[0] - ends[1]).abs().max() < SAME


def test_gradients_and_graph_are_left_as_they_were():
    for build in (partial(optim.SGD, lr=0.1, momentum=0.9), optim.Adam, optim.Lion):
        p = torch.ones(3, requires_grad=True)
        optimizer = build([p])
        for _ in range(2):
            p.grad = torch.full((3,), 0.5)
            optimizer.step()
            assert torch.equal(p.grad, torch.full((3,), 0.5))
        assert p.is_leaf
        assert p.requires_grad
        assert not any(torch.is_tensor(v) and v.requires_grad for v in optimizer.state[0].values())
        optimizer.zero_grad()
        assert p.grad is None


def test_a_rate_changed_between_steps_counts():
    p = torch.tensor([1.0], requires_grad=True)
    optimizer = optim.SGD([p], lr=0.5)
    for lr in (0.5, 0.25):
        optimizer.lr, p.grad = lr, torch.ones(1)
        optimizer.step()
    assert p.item() == 0.25


def test_unusable_parameters_are_refused():
    with pytest.raises(TypeError, match="single tensor"):
        optim.SGD(torch.ones(3), lr=0.1)
    with pytest.raises(ValueError, match="empty"):
        optim.Adam(iter(()))


def scheduled(make, steps):
    """The rate at each step, as a scheduler of torch.optim leaves it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def torch_warmup_cosine(optimizer, warmup, steps, lowest):
    schedules = torch.optim.lr_scheduler
    return schedules.SequentialLR(
        optimizer,
        [
            schedules.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1),
            schedules.CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=lowest),
        ],
        milestones=[warmup],
    )


SCHEDULES = {
    "step": (
        partial(optim.step_decay, lr=0.3, every=17, factor=0.4),
        lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=17, gamma=0.4),
    ),
    "cosine": (
        partial(optim.cosine, lr=0.3, steps=100, lowest=0.01),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=100, eta_min=0.01),
    ),
    "warm-up": (
        partial(optim.warmup_cosine, lr=0.3, warmup=10, steps=100, lowest=0.01),
        lambda o: torch_warmup_cosine(o, 10, 100, 0.01),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_pytorch(name):
    ours, make = SCHEDULES[name]
    rates = scheduled(make, 101)
    np.testing.assert_allclose([ours(step) for step in range(101)], rates, rtol=1e-12)
    shifted = [ours(step + 1) for step in range(101)]  # the comparison can fail
    assert not np.allclose(shifted, rates, rtol=1e-3)


def test_cosine_stays_at_its_lowest_after_the_end():
    assert optim.cosine(100, 0.3, 100, lowest=0.01) == optim.cosine(170, 0.3, 100, lowest=0.01)
    assert optim.warmup_cosine(500, 0.3, 10, 100) == 0


def test_warmup_starts_above_zero_and_reaches_the_rate():
    rates = [optim.warmup_cosine(step, 0.3, 10, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.03)
    assert rates[9] == rates[10] == max(rates) == pytest.approx(0.3)
