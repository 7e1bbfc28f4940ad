"""Programs whose fault lies in the training loop or in how the optimizer was set up."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import pair

# What is trained. Each returns the model, its loss and batches.


def curve():
    model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1))
    batches = [(x, (x[:, :1] * x[:, 1:2]) + x[:, 2:3]) for x in torch.randn(12, 16, 4)]
    return model, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), batches


def outliers():
    """A regression in which now and then a target is far off."""
    model, loss_fn, batches = curve()
    for i in (3, 8):
        batches[i][1][:4] += 60
    return model, loss_fn, batches


class Small(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.drop, self.fc = nn.Dropout(0.25), nn.Linear(8 * 16, classes)

    def forward(self, x):
        return self.fc(self.drop(self.conv(x).flatten(1)))


def pictures():
    y = torch.randint(0, 3, (128,))
    x = torch.randn(128, 1, 8, 8)
    x[torch.arange(128), 0, 2 * y] += 1.0
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    return Small(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), loader


class Chars(nn.Module):
    def __init__(self, words=10):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(words, 8), nn.GRU(8, 16, batch_first=True)
        self.out = nn.Linear(16, words)

    def forward(self, ids, h=None):
        z, h = self.rnn(self.embed(ids), h)
        return self.out(z), h


def characters():
    start = torch.randint(0, 10, (10, 8, 1))
    batches = [(s + 3 * torch.arange(9)) % 10 for s in start]

    def loss_fn(model, ids):
        scores, _ = model(ids[:, :-1])
        return F.cross_entropy(scores.transpose(1, 2), ids[:, 1:])

    return Chars(), loss_fn, batches


class Former(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)).mean(1))


def phrases():
    ids = torch.randint(0, 20, (96, 6))
    batches = [{"ids": part, "label": (part < 10).sum(1).gt(3).long()} for part in ids.split(8)]

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["ids"]), batch["label"])

    return Former(), loss_fn, batches


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def codes():
    mix = torch.randn(3, 12)
    batches = [z @ mix for z in torch.randn(10, 16, 3)]
    return Coder(), lambda model, x: F.mse_loss(model(x), x), batches


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU())
        self.kind, self.size = nn.Linear(24, 3), nn.Linear(24, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        z = self.body(x)
        return {"kind": self.kind(z), "size": self.size(z).squeeze(1)}


def tasks():
    batches = []
    for x in torch.randn(10, 20, 6):
        batches.append({"x": x, "kind": x[:, :3].argmax(1), "size": x[:, 3] + 0.5 * x[:, 4]})

    def loss_fn(model, batch):
        out = model(batch["x"])
        each = torch.stack(
            [F.cross_entropy(out["kind"], batch["kind"]), F.mse_loss(out["size"], batch["size"])]
        )
        return (each * torch.exp(-model.log_vars) + model.log_vars).sum()

    return Tasks(), loss_fn, batches


class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 16), nn.Linear(16, 16)])
        self.out = nn.Linear(16, 1)

    def forward(self, x, a):
        for layer in self.layers:
            x = F.elu(a @ layer(x))
        return self.out(x.mean(1)).squeeze(1)


def molecules():
    batches = []
    for x in torch.randn(8, 12, 7, 5):
        a = (torch.rand(12, 7, 7) < 0.4).float() + torch.eye(7)
        batches.append((x, a / a.sum(-1, keepdim=True), x[..., 0].mean(1) + x[..., 1].mean(1)))

    def loss_fn(model, batch):
        return F.l1_loss(model(batch[0], batch[1]), batch[2])

    return Neighbours(), loss_fn, batches


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (
            nn.Linear(8, 6),
            nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 6)),
        )

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=1) @ F.normalize(self.right(b), dim=1).T / 0.1


def captions():
    one, two = torch.randn(4, 8), torch.randn(4, 5)
    batches = [(z @ one, z @ two) for z in torch.randn(10, 16, 4)]

    def loss_fn(model, batch):
        scores = model(*batch)
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return Pair(), loss_fn, batches


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = (
            nn.Linear(10, 8),
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 10)),
        )

    def forward(self, x):
        mean, log_var = self.enc(x).chunk(2, 1)
        return self.dec(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var


def latents():
    mix = torch.randn(2, 10)

    def loss_fn(model, x):
        back, mean, log_var = model(x)
        extra = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
        return (back - x).pow(2).sum(1).mean() + 0.1 * extra

    return Vae(), loss_fn, [z @ mix for z in torch.randn(10, 16, 2)]


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 2))
        self.value = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))


def episodes():
    batches = []
    for state in torch.randn(10, 32, 3):
        action = torch.randint(0, 2, (32,))
        batches.append((state, action, torch.where(action == (state[:, 0] > 0), 1.0, -1.0)))

    def loss_fn(model, batch):
        state, action, reward = batch
        value = model.value(state).squeeze(1)
        share = model.policy(state).softmax(1).gather(1, action[:, None]).squeeze(1)
        gain = share / 0.5 * (reward - value.detach())
        return 0.5 * F.mse_loss(value, reward) - gain.mean()

    return Agent(), loss_fn, batches


def ratings():
    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item = nn.Embedding(20, 4), nn.Embedding(12, 4)
            self.bias = nn.Parameter(torch.zeros(()))

        def forward(self, user, item):
            return (self.user(user) * self.item(item)).sum(1) + self.bias

    u, i = torch.randint(0, 20, (320,)), torch.randint(0, 12, (320,))
    y = (torch.randn(20, 2)[u] * torch.randn(12, 2)[i]).sum(1) + 3
    loader = DataLoader(TensorDataset(u, i, y), batch_size=32, shuffle=True, drop_last=True)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    return Factors(), loss_fn, loader


class Rivals(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
        self.judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def real_or_not(self, batch):
        noise, real = batch
        yes, no = self.judge(real), self.judge(self.maker(noise).detach())
        return F.softplus(-yes).mean() + F.softplus(no).mean()

    def fool(self, noise):
        return F.softplus(-self.judge(self.maker(noise))).mean()


def forgeries():
    batches = [(torch.randn(16, 3), 0.3 * torch.randn(16, 2) + 1) for _ in range(10)]
    return Rivals(), lambda model, batch: model.real_or_not(batch), batches


def plain(model, loss_fn, optimizer, batches, epochs=3):
    for _epoch in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()


# Gradients that are not cleared, or cleared too early.


@pair("missing-zero-grad")
def adding_up_over_a_loader(faulty):
    model, loss_fn, loader = pictures()

    def train(model, loss_fn, optimizer, loader):
        for _epoch in range(3):
            model.train()
            for batch in loader:
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                if not faulty:
                    optimizer.zero_grad()

    return model, loss_fn, optim.SGD(model.parameters(), 0.1, momentum=0.9), loader, train


@pair("missing-zero-grad")
def clearing_without_a_call(faulty):
    model, loss_fn, batches = characters()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            model.zero_grad if faulty else model.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("missing-zero-grad")
def clearing_once_per_epoch(faulty):
    model, loss_fn, batches = molecules()

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(4):
            optimizer.zero_grad()
            for i, batch in enumerate(batches):
                if i and not faulty:
                    optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    return model, loss_fn, optim.AdamW(model.parameters(), 5e-3), batches, train


@pair("missing-zero-grad")
def one_of_two_optimizers_cleared(faulty):
    model, loss_fn, batches = codes()

    def train(model, loss_fn, optimizers, batches):
        first, second = optimizers
        for batch in batches * 4:
            first.zero_grad()
            if not faulty:
                second.zero_grad()
            loss_fn(model, batch).backward()
            first.step()
            second.step()

    first = optim.Adam(model.encoder.parameters(), 1e-2)
    second = optim.RMSprop(model.decoder.parameters(), 1e-3)
    return model, loss_fn, (first, second), batches, train


@pair("missing-zero-grad")
def rival_keeps_what_the_other_step_left(faulty):
    model, loss_fn, batches = forgeries()

    def train(model, loss_fn, optimizer, batches):
        maker = optim.Adam(model.maker.parameters(), 2e-3)
        for batch in batches * 3:
            if not faulty:
                optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            maker.zero_grad()
            model.fool(batch[0]).backward()
            maker.step()

    return model, loss_fn, optim.Adam(model.judge.parameters(), 2e-3), batches, train


@pair("missing-zero-grad")
def closure_that_keeps_its_gradient(faulty):
    model, loss_fn, batches = ratings()

    def train(model, loss_fn, optimizer, loader):
        for _epoch in range(3):
            for batch in loader:

                def closure(batch=batch):
                    if not faulty:
                        optimizer.zero_grad(set_to_none=False)
                    loss = loss_fn(model, batch)
                    loss.backward()
                    return loss

                optimizer.step(closure)

    return model, loss_fn, optim.Adagrad(model.parameters(), 0.1), batches, train


@pair("zero-grad-before-step")
def cleared_right_after_backward(faulty):
    model, loss_fn, batches = curve()

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(3):
            for batch in batches:
                if not faulty:
                    optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                if faulty:
                    optimizer.zero_grad()
                optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("zero-grad-before-step")
def cleared_to_zero_with_momentum(faulty):
    model, loss_fn, loader = pictures()

    def train(model, loss_fn, optimizer, loader):
        for _epoch in range(2):
            for batch in loader:
                if not faulty:
                    model.zero_grad(set_to_none=False)
                loss_fn(model, batch).backward()
                if faulty:
                    model.zero_grad(set_to_none=False)
                optimizer.step()

    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-2)
    return model, loss_fn, optimizer, loader, train


@pair("zero-grad-before-step")
def a_report_that_clears(faulty):
    model, loss_fn, batches = tasks()

    def norms(model):
        seen = {}
        for name, p in model.named_parameters():
            if p.grad is not None:
                seen[name] = p.grad.norm().item()
                if faulty:
                    p.grad = None
        return seen

    def train(model, loss_fn, optimizer, batches):
        history = []
        for batch in batches * 2:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            history.append(norms(model))
            optimizer.step()

    return model, loss_fn, optim.AdamW(model.parameters(), 5e-3, weight_decay=0), batches, train


@pair("zero-grad-before-step")
def closure_that_clears_last(faulty):
    model, loss_fn, batches = episodes()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 2:

            def closure(batch=batch):
                if not faulty:
                    optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                if faulty:
                    optimizer.zero_grad()
                return loss

            optimizer.step(closure)

    return model, loss_fn, optim.RMSprop(model.parameters(), 2e-3), batches, train


# Steps that are not taken, or taken at the wrong time.


@pair("missing-step")
def backward_and_nothing_else(faulty):
    model, loss_fn, batches = phrases()

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(2):
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                if not faulty:
                    optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 3e-3), batches, train


@pair("missing-step")
def step_without_a_call(faulty):
    model, loss_fn, batches = captions()

    def train(model, loss_fn, optimizer, batches):
        for a, b in batches * 3:
            loss = loss_fn(model, (a, b))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step if faulty else optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.1, momentum=0.9), batches, train


@pair("missing-step")
def only_the_schedule_steps(faulty):
    model, loss_fn, batches = latents()

    def train(model, loss_fn, optimizer, batches):
        schedule = StepLR(optimizer, 10, gamma=0.9)
        for _epoch in range(3):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                if not faulty:
                    optimizer.step()
            schedule.step()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("missing-step")
def accumulating_longer_than_an_epoch(faulty):
    model, loss_fn, batches = tasks()
    every = 16 if faulty else 5

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(4):
            optimizer.zero_grad()
            for i, batch in enumerate(batches):
                (loss_fn(model, batch) / every).backward()
                if (i + 1) % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    return model, loss_fn, optim.AdamW(model.parameters(), 5e-3), batches, train


@pair("missing-step")
def the_second_optimizer_waits(faulty):
    model, loss_fn, batches = episodes()

    def train(model, loss_fn, optimizers, batches):
        policy, value = optimizers
        for batch in batches * 2:
            policy.zero_grad()
            value.zero_grad()
            loss_fn(model, batch).backward()
            policy.step()
            if not faulty:
                value.step()

    pairs = optim.Adam(model.policy.parameters(), 1e-2), optim.Adam(model.value.parameters(), 1e-2)
    return model, loss_fn, pairs, batches, train


@pair("missing-step")
def scaler_updates_only(faulty):
    model, loss_fn, batches = codes()

    def train(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for x in batches * 2:
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss_fn(model, x)).backward()
            scaler.unscale_(optimizer)
            if not faulty:
                scaler.step(optimizer)
            scaler.update()

    return model, loss_fn, optim.NAdam(model.parameters(), 5e-3), batches, train


@pair("step-before-backward")
def step_then_backward(faulty):
    model, loss_fn, batches = curve()

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(3):
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                if faulty:
                    optimizer.step()
                    loss.backward()
                else:
                    loss.backward()
                    optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.1), batches, train


@pair("step-before-backward", "inplace-modified")
def always_one_batch_late(faulty):
    model, loss_fn, batches = characters()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            loss = loss_fn(model, batch)
            if faulty:
                optimizer.step()
                optimizer.zero_grad()
                loss.backward()
            else:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("step-before-backward", "missing-step")
def closure_without_backward(faulty):
    model, loss_fn, batches = molecules()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 4:
            optimizer.zero_grad()

            def closure(batch=batch):
                loss = loss_fn(model, batch)
                if not faulty:
                    loss.backward()
                return loss

            loss = optimizer.step(closure)
            if faulty:
                loss.backward()

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("step-before-backward")
def a_trainer_in_the_wrong_order(faulty):
    model, loss_fn, loader = ratings()

    class Trainer:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def update(self):
            self.optimizer.step()
            self.optimizer.zero_grad()

        def fit(self, loader):
            for _epoch in range(3):
                for batch in loader:
                    loss = loss_fn(self.model, batch)
                    if faulty:
                        self.update()
                    loss.backward()
                    if not faulty:
                        self.update()

    def train(model, loss_fn, optimizer, loader):
        Trainer(model, optimizer).fit(loader)

    return model, loss_fn, optim.Adamax(model.parameters(), 0.02), loader, train


# The wrong optimizer, or the wrong parameters in it.


@pair("optimizer-recreated")
def new_one_for_each_batch(faulty):
    model, loss_fn, batches = curve()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            if faulty:
                optimizer = optim.Adam(model.parameters(), 1e-2)
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("optimizer-recreated")
def new_one_for_each_epoch(faulty):
    model, loss_fn, loader = pictures()

    def one_epoch(model, loader, epoch, optimizer):
        if faulty:
            optimizer = optim.SGD(model.parameters(), 0.02 * 0.9**epoch, momentum=0.95)
        else:
            optimizer.param_groups[0]["lr"] = 0.02 * 0.9**epoch
        for batch in loader:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

    def train(model, loss_fn, optimizer, loader):
        for epoch in range(5):
            one_epoch(model, loader, epoch, optimizer)

    return model, loss_fn, optim.SGD(model.parameters(), 0.02, momentum=0.95), loader, train


@pair("optimizer-recreated")
def state_thrown_away(faulty):
    model, loss_fn, batches = tasks()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if faulty:
                optimizer.state = defaultdict(dict)

    return model, loss_fn, optim.AdamW(model.parameters(), 5e-3), batches, train


@pair("optimizer-recreated")
def configured_again_and_again(faulty):
    model, loss_fn, batches = phrases()

    class Module:
        def __init__(self, model, optimizer):
            self.model, self.kept = model, optimizer

        def optimizers(self):
            if not faulty:
                return self.kept
            groups = [{"params": [p]} for p in self.model.parameters()]
            return optim.RMSprop(groups, 2e-3, momentum=0.9)

        def training_step(self, batch):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss_fn(self.model, batch).backward()
            optimizer.step()

    def train(model, loss_fn, optimizer, batches):
        module = Module(model, optimizer)
        for batch in batches * 2:
            module.training_step(batch)

    return model, loss_fn, optim.RMSprop(model.parameters(), 2e-3, momentum=0.9), batches, train


@pair("stale-optimizer", "optimizer-missing-params")
def new_head_after_the_optimizer(faulty):
    model, loss_fn, loader = pictures()
    optimizer = optim.Adam(model.parameters(), 1e-2)
    model.fc = nn.Linear(128, 3)
    if not faulty:
        optimizer = optim.Adam(model.parameters(), 1e-2)
    return model, loss_fn, optimizer, loader, plain


@pair("stale-optimizer", "optimizer-missing-params")
def reparametrised_after_the_optimizer(faulty):
    model, loss_fn, batches = molecules()
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for layer in model.layers:
        parametrizations.weight_norm(layer)
    if not faulty:
        optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, loss_fn, optimizer, batches, plain


@pair("stale-optimizer", "optimizer-missing-params", "parameter-rebound")
def vocabulary_grows_in_the_loop(faulty):
    model, loss_fn, batches = characters()

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(4):
            if epoch == 1:
                old = model.embed
                model.embed = nn.Embedding(14, 8)
                model.embed.weight.data[:10] = old.weight.data
                if not faulty:
                    optimizer = optim.Adam(model.parameters(), 1e-2)
            for ids in batches:
                optimizer.zero_grad()
                loss_fn(model, ids).backward()
                optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("stale-optimizer", "optimizer-missing-params", "missing-step")
def best_copy_goes_on_training(faulty):
    model, loss_fn, batches = captions()
    start = copy.deepcopy(model) if faulty else model
    optimizer = optim.AdamW(start.parameters(), 5e-3)
    return model, loss_fn, optimizer, batches, plain


@pair("optimizer-missing-params")
def half_of_a_coder(faulty):
    model, loss_fn, batches = codes()
    parameters = model.encoder.parameters() if faulty else model.parameters()
    return model, loss_fn, optim.Adam(parameters, 1e-2), batches, plain


@pair("optimizer-missing-params")
def weights_of_the_tasks_left_out(faulty):
    model, loss_fn, batches = tasks()
    names = ("body", "kind", "size") if faulty else ("body", "kind", "size", "log_vars")
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.startswith(k)]} for k in names
    ]
    return model, loss_fn, optim.AdamW(groups, 5e-3), batches, plain


@pair("optimizer-missing-params")
def filtered_by_name(faulty):
    model, loss_fn, batches = phrases()
    word = "weight" if faulty else ""
    chosen = [p for name, p in model.named_parameters() if word in name]
    return model, loss_fn, optim.Adam(chosen, 3e-3), batches, plain


@pair("optimizer-missing-params", "stale-optimizer")
def grown_by_a_layer(faulty):
    model, loss_fn, batches = curve()

    def train(model, loss_fn, optimizer, batches):
        plain(model, loss_fn, optimizer, batches, 2)
        model.insert(2, nn.Linear(24, 24))
        model.insert(3, nn.Tanh())
        if not faulty:
            optimizer.add_param_group({"params": model[2].parameters()})
        plain(model, loss_fn, optimizer, batches, 2)

    return model, loss_fn, optim.SGD(model.parameters(), 0.1, momentum=0.5), batches, train


# Clipping.


@pair("clip-after-step")
def norm_clipped_too_late(faulty):
    model, loss_fn, batches = outliers()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 2:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            if not faulty:
                clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if faulty:
                clip_grad_norm_(model.parameters(), 1.0)

    return model, loss_fn, optim.SGD(model.parameters(), 0.05), batches, train


@pair("clip-after-step")
def values_clipped_too_late(faulty):
    model, loss_fn, batches = characters()

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(3):
            for ids in batches:
                loss = loss_fn(model, ids)
                loss.backward()
                if faulty:
                    optimizer.step()
                    clip_grad_value_(model.parameters(), 0.01)
                else:
                    clip_grad_value_(model.parameters(), 0.01)
                    optimizer.step()
                model.zero_grad()

    return model, loss_fn, optim.RMSprop(model.parameters(), 2e-3), batches, train


@pair("clip-after-step")
def scaled_down_by_hand_too_late(faulty):
    model, loss_fn, batches = latents()

    def shrink(parameters, limit):
        grads = [p.grad for p in parameters if p.grad is not None]
        total = torch.sqrt(sum(g.pow(2).sum() for g in grads))
        for g in grads:
            g.mul_(limit / torch.clamp(total, min=limit))

    def train(model, loss_fn, optimizer, batches):
        for x in batches * 3:
            for p in model.parameters():
                p.grad = None
            loss_fn(model, x).backward()
            if not faulty:
                shrink(list(model.parameters()), 0.5)
            optimizer.step()
            if faulty:
                shrink(list(model.parameters()), 0.5)

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("clip-after-step")
def late_in_an_accumulating_trainer(faulty):
    model, loss_fn, batches = tasks()

    def train(model, loss_fn, optimizer, batches):
        optimizer.zero_grad()
        for i, batch in enumerate(batches * 3):
            (loss_fn(model, batch) / 2).backward()
            if i % 2 == 1:
                steps = [optimizer.step, lambda: clip_grad_norm_(model.parameters(), 0.1)]
                for do in steps if faulty else reversed(steps):
                    do()
                optimizer.zero_grad()

    return model, loss_fn, optim.SGD(model.parameters(), 0.1, momentum=0.9), batches, train


@pair("clip-noop")
def result_of_clamp_dropped(faulty):
    model, loss_fn, batches = outliers()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 2:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            for p in model.parameters():
                if faulty:
                    torch.clamp(p.grad, -0.5, 0.5)
                else:
                    torch.clamp(p.grad, -0.5, 0.5, out=p.grad)
            optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.05), batches, train


@pair("clip-noop")
def generator_used_up(faulty):
    model, loss_fn, batches = outliers()

    def train(model, loss_fn, optimizer, batches):
        parameters = model.parameters() if faulty else list(model.parameters())
        for batch in batches * 2:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            clip_grad_norm_(parameters, 1.0)
            optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.05, momentum=0.5), batches, train


@pair("clip-noop")
def filter_used_up(faulty):
    model, loss_fn, batches = codes()
    batches[4] = batches[4] * 8

    def train(model, loss_fn, optimizer, batches):
        trainable = filter(lambda p: p.requires_grad, model.parameters())
        trainable = trainable if faulty else list(trainable)
        for x in batches * 3:
            loss = loss_fn(model, x)
            optimizer.zero_grad()
            loss.backward()
            for p in trainable:
                p.grad.clamp_(-0.05, 0.05)
            optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("clip-noop")
def parameters_of_another_model(faulty):
    model, loss_fn, batches = episodes()
    target = copy.deepcopy(model)

    def train(model, loss_fn, optimizer, batches):
        for step, batch in enumerate(batches * 2):
            optimizer.zero_grad()
            (10 * loss_fn(model, batch)).backward()
            clip_grad_norm_((target if faulty else model).parameters(), 0.5)
            optimizer.step()
            if step % 5 == 4:
                target.load_state_dict(model.state_dict())

    return model, loss_fn, optim.SGD(model.parameters(), 0.1), batches, train


@pair("clip-noop")
def clipped_before_there_is_a_gradient(faulty):
    model, loss_fn, batches = characters()

    def train(model, loss_fn, optimizer, batches):
        for ids in batches * 3:
            optimizer.zero_grad()
            loss = loss_fn(model, ids)
            if faulty:
                clip_grad_norm_(model.parameters(), 0.1)
            loss.backward()
            if not faulty:
                clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.5, momentum=0.9), batches, train


@pair("clip-noop")
def gradients_of_gradients(faulty):
    model, loss_fn, batches = latents()

    def train(model, loss_fn, optimizer, batches):
        for x in batches * 2:
            optimizer.zero_grad()
            loss_fn(model, x).backward()
            if faulty:
                clip_grad_norm_([p.grad for p in model.parameters()], 1.0)
            else:
                clip_grad_norm_(list(model.parameters()), 1.0)
            optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.02), batches, train


@pair("clip-noop")
def scaled_copies(faulty):
    model, loss_fn, batches = outliers()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 2:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            norm = torch.linalg.vector_norm(
                torch.cat([p.grad.flatten() for p in model.parameters()])
            )
            if norm > 1:
                for p in model.parameters():
                    grad = p.grad
                    if faulty:
                        grad = grad / norm
                    else:
                        grad /= norm
            optimizer.step()

    return (
        model,
        loss_fn,
        optim.SGD(model.parameters(), 0.05, nesterov=True, momentum=0.9),
        batches,
        train,
    )


@pair("clip-before-unscale")
def norm_of_the_scaled_gradient(faulty):
    model, loss_fn, batches = curve()

    def train(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu")
        for batch in batches * 4:
            optimizer.zero_grad()
            scaler.scale(loss_fn(model, batch)).backward()
            if not faulty:
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return model, loss_fn, optim.SGD(model.parameters(), 0.2), batches, train


@pair("clip-before-unscale")
def values_of_the_scaled_gradient(faulty):
    model, loss_fn, loader = pictures()

    def train(model, loss_fn, optimizer, loader):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _epoch in range(3):
            for batch in loader:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_fn(model, batch)
                scaler.scale(loss).backward()
                if faulty:
                    clip_grad_value_(model.parameters(), 0.5)
                    scaler.unscale_(optimizer)
                else:
                    scaler.unscale_(optimizer)
                    clip_grad_value_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)

    return model, loss_fn, optim.SGD(model.parameters(), 0.05, momentum=0.9), loader, train


@pair("clip-before-unscale")
def scaled_and_accumulated(faulty):
    model, loss_fn, batches = tasks()

    def train(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=5)
        for i, batch in enumerate(batches * 4):
            scaler.scale(loss_fn(model, batch) / 2).backward()
            if i % 2 == 0:
                continue
            if not faulty:
                scaler.unscale_(optimizer)
            total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad.mul_(0.5 / total.clamp(min=0.5))
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()

    return model, loss_fn, optim.SGD(model.parameters(), 0.1, momentum=0.9), batches, train


# Accumulation.


@pair("accumulation-unscaled")
def eight_small_batches(faulty):
    model, loss_fn, batches = curve()
    batches = [(x[:4], y[:4]) for x, y in batches] * 4

    def train(model, loss_fn, optimizer, batches):
        optimizer.zero_grad()
        for i, batch in enumerate(batches):
            loss = loss_fn(model, batch)
            if not faulty:
                loss = loss / 8
            loss.backward()
            if (i + 1) % 8 == 0:
                optimizer.step()
                optimizer.zero_grad()

    return model, loss_fn, optim.SGD(model.parameters(), 0.3), batches, train


@pair("accumulation-unscaled")
def chunks_of_each_batch(faulty):
    model, loss_fn, batches = codes()

    def train(model, loss_fn, optimizer, batches):
        for x in batches * 4:
            optimizer.zero_grad()
            parts = x.chunk(4)
            for part in parts:
                loss_fn(model, part).backward()
            if not faulty:
                for p in model.parameters():
                    p.grad /= len(parts)
            optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.05, momentum=0.9), batches, train


@pair("accumulation-unscaled")
def virtual_batch_of_a_transformer(faulty):
    model, loss_fn, batches = phrases()

    def train(model, loss_fn, optimizer, batches, steps=6):
        stream = itertools.cycle(batches)
        for _update in range(6):
            for _ in range(steps):
                batch = next(stream)
                loss = loss_fn(model, batch)
                (loss if faulty else loss * (1 / steps)).backward()
            clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            model.zero_grad(set_to_none=True)

    return model, loss_fn, optim.SGD(model.parameters(), 0.1, momentum=0.9), batches, train


@pair("accumulation-wiped")
def cleared_at_the_top(faulty):
    model, loss_fn, batches = molecules()

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(4):
            for i, batch in enumerate(batches):
                if faulty or i % 4 == 0:
                    model.zero_grad()
                (loss_fn(model, batch) / 4).backward()
                if i % 4 == 3:
                    optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("accumulation-wiped")
def cleared_in_a_helper(faulty):
    model, loss_fn, loader = pictures()

    def backward(model, loss, optimizer, first):
        if faulty or first:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
        loss.backward()

    def train(model, loss_fn, optimizer, loader):
        for _epoch in range(3):
            for i, batch in enumerate(loader):
                backward(model, loss_fn(model, batch) / 2, optimizer, i % 2 == 0)
                if (i + 1) % 2 == 0:
                    optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.05, momentum=0.9), loader, train


@pair("accumulation-wiped")
def cleared_after_each_backward(faulty):
    model, loss_fn, batches = captions()

    def train(model, loss_fn, optimizer, batches):
        optimizer.zero_grad(set_to_none=False)
        for i, batch in enumerate(batches * 4):
            if faulty:
                optimizer.zero_grad(set_to_none=False)
            loss = loss_fn(model, batch)
            loss.div(5).backward()
            if i % 5 == 4:
                optimizer.step()
                if not faulty:
                    optimizer.zero_grad(set_to_none=False)

    return model, loss_fn, optim.AdamW(model.parameters(), 5e-3), batches, train


# Learning rates and schedules.


@pair("lr-too-high", "oscillating-loss")
def plain_descent_that_explodes(faulty):
    model, loss_fn, batches = codes()
    return model, loss_fn, optim.SGD(model.parameters(), 3.0 if faulty else 0.05), batches, plain


@pair("lr-too-high", "oscillating-loss")
def adaptive_steps_of_one(faulty):
    model, loss_fn, loader = pictures()
    return model, loss_fn, optim.Adam(model.parameters(), 1.0 if faulty else 3e-3), loader, plain


@pair("lr-too-high", "oscillating-loss")
def transformer_at_a_rate_for_convolutions(faulty):
    model, loss_fn, batches = phrases()
    return model, loss_fn, optim.AdamW(model.parameters(), 0.3 if faulty else 2e-3), batches, plain


@pair("lr-too-high", "oscillating-loss")
def messages_with_large_steps(faulty):
    model, loss_fn, batches = molecules()
    optimizer = optim.RMSprop(model.parameters(), 1.0 if faulty else 3e-3)
    return model, loss_fn, optimizer, batches, plain


@pair("lr-too-low")
def hardly_a_step(faulty):
    model, loss_fn, batches = curve()
    return model, loss_fn, optim.SGD(model.parameters(), 1e-6 if faulty else 0.1), batches, plain


@pair("lr-too-low")
def hardly_a_step_for_adam(faulty):
    model, loss_fn, batches = phrases()
    return model, loss_fn, optim.Adam(model.parameters(), 3e-8 if faulty else 3e-3), batches, plain


@pair("lr-too-low")
def warmup_counted_in_samples(faulty):
    model, loss_fn, batches = molecules()

    def train(model, loss_fn, optimizer, batches):
        schedule = LambdaLR(optimizer, lambda step: min(1.0, step / (1e6 if faulty else 10)))
        for batch in batches * 5:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            schedule.step()

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("lr-too-low")
def fine_tuning_rate_from_scratch(faulty):
    model, loss_fn, batches = captions()
    rate = 1e-7 if faulty else 0.2
    return model, loss_fn, optim.SGD(model.parameters(), rate, momentum=0.9), batches, plain


@pair("scheduler-per-batch")
def decay_each_batch(faulty):
    model, loss_fn, batches = curve()

    def train(model, loss_fn, optimizer, batches):
        schedule = ExponentialLR(optimizer, gamma=0.8)
        for _epoch in range(6):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                if faulty:
                    schedule.step()
            if not faulty:
                schedule.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.1, momentum=0.5), batches, train


@pair("scheduler-per-batch")
def cosine_of_epochs_each_batch(faulty):
    model, loss_fn, loader = pictures()

    def train(model, loss_fn, optimizer, loader):
        schedule = CosineAnnealingLR(optimizer, T_max=6)
        for _epoch in range(6):
            for batch in loader:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                if faulty:
                    schedule.step()
            if not faulty:
                schedule.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.05, momentum=0.9), loader, train


@pair("scheduler-per-batch")
def milestones_each_batch(faulty):
    model, loss_fn, batches = tasks()

    def train(model, loss_fn, optimizer, batches):
        schedule = MultiStepLR(optimizer, milestones=[3, 6, 8], gamma=0.1)
        for _epoch in range(10):
            for batch in batches:
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                if faulty:
                    schedule.step()
                optimizer.zero_grad()
            if not faulty:
                schedule.step()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("scheduler-per-batch")
def plateau_each_batch(faulty):
    model, loss_fn, batches = episodes()

    def train(model, loss_fn, optimizer, batches):
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
        for _epoch in range(8):
            total = 0.0
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                total += loss.item()
                if faulty:
                    schedule.step(loss.item())
            if not faulty:
                schedule.step(total / len(batches))

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("oscillating-loss", "lr-too-high")
def whole_data_past_the_limit(faulty):
    model, loss_fn, batches = curve()
    batch = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer = optim.SGD(model.parameters(), 0.3 if faulty else 0.1)
    return model, loss_fn, optimizer, [batch] * 60, lambda *given: plain(*given, epochs=1)


@pair("oscillating-loss", "lr-too-high")
def small_batches_of_graphs(faulty):
    model, loss_fn, batches = molecules()
    optimizer = optim.SGD(model.parameters(), 0.8 if faulty else 0.05)
    return model, loss_fn, optimizer, batches, lambda *given: plain(*given, epochs=8)


@pair("oscillating-loss", "lr-too-high")
def momentum_without_friction(faulty):
    model, loss_fn, batches = curve()
    batch = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.999 if faulty else 0.8)
    return model, loss_fn, optimizer, [batch] * 60, lambda *given: plain(*given, epochs=1)


@pair("oscillating-loss", "lr-too-high")
def large_steps_of_adam_in_a_valley(faulty):
    model, loss_fn, batches = ratings()
    optimizer = optim.Adam(model.parameters(), 2.0 if faulty else 0.05, betas=(0.9, 0.9))
    return model, loss_fn, optimizer, batches, lambda *given: plain(*given, epochs=6)


# Modes, graphs that stay, decay, data that change.


@pair("eval-mode-left-on")
def evaluation_each_epoch(faulty):
    model, loss_fn, loader = pictures()

    def accuracy(model, loader):
        model.eval()
        with torch.no_grad():
            right = [(model(x).argmax(1) == y).float().mean() for x, y in loader]
        return torch.stack(right).mean().item()

    def train(model, loss_fn, optimizer, loader):
        model.train()
        for _epoch in range(3):
            if not faulty:
                model.train()
            for batch in loader:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
            accuracy(model, loader)

    return model, loss_fn, optim.SGD(model.parameters(), 0.05), loader, train


@pair("eval-mode-left-on")
def baseline_score_before_training(faulty):
    model, loss_fn, batches = phrases()

    def train(model, loss_fn, optimizer, batches):
        model.train(False)
        with torch.inference_mode():
            sum(loss_fn(model, b).item() for b in batches)
        model.train if faulty else model.train()
        for batch in batches * 2:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 2e-3), batches, train


@pair("eval-mode-left-on")
def a_sampler_that_forgets(faulty):
    class Writer(Chars):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.2)

        def forward(self, ids, h=None):
            z, h = self.rnn(self.drop(self.embed(ids)), h)
            return self.out(self.drop(z)), h

        @torch.no_grad()
        def write(self, count):
            was = self.training
            self.eval()
            ids, h = torch.zeros(1, 1, dtype=torch.long), None
            for _ in range(count):
                scores, h = self(ids[:, -1:], h)
                ids = torch.cat([ids, scores[:, -1].argmax(1, keepdim=True)], 1)
            if not faulty:
                self.train(was)
            return ids

    _, loss_fn, batches = characters()
    model = Writer()

    def train(model, loss_fn, optimizer, batches):
        for i, ids in enumerate(batches * 3):
            optimizer.zero_grad()
            loss_fn(model, ids).backward()
            optimizer.step()
            if i % 6 == 5:
                model.write(5)

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("eval-mode-left-on", note=True)
def features_looked_at(faulty):
    model, loss_fn, loader = pictures()

    def look(model, batch):
        model.conv.eval()
        with torch.no_grad():
            picture = model.conv(batch[0]).mean(0)
        if not faulty:
            model.conv.train()
        return picture

    def train(model, loss_fn, optimizer, loader):
        for epoch in range(3):
            for i, batch in enumerate(loader):
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                if i == 2 and epoch == 0:
                    look(model, batch)

    return model, loss_fn, optim.Adam(model.parameters(), 3e-3), loader, train


@pair("graph-retained")
def sum_of_losses(faulty):
    model, loss_fn, batches = tasks()

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(3):
            total = 0
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                total += loss if faulty else loss.detach()
            print(f"{float(total) / len(batches):.3f}", end="\r")

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("graph-retained")
def list_of_losses(faulty):
    model, loss_fn, loader = pictures()

    def train(model, loss_fn, optimizer, loader):
        history = {"loss": [], "lr": []}
        for _epoch in range(3):
            for batch in loader:
                loss = loss_fn(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history["loss"].append(loss if faulty else loss.item())
                history["lr"].append(optimizer.param_groups[0]["lr"])
        return history

    return model, loss_fn, optim.SGD(model.parameters(), 0.05), loader, train


@pair("graph-retained")
def smoothed_loss(faulty):
    model, loss_fn, batches = molecules()

    def train(model, loss_fn, optimizer, batches):
        smooth = None
        for batch in batches * 4:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            seen = loss if faulty else loss.detach()
            smooth = seen if smooth is None else 0.9 * smooth + 0.1 * seen

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("graph-retained")
def outputs_kept_for_later(faulty):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
            self.kept = []

        def forward(self, x):
            out = self.net(x)
            self.kept.append(out if faulty else out.detach())
            return out

    _, loss_fn, batches = curve()
    model = Keeping()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        return torch.cat(model.kept).std().item()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("weight-decay-on-norm-bias", note=True)
def transformer_in_one_group(faulty):
    model, loss_fn, batches = phrases()
    if faulty:
        groups = model.parameters()
    else:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2]},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
    return model, loss_fn, optim.AdamW(groups, 2e-3, weight_decay=0.1), batches, plain


@pair("weight-decay-on-norm-bias", note=True)
def batch_norm_in_one_group(faulty):
    model, loss_fn, loader = pictures()
    norm = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    norm += [m.bias for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    rest = [model.conv[0].weight, model.fc.weight]
    groups = [{"params": rest}, {"params": norm, "weight_decay": 0.1 if faulty else 0.0}]
    optimizer = optim.SGD(groups, 0.05, momentum=0.9, weight_decay=0.1)
    return model, loss_fn, optimizer, loader, plain


@pair("weight-decay-on-norm-bias", note=True)
def layer_norm_of_a_table_net(faulty):
    model, loss_fn, batches = tasks()
    decay, other = [], []
    for name, p in model.named_parameters():
        (decay if faulty or (p.ndim > 1 and "norm" not in name) else other).append(p)
    groups = [{"params": decay, "weight_decay": 0.2}, {"params": other or [], "weight_decay": 0.0}]
    return model, loss_fn, optim.AdamW(groups[: 1 if faulty else 2], 5e-3), batches, plain


@pair("data-shift")
def a_shard_in_other_units(faulty):
    model, loss_fn, batches = curve()
    batches = [(x[:, :].clone(), y) for x, y in batches * 3]
    if faulty:
        batches[18:] = [(x * 100 + 50, y) for x, y in batches[18:]]
    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, lambda *a: plain(*a, 1)


@pair("data-shift")
def augmentation_in_place(faulty):
    model, _, batches = codes()
    batches = [(x, x.clone()) for x in batches]

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def brighten(x):
        return x.mul_(1.5).add_(0.5) if faulty else x * 1.5 + 0.5

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(6):
            for x, y in batches:
                optimizer.zero_grad()
                loss_fn(model, (brighten(x), y)).backward()
                optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("data-shift")
def pictures_no_longer_scaled(faulty):
    model, loss_fn, loader = pictures()

    def train(model, loss_fn, optimizer, loader):
        for epoch in range(5):
            for x, y in loader:
                if faulty and epoch >= 3:
                    x = 255 * (0.2 * x + 0.5)
                optimizer.zero_grad()
                loss_fn(model, (x, y)).backward()
                optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.05, momentum=0.9), loader, train


@pair("data-shift")
def labels_sorted_by_class(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    y = torch.randint(0, 4, (256,))
    x = torch.randn(256, 8) + 1.5 * F.one_hot(y, 8)
    order = y.argsort() if faulty else torch.randperm(256)
    batches = list(zip(x[order].split(16), y[order].split(16), strict=True))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, plain


@pair("scaler-collapsed", "nan-backward-sqrt", "nan-backward")
def scaler_hides_a_root_at_zero(faulty):
    model, _, batches = codes()
    batches = [torch.cat([x[:-1], torch.zeros(1, 12)]) for x in batches]
    model.encoder[0].bias.data.zero_()

    def loss_fn(model, x):
        z = model.encoder[0](x)
        length = (z.pow(2).sum(1) + (0 if faulty else 1e-8)).sqrt()
        return F.mse_loss(model(x), x) + 0.01 * length.mean()

    def train(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu")
        for x in batches * 6:
            optimizer.zero_grad()
            scaler.scale(loss_fn(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()

    return model, loss_fn, optim.SGD(model.parameters(), 0.05), batches, train


@pair("scaler-collapsed", "fp16-overflow", "nan-forward", "unscaled-input")
def half_precision_that_overflows(faulty):
    model, _, batches = codes()
    batches = [x * 300 if faulty else x for x in batches]

    def loss_fn(model, x):
        with torch.autocast("cpu", dtype=torch.float16):
            z = model(x)
            return (z - x.half()).pow(2).mean()

    def train(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for x in batches * 5:
            optimizer.zero_grad()
            scaler.scale(loss_fn(model, x)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-3), batches, train


@pair("scaler-collapsed")
def scale_that_only_shrinks(faulty):
    model, loss_fn, batches = tasks()

    def train(model, loss_fn, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10)
        count = torch.zeros(())
        for batch in batches * 5:
            optimizer.zero_grad()
            share = torch.ones(()) / (count if faulty else count + 1)
            loss = loss_fn(model, batch) + share * model.kind.bias.pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return model, loss_fn, optim.AdamW(model.parameters(), 5e-3), batches, train


# Parameters that are changed by something else, graphs that are used twice.


@pair("hook-modifies-parameter")
def a_hook_meant_for_gradients(faulty):
    model, loss_fn, batches = molecules()

    def halve(p):
        if faulty:
            p.data.mul_(0.5)
        else:
            p.grad.mul_(0.5)

    for p in model.layers.parameters():
        p.register_post_accumulate_grad_hook(halve)
    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, plain


@pair("hook-modifies-parameter")
def noise_in_a_tensor_hook(faulty):
    model, loss_fn, batches = curve()

    def noisy(p):
        def hook(grad):
            noise = 0.2 * torch.randn_like(grad)
            if faulty:
                p.data.add_(noise)
                return grad
            return grad + 0.05 * noise

        return hook

    def train(model, loss_fn, optimizer, batches):
        handles = [p.register_hook(noisy(p)) for p in model.parameters() if p.ndim > 1]
        plain(model, loss_fn, optimizer, batches)
        for handle in handles:
            handle.remove()

    return model, loss_fn, optim.SGD(model.parameters(), 0.05), batches, train


@pair("hook-modifies-parameter")
def normalised_in_a_module_hook(faulty):
    model, loss_fn, batches = captions()

    @torch.no_grad()
    def unit(module, grad_input, grad_output):
        if faulty:
            module.weight.sub_(0.1 * module.weight.mean(1, keepdim=True)).clamp_(-0.05, 0.05)

    model.left.register_full_backward_hook(unit)
    return model, loss_fn, optim.AdamW(model.parameters(), 5e-3), batches, plain


@pair("parameter-rebound", "stale-optimizer", "optimizer-missing-params", "rewrapped-parameter")
def weights_clipped_into_new_ones(faulty):
    model, loss_fn, batches = forgeries()

    def train(model, loss_fn, optimizer, batches):
        for batch in batches * 3:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            for layer in (model.judge[0], model.judge[2]):
                if faulty:
                    layer.weight = nn.Parameter(layer.weight.detach().clamp(-0.5, 0.5))
                else:
                    layer.weight.data.clamp_(-0.5, 0.5)

    return model, loss_fn, optim.RMSprop(model.judge.parameters(), 2e-3), batches, train


@pair("parameter-rebound", "stale-optimizer", "optimizer-missing-params", "rewrapped-parameter")
def rows_normalised_into_new_ones(faulty):
    model, loss_fn, batches = characters()

    def train(model, loss_fn, optimizer, batches):
        for _epoch in range(3):
            unit = F.normalize(model.embed.weight.detach(), dim=1)
            if faulty:
                model.embed.weight = nn.Parameter(unit)
            else:
                model.embed.weight.data.copy_(unit)
            for ids in batches:
                optimizer.zero_grad()
                loss_fn(model, ids).backward()
                optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("parameter-rebound", "stale-optimizer", "optimizer-missing-params", "rewrapped-parameter")
def averaged_back_into_the_model(faulty):
    model, loss_fn, batches = codes()
    slow = copy.deepcopy(model)

    def train(model, loss_fn, optimizer, batches):
        for step, x in enumerate(batches * 4):
            optimizer.zero_grad()
            loss_fn(model, x).backward()
            optimizer.step()
            if step % 5 == 4:
                for ours, theirs in zip(model.modules(), slow.modules(), strict=True):
                    if not isinstance(ours, nn.Linear):
                        continue
                    mean = (ours.weight.detach() + theirs.weight.detach()) / 2
                    theirs.weight.data = mean.clone()
                    if faulty:
                        ours.register_parameter("weight", nn.Parameter(mean))
                    else:
                        ours.weight.data.copy_(mean)

    return model, loss_fn, optim.SGD(model.parameters(), 0.05, momentum=0.9), batches, train


@pair("second-backward")
def two_losses_one_graph(faulty):
    model, _, batches = tasks()
    model.log_vars = None

    def loss_fn(model, batch):
        out = model(batch["x"])
        return F.cross_entropy(out["kind"], batch["kind"]) + F.mse_loss(out["size"], batch["size"])

    def train(model, loss_fn, optimizer, batches):
        for batch in batches:
            out = model(batch["x"])
            kind = F.cross_entropy(out["kind"], batch["kind"])
            size = F.mse_loss(out["size"], batch["size"])
            optimizer.zero_grad()
            kind.backward(retain_graph=not faulty)
            size.backward()
            optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("second-backward", "inplace-modified")
def state_carried_with_its_graph(faulty):
    model, loss_fn, batches = characters()

    def train(model, loss_fn, optimizer, batches):
        h = torch.zeros(1, 8, 16)
        for ids in batches * 2:
            scores, h = model(ids[:, :-1], h if faulty else h.detach())
            loss = F.cross_entropy(scores.transpose(1, 2), ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 1e-2), batches, train


@pair("second-backward")
def penalty_computed_once(faulty):
    model, plain_loss, batches = molecules()

    def loss_fn(model, batch):
        return plain_loss(model, batch) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())

    def train(model, loss_fn, optimizer, batches):
        penalty = 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        for batch in batches:
            if not faulty:
                penalty = 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
            optimizer.zero_grad()
            (plain_loss(model, batch) + penalty).backward()
            optimizer.step()

    return model, loss_fn, optim.SGD(model.parameters(), 0.02), batches, train


@pair("second-backward", "inplace-modified")
def rivals_without_detach(faulty):
    model, loss_fn, batches = forgeries()

    def train(model, loss_fn, optimizer, batches):
        maker = optim.Adam(model.maker.parameters(), 2e-3)
        for noise, real in batches:
            fake = model.maker(noise)
            seen = fake if faulty else fake.detach()
            loss = F.softplus(-model.judge(real)).mean() + F.softplus(model.judge(seen)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            maker.zero_grad()
            F.softplus(-model.judge(fake)).mean().backward()
            maker.step()

    return model, loss_fn, optim.Adam(model.judge.parameters(), 2e-3), batches, train


@pair("inplace-modified")
def first_step_before_second_backward(faulty):
    model, loss_fn, batches = forgeries()

    def train(model, loss_fn, optimizer, batches):
        maker = optim.Adam(model.maker.parameters(), 2e-3)
        for noise, real in batches:
            fake = model.maker(noise)
            fool = F.softplus(-model.judge(fake)).mean()
            tell = (
                F.softplus(-model.judge(real)).mean()
                + F.softplus(model.judge(fake.detach())).mean()
            )
            optimizer.zero_grad()
            tell.backward(inputs=list(model.judge.parameters()))
            if faulty:
                optimizer.step()
            maker.zero_grad()
            fool.backward(inputs=list(model.maker.parameters()))
            maker.step()
            if not faulty:
                optimizer.step()

    return model, loss_fn, optim.Adam(model.judge.parameters(), 2e-3), batches, train


@pair("inplace-modified")
def weights_clamped_before_backward(faulty):
    model, loss_fn, batches = codes()

    def train(model, loss_fn, optimizer, batches):
        for x in batches * 2:
            loss = loss_fn(model, x)
            optimizer.zero_grad()
            if not faulty:
                loss.backward()
            with torch.no_grad():
                for p in model.decoder.parameters():
                    p.clamp_(-0.4, 0.4)
            if faulty:
                loss.backward()
            optimizer.step()

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train


@pair("inplace-modified")
def actor_uses_a_critic_that_moved(faulty):
    model, loss_fn, batches = episodes()

    def train(model, loss_fn, optimizers, batches):
        actor, critic = optimizers
        for state, _, reward in batches * 2:
            share = model.policy(state).softmax(1)
            value = model.value(state).squeeze(1)
            fit = F.mse_loss(value, reward)
            worth = model.value(state * share[:, :1])
            critic.zero_grad()
            fit.backward()
            critic.step()
            if not faulty:
                worth = model.value(state * share[:, :1])
            actor.zero_grad()
            (-worth.mean()).backward()
            actor.step()

    pairs = optim.Adam(model.policy.parameters(), 5e-3), optim.Adam(model.value.parameters(), 5e-3)
    return model, loss_fn, pairs, batches, train


@pair("frozen-by-accident")
def thawed_by_the_wrong_name(faulty):
    model, loss_fn, loader = pictures()

    def train(model, loss_fn, optimizer, loader):
        model.conv.requires_grad_(False)
        plain(model, loss_fn, optimizer, loader, 1)
        if faulty:
            model.conv.requires_grad = True
        else:
            model.conv.requires_grad_(True)
        plain(model, loss_fn, optimizer, loader, 3)

    return model, loss_fn, optim.Adam(model.parameters(), 3e-3), loader, train


@pair("frozen-by-accident")
def judge_frozen_for_the_other_step(faulty):
    model, _, batches = forgeries()

    def loss_fn(model, batch):
        yes, no = model.judge(batch[1]), model.judge(model.maker(batch[0]))
        return F.softplus(-yes).mean() + F.softplus(no).mean()

    def train(model, loss_fn, optimizer, batches):
        maker = optim.Adam(model.maker.parameters(), 2e-3)
        for batch in batches * 3:
            if not faulty:
                model.judge.requires_grad_(True)
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            model.judge.requires_grad_(False)
            maker.zero_grad()
            model.fool(batch[0]).backward()
            maker.step()

    return model, loss_fn, optim.Adam(model.judge.parameters(), 2e-3), batches, train


@pair("frozen-by-accident")
def body_frozen_and_handed_over(faulty):
    model, loss_fn, batches = phrases()

    def train(model, loss_fn, optimizer, batches):
        for epoch in range(3):
            if epoch == 1:
                for p in model.encoder.parameters():
                    p.requires_grad = False
            if epoch == 2 and not faulty:
                for p in model.encoder.parameters():
                    p.requires_grad = True
            plain(model, loss_fn, optimizer, batches, 1)

    return model, loss_fn, optim.AdamW(model.parameters(), 2e-3), batches, train


@pair("frozen-by-accident", "no-grad-block", "detached")
def gradients_switched_off_for_a_score(faulty):
    model, loss_fn, batches = tasks()

    def score(model, batch):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        value = loss_fn(model, batch).item()
        if not faulty:
            torch.set_grad_enabled(before)
        return value

    def train(model, loss_fn, optimizer, batches):
        try:
            for i, batch in enumerate(batches * 2):
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                if i == 9:
                    score(model, batch)
        finally:
            torch.set_grad_enabled(True)

    return model, loss_fn, optim.Adam(model.parameters(), 5e-3), batches, train
