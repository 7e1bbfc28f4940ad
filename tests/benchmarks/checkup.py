"""What does a checkup cost?  Ratios to one training step for chapter 8.

``bpkit.checkup`` and ``bpkit.find_nonfinite`` on three untrained models with eight batches each,
against plain training steps of a copy.
"""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bpkit import checkup, find_nonfinite
from measured import in_turn, ratios


def mlp():
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    return model, torch.randn(8, 32, 64), torch.randint(10, (8, 32))


def convolutions():
    def block(a, b):
        return nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)

    model = nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(128, 10))
    return model, torch.randn(8, 32, 1, 8, 8), torch.randint(10, (8, 32))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(self.body(self.table(x)).mean(1))


def transformer():
    return Transformer(), torch.randint(100, (8, 16, 24)), torch.randint(10, (8, 16))


MODELS = {"MLP": mlp, "convolutions": convolutions, "transformer": transformer}


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def training(model, batch):
    """A step of a copy: how much a checkup looks at depends on what the model has learned."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step():
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    return step


def runs(make):
    torch.manual_seed(0)
    model, x, y = make()
    batches = list(zip(x, y, strict=True))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return {
        "checkup": lambda: checkup(model, loss_fn, batches, optimizer),
        "find_nonfinite": lambda: find_nonfinite(model, loss_fn, batches[0]),
        "step": training(model, batches[0]),
    }


def measure(rounds):
    results = {}
    for name, make in MODELS.items():
        times = in_turn(runs(make), rounds, {"find_nonfinite": 5, "step": 32})
        results[f"step, {name}: ms"] = np.median(times["step"]) * 1e3
        for helper in ("checkup", "find_nonfinite"):
            results[f"{helper} / step, {name}"] = ratios(times, helper, "step")
    return results
