"""Is this gradient right?  Right ones pass, wrong ones are found, and nothing is left behind."""

import importlib.util
import itertools
import math
import random
import re
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from bpkit import numeric
from bpkit.numeric import (
    audit,
    default_step,
    directional_check,
    numerical_gradient,
    step_size_curve,
)

FLOATS = (torch.float64, torch.float32)


def load(path):
    """The catalogue of wrong backward passes, which the benchmark counts on a larger network."""
    spec = importlib.util.spec_from_file_location("numeric_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def catalogue():
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(__file__).parent / "benchmarks"
        patch.syspath_prepend(folder)
        return load(folder / "numeric.py")


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def batch_of(size=13, inputs=7, classes=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, inputs, generator=generator, dtype=dtype)
    return x, torch.randint(classes, (size,), generator=generator)


def mlp(activation=nn.Tanh, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 11), activation(), nn.Linear(11, 3)).to(dtype)


def row(report, name):
    return next(row for row in report.rows if row.name == name)


class Scaled(Function):
    """x, whose gradient comes out multiplied by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.factor * g, None


class Faulty(nn.Module):
    """Two layers; the gradient of the first one's bias is off by a factor."""

    def __init__(self, factor=1.01):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.factor = nn.Linear(7, 11), nn.Linear(11, 3), factor

    def forward(self, x):
        bias = Scaled.apply(self.first.bias, self.factor)
        return self.second(torch.tanh(F.linear(x, self.first.weight, bias)))


# numerical_gradient


@pytest.mark.parametrize("scheme", ["central", "forward", "complex"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_is_as_accurate_as_the_derivation_says(scheme, dtype):
    x = torch.linspace(-2, 2, 12, dtype=dtype).reshape(3, 4)
    numeric = numerical_gradient(lambda x: torch.sin(x).sum(), x, scheme=scheme)
    error = (numeric - x.cos()).abs().max().item()
    epsilon = torch.finfo(dtype).eps
    # The sum of twelve sines adds some rounding errors.
    expected = {"central": epsilon ** (2 / 3), "forward": epsilon**0.5, "complex": epsilon}[scheme]
    assert error < 20 * expected
    assert numeric.dtype == dtype
    assert numeric.shape == x.shape


def test_default_steps():
    epsilon = torch.finfo(torch.float64).eps
    assert default_step(torch.float64) == pytest.approx(epsilon ** (1 / 3))
    assert default_step(torch.float64, "forward") == pytest.approx(epsilon**0.5)
    assert default_step(torch.float32) == pytest.approx(4.9e-3, rel=0.01)


def test_default_step_is_near_the_bottom_of_the_valley():
    x = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
    for scheme in ("central", "forward"):
        steps = [10.0**-k for k in range(1, 13)]
        best = min(step_size_curve(torch_sin, x, x.cos(), steps, scheme))
        (chosen,) = step_size_curve(torch_sin, x, x.cos(), [default_step(x.dtype, scheme)], scheme)
        assert chosen < 30 * best


def torch_sin(x):
    return torch.sin(x).sum()


def test_curve_falls_with_the_order_of_the_scheme():
    x = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
    for scheme, order in (("forward", 1), ("central", 2)):
        coarse, fine = step_size_curve(torch_sin, x, x.cos(), [1e-2, 1e-3], scheme)
        assert math.log10(coarse / fine) == pytest.approx(order, abs=0.05)


def test_step_that_rounding_swallows_measures_nothing():
    x = torch.tensor([300.0])
    assert numerical_gradient(lambda x: x.sum(), x, h=1e-5).item() == 0
    assert step_size_curve(lambda x: x.sum(), x, torch.ones(1), [1e-5]) == [1.0]


def test_step_grows_with_the_entry():
    x = torch.tensor([3e6], dtype=torch.float64)
    error = numerical_gradient(lambda x: (x**2).sum(), x) / (2 * x) - 1
    assert error.abs() < 1e-9
    fixed = numerical_gradient(lambda x: (x**2).sum(), x, h=default_step(x.dtype)) / (2 * x) - 1
    assert fixed.abs() > 100 * error.abs()


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3).double().T,
        torch.randn(2, 3, 4, 5).double().to(memory_format=torch.channels_last),
        torch.randn(3, 1).double().expand(3, 4),
        torch.tensor(0.7).double(),
        torch.zeros(0, 3).double(),
        torch.randn(6).double()[::2],
    ],
    ids=["transposed", "channels_last", "expanded", "scalar", "empty", "strided"],
)
def test_any_layout(x):
    before = x.clone()
    numeric = numerical_gradient(lambda x: (x**3).sum(), x)
    assert numeric.shape == x.shape
    assert torch.allclose(numeric, 3 * x**2, atol=1e-8)
    assert torch.equal(x, before)


def test_bfloat16_goes_without_numpy():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16).T
    numeric = numerical_gradient(lambda x: (2 * x.float()).sum(), x)
    assert numeric.dtype == torch.bfloat16
    assert torch.equal(numeric, torch.full_like(x, 2.0))


def test_gradient_leaves_x_alone():
    x = torch.randn(3, requires_grad=True, dtype=torch.float64)
    before, version = x.detach().clone(), x._version
    numerical_gradient(torch_sin, x)
    assert torch.equal(x, before)
    assert x._version == version
    assert x.grad is None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: numerical_gradient(torch_sin, x.long()), TypeError, "int64"),
        (lambda x: numerical_gradient(torch_sin, x.cfloat()), TypeError, "complex64"),
        (lambda x: numerical_gradient(torch_sin, [1.0]), TypeError, "list"),
        (lambda x: numerical_gradient(torch_sin, x, scheme="sideways"), ValueError, "sideways"),
        (lambda x: numerical_gradient(torch_sin, x, h=0.0), ValueError, "h is 0.0"),
        (lambda x: numerical_gradient(torch.sin, x), ValueError, r"shape \(2,\)"),
        (lambda x: numerical_gradient(lambda x: 1.0, x), TypeError, "float"),
        (lambda x: numerical_gradient(lambda x: x.sum() / 0, x), ValueError, "inf"),
    ],
)
def test_gradient_says_what_it_cannot_take(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.ones(2))


def test_complex_step_needs_an_analytic_function():
    with pytest.raises(ValueError, match="analytic"):
        numerical_gradient(lambda x: x.abs().sum(), torch.ones(2), scheme="complex")


# Right gradients


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(7, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        start = torch.zeros(1, len(x), 5), torch.zeros(1, len(x), 5)  # in the default dtype
        return self.head(self.lstm(x.unsqueeze(1).expand(-1, 4, -1), start)[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.b.weight = self.a.weight
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Penalised(nn.Module):
    """The loss takes a gradient itself."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        x = x.clone().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().sum()


def convolution():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 7)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(),
        nn.MaxPool1d(2), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


HEALTHY = {
    "tanh": mlp,
    "relu": lambda: mlp(nn.ReLU),
    "dropout": lambda: nn.Sequential(mlp(), nn.Dropout(0.5)),
    "convolution, batchnorm": convolution,
    "lstm": Recurrent,
    "tied, frozen": Tied,
    "gradient penalty": Penalised,
    "float64": lambda: mlp(dtype=torch.float64),
    "bfloat16": lambda: mlp(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("samples", [None, "auto", 3])
@pytest.mark.parametrize("name", HEALTHY)
def test_right_gradients_pass(name, samples):
    report = audit(HEALTHY[name](), loss_fn, batch_of(), samples=samples)
    assert report.ok, report
    checked = [row for row in report.rows if row.verdict != "frozen"]
    assert max(row.worst_relative for row in checked) < numeric.TOLERANCE / 10
    assert max(row.directional for row in checked) < numeric.TOLERANCE / 10
    assert {row.verdict for row in checked} <= {"ok", "too small"}


def test_tied_parameters_are_one_row_and_frozen_ones_say_so():
    report = audit(Tied(), loss_fn, batch_of(), samples=None)
    assert [row.name for row in report.rows] == [
        "a.weight = b.weight", "a.bias", "b.bias", "head.weight", "head.bias",
    ]  # fmt: skip
    assert row(report, "head.bias").verdict == "frozen"
    assert row(report, "head.bias").worst_relative is None
    assert row(report, "head.bias").kink is False
    assert row(report, "a.weight = b.weight").checked == 49


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_writes_into_its_batch_writes_into_a_copy(dtype):
    def cut(model, batch):
        batch[0].clamp_(max=0)  # the same again, however often
        return loss_fn(model, batch)

    x, y = batch_of(dtype=dtype)
    before = x.clone()
    audit(mlp(dtype=dtype), cut, (x, y))
    assert torch.equal(x, before)


def test_bias_before_batchnorm_is_too_small_to_measure():
    report = audit(convolution(), loss_fn, batch_of())
    assert row(report, "1.bias").verdict == "too small"


def test_parameter_of_another_layout():
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(7, 11).T)
    assert not model[0].weight.is_contiguous()
    report = audit(model, loss_fn, batch_of(), samples=None)
    assert report.ok
    assert row(report, "0.weight").worst_relative < 1e-6


def test_scalar_and_empty_parameters():
    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scale = mlp(), nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return self.net(x) * self.scale

    report = audit(Temperature(), loss_fn, batch_of())
    assert report.ok
    assert row(report, "scale").where == ()
    assert row(report, "nothing").verdict == "empty"


def test_sparse_gradient():
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True))
    ids = torch.tensor([1, 4, 4])
    report = audit(model, lambda m, ids: m(ids).square().mean(), ids, samples=None)
    assert report.ok


def test_large_inputs_and_large_parameters_pass():
    x, y = batch_of()
    report = audit(mlp(), loss_fn, (x * 3000, y), samples=None)
    assert report.ok, report
    model = mlp()
    with torch.no_grad():
        model[2].weight.mul_(1e4)
    assert audit(model, loss_fn, (x, y), samples=None).ok


# Kinks


class Hinge(nn.Module):
    def __init__(self, at, factor=1.0):
        super().__init__()
        self.w, self.factor = nn.Parameter(torch.tensor([at, 0.5], dtype=torch.float64)), factor

    def forward(self, x):
        return Scaled.apply(self.w, self.factor).relu() * x


def hinge_loss(model, batch):
    return model(batch).sum()


def test_kink_at_the_point_is_a_suspicion_and_no_fault():
    report = audit(Hinge(0.0), hinge_loss, torch.ones(2, dtype=torch.float64), samples=None)
    assert report.ok
    assert report.rows[0].verdict == "kink?"
    assert report.rows[0].kink
    assert report.rows[0].where == (0,)


def test_kink_within_the_step_is_seen_and_the_smaller_step_agrees():
    near = default_step(torch.float64) / 4
    report = audit(Hinge(near), hinge_loss, torch.ones(2, dtype=torch.float64), samples=None)
    assert report.ok
    assert report.rows[0].verdict == "ok"
    assert report.rows[0].kink
    assert report.rows[0].worst_relative < numeric.TOLERANCE


def test_no_kink_no_suspicion():
    report = audit(Hinge(0.3), hinge_loss, torch.ones(2, dtype=torch.float64), samples=None)
    assert not report.rows[0].kink


def test_kink_does_not_hide_a_fault():
    for at in (0.0, default_step(torch.float64) / 4):
        model, ones = Hinge(at, factor=1.5), torch.ones(2, dtype=torch.float64)
        assert audit(model, hinge_loss, ones, samples=None).rows[0].verdict == "wrong"


# Wrong gradients


@pytest.mark.parametrize("factor", [1.01, 0.5, -1.0, 0.0, 1.0001, math.nan])
@pytest.mark.parametrize("samples", [None, "auto", 2])
def test_wrong_parameter_is_named(factor, samples):
    report = audit(Faulty(factor), loss_fn, batch_of(), samples=samples)
    assert not report.ok
    assert report.faults == ["first.bias"]
    found = row(report, "first.bias")
    assert found.verdict == "wrong"
    if math.isfinite(factor):
        error = abs(factor - 1) / max(abs(factor), 1)
        assert found.worst_relative == pytest.approx(error, rel=1e-3)
        assert found.directional > error / 100


def test_worst_entry_is_located():
    class Spoilt(Function):
        @staticmethod
        def forward(ctx, w):
            return w.clone()

        @staticmethod
        def backward(ctx, g):
            g = g.clone()
            g[2, 5] *= -1
            return g

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(mlp()[0].weight.detach().clone()[:3].T)

        def forward(self, x):
            return x @ Spoilt.apply(self.w.T).T

    batch = batch_of(dtype=torch.float64)
    found = audit(Model(), loss_fn, batch, samples=None).rows[0]
    assert found.where == (5, 2)
    assert found.worst_relative == pytest.approx(2, rel=1e-3)
    model = Model().double()
    (g,) = torch.autograd.grad(loss_fn(model, batch), [model.w])
    assert found.worst_absolute == pytest.approx(2 * abs(g[5, 2].item()), rel=1e-6)
    assert found.norm == pytest.approx(g.norm().item())


class Cut(nn.Module):
    def __init__(self, used=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.used = nn.Linear(7, 11), nn.Linear(11, 3), used

    def forward(self, x):
        h = torch.tanh(self.first(x) if self.used else x.new_zeros(len(x), 11))
        return self.second(h.detach())


@pytest.mark.parametrize("samples", [None, 2])
def test_missing_gradient_is_a_row_and_a_fault_only_if_one_is_measured(samples):
    unused = audit(Cut(used=False), loss_fn, batch_of(), samples=samples)
    assert unused.ok
    assert [row.verdict for row in unused.rows] == ["no gradient", "no gradient", "ok", "ok"]
    cut = audit(Cut(), loss_fn, batch_of(), samples=samples)
    assert not cut.ok
    assert cut.faults == ["first.weight", "first.bias"]
    assert {row.verdict for row in cut.rows[:2]} == {"path cut"}


def test_half_cut_path_is_wrong():
    class Half(Cut):
        def forward(self, x):
            h = torch.tanh(self.first(x))
            return self.second(h + h.detach())

    assert audit(Half(), loss_fn, batch_of()).faults == ["first.weight", "first.bias"]


def test_catalogue_is_caught(catalogue):
    batch = catalogue.random_batch(13, 31, 5)
    assert sum(p.numel() for p in catalogue.Network().parameters()) > numeric.FULL
    right = catalogue.Network()
    assert audit(right, catalogue.own_loss, batch, samples=None).ok
    assert audit(right, catalogue.own_loss, batch).ok
    assert len(catalogue.MISTAKES) >= 11
    for mistake in catalogue.MISTAKES:
        model = catalogue.Network(mistake)
        assert not audit(model, catalogue.own_loss, batch, samples=None).ok, mistake
        if mistake != "one entry":
            assert not audit(model, catalogue.own_loss, batch).ok, mistake


def test_mistakes_are_no_rescaled_right_gradients(catalogue):
    """Each mistake changes the gradient, and only a constant factor by nature is one."""
    batch = catalogue.random_batch(13, 31, 5)

    def gradient(mistake):
        model = catalogue.Network(mistake)
        grads = torch.autograd.grad(catalogue.own_loss(model, batch), [*model.parameters()])
        return torch.cat([g.flatten() for g in grads])

    right = gradient(None)
    for mistake in catalogue.MISTAKES:
        wrong = gradient(mistake)
        cosine = F.cosine_similarity(right, wrong, dim=0).abs()
        assert not torch.allclose(right, wrong, rtol=1e-9), mistake
        assert cosine < 1 - 1e-12, mistake


# directional_check


def test_directions_agree_for_a_right_gradient():
    readings = directional_check(mlp(), loss_fn, batch_of(), directions=6)
    assert len(readings) == 6
    assert len({reading.analytic for reading in readings}) == 6
    for reading in readings:
        assert reading.relative_error < 1e-7
        assert reading.numeric == pytest.approx(reading.analytic, rel=1e-6)


def test_directions_are_unit_vectors_and_the_slope_is_the_gradient_along_them():
    model = mlp(dtype=torch.float64)
    batch = batch_of(dtype=torch.float64)
    grads = torch.autograd.grad(loss_fn(model, batch), [*model.parameters()])
    size = sum(g.numel() for g in grads)
    slopes = [r.analytic for r in directional_check(model, loss_fn, batch, directions=400)]
    expected = math.sqrt(sum(g.square().sum().item() for g in grads) / size)
    assert np.sqrt(np.mean(np.square(slopes))) == pytest.approx(expected, rel=0.15)


def test_directions_disagree_for_a_wrong_gradient():
    for reading in directional_check(Faulty(0.5), loss_fn, batch_of()):
        assert reading.relative_error > 1e-3


def test_direction_across_the_gradient_is_measured_against_a_typical_one():
    """Where g·v happens to vanish, a relative error would say nothing."""
    model, batch = Faulty(0.5).double(), batch_of(dtype=torch.float64)
    grads = torch.autograd.grad(loss_fn(model, batch), [*model.parameters()])
    typical = math.sqrt(sum(g.square().sum().item() for g in grads) / 124)
    assert sum(g.numel() for g in grads) == 124
    for reading in directional_check(model, loss_fn, batch, directions=50):
        apart = abs(reading.analytic - reading.numeric)
        scale = max(abs(reading.analytic), abs(reading.numeric), typical)
        assert reading.relative_error == pytest.approx(apart / scale)


def test_direction_step_can_be_chosen():
    coarse = directional_check(mlp(), loss_fn, batch_of(), h=1.0)
    fine = directional_check(mlp(), loss_fn, batch_of(), h=1e-4)
    assert max(r.relative_error for r in coarse) > 1e3 * max(r.relative_error for r in fine)


# Cost


def test_default_audit_of_a_large_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 900), nn.Tanh(), nn.Linear(900, 320), nn.Tanh(), nn.Linear(320, 10)
    )
    calls = []

    def counted(model, batch):
        calls.append(1)
        return loss_fn(model, batch)

    report = audit(model, counted, batch_of(4, 784, 10))
    assert report.ok
    assert sum(row.checked for row in report.rows) >= 60
    assert all(row.checked and row.directional is not None for row in report.rows)
    assert report.forwards == len(calls) < 200


def test_default_audit_of_many_parameters():
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(16)))
    report = audit(model, lambda m, x: m(x).square().mean(), torch.randn(5, 20))
    assert report.ok
    assert len(report.rows) == 32
    assert all(row.checked and row.directional is not None for row in report.rows)
    assert report.forwards < 200


def test_small_models_are_checked_in_full_and_slow_ones_are_not(monkeypatch):
    full = audit(mlp(), loss_fn, batch_of())
    assert all(row.checked == math.prod(row.shape) for row in full.rows)
    monkeypatch.setattr(numeric, "SECONDS", 0.0)
    sampled = audit(mlp(), loss_fn, batch_of())
    assert sum(row.checked for row in sampled.rows) == 60


def test_one_slow_pass_does_not_make_a_model_slow(monkeypatch):
    """On a busy machine any forward pass may wait for its turn: the report stays the same."""
    monkeypatch.setattr(numeric, "SECONDS", 10.0)  # for 124 entries: passes of 40 ms
    for slow in (2, 3):  # the first is the one with a graph
        passes = itertools.count(1)

        def waits_once(model, batch, slow=slow, passes=passes):
            time.sleep(0.1 * (next(passes) == slow))
            return loss_fn(model, batch)

        report = audit(mlp(), waits_once, batch_of())
        assert all(row.checked == math.prod(row.shape) for row in report.rows)


def test_samples_count_for_each_parameter():
    report = audit(mlp(), loss_fn, batch_of(), samples=5, directions=1)
    assert [row.checked for row in report.rows] == [5, 5, 5, 3]
    assert report.forwards == 3 + 2 * (18 + 4)
    assert all(
        row.directional is None for row in audit(mlp(), loss_fn, batch_of(), directions=0).rows
    )


def test_samples_are_drawn_from_all_entries():
    class Last(Function):
        @staticmethod
        def forward(ctx, w):
            return w.clone()

        @staticmethod
        def backward(ctx, g):
            return torch.cat([g[:20], 2 * g[20:]])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.linspace(1, 2, 40))

        def forward(self, x):
            return (Last.apply(self.w) * x).square().sum()

    report = audit(Model(), lambda m, x: m(x), torch.ones(40), samples=8, directions=0)
    assert report.faults == ["w"]
    assert report.rows[0].where[0] >= 20


def test_seed_decides_what_dropout_drops():
    model = nn.Sequential(nn.Linear(7, 11), nn.Dropout(0.5), nn.Linear(11, 3))
    norms = []
    for seed, state in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(state)
        norms.append(audit(model, loss_fn, batch_of(), seed=seed).rows[0].norm)
    assert norms[0] == norms[1] != norms[2]


def test_same_seed_same_report_and_another_draws_others():
    first, again, other = (
        audit(Faulty(), loss_fn, batch_of(), samples=2, seed=seed) for seed in (0, 0, 1)
    )
    assert first.rows == again.rows
    assert first.rows != other.rows


def test_bar_shows_for_long_runs_only(capsys, monkeypatch):
    audit(mlp(), loss_fn, batch_of())
    assert capsys.readouterr().err == ""
    bars = []
    original = numeric.tqdm

    def impatient(**options):
        assert options["delay"] >= 2
        bars.append(original(**{**options, "delay": 0, "mininterval": 0, "disable": False}))
        return bars[-1]

    monkeypatch.setattr(numeric, "tqdm", impatient)
    audit(mlp(), loss_fn, batch_of())
    assert "audit" in capsys.readouterr().err
    assert bars[0].n == bars[0].total


# Nothing is left behind


class Stateful(nn.Module):
    """Dropout, BatchNorm, a frozen layer, an accumulated gradient, a None; perhaps a lock."""

    def __init__(self, lock=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Dropout(0.3), nn.ReLU(), nn.Linear(11, 3)
        )
        self.net[4].bias.requires_grad_(False)
        self.net[2].eval()
        self.net[0].weight.grad = torch.ones(11, 7)
        self.calls, self.fail_at = 0, None
        if lock:
            self.lock = threading.Lock()  # cannot be copied
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        noise = random.gauss(0, 1e-3) + np.random.standard_normal() * 1e-3  # noqa: NPY002
        out = self.net(x) + noise
        self.last = out.detach().mean(0)
        return out


def state(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "identity": {name: (id(t), t.data_ptr(), t.dtype) for name, t in tensors.items()},
        "values": {name: t.detach().tolist() for name, t in tensors.items()},
        "gradients": {
            name: None if p.grad is None else (id(p.grad), p.grad.tolist())
            for name, p in model.named_parameters()
        },
        "requires": [p.requires_grad for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "calls": model.calls,
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("lock", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("check", [audit, directional_check])
def test_nothing_changes(lock, check):
    model, batch = Stateful(lock), batch_of()
    before, x = state(model), batch[0].clone()

    def switching(model, batch):
        model.train()
        batch[0].add_(0)
        return loss_fn(model, batch)

    result = check(model, switching, batch)
    assert result.ok if check is audit else max(r.relative_error for r in result) < 1e-6
    assert state(model) == before
    assert torch.equal(batch[0], x)


@pytest.mark.parametrize("lock", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("fail_at", [1, 2, 4, 5, 40])
def test_nothing_changes_after_an_interruption(lock, fail_at):
    model = Stateful(lock)
    model.fail_at = fail_at
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        audit(model, loss_fn, batch_of())
    assert state(model) == before


def test_model_is_copied_where_it_can_be():
    for model, copied in ((Stateful(), True), (Stateful(lock=True), False)):
        seen = []
        audit(model, lambda m, b, seen=seen: (seen.append(m), loss_fn(m, b))[1], batch_of())
        assert (seen[0] is not model) == copied


def test_works_inside_no_grad_and_leaves_it():
    with torch.no_grad():
        assert audit(mlp(), loss_fn, batch_of()).ok
        assert not torch.is_grad_enabled()
    assert not audit(Faulty(), loss_fn, batch_of()).ok


def test_dropout_drops_the_same_units_each_time():
    model = nn.Sequential(nn.Linear(7, 11), nn.Dropout(0.5), nn.Tanh(), nn.Linear(11, 3))
    report = audit(model, loss_fn, batch_of(), samples=None)
    assert report.ok
    assert max(row.worst_relative for row in report.rows) < 1e-6


def test_batch_may_be_nested():
    x, y = batch_of()

    def nested(model, batch):
        assert batch["inputs"][0].dtype == torch.float64
        assert batch["label"].dtype == torch.int64
        assert batch["name"] == "some"
        return F.cross_entropy(model(batch["inputs"][0]), batch["label"])

    assert audit(mlp(), nested, {"inputs": [x], "label": y, "name": "some"}).ok


# Bad input


class Counting(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x):
        self.calls += 1
        return self.net(x) * (1 + 1e-9 * self.calls)


class Split(nn.Module):
    """Computes something else where no graph is wanted."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x) * (1.0 if torch.is_grad_enabled() else 1.1)


def with_parameter(parameter):
    model = mlp()
    model.extra = parameter
    return model


MODEL = mlp()
BAD = {
    "no module": (len, loss_fn, TypeError, "nn.Module"),
    "no parameters": (nn.Tanh(), lambda m, b: b[0].sum(), ValueError, "none of 0 parameters"),
    "all frozen": (mlp().requires_grad_(False), loss_fn, ValueError, "unfreeze"),
    "integers": (
        with_parameter(nn.Parameter(torch.tensor([1]), requires_grad=False)),
        loss_fn, TypeError, "extra is torch.int64",
    ),
    "complex": (
        with_parameter(nn.Parameter(torch.tensor([1j]))), loss_fn, TypeError, "extra is .*complex",
    ),
    "lazy": (nn.Sequential(nn.LazyLinear(3)), loss_fn, TypeError, "lazy"),
    "several losses": (mlp(), lambda m, b: m(b[0]), ValueError, r"shape \(13, 3\)"),
    "a number": (mlp(), lambda m, b: loss_fn(m, b).item(), TypeError, "float"),
    "infinite": (mlp(), lambda m, b: loss_fn(m, b) / 0, ValueError, "inf"),
    "nan": (mlp(), lambda m, b: loss_fn(m, b) * math.nan, ValueError, "nan"),
    "float32": (mlp(), lambda m, b: loss_fn(m, b).float(), ValueError, "float32"),
    "cut": (mlp(), lambda m, b: loss_fn(m, b).detach(), ValueError, "depends on no parameter"),
    "another model": (
        mlp(), lambda m, b: loss_fn(MODEL.double(), b), ValueError, "depends on no parameter",
    ),
    "complex loss": (mlp(), lambda m, b: loss_fn(m, b) * 1j, ValueError, "complex128"),
    "other without graph": (Split(), loss_fn, ValueError, "changes by itself"),
    "changing": (Counting(), loss_fn, ValueError, "changes by itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("check", [audit, directional_check])
def test_bad_input_is_explained(name, check):
    model, loss, error, words = BAD[name]
    with pytest.raises(error, match=words):
        check(model, loss, batch_of())


@pytest.mark.parametrize("samples", [0, -1, 2.5, True, "all"])
def test_bad_samples(samples):
    with pytest.raises(ValueError, match="samples is"):
        audit(mlp(), loss_fn, batch_of(), samples=samples)


def test_other_dtypes_in_the_loss_get_a_note():
    weight = torch.ones(3)
    with pytest.raises(RuntimeError) as caught:
        audit(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight), batch_of())
    assert "float64" in " ".join(caught.value.__notes__)


# The report


def test_report_reads_as_a_table():
    report = audit(Faulty(), loss_fn, batch_of(), samples=None)
    lines = repr(report).splitlines()
    assert lines[0].split() == [
        "parameter", "shape", "‖gradient‖", "checked", "entries", "where", "directions", "verdict",
    ]  # fmt: skip
    assert len(lines) == 6
    assert "at fault: first.bias" in lines[-1]
    good, bad = lines[1], lines[2]
    assert re.fullmatch(r"first.weight +11×7 +\S+ +77 of 77 +< 1e-05 +< 1e-05 +ok", good)
    assert re.search(r"9\.9e-03 +\[\d+\]", bad)
    assert "kink" not in lines[0]  # no entry in that column, so it is left out
    assert "<table" in report._repr_html_()
    assert "at fault: first.bias" in report._repr_html_()


def test_healthy_report_shows_no_digits_of_rounding():
    """So that a stored output is the same on another machine."""
    assert not re.search(r"e-(0[6-9]|1\d)", repr(audit(mlp(), loss_fn, batch_of())))
    assert "no fault found" in repr(audit(mlp(), loss_fn, batch_of()))


def test_tolerance_decides():
    assert audit(Faulty(1.001), loss_fn, batch_of(), tolerance=1e-2).ok
    assert not audit(Faulty(1.001), loss_fn, batch_of()).ok


class TwoKinks(nn.Module):
    """Both units at their kink: along a direction both slopes can be off the gradient's."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, scale):
        return (scale * self.w).relu()[0] - self.w.relu()[1]


def test_several_kinks_at_once_are_no_wrong_gradient():
    report = audit(TwoKinks(), lambda model, _: model(1.0), None)
    assert [row.verdict for row in report.rows] == ["kink?"]
    assert report.ok


def test_a_wrong_entry_beside_kinks_is_still_wrong():
    def loss_fn(model, _):
        model.w.register_hook(lambda g: g + torch.tensor([0.0, 3.0]))
        return model(1.0)

    assert audit(TwoKinks(), loss_fn, None).rows[0].verdict == "wrong"


def test_a_loss_of_zero_and_a_gradient_of_zero_agree():
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1, bias=False))
    nn.init.zeros_(model[0].bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = audit(model, lambda model, x: model(x).sum(), torch.zeros(3, 1))
    assert [row.verdict for row in report.rows] == ["ok", "kink?", "ok"]
