"""Healthy programs that look sick to a hasty eye: none of them may raise an alarm."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset

from tests.cases import healthy


def split(size, *tensors):
    return list(zip(*(t.split(size) for t in tensors), strict=True))


def images(count, classes=3, channels=1, side=8):
    """Noise with a bright bar whose row is the label."""
    y = torch.randint(0, classes, (count,))
    x = 0.5 * torch.randn(count, channels, side, side)
    x[torch.arange(count), :, y * (side // classes)] += 1.5
    return x, y


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


# Frozen parts, parts without a gradient, parts that start at zero.


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)
        )
        self.head = nn.Linear(128, 3)
        self.features.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.features.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            z = self.features(x).flatten(1)
        return self.head(z)


@healthy
def linear_probe(seed):
    torch.manual_seed(seed)
    model = Probe().train()
    return model, classify, torch.optim.SGD(model.head.parameters(), 0.5), split(16, *images(128))


class LowRank(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


class AdaptedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)
        self.requires_grad_(False)
        self.layer.linear1 = LowRank(self.layer.linear1)
        self.layer.linear2 = LowRank(self.layer.linear2)

    def forward(self, ids):
        x = self.layer.norm1(self.embed(ids))
        x = x + self.layer.linear2(F.gelu(self.layer.linear1(x)))
        return self.head(self.layer.norm2(x).mean(1))


@healthy
def adapters_at_their_first_step(seed):
    torch.manual_seed(seed)
    model = AdaptedEncoder()
    ids = torch.randint(0, 20, (96, 6))
    trainable = [p for p in model.parameters() if p.requires_grad]
    batches = [{"ids": a, "labels": (a[:, 0] < 10).long()} for a in ids.split(12)]

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["ids"]), batch["labels"])

    return model, loss_fn, torch.optim.AdamW(trainable, 1e-2), batches


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.ELU())
        self.heads = nn.ModuleDict({n: nn.Linear(24, 1) for n in ("price", "demand", "returns")})

    def forward(self, x, task):
        return self.heads[task](self.body(x)).squeeze(1)


@healthy
def heads_in_turn_and_one_for_later(seed):
    torch.manual_seed(seed)
    model = Tasks()
    batches = []
    for i, x in enumerate(torch.randn(10, 16, 6)):
        task = ("price", "demand")[i % 2]
        batches.append({"x": x, "task": task, "y": x[:, i % 2] - x[:, 3]})

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["x"], batch["task"]), batch["y"])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


class SkipGram(nn.Module):
    def __init__(self, words=50, size=8):
        super().__init__()
        self.centre = nn.Embedding(words, size, sparse=True)
        self.context = nn.Embedding(words, size, sparse=True)
        nn.init.uniform_(self.centre.weight, -0.5 / size, 0.5 / size)
        nn.init.zeros_(self.context.weight)

    def forward(self, word, near, far):
        v = self.centre(word)
        good = (v * self.context(near)).sum(-1)
        bad = torch.einsum("nd,nkd->nk", v, self.context(far))
        return -(F.logsigmoid(good) + F.logsigmoid(-bad).sum(1)).mean()


@healthy
def skip_gram_with_sparse_gradients(seed):
    torch.manual_seed(seed)
    model = SkipGram()
    word = torch.randint(0, 50, (8, 64))
    batches = [(w, (w + 1) % 50, torch.randint(0, 50, (64, 4))) for w in word]
    optimizer = torch.optim.SparseAdam(list(model.parameters()), 0.05)
    return model, lambda model, batch: model(*batch), optimizer, batches


@healthy
def last_layer_at_zero(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2)
    )
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    batches = [
        (x, torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)) for x in torch.randn(8, 32, 3)
    ]

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).pow(2).sum(1).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


class GatedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1)
        self.two = nn.Conv2d(width, width, 3, padding=1)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gain * self.two(F.relu(self.one(F.relu(x))))


@healthy
def residual_branches_at_zero(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        *(GatedBlock(8) for _ in range(4)),
        nn.AdaptiveAvgPool2d((8, 1)),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, classify, optimizer, split(16, *images(128))


class Mixture(nn.Module):
    """Top-1 routing: the experts that no row picked get no gradient in that step."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)) for _ in range(6)
        )

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 1)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return out


@healthy
def routed_experts(seed):
    torch.manual_seed(seed)
    model = Mixture()
    batches = [(x, x[:, :1].abs() - x[:, 1:2]) for x in torch.randn(10, 12, 4)]
    return (
        model,
        lambda model, batch: F.l1_loss(model(batch[0]), batch[1]),
        torch.optim.AdamW(model.parameters(), 1e-2),
        batches,
    )


# Two players.


class Rivals(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
        self.judge = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))


def tell_apart(model, batch):
    noise, real = batch
    fake = model.maker(noise).detach()
    return F.softplus(-model.judge(real)).mean() + F.softplus(model.judge(fake)).mean()


@healthy
def rivals_in_one_module(seed):
    torch.manual_seed(seed)
    model = Rivals()
    batches = [(torch.randn(24, 4), torch.randn(24, 2) * 0.5 + 1.5) for _ in range(10)]

    def train(model, loss_fn, optimizer, batches):
        maker = torch.optim.Adam(model.maker.parameters(), 2e-3, betas=(0.5, 0.999))
        for batch in batches * 2:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            maker.zero_grad()
            F.softplus(-model.judge(model.maker(batch[0]))).mean().backward()
            maker.step()

    optimizer = torch.optim.Adam(model.judge.parameters(), 2e-3, betas=(0.5, 0.999))
    return model, tell_apart, optimizer, batches, train


@healthy
def convolutional_rivals_apart(seed):
    torch.manual_seed(seed)
    judge = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 2), nn.Flatten(),
    )  # fmt: skip
    maker = nn.Sequential(
        nn.ConvTranspose2d(6, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    real = torch.tanh(images(96)[0])
    batches = [(x, torch.randn(len(x), 6, 1, 1)) for x in real.split(16)]

    def loss_fn(judge, batch):
        real, noise = batch
        yes, no = judge(real), judge(maker(noise).detach())
        return (
            F.binary_cross_entropy_with_logits(yes, torch.ones_like(yes))
            + F.binary_cross_entropy_with_logits(no, torch.zeros_like(no))
        ) / 2  # fmt: skip

    def train(judge, loss_fn, optimizer, batches):
        other = torch.optim.Adam(maker.parameters(), 2e-4, betas=(0.5, 0.999))
        for batch in batches * 2:
            other.zero_grad()
            score = judge(maker(batch[1]))
            F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
            other.step()
            optimizer.zero_grad()
            loss_fn(judge, batch).backward()
            optimizer.step()

    optimizer = torch.optim.Adam(judge.parameters(), 2e-4, betas=(0.5, 0.999))
    return judge, loss_fn, optimizer, batches, train


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


def penalised(critic, batch):
    real, fake = batch
    share = torch.rand(len(real), 1)
    mid = (share * real + (1 - share) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(mid).sum(), mid, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(2, dim=1) - 1).pow(2).mean()


@healthy
def critic_with_gradient_penalty(seed):
    torch.manual_seed(seed)
    critic = Critic()
    batches = [(torch.randn(32, 3) + 2, torch.randn(32, 3)) for _ in range(8)]
    return critic, penalised, torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.0, 0.9)), batches


@healthy
def spectral_and_weight_norm(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Conv1d(2, 8, 3, padding=1)),
        nn.LeakyReLU(0.1),
        parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1)),
        nn.LeakyReLU(0.1),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(8, 1)),
    )
    batches = [(torch.randn(16, 2, 10).cumsum(2) * 0.5, torch.randn(16, 2, 10)) for _ in range(8)]

    def loss_fn(model, batch):
        return F.relu(1 - model(batch[0])).mean() + F.relu(1 + model(batch[1])).mean()

    return model, loss_fn, torch.optim.RMSprop(model.parameters(), 2e-3), batches


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Adapting(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 24), nn.ReLU())
        self.labels, self.domain = nn.Linear(24, 3), nn.Linear(24, 2)

    def forward(self, x, strength):
        z = self.features(x)
        return self.labels(z), self.domain(Reverse.apply(z, strength))


@healthy
def domain_confusion(seed):
    torch.manual_seed(seed)
    model = Adapting()
    batches = []
    for x in torch.randn(8, 24, 6):
        source = torch.arange(24) % 2
        x[source == 1, 5] += 1
        batches.append((x, x[:, :3].argmax(1), source))

    def loss_fn(model, batch):
        x, y, source = batch
        labels, domain = model(x, 0.3)
        known = source == 0
        return F.cross_entropy(labels[known], y[known]) + F.cross_entropy(domain, source)

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.1, momentum=0.5), batches


# Accumulation and unequal parts.


class TextConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(8, 6, k) for k in (2, 3))
        self.out = nn.Linear(12, 2)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        return self.out(torch.cat([F.relu(c(x)).amax(2) for c in self.convs], 1))


def sentences(count, size=8):
    ids = torch.randint(1, 30, (count, size))
    label = torch.arange(count) % 2
    ids[:, 3] = torch.where(label == 1, 7, 8)
    ids[ids.cumsum(1) > 100] = 0
    ids[:, 3] = torch.where(label == 1, 7, 8)
    return ids, label


@healthy
def accumulate_and_divide(seed):
    torch.manual_seed(seed)
    model = TextConv()

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(4):
            for i, batch in enumerate(batches):
                loss = loss_fn(model, batch) / 4
                loss.backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    return (
        model,
        classify,
        torch.optim.Adam(model.parameters(), 1e-2),
        split(8, *sentences(128)),
        train,
    )


class Reader(nn.Module):
    def __init__(self, words=16):
        super().__init__()
        self.embed = nn.Embedding(words, 12)
        self.rnn = nn.GRU(12, 24, batch_first=True)
        self.out = nn.Linear(24, words)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


@healthy
def accumulate_sums_and_divide_once(seed):
    """Sums over real tokens; the gradient is divided by their number before the step."""
    torch.manual_seed(seed)
    model = Reader()
    batches = []
    for length in (4, 9, 6, 12, 5, 7, 10, 3) * 2:
        ids = (torch.arange(length) * 3 + torch.randint(0, 16, (6, 1))) % 16
        target = ids.roll(-1, 1)
        target[:, -1] = -100
        target[:2, length // 2 :] = -100
        batches.append((ids, target))

    def loss_fn(model, batch):
        scores = model(batch[0]).flatten(0, 1)
        return F.cross_entropy(scores, batch[1].flatten(), ignore_index=-100)

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(3):
            for first in range(0, len(batches), 4):
                tokens = 0
                for ids, target in batches[first : first + 4]:
                    scores = model(ids).flatten(0, 1)
                    F.cross_entropy(
                        scores, target.flatten(), ignore_index=-100, reduction="sum"
                    ).backward()
                    tokens += int((target != -100).sum())
                for p in model.parameters():
                    p.grad.div_(tokens)
                optimizer.step()
                optimizer.zero_grad()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches, train


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.cats = nn.ModuleList(nn.Embedding(n, 3) for n in (4, 6))
        self.net = nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, numbers, cats):
        x = torch.cat([numbers, *(e(c) for e, c in zip(self.cats, cats.T, strict=True))], 1)
        return self.net(x).squeeze(1)


@healthy
def micro_batches_weighted_by_size(seed):
    torch.manual_seed(seed)
    model = Table()
    batches = []
    for size in (16, 16, 16, 5) * 3:
        numbers, cats = (
            torch.randn(size, 4),
            torch.stack([torch.arange(size) % 4, torch.arange(size) % 6], 1),
        )
        batches.append({"numbers": numbers, "cats": cats, "y": numbers[:, 0] + (cats[:, 0] == 2)})

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["numbers"], batch["cats"]), batch["y"])

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(5):
            for first in range(0, len(batches), 4):
                group = batches[first : first + 4]
                total = sum(len(b["y"]) for b in group)
                optimizer.zero_grad()
                for batch in group:
                    (loss_fn(model, batch) * len(batch["y"]) / total).backward()
                optimizer.step()

    return (
        model,
        loss_fn,
        torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0),
        batches,
        train,
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        self.low = nn.Sequential(
            nn.Conv2d(6, 12, 3, stride=2, padding=1), nn.GroupNorm(2, 12), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        self.out = nn.Conv2d(12, 1, 1)

    def forward(self, x):
        fine = self.down(x)
        return self.out(torch.cat([fine, self.up(self.low(fine))], 1))


def dice(model, batch):
    x, mask = batch
    p = model(x).sigmoid()
    overlap = (p * mask).sum((1, 2, 3))
    return 1 - ((2 * overlap + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


@healthy
def losses_added_up_before_one_backward(seed):
    torch.manual_seed(seed)
    model = UNet()
    x, y = images(96)
    mask = torch.zeros_like(x)
    mask[torch.arange(96), :, y * 2] = 1
    batches = split(8, x, mask)

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(2):
            for first in range(0, len(batches), 3):
                total = 0.0
                for batch in batches[first : first + 3]:
                    total = total + loss_fn(model, batch)
                optimizer.zero_grad()
                (total / 3).backward()
                optimizer.step()

    return model, dice, torch.optim.Adam(model.parameters(), 1e-2), batches, train


# Recurrence, attention, padding.


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 20, num_layers=2, batch_first=True), nn.Linear(20, 1)
        for name, p in self.lstm.named_parameters():
            if name.startswith("bias_ih"):
                p.data[20:40] = 4.0
            elif name.startswith("weight_hh"):
                nn.init.orthogonal_(p)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


@healthy
def lstm_with_open_forget_gates(seed):
    torch.manual_seed(seed)
    model = Counter()
    batches = [(x, x[:, 0, :1] + x[:, -1, 1:2]) for x in torch.randn(8, 16, 12, 3)]
    optimizer = torch.optim.RMSprop(model.parameters(), 2e-3)
    return (
        model,
        lambda model, batch: F.smooth_l1_loss(model(batch[0]), batch[1]),
        optimizer,
        batches,
    )


class Carried(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(2, 16), nn.Linear(16, 1)

    def forward(self, x, h):
        outs = []
        for t in x.unbind(1):
            h = self.cell(t, h)
            outs.append(self.out(h))
        return torch.stack(outs, 1), h


@healthy
def state_carried_and_detached(seed):
    torch.manual_seed(seed)
    model = Carried()
    x = torch.randn(8, 60, 2)
    y = 0.5 * (x[..., :1] + x[..., :1].roll(1, 1))
    batches = list(zip(x.split(6, 1), y.split(6, 1), strict=True))

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0], torch.zeros(8, 16))[0], batch[1])

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(4):
            h = torch.zeros(8, 16)
            for x, y in batches:
                h = h.detach()
                out, h = model(x, h)
                loss = F.mse_loss(out, y)
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()

    return (
        model,
        loss_fn,
        torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, nesterov=True),
        batches,
        train,
    )


class CausalBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, pad):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        score = score.masked_fill(future | pad[:, None, None, :], float("-inf"))
        x = x + self.proj((score.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, words=12, width=16, depth=2):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.place = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(CausalBlock(width, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, ids == 0)
        return self.head(self.norm(x))


@healthy
def masked_tied_transformer_with_warmup(seed):
    torch.manual_seed(seed)
    model = LanguageModel()
    batches = []
    for start in torch.randint(0, 11, (12, 8, 1)):
        ids = (start + torch.arange(9)) % 11 + 1
        for row, length in enumerate((9, 4, 7, 9, 5, 9, 6, 8)):
            ids[row, length:] = 0
        batches.append(ids)

    def loss_fn(model, ids):
        scores = model(ids[:, :-1])
        return F.cross_entropy(scores.transpose(1, 2), ids[:, 1:], ignore_index=0)

    def train(model, loss_fn, optimizer, batches):
        total = 4 * len(batches)

        def rate(step):
            if step < 8:
                return step / 8
            return 0.5 * (1 + math.cos(math.pi * (step - 8) / (total - 8)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        for _epoch in range(4):
            for ids in batches:
                optimizer.zero_grad(set_to_none=True)
                loss_fn(model, ids).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()

    decay = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    return model, loss_fn, torch.optim.AdamW(groups, 5e-3, betas=(0.9, 0.95)), batches, train


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 10, padding_idx=0)
        self.rnn = nn.LSTM(10, 12, bidirectional=True, batch_first=True)
        self.out = nn.Linear(24, 4)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(
            self.embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        return self.out(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def pad(rows):
    ids = pad_sequence(rows, batch_first=True)
    tags = pad_sequence([r % 4 for r in rows], batch_first=True, padding_value=-1)
    return {"ids": ids, "tags": tags, "lengths": torch.tensor([len(r) for r in rows])}


@healthy
def packed_tagger_from_a_loader(seed):
    torch.manual_seed(seed)
    model = Tagger()
    rows = [torch.randint(1, 20, (3 + i % 6,)) for i in range(80)]
    loader = DataLoader(
        rows, 16, shuffle=True, collate_fn=pad, generator=torch.Generator().manual_seed(seed)
    )

    def loss_fn(model, batch):
        scores = model(batch["ids"], batch["lengths"])
        return F.cross_entropy(scores.flatten(0, 1), batch["tags"].flatten(), ignore_index=-1)

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), loader


class Universal(nn.Module):
    """One block, applied four times on purpose."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 24)
        self.block = nn.TransformerEncoderLayer(
            24, 4, 48, dropout=0.1, batch_first=True, norm_first=True
        )
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        h = self.inp(x)
        for _ in range(4):
            h = self.block(h)
        return self.out(h.mean(1)).squeeze(1)


@healthy
def one_block_used_again_and_again(seed):
    torch.manual_seed(seed)
    model = Universal()
    batches = [(x, x[..., 0].mean(1)) for x in torch.randn(6, 16, 5, 4)]
    optimizer = torch.optim.NAdam(model.parameters(), 2e-3)
    return model, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), optimizer, batches


class Translate(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(14, 16)
        self.encoder, self.decoder = nn.GRU(16, 16, batch_first=True), nn.GRUCell(16, 16)
        self.query, self.out = nn.Linear(16, 16, bias=False), nn.Linear(32, 14)

    def forward(self, source, target):
        memory, h = self.encoder(self.embed(source))
        h, scores = h[0], []
        for word in target.T:
            h = self.decoder(self.embed(word), h)
            weight = torch.softmax(torch.bmm(memory, self.query(h).unsqueeze(2)), 1)
            scores.append(self.out(torch.cat([h, (weight * memory).sum(1)], 1)))
        return torch.stack(scores, 1)


@healthy
def teacher_forcing(seed):
    torch.manual_seed(seed)
    model = Translate()
    batches = []
    for source in torch.randint(2, 14, (8, 12, 5)):
        full = torch.cat([torch.ones(12, 1, dtype=torch.long), source.flip(1)], 1)
        batches.append((source, full[:, :-1], full[:, 1:]))

    def loss_fn(model, batch):
        source, given, wanted = batch
        return F.cross_entropy(model(source, given).transpose(1, 2), wanted, label_smoothing=0.1)

    def train(model, loss_fn, optimizer, batches):
        model.train()
        for batch in batches * 3:
            model.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


# Normalisation, dropout, memory formats, precision.


@healthy
def biases_before_batchnorm(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((4, 1)), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    x, y = images(96, channels=3)
    data = torch.utils.data.TensorDataset(x, y)
    loader = DataLoader(data, 16, shuffle=True, drop_last=True)
    return (
        model,
        classify,
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True),
        loader,
    )


@healthy
def channels_last_depthwise(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.GroupNorm(3, 12), nn.Hardswish(),
        nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.InstanceNorm2d(12, affine=True),
        nn.ReLU6(), nn.Conv2d(12, 3, 1), nn.AdaptiveAvgPool2d((4, 1)), nn.Flatten(),
        nn.Linear(12, 3),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    x, y = images(96, channels=3)
    x = x.to(memory_format=torch.channels_last)
    return model, classify, torch.optim.Adamax(model.parameters(), 1e-2), split(16, x, y)


@healthy
def dropout_everywhere(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Dropout(0.2), nn.Linear(20, 64), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(64, 64),
        nn.SELU(), nn.AlphaDropout(0.1), nn.Dropout(0.5), nn.Linear(64, 4),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            nn.init.zeros_(layer.bias)
    centres = 2 * torch.randn(4, 20)
    y = torch.randint(0, 4, (192,))
    return (
        model,
        classify,
        torch.optim.Adam(model.parameters(), 2e-3),
        split(24, centres[y] + torch.randn(192, 20), y),
    )


class DropConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.drop1, self.drop2 = nn.Dropout2d(0.1), nn.Dropout(0.3)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 3)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = self.drop1(F.max_pool2d(F.relu(self.conv2(x)), 2))
        x = self.drop2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


@healthy
def validation_between_epochs(seed):
    torch.manual_seed(seed)
    model = DropConv()
    batches = split(16, *images(128))

    def loss_fn(model, batch):
        return F.nll_loss(model(batch[0]), batch[1])

    def train(model, loss_fn, optimizer, batches):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        best, kept = math.inf, None
        for _epoch in range(4):
            model.train()
            for batch in batches[:6]:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
            schedule.step()
            model.eval()
            with torch.no_grad():
                held = sum(loss_fn(model, b).item() for b in batches[6:]) / 2
            if held < best:
                best, kept = held, copy.deepcopy(model.state_dict())
        model.load_state_dict(kept)

    return model, loss_fn, torch.optim.Adadelta(model.parameters(), 1.0), batches, train


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))
            for _ in range(4)
        )
        self.out = nn.Linear(32, 3)

    def forward(self, x):
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=i % 2 == 0)
        return self.out(x)


@healthy
def recomputed_activations(seed):
    torch.manual_seed(seed)
    model = Recomputed()
    x = torch.randn(160, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    return model, classify, optimizer, split(16, x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long())


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, 8, 3, padding=1)
        self.rest = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.PReLU()) for _ in range(4))
        )
        self.last = nn.Conv1d(8, 1, 1)

    def forward(self, x):
        return x + self.last(
            checkpoint_sequential(self.rest, 2, self.first(x), use_reentrant=False)
        )


@healthy
def recomputed_denoiser(seed):
    torch.manual_seed(seed)
    model = Stack()
    t = torch.linspace(0, 6, 24)
    clean = torch.sin(t * (0.5 + torch.rand(96, 1, 1)))
    batches = split(12, clean + 0.4 * torch.randn_like(clean), clean)

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            for p in model.parameters():
                p.grad = None
            loss_fn(model, batch).backward()
            optimizer.step()

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.RAdam(model.parameters(), 3e-3), batches, train


@healthy
def scaled_half_step(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 8, 5, 2),
        nn.ReLU(),
        nn.Conv1d(8, 8, 5, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(40, 2),
    )
    t = torch.arange(32) * 0.4
    y = torch.arange(96) % 2
    x = torch.sin(t * (1 + y[:, None]) + 6 * torch.rand(96, 1))[:, None] + 0.3 * torch.randn(
        96, 1, 32
    )

    def train(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for batch in batches * 4:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(batch[0])
                loss = F.cross_entropy(out.float(), batch[1])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return (
        model,
        classify,
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        split(12, x, y),
        train,
    )


class Mixer(nn.Module):
    def __init__(self, tokens=16, width=16):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(tokens * width, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.flatten(1))


@healthy
def autocast_bfloat16(seed):
    torch.manual_seed(seed)
    model = Mixer()

    def loss_fn(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.AdamW(model.parameters(), 3e-3), split(16, *images(128))


@healthy
def second_derivatives_in_double(seed):
    """u'' = -u with u(0) = 0 and u'(0) = 1, on collocation points."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
    ).double()
    batches = [(torch.rand(32, 1, dtype=torch.float64) * 3).requires_grad_(True) for _ in range(6)]

    def loss_fn(model, t):
        u = model(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), t, create_graph=True)
        zero = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        start = model(zero)
        (slope,) = torch.autograd.grad(start.sum(), zero, create_graph=True)
        return (ddu + u).pow(2).mean() + start.pow(2).sum() + (slope - 1).pow(2).sum()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


class Spectral(nn.Module):
    def __init__(self, modes=6, width=8):
        super().__init__()
        self.lift, self.drop = nn.Linear(1, width), nn.Linear(width, 1)
        self.weight = nn.Parameter(torch.randn(modes, width, width, dtype=torch.cfloat) / width)
        self.skip = nn.Linear(width, width)

    def forward(self, x):
        h = self.lift(x)
        modes = torch.fft.rfft(h, dim=1)[:, : len(self.weight)]
        low = torch.einsum("bmi,mio->bmo", modes, self.weight)
        h = F.gelu(torch.fft.irfft(low, n=x.shape[1], dim=1) + self.skip(h))
        return self.drop(h)


@healthy
def complex_weights(seed):
    torch.manual_seed(seed)
    model = Spectral()
    t = torch.linspace(0, 2 * math.pi, 33)[:-1]
    batches = []
    for shift in torch.rand(6, 12, 1) * 6:
        batches.append((torch.sin(t + shift)[..., None], torch.cos(t + shift)[..., None]))

    def loss_fn(model, batch):
        error = (model(batch[0]) - batch[1]).flatten(1).norm(dim=1)
        return (error / batch[1].flatten(1).norm(dim=1)).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@healthy
def pruned_by_mask(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 48), nn.LeakyReLU(), nn.Linear(48, 3))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", amount=0.7)
    x = torch.randn(160, 16)
    return (
        model,
        classify,
        torch.optim.SGD(model.parameters(), 0.3),
        split(16, x, x[:, :3].argmax(1)),
    )


class Rounded(nn.Linear):
    def forward(self, x):
        scale = self.weight.detach().abs().max() / 7
        low = (self.weight / scale).round().clamp(-7, 7) * scale
        return F.linear(x, self.weight + (low - self.weight).detach(), self.bias)


@healthy
def rounding_with_a_straight_path(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(Rounded(6, 32), nn.Hardtanh(), Rounded(32, 1))
    batches = [(x, x[:, :2].sum(1, keepdim=True).clamp(-1, 1)) for x in torch.randn(10, 24, 6)]

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(3):
            for batch in batches:
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                for p in model.parameters():
                    p.grad.zero_()

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


# Losses of an unusual size, sign or form.


@healthy
def prices_in_their_own_unit(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    batches = []
    for x in torch.randn(10, 32, 5):
        price = 40 * x[:, 0] - 25 * x[:, 1] * x[:, 2] + 250 + 5 * torch.randn(32)
        batches.append((x, price[:, None]))

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


class Levels(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm1d(7), nn.Linear(7, 16), nn.Softplus(), nn.Linear(16, 1, bias=False)
        )
        self.cuts = nn.Parameter(torch.tensor([-1.5, -0.5, 0.5, 1.5]))

    def forward(self, x):
        return self.body(x) - self.cuts


@healthy
def ordered_grades(seed):
    torch.manual_seed(seed)
    model = Levels()
    batches = []
    for x in torch.randn(8, 32, 7) * torch.tensor([1, 10, 100, 1, 5, 0.1, 30]):
        grade = torch.bucketize(x[:, 0] + x[:, 1] / 10, torch.tensor([-1.5, -0.5, 0.5, 1.5]))
        batches.append((x, (grade[:, None] > torch.arange(4)).float()))

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 2e-2), batches


@healthy
def many_labels_with_weights(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.EmbeddingBag(60, 24, mode="mean"), nn.ReLU(), nn.Linear(24, 8))
    words = torch.randint(0, 60, (160, 10))
    y = torch.stack([(words % 8 == i).sum(1) > 1 for i in range(8)], 1).float()
    weight = (1 - y.mean(0)) / y.mean(0)
    criterion = nn.BCEWithLogitsLoss(pos_weight=weight)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    return (
        model,
        lambda model, batch: criterion(model(batch[0]), batch[1]),
        optimizer,
        split(20, words, y),
    )


@healthy
def quantiles(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Mish(), nn.Linear(32, 3))
    level = torch.tensor([0.1, 0.5, 0.9])
    batches = [(x, x[:, :1] + x[:, 1:].abs() * torch.randn(64, 1)) for x in torch.randn(8, 64, 2)]

    def loss_fn(model, batch):
        gap = batch[1] - model(batch[0])
        return torch.maximum(level * gap, (level - 1) * gap).sum(1).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


class Mixed(nn.Module):
    def __init__(self, parts=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 32), nn.Tanh())
        self.share, self.mean, self.log_scale = (nn.Linear(32, parts) for _ in range(3))

    def forward(self, x):
        z = self.body(x)
        return self.share(z).log_softmax(1), self.mean(z), self.log_scale(z)


@healthy
def mixture_density(seed):
    torch.manual_seed(seed)
    model = Mixed()
    batches = []
    for y in torch.rand(8, 64, 1) * 4 - 2:
        batches.append((y + 0.5 * torch.sin(3 * y) + 0.05 * torch.randn_like(y), y))

    def loss_fn(model, batch):
        share, mean, log_scale = model(batch[0])
        score = -0.5 * ((batch[1] - mean) / log_scale.exp()) ** 2 - log_scale - 0.919
        return -torch.logsumexp(share + score, 1).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


class Coupling(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.register_buffer("keep", keep)
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 4))
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, x):
        scale, shift = self.net(x * self.keep).chunk(2, 1)
        scale, shift = torch.tanh(scale) * (1 - self.keep), shift * (1 - self.keep)
        return x * scale.exp() + shift, scale.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        masks = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])] * 2
        self.layers = nn.ModuleList(Coupling(m) for m in masks)

    def forward(self, x):
        volume = x.new_zeros(len(x))
        for layer in self.layers:
            x, change = layer(x)
            volume = volume + change
        return -0.5 * x.pow(2).sum(1) - math.log(2 * math.pi) + volume


@healthy
def flow_with_a_negative_loss(seed):
    torch.manual_seed(seed)
    model = Flow()
    batches = [0.1 * torch.randn(64, 2) + torch.tensor([0.3, -0.2]) for _ in range(8)]

    def train(model, loss_fn, optimizer, batches):
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, total_steps=3 * len(batches)
        )
        for x in batches * 3:
            loss = loss_fn(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    return (
        model,
        lambda model, x: -model(x).mean(),
        torch.optim.Adam(model.parameters(), 1e-2),
        batches,
        train,
    )


class Anchors(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 16, 5, padding=2), nn.ReLU())
        self.score, self.offset = nn.Conv1d(16, 1, 1), nn.Conv1d(16, 2, 1)
        nn.init.normal_(self.score.weight, std=0.01)
        nn.init.constant_(self.score.bias, -math.log(99))

    def forward(self, x):
        z = self.body(x)
        return self.score(z).squeeze(1), self.offset(z)


def spots(count):
    x = 0.3 * torch.randn(count, 2, 40)
    hit = torch.zeros(count, 40)
    centre = torch.randint(3, 37, (count,))
    hit[torch.arange(count), centre] = 1
    x[:, 0] += 2 * hit
    offset = torch.rand(count, 2, 1) * hit[:, None]
    x[:, 1] += offset.sum(1)
    return x, hit, offset


@healthy
def focal_detection_with_rare_positives(seed):
    torch.manual_seed(seed)
    model = Anchors()

    def loss_fn(model, batch):
        x, hit, offset = batch
        score, guess = model(x)
        plain = F.binary_cross_entropy_with_logits(score, hit, reduction="none")
        p = torch.where(hit > 0, score.sigmoid(), 1 - score.sigmoid())
        weight = torch.where(hit > 0, 0.25, 0.75)
        count = hit.sum().clamp(min=1)
        box = (F.smooth_l1_loss(guess, offset, reduction="none") * hit[:, None]).sum()
        return (weight * (1 - p) ** 2 * plain).sum() / count + box / count

    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)
    return model, loss_fn, optimizer, split(12, *spots(96))


@healthy
def mixed_up_samples_and_soft_labels(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 5))
    centres = 2 * torch.randn(5, 10)
    y = torch.randint(0, 5, (160,))
    x = centres[y] + torch.randn(160, 10)

    def loss_fn(model, batch):
        x, y = batch
        share = 0.8
        order = torch.randperm(len(x))
        scores = model(share * x + (1 - share) * x[order])
        one = F.cross_entropy(scores, y, label_smoothing=0.1)
        return share * one + (1 - share) * F.cross_entropy(scores, y[order], label_smoothing=0.1)

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), split(20, x, y)


@healthy
def alignment_free_transcription(seed):
    """CTC over frames with fewer labels than frames."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(5, 24, 3, padding=1), nn.ReLU(), nn.Conv1d(24, 5, 1))
    batches = []
    for label in torch.randint(1, 5, (8, 10, 4)):
        frames = label.repeat_interleave(3, 1)
        x = F.one_hot(frames, 5).float().transpose(1, 2)
        batches.append((x + 0.3 * torch.randn_like(x), label))

    def loss_fn(model, batch):
        scores = model(batch[0]).permute(2, 0, 1).log_softmax(2)
        size = scores.shape[1]
        frames, labels = torch.full((size,), 12), torch.full((size,), 4)
        return F.ctc_loss(scores, batch[1], frames, labels, zero_infinity=True)

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# Generative models and representations.


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mean, self.log_var = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.back, self.out = nn.Linear(4, 32), nn.Linear(32, 64)

    def forward(self, x):
        h = F.relu(self.inp(x))
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        return torch.sigmoid(self.out(F.relu(self.back(z)))), mean, log_var


@healthy
def variational_with_sums(seed):
    torch.manual_seed(seed)
    model = Vae()
    x = (images(128)[0].flatten(1) > 0.8).float()

    def loss_fn(model, batch):
        back, mean, log_var = model(batch[0])
        fit = F.binary_cross_entropy(back, batch[0], reduction="sum")
        return fit - 0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())

    return model, loss_fn, torch.optim.Adam(model.parameters(), 2e-3), split(16, x)


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
        self.decode = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 8))
        self.book = nn.Embedding(16, 4)
        nn.init.uniform_(self.book.weight, -0.3, 0.3)

    def forward(self, x):
        z = self.encode(x)
        near = torch.cdist(z.detach(), self.book.weight.detach()).argmin(1)
        code = self.book(near)
        extra = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return self.decode(z + (code - z).detach()), extra


@healthy
def codebook(seed):
    torch.manual_seed(seed)
    model = Codes()
    centres = torch.randn(6, 8)
    x = centres[torch.randint(0, 6, (256,))] + 0.1 * torch.randn(256, 8)

    def loss_fn(model, batch):
        back, extra = model(batch[0])
        return F.mse_loss(back, batch[0]) + extra

    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), split(32, x)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
        self.right = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a, b):
        a, b = F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1)
        return self.scale.exp().clamp(max=100) * a @ b.T


@healthy
def two_towers_with_in_batch_negatives(seed):
    torch.manual_seed(seed)
    model = Towers()
    both = torch.randn(2, 4, 10), torch.randn(4, 6)
    batches = [(z @ both[0][0], z @ both[1]) for z in torch.randn(10, 24, 4)]

    def loss_fn(model, batch):
        scores = model(*batch)
        own = torch.arange(len(scores))
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2

    return model, loss_fn, torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01), batches


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("bank", F.normalize(torch.randn(64, 8), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, one, two):
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            k = F.normalize(self.key(two), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.bank.clone().T], 1)
        with torch.no_grad():
            rows = (self.place + torch.arange(len(k))) % 64
            self.bank[rows] = k
            self.place.add_(len(k)).remainder_(64)
        return scores / 0.2


@healthy
def memory_bank(seed):
    torch.manual_seed(seed)
    model = Queue()
    batches = [
        (x + 0.1 * torch.randn(16, 12), x + 0.1 * torch.randn(16, 12))
        for x in torch.randn(10, 16, 12)
    ]

    def loss_fn(model, batch):
        scores = model(*batch)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))

    return model, loss_fn, torch.optim.SGD(model.query.parameters(), 0.1, momentum=0.9), batches


class Bootstrap(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(
            nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(80, 8)
        )
        self.predict = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)
        )
        self.slow = copy.deepcopy(self.online)
        for p in self.slow.parameters():
            p.requires_grad = False

    def forward(self, one, two):
        guess = F.normalize(self.predict(self.online(one)), dim=1)
        with torch.no_grad():
            goal = F.normalize(self.slow(two), dim=1)
        return 2 - 2 * (guess * goal).sum(1)


@healthy
def moving_average_target(seed):
    torch.manual_seed(seed)
    model = Bootstrap()
    batches = []
    for x in torch.randn(10, 16, 1, 12):
        batches.append((x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)))

    def loss_fn(model, batch):
        return (model(*batch) + model(*batch[::-1])).mean()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 2:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            with torch.no_grad():
                for p, q in zip(model.slow.parameters(), model.online.parameters(), strict=True):
                    p.lerp_(q, 0.02)

    trainable = filter(lambda p: p.requires_grad, model.parameters())
    return model, loss_fn, torch.optim.Adam(trainable, 3e-3), batches, train


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU())
        self.inp, self.mid, self.out = nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x, t):
        angle = t[:, None] * torch.exp(-torch.arange(8) * 0.7)
        t = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        h = F.silu(self.inp(x) + t)
        return self.out(h + F.silu(self.mid(h)))


@healthy
def diffusion_with_averaged_weights(seed):
    torch.manual_seed(seed)
    model = Noise()
    alpha = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 30), 0)
    data = [torch.tensor([2.0, -1.0]) + 0.2 * torch.randn(32, 2) for _ in range(10)]

    def loss_fn(model, x):
        t = torch.randint(0, 30, (len(x),))
        noise = torch.randn_like(x)
        a = alpha[t][:, None]
        return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t.float()), noise)

    def train(model, loss_fn, optimizer, batches):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for x in batches * 3:
            optimizer.zero_grad()
            loss = loss_fn(model, x)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)

    return model, loss_fn, torch.optim.AdamW(model.parameters(), 3e-3), data, train


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(4) * math.pi)
        self.net = nn.Sequential(
            nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4)
        )

    def forward(self, x):
        angle = (x[..., None] * self.bands).flatten(-2)
        out = self.net(torch.cat([angle.sin(), angle.cos()], -1))
        return out[..., :3].sigmoid(), F.softplus(out[..., 3])


@healthy
def rendered_rays(seed):
    torch.manual_seed(seed)
    model = Field()
    depth = torch.linspace(0, 1, 12)
    batches = []
    for origin in torch.rand(8, 24, 1):
        rays = torch.stack([origin.expand(-1, 12), depth.expand(24, 12)], -1)
        batches.append((rays, torch.cat([origin, 1 - origin, 0.5 * torch.ones_like(origin)], 1)))

    def loss_fn(model, batch):
        colour, density = model(batch[0])
        opaque = 1 - torch.exp(-density)
        clear = torch.cumprod(torch.cat([torch.ones(24, 1), 1 - opaque + 1e-10], 1), 1)[:, :-1]
        seen = ((clear * opaque)[..., None] * colour).sum(1)
        return ((seen - batch[1]) ** 2).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3, eps=1e-15), batches


# Graphs and sets.


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x, adjacency):
        x = F.dropout(F.relu(adjacency @ self.one(x)), 0.3, self.training)
        return adjacency @ self.two(x)


@healthy
def one_graph_with_few_labels(seed):
    torch.manual_seed(seed)
    model = GraphNet()
    group = torch.arange(60) % 3
    link = torch.rand(60, 60) < torch.where(group[:, None] == group, 0.2, 0.02)
    link = (link | link.T | torch.eye(60, dtype=torch.bool)).float()
    root = link.sum(1).rsqrt()
    data = {
        "x": torch.randn(60, 6) + F.one_hot(group, 6),
        "adjacency": root[:, None] * link * root,
        "y": group,
        "train": torch.rand(60) < 0.5,
    }

    def loss_fn(model, data):
        out = model(data["x"], data["adjacency"])
        return F.cross_entropy(out[data["train"]], data["y"][data["train"]])

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(30):
            model.train()
            optimizer.zero_grad()
            loss_fn(model, batches[0]).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(data["x"], data["adjacency"]).argmax(1)

    return (
        model,
        loss_fn,
        torch.optim.Adam(model.parameters(), 2e-2, weight_decay=5e-4),
        [data],
        train,
    )


class Messages(nn.Module):
    """Edges as index pairs; several small graphs packed into one batch."""

    def __init__(self):
        super().__init__()
        self.node = nn.Linear(4, 16)
        self.edge = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
        self.update = nn.GRUCell(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x, edges, graph):
        h = self.node(x).tanh()
        for _ in range(3):
            message = self.edge(torch.cat([h[edges[0]], h[edges[1]]], 1))
            h = self.update(h.new_zeros(len(h), 16).index_add(0, edges[1], message), h)
        return self.out(h.new_zeros(int(graph.max()) + 1, 16).index_add(0, graph, h)).squeeze(1)


@healthy
def packed_molecules(seed):
    torch.manual_seed(seed)
    model = Messages()
    batches = []
    for _ in range(8):
        sizes = torch.randint(3, 7, (12,))
        graph = torch.repeat_interleave(torch.arange(12), sizes)
        first = torch.arange(len(graph) - 1)
        first = first[graph[:-1] == graph[1:]]
        edges = torch.cat([torch.stack([first, first + 1]), torch.stack([first + 1, first])], 1)
        kind = torch.randint(0, 4, (len(graph),))
        y = torch.zeros(12).index_add(0, graph, (kind == 1).float())
        batches.append((F.one_hot(kind, 4).float(), edges, graph, y))

    def loss_fn(model, batch):
        return F.huber_loss(model(*batch[:3]), batch[3])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3, amsgrad=True), batches


class Sets(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(1, 24), nn.ReLU(), nn.Linear(24, 24))
        self.whole = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x, there):
        return self.whole((self.each(x) * there[..., None]).sum(1)).squeeze(1)


@healthy
def sets_with_padding(seed):
    torch.manual_seed(seed)
    model = Sets()
    batches = []
    for _ in range(8):
        there = (torch.arange(7) < torch.randint(1, 8, (24, 1))).float()
        x = torch.rand(24, 7, 1) * there[..., None]
        batches.append((x, there, x.sum((1, 2))))

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    return model, loss_fn, torch.optim.ASGD(model.parameters(), 0.01), batches


class Kernels(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.ParameterList(torch.randn(2) for _ in range(8))
        self.scale = nn.ParameterDict({"width": torch.zeros(8), "height": 0.1 * torch.randn(8)})

    def forward(self, x):
        distance = (x[:, None] - torch.stack(list(self.centres))).pow(2).sum(-1)
        return (torch.exp(-distance * self.scale["width"].exp()) * self.scale["height"]).sum(1)


@healthy
def parameters_in_lists(seed):
    torch.manual_seed(seed)
    model = Kernels()
    batches = [(x, torch.exp(-x.pow(2).sum(1))) for x in torch.randn(8, 40, 2)]

    def loss_fn(model, batch):
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    return model, loss_fn, torch.optim.Rprop(model.parameters(), 1e-2), batches


# Agents.


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, state):
        h = self.body(state)
        return torch.distributions.Categorical(logits=self.policy(h)), self.value(h).squeeze(1)


def rollout(model, count=64):
    state = torch.randn(count, 4)
    with torch.no_grad():
        choice, value = model(state)
        action = choice.sample()
        reward = (action == state[:, :3].argmax(1)).float() + 0.1 * torch.randn(count)
        return {
            "state": state, "action": action, "old": choice.log_prob(action),
            "advantage": reward - value, "reward": reward,
        }  # fmt: skip


@healthy
def clipped_policy(seed):
    torch.manual_seed(seed)
    model = ActorCritic()
    batches = [rollout(model) for _ in range(6)]

    def loss_fn(model, batch):
        choice, value = model(batch["state"])
        gain = batch["advantage"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        ratio = (choice.log_prob(batch["action"]) - batch["old"]).exp()
        policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return policy + 0.5 * F.mse_loss(value, batch["reward"]) - 0.01 * choice.entropy().mean()

    def train(model, loss_fn, optimizer, batches):
        for _update in range(6):
            batch = rollout(model, 128)
            for _epoch in range(3):
                for rows in torch.randperm(128).split(32):
                    loss = loss_fn(model, {k: v[rows] for k, v in batch.items()})
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3, eps=1e-5), batches, train


@healthy
def score_function_gradient(seed):
    torch.manual_seed(seed)
    policy = nn.Linear(2, 4)
    batches = []
    for state in torch.randn(12, 32, 2):
        action = torch.randint(0, 4, (32,))
        goal = (state[:, 0] > 0).long() * 2 + (state[:, 1] > 0).long()
        batches.append((state, action, (action == goal).float() - 0.25))

    def loss_fn(policy, batch):
        state, action, advantage = batch
        log_prob = policy(state).log_softmax(1).gather(1, action[:, None]).squeeze(1)
        return -(log_prob * advantage).mean()

    def train(policy, loss_fn, optimizer, batches):
        baseline = 0.0
        for state, *_ in batches * 3:
            choice = torch.distributions.Categorical(logits=policy(state))
            action = choice.sample()
            goal = (state[:, 0] > 0).long() * 2 + (state[:, 1] > 0).long()
            reward = (action == goal).float()
            loss = -(choice.log_prob(action) * (reward - baseline)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            baseline = 0.9 * baseline + 0.1 * reward.mean().item()

    return policy, loss_fn, torch.optim.SGD(policy.parameters(), 0.5), batches, train


class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2))
        self.target = copy.deepcopy(self.net)
        for p in self.target.parameters():
            p.requires_grad_(False)


@healthy
def values_with_a_target_network(seed):
    torch.manual_seed(seed)
    model = Values()
    batches = []
    for state in torch.randn(16, 32, 3):
        action = torch.randint(0, 2, (32, 1))
        reward = torch.where(action.squeeze(1) == (state[:, 0] > 0), 1.0, -1.0)
        batches.append((state, action, reward, torch.randn(32, 3), (torch.rand(32) < 0.1).float()))

    def loss_fn(model, batch):
        state, action, reward, after, done = batch
        value = model.net(state).gather(1, action).squeeze(1)
        with torch.no_grad():
            goal = reward + 0.5 * (1 - done) * model.target(after).max(1).values
        return F.smooth_l1_loss(value, goal)

    def train(model, loss_fn, optimizer, batches):
        for step, batch in enumerate(batches * 2):
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            for p in model.net.parameters():
                p.grad.data.clamp_(-1, 1)
            optimizer.step()
            if step % 8 == 7:
                model.target.load_state_dict(model.net.state_dict())

    return model, loss_fn, torch.optim.RMSprop(model.net.parameters(), 2e-3), batches, train


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + 4 * x.abs()) ** 2


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(6, 40), nn.Linear(40, 2)

    def forward(self, x):
        potential, total = x.new_zeros(len(x), 40), 0.0
        for _ in range(8):
            potential = 0.8 * potential + self.inp(x)
            spike = Spike.apply(potential - 1)
            potential = potential - spike.detach()
            total = total + self.out(spike)
        return total / 8


@healthy
def spikes_with_a_surrogate(seed):
    torch.manual_seed(seed)
    model = Spiking()
    x = torch.randn(160, 6)
    y = (x[:, 0] + x[:, 1] > 0).long()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), split(16, x, y)


# Teachers, inner loops, several optimizers, other optimizers.


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
        self.teacher.requires_grad_(False)
        self.student = nn.Linear(8, 4)


@healthy
def pupil_of_a_frozen_net(seed):
    torch.manual_seed(seed)
    model = Distilled()
    batches = [(x, x[:, :4].argmax(1)) for x in 2 * torch.randn(10, 24, 8)]

    def loss_fn(model, batch):
        model.teacher.eval()
        goal = (model.teacher(batch[0]) / 2).log_softmax(1)
        scores = model.student(batch[0])
        soft = F.kl_div((scores / 2).log_softmax(1), goal, reduction="batchmean", log_target=True)
        return 4 * 0.7 * soft + 0.3 * F.cross_entropy(scores, batch[1])

    return (
        model,
        loss_fn,
        torch.optim.SGD(model.student.parameters(), 0.2, weight_decay=1e-3),
        batches,
    )


@healthy
def inner_steps_with_a_graph(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
    batches = []
    for _ in range(8):
        height, phase = torch.rand(3, 1, 1) * 2 + 0.5, torch.rand(3, 1, 1) * 3
        x = torch.rand(3, 20, 1) * 4 - 2
        batches.append((x, height * torch.sin(x + phase)))

    def loss_fn(model, tasks):
        total = 0.0
        for x, y in zip(*tasks, strict=True):
            weights = dict(model.named_parameters())
            for _ in range(2):
                out = torch.func.functional_call(model, weights, (x[:10],))
                slopes = torch.autograd.grad(
                    F.mse_loss(out, y[:10]), weights.values(), create_graph=True
                )
                weights = {
                    n: w - 0.05 * g for (n, w), g in zip(weights.items(), slopes, strict=True)
                }
            out = torch.func.functional_call(model, weights, (x[10:],))
            total = total + F.mse_loss(out, y[10:])
        return total / len(tasks[0])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@healthy
def closure_of_a_second_order_method(seed):
    torch.manual_seed(seed)
    model = nn.Linear(5, 1)
    x = torch.randn(120, 5)
    y = (x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0], [0.0]]) > 0).float()

    def loss_fn(model, batch):
        return (
            F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])
            + 1e-2 * model.weight.pow(2).sum()
        )

    def train(model, loss_fn, optimizer, batches):
        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model, batches[0])
            loss.backward()
            return loss

        for _ in range(6):
            optimizer.step(closure)

    optimizer = torch.optim.LBFGS(
        model.parameters(), 0.5, max_iter=5, line_search_fn="strong_wolfe"
    )
    return model, loss_fn, optimizer, [(x, y)], train


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(20, 4, sparse=True), nn.Embedding(15, 4, sparse=True)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, item):
        u, v = self.users(user), self.items(item)
        return (u * v).sum(1) + self.net(torch.cat([u, v], 1)).squeeze(1)


@healthy
def two_optimizers_for_one_loss(seed):
    torch.manual_seed(seed)
    model = Factors()
    user, item = torch.randint(0, 20, (10, 32)), torch.randint(0, 15, (10, 32))
    taste = torch.randn(20, 2), torch.randn(15, 2)
    batches = [(u, i, (taste[0][u] * taste[1][i]).sum(1)) for u, i in zip(user, item, strict=True)]

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    def train(model, loss_fn, optimizers, batches):
        for batch in batches * 4:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_fn(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()

    tables = [*model.users.parameters(), *model.items.parameters()]
    optimizers = (
        torch.optim.SparseAdam(tables, 0.02),
        torch.optim.Adam(model.net.parameters(), 5e-3),
    )
    return model, loss_fn, optimizers, batches, train


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(1, 16, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, 16))
        self.place = nn.Parameter(0.02 * torch.randn(1, 5, 16))
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.encoder(x)[:, 0])


@healthy
def patches_with_cosine_per_batch(seed):
    torch.manual_seed(seed)
    model = Patches()

    def train(model, loss_fn, optimizer, batches):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * len(batches))
        for _epoch in range(4):
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                schedule.step()

    return (
        model,
        classify,
        torch.optim.AdamW(model.parameters(), 3e-3),
        split(16, *images(128)),
        train,
    )


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Conv1d(1, 12, 1)
        self.gates = nn.ModuleList(nn.Conv1d(12, 24, 2, dilation=d) for d in (1, 2, 4))
        self.skips = nn.ModuleList(nn.Conv1d(12, 12, 1) for _ in range(3))
        self.out = nn.Conv1d(12, 1, 1)

    def forward(self, x):
        h, total = self.inp(x), 0
        for gate, skip in zip(self.gates, self.skips, strict=True):
            a, b = gate(F.pad(h, (gate.dilation[0], 0))).chunk(2, 1)
            z = skip(a.tanh() * b.sigmoid())
            h, total = h + z, total + z
        return self.out(F.relu(total))


@healthy
def gated_waves_clipped_by_value(seed):
    torch.manual_seed(seed)
    model = Wave()
    t = torch.arange(25) * 0.5
    x = torch.sin(t + 6 * torch.rand(80, 1, 1))
    batches = split(10, x[..., :-1], x[..., 1:])

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            loss_fn(model, batch).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches, train


class Faces(Dataset):
    def __init__(self, count):
        self.label = torch.arange(count) % 6
        self.x = 2 * torch.randn(6, 10)[self.label] + 0.6 * torch.randn(count, 10)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        same = (self.label == self.label[i]).nonzero().squeeze(1)
        other = (self.label != self.label[i]).nonzero().squeeze(1)
        pick = torch.randint(len(same), ()), torch.randint(len(other), ())
        return self.x[i], self.x[same[pick[0]]], self.x[other[pick[1]]]


@healthy
def triplets_from_a_dataset(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 24), nn.PReLU(), nn.Linear(24, 4))
    loader = DataLoader(Faces(96), batch_size=16, shuffle=True)

    def loss_fn(model, batch):
        anchor, same, other = (model(x) for x in batch)
        return F.triplet_margin_loss(anchor, same, other, margin=1.0)

    def train(model, loss_fn, optimizer, batches):
        losses = []
        for _epoch in range(4):
            for batch in batches:
                optimizer.zero_grad(set_to_none=False)
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), loader, train


# Loops that do something to gradients, weights or modes, and mean it.


def rings(count=192):
    angle = 6.28 * torch.rand(count, 1)
    y = torch.arange(count) % 2
    x = torch.cat([angle.cos(), angle.sin()], 1) * (1 + y[:, None]) + 0.15 * torch.randn(count, 2)
    return x, y


@healthy
def sharpness_aware_steps(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Softplus(beta=4), nn.Linear(32, 2))

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 4:
            loss_fn(model, batch).backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            optimizer.step()
            optimizer.zero_grad()

    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    return model, classify, optimizer, split(24, *rings()), train


class Sharp(torch.optim.Optimizer):
    """Climbs first, then steps from there: two gradients per step, one optimizer within another."""

    def __init__(self, parameters, base, radius=0.05, **settings):
        super().__init__(parameters, {"radius": radius, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        weights = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in weights]).norm() + 1e-12
        moves = [0.05 * p.grad / norm for p in weights]
        torch._foreach_add_(weights, moves)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(weights, moves)
        self.base.step()
        self.zero_grad()


@healthy
def sharpness_aware_by_a_closure(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(2, 12, 3), nn.BatchNorm1d(12), nn.ReLU(), nn.AdaptiveMaxPool1d(2), nn.Flatten(),
        nn.Linear(24, 2),
    )  # fmt: skip
    y = torch.arange(160) % 2
    x = torch.randn(160, 2, 12)
    x[:, :, 4:7] += torch.where(y == 1, 1.5, -0.5)[:, None, None]

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:

            def closure(batch=batch):
                loss = loss_fn(model, batch)
                loss.backward()
                return loss

            closure()
            optimizer.step(closure)

    optimizer = Sharp(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return model, classify, optimizer, split(16, x, y), train


@healthy
def trained_on_attacked_inputs(seed):
    torch.manual_seed(seed)
    model = DropConv()
    batches = split(16, *images(96))

    def loss_fn(model, batch):
        return F.nll_loss(model(batch[0]), batch[1])

    def train(model, loss_fn, optimizer, batches):
        for x, y in batches * 3:
            near = x.clone().requires_grad_(True)
            loss_fn(model, (near, y)).backward()
            attacked = (x + 0.05 * near.grad.sign()).detach()
            optimizer.zero_grad()
            loss_fn(model, (attacked, y)).backward()
            optimizer.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches, train


@healthy
def odd_batches_skipped(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
    batches = [(x, x[:, :2].sum(1, keepdim=True)) for x in torch.randn(12, 24, 6)]
    batches[7] = (batches[7][0], batches[7][1] + 1e4)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            if norm > 100:
                continue
            optimizer.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


class Ema:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 - self.decay)

    def swap(self):
        for name, p in self.model.named_parameters():
            p.data, self.shadow[name] = self.shadow[name], p.data


@healthy
def averaged_weights_swapped_in_and_out(seed):
    torch.manual_seed(seed)
    model = Reader(12)
    batches = [(torch.arange(9) * 2 + s) % 12 for s in torch.randint(0, 12, (10, 8, 1))]

    def loss_fn(model, ids):
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    def train(model, loss_fn, optimizer, batches):
        average = Ema(model)
        for _epoch in range(3):
            for ids in batches[:8]:
                optimizer.zero_grad()
                loss_fn(model, ids).backward()
                optimizer.step()
                average.update()
            average.swap()
            model.eval()
            with torch.inference_mode():
                sum(loss_fn(model, ids).item() for ids in batches[8:])
            model.train()
            average.swap()

    return model, loss_fn, torch.optim.AdamW(model.parameters(), 5e-3), batches, train


@healthy
def statistics_frozen_after_two_epochs(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Flatten(), nn.Linear(128, 3),
    )  # fmt: skip
    x, y = images(96)

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(4):
            model.train()
            if epoch >= 2:
                for layer in model:
                    if isinstance(layer, nn.BatchNorm2d):
                        layer.eval()
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    return model, classify, torch.optim.SGD(model.parameters(), 0.03), split(16, x, y), train


@healthy
def two_backwards_through_one_trunk(seed):
    torch.manual_seed(seed)
    model = Tasks()
    batches = [
        {"x": x, "price": x[:, 0], "demand": x[:, 1] - x[:, 2]} for x in torch.randn(8, 20, 6)
    ]

    def loss_fn(model, batch):
        z = model.body(batch["x"])
        each = [F.mse_loss(model.heads[n](z).squeeze(1), batch[n]) for n in ("price", "demand")]
        return sum(each)

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 4:
            optimizer.zero_grad()
            z = model.body(batch["x"])
            price = F.mse_loss(model.heads["price"](z).squeeze(1), batch["price"])
            demand = F.mse_loss(model.heads["demand"](z).squeeze(1), batch["demand"])
            price.backward(retain_graph=True)
            demand.backward()
            optimizer.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(30, 16)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embed(ids))))


@healthy
def thawed_from_the_top(seed):
    torch.manual_seed(seed)
    model = Layers()
    model.embed.requires_grad_(False)
    model.body.requires_grad_(False)

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(4):
            if epoch in (1, 2):
                layer = model.body if epoch == 1 else model.embed
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": layer.parameters(), "lr": 5e-3})
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    ids, y = sentences(128)
    optimizer = torch.optim.Adam(model.head.parameters(), 1e-2)
    return model, classify, optimizer, split(16, ids, y), train


@healthy
def stepping_inside_backward(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    optimizers = tuple(torch.optim.Adam([p], 5e-3) for p in model.parameters())
    own = {id(o.param_groups[0]["params"][0]): o for o in optimizers}
    batches = [(x, x.roll(1, 1)) for x in torch.randn(10, 16, 8)]

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def step(p):
        own[id(p)].step()
        own[id(p)].zero_grad()

    def train(model, loss_fn, optimizers, batches):
        hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        for batch in batches * 4:
            loss_fn(model, batch).backward()
        for hook in hooks:
            hook.remove()

    return model, loss_fn, optimizers, batches, train


@healthy
def schedule_counted_in_batches(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 4, 3, padding=1))
    batches = [(x, x.flip(1)) for x in torch.randn(12, 8, 4, 10)]

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def train(model, loss_fn, optimizer, batches):
        decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=24, gamma=0.5)
        for _epoch in range(6):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                decay.step()

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.3, momentum=0.8), batches, train


@healthy
def restarts_within_epochs(seed):
    torch.manual_seed(seed)
    model = Kernels()
    batches = [(x, torch.exp(-(x - 0.3).pow(2).sum(1))) for x in torch.randn(10, 32, 2)]

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def train(model, loss_fn, optimizer, batches):
        warm = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=15)
        for batch in batches * 6:
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warm.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 2e-2), batches, train


@healthy
def a_remainder_at_the_end_of_the_epoch(seed):
    torch.manual_seed(seed)
    model = Table()
    batches = []
    for numbers in torch.randn(10, 12, 4):
        cats = torch.randint(0, 4, (12, 2))
        batches.append({"numbers": numbers, "cats": cats, "y": numbers[:, 1] + cats[:, 1].float()})

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["numbers"], batch["cats"]), batch["y"])

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(6):
            optimizer.zero_grad()
            for i, batch in enumerate(batches):
                size = 4 if i < 8 else 2
                (loss_fn(model, batch) / size).backward()
                if (i + 1) % 4 == 0 or i + 1 == len(batches):
                    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()
                    optimizer.zero_grad()

    return model, loss_fn, torch.optim.RMSprop(model.parameters(), 3e-3), batches, train


@healthy
def old_words_kept_by_a_mask(seed):
    torch.manual_seed(seed)
    model = TextConv()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            model.embed.weight.grad[:5] = 0
            optimizer.step()

    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return model, classify, optimizer, split(16, *sentences(96)), train


@healthy
def conflicting_gradients_projected(seed):
    torch.manual_seed(seed)
    model = Tasks()
    del model.heads["returns"]
    batches = [
        {"x": x, "price": x[:, 0], "demand": x[:, 1] - x[:, 0]} for x in torch.randn(8, 20, 6)
    ]

    def parts(model, batch):
        return [F.mse_loss(model(batch["x"], n), batch[n]) for n in ("price", "demand")]

    def loss_fn(model, batch):
        return sum(parts(model, batch))

    def train(model, loss_fn, optimizer, batches):
        weights = list(model.parameters())
        for batch in batches * 4:
            one, two = (
                torch.autograd.grad(part, weights, allow_unused=True, materialize_grads=True)
                for part in parts(model, batch)
            )
            dot = sum((a * b).sum() for a, b in zip(one, two, strict=True))
            size = sum((b * b).sum() for b in two)
            share = (dot / size).clamp(max=0)
            for p, a, b in zip(weights, one, two, strict=True):
                p.grad = a - share * b + b
            optimizer.step()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


@healthy
def centred_by_hooks(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)
    )

    def centred(grad):
        return grad - grad.mean(dim=1, keepdim=True)

    for p in model.parameters():
        if p.ndim > 1:
            p.register_hook(centred)
    x = torch.randn(160, 12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, classify, optimizer, split(16, x, x[:, :3].argmax(1))
