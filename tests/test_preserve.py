"""bpkit.preserve: whatever happens inside, everything comes out as it went in."""

import copy
import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bpkit.preserve import preserve


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6, sparse=True)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 9)
        self.last.weight = self.table.weight  # tied
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.hidden = [nn.Linear(6, 6)]  # not registered
        self.register_buffer("missing", None)
        self.register_buffer("mask", torch.ones(1, 6).expand(4, 6))
        self.history = {"norms": [1.0]}
        self.table_of_numbers = np.arange(3.0)
        self.generator = torch.Generator().manual_seed(5)
        self.generators = [np.random.default_rng(5), random.Random(5)]
        self.memory = (torch.ones(2), [torch.ones(2)])

    def forward(self, x):
        h = torch.relu(self.norm(self.first(self.table(x))))
        h = h * self.mask[0] + self.hidden[0](h)
        self.history["norms"].append(float(h.detach().norm()))
        return self.last(F.dropout(h, training=self.training))


def setting(kind):
    torch.manual_seed(0)
    model = Net()
    dense = [p for p in model.parameters() if p is not model.table.weight and p.requires_grad]
    optimizers = [kind(dense, 0.05), torch.optim.SGD([model.table.weight], 0.1, momentum=0.9)]
    return model, optimizers, torch.arange(4)


def train(model, optimizers, x, steps=3):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x), x).backward()
        for optimizer in optimizers:
            optimizer.step(lambda: 0.0)


def dense(tensor):
    return None if tensor is None else tensor.detach().to_dense().clone()


def all_modules(model):
    return [*model.named_modules(), ("hidden[0]", model.hidden[0])]


def picture(model, optimizers):
    """Everything that has to be the same afterwards: objects, and what is in them."""
    modules = all_modules(model)
    tensors = [t for _, m in modules for t in (*m._parameters.values(), *m._buffers.values())]
    objects = [id(v) for _, m in modules for v in vars(m).values()]
    objects += [id(t) for t in model.memory[1]]
    objects += [id(t) for t in tensors] + [id(t.grad) for t in tensors if t is not None]
    values = {
        "tensors": [dense(t) for t in tensors],
        "gradients": [dense(t.grad) for t in tensors if t is not None],
        "flags": [(t.requires_grad, t.dtype) for t in tensors if t is not None],
        "attributes": {n: {k: copy.deepcopy(v) for k, v in vars(m).items() if k != "hidden"
                           and "generator" not in k} for n, m in modules},
        "generators": [model.generator.get_state(), model.generators[0].bit_generator.state,
                       model.generators[1].getstate()],
        "hooks": [(len(t._backward_hooks or ()), len(t._post_accumulate_grad_hooks or ()))
                  for t in tensors if t is not None],
        "states": [o.state_dict()["state"] for o in map(copy.deepcopy, optimizers)],
        "groups": [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
                   for o in optimizers],
        "members": [[id(p) for g in o.param_groups for p in g["params"]] for o in optimizers],
        "optimizer hooks": [len(o._optimizer_step_pre_hooks) for o in optimizers],
        "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),  # noqa: NPY002
        "modes": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_anomaly_enabled(),
                  torch.are_deterministic_algorithms_enabled(), warnings.filters[:]),
    }  # fmt: skip
    return objects, values


def same(a, b):
    if isinstance(a, torch.Tensor):
        a, b = dense(a), dense(b)
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, nn.Module):
        return True
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def meddle(model, optimizers, x):
    handle = model.first.register_forward_hook(lambda *_: None)
    model.norm.register_forward_pre_hook(lambda *_: None)
    model.first.weight.register_hook(lambda g: g * 2)
    model.first.bias.register_post_accumulate_grad_hook(lambda p: None)
    optimizers[0].register_step_pre_hook(lambda *_: None)
    train(model, optimizers, x)
    handle.remove()
    model.extra = nn.Linear(1, 1)
    model.first.weight = nn.Parameter(torch.zeros(6, 6))
    model.norm.running_mean = None
    model.missing = torch.ones(2)
    model.mask = torch.zeros(2)
    model.frozen.weight.requires_grad_()
    model.table_of_numbers += 1
    model.hidden.append(nn.Linear(1, 1))
    with torch.no_grad():
        model.hidden[0].weight.fill_(float("nan"))
    torch.rand(2, generator=model.generator)
    model.generators[0].random()
    model.generators[1].random()
    model.memory[0].zero_()
    model.memory[1][0] = torch.zeros(2)
    model.last.bias.grad = None
    model.eval()
    model.double()
    optimizers[0].param_groups[0]["lr"] = 7.0
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(3)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")


@pytest.fixture(autouse=True)
def _modes():
    with warnings.catch_warnings():
        yield
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_everything_comes_out_as_it_went_in(kind, before, error):
    model, optimizers, x = setting(torch.optim.Adam if kind is torch.optim.LBFGS else kind)
    if kind is torch.optim.LBFGS:
        optimizers.append(torch.optim.LBFGS(model.hidden[0].parameters()))
    train(model, optimizers[:2], x, before)
    if kind is torch.optim.LBFGS and before:
        optimizers[2].step(lambda: model.hidden[0].weight.square().sum())
    objects, values = picture(model, optimizers)
    with (
        pytest.raises(error) if error else nullcontext(),
        preserve(model, *optimizers),
    ):
        meddle(model, optimizers, x)
        if error:
            raise error
    after_objects, after_values = picture(model, optimizers)
    for name, value in values.items():
        assert same(value, after_values[name]), name
    assert after_objects == objects
    if before == 0:
        assert not optimizers[0].state


def test_training_goes_on_as_if_nothing_had_happened():
    results = []
    for look in (False, True):
        model, optimizers, x = setting(torch.optim.Adam)
        train(model, optimizers, x)
        if look:
            with preserve(model, *optimizers):
                meddle(model, optimizers, x)
        train(model, optimizers, x)
        results.append([*map(dense, model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_a_hook_removed_inside_is_back_and_can_still_be_removed():
    model = nn.Linear(2, 2)
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append("module"))
    on_weight = model.weight.register_hook(lambda g: calls.append("weight"))
    with preserve(model):
        handle.remove()
        on_weight.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["module", "weight"]
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["module", "weight", "weight"]


def test_the_graph_from_before_is_still_good():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    loss = model(torch.ones(2, 3)).sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with preserve(model, optimizer):
        model(torch.ones(2, 3)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def test_lazy_modules_are_left_alone():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    weight = model[1].weight.detach().clone()
    with preserve(model):
        model(torch.ones(2, 4)).sum().backward()
        model[1].weight.data.zero_()
    assert torch.equal(model[1].weight, weight)
    assert model(torch.ones(2, 4)).shape == (2, 1)


def test_a_stale_parameter_of_the_optimizer_is_restored_too():
    model, stale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), stale], 1.0)
    with preserve(model, optimizer):
        stale.sum().backward()
        optimizer.step()
    assert stale.grad is None
    assert torch.equal(stale, torch.ones(2))


def test_a_leaf_that_a_tracked_change_made_a_result_is_a_leaf_again():
    model = nn.Linear(2, 2)
    model.register_buffer("average", torch.zeros(2))
    with preserve(model):
        model.average.add_(model.bias)  # nobody detached it
        assert model.average.requires_grad
    assert model.average.is_leaf
    assert not model.average.requires_grad
    assert torch.equal(model.average, torch.zeros(2))


def test_a_gradient_of_another_dtype_comes_back_into_its_memory():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.bias.grad
    place = gradient.data_ptr()
    with preserve(model):
        model.double()  # converts gradients as well
        model.bias.grad.zero_()
    assert model.bias.grad is gradient
    assert gradient.dtype == torch.float32
    assert gradient.data_ptr() == place
    assert torch.equal(gradient, torch.ones(2))


def test_a_gradient_with_a_graph_can_still_be_differentiated():
    model = nn.Linear(2, 1)
    weight = model.weight
    (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    weight.grad = gradient
    penalty = gradient.square().sum()  # keeps the gradient for its own backward pass
    with preserve(model):
        weight.grad = None
    penalty.backward()
