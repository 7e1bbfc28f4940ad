"""How fast is bpkit.autodiff, next to torch and next to an engine of single numbers?

One training step (forward, loss, backward, gradient descent) of the two-layer network 64-64-10 on
the digits, in float64, on one thread, by three engines that start from the same weights:

- bpkit.autodiff and torch eager with a batch of 64;
- a scalar engine in the style of micrograd, one node per multiplication and addition, with a batch
  of 2, and bpkit.autodiff with the same 2 images.

Times are also given per multiply-add of the forward pass, 4,736 per image: its time does not depend
on the batch for the scalar engine, but arrays share their overhead among the images of a batch.
Before anything is timed, the three gradients are compared. Ratios are of times per image.
"""

from itertools import chain

import numpy as np
import torch

from bpkit.autodiff import Tensor, cross_entropy
from bpkit.data import digits
from measured import in_turn, ratios

BATCH, SCALAR_BATCH, STEPS = 64, 2, 20
SIZES = (64, 64, 10)
MULTIPLY_ADDS = SIZES[0] * SIZES[1] + SIZES[1] * SIZES[2]
LEARNING_RATE = 1e-3  # small, so that all rounds see the same network


class Value:
    """One number and how it was made: the engine that chapter 2 builds first."""

    __slots__ = ("data", "grad", "parents", "push")

    def __init__(self, data, parents=(), push=None):
        self.data, self.grad, self.parents, self.push = data, 0.0, parents, push

    def __add__(self, other):
        def push(g):
            self.grad += g
            other.grad += g

        return Value(self.data + other.data, (self, other), push)

    def __mul__(self, other):
        def push(g):
            self.grad += g * other.data
            other.grad += g * self.data

        return Value(self.data * other.data, (self, other), push)

    def relu(self):
        def push(g):
            self.grad += g * (self.data > 0)

        return Value(max(self.data, 0.0), (self,), push)

    def exp(self):
        value = np.exp(self.data).item()

        def push(g):
            self.grad += g * value

        return Value(value, (self,), push)

    def log(self):
        def push(g):
            self.grad += g / self.data

        return Value(np.log(self.data).item(), (self,), push)

    def backward(self):
        order, seen, stack = [], set(), [(self, False)]
        while stack:
            node, parents_done = stack.pop()
            if parents_done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack.extend((parent, False) for parent in node.parents)
        self.grad = 1.0
        for node in reversed(order):
            if node.push is not None:
                node.push(node.grad)


def scalar_layer(x, weights, biases):
    columns = list(zip(*weights, strict=True))
    out = []
    for column, total in zip(columns, biases, strict=True):
        for a, w in zip(x, column, strict=True):
            total = total + a * w
        out.append(total)
    return out


class ScalarEngine:
    def __init__(self, arrays, images, labels):
        w1, b1, w2, b2 = (a.tolist() for a in arrays)
        self.w1, self.w2 = ([[Value(v) for v in row] for row in w] for w in (w1, w2))
        self.b1, self.b2 = ([Value(v) for v in b] for b in (b1, b2))
        self.images, self.labels = images[:SCALAR_BATCH].tolist(), labels[:SCALAR_BATCH].tolist()
        self.parameters = [*chain(*self.w1), *self.b1, *chain(*self.w2), *self.b2]

    def step(self):
        loss = Value(0.0)
        for image, label in zip(self.images, self.labels, strict=True):
            hidden = scalar_layer([Value(pixel) for pixel in image], self.w1, self.b1)
            logits = scalar_layer([h.relu() for h in hidden], self.w2, self.b2)
            total = Value(0.0)
            for logit in logits:
                total = total + logit.exp()
            loss = loss + total.log() + logits[label] * Value(-1.0)
        loss = loss * Value(1 / len(self.labels))
        for parameter in self.parameters:
            parameter.grad = 0.0
        loss.backward()
        for parameter in self.parameters:
            parameter.data -= LEARNING_RATE * parameter.grad

    def gradient(self):
        return np.array([parameter.grad for parameter in self.parameters])


class ArrayEngine:
    def __init__(self, arrays, images, labels):
        self.parameters = [Tensor(a, requires_grad=True) for a in arrays]
        self.images, self.labels = Tensor(images), labels.numpy()

    def step(self):
        w1, b1, w2, b2 = self.parameters
        loss = cross_entropy((self.images @ w1 + b1).relu() @ w2 + b2, self.labels)
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        for parameter in self.parameters:
            parameter.data -= LEARNING_RATE * parameter.grad

    def gradient(self):
        return np.concatenate([np.asarray(p.grad).ravel() for p in self.parameters])


class TorchEngine(ArrayEngine):
    def __init__(self, arrays, images, labels):
        self.parameters = [torch.tensor(a, requires_grad=True) for a in arrays]
        self.images, self.labels = images, labels

    def step(self):
        w1, b1, w2, b2 = self.parameters
        logits = (self.images @ w1 + b1).relu() @ w2 + b2
        loss = torch.nn.functional.cross_entropy(logits, self.labels)
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= LEARNING_RATE * parameter.grad


def measure(rounds):
    rng = np.random.default_rng(0)
    inputs, hidden, classes = SIZES
    arrays = [
        rng.normal(0, np.sqrt(2 / inputs), (inputs, hidden)),
        np.zeros(hidden),
        rng.normal(0, np.sqrt(2 / hidden), (hidden, classes)),
        np.zeros(classes),
    ]
    data = digits()
    images, labels = data.train_images[:BATCH], data.train_labels[:BATCH]
    few = images[:SCALAR_BATCH], labels[:SCALAR_BATCH]

    small = [kind(arrays, *few) for kind in (ArrayEngine, TorchEngine, ScalarEngine)]
    for engine in small:
        engine.step()
        assert np.allclose(engine.gradient(), small[0].gradient(), rtol=1e-9, atol=1e-12)

    engines = {
        "bpkit.autodiff": ArrayEngine(arrays, images, labels),
        "torch eager": TorchEngine(arrays, images, labels),
        "bpkit.autodiff, 2 images": ArrayEngine(arrays, *few),
        "scalar engine, 2 images": ScalarEngine(arrays, *few),
    }
    steps = {name: 1 if name.startswith("scalar") else STEPS for name in engines}
    batch = {name: len(few[0]) if name.endswith("2 images") else BATCH for name in engines}
    times = in_turn({name: engine.step for name, engine in engines.items()}, rounds, steps)
    per_image = {name: [t / batch[name] for t in times[name]] for name in engines}

    results = {}
    for name in engines:
        results[f"{name}: microseconds per step"] = 1e6 * np.median(times[name])
        results[f"{name}: ns per multiply-add"] = 1e9 * np.median(per_image[name]) / MULTIPLY_ADDS
    for first, second in [
        ("bpkit.autodiff", "torch eager"),
        ("scalar engine, 2 images", "bpkit.autodiff, 2 images"),
        ("scalar engine, 2 images", "bpkit.autodiff"),
    ]:
        results[f"{first} / {second}"] = ratios(per_image, first, second)
    return results
