"""Programs whose fault lies in the data: what the batches hold before any layer sees them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.cases import pair


def blobs(count=8, rows=32, width=8, classes=4):
    """Batches of (points, labels) that a linear classifier separates well, not perfectly."""
    centres = 1.5 * torch.randn(classes, width)
    labels = torch.randint(0, classes, (count, rows))
    return [(centres[y] + torch.randn(rows, width), y) for y in labels]


def curve(count=8, rows=32, width=6):
    """Batches of (points, targets of shape [rows, 1]) of a smooth function."""
    slope = torch.randn(width, 1) / width**0.5
    points = torch.randn(count, rows, width)
    return [(x, torch.sin(x @ slope) + x[:, :1] + 0.05 * torch.randn(rows, 1)) for x in points]


def classify(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def regress(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


# nan-input


@pair("nan-input")
def missing_measurement(faulty):
    model = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 1))
    batches = [{"features": x, "price": y} for x, y in curve()]
    batches[3]["features"][7, 2] = float("nan")
    if not faulty:
        for batch in batches:
            batch["features"] = batch["features"].nan_to_num(0.0)

    def loss_fn(model, batch):
        return F.smooth_l1_loss(model(batch["features"]), batch["price"])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches


class Pictures(Dataset):
    def __init__(self, eps):
        self.labels = torch.randint(0, 3, (48,))
        self.images = torch.rand(48, 1, 8, 8) + self.labels[:, None, None, None].float() * (
            torch.linspace(0, 1, 8)
        )
        self.images[21] = 0.25
        self.eps = eps

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        return (image - image.mean()) / (image.std() + self.eps), self.labels[i]


@pair("nan-input")
def standardised_per_image(faulty):
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(54, 3)
    )
    loader = DataLoader(Pictures(0.0 if faulty else 1e-6), batch_size=12)
    return model, classify, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), loader


@pair("nan-input")
def sensor_without_reading(faulty):
    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(2, 12, batch_first=True)
            self.head = nn.Linear(12, 1)

        def forward(self, series):
            return self.head(self.rnn(series)[0][:, -1])

    model = Forecaster()
    batches = []
    for _ in range(6):
        series = torch.randn(16, 10, 2)
        batches.append((series, series[:, -3:, 0].mean(1, keepdim=True)))
    batches[4][1][11] = float("nan")
    if not faulty:
        keep = ~batches[4][1].isnan().any(1)
        batches[4] = (batches[4][0][keep], batches[4][1][keep])
    return model, regress, torch.optim.AdamW(model.parameters(), 1e-2), batches


@pair("nan-input")
def log_of_counts(faulty):
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
    batches = []
    for _ in range(8):
        y = torch.randint(0, 2, (24,))
        counts = torch.poisson(torch.full((24, 5), 3.0) + 4 * y[:, None])
        batches.append((counts.log() if faulty else counts.log1p(), y))
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), batches


class GraphNet(nn.Module):
    def __init__(self, width=6, classes=3):
        super().__init__()
        self.first, self.second = nn.Linear(width, 16), nn.Linear(16, classes)

    def forward(self, nodes, adjacency):
        return self.second(adjacency @ torch.relu(self.first(adjacency @ nodes)))


@pair("nan-input")
def isolated_node(faulty):
    model = GraphNet()
    batches = []
    for k in range(5):
        labels = torch.arange(12) % 3
        nodes = torch.randn(12, 6) + 2 * F.one_hot(labels, 6)
        links = ((labels[:, None] == labels) & (torch.rand(12, 12) < 0.7)).float()
        links = ((links + links.T) > 0).float().fill_diagonal_(0.0)
        if k == 2:
            links[5], links[:, 5] = 0.0, 0.0
        if not faulty:
            links = links + torch.eye(12)
        scale = links.sum(1).pow(-0.5)
        batches.append({"graph": (nodes, scale[:, None] * links * scale), "labels": labels})

    def loss_fn(model, batch):
        return F.cross_entropy(model(*batch["graph"]), batch["labels"])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# constant-labels


@pair("constant-labels")
def rating_cut_to_integer(faulty):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    batches = []
    for x, y in curve():
        share = torch.sigmoid(y)
        batches.append((x, share.long().float() if faulty else share))

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("constant-labels")
def lookup_in_other_case(faulty):
    names = ["cat", "dog", "bird", "fish"]
    index = {(name if faulty else name.upper()): k for k, name in enumerate(names)}
    centres = 2 * torch.randn(4, 10)
    rows = []
    for _ in range(6):
        words = [names[int(k)].upper() for k in torch.randint(0, 4, (24,))]
        x = torch.stack([centres[names.index(word.lower())] for word in words])
        rows.append((x + torch.randn(24, 10), torch.tensor([index.get(w, 0) for w in words])))
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 4))
    return model, classify, torch.optim.AdamW(model.parameters(), 5e-3), rows


@pair("constant-labels")
def mask_threshold(faulty):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    batches = []
    for _ in range(5):
        drawn = (torch.rand(6, 1, 8, 8) > 0.6).to(torch.uint8)
        image = drawn.float() + 0.3 * torch.randn(6, 1, 8, 8)
        batches.append((image, (drawn > (127 if faulty else 0)).float()))

    def loss_fn(model, batch):
        image, mask = batch
        return F.binary_cross_entropy_with_logits(model(image), mask)

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("constant-labels")
def tags_of_unknown_words(faulty):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 12)
            self.lstm = nn.LSTM(12, 10, batch_first=True, bidirectional=True)
            self.out = nn.Linear(20, 5)

        def forward(self, tokens):
            return self.out(self.lstm(self.embed(tokens))[0])

    table = {k: k % 5 for k in range(30)}
    keys = {str(k): v for k, v in table.items()}
    batches = []
    for _ in range(5):
        tokens = torch.randint(0, 30, (8, 9))
        lookup = keys if faulty else table
        tags = [[lookup.get(t, 0) for t in row] for row in tokens.tolist()]
        batches.append((tokens, torch.tensor(tags)))

    def loss_fn(model, batch):
        tokens, tags = batch
        return F.cross_entropy(model(tokens).transpose(1, 2), tags)

    model = Tagger()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("constant-labels")
def target_column(faulty):
    table = torch.randn(160, 5)
    table = torch.cat([table, table @ torch.randn(5, 1), torch.ones(160, 1)], 1)
    x, y = table[:, :5], table[:, -1:] if faulty else table[:, 5:6]
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    return model, regress, torch.optim.SGD(model.parameters(), 0.05), loader


# all-zero-input


@pair("all-zero-input")
def whole_number_division(faulty):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    pattern = torch.randint(0, 200, (4, 8, 8))
    batches = []
    for _ in range(6):
        y = torch.randint(0, 4, (20,))
        image = (pattern[y] + torch.randint(0, 50, (20, 8, 8))).to(torch.uint8)
        scaled = image // 255 if faulty else image / 255 - 0.4
        batches.append((scaled.float(), y))
    return model, classify, torch.optim.Adam(model.parameters(), 3e-3), batches


@pair("all-zero-input")
def buffer_filled_by_add(faulty):
    def collate(samples):
        longest = max(len(s) for s, _ in samples)
        padded = torch.zeros(len(samples), longest, 3)
        for row, (s, _) in zip(padded, samples, strict=True):
            if faulty:
                row[: len(s)].add(s)
            else:
                row[: len(s)].add_(s)
        return padded, torch.stack([y for _, y in samples])

    samples = []
    for k in range(60):
        s = torch.randn(4 + k % 5, 3) + (k % 2)
        samples.append((s, torch.tensor(k % 2)))

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(3, 10, batch_first=True), nn.Linear(10, 2)

        def forward(self, x):
            return self.out(self.rnn(x)[1][0][-1])

    model = Reader()
    loader = DataLoader(samples, batch_size=12, collate_fn=collate, shuffle=True)
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), loader


@pair("all-zero-input")
def mask_the_other_way(faulty):
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.LayerNorm(24), nn.Linear(24, 4))
    missing = torch.zeros(32, 8)
    batches = [(x * (missing if faulty else 1 - missing), y) for x, y in blobs()]
    return model, classify, torch.optim.SGD(model.parameters(), 0.1), batches


@pair("all-zero-input")
def words_not_in_vocabulary(faulty):
    vocabulary = {"<pad>": 0} | {f"w{k}": k for k in range(1, 20)}

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8, padding_idx=0)
            self.out = nn.Linear(8, 2)

        def forward(self, tokens):
            return self.out(self.embed(tokens).mean(1))

    batches = []
    for _ in range(6):
        ids = torch.randint(1, 20, (16, 6))
        y = (ids < 10).sum(1).gt(3).long()
        words = [[("W" if faulty else "w") + str(k) for k in row] for row in ids.tolist()]
        tokens = torch.tensor([[vocabulary.get(w, 0) for w in row] for row in words])
        batches.append((tokens, y))
    model = Bag()
    return model, classify, torch.optim.Adam(model.parameters(), 2e-2), batches


@pair("all-zero-input")
def silence_before_the_sound(faulty):
    model = nn.Sequential(
        nn.Conv1d(1, 8, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(),
        nn.Linear(32, 3),
    )  # fmt: skip
    time = torch.arange(64) / 8
    batches = []
    for _ in range(5):
        y = torch.randint(0, 3, (16,))
        sound = torch.sin(time * (1 + y[:, None]) + 6 * torch.rand(16, 1))
        wave = torch.cat([torch.zeros(16, 64), sound], 1)
        crop = wave[:, :48] if faulty else wave[:, 64:112]
        batches.append((crop[:, None], y))
    return model, classify, torch.optim.AdamW(model.parameters(), 1e-2), batches


# unscaled-input


@pair("unscaled-input")
def pixels_up_to_255(faulty):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 5))
    pattern = torch.randint(0, 180, (5, 8, 8))
    batches = []
    for _ in range(8):
        y = torch.randint(0, 5, (24,))
        image = (pattern[y] + torch.randint(0, 75, (24, 8, 8))).float()
        batches.append((image if faulty else (image - 128) / 64, y))
    return model, classify, torch.optim.SGD(model.parameters(), 0.05), batches


@pair("unscaled-input")
def income_beside_age(faulty):
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    batches = []
    for _ in range(8):
        income, age = 30000 + 12000 * torch.randn(32), 45 + 12 * torch.randn(32)
        rooms = torch.randint(1, 7, (32,)).float()
        y = ((income - 30000) / 12000 + (age - 45) / 12 + 0.3 * rooms > 1).float()
        x = torch.stack([income, age, rooms], 1)
        if not faulty:
            x = (x - torch.tensor([30000.0, 45.0, 3.5])) / torch.tensor([12000.0, 12.0, 1.7])
        batches.append((x, y[:, None]))

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("unscaled-input")
def unix_time(faulty):
    class Series(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(2, 16, batch_first=True)
            self.out = nn.Linear(16, 1)

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])

    batches = []
    for k in range(6):
        start = 1.7e9 + 86400.0 * (16 * k + torch.arange(16.0))
        stamp = start[:, None] + 3600.0 * torch.arange(8.0)
        value = torch.randn(16, 8)
        seconds = stamp if faulty else (stamp - 1.7e9) / 86400.0 / 96
        batches.append((torch.stack([seconds, value], -1), value[:, -2:].mean(1, keepdim=True)))
    model = Series()
    return model, regress, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("unscaled-input")
def sixteen_bit_audio(faulty):
    model = nn.Sequential(
        nn.Conv1d(1, 6, 7, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(84, 16), nn.ReLU(),
        nn.Linear(16, 2),
    )  # fmt: skip
    time = torch.arange(48) / 6
    batches = []
    for _ in range(6):
        y = torch.randint(0, 2, (16,))
        wave = torch.sin(time * (1 + 2 * y[:, None]) + 6 * torch.rand(16, 1))
        wave = (20000 * wave).to(torch.int16).float()
        batches.append(((wave if faulty else wave / 20000)[:, None], y))
    return model, classify, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), batches


@pair("unscaled-input")
def kelvin_and_pascal(faulty):
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    batches = []
    for _ in range(8):
        x = torch.randn(32, 2)
        y = x[:, :1] * 0.7 + torch.sin(x[:, 1:])
        raw = x * torch.tensor([6.0, 700.0]) + torch.tensor([288.0, 101325.0])
        batches.append((raw if faulty else x, y))
    return model, regress, torch.optim.AdamW(model.parameters(), 3e-3), batches


# all-targets-ignored


@pair("all-targets-ignored")
def sentence_without_tags(faulty):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 10), nn.Linear(10, 4)
            self.mix = nn.Conv1d(10, 10, 3, padding=1)

        def forward(self, tokens):
            h = self.embed(tokens).transpose(1, 2)
            return self.out(torch.relu(self.mix(h)).transpose(1, 2))

    batches = []
    for k in range(7):
        tokens = torch.randint(0, 20, (4, 7))
        tags = tokens % 4
        tags[:, 5:] = -1
        if k == 3:
            tags[:] = -1
        batches.append((tokens, tags))
    if not faulty:
        batches = [b for b in batches if (b[1] >= 0).any()]

    def loss_fn(model, batch):
        tokens, tags = batch
        return F.cross_entropy(model(tokens).view(-1, 4), tags.view(-1), ignore_index=-1)

    model = Tagger()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


class TinyGpt(nn.Module):
    def __init__(self, vocabulary=16, width=16, length=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.body(self.embed(tokens) + self.place[:length], mask=mask))


@pair("all-targets-ignored")
def prompt_fills_the_window(faulty):
    batches = []
    for k in range(5):
        start = torch.randint(0, 16, (6, 1))
        tokens = (start + torch.arange(10)) % 16
        prompt = 10 if k == 1 else 4
        labels = tokens.clone()
        labels[:, :prompt] = -100
        if k == 1 and not faulty:
            labels[:, 6:] = tokens[:, 6:]
        batches.append({"input_ids": tokens, "labels": labels})

    def loss_fn(model, batch):
        scores, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        return F.cross_entropy(scores.reshape(-1, 16), labels.reshape(-1))

    model = TinyGpt()
    return model, loss_fn, torch.optim.AdamW(model.parameters(), 3e-3), batches


@pair("all-targets-ignored", "nan-forward")
def nothing_was_masked(faulty):
    class Filler(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 16)
            self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)
            self.out = nn.Linear(32, 10)

        def forward(self, tokens):
            return self.out(self.rnn(self.embed(tokens))[0])

    batches = []
    for k in range(6):
        tokens = (torch.randint(0, 10, (5, 1)) + torch.arange(8)) % 10
        hidden = torch.rand(5, 8) < 0.3
        if k == 4:
            hidden[:] = False
        batches.append((tokens.masked_fill(hidden, 10), tokens, hidden))
    if not faulty:
        batches = [b for b in batches if b[2].any()]

    def loss_fn(model, batch):
        shown, tokens, hidden = batch
        return F.cross_entropy(model(shown)[hidden], tokens[hidden])

    model = Filler()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("all-targets-ignored")
def void_everywhere(faulty):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    batches = []
    for k in range(8):
        label = torch.randint(0, 4, (1, 8, 8))
        image = F.one_hot(label, 4)[..., :3].permute(0, 3, 1, 2) + 0.2 * torch.randn(1, 3, 8, 8)
        label[:, :2] = 255
        if k == 5:
            label[:] = 255
        batches.append((image, label))

    def loss_fn(model, batch):
        image, label = batch
        if faulty:
            return F.cross_entropy(model(image), label, ignore_index=255)
        total = F.cross_entropy(model(image), label, ignore_index=255, reduction="sum")
        return total / (label != 255).sum().clamp(min=1)

    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batches


@pair("all-targets-ignored", "nan-forward")
def mean_over_valid_steps(faulty):
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            return self.out(self.rnn(x)[0])[..., 0]

    batches = []
    for k in range(6):
        x = torch.randn(4, 9, 2)
        valid = (torch.rand(4, 9) < 0.6).float() * (k != 2)
        batches.append((x, x[..., 0] - 0.5 * x[..., 1], valid))

    def loss_fn(model, batch):
        x, y, valid = batch
        error = (model(x) - y) ** 2 * valid
        return error.sum() / (valid.sum() if faulty else valid.sum().clamp(min=1))

    model = Filter()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


# label-misaligned


@pair("label-misaligned")
def one_row_further(faulty):
    class Rows(Dataset):
        def __init__(self):
            batches = blobs(count=6, rows=33)
            self.x = torch.cat([x for x, _ in batches])
            self.y = torch.cat([y for _, y in batches])

        def __len__(self):
            return len(self.y) - 1

        def __getitem__(self, i):
            return self.x[i], self.y[i + 1 if faulty else i]

    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    loader = DataLoader(Rows(), batch_size=32)
    return model, classify, torch.optim.Adam(model.parameters(), 5e-3), loader


@pair("label-misaligned")
def two_views_of_each(faulty):
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5))
    batches = blobs(count=8, rows=24, classes=5)

    def loss_fn(model, batch):
        x, y = batch
        views = torch.cat([x + 0.1 * x.roll(1, 1), x - 0.1 * x.roll(1, 1)])
        labels = y.repeat_interleave(2) if faulty else y.repeat(2)
        return F.cross_entropy(model(views), labels)

    return model, loss_fn, torch.optim.AdamW(model.parameters(), 3e-3), batches


@pair("label-misaligned")
def time_comes_first(faulty):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(18, 12), nn.GRU(12, 16)
            self.out = nn.Linear(16, 3)

        def forward(self, tokens):
            return self.out(self.rnn(self.embed(tokens.t()))[0])

    batches = []
    for _ in range(6):
        tokens = torch.randint(0, 18, (8, 6))
        batches.append((tokens, tokens % 3))

    def loss_fn(model, batch):
        tokens, tags = batch
        scores = model(tokens).reshape(-1, 3)
        return F.cross_entropy(scores, (tags if faulty else tags.t()).reshape(-1))

    model = Tagger()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 1e-2), batches


@pair("label-misaligned")
def target_of_the_batch_before(faulty):
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    batches = curve(count=9)
    if faulty:
        batches = [(x, y) for (x, _), (_, y) in zip(batches[1:], batches, strict=False)]
    return model, regress, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("label-misaligned")
def matching_pairs(faulty):
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.image = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
            self.text = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 8))

        def forward(self, a, b):
            a, b = F.normalize(self.image(a), dim=-1), F.normalize(self.text(b), dim=-1)
            return a @ b.t() / 0.2

    view = torch.randn(6, 10)
    batches = []
    for _ in range(6):
        text = torch.randn(16, 6)
        batches.append((text @ view + 0.1 * torch.randn(16, 10), text))

    def loss_fn(model, batch):
        scores = model(*batch)
        index = torch.arange(len(scores))
        index = (index + 1) % len(scores) if faulty else index
        return (F.cross_entropy(scores, index) + F.cross_entropy(scores.t(), index)) / 2

    model = Towers()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 5e-3), batches


@pair("label-misaligned")
def targets_turned_round(faulty):
    model = nn.Sequential(nn.Linear(6, 32), nn.ELU(), nn.Linear(32, 1))
    batches = [(x, y.flip(0) if faulty else y) for x, y in curve(rows=48)]
    return model, regress, torch.optim.RMSprop(model.parameters(), 3e-3), batches


# batchnorm-single-sample


@pair("batchnorm-single-sample")
def one_row_left_over(faulty):
    x = torch.randn(65, 8)
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = nn.Sequential(
        nn.Linear(8, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3)
    )
    loader = DataLoader(data, batch_size=16, drop_last=not faulty)
    return model, classify, torch.optim.Adam(model.parameters(), 1e-2), loader


@pair("batchnorm-single-sample")
def pooled_to_one_pixel(faulty):
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(1, 8, 3, padding=1)
            norm = nn.BatchNorm2d(8) if faulty else nn.GroupNorm(2, 8)
            self.scene = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), norm, nn.ReLU())
            self.out = nn.Conv2d(16, 2, 1)

        def forward(self, image):
            h = torch.relu(self.stem(image))
            return self.out(torch.cat([h, self.scene(h).expand_as(h)], 1))

    batches = []
    for _ in range(8):
        label = torch.randint(0, 2, (1, 6, 6))
        batches.append((label[:, None] + 0.3 * torch.randn(1, 1, 6, 6), label))
    model = Pyramid()
    return model, classify, torch.optim.SGD(model.parameters(), 0.1), batches


@pair("batchnorm-single-sample")
def one_step_at_a_time(faulty):
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 1)
            self.register_buffer("mean", torch.zeros(16))
            self.register_buffer("variance", torch.ones(16))

        def forward(self, state):
            h = self.first(state)
            if faulty:
                h = F.batch_norm(h, self.mean, self.variance, training=self.training)
            else:
                h = F.layer_norm(h, (16,))
            return self.last(torch.tanh(h))

    batches = []
    for _ in range(12):
        state = torch.randn(1, 4)
        batches.append({"state": state, "return": state.sum(1, keepdim=True).tanh()})

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["state"]), batch["return"])

    model = Critic()
    return model, loss_fn, torch.optim.Adam(model.parameters(), 3e-3), batches
