"""Fifty healthy programs as people write them: does the diagnosis leave all of them in peace?

No two share both a family of models and a kind of loop; each names its own in the decorator, and
each really trains: its measure, most often the loss over all batches, falls by a tenth at least.
They were written before any rule was run on them, so that the first run counted for something: five
of the fifty were wronged (``checkup`` accused one, ``watch`` three, and on a fifth it broke off).
The rules behind it were repaired. Two programs were repaired as well, where the tools were right:
their rates were too high, on some seeds or for plain steps.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import healthy
from tests.cases.sound import classify, images, split


@dataclass(frozen=True)
class Kind:
    """``measure(model, loss_fn, batches)`` is what training lowers."""

    family: str
    loop: str
    measure: Callable


KINDS: dict[str, Kind] = {}


def mean_loss(model, loss_fn, batches):
    return sum(float(loss_fn(model, batch).detach()) for batch in batches) / len(batches)


def trains(family: str, loop: str, measure: Callable = mean_loss):
    """Register a healthy program with its family of models, kind of loop and measure."""

    def register(make: Callable) -> Callable:
        KINDS[make.__name__] = Kind(family, loop, measure)
        return healthy(make)

    return register


def regress(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def blobs(count, classes=4, size=6, spread=0.7):
    y = torch.arange(count) % classes
    return torch.randn(classes, size)[y] * 1.5 + spread * torch.randn(count, size), y


def waves(count, length=20):
    t = torch.arange(length) * 0.4
    return torch.sin(t * (0.5 + torch.rand(count, 1)) + 6 * torch.rand(count, 1))


# Sequences.


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).squeeze(-1)


@trains("Elman network", "curriculum of growing lengths")
def sequences_grow_longer(seed):
    torch.manual_seed(seed)
    model = RunningMean()
    x = torch.rand(96, 12, 2)
    y = (x[..., 0] * x[..., 1]).cumsum(1) / torch.arange(1, 13)

    def train(model, loss_fn, optimizer, batches):
        for length in (3, 6, 12):
            for _ in range(3):
                for x, y in batches:
                    optimizer.zero_grad()
                    loss_fn(model, (x[:, :length], y[:, :length])).backward()
                    optimizer.step()

    return model, regress, torch.optim.Adam(model.parameters(), 5e-3), split(16, x, y), train


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 20, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(20, 1)

    def forward(self, x):
        states, _ = self.gru(x.unsqueeze(-1))
        return self.head(states[:, -1]).squeeze(-1)


@trains("GRU", "step schedule by epoch, a shuffling loader")
def forecast_from_a_loader(seed):
    torch.manual_seed(seed)
    model = Forecast()
    x = waves(128)
    loader = DataLoader(TensorDataset(x[:, :-1], x[:, -1]), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model, loss_fn, optimizer, loader):
        scheduler = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        model.train()
        for _epoch in range(8):
            running = 0.0
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                running += loss.item() * len(batch[0])
            scheduler.step()

    return model, regress, optimizer, loader, train


class OwnBreath(nn.Module):
    """An LSTM cell that is fed its own prediction with a probability, the truth otherwise."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(1, 16)
        self.head = nn.Linear(16, 1)
        self.truth = 1.0
        self.dice = random.Random(0)

    def forward(self, x):
        h = c = x.new_zeros(len(x), 16)
        shown, outs = x[:, :1], []
        for t in range(x.shape[1] - 1):
            h, c = self.cell(shown, (h, c))
            guess = self.head(h)
            outs.append(guess)
            own = t > 3 and self.dice.random() > self.truth
            shown = guess.detach() if own else x[:, t + 1 : t + 2]
        return torch.cat(outs, 1)


@trains("LSTM cell", "scheduled sampling")
def fed_its_own_words(seed):
    torch.manual_seed(seed)
    model = OwnBreath()

    def loss_fn(model, x):
        return F.smooth_l1_loss(model(x), x[:, 1:])

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(6):
            model.truth = 0.9**epoch
            for x in batches:
                optimizer.zero_grad(set_to_none=True)
                loss_fn(model, x).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

    batches = list(waves(80, 14).split(16))
    return model, loss_fn, torch.optim.RMSprop(model.parameters(), 5e-3), batches, train


class Causal(nn.Module):
    def __init__(self, width, step):
        super().__init__()
        self.pad = (2 * step, 0)
        self.conv = parametrizations.weight_norm(nn.Conv1d(width, width, 3, dilation=step))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(F.relu(self.conv(F.pad(x, self.pad))))


@trains("temporal convolutions", "one-cycle schedule by batch")
def one_cycle_of_causal_convolutions(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 12, 1), *(Causal(12, 2**i) for i in range(3)), nn.Conv1d(12, 1, 1)
    )
    x = waves(96, 25).unsqueeze(1)
    batches = split(16, x[..., :-1], x[..., 1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, nesterov=True)

    def train(model, loss_fn, optimizer, batches):
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=8 * len(batches))
        for _ in range(8):
            for batch in batches:
                loss = loss_fn(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()

    return model, regress, optimizer, batches, train


class Reverser(nn.Module):
    def __init__(self, words=12, size=24):
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.reader = nn.GRU(size, size, batch_first=True)
        self.writer = nn.GRU(size, size, batch_first=True)
        self.mix = nn.Linear(2 * size, size)
        self.out = nn.Linear(size, words)

    def forward(self, source, target):
        read, state = self.reader(self.embed(source))
        wrote, _ = self.writer(self.embed(target), state)
        attention = torch.softmax(wrote @ read.mT / math.sqrt(read.shape[-1]), -1)
        return self.out(torch.tanh(self.mix(torch.cat([wrote, attention @ read], -1))))


@trains("encoder and decoder with attention", "inverse square root schedule with warm-up")
def reverses_a_sentence(seed):
    torch.manual_seed(seed)
    model = Reverser()
    words = torch.randint(2, 12, (128, 6))
    begin = torch.ones(128, 1, dtype=torch.long)
    target = torch.cat([begin, words.flip(1)], 1)

    def loss_fn(model, batch):
        source, target = batch
        scores = model(source, target[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)

    def train(model, loss_fn, optimizer, batches):
        warm = 10
        schedule = lr_scheduler.LambdaLR(
            optimizer, lambda n: min((n + 1) / warm, math.sqrt(warm / (n + 1)))
        )
        for _ in range(8):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                schedule.step()

    optimizer = torch.optim.Adam(model.parameters(), 1e-2, betas=(0.9, 0.98), eps=1e-9)
    return model, loss_fn, optimizer, split(16, words, target), train


class Chain(nn.Module):
    """Scores of tags and of their neighbours; the loss is the log of a sum over all paths."""

    def __init__(self, tags=4):
        super().__init__()
        self.embed = nn.Embedding(15, 12)
        self.near = nn.Conv1d(12, 12, 3, padding=1)
        self.emit = nn.Linear(12, tags)
        self.follow = nn.Parameter(torch.zeros(tags, tags))

    def forward(self, words, tags):
        x = self.embed(words)
        x = F.relu(self.near(x.mT)).mT
        score = self.emit(x)
        gold = score.gather(2, tags.unsqueeze(2)).sum((1, 2))
        gold = gold + self.follow[tags[:, :-1], tags[:, 1:]].sum(1)
        paths = score[:, 0]
        for t in range(1, words.shape[1]):
            paths = torch.logsumexp(paths.unsqueeze(2) + self.follow, 1) + score[:, t]
        return (torch.logsumexp(paths, 1) - gold).mean()


@trains("conditional random field", "buckets of equal length in random order")
def tags_in_a_chain(seed):
    torch.manual_seed(seed)
    model = Chain()
    batches = []
    for length in (4, 4, 6, 6, 9, 9):
        words = torch.randint(0, 15, (16, length))
        batches.append((words, (words + words.roll(1, 1)) % 4))

    def train(model, loss_fn, optimizer, batches):
        order = list(range(len(batches)))
        for _ in range(8):
            random.Random(seed).shuffle(order)
            for i in order:
                optimizer.zero_grad()
                loss = loss_fn(model, batches[i])
                loss.backward()
                optimizer.step()

    def loss_fn(model, batch):
        return model(*batch)

    return model, loss_fn, torch.optim.NAdam(model.parameters(), 5e-3), batches, train


def turned(x):
    """Rotary positions: pairs of entries turned by an angle that grows with the place."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).unsqueeze(1) * 100.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Letters(nn.Module):
    def __init__(self, letters=10, size=16):
        super().__init__()
        self.embed = nn.Embedding(letters, size)
        self.norms = nn.ModuleList(nn.RMSNorm(size) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(size, 3 * size, bias=False) for _ in range(2))
        self.proj = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(2))
        self.head = nn.Linear(size, letters, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for i, (qkv, proj) in enumerate(zip(self.qkv, self.proj, strict=True)):
            q, k, v = qkv(self.norms[i](x)).chunk(3, -1)
            x = x + proj(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))
        return self.head(self.norms[3](self.norms[2](x)))


@trains("causal language model with rotary positions", "each parameter clipped by its own size")
def letters_clipped_one_by_one(seed):
    torch.manual_seed(seed)
    model = Letters()
    start = torch.randint(0, 10, (96, 1))
    ids = (start + 3 * torch.arange(9)) % 10

    def loss_fn(model, ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def train(model, loss_fn, optimizer, batches):
        for _ in range(6):
            for ids in batches:
                optimizer.zero_grad()
                loss_fn(model, ids).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        most = 0.1 * p.norm().clamp(min=1e-3)
                        p.grad.mul_((most / (p.grad.norm() + 1e-6)).clamp(max=1.0))
                optimizer.step()

    return model, loss_fn, torch.optim.AdamW(model.parameters(), 1e-2), list(ids.split(16)), train


class StateSpace(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-2, 2, size))
        self.inp, self.out = nn.Linear(1, size), nn.Linear(size, 1)

    def forward(self, x, state):
        keep, drive, states = torch.sigmoid(self.decay), self.inp(x.unsqueeze(-1)), []
        for t in range(x.shape[1]):
            state = keep * state + (1 - keep) * drive[:, t]
            states.append(state)
        return self.out(torch.stack(states, 1)).squeeze(-1), state


@trains("diagonal state space", "state carried from window to window")
def long_signal_in_windows(seed):
    torch.manual_seed(seed)
    model = StateSpace()
    x = torch.randn(8, 80)
    y = x.clone()
    for t in range(1, 80):
        y[:, t] = 0.8 * y[:, t - 1] + 0.2 * x[:, t]
    batches = list(zip(x.split(10, 1), y.split(10, 1), strict=True))

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0], torch.zeros(8, 16))[0], batch[1])

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(6):
            state = torch.zeros(8, 16)
            for x, y in batches:
                optimizer.zero_grad()
                out, state = model(x, state.detach())
                F.mse_loss(out, y).backward()
                optimizer.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


# Images.


class MixerBlock(nn.Module):
    def __init__(self, places, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(places, 16), nn.GELU(), nn.Linear(16, places))
        self.within = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 16, 2, 2)
        self.blocks = nn.Sequential(MixerBlock(16, 16), MixerBlock(16, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.blocks(self.patch(x).flatten(2).mT).mean(1))


@trains("patch mixer", "accumulation over four batches, the rest of the epoch stepped too")
def mixer_over_four_batches(seed):
    torch.manual_seed(seed)
    model = Mixer()
    batches = split(8, *images(80))

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(6):
            optimizer.zero_grad()
            for i, batch in enumerate(batches):
                first = i - i % 4
                (loss_fn(model, batch) / min(4, len(batches) - first)).backward()
                if i % 4 == 3 or i == len(batches) - 1:
                    optimizer.step()
                    optimizer.zero_grad()

    return model, classify, torch.optim.AdamW(model.parameters(), 5e-3), batches, train


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        a = self.down(x)
        b = self.up(self.deep(F.max_pool2d(a, 2)))
        return self.out(torch.cat([a, b], 1))


@trains("U-net", "a gradient scaler that is switched off, with clipping")
def masks_with_an_idle_scaler(seed):
    torch.manual_seed(seed)
    model = Unet()
    centre = torch.randint(2, 6, (80, 2, 1, 1))
    grid = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"))
    mask = ((grid - centre).abs().amax(1, keepdim=True) <= 1).float()
    x = mask + 0.4 * torch.randn(80, 1, 8, 8)

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch["image"]), batch["mask"])

    def train(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for _ in range(6):
            for batch in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", enabled=False):
                    loss = loss_fn(model, batch)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()

    batches = [{"image": a, "mask": b} for a, b in split(16, x, mask)]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches, train


class Residual(nn.Module):
    def __init__(self, width, stride=1):
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.short = nn.Identity() if stride == 1 else nn.AvgPool2d(2)
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x):
        y = self.bn2(self.two(F.relu(self.bn1(self.one(x)))))
        return F.relu(y + self.short(x))


@trains("residual network", "rate lowered when the validation loss stalls")
def rate_lowered_on_a_plateau(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        Residual(8), Residual(8, 2), nn.AdaptiveAvgPool2d((4, 1)), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    *batches, held = split(16, *images(112))

    def train(model, loss_fn, optimizer, batches):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
        for _ in range(8):
            model.train()
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                scheduler.step(loss_fn(model, held))

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    return model, classify, optimizer, batches, train


@trains("convolutions with group norm", "each example's gradient clipped, then averaged")
def examples_clipped_one_by_one(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 3),
    )  # fmt: skip

    def train(model, loss_fn, optimizer, batches):
        def one(weights, x, y):
            out = torch.func.functional_call(model, weights, (x.unsqueeze(0),))
            return F.cross_entropy(out, y.unsqueeze(0))

        each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))
        for _ in range(5):
            for x, y in batches:
                slopes = each({n: p.detach() for n, p in model.named_parameters()}, x, y)
                size = torch.stack([g.flatten(1).norm(dim=1) for g in slopes.values()]).norm(dim=0)
                share = (1.0 / size.clamp(min=1e-6)).clamp(max=1.0)
                optimizer.zero_grad()
                for n, p in model.named_parameters():
                    p.grad = torch.einsum("n,n...->...", share, slopes[n]) / len(x)
                optimizer.step()

    return model, classify, torch.optim.SGD(model.parameters(), 0.2), split(16, *images(96)), train


class Spectral(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        values = torch.randn(width, width, modes, dtype=torch.cfloat) / width
        self.weight = nn.Parameter(values)
        self.local = nn.Conv1d(width, width, 1)

    def forward(self, x):
        low = torch.fft.rfft(x)[..., : self.modes]
        low = torch.einsum("bim,iom->bom", low, self.weight)
        return F.gelu(torch.fft.irfft(low, n=x.shape[-1]) + self.local(x))


@trains("Fourier operator", "linear warm-up, then cosine, chained")
def operator_on_functions(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(1, 8, 1), Spectral(8, 5), Spectral(8, 5), nn.Conv1d(8, 1, 1))
    x = waves(96, 24).unsqueeze(1)
    y = x.cumsum(-1) * 0.2

    def train(model, loss_fn, optimizer, batches):
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        cool = lr_scheduler.CosineAnnealingLR(optimizer, 40)
        schedule = lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[8])
        for _ in range(8):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                schedule.step()

    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), split(16, x, y), train


class Capsules(nn.Module):
    """Votes that agree get more weight, in three rounds; the length of a capsule is its score."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 4, 4)
        self.votes = nn.Parameter(0.3 * torch.randn(16, 3, 4, 6))

    def forward(self, x):
        low = self.conv(x).view(len(x), 4, 4, 4).permute(0, 2, 3, 1).flatten(1, 2)
        votes = torch.einsum("bni,ncio->bnco", self.squash(low), self.votes)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            high = self.squash((logits.softmax(2).unsqueeze(3) * votes).sum(1))
            logits = logits + (votes.detach() * high.detach().unsqueeze(1)).sum(-1)
        return high.pow(2).sum(-1).add(1e-8).sqrt()

    def squash(self, x):
        size = x.pow(2).sum(-1, keepdim=True)
        return x * size / (1 + size) / (size + 1e-8).sqrt()


@trains("capsules with routing", "cyclic rate")
def routing_by_agreement(seed):
    torch.manual_seed(seed)
    model = Capsules()

    def loss_fn(model, batch):
        length, want = model(batch[0]), F.one_hot(batch[1], 3)
        right = want * F.relu(0.9 - length).pow(2)
        return (right + 0.5 * (1 - want) * F.relu(length - 0.1).pow(2)).sum(1).mean()

    def train(model, loss_fn, optimizer, batches):
        cycle = lr_scheduler.CyclicLR(
            optimizer, 1e-3, 2e-2, step_size_up=6, cycle_momentum=False, mode="triangular2"
        )
        for _ in range(8):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                cycle.step()

    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    return model, loss_fn, optimizer, split(16, *images(96)), train


# Generators and representations.


class Wasserstein(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def off_centre(model, loss_fn, batches):
    """How far the mean of what is made lies from the mean of the data."""
    made = torch.cat([model.maker(noise) for noise, _ in batches]).mean(0)
    return float((made - torch.cat([real for _, real in batches]).mean(0)).norm())


@trains("Wasserstein pair", "four steps of the critic to one of the maker", off_centre)
def critic_kept_in_a_box(seed):
    torch.manual_seed(seed)
    model = Wasserstein()
    batches = [(torch.randn(32, 3), 0.4 * torch.randn(32, 2) + 1.2) for _ in range(8)]

    def loss_fn(model, batch):
        noise, real = batch
        return model.critic(model.maker(noise).detach()).mean() - model.critic(real).mean()

    def train(model, loss_fn, optimizer, batches):
        other = torch.optim.RMSprop(model.maker.parameters(), 5e-3)
        for turn, batch in enumerate(batches * 8):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.critic.parameters():
                    p.clamp_(-0.1, 0.1)
            if turn % 4 == 3:
                other.zero_grad()
                (-model.critic(model.maker(batch[0])).mean()).backward()
                other.step()

    return model, loss_fn, torch.optim.RMSprop(model.critic.parameters(), 5e-3), batches, train


class ConvVae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Flatten())
        self.mean, self.spread = nn.Linear(128, 4), nn.Linear(128, 4)
        self.dec = nn.Sequential(
            nn.Linear(4, 128), nn.ReLU(), nn.Unflatten(1, (8, 4, 4)),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
        )  # fmt: skip
        self.register_buffer("share", torch.tensor(1.0))

    def forward(self, x):
        h = self.enc(x)
        mean, log_var = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        miss = (self.dec(z) - x).pow(2).sum((1, 2, 3)).mean()
        extra = 0.5 * (mean.pow(2) + log_var.exp() - 1 - log_var).sum(1).mean()
        return miss + self.share * extra


@trains("convolutional variational autoencoder", "weight of the divergence warmed up")
def divergence_warmed_up(seed):
    torch.manual_seed(seed)
    model = ConvVae()

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(6):
            model.share.fill_(min(1.0, epoch / 4))
            for x in batches:
                optimizer.zero_grad()
                loss_fn(model, x).backward()
                optimizer.step()

    batches = list(images(96)[0].split(16))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    return model, lambda model, x: model(x), optimizer, batches, train


@trains("contrastive pairs", "bfloat16 autocast")
def two_views_in_half_precision(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(),
        nn.Linear(16, 8),
    )  # fmt: skip
    x = torch.randn(128, 12)

    def loss_fn(model, x):
        views = torch.cat([x + 0.3 * torch.randn_like(x) for _ in range(2)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = model(views)
        z = F.normalize(z.float(), dim=1)
        score = (z @ z.T / 0.3).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        mate = torch.arange(len(z)).roll(len(x))
        return F.cross_entropy(score, mate)

    def train(model, loss_fn, optimizer, batches):
        for _ in range(6):
            for x in batches:
                loss = loss_fn(model, x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=1e-4)
    return model, loss_fn, optimizer, list(x.split(32)), train


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
        self.text = nn.EmbeddingBag(20, 8)
        self.scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, picture, words):
        return F.normalize(self.image(picture), dim=1), F.normalize(self.text(words), dim=1)

    def compare(self, a, b):
        score = self.scale.exp() * a @ b.T
        mate = torch.arange(len(a))
        return (F.cross_entropy(score, mate) + F.cross_entropy(score.T, mate)) / 2


@trains("picture and text towers", "gradients of a large batch cached, then chunk by chunk")
def large_batch_in_two_passes(seed):
    torch.manual_seed(seed)
    model = Towers()
    words = torch.randint(0, 20, (192, 4))
    picture = torch.randn(20, 10)[words].sum(1) + 0.2 * torch.randn(192, 10)

    def loss_fn(model, batch):
        return model.compare(*model(*batch))

    def train(model, loss_fn, optimizer, batches):
        for picture, words in batches * 8:
            optimizer.zero_grad()
            pieces = split(16, picture, words)
            with torch.no_grad():
                whole = [
                    torch.cat(z) for z in zip(*(model(*piece) for piece in pieces), strict=True)
                ]
            whole = [z.requires_grad_() for z in whole]
            model.compare(*whole).backward()
            slopes = split(16, *(z.grad for z in whole))
            for piece, slope in zip(pieces, slopes, strict=True):
                torch.autograd.backward(model(*piece), slope)
            optimizer.step()

    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return model, loss_fn, optimizer, split(48, picture, words), train


class Larger(torch.optim.Optimizer):
    """Each weight moves by a share of its own size, whatever the gradient's."""

    def __init__(self, parameters, lr=0.02, momentum=0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                ratio = (p.norm() / (p.grad.norm() + 1e-9)).clamp(min=1e-3) if p.ndim > 1 else 1.0
                state = self.state[p].setdefault("velocity", torch.zeros_like(p))
                state.mul_(group["momentum"]).add_(p.grad * ratio, alpha=group["lr"])
                p.sub_(state)


@trains("redundancy reduction between twins", "an optimizer of one's own")
def twins_and_an_own_optimizer(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 6))

    def loss_fn(model, x):
        a, b = (model(x + 0.2 * torch.randn_like(x)) for _ in range(2))
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (a, b))
        cross = a.T @ b / len(x)
        on = (torch.diagonal(cross) - 1).pow(2).sum()
        off = cross.pow(2).sum() - torch.diagonal(cross).pow(2).sum()
        return on + 0.05 * off

    def train(model, loss_fn, optimizer, batches):
        for _ in range(8):
            for x in batches:
                optimizer.zero_grad()
                loss_fn(model, x).backward()
                optimizer.step()

    batches = list(torch.randn(192, 10).split(32))
    return model, loss_fn, Larger(model.parameters()), batches, train


def reconstructed(model, loss_fn, batches):
    """Mean squared error after one step up and down."""
    return sum(float(F.mse_loss(model.down(model.up(v)), v)) for v in batches) / len(batches)


class Boltzmann(nn.Module):
    def __init__(self, seen=16, hidden=12):
        super().__init__()
        self.weight = nn.Parameter(0.05 * torch.randn(hidden, seen))
        self.seen, self.hidden = nn.Parameter(torch.zeros(seen)), nn.Parameter(torch.zeros(hidden))

    def up(self, v):
        return torch.sigmoid(F.linear(v, self.weight, self.hidden))

    def down(self, h):
        return torch.sigmoid(F.linear(h, self.weight.T, self.seen))

    def forward(self, v):
        """Free energy of each row."""
        return -(v @ self.seen) - F.softplus(F.linear(v, self.weight, self.hidden)).sum(1)


@trains(
    "restricted Boltzmann machine", "difference of energies, one step of a chain", reconstructed
)
def contrastive_divergence(seed):
    torch.manual_seed(seed)
    model = Boltzmann()
    kind = torch.bernoulli(torch.full((4, 16), 0.5))[torch.arange(128) % 4]
    v = torch.where(torch.rand(128, 16) < 0.05, 1 - kind, kind)

    def loss_fn(model, v):
        with torch.no_grad():
            dream = torch.bernoulli(model.down(torch.bernoulli(model.up(v))))
        return model(v).mean() - model(dream).mean()

    def train(model, loss_fn, optimizer, batches):
        for _ in range(12):
            for v in batches:
                optimizer.zero_grad()
                loss_fn(model, v).backward()
                optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    return model, loss_fn, optimizer, list(v.split(16)), train


def gap_to_noise(model, loss_fn, batches):
    """Energy of the data less that of points from a wide cloud."""
    cloud = 3 * torch.randn(256, 2)
    return float(model(torch.cat(batches)).mean() - model(cloud).mean()) + 1.0


@trains("energy of points", "Langevin negatives from a replay buffer", gap_to_noise)
def negatives_from_a_buffer(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
    )
    angle = 6.28 * torch.rand(160, 1)
    ring = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(160, 2)

    def walked(model, x):
        for p in model.parameters():
            p.requires_grad_(False)
        for _ in range(8):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            x = x - 0.1 * slope + 0.05 * torch.randn_like(x)
        for p in model.parameters():
            p.requires_grad_(True)
        return x.detach()

    def contrast(model, real, fake):
        a, b = model(real), model(fake)
        return a.mean() - b.mean() + 0.1 * (a.pow(2) + b.pow(2)).mean()

    def loss_fn(model, real):
        return contrast(model, real, walked(model, torch.randn_like(real)))

    def train(model, loss_fn, optimizer, batches):
        buffer = torch.randn(128, 2)
        for _ in range(4):
            for real in batches:
                pick = torch.randint(128, (len(real),))
                fresh = torch.rand(len(real), 1) < 0.1
                fake = walked(model, torch.where(fresh, torch.randn(len(real), 2), buffer[pick]))
                buffer[pick] = fake
                optimizer.zero_grad()
                contrast(model, real, fake).backward()
                clip_grad_norm_(model.parameters(), 2.0)
                optimizer.step()

    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    return model, loss_fn, optimizer, list(ring.split(32)), train


class Masked(nn.Linear):
    def __init__(self, mask):
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.float())

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class Autoregressive(nn.Module):
    """Each entry gets mean and scale from the entries before it."""

    def __init__(self, size=3, width=24):
        super().__init__()
        entry, unit = torch.arange(1, size + 1), torch.arange(width) % (size - 1) + 1
        self.first = Masked(unit.unsqueeze(1) >= entry)
        self.second = Masked((entry.unsqueeze(1) > unit).repeat(2, 1))

    def forward(self, x):
        mean, log_scale = self.second(torch.tanh(self.first(x))).chunk(2, 1)
        z = (x - mean) * torch.exp(-log_scale)
        return (0.5 * z.pow(2) + log_scale + 0.5 * math.log(2 * math.pi)).sum(1)


@trains("masked autoregressive density", "noise added to the gradients")
def density_with_noisy_gradients(seed):
    torch.manual_seed(seed)
    model = Autoregressive()
    a = torch.randn(160, 1)
    x = torch.cat([a, a.pow(2) + 0.2 * torch.randn(160, 1), 0.5 * a + 0.1 * torch.randn(160, 1)], 1)

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(8):
            for x in batches:
                optimizer.zero_grad()
                loss_fn(model, x).backward()
                for p in model.parameters():
                    p.grad.add_(torch.randn_like(p.grad), alpha=0.01 / (1 + epoch) ** 0.55)
                optimizer.step()

    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return model, lambda model, x: model(x).mean(), optimizer, list(x.split(20)), train


class Dictionary(nn.Module):
    def __init__(self, size=12, atoms=30):
        super().__init__()
        self.atoms = nn.Parameter(F.normalize(torch.randn(atoms, size), dim=1))
        self.enc = nn.Linear(size, atoms)
        self.middle = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        code = F.relu(self.enc(x - self.middle))
        return code @ self.atoms + self.middle, code


@trains("sparse autoencoder", "weights projected back after each step")
def atoms_of_unit_length(seed):
    torch.manual_seed(seed)
    model = Dictionary()
    with torch.no_grad():
        model.enc.weight.copy_(model.atoms)
    source = F.normalize(torch.randn(20, 12), dim=1)
    x = (torch.rand(160, 20) * (torch.rand(160, 20) < 0.15)) @ source

    def loss_fn(model, x):
        guess, code = model(x)
        return (guess - x).pow(2).sum(1).mean() + 0.02 * code.abs().sum(1).mean()

    def train(model, loss_fn, optimizer, batches):
        for _ in range(6):
            for x in batches:
                optimizer.zero_grad()
                loss_fn(model, x).backward()
                along = (model.atoms.grad * model.atoms).sum(1, keepdim=True)
                model.atoms.grad -= along.detach() * model.atoms.detach()
                optimizer.step()
                with torch.no_grad():
                    model.atoms.div_(model.atoms.norm(dim=1, keepdim=True))

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), list(x.split(20)), train


@dataclass
class Hidden:
    rows: torch.Tensor
    hide: torch.Tensor


def hide_some(items):
    rows = torch.stack(items)
    return Hidden(rows, torch.rand(rows.shape) < 0.3)


@trains("masked autoencoder on a table", "masks drawn by the loader's collate function")
def columns_filled_in(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)
    )
    rows = torch.randn(128, 3) @ torch.randn(3, 8)
    loader = DataLoader(
        list(rows), batch_size=16, shuffle=True, collate_fn=hide_some, drop_last=True
    )

    def loss_fn(model, batch):
        shown = batch.rows.masked_fill(batch.hide, 0.0)
        guess = model(torch.cat([shown, batch.hide.float()], 1))
        return (guess - batch.rows)[batch.hide].pow(2).mean()

    def train(model, loss_fn, optimizer, loader):
        for _epoch in range(8):
            for batch in loader:
                for p in model.parameters():
                    p.grad = None
                loss_fn(model, batch).backward()
                optimizer.step()

    return model, loss_fn, torch.optim.Adamax(model.parameters(), 1e-2), loader, train


# Solvers and dynamics.


class Equilibrium(nn.Module):
    """The layer's output is where it stays; the gradient solves a linear equation there."""

    def __init__(self, size=5, width=16):
        super().__init__()
        self.inp = nn.Linear(size, width)
        self.again = parametrizations.spectral_norm(nn.Linear(width, width, bias=False))
        self.out = nn.Linear(width, 1)

    def step(self, z, x):
        return torch.tanh(0.8 * self.again(z) + self.inp(x))

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros(len(x), 16)
            for _ in range(25):
                z = self.step(z, x)
        z = self.step(z, x)
        if z.requires_grad:
            start = z.detach().requires_grad_()
            after = self.step(start, x)

            def solve(upstream):
                total = upstream
                for _ in range(25):
                    (back,) = torch.autograd.grad(after, start, total, retain_graph=True)
                    total = upstream + back
                return total

            z.register_hook(solve)
        return self.out(z).squeeze(1)


@trains("deep equilibrium", "gradient by a fixed point in a hook, zeroed at the end")
def implicit_gradient(seed):
    torch.manual_seed(seed)
    model = Equilibrium()
    x = torch.randn(96, 5)
    y = torch.tanh(x[:, 0] * x[:, 1]) + 0.3 * x[:, 2]

    def train(model, loss_fn, optimizer, batches):
        for _ in range(6):
            for batch in batches:
                loss_fn(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), split(16, x, y), train


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))

    def forward(self, x, steps=5, h=0.2):
        path = []
        for _ in range(steps):
            a = self.net(x)
            b = self.net(x + h / 2 * a)
            c = self.net(x + h / 2 * b)
            d = self.net(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
            path.append(x)
        return torch.stack(path, 1)


@trains("neural differential equation", "saved after half the epochs, loaded and resumed")
def resumed_from_a_checkpoint(seed):
    torch.manual_seed(seed)
    model = Flow()
    start = torch.randn(80, 2)
    turn = torch.linalg.matrix_exp(0.2 * torch.tensor([[-0.2, 1.5], [-1.5, -0.2]]))
    path = [start]
    for _ in range(5):
        path.append(path[-1] @ turn)
    batches = split(16, start, torch.stack(path[1:], 1))

    def train(model, loss_fn, optimizer, batches):
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)

        def epoch():
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
            scheduler.step()

        for _ in range(5):
            epoch()
        parts = (model, optimizer, scheduler)
        saved = copy.deepcopy([part.state_dict() for part in parts])
        epoch()  # lost: the machine went down here
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
        for _ in range(5):
            epoch()

    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches, train


class Heat(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
        )

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


@trains("heat equation on collocation points", "Adam first, a quasi-Newton method after")
def adam_then_quasi_newton(seed):
    torch.manual_seed(seed)
    model = Heat()
    x, t = torch.rand(120, 1), torch.rand(120, 1)

    def loss_fn(model, batch):
        x, t = (z.clone().requires_grad_() for z in batch)
        u = model(x, t)
        ux, ut = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (uxx,) = torch.autograd.grad(ux.sum(), x, create_graph=True)
        inside = (ut - 0.1 * uxx).pow(2).mean()
        begin = (model(x, torch.zeros_like(t)) - torch.sin(math.pi * x)).pow(2).mean()
        edges = [model(torch.full_like(x, end), t).pow(2).mean() for end in (0.0, 1.0)]
        return inside + begin + sum(edges)

    def train(model, loss_fn, optimizer, batches):
        for _ in range(40):
            optimizer.zero_grad()
            loss_fn(model, batches[0]).backward()
            optimizer.step()
        second = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")

        def closure():
            second.zero_grad()
            loss = loss_fn(model, batches[0])
            loss.backward()
            return loss

        for _ in range(3):
            second.step(closure)

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), [(x, t)], train


class Koopman(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 6))
        self.drop = nn.Linear(6, 2)
        self.move = nn.Linear(6, 6, bias=False)
        nn.init.eye_(self.move.weight)

    def forward(self, x, steps):
        z, path = self.lift(x), []
        for _ in range(steps):
            path.append(self.drop(z))
            z = self.move(z)
        return torch.stack(path, 1)


@trains("linear dynamics in a lifted space", "closures with plain gradient descent")
def pendulum_by_closures(seed):
    torch.manual_seed(seed)
    model = Koopman()
    x = torch.randn(72, 2) * 0.7
    path = [x]
    for _ in range(5):
        x = x + 0.15 * torch.stack([x[:, 1], -torch.sin(x[:, 0])], 1)
        path.append(x)

    def loss_fn(model, path):
        guess = model(path[:, 0], path.shape[1])
        return (guess - path).square().mean()

    def train(model, loss_fn, optimizer, batches):
        for _ in range(12):
            for batch in batches:

                def closure(batch=batch):
                    optimizer.zero_grad()
                    loss = loss_fn(model, batch)
                    loss.backward()
                    return loss

                optimizer.step(closure)

    batches = list(torch.stack(path, 1).split(12))
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.1, momentum=0.8), batches, train


# Graphs, sets and rankings.


class GraphConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x, adjacency):
        x = F.dropout(F.relu(adjacency @ self.one(x)), 0.2, self.training)
        return adjacency @ self.two(x)


@trains("graph convolution by adjacency", "full batch, stopped early, best weights restored")
def best_weights_restored(seed):
    torch.manual_seed(seed)
    model = GraphConv()
    y = torch.arange(60) % 3
    near = torch.rand(60, 60) < torch.where(y.unsqueeze(1) == y, 0.3, 0.03)
    near = (near | near.T).float().fill_diagonal_(1.0)
    scale = near.sum(1).rsqrt()
    graph = {
        "x": torch.randn(3, 6)[y] + torch.randn(60, 6),
        "adjacency": scale.unsqueeze(1) * near * scale, "y": y, "known": torch.arange(60) < 30,
    }  # fmt: skip

    def score(model, graph, rows):
        out = model(graph["x"], graph["adjacency"])
        return F.cross_entropy(out[rows], graph["y"][rows])

    def loss_fn(model, graph):
        return score(model, graph, graph["known"])

    def train(model, loss_fn, optimizer, batches):
        best, kept, waited = math.inf, None, 0
        for _epoch in range(60):
            model.train()
            optimizer.zero_grad()
            loss_fn(model, batches[0]).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                held = float(score(model, batches[0], ~batches[0]["known"]))
            if held < best:
                best, kept, waited = held, copy.deepcopy(model.state_dict()), 0
            elif (waited := waited + 1) == 8:
                break
        model.load_state_dict(kept)

    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4)
    return model, loss_fn, optimizer, [graph], train


class SetAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.seed = nn.Linear(2, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.among = nn.MultiheadAttention(16, 2, batch_first=True)
        self.pool = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x):
        x = self.inp(x)
        x = self.norm(x + self.among(x, x, x, need_weights=False)[0])
        pooled, _ = self.pool(self.seed.expand(len(x), -1, -1), x, x)
        return self.out(pooled[:, 0]).squeeze(1)


@trains("attention over sets", "slow weights that follow the fast ones every five steps")
def slow_and_fast_weights(seed):
    torch.manual_seed(seed)
    model = SetAttention()
    x = torch.rand(96, 7, 2)
    y = x[..., 0].amax(1) - x[..., 1].amin(1)

    def train(model, loss_fn, optimizer, batches):
        slow = [p.detach().clone() for p in model.parameters()]
        for count, batch in enumerate(batches * 8, 1):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            if count % 5 == 0:
                with torch.no_grad():
                    for held, p in zip(slow, model.parameters(), strict=True):
                        held.lerp_(p, 0.5)
                        p.copy_(held)

    return model, regress, torch.optim.RAdam(model.parameters(), 1e-2), split(16, x, y), train


@trains("ranking by pairs", "a generator without an end, cut off after some steps")
def better_before_worse(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 1))
    x = torch.randn(200, 7)
    grade = (x[:, 0] + x[:, 1].abs() + 0.3 * torch.randn(200)).mul(1.5).round().clamp(0, 4)

    def queries():
        while True:
            pick = torch.randint(200, (12,))
            yield x[pick], grade[pick]

    def loss_fn(model, batch):
        score = model(batch[0]).squeeze(1)
        better = batch[1].unsqueeze(1) > batch[1]
        return F.softplus(score - score.unsqueeze(1))[better].mean()

    def train(model, loss_fn, optimizer, batches):
        for batch in itertools.islice(queries(), 60):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

    batches = list(itertools.islice(queries(), 12))
    return model, loss_fn, torch.optim.Adagrad(model.parameters(), 0.05), batches, train


class Tastes(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = (nn.Embedding(n, 6, sparse=True) for n in (24, 30))
        self.liked = nn.Embedding(30, 1, sparse=True)
        nn.init.zeros_(self.liked.weight)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1) + self.liked(item).squeeze(-1)


@trains("factors of users and items", "sparse Adagrad, negatives drawn at each step")
def one_item_over_another(seed):
    torch.manual_seed(seed)
    model = Tastes()
    user = torch.randint(0, 24, (192,))
    item = (user + 3 * torch.randint(0, 10, (192,))) % 30

    def loss_fn(model, batch):
        user, item = batch
        other = (item + torch.randint(1, 3, item.shape)) % 30
        return -F.logsigmoid(model(user, item) - model(user, other)).mean()

    def train(model, loss_fn, optimizer, batches):
        for _ in range(8):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    optimizer = torch.optim.Adagrad(model.parameters(), 0.2)
    return model, loss_fn, optimizer, split(32, user, item), train


# Statistics.


@trains("linear regression", "quasi-Newton with a line search on the whole data")
def least_squares(seed):
    torch.manual_seed(seed)
    model = nn.Linear(6, 1).double()
    x = torch.randn(150, 6, dtype=torch.double)
    y = x @ torch.randn(6, 1, dtype=torch.double) + 0.1 * torch.randn(150, 1, dtype=torch.double)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

    def train(model, loss_fn, optimizer, batches):
        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model, batches[0])
            loss.backward()
            return loss

        before = math.inf
        while before - (now := float(optimizer.step(closure))) > 1e-6:
            before = now

    return model, regress, optimizer, [(x, y)], train


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("wave", 2 * torch.randn(2, 32))
        self.register_buffer("phase", 6.28 * torch.rand(32))
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(torch.cos(x @ self.wave + self.phase) / 4).squeeze(1)


@trains("expectiles on random features", "stochastic weight averaging with its own schedule")
def averaged_at_the_end(seed):
    torch.manual_seed(seed)
    model = Fourier()
    x = torch.rand(128, 2) * 2 - 1
    y = torch.sin(3 * x[:, 0]) + 1 + 0.3 * torch.randn(128)

    def loss_fn(model, batch):
        error = batch[1] - model(batch[0])
        return (torch.where(error > 0, 0.8, 0.2) * error.pow(2)).mean()

    def train(model, loss_fn, optimizer, batches):
        average = swa_utils.AveragedModel(model)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 6)
        constant = swa_utils.SWALR(optimizer, 0.1, anneal_epochs=2)
        for epoch in range(10):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
            if epoch < 6:
                schedule.step()
            else:
                average.update_parameters(model)
                constant.step()
        swa_utils.update_bn([x for x, _ in batches], average)

    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    return model, loss_fn, optimizer, split(16, x, y), train


@trains("proportional hazards", "full batch, steps by the sign of the gradient")
def survival_by_sign(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 16), nn.SELU(), nn.Linear(16, 1, bias=False))
    x = torch.randn(120, 5)
    time = torch.distributions.Exponential(torch.exp(x[:, 0] - x[:, 1])).sample()
    order = time.argsort(descending=True)
    seen = torch.rand(120) < 0.8

    def loss_fn(model, batch):
        x, seen = batch
        risk = model(x).squeeze(1)
        return -((risk - torch.logcumsumexp(risk, 0))[seen]).mean()

    def train(model, loss_fn, optimizer, batches):
        for _ in range(40):
            optimizer.zero_grad()
            loss_fn(model, batches[0]).backward()
            optimizer.step()

    optimizer = torch.optim.Rprop(model.parameters(), 1e-2)
    return model, loss_fn, optimizer, [(x[order], seen[order])], train


class Process(nn.Module):
    def __init__(self):
        super().__init__()
        self.length, self.scale, self.noise = (
            nn.Parameter(torch.tensor(v, dtype=torch.double)) for v in (1.0, 0.0, 0.0)
        )

    def forward(self, x, y):
        gap = (x.unsqueeze(1) - x).pow(2)
        kernel = self.scale.exp() * torch.exp(-0.5 * gap * torch.exp(-2 * self.length))
        kernel = kernel + (self.noise.exp() + 1e-6) * torch.eye(len(x), dtype=x.dtype)
        root = torch.linalg.cholesky(kernel)
        z = torch.linalg.solve_triangular(root, y.unsqueeze(1), upper=False)
        half = 0.5 * z.pow(2).sum() + root.diagonal().log().sum()
        return half / len(x) + 0.5 * math.log(2 * math.pi)


@trains("Gaussian process", "until the loss no longer changes")
def marginal_likelihood(seed):
    torch.manual_seed(seed)
    model = Process()
    x = torch.rand(60, dtype=torch.double) * 6
    y = torch.sin(2 * x) + 0.1 * torch.randn(60, dtype=torch.double)

    def loss_fn(model, batch):
        return model(*batch)

    def train(model, loss_fn, optimizer, batches):
        before = math.inf
        for _ in range(80):
            optimizer.zero_grad()
            loss = loss_fn(model, batches[0])
            loss.backward()
            optimizer.step()
            if abs(before - float(loss)) < 1e-4:
                break
            before = float(loss)

    return model, loss_fn, torch.optim.Adam(model.parameters(), 0.05), [(x, y)], train


class Fair(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(5, 1)
        self.price = nn.Parameter(torch.zeros(()))


def missed_by(model, loss_fn, batches):
    """Cross-entropy and the breach of the bound."""
    total = 0.0
    for x, y, group in batches:
        out = model.score(x).squeeze(1)
        gap = torch.sigmoid(out)[group].mean() - torch.sigmoid(out)[~group].mean()
        total += float(F.binary_cross_entropy_with_logits(out, y) + F.relu(gap.abs() - 0.2))
    return total / len(batches)


@trains("logistic regression with a bound", "weights descend, a multiplier ascends", missed_by)
def multiplier_ascends(seed):
    torch.manual_seed(seed)
    model = Fair()
    x = torch.randn(160, 5)
    group = x[:, 0] + 0.5 * torch.randn(160) > 0
    y = (x[:, 0] + 2 * x[:, 1] > 0).float()

    def loss_fn(model, batch):
        x, y, group = batch
        out = model.score(x).squeeze(1)
        gap = torch.sigmoid(out)[group].mean() - torch.sigmoid(out)[~group].mean()
        return F.binary_cross_entropy_with_logits(out, y) + model.price * (gap - 0.2)

    def train(model, loss_fn, optimizers, batches):
        down, up = optimizers
        for _ in range(8):
            for batch in batches:
                down.zero_grad()
                up.zero_grad()
                loss_fn(model, batch).backward()
                down.step()
                up.step()
                with torch.no_grad():
                    model.price.clamp_(min=0.0)

    optimizers = (
        torch.optim.SGD(model.score.parameters(), 0.3),
        torch.optim.SGD([model.price], 0.3, maximize=True),
    )
    return model, loss_fn, optimizers, split(40, x, y, group), train


class Additive(nn.Module):
    """A sum of one curve for each column; products of columns may be added later."""

    def __init__(self, columns=4):
        super().__init__()
        self.register_buffer("knots", torch.linspace(-2, 2, 9))
        self.curves = nn.Parameter(torch.zeros(columns, 9))
        self.bias = nn.Parameter(torch.zeros(()))
        self.pairs = nn.ModuleList()

    def forward(self, x):
        basis = torch.exp(-2 * (x.unsqueeze(2) - self.knots).pow(2))
        out = (basis * self.curves).sum((1, 2)) + self.bias
        for pair in self.pairs:
            out = out + pair(x[:, :2]).squeeze(1)
        return out


@trains("additive splines", "a part grown and added to the optimizer in the middle")
def a_part_grown_later(seed):
    torch.manual_seed(seed)
    model = Additive()
    x = torch.randn(128, 4)
    y = torch.sin(2 * x[:, 0]) + x[:, 2].abs() + x[:, 0] * x[:, 1]

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(10):
            if epoch == 4:
                model.pairs.append(nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)))
                optimizer.add_param_group({"params": model.pairs[-1].parameters(), "lr": 2e-2})
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    return model, regress, torch.optim.Adam(model.parameters(), 5e-2), split(16, x, y), train


class Tree(nn.Module):
    def __init__(self, depth=3, columns=5):
        super().__init__()
        self.depth = depth
        self.split = nn.Linear(columns, 2**depth - 1)
        self.leaves = nn.Parameter(0.1 * torch.randn(2**depth, 3))
        self.register_buffer("heat", torch.tensor(1.0))

    def forward(self, x):
        right = torch.sigmoid(self.split(x) / self.heat)
        share = x.new_ones(len(x), 1)
        for level in range(self.depth):
            turn = right[:, 2**level - 1 : 2 ** (level + 1) - 1]
            share = torch.stack([share * (1 - turn), share * turn], 2).flatten(1)
        return share @ self.leaves


@trains("soft decision tree", "temperature lowered from epoch to epoch")
def tree_that_hardens(seed):
    torch.manual_seed(seed)
    model = Tree()
    x = torch.randn(128, 5)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(10):
            model.heat.fill_(max(0.3, 0.9**epoch))
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    return model, classify, torch.optim.Adam(model.parameters(), 3e-2), split(16, x, y), train


# Several learners, several tasks.


class Pupil(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x):
        return self.net(x)


@trains("distillation", "train and validation phases in one loop")
def phases_in_one_loop(seed):
    torch.manual_seed(seed)
    model = Pupil()
    teacher = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 4)).eval()
    x, y = blobs(160)
    held = split(16, x[128:], y[128:])
    first = torch.optim.Adam(teacher.parameters(), 1e-2)
    for _ in range(40):
        first.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        first.step()

    def loss_fn(model, batch):
        x, y = batch
        with torch.no_grad():
            soft = (teacher(x) / 3).softmax(1)
        out = model(x)
        hard = F.cross_entropy(out, y)
        return 0.3 * hard + 0.7 * 9 * F.kl_div(
            (out / 3).log_softmax(1), soft, reduction="batchmean"
        )

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(5):
            for phase, loader in (("train", batches), ("val", held)):
                model.train(phase == "train")
                total = 0.0
                for batch in loader:
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(phase == "train"):
                        loss = loss_fn(model, batch)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
                    total += loss.item()

    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, loss_fn, optimizer, split(16, x[:128], y[:128]), train


class Consistent(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("ramp", torch.tensor(0.0))


@trains("pair of student and averaged teacher", "consistency ramped up, teacher moved by hand")
def averaged_teacher(seed):
    torch.manual_seed(seed)
    model = Consistent()
    x, y = blobs(160)
    known = torch.arange(160) % 4 == 0

    def loss_fn(model, batch):
        x, y, known = batch
        with torch.no_grad():
            calm = model.teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        out = model.student(x + 0.1 * torch.randn_like(x))
        unsure = (out.softmax(1) - calm).pow(2).sum(1).mean()
        return F.cross_entropy(out[known], y[known]) + model.ramp * unsure

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(8):
            model.ramp.fill_(min(1.0, epoch / 5))
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                with torch.no_grad():
                    pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
                    for old, new in pairs:
                        old.mul_(0.95).add_(new, alpha=0.05)

    order = torch.randperm(160)
    batches = split(32, x[order], y[order], known[order])
    optimizer = torch.optim.Adam(model.student.parameters(), 5e-3)
    return model, loss_fn, optimizer, batches, train


class Additional(nn.Module):
    """Two thin matrices that are added to a frozen weight."""

    def __init__(self, out, inp, rank=2):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, inp) / math.sqrt(inp))
        self.b = nn.Parameter(torch.zeros(out, rank))

    def forward(self, weight):
        return weight + self.b @ self.a


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head((x + self.attention(x, x, x)[0]).mean(1))


@trains("thin matrices as a parametrization", "rates by group, warmed up and lowered linearly")
def thin_matrices_on_attention(seed):
    torch.manual_seed(seed)
    model = Attentive().requires_grad_(False)
    inner = model.attention
    parametrize.register_parametrization(inner, "in_proj_weight", Additional(48, 16))
    parametrize.register_parametrization(inner.out_proj, "weight", Additional(16, 16))
    model.head.requires_grad_(True)
    ids = torch.randint(0, 12, (128, 5))
    y = ((ids < 3).sum(1) > 1).long()
    thin = [p for n, p in model.named_parameters() if n.endswith((".a", ".b"))]

    def train(model, loss_fn, optimizer, batches):
        total = 10 * len(batches)
        schedule = lr_scheduler.LambdaLR(
            optimizer, lambda n: min((n + 1) / 8, (total - n) / (total - 8))
        )
        for _ in range(10):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                schedule.step()

    groups = [{"params": thin, "lr": 3e-2}, {"params": model.head.parameters(), "lr": 1e-2}]
    return model, classify, torch.optim.AdamW(groups, weight_decay=0.0), split(16, ids, y), train


class Hyper(nn.Module):
    """A network that writes the weights of another one for each task."""

    def __init__(self):
        super().__init__()
        self.task = nn.Embedding(5, 4)
        self.write = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3 * 8 + 8 + 8))

    def forward(self, x, task):
        w = self.write(self.task(task))
        one, bias, two = w.split([24, 8, 8], 1)
        hidden = torch.tanh(torch.einsum("ni,nih->nh", x, one.view(-1, 3, 8)) + bias)
        return (hidden * two).sum(1)


@trains("network that writes weights", "two phases, each with its own optimizer")
def second_phase_with_momentum(seed):
    torch.manual_seed(seed)
    model = Hyper()
    task = torch.arange(160) % 5
    x = torch.randn(160, 3)
    y = (x * torch.randn(5, 3)[task]).sum(1)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    def fit(model, loss_fn, optimizer, batches, epochs):
        for batch in batches * epochs:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

    def train(model, loss_fn, optimizer, batches):
        fit(model, loss_fn, optimizer, batches, 6)
        finer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        fit(model, loss_fn, finer, batches, 4)

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), split(20, x, task, y), train


class WideDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.EmbeddingBag(30, 1, mode="sum")
        self.deep = nn.Sequential(
            nn.EmbeddingBag(30, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, ids):
        return (self.wide(ids) + self.deep(ids)).squeeze(1)


@trains("wide part and deep part", "parts frozen in turn, epoch by epoch")
def parts_frozen_in_turn(seed):
    torch.manual_seed(seed)
    model = WideDeep()
    ids = torch.randint(0, 30, (160, 4))
    y = (torch.randn(30)[ids].sum(1) > 0).float()

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(8):
            model.wide.requires_grad_(epoch % 2 == 0)
            model.deep.requires_grad_(epoch % 2 == 1)
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
        model.requires_grad_(True)

    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return model, loss_fn, optimizer, split(20, ids, y), train


@trains("prototypes of classes", "episodes of new classes")
def episodes_of_new_classes(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    mixed = torch.randn(3, 8)

    def episode():
        kind = torch.randn(4, 3)
        x = kind.unsqueeze(1) @ mixed + 0.8 * torch.randn(4, 9, 8)
        return x[:, :4], x[:, 4:]

    def loss_fn(model, batch):
        shown, asked = batch
        middle = model(shown).mean(1)
        gap = (model(asked).flatten(0, 1).unsqueeze(1) - middle).pow(2).sum(2)
        return F.cross_entropy(-gap, torch.arange(4).repeat_interleave(5))

    def train(model, loss_fn, optimizer, batches):
        for _ in range(60):
            optimizer.zero_grad()
            loss_fn(model, episode()).backward()
            optimizer.step()

    batches = [episode() for _ in range(10)]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 2e-3), batches, train


def after_three_steps(model, loss_fn, batches):
    total = 0.0
    for x, y in batches:
        copied = copy.deepcopy(model)
        inner = torch.optim.SGD(copied.parameters(), 0.02)
        for _ in range(3):
            inner.zero_grad()
            F.mse_loss(copied(x), y).backward()
            inner.step()
        total += float(F.mse_loss(copied(x), y))
    return total / len(batches)


@trains("sines of many tasks", "inner steps on a copy, the way back as gradient", after_three_steps)
def difference_as_gradient(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))

    def task():
        x = torch.rand(20, 1) * 4 - 2
        return x, (torch.rand(()) + 0.5) * torch.sin(x + torch.rand(()))

    def train(model, loss_fn, optimizer, batches):
        for x, y in batches * 6:
            copied = copy.deepcopy(model)
            inner = torch.optim.SGD(copied.parameters(), 0.02)
            for _ in range(3):
                inner.zero_grad()
                loss_fn(copied, (x, y)).backward()
                inner.step()
            optimizer.zero_grad()
            for p, q in zip(model.parameters(), copied.parameters(), strict=True):
                p.grad = p.detach() - q.detach()
            optimizer.step()

    batches = [task() for _ in range(10)]
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches, train


class Highway(nn.Module):
    def __init__(self, size=12):
        super().__init__()
        self.change = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.gate = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.out = nn.Linear(size, 4)
        for gate in self.gate:
            nn.init.constant_(gate.bias, -1.0)

    def forward(self, x):
        for change, gate in zip(self.change, self.gate, strict=True):
            t = torch.sigmoid(gate(x))
            x = t * torch.relu(change(x)) + (1 - t) * x
        return self.out(x)


@trains("highway network", "gradients of two replicas averaged")
def two_replicas(seed):
    torch.manual_seed(seed)
    model = Highway()

    def train(model, loss_fn, optimizer, batches):
        replicas = [copy.deepcopy(model) for _ in range(2)]
        for _ in range(6):
            for pair in zip(batches[::2], batches[1::2], strict=True):
                for replica, batch in zip(replicas, pair, strict=True):
                    replica.load_state_dict(model.state_dict())
                    replica.zero_grad()
                    loss_fn(replica, batch).backward()
                each = zip(*(replica.parameters() for replica in replicas), strict=True)
                for p, (a, b) in zip(model.parameters(), each, strict=True):
                    p.grad = (a.grad + b.grad) / 2
                optimizer.step()
                optimizer.zero_grad()

    batches = split(16, *blobs(128, size=12))
    return model, classify, torch.optim.SGD(model.parameters(), 0.2), batches, train


class Peers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(2)
        )


@trains("two peers under wrong labels", "each learns from what the other finds easy")
def easy_for_the_other(seed):
    torch.manual_seed(seed)
    model = Peers()
    x, y = blobs(192)
    y = torch.where(torch.rand(192) < 0.2, torch.randint(0, 4, (192,)), y)

    def both(model, batch):
        return [
            F.cross_entropy(peer(batch[0]), batch[1], reduction="none")
            for peer in (model.left, model.right)
        ]

    def loss_fn(model, batch):
        return sum(loss.mean() for loss in both(model, batch))

    def train(model, loss_fn, optimizers, batches):
        for epoch in range(6):
            keep = max(24 - 2 * epoch, 18)
            for batch in batches:
                left, right = both(model, batch)
                easy = left.argsort()[:keep], right.argsort()[:keep]
                pairs = ((left[easy[1]], optimizers[0]), (right[easy[0]], optimizers[1]))
                for loss, optimizer in pairs:
                    optimizer.zero_grad()
                    loss.mean().backward()
                    optimizer.step()

    optimizers = tuple(torch.optim.Adam(p.parameters(), 5e-3) for p in (model.left, model.right))
    return model, loss_fn, optimizers, split(24, x, y), train


@trains("one classifier for several environments", "penalty on a gradient, weighted later")
def alike_in_each_environment(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    weight = [1.0]

    def loss_fn(model, batch):
        total = 0.0
        for x, y in batch:
            scale = torch.ones((), requires_grad=True)
            risk = F.binary_cross_entropy_with_logits(model(x).squeeze(1) * scale, y)
            (slope,) = torch.autograd.grad(risk, scale, create_graph=True)
            total = total + risk + weight[0] * slope.pow(2)
        return total / len(batch)

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(10):
            weight[0] = 1.0 if epoch < 4 else 5.0
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
        weight[0] = 1.0

    batches = []
    for _ in range(6):
        batch = []
        for trust in (0.9, 0.7):
            x = torch.randn(24, 4)
            y = (x[:, 0] + 0.5 * x[:, 1] > 0).float()
            hint = torch.where(torch.rand(24) < trust, y, 1 - y)
            batch.append((torch.cat([x[:, :3], hint.unsqueeze(1)], 1), y))
        batches.append(batch)
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, state):
        h = self.body(state)
        return torch.distributions.Categorical(logits=self.policy(h)), self.value(h).squeeze(1)


def played(model, count=64):
    """One-step games: the right move is the largest entry of the state."""
    state = torch.randn(count, 3)
    with torch.no_grad():
        move = model(state)[0].sample()
    reward = (move == state.argmax(1)).float()
    return state, move, reward


def lost_games(model, loss_fn, batches):
    return 1 - float(played(model, 1000)[2].mean())


@trains("actor and critic", "games played between the steps", lost_games)
def games_between_steps(seed):
    torch.manual_seed(seed)
    model = ActorCritic()

    def loss_fn(model, batch):
        state, move, reward = batch
        policy, value = model(state)
        better = (reward - value).detach()
        gain = (policy.log_prob(move) * better).mean() + 0.01 * policy.entropy().mean()
        return 0.5 * F.mse_loss(value, reward) - gain

    def train(model, loss_fn, optimizer, batches):
        for _ in range(60):
            loss = loss_fn(model, played(model))
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    batches = [played(model) for _ in range(10)]
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train
