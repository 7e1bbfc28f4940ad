"""bpkit.memory: bytes by hand, bytes as the allocator has them, and nothing left behind."""

import copy
import gc
import json
import random
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from bpkit.memory import ledger, saved_bytes, size_of

FLOAT, LONG = 4, 8


class Attention(nn.Module):
    def __init__(self, width, heads, fused, dropout):
        super().__init__()
        self.heads, self.fused, self.dropout = heads, fused, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
            mixed = F.dropout(torch.softmax(scores, -1), self.dropout) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))


class Block(nn.Module):
    def __init__(self, width, heads, fused=False, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, fused, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, blocks=3, fused=False, dropout=0.0, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.token, self.place = nn.Embedding(50, 24), nn.Embedding(32, 24)
        self.blocks = nn.ModuleList(Block(24, 3, fused, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 50, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def next_token(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def square(model, x):
    return model(x).pow(2).mean()


def mlp():
    return nn.Sequential(
        nn.Linear(11, 23), nn.ReLU(), nn.Linear(23, 19), nn.ReLU(), nn.Linear(19, 5)
    )


def conv():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 7, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(7 * 16, 5),
    )  # fmt: skip


def points(n=13):
    return torch.randn(n, 11), torch.randint(0, 5, (n,))


def images(n=9):
    return torch.randn(n, 1, 8, 8), torch.randint(0, 5, (n,))


def tokens(n=4, length=17):
    return torch.randint(0, 50, (n, length))


def encoder():
    layer = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class First(nn.Module):
    """The outputs of a recurrent layer, without its state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


MODELS = {
    "mlp": (mlp, classify, points),
    "conv": (conv, classify, images),
    "transformer": (Transformer, next_token, tokens),
    "fused": (lambda: Transformer(fused=True), next_token, tokens),
    "dropout": (lambda: Transformer(dropout=0.2), next_token, tokens),
    "checkpointed": (lambda: Transformer(checkpointed=True), next_token, tokens),
    "encoder": (encoder, square, lambda: torch.randn(4, 9, 24)),
    "gru": (lambda: First(nn.GRU(6, 8, 2)), square, lambda: torch.randn(7, 5, 6)),
    "lstm": (lambda: First(nn.LSTM(6, 8, 2)), square, lambda: torch.randn(7, 5, 6)),
}
ADAMW = torch.optim.AdamW


def setting(name, optimizer=ADAMW):
    torch.manual_seed(0)
    make, loss_fn, batch = MODELS[name]
    model = make()
    return model, loss_fn, batch(), optimizer and optimizer(model.parameters())


def kept(fn, *args):
    return {(row.kind, row.keeper): row.nbytes for row in saved_bytes(fn, *args).rows}


# What the graph keeps, by hand


def test_mlp_by_hand():
    model, batch = mlp(), points(13)
    n, log_softmax, total_weight = 13, 13 * 5, 1
    saved = saved_bytes(lambda: classify(model, batch))
    assert saved.bytes == FLOAT * (n * 23 + n * 19 + log_softmax + total_weight)
    assert saved.parameters == FLOAT * (23 * 19 + 19 * 5)  # the first layer's input needs no grad
    assert saved.inputs == FLOAT * n * 11 + LONG * n


def test_conv_by_hand():
    model, batch = conv(), images(9)
    n, whole, small = 9, 9 * 6 * 64, 9 * 6 * 16
    bytes_ = FLOAT * (whole + 6 + 6)  # BatchNorm: its input, mean and 1 / standard deviation
    bytes_ += FLOAT * whole + LONG * small + FLOAT * small  # ReLU, places of the maxima, maxima
    bytes_ += FLOAT * n * 7 * 16 + FLOAT * (n * 5 + 1)  # ReLU (also Linear's input), the loss
    assert saved_bytes(lambda: classify(model, batch)).bytes == bytes_


@pytest.mark.parametrize("fused", [False, True])
def test_transformer_block_by_hand(fused):
    n, t, width, heads = 3, 7, 10, 2
    block = Block(width, heads, fused)
    x = torch.randn(n, t, width, requires_grad=True)
    one = n * t * width
    # normalised 2, q k v 3, mixed 1, second norm's input 1, inside the MLP 4 + 4
    numbers = 15 * one + 2 * 2 * n * t
    if fused:  # q, k and v are views of one product; a row sum for each query
        numbers += n * heads * t
    else:
        numbers += n * heads * t * t
    saved = saved_bytes(block, x)
    assert saved.bytes == FLOAT * numbers
    assert saved.inputs == FLOAT * one


def test_single_operations_by_hand():
    x = torch.randn(8, 16, requires_grad=True)
    size = FLOAT * 8 * 16
    assert saved_bytes(lambda: (x + x).sum()).bytes == 0
    assert kept(lambda: torch.softmax(x, 1).sum()) == {("activation", "softmax result"): size}
    assert kept(lambda: torch.relu(x * 1.0).exp().sum()) == {
        ("activation", "relu result"): size,
        ("activation", "exp result"): size,
    }
    norm = kept(lambda: F.layer_norm(x, (16,)).sum())
    assert norm[("input", "native_layer_norm input")] == size
    assert sum(v for (kind, _), v in norm.items() if kind == "activation") == FLOAT * 8 * 2
    # On a CPU the mask is as wide as the values, on a GPU it is boolean.
    assert saved_bytes(lambda: F.dropout(x, 0.5).sum()).bytes == size
    assert saved_bytes(lambda: (x * (x.detach() > 0)).sum()).bytes == 8 * 16
    assert kept(lambda: x.float().bfloat16().sigmoid().sum()) == {
        ("activation", "sigmoid result"): size // 2
    }


def test_embedding_keeps_its_indices_and_the_loss_its_targets():
    table, index = nn.Embedding(7, 4), torch.tensor([1, 2, 3])
    rows = kept(lambda: F.cross_entropy(table(index), index))
    assert rows[("input", "embedding indices")] == LONG * 3  # once, though the loss has it too
    assert rows[("activation", "log_softmax result")] == FLOAT * 12
    made = saved_bytes(lambda: table(torch.tensor([1, 2, 3])).sum())
    assert made.bytes == LONG * 3  # made inside, so it is new


def test_batched_linear():
    layer, x = nn.Linear(6, 5), torch.randn(2, 3, 6, requires_grad=True)
    saved = saved_bytes(lambda: layer(x * 1.0).sum())
    assert (saved.bytes, saved.parameters) == (FLOAT * 36, FLOAT * 30)


def test_shared_storage_counts_once_and_whole():
    x = torch.randn(100, requires_grad=True)
    assert saved_bytes(lambda: (x.exp()[:1] * 3).sum()).bytes == 400
    both = lambda: (lambda y: y.view(10, 10).sin().sum() + y[5:].cos().sum())(x * 2)  # noqa: E731
    assert saved_bytes(both).bytes == 400
    wide = lambda: ((x * 2)[:1].expand(50) * x[:50]).sum()  # noqa: E731
    assert saved_bytes(wide).bytes == 400  # the storage behind the view, not 50 numbers


def test_a_storage_that_grows():
    def grows():
        result = torch.ones(10).resize_(50)
        torch.ones(50, out=torch.empty(0))
        return x * result.fill_(2.0)

    x = torch.randn(50, requires_grad=True)
    assert saved_bytes(grows).bytes == 200
    model = nn.Linear(50, 1, bias=False)
    live = ledger(model, lambda m, _: (grows() * m.weight).sum(), None).moments["after forward"]
    assert live == (200 + 2 * 200, 200 + 2 * 200 + FLOAT)


def test_relu_result_is_the_next_input():
    rows = saved_bytes(lambda: classify(mlp(), points())).rows
    relu = [row for row in rows if row.keeper == "relu result"]
    assert [row.also for row in relu] == [["addmm mat1"]] * 2


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(self.table(x))

    model = Tied()
    result = ledger(model, square, torch.arange(5), ADAMW(model.parameters()))
    assert result.parts["parameters"] == result.parts["gradients"] == FLOAT * 36
    assert saved_bytes(model, torch.arange(5)).parameters == FLOAT * 36


def test_a_view_as_parameter_counts_its_storage_once():
    model = nn.Module()
    flat = torch.randn(12)
    model.a, model.b = nn.Parameter(flat[:6]), nn.Parameter(flat[6:])
    for device in (None, "meta"):
        parts = ledger(model, lambda m, _: (m.a * m.b).sum(), None, device=device).parts
        assert (parts["parameters"], parts["activations"]) == (48, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_keeps_the_inputs_only(reentrant):
    block, x = mlp(), torch.randn(13, 11, requires_grad=True)
    plain = saved_bytes(lambda: block(x * 1.0).sum())
    saved = saved_bytes(lambda: checkpoint(block, x * 1.0, use_reentrant=reentrant).sum())
    assert saved.bytes == FLOAT * 13 * 11 < plain.bytes
    keeper = "checkpoint_function tensors[0]" if reentrant else "checkpoint input"
    assert [*saved.by("operation")] == [keeper]


def test_custom_function():
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            result = x.exp()
            ctx.save_for_backward(result)
            ctx.twice = x * 2
            return result

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    x = torch.randn(8, requires_grad=True)
    assert kept(lambda: Exp.apply(x).sum()) == {
        ("activation", "exp tensors[0]"): 32,
        ("activation", "exp ctx.twice"): 32,
    }


def test_sparse_and_nested():
    x, eye = torch.randn(8, 4, requires_grad=True), torch.eye(8).to_sparse()
    assert saved_bytes(lambda: torch.sparse.mm(eye, x).sum()).inputs == 8 * 2 * LONG + 8 * FLOAT
    assert saved_bytes(lambda: torch.sparse.mm(eye * 2, x).sum()).bytes == 8 * 2 * LONG + 8 * FLOAT
    ragged = torch.nested.nested_tensor(
        [torch.randn(3, 4), torch.randn(2, 4)], layout=torch.jagged, requires_grad=True
    )
    saved = saved_bytes(lambda: (ragged * 2).sin().values().sum())
    assert saved.rows[0].nbytes == FLOAT * 20 + LONG * 3  # values and offsets
    assert json.dumps(saved.to_dict())


def test_dtype_and_autocast_copies():
    model, x = nn.Linear(6, 5, bias=False), torch.randn(4, 6, requires_grad=True)

    def cast():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).sum()

    saved = saved_bytes(cast)
    assert saved.bytes == 2 * (4 * 6 + 6 * 5)  # both operands as bfloat16 copies
    assert saved.by("dtype") == {"torch.bfloat16": 108}
    assert saved.parameters == 0


def test_places_are_named():
    def loss(model, x):
        return model(x).exp().sum()

    model, x = Transformer(2), tokens()
    saved = saved_bytes(lambda: loss(model, x))
    modules = saved.by("module")
    assert modules["blocks.1.attn"] == modules["blocks.0.attn"] > 0
    assert "None" in modules  # the exp of the loss stands in no module
    assert [line for line in saved.by("line") if "torch.softmax(scores, -1)" in line]
    assert saved.by("operation")["softmax result"] == 2 * FLOAT * 4 * 3 * 17 * 17
    text = str(saved)
    assert "blocks.*.attn" in text
    assert saved.table().header[0] in saved._repr_html_()
    assert saved.to_dict()["bytes"] == saved.bytes == sum(modules.values())
    with pytest.raises(ValueError, match="'operation', 'module'"):
        saved.by("colour")


def test_places_of_two_models_are_named():
    """A number stands for one module here, so no star takes its place."""
    first = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    second = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    x = torch.ones(2, 3)
    table = saved_bytes(lambda: second(first(x)).sum()).table()
    assert [row[:2] for row in table.rows] == [
        ["1", "tanh result"], ["Sequential.1", "sigmoid result"]
    ]  # fmt: skip


def test_inplace_error_still_comes():
    def wrong():
        y = torch.ones(3, requires_grad=True).exp()
        z = y * y
        y.add_(1)
        z.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved_bytes(wrong)


def test_counting_changes_no_gradient():
    model, loss_fn, batch, _ = setting("dropout", None)

    def gradients():
        return torch.autograd.grad(loss_fn(model, batch), [*model.parameters()])

    torch.manual_seed(1)
    plain = gradients()
    torch.manual_seed(1)
    caught = []
    saved = saved_bytes(lambda: caught.extend(gradients()))
    assert all(map(torch.equal, plain, caught))
    assert saved.rows == []  # backward has run


def test_second_derivative_under_the_hooks():
    def penalty():
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        found.append(second)

    found = []
    saved_bytes(penalty)
    assert found[0].tolist() == [12.0, 18.0]


def test_nothing_is_kept_alive():
    alive = []

    def fn():
        y = torch.ones(1000, requires_grad=True).exp()
        alive.append(weakref.ref(y.untyped_storage()))
        return y.sin().sum()

    gc.disable()
    try:
        saved = saved_bytes(fn)
        assert saved.bytes == 4000
        assert alive[0]() is None  # not even a cycle
    finally:
        gc.enable()


# The ledger against the allocator, and against storages counted without it


class Storages(TorchDispatchMode):
    """Bytes of the storages made in here that are alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        given = {s for s in map(self.key, tree_leaves((arguments, keywords))) if s}
        for tensor in tree_leaves(result):
            key = self.key(tensor)
            if key and key not in self.known and key not in given:
                storage = tensor.untyped_storage()
                self.known[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.gone, key)
        return result

    @staticmethod
    def key(value):
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None

    def gone(self, key):
        self.live -= self.known.pop(key)


def tensor_bytes(values):
    return sum(v.nbytes for v in tree_leaves(values) if isinstance(v, torch.Tensor))


def there_before(model, batch, optimizer):
    state = [*optimizer.state.values()] if optimizer else []
    return tensor_bytes([[*model.parameters()], [*model.buffers()], batch, state])


@pytest.mark.parametrize("name", MODELS)
def test_alive_and_peak_of_a_plain_step(name):
    model, loss_fn, batch, optimizer = setting(name)
    result = ledger(model, loss_fn, batch, optimizer)
    for _ in range(2):  # the second step finds its states
        optimizer.zero_grad()
        base, alive = there_before(model, batch, optimizer), []
        with Storages() as storages:
            loss = loss_fn(model, batch)
            alive.append(base + storages.live)
            loss.backward()
            alive.append(base + storages.live)
            optimizer.step()
            alive.append(base + storages.live)
    assert [live for _, live in result.moments.values()] == alive
    assert result.peak == base + storages.peak
    for total, live in result.moments.values():
        assert total == pytest.approx(live, rel=0.05)
        assert live - total == FLOAT  # the loss, which nothing keeps


@pytest.mark.parametrize("name", ["mlp", "conv", "transformer", "fused", "lstm"])
def test_alive_as_the_allocator_has_it(name):
    model, loss_fn, batch, _ = setting(name, None)
    result = ledger(model, loss_fn, batch)
    base, alive = there_before(model, batch, None), []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        loss = loss_fn(model, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        loss.backward()
    for run in (forward, backward):
        base += sum(event.self_cpu_memory_usage for event in run.events())
        alive.append(base)
    measured = [live for _, live in result.moments.values()][:2]
    assert measured == pytest.approx(alive, rel=0.01)  # the allocator rounds up


def test_what_other_hooks_hold():
    model, loss_fn, batch, _ = setting("transformer")

    def elsewhere(model, batch):
        with torch.autograd.graph.save_on_cpu():  # here: a copy
            return loss_fn(model, batch)

    kept = ledger(model, loss_fn, batch).parts
    assert "held otherwise" not in kept
    result = ledger(model, elsewhere, batch)
    assert result.parts["activations"] == 0
    assert result.parts["held otherwise"] >= kept["activations"]
    total, live = result.moments["after forward"]
    assert live == total + FLOAT
    assert "selective checkpointing" in str(result)


def test_accumulated_gradients_are_not_counted_twice():
    model, loss_fn, batch, optimizer = setting("mlp")
    plain = ledger(model, loss_fn, batch, optimizer)
    loss_fn(model, batch).backward()
    optimizer.step()
    again = ledger(model, loss_fn, batch, optimizer)
    assert (again.parts, again.moments, again.peak) == (plain.parts, plain.moments, plain.peak)


# Optimizers


def numbers(model):
    return sum(p.numel() for p in model.parameters())


STEP = FLOAT  # a count for each tensor
OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.1), 0, 0),
    "momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1, 0),
    "adam": (torch.optim.Adam, 2, STEP),
    "adamw": (torch.optim.AdamW, 2, STEP),
    "foreach": (lambda p: torch.optim.AdamW(p, foreach=True), 2, STEP),
    "fused": (lambda p: torch.optim.AdamW(p, fused=True), 2, STEP),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 3, STEP),
    "tensor rate": (lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)), 2, STEP),
    "rmsprop": (torch.optim.RMSprop, 1, STEP),
    "centered": (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3, STEP),
    "adagrad": (torch.optim.Adagrad, 1, STEP),  # there from the start
    "nadam": (torch.optim.NAdam, 2, 2 * STEP),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_by_hand(name, stepped):
    make, each, count = OPTIMIZERS[name]
    model, loss_fn, batch, _ = setting("mlp", None)
    model.scale = nn.Parameter(torch.tensor(2.0))  # without dimensions, as a step count is
    optimizer = make(model.parameters())

    def scaled(model, batch):
        return loss_fn(model, batch) * model.scale

    if stepped:
        scaled(model, batch).backward()
        optimizer.step()
    states = each * FLOAT * numbers(model) + count * len([*model.parameters()])
    for device in (None, "meta"):
        result = ledger(model, scaled, batch, optimizer, device=device)
        assert result.parts["optimizer states"] == states
        total, live = result.moments["after step"]
        assert live - total == FLOAT


def test_parameter_groups_and_bfloat16():
    model, loss_fn, (x, y), _ = setting("mlp", None)
    model.bfloat16()
    groups = [{"params": [p], "lr": 0.1 * k} for k, p in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups)
    parts = ledger(model, loss_fn, (x.bfloat16(), y), optimizer).parts
    assert parts["parameters"] == parts["gradients"] == 2 * numbers(model)
    assert parts["optimizer states"] == 4 * numbers(model) + STEP * 6


@pytest.mark.parametrize("device", [None, "meta"])
def test_lbfgs_is_estimated(device):
    model, loss_fn, batch, _ = setting("mlp", None)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=3)
    result = ledger(model, loss_fn, batch, optimizer, device=device)
    assert "LBFGS" in result.estimated[0]
    assert result.moments["after step"][1] is None
    assert "not run" in str(result)
    for _ in range(9):

        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    states = tensor_bytes([*optimizer.state.values()])
    assert result.parts["optimizer states"] == pytest.approx(states, rel=0.05)


def test_frozen_base_with_lora():
    class LoRA(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(base.in_features, 2))
            self.b = nn.Parameter(torch.zeros(2, base.out_features))

        def forward(self, x):
            return self.base(x) + x @ self.a @ self.b

    model = LoRA(nn.Linear(40, 30))
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    result = ledger(model, square, torch.randn(5, 40), optimizer)
    assert result.parts["parameters"] == FLOAT * (40 * 30 + 30 + 140)
    assert result.parts["gradients"] == FLOAT * 140
    assert result.parts["optimizer states"] == 2 * FLOAT * 140 + 2 * STEP
    assert "1,230 frozen" in str(result)


@pytest.mark.parametrize("device", [None, "meta"])
def test_all_frozen(device):
    model, loss_fn, batch, optimizer = setting("mlp")
    model.requires_grad_(False)
    with torch.no_grad():
        parts = ledger(model, loss_fn, batch, optimizer, device=device).parts
    assert [parts[n] for n in ("gradients", "optimizer states", "activations")] == [0, 0, 0]


def test_unused_and_sparse_gradients():
    model = nn.ModuleDict({"table": nn.Embedding(50, 4, sparse=True), "rest": nn.Linear(2, 2)})
    optimizer = torch.optim.SparseAdam(model["table"].parameters())
    result = ledger(model, lambda m, x: square(m["table"], x), torch.arange(3), optimizer)
    assert result.parts["gradients"] == 3 * 4 * FLOAT + 3 * LONG
    assert "2 of 3 trained tensors get none" in str(result)


def test_runs_inside_no_grad():
    model, loss_fn, batch, _ = setting("mlp")
    with torch.no_grad():
        assert ledger(model, loss_fn, batch).parts["activations"] > 0


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantised_tensors():
    model = nn.Linear(6, 5)
    model.register_buffer("table", torch.quantize_per_tensor(torch.ones(6), 0.1, 0, torch.qint8))

    def loss_fn(model, x):
        return square(model, x * model.table.dequantize())

    assert ledger(model, loss_fn, torch.randn(2, 6)).parts["buffers"] == 6
    with pytest.raises(RuntimeError, match="quantised tensor has no stand-in"):
        ledger(model, loss_fn, torch.randn(2, 6), device="meta")


# Without data


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])
def test_meta_equals_the_device(name):
    model, loss_fn, batch, optimizer = setting(name)
    real = ledger(model, loss_fn, batch, optimizer)
    fake = ledger(model, loss_fn, batch, optimizer, device="meta")
    expected, found = real.to_dict(), fake.to_dict()
    for told in (expected, found):
        assert told.pop("ran_on")
        advice = told.pop("advice")
        for each in advice:
            if name != "conv" or "autocast" not in each["text"]:  # see the docstring
                told.setdefault("advice", []).append(each)
    assert found == expected
    model.to("meta")  # in place, so that the optimizer holds them still
    optimizer = ADAMW(model.parameters())
    built = ledger(model, loss_fn, batch, optimizer).to_dict()
    assert (built["parts"], built["peak"]) == (expected["parts"], expected["peak"])


def test_lstm_without_data_says_that_it_estimates():
    assert "LSTM" in ledger(*setting("lstm"), device="meta").estimated[0]


def test_seven_billion_parameters():
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(8192, 32, 32768, batch_first=True, dropout=0.0)
        model = nn.TransformerEncoder(layer, 9, enable_nested_tensor=False)
        x = torch.empty(2, 64, 8192)
        optimizer = ADAMW(model.parameters())
        result = ledger(model, lambda m, x: square(m, x * torch.ones(8192)), x, optimizer)
    count = numbers(model)
    assert count > 6.8e9
    assert result.parts["optimizer states"] == 8 * count + STEP * len([*model.parameters()])
    assert result.parts["parameters"] == result.parts["gradients"] == 4 * count
    assert "without data" in str(result)


def test_values_can_not_be_read_without_data():
    model, loss_fn, batch, _ = setting("mlp")
    for read in (
        lambda m, b: loss_fn(m, b) * loss_fn(m, b).item(),
        lambda m, b: loss_fn(m, b) if loss_fn(m, b) > 0 else None,
        lambda m, b: m(b[0])[b[1] > 0].sum(),
    ):
        with pytest.raises(RuntimeError, match=r"without data.*can't read values"):
            ledger(model, read, batch, device="meta")
        assert ledger(model, read, batch).parts["activations"] > 0


def test_another_model_without_data():
    model, loss_fn, batch, _ = setting("mlp")
    with pytest.raises(RuntimeError, match="the model and the batch that it is given"):
        ledger(copy.deepcopy(model), lambda m, b: loss_fn(model, b), batch, device="meta")
    assert all(p.grad is None for p in model.parameters())


# Advice


def advice(result, part):
    (found,) = [each for each in result.advice if part in each.text]
    return found


def test_checkpointing_saves_what_it_says():
    model, loss_fn, batch, optimizer = setting("transformer")
    before = ledger(model, loss_fn, batch, optimizer)
    found = advice(before, "checkpoint each of the 3 Block (blocks.0 to blocks.2)")
    model.checkpointed = True
    after = ledger(model, loss_fn, batch, optimizer)
    assert found.saves == before.peak - after.peak > 0.2 * before.peak
    assert f"keeps {size_of(after.parts['activations'])} instead of" in found.text
    assert not [each for each in after.advice if "checkpoint" in each.text]


def test_fused_attention_saves_what_it_says():
    eager = ledger(*setting("transformer"))
    fused = ledger(*setting("fused"))
    found = advice(eager, "attention probabilities")
    assert "blocks.*.attn" in found.text
    assert found.saves == eager.parts["activations"] - fused.parts["activations"]
    assert not [each for each in fused.advice if "attention" in each.text]


def test_attention_with_one_head_and_no_dimension_for_it():
    class OneHead(nn.Linear):
        def forward(self, x):
            return torch.softmax(x @ super().forward(x).transpose(-1, -2), -1) @ x

    torch.manual_seed(0)
    rows, places = torch.randn(4, 32, 8), 4 * 32 * 32 * 4  # in bytes
    model = nn.Sequential(OneHead(8, 8), nn.Linear(8, 1))
    found = advice(ledger(model, lambda m, x: m(x).mean(), rows), "attention probabilities")
    assert found.saves == places - places // 32


def test_half_the_batch_and_autocast_save_what_they_say():
    model, loss_fn, batch, _ = setting("transformer")
    result = ledger(model, loss_fn, batch)
    half = ledger(model, loss_fn, batch[:2])
    assert advice(result, "2 of the 4 rows").saves == result.peak - half.peak

    def cast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    mixed = ledger(model, cast, batch)
    assert advice(result, "torch.autocast").saves == result.peak - mixed.peak
    assert not [each for each in mixed.advice if "autocast" in each.text]


def test_states_save_what_they_say():
    model, loss_fn, batch, optimizer = setting("mlp")
    result = ledger(model, loss_fn, batch, optimizer)
    momentum = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    one = ledger(model, loss_fn, batch, momentum).parts["optimizer states"]
    found = advice(result, "one state for each parameter")
    assert found.saves == result.parts["optimizer states"] - one
    assert found.slug == "out-of-memory-states"
    saves = [each.saves for each in result.advice]
    assert saves == sorted(saves, reverse=True)


def test_prints_as_text_and_html():
    result = ledger(*setting("transformer"))
    text, page = str(result), result._repr_html_()
    for part in ("optimizer states", "AdamW: 8.0 bytes", "after backward", "blocks.*.attn"):
        assert part in text
        assert part in page
    assert max(map(len, text.splitlines())) <= 100
    assert page.count("<table") == 3
    assert json.loads(json.dumps(result.to_dict()))["parts"] == result.parts
    shares = [100 * size / result.total for size in result.parts.values()]
    assert sum(shares) == pytest.approx(100)


def test_sizes():
    shown = [size_of(n) for n in (0, 999, 1000, 12_345, 999_600, 6.7e9, 2e15)]
    assert shown == ["0 B", "999 B", "1.00 kB", "12.3 kB", "1.00 MB", "6.70 GB", "2000 TB"]


# Nothing left behind


def picture(model, optimizer, batch):
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
    return {
        "objects": [(id(t), id(t.grad), t.requires_grad) for t in tensors],
        "values": [t.detach().clone() for t in tensors],
        "gradients": [None if t.grad is None else t.grad.clone() for t in tensors],
        "states": copy.deepcopy(optimizer.state_dict()),
        "modes": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [len(m._forward_pre_hooks) for m in model.modules()],
        "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()],  # noqa: NPY002
        "everywhere": [
            len(nn.modules.module._global_forward_pre_hooks),
            len(nn.modules.module._global_forward_hooks),
            torch.is_grad_enabled(),
            torch.utils._python_dispatch._get_current_dispatch_mode(),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
        ],
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("fails", [None, "forward", "backward", "step"])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("device", [None, "meta"])
def test_everything_is_as_it_was(device, stepped, fails):
    model, _, (x, y), optimizer = setting("conv")
    batch = (x.requires_grad_(), y)

    def loss_fn(model, batch):
        random.random()
        np.random.rand()  # noqa: NPY002
        loss = classify(model, batch) + F.dropout(batch[0]).sum()
        if fails == "forward":
            raise KeyboardInterrupt
        if fails == "backward":
            loss.register_hook(lambda gradient: 1 / 0)
        return loss

    if stepped:
        classify(model, batch).backward()
        optimizer.step()
    if fails == "step":
        optimizer.param_groups[0]["betas"] = None
    before = picture(model, optimizer, batch)
    errors = (KeyboardInterrupt, ZeroDivisionError, TypeError)
    with pytest.raises(errors) if fails else nullcontext():
        ledger(model, loss_fn, batch, optimizer, device=device)
    assert same(picture(model, optimizer, batch), before)


@pytest.mark.parametrize("fails", [False, True])
def test_saved_bytes_leaves_a_module_as_it_was(fails):
    model, _, (x, _), optimizer = setting("conv")

    def wrong(module, arguments):
        raise KeyboardInterrupt

    if fails:
        model[-1].register_forward_pre_hook(wrong)
    before = picture(model, optimizer, x)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        saved_bytes(model, x)
    assert same(picture(model, optimizer, x), before)


def test_ledger_keeps_no_tensor():
    model, loss_fn, batch, optimizer = setting("transformer")
    gc.collect()
    count = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    result = ledger(model, loss_fn, batch, optimizer)
    gc.collect()
    assert sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()) == count
    assert result.peak


# Errors


def test_errors():
    model, loss_fn, batch, _ = setting("mlp")
    used_up = iter([])
    cases = [
        (ValueError, "ReLU, has no parameters", (nn.ReLU(), loss_fn, batch)),
        (ValueError, "lazy modules", (nn.LazyLinear(3), loss_fn, batch)),
        (TypeError, "list_iterator: give one batch", (model, loss_fn, used_up)),
        (TypeError, "DataLoader: give one batch",
         (model, loss_fn, torch.utils.data.DataLoader([1]))),
        (TypeError, "returned a float", (model, lambda m, b: 1.0, batch)),
        (ValueError, r"shape \(13, 5\), expected a scalar", (model, lambda m, b: m(b[0]), batch)),
        (ValueError, "no gradient can flow: 6",
         (model, lambda m, b: m(b[0]).sum().detach(), batch)),
        (ValueError, "leads to none", (model, lambda m, b: square(mlp(), b[0]), batch)),
        (RuntimeError, "batch is on meta, the model on cpu",
         (model, square, torch.empty(3, 11, device="meta"))),
    ]  # fmt: skip
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            ledger(*arguments)
    with pytest.raises(ValueError, match="expected None, or 'meta'"):
        ledger(model, loss_fn, batch, device="cuda")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # the reader's own error, as it is
        ledger(model, square, torch.ones(3, 4))
    adafactor = torch.optim.Adafactor(model.parameters())
    with pytest.raises(RuntimeError, match="step of Adafactor can't run without data"):
        ledger(model, loss_fn, batch, adafactor, device="meta")
