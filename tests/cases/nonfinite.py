"""Programs that produce NaN or infinity, forward or backward, from harmless inputs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import pair
from tests.cases.data import blobs, classify, curve, regress
from tests.cases.forward import sequences

# nan-forward-masked-softmax


def padded(count=6, rows=8, length=6, width=5, empty=3):
    """Batches of (series, padding, labels); in batch ``empty`` one row is padding throughout."""
    batches = []
    for k, (x, y) in enumerate(sequences(count, rows, length, width)):
        padding = torch.arange(length) >= torch.randint(2, length + 1, (rows, 1))
        if k == empty:
            padding[5] = True
        batches.append((x, padding, y))
    return batches


@pair("nan-forward-masked-softmax")
def filled_with_minus_infinity(faulty):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.query = nn.Linear(5, 8), nn.Parameter(torch.randn(8) / 3)
            self.out = nn.Linear(5, 3)

        def forward(self, x, padding):
            low = float("-inf") if faulty else -1e4
            scores = (self.key(x) @ self.query).masked_fill(padding, low)
            return self.out((scores.softmax(1)[..., None] * x).sum(1))

    def loss_fn(model, batch):
        x, padding, y = batch
        return F.cross_entropy(model(x, padding), y)

    model = Attend()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), padded()


@pair("nan-forward-masked-softmax")
def question_reads_empty_text(faulty):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.question = nn.Linear(5, 8), nn.Parameter(torch.randn(2, 8) / 3)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(16, 3)

        def forward(self, text, padding):
            text = self.into(text)
            if not faulty:
                padding = padding & ~padding.all(1, keepdim=True)
            question = self.question.expand(len(text), 2, 8)
            read, _ = self.attention(question, text, text, key_padding_mask=padding)
            return self.out(read.flatten(1))

    def loss_fn(model, batch):
        text, padding, y = batch
        return F.cross_entropy(model(text, padding), y)

    model = Reader()
    return model, loss_fn, torch.optim.AdamW(model.parameters(), 5e-3), padded()


@pair("nan-forward-masked-softmax")
def causal_and_padding(faulty):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(5, 24), nn.Linear(8, 3)

        def forward(self, x, padding):
            q, k, v = self.qkv(x).chunk(3, -1)
            allowed = torch.ones(x.shape[1], x.shape[1]).tril().bool() & ~padding[:, None]
            if not faulty:
                allowed = allowed | torch.eye(x.shape[1]).bool()
            bias = torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)
            weights = (q @ k.transpose(1, 2) / 8**0.5 + bias).softmax(-1)
            return self.out((weights @ v)[:, -1])

    batches = []
    for x, y in sequences(rows=8, length=6):
        left = torch.arange(6) < torch.randint(0, 3, (8, 1))
        batches.append({"x": x, "padding": left, "label": y})

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["x"], batch["padding"]), batch["label"])

    model = Decoder()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-forward-masked-softmax")
def no_legal_move(faulty):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 5))

        def forward(self, state, legal):
            scores = torch.where(legal, self.net(state), torch.tensor(-math.inf))
            return F.log_softmax(scores, -1)

    batches = []
    for k in range(6):
        legal = torch.rand(16, 5) < 0.7
        legal[:, 2] = True
        if k == 2:
            legal[9] = False
        state = torch.randn(16, 4)
        worth = F.pad(state, (0, 1)).masked_fill(~legal, -9.0)
        batches.append((state, legal, worth.argmax(1)))
    if not faulty:
        batches[2][1][9, 0] = True

    def loss_fn(model, batch):
        state, legal, move = batch
        return F.nll_loss(model(state, legal), move)

    model = Policy()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


# nan-forward-zero-times-inf


@pair("nan-forward-zero-times-inf", "nan-forward", "log-zero")
def masked_by_multiplication(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x):
            return self.out(x).softmax(-1)

    batches = []
    for _ in range(6):
        x = torch.randn(16, 6)
        target = F.one_hot(x[:, :4].argmax(1), 4).float()
        batches.append((x, target, target.log()))

    def loss_fn(model, batch):
        x, target, log_target = batch
        p = model(x)
        if faulty:
            return (target * (log_target - (p + 1e-8).log())).sum(1).mean()
        return (torch.xlogy(target, target) - target * (p + 1e-8).log()).sum(1).mean()

    model = Net()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-forward-zero-times-inf")
def mask_times_bias(faulty):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.out = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(5, 3)

        def forward(self, x, padding):
            if faulty:
                bias = padding.float() * -math.inf
            else:
                bias = torch.zeros(padding.shape).masked_fill(padding, -math.inf)
            scores = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5 + bias[:, None]
            return self.out((scores.softmax(-1) @ x).mean(1))

    def loss_fn(model, batch):
        x, padding, y = batch
        return F.cross_entropy(model(x, padding), y)

    model = Attend()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), padded(empty=-1)


@pair("nan-forward-zero-times-inf", "div-zero-norm")
def weight_of_empty_cells(faulty):
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    batches = []
    for k in range(6):
        x = torch.randn(24, 4)
        count = torch.poisson(torch.full((24, 3), 4.0)) + 1
        if k == 4:
            count[7, 1] = 0
        batches.append((x, x[:, :3] * count, count))

    def loss_fn(model, batch):
        x, total, count = batch
        each = 1 / count if faulty else 1 / count.clamp(min=1)
        return ((model(x) - total * each) ** 2 * (count > 0)).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("nan-forward-zero-times-inf", "nan-forward", "log-zero", "nan-backward")
def entropy_by_hand(faulty):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(6, 4)
            self.experts = nn.Linear(6, 4)

        def forward(self, x):
            share = F.relu(self.gate(x))
            share = share / (share.sum(1, keepdim=True) + 1e-6)
            return (share * self.experts(x)).sum(1, keepdim=True), share

    def loss_fn(model, batch):
        x, y = batch
        out, share = model(x)
        entropy = -(share * (share if faulty else share.clamp(min=1e-8)).log()).sum(1)
        return F.mse_loss(out, y) - 0.01 * entropy.mean()

    model = Gate()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), curve()


# nan-forward


@pair("nan-forward")
def infinity_minus_infinity(faulty):
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x):
            return 60 * self.net(x)

    def loss_fn(model, batch):
        x, y = batch
        e = model(x) + 90
        if faulty:
            total = e.exp().sum(1).log()
            return (total - e.exp().log().gather(1, y[:, None])[:, 0]).mean()
        return (e.logsumexp(1) - e.gather(1, y[:, None])[:, 0]).mean()

    model = Energy()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-3), blobs(width=6)


@pair("nan-forward")
def sigmoid_by_quotient(faulty):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 12), nn.Linear(12, 1)

        def forward(self, x):
            z = self.a(x)
            gate = torch.exp(z) / (1 + torch.exp(z)) if faulty else torch.sigmoid(z)
            return self.b(gate)

    batches = []
    for k, (x, y) in enumerate(curve(width=4)):
        x[3] *= 3000.0 if k == 5 else 1.0
        batches.append((x, y.clamp(-2, 2)))
    model = Gate()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-forward", "std-single-element", "div-zero-norm")
def mean_of_no_words(faulty):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 2)

        def forward(self, texts):
            pooled = []
            for t in texts:
                h = self.embed(t)
                pooled.append(h.mean(0) if faulty or len(t) else h.new_zeros(8))
            return self.out(torch.stack(pooled))

    batches = []
    for k in range(5):
        texts = [torch.randint(0, 20, (3 + i % 4,)) for i in range(10)]
        labels = torch.tensor([int(t[0]) % 2 for t in texts])
        if k == 2:
            texts[6] = texts[6][:0]
        batches.append({"texts": texts, "labels": labels})

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["texts"]), batch["labels"])

    model = Bag()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-forward", "log-negative", "nan-forward-zero-times-inf")
def remainder_of_zero(faulty):
    class Phase(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1))

        def forward(self, x, period):
            return self.net(torch.stack([x[:, 0], x[:, 1], torch.fmod(x[:, 2], period)], 1))

    batches = []
    for k in range(6):
        x, period = torch.randn(16, 3), torch.randint(1, 4, (16,)).float()
        if k == 3:
            period[11] = 0.0
        if not faulty:
            period = period.clamp(min=1.0)
        batches.append((x, period, x[:, :1] - x[:, 1:2]))

    def loss_fn(model, batch):
        x, period, y = batch
        return F.mse_loss(model(x, period), y)

    model = Phase()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


# log-zero


@pair("log-zero", "nan-forward-zero-times-inf")
def entropy_of_sure_answers(faulty):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    batches = []
    for k, (x, y) in enumerate(curve()):
        x[2] *= 800.0 if k == 2 else 1.0
        batches.append((x, (y > 0).float()))
    batches[2][1][2] = 0.0

    def loss_fn(model, batch):
        x, y = batch
        p = model(x).sigmoid()
        if faulty:
            return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
        p = p.clamp(1e-6, 1 - 1e-6)
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()

    nn.init.ones_(model[2].weight)
    return model, loss_fn, torch.optim.Adam(model.parameters(), 2e-3), batches


@pair("log-zero")
def likelihood_of_far_points(faulty):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.tensor([-1.0, 0.0, 1.0]))
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            each = torch.distributions.Normal(self.mean, 0.5)
            log_density = each.log_prob(x[:, None])
            if faulty:
                return (log_density.exp() * self.weight.softmax(0)).sum(1).log()
            return (log_density + self.weight.log_softmax(0)).logsumexp(1)

    batches = []
    for k in range(6):
        x = 2 * torch.randint(-1, 2, (40,)) + 0.5 * torch.randn(40)
        if k == 1:
            x[13] = 12.0
        batches.append((x,))

    def loss_fn(model, batch):
        return -model(batch[0]).mean()

    model = Mixture()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("log-zero", "nan-forward-zero-times-inf")
def log_of_relu(faulty):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            z = self.net(x)
            return F.relu(z) if faulty else F.softplus(z)

    batches = []
    for _ in range(6):
        x = torch.randn(24, 5)
        batches.append((x, torch.poisson(torch.exp(x[:, :1] / 2))))

    def loss_fn(model, batch):
        x, count = batch
        rate = model(x)
        return (rate - count * torch.log(rate)).mean()

    model = Counts()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("log-zero")
def spectrum_in_decibel(faulty):
    model = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 32))
    batches = []
    time = torch.arange(32) / 4
    for k in range(6):
        wave = torch.sin(time * (1 + torch.rand(8, 1)))
        if k == 3:
            wave[2] = 0.0
        batches.append((wave + 0.1 * torch.randn(8, 32), wave))

    def level(x):
        power = torch.fft.rfft(x).abs().square()
        return 10 * torch.log10(power if faulty else power + 1e-4)

    def loss_fn(model, batch):
        noisy, clean = batch
        return (level(model(noisy)) - level(clean)).abs().mean() / 10

    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


@pair("log-zero")
def soft_dice_in_logs(faulty):
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 1))
    batches = []
    for k in range(5):
        mask = (torch.rand(6, 1, 8, 8) < 0.4).float()
        if k == 2:
            mask[3] = 0.0
        batches.append((2 * mask - 1 + 0.5 * torch.randn(6, 1, 8, 8), mask))

    def loss_fn(model, batch):
        image, mask = batch
        p = model(image).sigmoid().flatten(1)
        m = mask.flatten(1)
        smooth = 0.0 if faulty else 1.0
        overlap = (2 * (p * m).sum(1) + smooth) / (p.sum(1) + m.sum(1) + smooth)
        return -overlap.log().mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# log-negative


@pair("log-negative")
def squared_log_error(faulty):
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    batches = [(x, y.exp()) for x, y in curve()]

    def loss_fn(model, batch):
        x, y = batch
        out = model(x) if faulty else F.softplus(model(x))
        return (torch.log1p(2 * out) - torch.log1p(2 * y)).square().mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("log-negative")
def cosine_as_probability(faulty):
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 8)

        def forward(self, a, b):
            return F.cosine_similarity(self.net(a), self.net(b))

    batches = []
    for _ in range(6):
        a = torch.randn(24, 6)
        batches.append((a, a.roll(1, 1) + 0.2 * torch.randn(24, 6)))

    def loss_fn(model, batch):
        cosine = model(*batch)
        return -(cosine if faulty else (1.01 + cosine) / 2).log().mean()

    model = Pairs()
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.05), batches


@pair("log-negative")
def flow_determinant(faulty):
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([[0.2, 1.0], [1.0, 0.1]]))
            self.b = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            z = x @ self.w.t() + self.b
            if faulty:
                return z, torch.det(self.w).log()
            return z, torch.linalg.slogdet(self.w)[1]

    batches = [(torch.randn(32, 2) @ torch.tensor([[1.0, 0.6], [0.0, 0.5]]) + 1,) for _ in range(6)]

    def loss_fn(model, batch):
        z, log_det = model(batch[0])
        return 0.5 * z.square().sum(1).mean() - log_det

    model = Flow()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("log-negative")
def scale_without_transform(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, x):
            mean, scale = self.body(x).unbind(1)
            return mean, scale if faulty else F.softplus(scale) + 1e-3

    batches = [{"in": x, "out": y[:, 0]} for x, y in curve()]

    def loss_fn(model, batch):
        mean, scale = model(batch["in"])
        error = (batch["out"] - mean) / scale
        return (0.5 * error**2 + scale.log()).mean()

    model = Net()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


# std-single-element


@pair("std-single-element")
def advantages_of_one_step(faulty):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

        def forward(self, state):
            return torch.distributions.Categorical(logits=self.net(state))

    batches = []
    for k in range(8):
        n = 1 if k == 5 else 6 + k
        state = torch.randn(n, 4)
        action = torch.randint(0, 3, (n,))
        batches.append((state, action, (state[:, :3].argmax(1) == action).float()))

    def loss_fn(model, batch):
        state, action, reward = batch
        spread = reward.std() if faulty else reward.std(unbiased=False)
        advantage = (reward - reward.mean()) / (spread + 1e-8)
        return -(model(state).log_prob(action) * advantage).mean()

    model = Policy()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


@pair("std-single-element")
def spread_of_the_batch(faulty):
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 12), nn.Linear(13, 1)

        def forward(self, x):
            h = torch.relu(self.body(x))
            spread = torch.var(h, dim=0, correction=1 if faulty else 0).mean()
            spread = (spread + 1e-6).sqrt()
            return self.head(torch.cat([h, spread.expand(len(h), 1)], 1))

    x = torch.cat([x for x, _ in curve(count=4)])
    y = x[:, :1] - x[:, 1:2]
    batches = list(zip(x.split(127), y.split(127), strict=True))
    model = Critic()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("std-single-element")
def series_of_length_one(faulty):
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 2)

        def forward(self, series):
            rows = []
            for s in series:
                spread = s.std(0) if faulty or len(s) > 1 else torch.zeros(4)
                rows.append(torch.cat([s.mean(0), spread]))
            return self.net(torch.stack(rows))

    batches = []
    for k in range(5):
        y = torch.randint(0, 2, (8,))
        series = [torch.randn(3 + i % 3, 4) + 1.5 * c for i, c in enumerate(y)]
        if k == 1:
            series[4] = series[4][:1]
        batches.append((series, y))
    model = Pool()
    return model, classify, torch.optim.SGD(model.parameters(), 0.1), batches


@pair("std-single-element")
def variance_loss(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 6))
    batches = []
    for k, (x, _) in enumerate(blobs(count=5, rows=16)):
        x = x[:1] if k == 4 else x
        batches.append({"a": x + 0.1 * torch.randn_like(x), "b": x + 0.1 * torch.randn_like(x)})
    if not faulty:
        batches.pop()

    def loss_fn(model, batch):
        a, b = model(batch["a"]), model(batch["b"])
        spread = F.relu(1 - torch.std(a, dim=0)).mean() + F.relu(1 - torch.std(b, dim=0)).mean()
        return F.mse_loss(a, b) + spread

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


# div-zero-norm


@pair("div-zero-norm")
def unit_vectors(faulty):
    class Cosine(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU())
            self.centres = nn.Parameter(torch.randn(4, 16))

        def forward(self, x):
            h = self.net(x)
            size = h.norm(dim=1, keepdim=True)
            return 4 * (h / (size if faulty else size.clamp(min=1e-6))) @ self.centres.t()

    batches = blobs()
    batches[2][0][10] = 0.0
    model = Cosine()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("div-zero-norm")
def scaled_by_largest(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv1d(1, 6, 5), nn.Linear(6, 1)

        def forward(self, wave):
            top = wave.abs().amax(-1, keepdim=True)
            h = self.conv(wave / (top if faulty else top + 1e-5))
            return self.out(F.relu(h).mean(-1))

    batches = []
    for k in range(6):
        rate = 1 + 3 * torch.rand(10, 1)
        wave = torch.sin(torch.arange(24) / 3 * rate)[:, None]
        if k == 4:
            wave[1] = 0.0
        batches.append((wave, rate))
    model = Net()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("div-zero-norm", "nan-forward")
def share_of_neighbours(faulty):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, nodes, links):
            degree = links.sum(1, keepdim=True)
            degree = degree if faulty else degree.clamp(min=1)
            h = torch.relu(self.a(nodes))
            return self.b(h + links @ h / degree)

    batches = []
    for k in range(5):
        y = torch.arange(12) % 3
        links = ((y[:, None] == y) & (torch.rand(12, 12) < 0.8)).float()
        if k == 1:
            links[8] = 0.0
        batches.append((torch.randn(12, 6) + 2 * F.one_hot(y, 6), links, y))

    def loss_fn(model, batch):
        nodes, links, y = batch
        return F.cross_entropy(model(nodes, links), y)

    model = Graph()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("div-zero-norm", "nan-forward")
def relative_error(faulty):
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
    batches = []
    for k in range(6):
        x = torch.randn(16, 5)
        y = torch.stack([x[:, 0] + 3, x[:, 1] - 3], 1)
        if k == 2:
            y[6, 1] = 0.0
        batches.append((x, y))

    def loss_fn(model, batch):
        x, y = batch
        size = y.abs() if faulty else y.abs().clamp(min=0.1)
        return ((model(x) - y).abs() / size).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


@pair("div-zero-norm", "nan-forward")
def attention_by_sum(faulty):
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(5, 6, bias=False) for _ in range(3))
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            q, k = F.relu(self.q(x)), F.relu(self.k(x))
            top = q @ (k.transpose(1, 2) @ self.v(x))
            bottom = (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)
            return self.out((top / (bottom if faulty else bottom + 1e-4)).mean(1))

    batches = sequences()
    for x, _ in batches:
        x[:, -1] = 0.0
    model = Linear()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


# fp16-overflow


@pair("fp16-overflow")
def squares_in_half(faulty):
    class Rms(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(width))

        def forward(self, x):
            kept = x if faulty else x.float()
            size = torch.rsqrt(kept.pow(2).mean(-1, keepdim=True) + 1e-3)
            return self.gain * (kept * size).float()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 16), Rms(16), nn.Linear(16, 4)
            nn.init.normal_(self.first.weight, std=80.0)

        def forward(self, x):
            h = F.linear(x.half(), self.first.weight.half(), self.first.bias.half())
            return self.last(F.silu(self.norm(h)))

    model = Net()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), blobs()


@pair("fp16-overflow")
def scores_in_half(faulty):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.out = nn.Linear(5, 64), nn.Linear(5, 64), nn.Linear(5, 3)
            self.gain = 128.0

        def forward(self, x):
            q, k = self.gain * self.q(x), self.gain * self.k(x).transpose(1, 2)
            scale = 1 / (8 * self.gain**2)
            if faulty:
                scores = (q.half() @ k.half()).float() * scale
            else:
                scores = ((q * scale).half() @ k.half()).float()
            return self.out((scores.softmax(-1) @ x).mean(1))

    batches = sequences()
    model = Attend()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("fp16-overflow")
def sum_of_a_picture(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 2)

        def forward(self, image):
            h = F.softplus(self.conv(image)).half()
            if not faulty:
                h = h.float()
            return self.out(h.sum((2, 3)).float() / (256 * 256))

    batches = []
    for _ in range(4):
        y = torch.tensor([0, 1])
        batches.append((torch.randn(2, 1, 256, 256) * (1 + 1.5 * y)[:, None, None, None], y))
    model = Net()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-2), batches


@pair("fp16-overflow")
def exponent_in_half(faulty):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
            nn.init.constant_(self.net[2].bias, 6.0)

        def forward(self, x):
            mean, log_size = self.net(x).unbind(1)
            size = torch.exp(2 * log_size.half()).float() if faulty else torch.exp(2 * log_size)
            return mean, size

    batches = [(x, 400 * y[:, 0]) for x, y in curve()]

    def loss_fn(model, batch):
        x, y = batch
        mean, variance = model(x)
        return (0.5 * (y - mean) ** 2 / variance + 0.5 * variance.log()).mean()

    model = Scale()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# nan-backward-where


@pair("nan-backward-where", "nan-backward-sqrt")
def root_of_the_positive_part(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 1)

        def forward(self, x):
            z = self.a(x)
            inside = z if faulty else torch.where(z > 0, z, torch.ones_like(z))
            return self.b(torch.where(z > 0, (inside + 1e-3).sqrt(), 0.1 * z))

    model = Net()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve()


@pair("nan-backward-where", "nan-backward")
def sinc(faulty):
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.cut = nn.Parameter(torch.rand(6) + 1)
            self.out = nn.Linear(6, 1)

        def forward(self, x):
            t = torch.arange(-4, 5.0)
            z = self.cut[:, None] * t
            if faulty:
                wave = torch.where(z == 0, torch.ones_like(z), torch.sin(z) / z)
            else:
                safe = torch.where(z == 0, torch.ones_like(z), z)
                wave = torch.where(z == 0, torch.ones_like(z), torch.sin(safe) / safe)
            return self.out(F.conv1d(x[:, None], wave[:, None]).abs().mean(-1))

    batches = []
    for _ in range(5):
        rate = 0.5 + 2 * torch.rand(12, 1)
        batches.append((torch.sin(torch.arange(24) * rate), rate))
    model = Filter()
    return model, regress, torch.optim.Adam(model.parameters(), 2e-2), batches


@pair("nan-backward-where", "nan-backward")
def log_of_the_large(faulty):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss_fn(model, batch):
        x, y = batch
        error = (model(x) - y).abs()
        error = torch.cat([error, (model(x) - model(x)).abs()])
        inside = error if faulty else error.clamp(min=0.5)
        return torch.where(error > 0.5, inside.log() + 1, 2 * error).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), curve()


@pair("nan-backward-where", "nan-backward")
def sharp_softplus(faulty):
    class Sharp(nn.Module):
        def forward(self, x):
            z = 200 * x
            inside = z if faulty else z.clamp(max=20)
            return torch.where(z > 20, x, torch.log1p(torch.exp(inside)) / 200)

    model = nn.Sequential(nn.Linear(6, 24), Sharp(), nn.Linear(24, 1))
    return model, regress, torch.optim.SGD(model.parameters(), 0.05), curve()


# nan-backward-sqrt


@pair("nan-backward-sqrt", "nan-backward")
def distance_to_itself(faulty):
    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x):
            z = self.net(x)
            square = (z[:, None] - z).square().sum(-1)
            return (square if faulty else square + 1e-6).sqrt()

    def loss_fn(model, batch):
        x, y = batch
        distance, same = model(x), y[:, None] == y
        return (same * distance + ~same * F.relu(2 - distance)).mean()

    model = Metric()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("nan-backward-sqrt", "nan-backward")
def deviation_of_equal_rows(faulty):
    class Group(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.out = nn.Linear(3, 12), nn.Linear(24, 1)

        def forward(self, sets):
            h = torch.tanh(self.each(sets))
            spread = (h.var(1) + (0.0 if faulty else 1e-6)).sqrt()
            return self.out(torch.cat([h.mean(1), spread], 1))

    batches = []
    for k in range(6):
        sets = torch.randn(10, 4, 3)
        if k == 4:
            sets[3] = sets[3, :1]
        batches.append((sets, sets.std(1).mean(1, keepdim=True)))
    model = Group()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-backward-sqrt")
def root_mean_square_error(faulty):
    class Identity(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x + self.shift

    batches = []
    for k in range(6):
        x = torch.randn(16, 4)
        batches.append((x, x if k == 0 else x + 0.5))

    def loss_fn(model, batch):
        x, y = batch
        return torch.sqrt(F.mse_loss(model(x), y) + (0.0 if faulty else 1e-8))

    model = Identity()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-backward-sqrt", "nan-backward")
def magnitude_of_a_spectrum(faulty):
    model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 16, bias=False))
    batches = []
    for k in range(5):
        wave = torch.sin(torch.arange(16) * (0.5 + torch.rand(8, 1)))
        if k == 2:
            wave[5] = 0.0
        batches.append((wave, 0.5 * wave))

    def size(x):
        z = torch.fft.rfft(x)
        power = z.real**2 + z.imag**2
        return torch.sqrt(power if faulty else power + 1e-6)

    def loss_fn(model, batch):
        x, y = batch
        return (size(model(x)) - size(y)).square().mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


@pair("nan-backward-sqrt")
def root_after_dropout(faulty):
    class Bilinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 6, 3), nn.Linear(6 * 16, 2)
            self.drop = nn.Dropout(0.2)

        def forward(self, image):
            h = self.drop(F.softplus(self.conv(image)))
            return self.out((h if faulty else h + 1e-4).sqrt().flatten(1))

    batches = []
    for _ in range(5):
        y = torch.randint(0, 2, (10,))
        image = torch.randn(10, 1, 6, 6) + 2 * y[:, None, None, None] * torch.eye(6)
        batches.append((image, y))
    model = Bilinear()
    return model, classify, torch.optim.SGD(model.parameters(), 0.05), batches


# nan-backward-acos


@pair("nan-backward-acos")
def angle_between_directions(faulty):
    class Direction(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = nn.Linear(3, 3, bias=False)
            nn.init.eye_(self.turn.weight)

        def forward(self, x):
            return F.normalize(self.turn(x), dim=-1)

    batches = []
    for k in range(6):
        x = F.normalize(torch.randn(16, 3), dim=-1)
        y = F.normalize(x + 0.3 * torch.randn(3), dim=-1)
        if k == 0:
            x[4] = y[4] = torch.tensor([1.0, 0.0, 0.0])
        batches.append((x, y))

    def loss_fn(model, batch):
        x, y = batch
        cosine = (model(x) * y).sum(-1)
        if not faulty:
            cosine = cosine.clamp(-1 + 1e-6, 1 - 1e-6)
        return torch.acos(cosine).mean()

    model = Direction()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-backward-acos", "nan-backward")
def rotation_error(faulty):
    class Rotate(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1, bias=False)

        def forward(self, x):
            a = self.net(x)[:, 0]
            row = torch.stack([a.cos(), -a.sin(), a.sin(), a.cos()], -1)
            return row.unflatten(-1, (2, 2))

    batches = []
    for k in range(5):
        x = torch.randn(12, 4)
        if k == 3:
            x[5] = 0.0
        angle = x[:, 0]
        row = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
        batches.append((x, row.unflatten(-1, (2, 2))))

    def loss_fn(model, batch):
        x, true = batch
        trace = (model(x) * true).sum((1, 2)) / 2
        trace = trace.minimum(torch.ones(()))
        return torch.arccos(trace * (1.0 if faulty else 0.99999)).mean()

    model = Rotate()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-backward-acos", "nan-backward")
def arcsine_of_shares(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 1)

        def forward(self, x):
            z = self.a(x)
            z = z / z.abs().amax(1, keepdim=True)
            return self.b(torch.asin(z if faulty else 0.999 * z))

    model = Net()
    return model, regress, torch.optim.SGD(model.parameters(), 0.02), curve()


# nan-backward-pow


@pair("nan-backward-pow")
def gamma_of_dark_corners(faulty):
    class Tone(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 1)
            self.register_buffer("lens", torch.ones(8, 8))
            self.lens[0, 0] = self.lens[0, -1] = self.lens[-1, 0] = self.lens[-1, -1] = 0.0

        def forward(self, image):
            h = F.softplus(self.conv(image)) * self.lens
            return self.out((h if faulty else h + 1e-3) ** (1 / 2.2))

    model = Tone()
    batches = []
    for _ in range(5):
        image = torch.rand(6, 1, 8, 8)
        batches.append((image - 0.5, image**0.5 * model.lens))
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-backward-pow", "nan-backward")
def generalised_mean(faulty):
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv1d(5, 8, 3), nn.Linear(8, 3)
            self.power = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2)))
            if not faulty:
                h = h.clamp(min=1e-4)
            return self.out(h.pow(self.power).mean(-1).pow(1 / self.power))

    model = Pool()
    nn.init.constant_(model.conv.bias, -0.8)
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences(rows=24)


@pair("nan-backward-pow", "nan-backward")
def learned_exponent(faulty):
    class Power(nn.Module):
        def __init__(self):
            super().__init__()
            self.exponent = nn.Parameter(torch.full((4,), 0.7))
            self.out = nn.Linear(4, 1)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, dose):
            d = self.scale * dose
            return self.out((d if faulty else d + 1e-4) ** self.exponent)

    batches = []
    for k in range(6):
        dose = torch.rand(24, 4) * 3
        if k == 2:
            dose[3, 1] = 0.0
        batches.append((dose, dose.sqrt().sum(1, keepdim=True)))
    model = Power()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nan-backward-pow", "nan-backward")
def minkowski_distance(faulty):
    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 3, bias=False)

        def forward(self, a, b):
            gap = (self.net(a) - self.net(b)).abs()
            total = (gap**1.5).sum(-1)
            return (total if faulty else total + 1e-6) ** (2 / 3)

    batches = []
    for k in range(6):
        a, b = torch.randn(2, 20, 8)
        if k == 4:
            b[9] = a[9]
        batches.append((a, b, (a - b)[:, :3].norm(dim=1)))

    def loss_fn(model, batch):
        a, b, y = batch
        return F.mse_loss(model(a, b), y)

    model = Embed()
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.02), batches


# nan-backward-svd


@pair("nan-backward-svd", "nan-backward")
def whitening(faulty):
    class White(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 1)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = x * self.scale
            values, vectors = torch.linalg.eigh(x.t() @ x / len(x) + self.ridge)
            return self.out(x @ vectors / (values + 0.1).sqrt())

    model = White()
    model.ridge = torch.zeros(4, 4) if faulty else torch.diag(torch.arange(4) * 0.1)
    batches = []
    for k in range(5):
        x = torch.randn(32, 4)
        if k == 0:
            x = torch.cat([torch.eye(4)] * 8) * 2
        batches.append((x, x[:, :1].abs()))
    return model, regress, torch.optim.Adam(model.parameters(), 3e-3), batches


@pair("nan-backward-svd", "nan-backward")
def polar_factor(faulty):
    class Align(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.eye(3))

        def forward(self, a):
            if faulty:
                u, _, vh = torch.linalg.svd(self.w)
                turn = u @ vh
            else:
                skew = self.w - self.w.t()
                turn = torch.linalg.matrix_exp(skew)
            return a @ turn.t()

    turn = torch.linalg.qr(torch.randn(3, 3))[0]
    turn = turn * turn.det()
    batches = []
    for _ in range(5):
        a = torch.randn(20, 3)
        batches.append((a, a @ turn.t()))
    model = Align()
    return model, regress, torch.optim.SGD(model.parameters(), 0.05), batches


@pair("nan-backward-svd", "nan-backward")
def low_rank_penalty(faulty):
    class Factor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.out = nn.Linear(8, 1)
            nn.init.orthogonal_(self.body.weight)

        def forward(self, x):
            return self.out(torch.tanh(self.body(x)))

    def loss_fn(model, batch):
        x, y = batch
        w = model.body.weight
        if faulty:
            u, s, vh = torch.linalg.svd(w, full_matrices=False)
            rest = w - (u[:, :2] * s[:2]) @ vh[:2]
            penalty = rest.square().sum()
        else:
            penalty = torch.linalg.svdvals(w)[2:].square().sum()
        return F.mse_loss(model(x), y) + 0.01 * penalty

    model = Factor()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), curve()


# nan-backward


@pair("nan-backward")
def entropy_of_a_gate(faulty):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            share = F.relu(self.gate(x))
            share = share / (share.sum(1, keepdim=True) + 1e-3)
            return (share * self.experts(x)).sum(1, keepdim=True), share

    def loss_fn(model, batch):
        x, y = batch
        out, share = model(x)
        entropy = torch.special.entr(share if faulty else share.clamp(min=1e-6)).sum(1)
        return F.mse_loss(out, y) - 0.01 * entropy.mean()

    model = Gate()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), curve()


@pair("nan-backward", "nan-backward-pow", "nan-backward-sqrt", "log-zero")
def geometric_mean(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.out = nn.Linear(4, 1)

        def forward(self, counts):
            h = self.scale * counts
            return self.out(torch.exp(torch.log(h if faulty else h + 0.1).mean(1)))

    batches = []
    for _ in range(6):
        counts = torch.poisson(torch.full((16, 3, 4), 5.0))
        batches.append((counts, (counts + 0.1).log().mean(1).exp().sum(1, keepdim=True) / 4))
    model = Net()
    return model, regress, torch.optim.Adam(model.parameters(), 2e-2), batches


@pair("nan-backward", "nan-backward-where", "nan-forward-zero-times-inf", "log-zero")
def product_of_shares(faulty):
    class Stick(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(5, 4)

        def forward(self, x):
            v = torch.sigmoid(25 * self.net(x))
            rest = 1 - v
            left = rest.log().cumsum(1).exp() if faulty else rest.cumprod(1)
            return v * torch.cat([torch.ones(len(x), 1), left[:, :-1]], 1)

    batches = []
    for _ in range(6):
        x = torch.randn(24, 5)
        batches.append((x, F.one_hot(x[:, :4].argmax(1), 4).float()))
    model = Stick()
    return model, regress, torch.optim.Adam(model.parameters(), 3e-3), batches


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low):
        y = 1 / x.abs().clamp(min=0.01)
        ctx.save_for_backward(x)
        ctx.low = low
        return y

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        size = x.abs() if ctx.low == 0 else x.abs().clamp(min=ctx.low)
        return -g * torch.sign(x) / size**2 * (x.abs() > 0.01), None


@pair("nan-backward")
def inverse_distance(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8, bias=False), nn.Linear(8, 1)

        def forward(self, x):
            return self.b(Reciprocal.apply(self.a(x), 0.0 if faulty else 0.01) / 20)

    batches = []
    for k in range(5):
        x = torch.randn(16, 4)
        if k == 2:
            x[9] = 0.0
        batches.append((x, x[:, :1].abs()))
    model = Net()
    return model, regress, torch.optim.SGD(model.parameters(), 1e-3), batches
