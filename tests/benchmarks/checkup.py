"""What does a checkup cost?  Ratios to one training step for chapter 8.

    python tests/benchmarks/checkup.py    # prints a table and stores the numbers in checkup.json

``bpkit.checkup`` and ``bpkit.find_nonfinite`` on three models with eight batches each, against one
plain training step of the same model. CPU time of one thread, in turn, medians.
"""

import time
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from bpkit import checkup, find_nonfinite
from bpkit.style import Table
from measured import store


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


MODELS = {"mlp": mlp, "convolutions": convolutions, "transformer": transformer}


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def seconds(run, *arguments):
    start = time.process_time()
    run(*arguments)
    return time.process_time() - start


def steps(model, batches, optimizer):
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def measure(make, rounds=7):
    """CPU seconds of a checkup, of a search and of one training step."""
    torch.manual_seed(0)
    model, x, y = make()
    batches = list(zip(x, y, strict=True))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    checkup(model, loss_fn, batches, optimizer)
    times = []
    for _ in range(rounds):
        times.append((
            seconds(checkup, model, loss_fn, batches, optimizer),
            seconds(find_nonfinite, model, loss_fn, batches[0]),
            seconds(steps, model, batches * 4, optimizer) / len(batches * 4),
        ))  # fmt: skip
    return [median(column) for column in zip(*times, strict=True)]


def main():
    torch.set_num_threads(1)
    results, rows = {}, []
    for name, make in MODELS.items():
        whole, search, step = measure(make)
        rows.append([name, f"{step * 1e3:.2f}", f"{whole:.2f}", f"{whole / step:.0f}",
                     f"{search / step:.0f}"])  # fmt: skip
        results |= {
            f"{name}_step_ms": step * 1e3,
            f"{name}_checkup_s": whole,
            f"{name}_checkup_over_step": whole / step,
            f"{name}_search_over_step": search / step,
        }
    head = ["model", "step, ms", "checkup, s", "checkup / step", "find_nonfinite / step"]
    print(Table(head, rows), "\n")
    store(__file__, results)


if __name__ == "__main__":
    main()
