"""What does an audit cost, and what does it catch?  Ratios and counts for chapter 4.

Costs: on a 784-32-10 tanh network (float64, batch 16), the bare 2P forward passes that differences
for each of its P parameters need, against all that checks every entry: the full audit, the loop
that the articles mean to print, and ``torch.autograd.gradcheck``. Then what checks a sample, or
one direction: the default audit and gradcheck's fast mode. And the default audit of a network
with a million parameters (batch 128), in bare forward passes.

Power: a catalogue of wrong backward passes, each a mistake that is made, in a network whose
gradient is written by hand; ``tests/test_numeric.py`` uses it too.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.autograd import Function, gradcheck
from torch.nn import functional as F

from bpkit.numeric import audit
from measured import in_turn, ratios

MISTAKES = (
    "missing transpose", "= for +=", "missing 1/N", "unsummed broadcast", "wrong ReLU side",
    "missing bias", "factor 1/2", "sign", "+1 %", "one row", "one entry",
)  # fmt: skip


def function(mistake, forward, backward):
    """A custom function: ``forward(*inputs)``, ``backward(mistake, g, *inputs)``."""

    class Custom(Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return backward(mistake, g, *ctx.saved_tensors)

    return Custom.apply


def linear(mistake, g, x, weight, bias):
    square = weight.shape[0] == weight.shape[1]  # elsewhere the shapes would not fit
    dx = g @ (weight if mistake == "missing transpose" and square else weight.T)
    dw, db = x.T @ g, g.sum(0)
    if mistake == "one row":  # a loop that stops one short
        dw[-1] = 0
    if mistake == "one entry":  # the corner belongs to no case
        dw[0, 0] = g[0, 0]
    if mistake == "unsummed broadcast":  # broadcast as in the forward pass, then an average
        db = g.mean(0)
    if mistake == "missing bias":
        db = torch.zeros_like(bias)
    return dx, dw, db


def relu(mistake, g, z):
    return g * (z <= 0 if mistake == "wrong ReLU side" else z > 0)


def tanh(mistake, g, z):
    return g * ((1.01 if mistake == "+1 %" else 1) - torch.tanh(z) ** 2)


def skip(mistake, g, x, weight):
    """x + x @ weight uses x twice, so two gradients arrive."""
    dx = torch.zeros_like(x)
    dx += g
    if mistake == "= for +=":
        dx = g @ weight.T
    else:
        dx += g @ weight.T
    return dx, x.T @ g


def half_square(mistake, g, weight):
    """The penalty ½‖w‖²; its gradient w has lost the 2 already, and loses it once more."""
    return g * (weight / 2 if mistake == "factor 1/2" else weight)


def cross_entropy(mistake, g, logits, targets):
    p, t = logits.softmax(1), F.one_hot(targets, logits.shape[1])
    difference = t - p if mistake == "sign" else p - t
    return g * (difference if mistake == "missing 1/N" else difference / len(logits)), None


class Network(nn.Module):
    """linear, ReLU, a square linear layer, tanh, a skip connection, linear: all by hand."""

    def __init__(self, mistake=None, inputs=31, hidden=23, classes=5):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape):
            values = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(values / shape[0] ** 0.5)

        self.w1, self.b1 = parameter(inputs, hidden), parameter(hidden)
        self.w2, self.b2 = parameter(hidden, hidden), parameter(hidden)
        self.w3 = parameter(hidden, hidden)
        self.w4, self.b4 = parameter(hidden, classes), parameter(classes)
        self.linear = function(mistake, lambda x, w, b: x @ w + b, linear)
        self.relu = function(mistake, lambda z: z.clamp(min=0), relu)
        self.tanh = function(mistake, torch.tanh, tanh)
        self.skip = function(mistake, lambda x, w: x + x @ w, skip)
        self.penalty = function(mistake, lambda w: w.square().sum() / 2, half_square)
        self.loss = function(mistake, F.cross_entropy, cross_entropy)

    def forward(self, batch):
        x, targets = batch
        h = self.relu(self.linear(x, self.w1, self.b1))
        h = self.tanh(self.linear(h, self.w2, self.b2))
        logits = self.linear(self.skip(h, self.w3), self.w4, self.b4)
        return self.loss(logits, targets) + 1e-3 * self.penalty(self.w4)


def own_loss(model, batch):
    return model(batch)


def random_batch(size, inputs, classes):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (size,), generator=generator)


def plain_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def tanh_network(*sizes):
    torch.manual_seed(0)
    layers = [m for pair in pairwise(sizes) for m in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def as_function(model, loss_fn, batch):
    """The loss as a function of the parameters, and these, as gradcheck wants them."""
    parameters = dict(model.named_parameters())

    def loss(*values):
        replaced = dict(zip(parameters, values, strict=True))
        return loss_fn(lambda x: torch.func.functional_call(model, replaced, (x,)), batch)

    return loss, [p.detach().clone().requires_grad_() for p in parameters.values()]


def forwards(model, batch, number):
    with torch.no_grad():
        for _ in range(number):
            plain_loss(model, batch)


@torch.no_grad()
def entry_by_entry(model, loss_fn, batch, h=1e-5):
    """The largest difference between autograd and central differences, as the articles look for it.

    Theirs moves a copy of the parameters, which the model never sees; here the model's own move.
    """
    model.zero_grad()
    with torch.enable_grad():
        loss_fn(model, batch).backward()
    largest = 0.0
    for p in model.parameters():
        flat, analytic = p.view(-1), p.grad.view(-1)
        for k in range(p.numel()):
            before = flat[k].item()
            flat[k] = before + h
            above = loss_fn(model, batch).item()
            flat[k] = before - h
            below = loss_fn(model, batch).item()
            flat[k] = before
            largest = max(largest, abs(analytic[k].item() - (above - below) / (2 * h)))
    return largest


def costs(rounds, sizes=(784, 32, 10)):
    model, batch = tanh_network(*sizes), random_batch(16, sizes[0], sizes[-1])
    loss, values = as_function(model, plain_loss, batch)
    assert audit(model, plain_loss, batch).ok
    assert entry_by_entry(model, plain_loss, batch) < 1e-6
    runs = {
        "2P forward passes": lambda: forwards(model, batch, 2 * sum(v.numel() for v in values)),
        "full audit": lambda: audit(model, plain_loss, batch, samples=None),
        "entry by entry": lambda: entry_by_entry(model, plain_loss, batch),
        "gradcheck": lambda: gradcheck(loss, values),
        "default audit": lambda: audit(model, plain_loss, batch),
        "fast gradcheck": lambda: gradcheck(loss, values, fast_mode=True),
    }
    times = in_turn(runs, rounds, {"default audit": 5, "fast gradcheck": 50})
    return {
        f"{first} / {second}": ratios(times, first, second)
        for first, second in [
            ("full audit", "2P forward passes"),
            ("full audit", "entry by entry"),
            ("full audit", "gradcheck"),
            ("default audit", "entry by entry"),
            ("default audit", "gradcheck"),
            ("default audit", "fast gradcheck"),
        ]
    }


def million(rounds):
    model, batch = tanh_network(784, 900, 320, 10), random_batch(128, 784, 10)
    runs = {
        "default audit": lambda: audit(model, plain_loss, batch),
        "forward": lambda: forwards(model, batch, 1),
    }
    times = in_turn(runs, rounds, {"forward": 40})
    report = audit(model, plain_loss, batch)
    return {
        "million: parameters": sum(p.numel() for p in model.parameters()),
        "million: entries checked": sum(row.checked for row in report.rows),
        "million: forward passes": report.forwards,
        "default audit / forward pass, million": ratios(times, "default audit", "forward"),
    }


def power():
    """For each mistake, whether it is caught by fast gradcheck, the default and the full audit."""
    batch, caught = random_batch(16, 784, 10), {}
    for mistake in (None, *MISTAKES):
        model = Network(mistake, 784, 32, 10)
        loss, values = as_function(model, own_loss, batch)
        caught[mistake] = (
            not gradcheck(loss, values, fast_mode=True, raise_exception=False),
            not audit(model, own_loss, batch).ok,
            not audit(model, own_loss, batch, samples=None).ok,
        )
    return caught


def measure(rounds):
    results = {**costs(rounds), **million(rounds)}
    caught = power()
    assert not any(caught.pop(None)), "a right gradient is called wrong"
    results["mistakes"] = len(caught)
    names = ("mistakes: fast gradcheck", "mistakes: default audit", "mistakes: full audit")
    counted = zip(*caught.values(), strict=True)
    results.update((name, sum(found)) for name, found in zip(names, counted, strict=True))
    return results
