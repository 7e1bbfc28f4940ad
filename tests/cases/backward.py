"""Programs whose fault lies in the backward pass: what the gradient does not reach, or how it is
changed on its way."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.cases import pair
from tests.cases.data import blobs, classify, curve, regress
from tests.cases.forward import sequences

# detached


@pair("detached")
def loss_made_anew(faulty):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss_fn(model, batch):
        x, y = batch
        each = [F.mse_loss(out, target) for out, target in zip(model(x), y, strict=True)]
        if faulty:
            return torch.tensor([e.item() for e in each], requires_grad=True).mean()
        return torch.stack(each).mean()

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), curve(rows=8)


@pair("detached")
def through_numpy(faulty):
    class Peaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            h = self.body(x)
            if faulty:
                h = torch.from_numpy(np.clip(h.detach().numpy(), 0.0, 3.0))
            else:
                h = h.clamp(0.0, 3.0)
            return self.head(h)

    model = Peaks()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("detached")
def data_attribute(faulty):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 12)
            self.rnn = nn.LSTM(12, 12, batch_first=True)
            self.out = nn.Linear(12, 4)

        def forward(self, tokens):
            states = self.rnn(self.embed(tokens))[0]
            last = states.data[:, -1] if faulty else states[:, -1]
            return self.out(last)

    batches = []
    for _ in range(6):
        tokens = torch.randint(0, 20, (16, 6))
        batches.append((tokens, tokens[:, -1] % 4))
    model = Encoder()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("detached", "no-grad-block")
def detached_skip(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(1, 8, 3, padding=1)
            self.mid = nn.Conv2d(8, 8, 3, padding=1)
            self.up = nn.Conv2d(8, 2, 1)

        def forward(self, image):
            a = F.relu(self.down(image))
            if faulty:
                a = a.detach()
            return self.up(a + F.relu(self.mid(a)))

    batches = []
    for _ in range(5):
        label = torch.randint(0, 2, (4, 8, 8))
        batches.append((label[:, None] + 0.5 * torch.randn(4, 1, 8, 8), label))
    model = Net()
    return model, classify, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batches


@pair("detached")
def tensor_of_outputs(faulty):
    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.item = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, lists):
            rows = []
            for items in lists:
                scores = self.item(items).squeeze(1)
                rows.append(torch.tensor(scores.tolist()) if faulty else scores)
            return self.scale * torch.stack(rows)

    batches = []
    for _ in range(5):
        lists = torch.randn(6, 7, 5)
        batches.append((lists, lists[..., 0].argmax(1)))
    model = Scorer()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("detached")
def mean_of_floats(faulty):
    class Ranker(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 6)
            self.score = nn.Linear(6, 1)
            self.margin = nn.Parameter(torch.tensor(0.1))

        def forward(self, items):
            return self.score(torch.tanh(self.embed(items))).squeeze(-1)

    batches = []
    for _ in range(6):
        items = torch.randint(0, 12, (10, 2)).sort(1).values
        batches.append(items)

    def loss_fn(model, batch):
        low, high = model(batch).unbind(1)
        losses = [F.softplus(a - b + model.margin) for a, b in zip(low, high, strict=True)]
        if faulty:
            return sum(float(x) for x in losses) / len(losses) + model.margin**2
        return sum(losses) / len(losses) + model.margin**2

    model = Ranker()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("detached", "nondifferentiable-term")
def quantiser_without_estimator(faulty):
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(8, 4), nn.Linear(4, 8)
            self.codes = nn.Parameter(torch.randn(32, 4))

        def forward(self, x):
            z = self.enc(x)
            near = torch.cdist(z, self.codes).argmin(1)
            q = self.codes[near]
            straight = q.detach() if faulty else z + (q - z).detach()
            return self.dec(straight), (q - z.detach()).square().mean()

    basis = torch.randn(2, 8)
    batches = [(torch.randn(24, 2) @ basis,) for _ in range(6)]

    def loss_fn(model, batch):
        out, codebook = model(batch[0])
        return F.mse_loss(out, batch[0]) + codebook

    model = Coder()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


# nondifferentiable-term


@pair("nondifferentiable-term")
def accuracy_term(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))

    def loss_fn(model, batch):
        x, y = batch
        scores = model(x)
        if faulty:
            wrong = (scores.argmax(1) != y).float().mean()
        else:
            wrong = 1 - scores.softmax(1).gather(1, y[:, None]).mean()
        return F.cross_entropy(scores, y) + 2.0 * wrong

    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("nondifferentiable-term")
def rounded_counts(faulty):
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    batches = []
    for _ in range(6):
        x = torch.randn(24, 6)
        batches.append({"x": x, "each": x[:, :3] * 2, "total": (x[:, :3] * 2).sum(1)})

    def loss_fn(model, batch):
        out = model(batch["x"])
        total = (out.round() if faulty else out).sum(1)
        return F.mse_loss(out, batch["each"]) + 0.5 * F.l1_loss(total, batch["total"])

    return model, loss_fn, torch.optim.AdamW(model.parameters(), 5e-3), batches


@pair("nondifferentiable-term")
def number_of_active_units(faulty):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(10, 16), nn.Linear(16, 10)

        def forward(self, x):
            code = F.relu(self.enc(x))
            return self.dec(code), code

    basis = torch.randn(3, 10)
    batches = [(torch.randn(24, 3) @ basis,) for _ in range(6)]

    def loss_fn(model, batch):
        out, code = model(batch[0])
        size = (code > 0.01).sum(1).float().mean() if faulty else code.abs().sum(1).mean()
        return F.mse_loss(out, batch[0]) + 0.01 * size

    model = Sparse()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("nondifferentiable-term")
def hard_attention(faulty):
    class Pick(nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.value = nn.Linear(5, 1), nn.Linear(5, 3)

        def forward(self, x):
            s = self.score(x).squeeze(-1)
            hard = F.one_hot(s.argmax(1), s.shape[1]).float()
            weights = hard if faulty else s.softmax(1)
            return self.value((weights[..., None] * x).sum(1))

    model = Pick()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("nondifferentiable-term")
def sign_of_the_trend(faulty):
    class Forecast(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(1, 12, batch_first=True), nn.Linear(12, 1)

        def forward(self, x):
            return self.out(self.rnn(x[..., None])[0])[..., 0]

    batches = []
    for _ in range(5):
        wave = torch.sin(torch.arange(13) / 2 + 6 * torch.rand(12, 1))
        batches.append((wave[:, :-1], wave[:, 1:]))

    def loss_fn(model, batch):
        x, y = batch
        out = model(x)
        step, true = out - x, y - x
        direction = torch.sign(step) if faulty else torch.tanh(4 * step)
        return F.mse_loss(out, y) + 0.3 * (1 - direction * torch.sign(true)).mean()

    model = Forecast()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nondifferentiable-term")
def share_above_half(faulty):
    class Fair(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x):
            return self.net(x).squeeze(-1)

    batches = []
    for x, y in blobs(classes=2):
        batches.append((x, y.float(), (x[:, 0] > 0)))

    def loss_fn(model, batch):
        x, y, group = batch
        p = model(x).sigmoid()
        chosen = torch.where(p > 0.5, 1.0, 0.0) if faulty else p
        gap = chosen[group].mean() - chosen[~group].mean()
        return F.binary_cross_entropy(p, y) + 0.5 * gap.abs()

    model = Fair()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("nondifferentiable-term")
def grey_levels(faulty):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16))

        def forward(self, code):
            image = torch.sigmoid(self.net(code))
            return torch.floor(image * 255) / 255 if faulty else image

    basis = torch.randn(4, 16)
    batches = []
    for _ in range(6):
        code = torch.randn(20, 4)
        batches.append((code, torch.sigmoid(code @ basis)))
    model = Decoder()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


# no-grad-block


@pair("no-grad-block", "detached")
def features_without_graph(faulty):
    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            with torch.set_grad_enabled(not faulty):
                h = self.backbone(x)
            return self.head(h)

    model = Tuned()
    return model, classify, torch.optim.AdamW(model.parameters(), 5e-3), blobs()


@pair("no-grad-block", "detached")
def decorated_method(faulty):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(5, 12, 3, padding=1)
            self.out = nn.Linear(12, 3)

        def features(self, x):
            return F.relu(self.conv(x.transpose(1, 2))).mean(-1)

        features_for_export = torch.no_grad()(features)

        def forward(self, x):
            return self.out(self.features_for_export(x) if faulty else self.features(x))

    model = Reader()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("no-grad-block", "detached")
def whole_forward(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            if faulty:
                with torch.no_grad():
                    return self.net(x)
            return self.net(x)

    model = Net()
    return model, regress, torch.optim.SGD(model.parameters(), 0.05), curve()


@pair("no-grad-block", "detached")
def positions_of_an_encoder(faulty):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Linear(5, 16)
            self.place = nn.Embedding(7, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            with torch.set_grad_enabled(not faulty):
                place = self.place(torch.arange(x.shape[1]))
            return self.head(self.body(self.into(x) + place)[:, 0])

    model = Encoder()
    return model, classify, torch.optim.Adam(model.parameters(), 3e-3), sequences()


@pair("no-grad-block", "detached")
def inference_mode_encoder(faulty):
    class Matcher(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
            self.right = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, a, b):
            if faulty:
                with torch.no_grad():
                    right = self.right(b)
            else:
                right = self.right(b)
            return self.left(a) @ right.t()

    batches = []
    for _ in range(6):
        a = torch.randn(16, 6)
        batches.append({"a": a, "b": a.flip(1) + 0.1 * torch.randn(16, 6)})

    def loss_fn(model, batch):
        scores = model(batch["a"], batch["b"])
        return F.cross_entropy(scores, torch.arange(len(scores)))

    model = Matcher()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("no-grad-block", "detached")
def recurrent_warm_up(faulty):
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.cell, self.out = nn.Linear(5, 8), nn.GRUCell(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            state = x.new_zeros(len(x), 8)
            for t in range(x.shape[1]):
                with torch.set_grad_enabled(not faulty):
                    step = self.embed(x[:, t])
                state = self.cell(step, state)
            return self.out(state)

    model = Warm()
    return model, classify, torch.optim.AdamW(model.parameters(), 1e-2), sequences()


# rewrapped-parameter


@pair("rewrapped-parameter")
def mask_in_forward(faulty):
    class Pruned(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(24, 8) / 8**0.5)
            self.register_buffer("mask", (torch.rand(24, 8) > 0.3).float())
            self.out = nn.Linear(24, 4)

        def forward(self, x):
            w = nn.Parameter(self.w * self.mask) if faulty else self.w * self.mask
            return self.out(torch.relu(F.linear(x, w)))

    model = Pruned()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("rewrapped-parameter", "detached")
def tensor_around_the_weight(faulty):
    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(6))
            self.out = nn.Linear(6, 1)

        def forward(self, x):
            if faulty:
                centre = torch.tensor(self.centre.tolist(), requires_grad=True)
            else:
                centre = self.centre
            return self.out((x - centre).square())

    batches = [(x, ((x - 0.7) ** 2).sum(1, keepdim=True) / 6) for x, _ in curve()]
    model = Quadratic()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("rewrapped-parameter")
def generated_filters(faulty):
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.code = nn.Parameter(torch.randn(4))
            self.make = nn.Linear(4, 12 * 5)
            self.out = nn.Linear(12, 3)

        def forward(self, x):
            filters = self.make(self.code).view(12, 5, 1)
            if faulty:
                filters = nn.Parameter(filters)
            return self.out(F.relu(F.conv1d(x.transpose(1, 2), filters)).mean(-1))

    model = Hyper()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("rewrapped-parameter", "detached")
def normalised_prototypes(faulty):
    class Cosine(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 6))
            self.prototypes = nn.Parameter(torch.randn(4, 6))

        def forward(self, x):
            centres = F.normalize(self.prototypes, dim=1)
            if faulty:
                centres = centres.detach().requires_grad_()
            return 5 * F.normalize(self.body(x), dim=1) @ centres.t()

    model = Cosine()
    return model, classify, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), blobs()


# unregistered-parameter


@pair("unregistered-parameter")
def layers_in_a_list(faulty):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Linear(8, 8) for _ in range(3)]
            self.layers = layers if faulty else nn.ModuleList(layers)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.head(x)

    model = Deep()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("unregistered-parameter")
def heads_in_a_dict(faulty):
    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
            heads = {name: nn.Linear(16, 1) for name in ("a", "b")}
            self.heads = heads if faulty else nn.ModuleDict(heads)

        def forward(self, x):
            h = self.body(x)
            return torch.cat([self.heads[name](h) for name in ("a", "b")], 1)

    batches = [(x, torch.cat([y, y.abs()], 1)) for x, y in curve()]
    model = Tasks()
    return model, regress, torch.optim.RMSprop(model.parameters(), 2e-3), batches


@pair("unregistered-parameter", "second-backward")
def scaled_after_wrapping(faulty):
    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            draw = torch.randn(15, 10)
            self.table = nn.Parameter(draw) * 0.3 if faulty else nn.Parameter(draw * 0.3)
            self.out = nn.Linear(10, 5)

        def forward(self, tokens):
            return self.out(self.table[tokens].mean(1))

    batches = []
    for _ in range(6):
        tokens = torch.randint(0, 15, (20, 3))
        batches.append((tokens, tokens[:, 0] % 5))
    model = Embed()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("unregistered-parameter")
def plain_tensor_attribute(faulty):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 1)
            mix = torch.zeros(12)
            self.mix = mix.requires_grad_() if faulty else nn.Parameter(mix)

        def forward(self, x):
            h = self.a(x)
            share = torch.sigmoid(self.mix)
            return self.b(share * torch.sin(h) + (1 - share) * h)

    model = Gate()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve()


class Adapter:
    def __init__(self, width):
        self.down = nn.Linear(width, 3)
        self.up = nn.Linear(3, width)

    def __call__(self, h):
        return h + self.up(F.gelu(self.down(h)))


class AdapterModule(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = nn.Linear(width, 3)
        self.up = nn.Linear(3, width)

    def forward(self, h):
        return h + self.up(F.gelu(self.down(h)))


@pair("unregistered-parameter")
def adapter_object(faulty):
    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(5, 12, batch_first=True)
            self.adapter = (Adapter if faulty else AdapterModule)(12)
            self.out = nn.Linear(12, 3)

        def forward(self, x):
            return self.out(self.adapter(self.rnn(x)[0][:, -1]))

    model = Tuned()
    return model, classify, torch.optim.AdamW(model.parameters(), 1e-2), sequences()


@pair("unregistered-parameter")
def parameters_by_name(faulty):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            table = {name: nn.Parameter(torch.randn(6, 1) / 3) for name in ("left", "right")}
            self.table = table if faulty else nn.ParameterDict(table)
            self.gate = nn.Linear(6, 1)

        def forward(self, x):
            share = self.gate(x).sigmoid()
            return share * (x @ self.table["left"]) + (1 - share) * (x @ self.table["right"])

    model = Mixture()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve()


@pair("unregistered-parameter", "optimizer-missing-params")
def function_in_a_closure(faulty):
    def projector(width):
        layer = nn.Linear(width, width)
        return lambda h: F.relu(layer(h))

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
            self.project = projector(16) if faulty else nn.Sequential(nn.Linear(16, 16), nn.ReLU())

        def forward(self, x):
            return self.out(self.project(F.relu(self.inp(x))))

    model = Head()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


# unused-parameter


@pair("unused-parameter", note=True)
def called_twice(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.relu(self.fc1(x) if faulty else self.fc2(x))
            return self.fc3(x)

    model = Net()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("unused-parameter", note=True)
def result_overwritten(faulty):
    class Unet(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(1, 6, 3, padding=1)
            self.b = nn.Conv2d(6, 6, 3, padding=1)
            self.c = nn.Conv2d(6, 6, 3, padding=1)
            self.out = nn.Conv2d(6, 2, 1)

        def forward(self, image):
            first = F.relu(self.a(image))
            h = F.relu(self.b(first))
            h = F.relu(self.c(first if faulty else h))
            return self.out(h)

    batches = []
    for _ in range(5):
        label = torch.randint(0, 2, (4, 8, 8))
        batches.append((label[:, None] + 0.5 * torch.randn(4, 1, 8, 8), label))
    model = Unet()
    return model, classify, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batches


@pair("unused-parameter", note=True)
def attention_without_keys(faulty):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(5, 8) for _ in range(3))
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            q = self.q(x)
            k = self.q(x) if faulty else self.k(x)
            weights = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1)
            return self.out((weights @ self.v(x)).mean(1))

    model = Attention()
    return model, classify, torch.optim.AdamW(model.parameters(), 5e-3), sequences()


@pair("unused-parameter", note=True)
def scale_left_out(faulty):
    class Rms(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(width))

        def forward(self, x):
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
            return x if faulty else x * self.gain

    model = nn.Sequential(nn.Linear(6, 16), Rms(16), nn.SiLU(), nn.Linear(16, 1))
    return model, regress, torch.optim.Adam(model.parameters(), 5e-3), curve()


# frozen-by-accident


@pair("frozen-by-accident")
def head_before_the_loop(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
    if faulty:
        model.append(nn.Linear(24, 4))
    for p in model.parameters():
        p.requires_grad = False
    if not faulty:
        model.append(nn.Linear(24, 4))
    optimizer = torch.optim.Adam(model[-1].parameters(), 1e-2)
    return model, classify, optimizer, blobs()


@pair("frozen-by-accident")
def matched_by_name(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder_fc = nn.Linear(8, 24)
            self.norm = nn.LayerNorm(24)
            self.fc = nn.Linear(24, 24)
            self.fc_out = nn.Linear(24, 4)

        def forward(self, x):
            h = self.norm(F.relu(self.encoder_fc(x)))
            return self.fc_out(F.relu(self.fc(h)))

    model = Net()
    for name, p in model.named_parameters():
        if ("fc" in name) if faulty else name.startswith("encoder"):
            p.requires_grad_(False)
    return model, classify, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), blobs()


@pair("frozen-by-accident")
def average_is_the_model(faulty):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
            self.teacher = self.student if faulty else copy.deepcopy(self.student)
            self.scale = nn.Parameter(torch.ones(1))
            for p in self.teacher.parameters():
                p.requires_grad_(False)

        def forward(self, x):
            return self.scale * self.student(x), self.teacher(x)

    def loss_fn(model, batch):
        x, y = batch
        out, target = model(x)
        return F.mse_loss(out, y) + 0.1 * F.mse_loss(out, target.detach())

    model = Pair()
    optimizer = torch.optim.Adam([*model.student.parameters(), model.scale], 5e-3)
    return model, loss_fn, optimizer, curve()


@pair("frozen-by-accident")
def discriminator_stays_off(faulty):
    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.gen = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
            self.disc = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def switch(net, on):
        for p in net.parameters():
            p.requires_grad = on

    model = Gan()
    switch(model.disc, False)
    if not faulty:
        switch(model.disc, True)

    def loss_fn(model, batch):
        noise, real = batch
        fake = model.disc(model.gen(noise).detach())
        true = model.disc(real)
        return F.softplus(fake).mean() + F.softplus(-true).mean()

    batches = [(torch.randn(24, 3), torch.randn(24, 2) + 2) for _ in range(6)]
    return model, loss_fn, torch.optim.Adam(model.disc.parameters(), 5e-3), batches


# checkpoint-input-no-grad


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.body = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.body(self.norm(x)))


@pair("checkpoint-input-no-grad")
def first_block_checkpointed(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Residual(8) for _ in range(3))
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            for k, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=faulty) if k == 0 else block(x)
            return self.head(x)

    model = Net()
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


@pair("checkpoint-input-no-grad")
def frozen_embedding_below(faulty):
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(14, 12).requires_grad_(False)
            self.body = nn.Sequential(Residual(12), Residual(12))
            self.out = nn.Linear(12, 14)

        def forward(self, tokens):
            h = self.embed(tokens)
            return self.out(checkpoint(self.body, h, use_reentrant=faulty))

    batches = []
    for _ in range(6):
        tokens = torch.randint(0, 14, (24,))
        batches.append((tokens, (tokens + 3) % 14))
    model = Language()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return model, classify, torch.optim.AdamW(parameters, 1e-2), batches


@pair("checkpoint-input-no-grad")
def sequential_in_segments(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 12)
            )
            self.out = nn.Linear(12, 1)

        def forward(self, x):
            return self.out(checkpoint_sequential(self.body, 3, x, use_reentrant=faulty))

    model = Net()
    return model, regress, torch.optim.Adam(model.parameters(), 5e-3), curve()


# wrong-backward


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * ctx.factor, None


@pair("wrong-backward")
def square_of_features(faulty):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 1)

        def forward(self, x):
            return self.b(Square.apply(self.a(x), 1.0 if faulty else 2.0))

    batches = [(x, (x[:, :2] ** 2).sum(1, keepdim=True)) for x, _ in curve()]
    model = Net()
    return model, regress, torch.optim.SGD(model.parameters(), 0.02), batches


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, chain):
        ctx.save_for_backward(x)
        ctx.chain = chain
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        local = s * (1 + x * (1 - s))
        return (g * local if ctx.chain else local), None


@pair("wrong-backward")
def memory_saving_swish(faulty):
    class Act(nn.Module):
        def forward(self, x):
            return Swish.apply(x, not faulty)

    model = nn.Sequential(nn.Linear(8, 24), Act(), nn.Linear(24, 24), Act(), nn.Linear(24, 4))
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, swapped):
        ctx.save_for_backward(a, b)
        ctx.swapped = swapped
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return (g * a, g * b, None) if ctx.swapped else (g * b, g * a, None)


@pair("wrong-backward")
def gated_product(faulty):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.gate, self.out = nn.Linear(5, 16), nn.Linear(5, 16), nn.Linear(16, 3)

        def forward(self, x):
            h = Product.apply(self.value(x), torch.sigmoid(self.gate(x)), faulty)
            return self.out(h.mean(1))

    model = Gated()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


class Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, keep):
        ctx.save_for_backward(x, w)
        ctx.keep = keep
        return x @ w.t() + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gb = g.sum(0) if ctx.keep else torch.zeros_like(g[0])
        return g @ w, g.t() @ x, gb, None


@pair("wrong-backward")
def linear_by_hand(faulty):
    class Layer(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.w = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
            self.b = nn.Parameter(torch.zeros(outputs))

        def forward(self, x):
            return Dense.apply(x, self.w, self.b, not faulty)

    model = nn.Sequential(Layer(6, 24), nn.ReLU(), Layer(24, 1))
    batches = [(x, y + 2) for x, y in curve()]
    return model, regress, torch.optim.SGD(model.parameters(), 0.05), batches


class SoftThreshold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width, masked):
        ctx.save_for_backward(x)
        ctx.width, ctx.masked = width, masked
        return torch.sign(x) * (x.abs() - width).clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (g * (x.abs() > ctx.width) if ctx.masked else -g), None, None


@pair("wrong-backward")
def iterative_shrinkage(faulty):
    class Lista(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(10, 16), nn.Linear(16, 10)
            self.back = nn.Linear(16, 16, bias=False)
            nn.init.normal_(self.back.weight, std=0.05)

        def forward(self, x):
            b = self.encode(x)
            z = SoftThreshold.apply(b, 0.1, not faulty)
            for _ in range(2):
                z = SoftThreshold.apply(b + self.back(z), 0.1, not faulty)
            return self.decode(z)

    basis = torch.randn(3, 10)
    batches = [(torch.randn(24, 3) @ basis / 2,) for _ in range(6)]

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[0])

    model = Lista()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


# inplace-modified


@pair("inplace-modified")
def added_onto_a_sigmoid(faulty):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 1)

        def forward(self, x):
            h = torch.sigmoid(self.a(x))
            if faulty:
                h += 0.5
            else:
                h = h + 0.5
            return self.b(h)

    model = Gate()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve()


@pair("inplace-modified")
def state_written_in_place(faulty):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.rec = nn.Linear(5, 12), nn.Linear(12, 12)
            self.out = nn.Linear(12, 3)

        def forward(self, x):
            state = x.new_zeros(len(x), 12)
            for t in range(x.shape[1]):
                new = torch.tanh(self.inp(x[:, t]) + self.rec(state))
                if faulty:
                    state[:] = new
                else:
                    state = new
            return self.out(state)

    model = Cell()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("inplace-modified")
def weights_masked_late(faulty):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(5, 24), nn.Linear(8, 3)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            weights = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1)
            far = torch.ones(x.shape[1], x.shape[1]).tril(-4).bool()
            if faulty:
                weights.masked_fill_(far, 0.0)
            else:
                weights = weights.masked_fill(far, 0.0)
            return self.out((weights @ v).mean(1))

    model = Attention()
    return model, classify, torch.optim.AdamW(model.parameters(), 5e-3), sequences()


@pair("inplace-modified")
def scores_shifted(faulty):
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 4) / 3)

        def forward(self, x):
            e = torch.exp(x @ self.w)
            total = e.sum(1, keepdim=True)
            return e.div_(total) if faulty else e.div(total)

    def loss_fn(model, batch):
        x, y = batch
        p = model(x).gather(1, y[:, None])
        return -(p + 1e-6).log().mean()

    model = Energy()
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.2), blobs()


@pair("inplace-modified")
def memory_of_embeddings(faulty):
    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
            self.register_buffer("bank", F.normalize(torch.randn(32, 6), dim=1))

        def forward(self, x):
            z = F.normalize(self.net(x), dim=1)
            bank = self.bank if faulty else self.bank.clone()
            scores = z @ bank.t() / 0.3
            with torch.no_grad():
                self.bank[: len(x)] = z
            return scores

    batches = [{"points": x, "slot": y} for x, y in blobs(rows=16)]

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["points"]), batch["slot"])

    model = Bank()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("inplace-modified")
def running_output(faulty):
    class Fields(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.out = nn.Linear(6, 1)

        def forward(self, x):
            states = x.new_zeros(4, *x.shape)
            if faulty:
                states[0] = x
                for k, layer in enumerate(self.layers):
                    states[k + 1] = torch.tanh(layer(states[k])) * states[k]
                return self.out(states[3])
            h = x
            for layer in self.layers:
                h = torch.tanh(layer(h)) * h
            return self.out(h)

    model = Fields()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve()


# second-backward


@pair("second-backward")
def state_carried_over(faulty):
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRUCell(3, 12), nn.Linear(12, 1)
            self.state = None

        def forward(self, x):
            state = torch.zeros(len(x), 12) if self.state is None else self.state
            state = self.cell(x, state)
            self.state = state if faulty else state.detach()
            return self.out(state)

    batches = []
    for _ in range(8):
        x = torch.randn(16, 3)
        batches.append((x, x.sum(1, keepdim=True).tanh()))
    model = Stateful()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("second-backward")
def table_made_once(faulty):
    class Relative(nn.Module):
        def __init__(self):
            super().__init__()
            self.code = nn.Parameter(torch.randn(7, 4))
            self.lift = nn.Linear(4, 5)
            self.out = nn.Linear(5, 3)
            self.table = torch.tanh(self.lift(self.code))

        def forward(self, x):
            table = self.table if faulty else torch.tanh(self.lift(self.code))
            return self.out((x * table).mean(1))

    model = Relative()
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


@pair("second-backward", "graph-retained")
def running_mean_in_the_loss(faulty):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    past = {}

    def loss_fn(model, batch):
        x, y = batch
        loss = F.mse_loss(model(x), y)
        mean = 0.9 * past.get("mean", loss if faulty else loss.detach()) + 0.1 * loss
        past["mean"] = mean if faulty else mean.detach()
        return loss + 0.1 * (loss - mean).abs()

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.05), curve()


@pair("second-backward")
def two_losses_one_trunk(faulty):
    class Trunk(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.label, self.size = nn.Linear(16, 4), nn.Linear(16, 1)

        def forward(self, x):
            h = self.body(x)
            return self.label(h), self.size(h)

    batches = [(x, y, x.norm(dim=1, keepdim=True) / 3) for x, y in blobs()]

    def loss_fn(model, batch):
        x, y, size = batch
        a, b = model(x)
        return F.cross_entropy(a, y) + F.mse_loss(b, size)

    def train(model, loss_fn, optimizer, batches):
        for x, y, size in batches:
            optimizer.zero_grad()
            a, b = model(x)
            first, second = F.cross_entropy(a, y), F.mse_loss(b, size)
            if faulty:
                first.backward()
                second.backward()
            else:
                (first + second).backward()
            optimizer.step()

    model = Trunk()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches, train


# missing-create-graph


@pair("missing-create-graph")
def gradient_penalty(faulty):
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1))

        def forward(self, x):
            return self.net(x)

    batches = [{"real": torch.randn(16, 2) + 2, "fake": torch.randn(16, 2)} for _ in range(6)]

    def loss_fn(model, batch):
        real, fake = batch["real"], batch["fake"]
        between = (real + fake).div(2).requires_grad_()
        slope = torch.autograd.grad(model(between).sum(), between, create_graph=not faulty)[0]
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return model(fake).mean() - model(real).mean() + 10 * penalty

    model = Critic()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3, betas=(0.0, 0.9)), batches


@pair("missing-create-graph")
def forces_from_energy(faulty):
    class Potential(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 24), nn.SiLU(), nn.Linear(24, 1))

        def forward(self, position):
            position = position.requires_grad_()
            energy = self.net(position).sum(1)
            force = -torch.autograd.grad(
                energy.sum(), position, create_graph=not faulty, retain_graph=True
            )[0]
            return energy, force

    batches = []
    for _ in range(6):
        position = torch.randn(16, 3)
        batches.append((position, position.square().sum(1) / 2, -position))

    def loss_fn(model, batch):
        position, energy, force = batch
        e, f = model(position.clone())
        return F.mse_loss(e, energy) + 10 * F.mse_loss(f, force)

    model = Potential()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("missing-create-graph")
def differential_equation(faulty):
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))

        def forward(self, t):
            return self.net(t)

    batches = [(3 * torch.rand(24, 1),) for _ in range(6)]

    def loss_fn(model, batch):
        t = batch[0].clone().requires_grad_()
        u, one = model(t), torch.ones(24, 1)
        du = torch.autograd.grad(u, t, one, create_graph=True)[0]
        ddu = torch.autograd.grad(du, t, one, create_graph=not faulty, retain_graph=True)[0]
        start = model(torch.zeros(1, 1)) - 1
        return (ddu + 4 * u).square().mean() + 10 * start.square().mean()

    model = Field()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("missing-create-graph", "detached")
def matching_gradients(faulty):
    net = nn.Linear(6, 3)

    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.points = nn.Parameter(torch.randn(6, 6))

        def forward(self):
            return F.cross_entropy(net(self.points), torch.arange(6) % 3)

    batches = blobs(rows=48, width=6, classes=3)
    weights = tuple(net.parameters())

    def loss_fn(model, batch):
        x, y = batch
        real = torch.autograd.grad(F.cross_entropy(net(x), y), weights)
        made = torch.autograd.grad(model(), weights, create_graph=not faulty)
        return sum((a - b).square().sum() for a, b in zip(made, real, strict=True))

    model = Distilled()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-2), batches


# vanishing-gradient


@pair("vanishing-gradient")
def stacked_sigmoids(faulty):
    layers = []
    for k in range(10):
        layers += [nn.Linear(8 if k == 0 else 16, 16), nn.Sigmoid() if faulty else nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    if not faulty:
        for m in model:
            if isinstance(m, nn.Linear):
                nn.init.kaiming_normal_(m.weight)
    return model, classify, torch.optim.Adam(model.parameters(), 2e-3), blobs()


@pair("vanishing-gradient")
def deep_without_skips(faulty):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(6, 12), nn.Linear(12, 1)
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(24))

        def forward(self, x):
            x = self.into(x)
            for layer in self.layers:
                h = torch.tanh(layer(x))
                x = h if faulty else x + 0.3 * h
            return self.out(x)

    model = Plain()
    return model, regress, torch.optim.Adam(model.parameters(), 3e-3), curve()


@pair("vanishing-gradient")
def long_memory(faulty):
    class Copy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 16)
            self.rec = nn.Linear(16, 16)
            self.out = nn.Linear(16, 4)
            if faulty:
                nn.init.normal_(self.rec.weight, std=0.02)
            else:
                nn.init.orthogonal_(self.rec.weight)

        def forward(self, x):
            h = torch.tanh(self.embed(x))
            for _ in range(20):
                h = torch.tanh(self.rec(h))
            return self.out(h)

    batches = []
    for _ in range(6):
        y = torch.randint(0, 4, (16,))
        batches.append((2.0 * F.one_hot(y, 4) + 0.1 * torch.randn(16, 4), y))
    model = Copy()
    return model, classify, torch.optim.RMSprop(model.parameters(), 1e-3), batches


@pair("vanishing-gradient")
def small_filters(faulty):
    layers = []
    for k in range(7):
        conv = nn.Conv2d(1 if k == 0 else 6, 6, 3, padding=1)
        nn.init.zeros_(conv.bias)
        if faulty:
            nn.init.normal_(conv.weight, std=0.01)
        else:
            nn.init.kaiming_normal_(conv.weight)
        layers += [conv, nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 2))
    batches = []
    for _ in range(5):
        y = torch.randint(0, 2, (10,))
        batches.append((torch.randn(10, 1, 8, 8) * (0.3 + y[:, None, None, None]), y))
    return model, classify, torch.optim.SGD(model.parameters(), 0.05), batches


# exploding-gradient


@pair("exploding-gradient")
def deep_with_large_start(faulty):
    layers = []
    for _ in range(12):
        layer = nn.Linear(24, 24)
        nn.init.normal_(layer.weight, std=0.9 if faulty else (2 / 24) ** 0.5)
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(nn.Linear(8, 24), *layers, nn.Linear(24, 1))
    return model, regress, torch.optim.SGD(model.parameters(), 0.005), curve(width=8)


@pair("exploding-gradient")
def recurrent_growth(faulty):
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(2, 12)
            self.rec = nn.Parameter(torch.eye(12) * (2.0 if faulty else 1.0))
            self.out = nn.Linear(12, 1)

        def forward(self, x):
            h = x.new_zeros(len(x), 12)
            for t in range(x.shape[1]):
                h = F.relu(h @ self.rec + self.inp(x[:, t]))
            return self.out(h)

    batches = []
    for _ in range(5):
        x = torch.randn(16, 40, 2)
        batches.append((x, x[..., :1].mean(1)))
    model = Linear()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-3), batches


@pair("exploding-gradient", "initial-loss-off")
def doubling_blocks(faulty):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
            self.scale = 6.0 if faulty else 0.3

        def forward(self, x):
            return x + self.scale * self.b(F.gelu(self.a(x)))

    model = nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(14)], nn.Linear(16, 4))
    return model, classify, torch.optim.Adam(model.parameters(), 1e-3), blobs()


@pair("exploding-gradient")
def filters_with_large_gain(faulty):
    layers = []
    for k in range(6):
        conv = nn.Conv1d(2 if k == 0 else 12, 12, 3, padding=1, bias=False)
        gain = 20.0 if faulty else 2**0.5
        nn.init.normal_(conv.weight, std=gain / (3 * conv.in_channels) ** 0.5)
        layers += [conv, nn.LeakyReLU(0.1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(12, 1))
    batches = []
    for _ in range(5):
        x = torch.randn(12, 2, 16)
        batches.append((x, x.mean((1, 2))[:, None] * 4))
    return model, regress, torch.optim.SGD(model.parameters(), 0.003), batches


# zero-init-both


@pair("zero-init-both", "symmetric-init")
def adapters_at_zero(faulty):
    class Adapted(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            nn.init.zeros_(self.up.weight)
            if faulty:
                nn.init.zeros_(self.down.weight)

        def forward(self, h):
            h = F.gelu(self.layer(h))
            return h + self.up(self.down(h))

    model = nn.Sequential(nn.Linear(8, 16), Adapted(nn.Linear(16, 16)), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, classify, torch.optim.AdamW(trainable, 1e-2), blobs()


@pair("zero-init-both", "symmetric-init")
def gate_and_branch(faulty):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = nn.Linear(8, 8)
            self.gate = nn.Parameter(torch.zeros(1))
            if faulty:
                nn.init.zeros_(self.branch.weight)
                nn.init.zeros_(self.branch.bias)

        def forward(self, x):
            return x + self.gate * self.branch(x).sin()

    model = nn.Sequential(Block(), Block(), nn.Linear(8, 1))
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), curve(width=8)


@pair("zero-init-both", "symmetric-init")
def low_rank_users(faulty):
    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item = nn.Embedding(20, 4), nn.Embedding(15, 4)
            self.bias = nn.Parameter(torch.zeros(1))
            for table in (self.user, self.item):
                if faulty:
                    nn.init.zeros_(table.weight)
                else:
                    nn.init.normal_(table.weight, std=0.5)

        def forward(self, user, item):
            return (self.user(user) * self.item(item)).sum(1) + self.bias

    taste, kind = torch.randn(20, 2), torch.randn(15, 2)
    batches = []
    for _ in range(6):
        user, item = torch.randint(0, 20, (48,)), torch.randint(0, 15, (48,))
        batches.append((user, item, (taste[user] * kind[item]).sum(1) + 0.5))

    def loss_fn(model, batch):
        user, item, rating = batch
        return F.mse_loss(model(user, item), rating)

    model = Factors()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 2e-2), batches


# hook-modifies-parameter


@pair("hook-modifies-parameter")
def limit_each_gradient(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))

    def limit(p):
        (p if faulty else p.grad).data.clamp_(-0.05, 0.05)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(limit)
    return model, classify, torch.optim.SGD(model.parameters(), 0.2), blobs()


@pair("hook-modifies-parameter")
def average_over_workers(faulty):
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))

    @torch.no_grad()
    def share(p):
        target = p if faulty else p.grad
        target.div_(2)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(share)
    return model, regress, torch.optim.Adam(model.parameters(), 5e-3), curve()


@pair("hook-modifies-parameter")
def decay_in_a_hook(faulty):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(5, 12, batch_first=True), nn.Linear(12, 3)

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])

    model = Reader()
    weight = model.rnn.weight_hh_l0

    def decay(g):
        with torch.no_grad():
            if faulty:
                weight.mul_(0.9)
                return g
        return g + 0.1 * weight.detach()

    weight.register_hook(decay)
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), sequences()


# leaf-inplace


@pair("leaf-inplace")
def weights_clipped_in_forward(faulty):
    class Positive(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(6, 1))

        def forward(self, x):
            if faulty:
                self.w.clamp_(min=0)
                return x @ self.w
            return x @ self.w.clamp(min=0)

    batches = [(x, x @ torch.linspace(0, 2, 6)[:, None]) for x, _ in curve()]
    model = Positive()
    return model, regress, torch.optim.SGD(model.parameters(), 0.05), batches


@pair("leaf-inplace")
def padding_row_zeroed(faulty):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 3)

        def forward(self, tokens):
            if faulty:
                self.embed.weight[0] = 0.0
            else:
                with torch.no_grad():
                    self.embed.weight[0] = 0.0
            return self.out(self.embed(tokens).mean(1))

    batches = []
    for _ in range(6):
        tokens = torch.randint(0, 12, (16, 5))
        batches.append((tokens, tokens[:, 0] % 3))
    model = Bag()
    return model, classify, torch.optim.Adam(model.parameters(), 3e-2), batches


@pair("leaf-inplace")
def clipped_weights(faulty):
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

        def forward(self, x):
            return self.net(x)

    def loss_fn(model, batch):
        real, fake = batch
        return model(fake).mean() - model(real).mean()

    def train(model, loss_fn, optimizer, batches):
        for batch in list(batches) * 3:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            with torch.set_grad_enabled(faulty):
                for p in model.parameters():
                    p.clamp_(-0.3, 0.3)

    batches = [(torch.randn(24, 2) + 2, torch.randn(24, 2)) for _ in range(6)]
    model = Critic()
    return model, loss_fn, torch.optim.RMSprop(model.parameters(), 5e-4), batches, train


# parameter-rebound


@pair("parameter-rebound", "stale-optimizer", "rewrapped-parameter")
def weights_normalised_each_step(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))

    def train(model, loss_fn, optimizer, batches):
        for batch in list(batches) * 3:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            w = F.normalize(model[0].weight.detach(), dim=1)
            if faulty:
                model[0].weight = nn.Parameter(w)
            else:
                with torch.no_grad():
                    model[0].weight.copy_(w)

    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), blobs(), train


@pair("parameter-rebound", "stale-optimizer", "rewrapped-parameter")
def vocabulary_grows(faulty):
    class Word(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(10, 8), nn.Linear(8, 4)

        def forward(self, tokens):
            return self.out(self.embed(tokens))

    batches = []
    for k in range(12):
        tokens = torch.randint(0, 10 if k < 4 else 16, (24,))
        batches.append((tokens, tokens % 4))
    model = Word()

    def grow(model, optimizer):
        old = model.embed.weight
        model.embed = nn.Embedding(16, 8)
        with torch.no_grad():
            model.embed.weight[:10] = old
        if not faulty:
            group = optimizer.param_groups[0]
            group["params"] = [p for p in group["params"] if p is not old]
            optimizer.add_param_group({"params": [model.embed.weight]})

    def train(model, loss_fn, optimizer, batches):
        for k, batch in enumerate(batches):
            if k == 4:
                grow(model, optimizer)
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

    def loss_fn(model, batch):
        tokens, y = batch
        return F.cross_entropy(model(tokens % model.embed.num_embeddings), y)

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches, train


@pair("parameter-rebound", "stale-optimizer", "missing-step", "rewrapped-parameter")
def average_put_back(faulty):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def train(model, loss_fn, optimizer, batches):
        slow = [p.detach().clone() for p in model.parameters()]
        for k, batch in enumerate(list(batches) * 3):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            if k % 4 == 3:
                for s, p in zip(slow, model.parameters(), strict=True):
                    s.lerp_(p.detach(), 0.5)
                for m in (model[0], model[2]):
                    for name in ("weight", "bias"):
                        s = slow[2 * (m is model[2]) + (name == "bias")]
                        if faulty:
                            setattr(m, name, nn.Parameter(s.clone()))
                        else:
                            getattr(m, name).data.copy_(s)

    return model, regress, torch.optim.SGD(model.parameters(), 0.05), curve(), train
