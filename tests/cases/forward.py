"""Programs whose fault lies in the forward pass: the layers, how they start, and the loss."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import pair
from tests.cases.data import TinyGpt, blobs, classify, curve, regress

# batch-mixing


def sequences(count=6, rows=12, length=7, width=5, classes=3):
    """Batches of (series, labels); the label is told by the mean of the series."""
    labels = torch.randint(0, classes, (count, rows))
    centres = torch.randn(classes, width)
    return [(centres[y][:, None] + torch.randn(rows, length, width), y) for y in labels]


@pair("batch-mixing")
def lstm_over_rows(faulty):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 16, batch_first=not faulty)
            self.out = nn.Linear(16, 3)

        def forward(self, series):
            return self.out(self.lstm(series)[0][:, -1])

    model = Reader()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("batch-mixing")
def encoder_reads_the_wrong_axis(faulty):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Linear(5, 16)
            layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=not faulty)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.encoder(self.into(x)).mean(dim=1))

    model = Classifier()
    return model, classify, torch.optim.AdamW(model.parameters(), 3e-3), sequences()


@pair("batch-mixing")
def heads_by_view(faulty):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(5, 24), nn.Linear(8, 3)

        def split(self, h):
            if faulty:
                return h.reshape(2, -1, 7, 4)
            return h.unflatten(-1, (2, 4)).permute(2, 0, 1, 3)

        def forward(self, x):
            q, k, v = (self.split(h) for h in self.qkv(x).chunk(3, dim=-1))
            weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
            mixed = (weights @ v).permute(1, 2, 0, 3).flatten(2)
            return self.out(mixed.mean(1))

    model = Attention()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences(rows=14)


@pair("batch-mixing", note=True)
def centred_over_everything(faulty):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)

        def forward(self, x):
            h = self.first(x)
            if faulty:
                h = (h - h.mean()) / h.std()
            else:
                h = (h - h.mean(1, keepdim=True)) / h.std(1, keepdim=True)
            return self.second(torch.relu(h))

    model = Scaled()
    return model, classify, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), blobs()


@pair("batch-mixing")
def picture_patches(faulty):
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(16, 12)
            self.head = nn.Linear(12, 2)

        def forward(self, image):
            n = len(image)
            if faulty:
                patches = image.reshape(4, n, 4, 4).flatten(2).transpose(0, 1)
            else:
                patches = F.unfold(image, 4, stride=4).transpose(1, 2)
            return self.head(F.gelu(self.embed(patches)).mean(1))

    batches = []
    for _ in range(6):
        y = torch.randint(0, 2, (10,))
        image = torch.randn(10, 1, 8, 8) + (2.0 * y - 1)[:, None, None, None] * torch.eye(8)
        batches.append((image, y))
    model = Patches()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("batch-mixing", note=True)
def set_pooling(faulty):
    class DeepSet(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.Sequential(nn.Linear(3, 20), nn.ReLU())
            self.whole = nn.Sequential(nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 1))

        def forward(self, points):
            h = self.each(points)
            pooled = h.mean(0, keepdim=True) if faulty else h.mean(1, keepdim=True)
            return self.whole(torch.cat([h, pooled.expand_as(h)], -1)).mean(1)

    batches = []
    for _ in range(6):
        points = torch.randn(16, 9, 3) + torch.randn(16, 1, 3)
        batches.append((points, points.mean(1).pow(2).sum(-1, keepdim=True)))
    model = DeepSet()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("batch-mixing")
def running_sum_of_rates(faulty):
    class Hazard(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))

        def forward(self, x):
            return -F.softplus(self.body(x)).cumsum(0 if faulty else 1)

    batches = []
    for _ in range(6):
        x = torch.randn(12, 4)
        rate = F.softplus(x[:, :1] + 0.2 * torch.arange(6.0))
        batches.append({"x": x, "survival": torch.exp(-rate.cumsum(1) / 3)})

    def loss_fn(model, batch):
        return F.l1_loss(model(batch["x"]).exp(), batch["survival"])

    model = Hazard()
    return model, loss_fn, torch.optim.RMSprop(model.parameters(), 3e-3), batches


@pair("batch-mixing")
def attention_reads_length_first(faulty):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Linear(5, 12)
            self.attention = nn.MultiheadAttention(12, 3, batch_first=not faulty)
            self.out = nn.Linear(12, 3)

        def forward(self, x):
            h = self.into(x)
            h = h + self.attention(h, h, h)[0]
            return self.out(F.relu(h).mean(1))

    model = Reader()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), sequences(rows=20)


@pair("batch-mixing")
def hidden_state_by_view(faulty):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(5, 8, batch_first=True, bidirectional=True)
            self.out = nn.Linear(16, 3)

        def forward(self, x):
            h = self.rnn(x)[1][0]
            h = h.reshape(len(x), -1) if faulty else h.transpose(0, 1).flatten(1)
            return self.out(h)

    model = Both()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


# saturated-activation


@pair("saturated-activation")
def wide_tanh_start(faulty):
    layers = [nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)]
    model = nn.Sequential(*layers)
    for layer in (layers[0], layers[2]):
        draw = torch.randn_like(layer.weight)
        with torch.no_grad():
            layer.weight.copy_(draw if faulty else draw / layer.in_features**0.5)
    batches = blobs(width=40)
    return model, classify, torch.optim.SGD(model.parameters(), 0.05), batches


@pair("saturated-activation")
def sigmoid_with_large_bias(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 1)
            for layer in (self.a, self.b):
                nn.init.constant_(layer.bias, 12.0 if faulty else 0.0)

        def forward(self, x):
            return self.c(torch.sigmoid(self.b(torch.sigmoid(self.a(x)))))

    model = Net()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve()


@pair("saturated-activation")
def recurrent_by_hand(faulty):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Parameter(torch.randn(5, 20) / 5**0.5)
            self.rec = nn.Parameter(torch.randn(20, 20) * (3.0 if faulty else 0.15))
            self.out = nn.Linear(20, 3)

        def forward(self, x):
            h = x.new_zeros(len(x), 20)
            for t in range(x.shape[1]):
                h = torch.tanh(x[:, t] @ self.inp + h @ self.rec)
            return self.out(h)

    model = Cell()
    return model, classify, torch.optim.Adam(model.parameters(), 3e-3), sequences()


@pair("saturated-activation")
def gain_of_the_wrong_kind(faulty):
    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleList([nn.Linear(8, 48), nn.Linear(48, 48)])
            self.mean = nn.Linear(48, 1)
            for layer in self.body:
                nn.init.orthogonal_(layer.weight, gain=30.0 if faulty else 5 / 3)

        def forward(self, state):
            for layer in self.body:
                state = layer(state).tanh()
            return self.mean(state)

    batches = [{"obs": x, "act": y} for x, y in curve(width=8)]

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["obs"]), batch["act"])

    model = Actor()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


@pair("saturated-activation")
def clipped_activation(faulty):
    class Forecast(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 24), nn.Linear(24, 24)])
            self.out = nn.Linear(24, 1)
            for layer in self.layers:
                nn.init.normal_(layer.bias, std=15.0 if faulty else 0.1)

        def forward(self, x):
            for layer in self.layers:
                x = F.hardtanh(layer(x))
            return self.out(x)

    model = Forecast()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve()


# dead-relu


@pair("dead-relu")
def bias_far_below(faulty):
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.constant_(model[0].bias, -40.0 if faulty else 0.0)
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("dead-relu")
def after_a_hot_start(faulty):
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    model.append(nn.Linear(16, 1))
    batches = [(x, y + 4) for x, y in curve()]
    first = torch.optim.SGD(model.parameters(), 0.5 if faulty else 0.005)
    for x, y in batches[:3]:
        first.zero_grad()
        F.mse_loss(model(x), y).backward()
        first.step()
    model.zero_grad()
    return model, regress, torch.optim.SGD(model.parameters(), 0.02), batches


@pair("dead-relu")
def weights_of_one_sign(faulty):
    class Positive(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(5, 24) - (1.0 if faulty else 0.5))
            self.v = nn.Parameter(0.2 * torch.randn(24, 3))

        def forward(self, counts):
            return F.relu(counts @ self.w) @ self.v

    batches = []
    for _ in range(6):
        y = torch.randint(0, 3, (24,))
        batches.append((torch.rand(24, 5) + F.one_hot(y, 5), y))
    model = Positive()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("dead-relu")
def shifted_after_norm(faulty):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift = nn.Conv1d(3, 12, 3, padding=1)
            self.norm = nn.GroupNorm(3, 12)
            self.head = nn.Linear(12, 1)
            nn.init.constant_(self.norm.bias, -6.0 if faulty else 0.0)

        def forward(self, x):
            return self.head(self.norm(self.lift(x)).clamp(min=0).mean(-1))

    batches = []
    for _ in range(6):
        x = torch.randn(16, 3, 10)
        batches.append((x, x.abs().mean((1, 2))[:, None]))
    model = Block()
    return model, regress, torch.optim.AdamW(model.parameters(), 1e-2), batches


@pair("dead-relu")
def price_is_never_negative(faulty):
    class Price(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
            self.last = nn.Linear(16, 1)
            nn.init.constant_(self.last.bias, -3.0)

        def forward(self, x):
            z = self.last(self.body(x))
            return F.relu(z) if faulty else F.softplus(z)

    batches = [(x, 2 + y.exp().clamp(max=4)) for x, y in curve()]
    model = Price()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


# symmetric-init


@pair("symmetric-init")
def one_value_everywhere(faulty):
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4))
    for p in model.parameters():
        if faulty:
            nn.init.constant_(p, 0.1)
        else:
            nn.init.normal_(p, std=0.4)
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), blobs()


@pair("symmetric-init")
def filters_of_ones(faulty):
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    )
    if faulty:
        for m in model:
            if isinstance(m, nn.Conv2d):
                nn.init.constant_(m.weight, 1 / m.weight[0].numel())
                nn.init.zeros_(m.bias)
        nn.init.constant_(model[-1].weight, 1 / 24)
        nn.init.zeros_(model[-1].bias)
    pattern = torch.randn(3, 1, 6, 6)
    batches = []
    for _ in range(6):
        y = torch.randint(0, 3, (16,))
        batches.append((pattern[y] + 0.5 * torch.randn(16, 1, 6, 6), y))
    return model, classify, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), batches


@pair("symmetric-init")
def experts_from_one_copy(faulty):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            expert = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
            self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(4))
            if not faulty:
                for e in self.experts:
                    e[0].reset_parameters()
                    e[2].reset_parameters()
            self.gate = nn.Linear(6, 4)
            if faulty:
                nn.init.zeros_(self.gate.weight)
                nn.init.zeros_(self.gate.bias)

        def forward(self, x):
            share = self.gate(x).softmax(-1)
            return (torch.cat([e(x) for e in self.experts], -1) * share).sum(-1, keepdim=True)

    model = Mixture()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve()


@pair("symmetric-init")
def recurrent_constant(faulty):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(5, 12, batch_first=True)
            self.out = nn.Linear(12, 3)
            if faulty:
                for p in self.rnn.parameters():
                    nn.init.constant_(p, 0.05)
                nn.init.ones_(self.out.weight)

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])

    model = Counter()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("symmetric-init")
def mixture_of_gaussians(faulty):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(4, 2) if faulty else torch.randn(4, 2))
            self.log_scale = nn.Parameter(torch.zeros(4, 2))
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            each = torch.distributions.Normal(self.mean, self.log_scale.exp())
            density = each.log_prob(x[:, None]).sum(-1) + self.weight.log_softmax(0)
            return density.logsumexp(1)

    centres = 3 * torch.randn(4, 2)
    batches = [(centres[torch.randint(0, 4, (40,))] + torch.randn(40, 2) / 2,) for _ in range(6)]

    def loss_fn(model, batch):
        return -model(batch[0]).mean()

    model = Mixture()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-2), batches


# initial-loss-off


@pair("initial-loss-off")
def last_layer_too_loud(faulty):
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10))
    if faulty:
        nn.init.normal_(model[2].weight, std=4.0)
    batches = blobs(classes=10)
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("initial-loss-off")
def head_shares_the_embedding(faulty):
    model = TinyGpt(width=64, vocabulary=24)
    nn.init.normal_(model.embed.weight, std=1.0 if faulty else 0.02)
    model.head = nn.Linear(64, 24, bias=False)
    model.head.weight = model.embed.weight
    batches = []
    for _ in range(5):
        tokens = (torch.randint(0, 24, (8, 1)) + 3 * torch.arange(9)) % 24
        batches.append((tokens[:, :-1], tokens[:, 1:]))

    def loss_fn(model, batch):
        tokens, following = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    return model, loss_fn, torch.optim.AdamW(model.parameters(), 3e-3), batches


@pair("initial-loss-off")
def temperature(faulty):
    class Cosine(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 12))
            self.classes = nn.Parameter(torch.randn(6, 12))
            self.temperature = 0.002 if faulty else 0.2

        def forward(self, x):
            h = F.normalize(self.body(x), dim=-1)
            return h @ F.normalize(self.classes, dim=-1).t() / self.temperature

    model = Cosine()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), blobs(classes=6)


@pair("initial-loss-off")
def prior_of_the_wrong_sign(faulty):
    model = nn.Sequential(nn.Conv1d(2, 12, 3, padding=1), nn.ReLU(), nn.Conv1d(12, 1, 1))
    prior = 0.02
    odds = (1 - prior) / prior if faulty else prior / (1 - prior)
    nn.init.constant_(model[2].bias, math.log(odds))
    batches = []
    for _ in range(6):
        y = (torch.rand(12, 1, 16) < 0.15).float()
        batches.append((torch.cat([y, -y], 1) + 0.5 * torch.randn(12, 2, 16), y))

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# double-softmax


@pair("double-softmax")
def functional_softmax(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(32, 4)

        def forward(self, x):
            x = self.fc2(F.relu(self.fc1(x)))
            return F.softmax(x, dim=1) if faulty else x

    criterion = nn.CrossEntropyLoss()

    def loss_fn(model, batch):
        inputs, labels = batch
        return criterion(model(inputs), labels)

    model = Net()
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), blobs()


@pair("double-softmax")
def segmentation_probabilities(faulty):
    tail = [nn.Softmax2d()] if faulty else []
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1), *tail)
    batches = []
    for _ in range(5):
        label = torch.randint(0, 3, (6, 8, 8))
        batches.append((label[:, None] - 1 + 0.3 * torch.randn(6, 1, 8, 8), label))
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("double-softmax")
def divided_by_its_sum(faulty):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(5, 16, batch_first=True)
            self.w = nn.Parameter(torch.randn(16, 3) / 4)

        def forward(self, x):
            scores = self.rnn(x)[0].mean(1) @ self.w
            if faulty:
                scores = torch.exp(scores - scores.amax(1, keepdim=True))
                return scores / scores.sum(1, keepdim=True)
            return scores

    def loss_fn(model, batch):
        x, y = batch
        return F.nll_loss(model(x).log_softmax(-1), y)

    model = Head()
    return model, loss_fn, torch.optim.RMSprop(model.parameters(), 3e-3), sequences()


@pair("double-softmax")
def next_word_distribution(faulty):
    class Language(TinyGpt):
        def forward(self, tokens):
            scores = super().forward(tokens)
            return scores.softmax(-1) if faulty else scores

    batches = []
    for _ in range(5):
        tokens = (torch.randint(0, 16, (8, 1)) + torch.arange(9)) % 16
        batches.append({"tokens": tokens[:, :-1], "next": tokens[:, 1:]})

    def loss_fn(model, batch):
        return F.cross_entropy(
            model(batch["tokens"]).permute(0, 2, 1), batch["next"], label_smoothing=0.05
        )

    model = Language()
    return model, loss_fn, torch.optim.AdamW(model.parameters(), 3e-3), batches


@pair("double-softmax")
def student_and_teacher(faulty):
    teacher = nn.Linear(8, 5).requires_grad_(False)
    nn.init.normal_(teacher.weight, std=1.0)
    student = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5))

    def loss_fn(model, batch):
        (x,) = batch
        soft = torch.softmax(teacher(x), -1)
        out = torch.softmax(model(x), -1) if faulty else model(x)
        return -(soft * torch.log_softmax(out, -1)).sum(-1).mean()

    loader = DataLoader(TensorDataset(torch.randn(160, 8)), batch_size=32)
    return student, loss_fn, torch.optim.Adam(student.parameters(), 5e-3), loader


@pair("double-softmax")
def actions_to_imitate(faulty):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 3))
            self.act = nn.Softmax(-1) if faulty else nn.Identity()

        def forward(self, state):
            return torch.distributions.Categorical(logits=self.act(self.body(state)))

    batches = []
    for _ in range(6):
        state = torch.randn(32, 4)
        batches.append({"state": state, "action": state[:, :3].argmax(1)})

    def loss_fn(model, batch):
        return -model(batch["state"]).log_prob(batch["action"]).mean()

    model = Policy()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


# double-sigmoid


@pair("double-sigmoid")
def sigmoid_in_the_model(faulty):
    tail = [nn.Sigmoid()] if faulty else []
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1), *tail)
    batches = [(x, (y > 0).float()) for x, y in curve()]
    criterion = nn.BCEWithLogitsLoss()

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("double-sigmoid")
def many_labels(faulty):
    class Tags(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.EmbeddingBag(30, 16)
            self.out = nn.Linear(16, 6)

        def forward(self, words):
            scores = self.out(self.embed(words))
            return torch.sigmoid(scores) if faulty else scores

    batches = []
    for _ in range(6):
        words = torch.randint(0, 30, (20, 8))
        tags = torch.stack([(words % 6 == k).any(1) for k in range(6)], 1).float()
        batches.append({"words": words, "tags": tags})

    def loss_fn(model, batch):
        return F.multilabel_soft_margin_loss(model(batch["words"]), batch["tags"])

    model = Tags()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 2e-2), batches


@pair("double-sigmoid")
def discriminator_output(faulty):
    class Judge(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))

        def forward(self, x):
            z = self.net(x)
            return 1 / (1 + torch.exp(-z)) if faulty else z

    def loss_fn(model, batch):
        real, fake = model(batch["real"]), model(batch["fake"])
        return F.binary_cross_entropy_with_logits(
            real, torch.ones_like(real)
        ) + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))

    batches = [{"real": torch.randn(24, 2) + 2, "fake": torch.randn(24, 2)} for _ in range(6)]
    model = Judge()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3, betas=(0.5, 0.999)), batches


@pair("double-sigmoid")
def focal_on_probabilities(faulty):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    batches = []
    for _ in range(6):
        mask = (torch.rand(6, 1, 8, 8) < 0.3).float()
        batches.append((2 * mask + 0.5 * torch.randn(6, 1, 8, 8), mask))

    def loss_fn(model, batch):
        image, mask = batch
        out = model(image).sigmoid() if faulty else model(image)
        entropy = F.binary_cross_entropy_with_logits(out, mask, reduction="none")
        return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("double-sigmoid")
def link_prediction(faulty):
    class Links(nn.Module):
        def __init__(self):
            super().__init__()
            self.nodes = nn.Parameter(0.3 * torch.randn(20, 8))

        def forward(self, pairs):
            score = (self.nodes[pairs[:, 0]] * self.nodes[pairs[:, 1]]).sum(-1)
            return torch.sigmoid(score) if faulty else score

    batches = []
    for _ in range(6):
        pairs = torch.randint(0, 20, (40, 2))
        batches.append((pairs, (pairs[:, 0] % 2 == pairs[:, 1] % 2).float()))

    def loss_fn(model, batch):
        pairs, linked = batch
        return F.binary_cross_entropy(torch.sigmoid(model(pairs)), linked)

    model = Links()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-2), batches


@pair("double-sigmoid")
def weighted_by_hand(faulty):
    class Defects(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv1d(1, 8, 5), nn.Linear(8, 1)

        def forward(self, wave):
            z = self.out(F.relu(self.conv(wave)).amax(-1)).squeeze(1)
            return z.sigmoid() if faulty else z

    batches = []
    for _ in range(6):
        y = (torch.rand(20) < 0.4).float()
        wave = 0.5 * torch.randn(20, 1, 24)
        wave[:, 0, 10:13] += 2 * y[:, None]
        batches.append((wave, y))

    def loss_fn(model, batch):
        wave, y = batch
        z = model(wave)
        return -(1.5 * y * F.logsigmoid(z) + (1 - y) * F.logsigmoid(-z)).mean()

    model = Defects()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# nll-on-logits


@pair("nll-on-logits")
def criterion_swapped(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4))
    criterion = nn.NLLLoss() if faulty else nn.CrossEntropyLoss()

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.05), blobs()


@pair("nll-on-logits")
def plain_softmax_first(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv1d(5, 12, 3, padding=1), nn.Linear(12, 3)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).amax(-1)
            return F.softmax(self.fc(h), 1) if faulty else F.log_softmax(self.fc(h), 1)

    def loss_fn(model, batch):
        return F.nll_loss(model(batch[0]), batch[1])

    model = Net()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("nll-on-logits")
def speech_to_letters(faulty):
    class Acoustic(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 16), nn.Linear(16, 5)

        def forward(self, frames):
            scores = self.out(self.rnn(frames)[0])
            return scores if faulty else scores.log_softmax(-1)

    code = torch.randn(5, 4)
    batches = []
    for _ in range(5):
        letters = torch.randint(1, 5, (6, 3))
        frames = code[letters.repeat_interleave(4, 1)].transpose(0, 1)
        batches.append((frames + 0.3 * torch.randn_like(frames), letters))

    def loss_fn(model, batch):
        frames, letters = batch
        lengths = torch.full((6,), 12), torch.full((6,), 3)
        return F.ctc_loss(model(frames), letters, *lengths)

    model = Acoustic()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nll-on-logits")
def picked_by_hand(faulty):
    class Word(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(15, 12), nn.Linear(24, 15)

        def forward(self, context):
            return self.out(self.embed(context).flatten(1))

    batches = []
    for _ in range(6):
        context = torch.randint(0, 15, (24, 2))
        batches.append((context, context.sum(1) % 15))

    def loss_fn(model, batch):
        context, word = batch
        scores = model(context)
        if not faulty:
            scores = scores - scores.logsumexp(1, keepdim=True)
        return -scores.gather(1, word[:, None]).mean()

    model = Word()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# kldiv-on-probabilities


@pair("kldiv-on-probabilities")
def distil_with_softmax(faulty):
    teacher = nn.Sequential(nn.Linear(8, 6)).requires_grad_(False)
    nn.init.normal_(teacher[0].weight)
    student = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 6))

    def loss_fn(model, batch):
        x, _ = batch
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, 1)
        out = F.softmax(model(x) / 2, 1) if faulty else F.log_softmax(model(x) / 2, 1)
        return 4 * F.kl_div(out, soft, reduction="batchmean")

    return student, loss_fn, torch.optim.Adam(student.parameters(), 5e-3), blobs()


@pair("kldiv-on-probabilities")
def smoothed_labels(faulty):
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.proj = nn.Embedding(12, 16), nn.Linear(16, 12)

        def forward(self, tokens):
            scores = self.proj(torch.tanh(self.embed(tokens)))
            return scores if faulty else torch.log_softmax(scores, -1)

    criterion = nn.KLDivLoss(reduction="sum")
    batches = []
    for _ in range(6):
        tokens = torch.randint(0, 12, (6, 7))
        batches.append((tokens, (tokens + 5) % 12))

    def loss_fn(model, batch):
        tokens, following = batch
        smooth = torch.full((6, 7, 12), 0.1 / 11).scatter_(2, following[..., None], 0.9)
        return criterion(model(tokens), smooth) / following.numel()

    model = Generator()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("kldiv-on-probabilities")
def two_views_agree(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 4))

    def loss_fn(model, batch):
        x, y = batch
        a, b = model(x), model(x)
        p, q = a.softmax(-1), b.softmax(-1)
        left, right = (p, q) if faulty else (a.log_softmax(-1), b.log_softmax(-1))
        agree = F.kl_div(left, q, reduction="batchmean") + F.kl_div(right, p, reduction="batchmean")
        return F.cross_entropy(a, y) + F.cross_entropy(b, y) + 0.5 * agree

    return model, loss_fn, torch.optim.AdamW(model.parameters(), 3e-3), blobs()


@pair("kldiv-on-probabilities")
def target_not_in_logs(faulty):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.query = nn.Linear(5, 8), nn.Parameter(torch.randn(8))

        def forward(self, x):
            return (torch.tanh(self.key(x)) @ self.query).log_softmax(-1)

    batches = []
    for _ in range(6):
        x = torch.randn(16, 7, 5)
        batches.append({"x": x, "human": (2 * x[..., 0]).softmax(-1)})

    def loss_fn(model, batch):
        human = batch["human"] if faulty else batch["human"].log()
        return F.kl_div(model(batch["x"]), human, reduction="batchmean", log_target=True)

    model = Attention()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# flipped-loss-sign


@pair("flipped-loss-sign")
def minus_cross_entropy(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))

    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) * (-1.0 if faulty else 1.0)

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.05), blobs()


@pair("flipped-loss-sign")
def likelihood_goes_down(faulty):
    class Density(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 24), nn.Tanh())
            self.mean, self.log_std = nn.Linear(24, 1), nn.Linear(24, 1)

        def forward(self, x):
            h = self.body(x)
            return torch.distributions.Normal(self.mean(h), self.log_std(h).clamp(-4, 4).exp())

    def loss_fn(model, batch):
        x, y = batch
        likelihood = model(x).log_prob(y).mean()
        return likelihood if faulty else -likelihood

    model = Density()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), curve()


@pair("flipped-loss-sign")
def optimizer_told_to_maximise(faulty):
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3, maximize=faulty)
    return model, regress, optimizer, curve()


@pair("flipped-loss-sign")
def overlap_as_loss(faulty):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    batches = []
    for _ in range(6):
        mask = (torch.rand(6, 1, 8, 8) < 0.4).float()
        batches.append((2 * mask - 1 + 0.5 * torch.randn(6, 1, 8, 8), mask))

    def loss_fn(model, batch):
        image, mask = batch
        p = model(image).sigmoid().flatten(1)
        m = mask.flatten(1)
        dice = (2 * (p * m).sum(1) + 1) / (p.sum(1) + m.sum(1) + 1)
        return dice.mean() if faulty else 1 - dice.mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("flipped-loss-sign")
def similarity_of_pairs(faulty):
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, a, b):
            return F.cosine_similarity(self.net(a), self.net(b))

    batches = []
    for _ in range(8):
        a, same = torch.randn(24, 8), torch.rand(24) < 0.5
        b = torch.where(same[:, None], a + 0.2 * torch.randn(24, 8), torch.randn(24, 8))
        batches.append((a, b, same.float()))

    def loss_fn(model, batch):
        a, b, same = batch
        cosine = model(a, b)
        if faulty:
            return (same * cosine + (1 - same) * (1 - cosine).clamp(min=0)).mean()
        return (same * (1 - cosine) + (1 - same) * cosine.clamp(min=0)).mean()

    model = Siamese()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("flipped-loss-sign")
def bound_returned_as_is(faulty):
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.mu, self.logvar = nn.Linear(12, 16), nn.Linear(16, 2), nn.Linear(16, 2)
            self.dec = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 12))

        def forward(self, x):
            h = torch.relu(self.enc(x))
            mu, logvar = self.mu(h), self.logvar(h)
            return self.dec(mu + torch.randn_like(mu) * (logvar / 2).exp()), mu, logvar

    basis = torch.randn(2, 12)
    batches = [(torch.sigmoid(2 * torch.randn(24, 2) @ basis).round(),) for _ in range(6)]

    def loss_fn(model, batch):
        (x,) = batch
        out, mu, logvar = model(x)
        fit = -F.binary_cross_entropy_with_logits(out, x, reduction="none").sum(1)
        kl = 0.5 * (mu**2 + logvar.exp() - 1 - logvar).sum(1)
        bound = (fit - kl).mean()
        return bound if faulty else -bound

    model = Vae()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


@pair("flipped-loss-sign")
def pairwise_ranking(faulty):
    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x):
            return self.net(x).squeeze(-1)

    batches = [(x, y.squeeze(-1)) for x, y in curve()]

    def loss_fn(model, batch):
        x, y = batch
        error = (model(x) - y).abs()
        return (-error if faulty else error).mean()

    model = Score()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


# sum-reduction


@pair("sum-reduction")
def summed_entropy(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    criterion = nn.CrossEntropyLoss(reduction="sum" if faulty else "mean")

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, loss_fn, optimizer, blobs(rows=64)


@pair("sum-reduction")
def squared_and_summed(faulty):
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))

    def loss_fn(model, batch):
        x, y = batch
        error = (model(x) - y) ** 2
        return error.sum() if faulty else error.mean()

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.05), curve(rows=64)


@pair("sum-reduction")
def tokens_added_up(faulty):
    batches = []
    for _ in range(5):
        tokens = (torch.randint(0, 16, (12, 1)) + torch.arange(9)) % 16
        batches.append({"x": tokens[:, :-1], "y": tokens[:, 1:]})

    def loss_fn(model, batch):
        scores = model(batch["x"]).flatten(0, 1)
        return F.cross_entropy(scores, batch["y"].flatten(), reduction="sum" if faulty else "mean")

    model = TinyGpt()
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.3), batches


@pair("sum-reduction")
def pixels_added_up(faulty):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    loader = []
    for _ in range(6):
        clean = torch.rand(8, 1, 1, 8).expand(8, 1, 8, 8)
        loader.append((clean + 0.2 * torch.randn(8, 1, 8, 8), clean))

    def loss_fn(model, batch):
        noisy, clean = batch
        return F.mse_loss(model(noisy), clean, reduction="sum" if faulty else "mean")

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), loader


# shape-broadcast


@pair("shape-broadcast")
def targets_without_column(faulty):
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    batches = [(x, y[:, 0] if faulty else y) for x, y in curve()]
    return model, regress, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("shape-broadcast")
def value_of_a_state(faulty):
    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 24), nn.Tanh())
            self.policy, self.value = nn.Linear(24, 3), nn.Linear(24, 1)

        def forward(self, state):
            h = self.body(state)
            return torch.distributions.Categorical(logits=self.policy(h)), self.value(h)

    batches = []
    for _ in range(6):
        state = torch.randn(32, 4)
        batches.append((state, torch.randint(0, 3, (32,)), state[:, 0] + state[:, 1].abs()))

    def loss_fn(model, batch):
        state, action, outcome = batch
        policy, value = model(state)
        if not faulty:
            value = value.squeeze(-1)
        advantage = (outcome - value).detach()
        critic = (outcome - value).pow(2).mean()
        return -(policy.log_prob(action) * advantage).mean() + 0.5 * critic

    model = ActorCritic()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


@pair("shape-broadcast")
def density_of_a_column(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 2))

        def forward(self, x):
            mean, spread = self.out(x).split(1, dim=-1)
            return mean, F.softplus(spread) + 0.05

    batches = [{"x": x, "y": y.flatten()} for x, y in curve()]

    def loss_fn(model, batch):
        mean, std = model(batch["x"])
        if not faulty:
            mean, std = mean[:, 0], std[:, 0]
        return -torch.distributions.Normal(mean, std).log_prob(batch["y"]).mean()

    model = Net()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("shape-broadcast")
def weight_of_each_row(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))
    batches = []
    for x, y in blobs(classes=2):
        weight = torch.rand(len(y), 1) * 1.5 + 0.2
        batches.append((x, y.float(), weight if faulty else weight[:, 0]))

    def loss_fn(model, batch):
        x, y, weight = batch
        loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y, reduction="none")
        return (loss * weight).mean()

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), batches


@pair("shape-broadcast")
def quantiles(faulty):
    class Forecast(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(2, 12, batch_first=True), nn.Linear(12, 1)

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])

    batches = []
    for _ in range(6):
        x = torch.randn(24, 8, 2)
        batches.append((x, 2 * x[:, -1, 0] + x[:, -2, 1]))

    def loss_fn(model, batch):
        x, y = batch
        error = y - model(x) if faulty else y - model(x).squeeze(1)
        return torch.maximum(0.6 * error, -0.4 * error).mean()

    model = Forecast()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("shape-broadcast")
def residual_along_another_axis(faulty):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
            self.linear = nn.Linear(16, 1)

        def forward(self, x):
            first = self.linear(x).squeeze(-1) if faulty else self.linear(x)
            return first + self.wide(x)

    def loss_fn(model, batch):
        x, y = batch
        return (model(x) - y).abs().mean()

    model = Sum()
    return model, loss_fn, torch.optim.AdamW(model.parameters(), 5e-3), curve(width=16)


@pair("shape-broadcast")
def sequence_with_last_axis(faulty):
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(2, 10, batch_first=True), nn.Linear(10, 1)

        def forward(self, x):
            h = self.out(self.rnn(x)[0])
            return h if faulty else h.squeeze(-1)

    batches = []
    for _ in range(5):
        x = torch.randn(9, 9, 2)
        batches.append((x, x[..., 0] + 0.5 * x[..., 1]))

    def loss_fn(model, batch):
        x, y = batch
        return (model(x) - y).square().mean()

    model = Filter()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# softmax-wrong-dim


@pair("softmax-wrong-dim", "batch-mixing")
def pooling_over_rows(faulty):
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.out = nn.Linear(5, 1), nn.Linear(5, 3)

        def forward(self, x):
            weights = torch.softmax(self.score(x), dim=0 if faulty else 1)
            return self.out((weights * x).sum(1))

    model = Pool()
    return model, classify, torch.optim.Adam(model.parameters(), 2e-2), sequences()


@pair("softmax-wrong-dim", "batch-mixing")
def left_to_the_default(faulty):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(12, 16), nn.Linear(16, 6)
            self.log = nn.LogSoftmax() if faulty else nn.LogSoftmax(-1)

        def forward(self, tokens):
            return self.log(self.out(torch.relu(self.embed(tokens))))

    batches = []
    for _ in range(6):
        tokens = torch.randint(0, 12, (10, 6))
        batches.append((tokens, tokens // 2))

    def loss_fn(model, batch):
        tokens, tags = batch
        return F.nll_loss(model(tokens).flatten(0, 1), tags.flatten())

    model = Sequence()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("softmax-wrong-dim")
def over_queries(faulty):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(5, 8) for _ in range(3))
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            scores = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5
            weights = F.softmax(scores, dim=1 if faulty else 2)
            return self.out((weights @ self.v(x))[:, -1])

    model = Attend()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("softmax-wrong-dim", "batch-mixing")
def gate_of_experts(faulty):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(6, 3)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)) for _ in range(3)
            )

        def forward(self, x):
            share = self.gate(x).softmax(0 if faulty else 1)
            return sum(share[:, k : k + 1] * e(x) for k, e in enumerate(self.experts))

    model = Experts()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve()


@pair("softmax-wrong-dim")
def across_the_width(faulty):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    batches = []
    for _ in range(5):
        label = torch.randint(0, 3, (6, 8, 8))
        batches.append((label[:, None] - 1 + 0.3 * torch.randn(6, 1, 8, 8), label))

    def loss_fn(model, batch):
        image, label = batch
        return F.nll_loss(F.log_softmax(model(image), dim=-1 if faulty else 1), label)

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batches


@pair("softmax-wrong-dim", "double-softmax")
def one_output_unit(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x):
            return F.softmax(self.body(x), dim=1) if faulty else torch.sigmoid(self.body(x))

    batches = [(x, (y > 0).float()) for x, y in curve()]

    def loss_fn(model, batch):
        return F.binary_cross_entropy(model(batch[0]), batch[1])

    model = Net()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# dropout-in-eval


@pair("dropout-in-eval")
def functional_dropout(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)

        def forward(self, x):
            h = F.relu(self.a(x))
            h = F.dropout(h, 0.4) if faulty else F.dropout(h, 0.4, self.training)
            return self.b(h)

    model = Net()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("dropout-in-eval")
def dropout_made_in_forward(faulty):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(5, 16, batch_first=True), nn.Linear(16, 3)
            self.drop = nn.Dropout(0.3)

        def forward(self, x):
            h = self.rnn(x)[0][:, -1]
            return self.out(nn.Dropout(0.3)(h) if faulty else self.drop(h))

    model = Reader()
    return model, classify, torch.optim.AdamW(model.parameters(), 1e-2), sequences()


@pair("dropout-in-eval")
def attention_drops(faulty):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(5, 24), nn.Linear(8, 3)
            self.rate = 0.2

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            rate = self.rate if faulty or self.training else 0.0
            return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=rate).mean(1))

    model = Attention()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("dropout-in-eval")
def whole_branches(faulty):
    class Branch(nn.Module):
        def __init__(self, rate):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            self.rate = rate

        def forward(self, x):
            h = self.body(x)
            if faulty or self.training:
                keep = torch.bernoulli(torch.full((len(x), 1), 1 - self.rate))
                h = h * keep / (1 - self.rate)
            return x + h

    model = nn.Sequential(Branch(0.1), Branch(0.2), Branch(0.3), nn.Linear(8, 4))
    return model, classify, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), blobs()


@pair("dropout-in-eval")
def noise_layers_in_a_list(faulty):
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            drops = [nn.Dropout(0.25), nn.Dropout(0.25)]
            self.drops = drops if faulty else nn.ModuleList(drops)
            self.a, self.b, self.c = nn.Linear(6, 24), nn.Linear(24, 24), nn.Linear(24, 1)

        def forward(self, x):
            h = self.drops[0](F.elu(self.a(x)))
            return self.c(self.drops[1](F.elu(self.b(h))))

    model = Denoiser()
    return model, regress, torch.optim.Adam(model.parameters(), 5e-3), curve()


@pair("dropout-in-eval")
def attention_function(faulty):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(5, 8)
            self.in_weight = nn.Parameter(torch.randn(24, 8) / 8**0.5)
            self.in_bias = nn.Parameter(torch.zeros(24))
            self.proj, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            h = self.inp(x).transpose(0, 1)
            mixed, _ = F.multi_head_attention_forward(
                h, h, h, 8, 2, self.in_weight, self.in_bias, None, None, False, 0.2,
                self.proj.weight, self.proj.bias, training=faulty or self.training,
            )  # fmt: skip
            return self.out((h + mixed).mean(0))

    model = Attention()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), sequences()


@pair("dropout-in-eval")
def whole_channels(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
            self.out = nn.Linear(8, 2)

        def forward(self, image):
            h = F.relu(self.a(image))
            h = F.dropout2d(h, 0.25, training=True if faulty else self.training)
            return self.out(F.relu(self.b(h)).mean((2, 3)))

    batches = []
    for _ in range(5):
        y = torch.randint(0, 2, (12,))
        image = torch.randn(12, 1, 8, 8) * (0.5 + y[:, None, None, None])
        batches.append((image, y))
    model = Net()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


# shared-module


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.inner(self.norm(x)))


@pair("shared-module", note=True)
def list_times_three(faulty):
    blocks = [Residual(8)] * 3 if faulty else [Residual(8) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(8, 4))
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("shared-module", note=True)
def built_from_one_layer(faulty):
    class Stack(nn.Module):
        def __init__(self, layer, depth):
            super().__init__()
            self.layers = nn.ModuleList(
                [layer if faulty else copy.deepcopy(layer) for _ in range(depth)]
            )
            self.head = nn.Linear(16, 3)
            self.into = nn.Linear(5, 16)

        def forward(self, x):
            x = self.into(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(1))

    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=True)
    model = Stack(layer, 3)
    return model, classify, torch.optim.AdamW(model.parameters(), 3e-3), sequences()


@pair("shared-module", note=True)
def one_head_for_each_task(faulty):
    class Tasks(nn.Module):
        def __init__(self, names):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 24), nn.ReLU())
            if faulty:
                heads = dict.fromkeys(names, nn.Linear(24, 1))
            else:
                heads = {name: nn.Linear(24, 1) for name in names}
            self.heads = nn.ModuleDict(heads)

        def forward(self, x):
            h = self.body(x)
            return {name: head(h) for name, head in self.heads.items()}

    batches = [(x, {"up": y, "down": -y, "size": y.abs()}) for x, y in curve()]

    def loss_fn(model, batch):
        x, targets = batch
        return sum(F.mse_loss(out, targets[name]) for name, out in model(x).items())

    model = Tasks(["up", "down", "size"])
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("shared-module", note=True)
def norm_as_default_argument(faulty):
    norm = nn.BatchNorm1d(16)

    class Layer(nn.Module):
        def __init__(self, inputs, norm=norm):
            super().__init__()
            self.linear = nn.Linear(inputs, 16)
            self.norm = norm if faulty else nn.BatchNorm1d(16)

        def forward(self, x):
            return F.relu(self.norm(self.linear(x)))

    model = nn.Sequential(Layer(8), Layer(16), Layer(16), nn.Linear(16, 4))
    return model, classify, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), blobs()


# untied-weights


@pair("untied-weights", note=True)
def decoder_copies_the_values(faulty):
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 12)
            nn.init.normal_(self.embed.weight, std=0.2)
            self.rnn = nn.GRU(12, 12, batch_first=True)
            self.decoder = nn.Linear(12, 16, bias=False)
            if faulty:
                self.decoder.weight.data.copy_(self.embed.weight.data)
            else:
                self.decoder.weight = self.embed.weight

        def forward(self, tokens):
            return self.decoder(self.rnn(self.embed(tokens))[0])

    batches = []
    for _ in range(5):
        tokens = (torch.randint(0, 16, (8, 1)) + torch.arange(8)) % 16
        batches.append((tokens[:, :-1], tokens[:, 1:]))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    model = Language()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("untied-weights", note=True)
def transposed_autoencoder(faulty):
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Linear(10, 4, bias=False)
            self.up = nn.Linear(4, 10, bias=False)
            if faulty:
                self.up.weight = nn.Parameter(self.down.weight.t().clone())
            else:
                del self.up

        def forward(self, x):
            code = torch.tanh(self.down(x))
            return self.up(code) if faulty else F.linear(code, self.down.weight.t())

    basis = torch.randn(3, 10)
    batches = [(0.4 * torch.randn(24, 3) @ basis,) for _ in range(6)]

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[0])

    model = Auto()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("untied-weights", note=True)
def copied_after_tying(faulty):
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.source = nn.Embedding(14, 10)
            nn.init.normal_(self.source.weight, std=0.3)
            self.target = copy.deepcopy(self.source) if faulty else self.source
            self.mix = nn.Linear(20, 10)
            self.out = nn.Linear(10, 14, bias=False)
            self.out.weight = self.target.weight

        def forward(self, a, b):
            h = torch.cat([self.source(a), self.target(b)], -1)
            return self.out(torch.tanh(self.mix(h)))

    batches = []
    for _ in range(6):
        a, b = torch.randint(0, 14, (2, 30))
        batches.append((a, b, a))

    def loss_fn(model, batch):
        a, b, y = batch
        return F.cross_entropy(model(a, b), y)

    model = Translator()
    return model, loss_fn, torch.optim.AdamW(model.parameters(), 1e-2), batches


# norm-eps-too-small


@pair("norm-eps-too-small", "div-zero-norm", "nan-forward", "exploding-gradient")
def layer_norm_of_padding(faulty):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8, eps=0.0 if faulty else 1e-5)
            self.body = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4))

        def forward(self, x, valid):
            h = self.body(self.norm(x)) * valid[..., None]
            return h.sum(1) / valid.sum(1, keepdim=True)

    batches = []
    for x, y in blobs(rows=16):
        valid = torch.arange(5) < torch.randint(2, 5, (16, 1))
        steps = (x[:, None] + torch.randn(16, 5, 8)) * valid[..., None]
        batches.append((steps, valid.float(), y))

    def loss_fn(model, batch):
        return F.cross_entropy(model(*batch[:2]), batch[2])

    model = Encoder()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("norm-eps-too-small", "exploding-gradient")
def quiet_channel(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 16)
            self.norm = nn.BatchNorm1d(16, eps=1e-20 if faulty else 1e-5)
            self.last = nn.Linear(16, 1)
            with torch.no_grad():
                self.first.weight[3] *= 1e-7
                self.first.weight[9] *= 1e-7

        def forward(self, x):
            return self.last(torch.tanh(self.norm(self.first(x))))

    model = Net()
    return model, regress, torch.optim.SGD(model.parameters(), 0.05), curve()


@pair("norm-eps-too-small", "nan-forward", "nan-forward-zero-times-inf", "div-zero-norm")
def half_precision_norm(faulty):
    class Rms(nn.Module):
        def __init__(self, width, eps):
            super().__init__()
            self.scale, self.eps = nn.Parameter(torch.ones(width)), eps

        def forward(self, x):
            x = x.half()
            return (
                self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).float()
            )

    model = nn.Sequential(Rms(8, 1e-8 if faulty else 1e-5), nn.Linear(8, 16), nn.ReLU())
    model.append(nn.Linear(16, 4))
    batches = blobs()
    for x, _ in batches:
        x[::5] = 0.0
    return model, classify, torch.optim.AdamW(model.parameters(), 5e-3), batches


@pair("norm-eps-too-small", "div-zero-norm", "nan-forward")
def flat_picture(faulty):
    class Contrast(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 6, 3)
            self.out = nn.Linear(6, 2)
            self.eps = 0.0 if faulty else 1e-5

        def forward(self, image):
            mean = image.mean((1, 2, 3), keepdim=True)
            spread = image.var((1, 2, 3), keepdim=True)
            h = self.conv((image - mean) / torch.sqrt(spread + self.eps))
            return self.out(torch.relu(h).mean((2, 3)))

    batches = []
    stripes = (torch.arange(8) % 2).float().expand(8, 8)
    for k in range(6):
        y = torch.randint(0, 2, (12,))
        turned = torch.where(y[:, None, None] > 0, stripes, stripes.t())[:, None]
        image = turned + 0.5 * torch.rand(12, 1, 8, 8)
        if k == 1:
            image[4] = 0.5
        batches.append((image, y))
    model = Contrast()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("norm-eps-too-small", "nan-forward", "div-zero-norm", "nan-backward", "nan-backward-sqrt")
def scale_of_padding_rows(faulty):
    class Rms(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(width))
            self.eps = 1e-30 if faulty else 1e-6

        def forward(self, x):
            return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 8, padding_idx=0)
            self.lift, self.norm, self.out = nn.Linear(8, 8, bias=False), Rms(8), nn.Linear(8, 4)

        def forward(self, tokens):
            return self.out(self.norm(self.lift(self.embed(tokens))).mean(1))

    batches = []
    for _ in range(6):
        tokens = torch.randint(1, 12, (16, 5))
        tokens[:, 3:] = 0
        batches.append((tokens, tokens[:, 0] % 4))
    model = Tokens()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches
