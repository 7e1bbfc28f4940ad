"""bpkit.checkup: whatever it is given and whatever happens inside, nothing of it stays."""

import copy
import dataclasses
import random
import sys
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as optimizer_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import bpkit
from bpkit import checkup, find_nonfinite
from bpkit.data import digits

# Everything is as before


class Odd(nn.Module):
    """A part with whatever a diagnosis may trip over, put together by lot."""

    def __init__(self, lot, width):
        super().__init__()
        self.first = nn.Linear(width, 8)
        self.norm = lot.choice([nn.BatchNorm1d, nn.LayerNorm, nn.GroupNorm])
        self.norm = self.norm(2, 8) if self.norm is nn.GroupNorm else self.norm(8)
        self.act = lot.choice([nn.ReLU(inplace=True), nn.Tanh(), nn.Dropout(0.3), nn.GELU()])
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(lot.randrange(3)))
        self.last = nn.Linear(8, 3)
        self.gain = nn.ParameterList([nn.Parameter(torch.ones(8))])
        self.idle = nn.Parameter(torch.ones(2)) if lot.random() < 0.3 else None
        self.register_buffer("count", torch.zeros(()))
        self.history = []
        if lot.random() < 0.3:
            self.first.weight.requires_grad_(False)
        if lot.random() < 0.3 and self.middle:
            self.middle[0].weight = self.middle[-1].weight
        if lot.random() < 0.3:
            self.norm.eval()
        self.spoilt = lot.random() < 0.3

    def forward(self, x):
        h = self.act(self.norm(self.first(x)))
        for part in self.middle:
            h = h + torch.relu(part(h))
        self.count += 1
        self.history.append(float(h.detach().mean()))
        return self.last(h * self.gain[0])


def by_lot(seed):
    """A model with gradients and optimizer states from some earlier steps, by lot."""
    lot = random.Random(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    model = Odd(lot, 5)
    model.train(lot.random() < 0.8)
    x, y = torch.randn(24, 5), torch.randint(3, (24,))
    if model.spoilt:
        x[7, 2] = lot.choice([float("nan"), float("inf")])
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(x, y), 6, shuffle=True, generator=generator)
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = lot.choice(["none", "sgd", "adam", "two", "lbfgs", "rmsprop"])
    optimizers = {
        "none": lambda: [],
        "sgd": lambda: [torch.optim.SGD(trained, 0.1, momentum=0.9)],
        "adam": lambda: [torch.optim.AdamW(trained, 0.01, amsgrad=True)],
        "two": lambda: [torch.optim.SGD(trained[:2], 0.1), torch.optim.Adam(trained[2:], 0.01)],
        "lbfgs": lambda: [torch.optim.LBFGS(trained, 0.1, max_iter=2)],
        "rmsprop": lambda: [torch.optim.RMSprop([{"params": trained[:1]},
                                                 {"params": trained[1:], "lr": 0.1}], 0.01)],
    }[kind]()  # fmt: skip
    for _ in range(lot.randrange(3)):

        def closure():
            model.zero_grad()
            loss = F.cross_entropy(model(torch.randn(6, 5)), y[:6])
            loss.backward()
            return loss

        closure()
        for optimizer in optimizers:
            optimizer.step(closure)
    if lot.random() < 0.5:
        model.last.bias.grad = None
    model.first.register_forward_hook(lambda *_: None)
    model.last.weight.register_hook(lambda gradient: gradient * 1)
    model.last.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: None)
    return model, optimizers, loader, lot


def hooks_of(thing):
    names = [name for name in vars(thing) if "hook" in name]
    return {name: list(getattr(thing, name) or ()) for name in names}


def picture(model, optimizers, loader):
    """All that has to be the same afterwards, and the objects that have to be the same ones."""
    tensors = dict(model.state_dict(keep_vars=True)) | dict(model.named_parameters())
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    modules = dict(model.named_modules())
    objects = {name: id(v) for part in (tensors, gradients, modules) for name, v in part.items()}
    generator = getattr(loader, "generator", None)
    values = {
        "tensors": {n: t.detach().clone() for n, t in tensors.items()},
        "requires_grad": {n: t.requires_grad for n, t in tensors.items()},
        "gradients": {n: None if g is None else g.clone() for n, g in gradients.items()},
        "gradient objects": {n: id(g) for n, g in gradients.items()},
        "training": {n: m.training for n, m in modules.items()},
        "hooks": {n: hooks_of(m) for n, m in modules.items()},
        "tensor hooks": {n: [list(t._backward_hooks or ()),
                             list(t._post_accumulate_grad_hooks or ())]
                         for n, t in tensors.items() if t.is_leaf},
        "optimizer hooks": [hooks_of(o) for o in optimizers],
        "states": [copy.deepcopy(o.state_dict()) for o in optimizers],
        "groups": [[[id(p) for p in g["params"]] for g in o.param_groups] for o in optimizers],
        "history": list(getattr(model, "history", ())),
        "generator": None if generator is None else generator.get_state(),
        "random": (torch.get_rng_state(), np.random.get_state(), random.getstate()),  # noqa: NPY002
        "modes": (torch.is_grad_enabled(), torch.get_default_dtype(),
                  torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()),
        "global": (torch.autograd.backward, torch.Tensor.backward, torch.optim.SGD.step,
                   list(optimizer_module._global_optimizer_pre_hooks),
                   list(optimizer_module._global_optimizer_post_hooks),
                   dict(nn.modules.module._global_forward_hooks),
                   dict(nn.modules.module._global_forward_pre_hooks),
                   list(warnings.filters), warnings.showwarning,
                   torch._C._len_torch_function_stack()),
    }  # fmt: skip
    return objects, values


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return alike and torch.equal(torch.isnan(a), torch.isnan(b)) and bool(
            ((a == b) | torch.isnan(a)).all()
        )  # fmt: skip
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or a == b


def assert_same(before, after):
    assert before[0] == after[0], "other objects"
    for name, value in before[1].items():
        assert same(value, after[1][name]), name


class Stop(Exception):
    pass


class Fuse:
    """Counts calls of loss function, backward and step, and burns at one of them."""

    def __init__(self, burns=None, error=None):
        self.burns, self.error, self.count = burns, error, 0

    def __call__(self, *_):
        self.count += 1
        if self.count == self.burns:
            raise self.error

    def loss(self, model, batch):
        self()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if loss.requires_grad:
            loss.register_hook(self)
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        return loss


def raised_by(function, *arguments):
    try:
        function(*arguments)
    except BaseException as error:
        return error


@pytest.fixture
def at_each_step():
    """A list; a fuse in it is called before each step of any optimizer."""
    fuses = []

    def call(*_):
        for fuse in fuses:
            fuse()

    handle = optimizer_module.register_optimizer_step_pre_hook(call)
    yield fuses
    handle.remove()


@pytest.mark.parametrize("error", [None, Stop, KeyboardInterrupt], ids=["runs", "error", "ctrl-c"])
@pytest.mark.parametrize("seed", range(10))
def test_checkup_leaves_everything_as_it_was(seed, error, at_each_step):
    model, optimizers, loader, lot = by_lot(seed)
    fuse = Fuse()
    at_each_step.append(fuse)
    before = picture(model, optimizers, loader)
    checkup(model, fuse.loss, loader, optimizers)
    assert_same(before, picture(model, optimizers, loader))
    assert fuse.count > 10
    if error is None:
        return
    for burns in (lot.randint(1, 3), lot.randint(2, fuse.count)):
        again = Fuse(burns, error("burnt"))
        at_each_step[:] = [again]
        raised = raised_by(checkup, model, again.loss, loader, optimizers)
        # A later step that fails is left out, or told in the report; Ctrl-C never is.
        assert raised is again.error or (raised is None and error is Stop)
        assert again.count >= burns
        assert_same(before, picture(model, optimizers, loader))


@pytest.mark.parametrize("error", [None, Stop, KeyboardInterrupt], ids=["runs", "error", "ctrl-c"])
@pytest.mark.parametrize("seed", range(5))
def test_find_nonfinite_leaves_everything_as_it_was(seed, error):
    model, optimizers, loader, _ = by_lot(seed)
    batch = next(iter(loader))
    before = picture(model, optimizers, loader)
    for burns in (1, 2):
        fuse = Fuse(burns, error("burnt")) if error else Fuse()
        raised = raised_by(find_nonfinite, model, fuse.loss, batch)
        assert raised is (fuse.error if error and fuse.count >= burns else None)
        assert_same(before, picture(model, optimizers, loader))


def interrupt_at(line, run):
    """Ctrl-C at the n-th line of bpkit that ``run`` executes; how many lines there were."""
    folder = str(bpkit.__path__[0])
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(old)
    return seen


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_ctrl_c_at_any_line(seed):
    model, optimizers, loader, lot = by_lot(seed)
    before = picture(model, optimizers, loader)

    def run():
        checkup(model, Fuse().loss, loader, optimizers)

    count = interrupt_at(0, run)
    for _ in range(4):
        interrupt_at(lot.randint(1, count), run)
        assert_same(before, picture(model, optimizers, loader))


def test_training_goes_on_as_if_nothing_had_happened():
    results = []
    for look in (False, True):
        model, optimizers, loader, _ = by_lot(3)
        if look:
            checkup(model, Fuse().loss, loader, optimizers)
        for batch in loader:
            model.zero_grad()
            Fuse().loss(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step(lambda: 0.0)
        results.append([*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()])
    assert all(map(same, *results))


# Errors say what was given and what to do


def classifier(width=5, classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, classes))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def some_batches(count=4):
    torch.manual_seed(1)
    return [(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(count)]


def raises(kind, match, *arguments):
    with pytest.raises(kind, match=match):
        checkup(*arguments)


def test_no_batch():
    used = iter(some_batches())
    list(used)
    for empty in (used, [], (), (b for b in ())):
        raises(ValueError, "no batch", classifier(), loss_fn, empty)


def test_one_tensor_for_batches():
    raises(TypeError, r"\[batch\]", classifier(), lambda m, x: m(x).sum(), torch.randn(6, 5))


def test_meta_device():
    raises(ValueError, "meta device", classifier().to("meta"), loss_fn, some_batches())


@pytest.mark.parametrize("value", [1.0, None, "loss", (torch.ones(()),)])
def test_loss_that_is_no_tensor(value):
    found = type(value).__name__
    raises(
        ValueError, f"{found}; expected a scalar", classifier(), lambda *_: value, some_batches()
    )


def test_loss_that_is_no_scalar():
    def each(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    raises(ValueError, r"\(6,\); expected a scalar", classifier(), each, some_batches())


@pytest.mark.parametrize("wrong", ["adam", 0.1, torch.optim.SGD, ["adam"]])
def test_optimizer_that_is_none(wrong):
    raises(TypeError, "optimizer", classifier(), loss_fn, some_batches(), wrong)


@pytest.mark.parametrize("where", ["forward", "loss", "batches"])
def test_errors_of_the_program_pass_through(where):
    model, error, good = classifier(), Stop("my own"), some_batches()

    def fail(*_):
        raise error

    def batches():
        yield good[0]
        fail()

    if where == "forward":
        model.register_forward_hook(fail)
    before = picture(model, [], None)
    with pytest.raises(Stop) as caught:
        checkup(
            model,
            fail if where == "loss" else loss_fn,
            batches() if where == "batches" else good,
        )
    assert caught.value is error
    assert_same(before, picture(model, [], None))


# What may be a batch


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "frozen"


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


Named = namedtuple("Named", "x y")
SHAPES = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y, "names": ["a"] * len(x)},
    "nested": lambda x, y: {"in": {"x": x}, "out": (y, None)},
    "dataclass": Record,
    "frozen": Frozen,
    "named tuple": Named,
    "slots": Slots,
}


def parts(batch):
    if isinstance(batch, dict):
        return (batch["x"], batch["y"]) if "x" in batch else (batch["in"]["x"], batch["out"][0])
    return (batch.x, batch.y) if hasattr(batch, "x") else batch


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spoilt", [False, True])
def test_kinds_of_batches(shape, spoilt):
    batches = some_batches()
    if spoilt:
        batches[1][0][2, 3] = float("nan")
    model = classifier()
    report = checkup(
        model,
        lambda model, batch: loss_fn(model, parts(batch)),
        [SHAPES[shape](x.clone(), y.clone()) for x, y in batches],
        torch.optim.Adam(model.parameters(), 0.01),
    )
    assert [f.slug for f in report.faults] == ["nan-input"] * spoilt, str(report)


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_are_not_written_to(shape):
    model = classifier()
    batches = [SHAPES[shape](x, y) for x, y in some_batches()]
    checkup(
        model, lambda m, b: loss_fn(m, parts(b)), batches, torch.optim.SGD(model.parameters(), 0.1)
    )
    for batch, fresh in zip(batches, some_batches(), strict=True):
        assert all(map(torch.equal, parts(batch), fresh))


def test_one_tensor_as_a_batch():
    model = nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 5))
    batches = torch.randn(4, 6, 5).unbind()
    assert checkup(model, lambda m, x: F.mse_loss(m(x), x), batches).ok


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_with_its_own_generator(workers):
    x, y = torch.cat([b[0] for b in some_batches(8)]), torch.cat([b[1] for b in some_batches(8)])
    orders = []
    for look in (False, True):
        generator = torch.Generator().manual_seed(4)
        sampler = torch.utils.data.RandomSampler(x, generator=torch.Generator().manual_seed(5))
        loader = DataLoader(
            TensorDataset(x, y), 6, sampler=sampler, num_workers=workers, generator=generator
        )
        torch.manual_seed(6)
        if look:
            assert checkup(classifier(), loss_fn, loader).ok
        torch.manual_seed(6)
        orders.append(torch.cat([batch[0] for batch in loader]))
    assert torch.equal(*orders)


def test_an_endless_iterator():
    def endless():
        while True:
            yield from some_batches()

    model = classifier()
    assert checkup(model, loss_fn, endless(), torch.optim.Adam(model.parameters(), 0.01)).ok


# Optimizers


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        loss = closure()
        super().step()
        return loss


def many(kind, **options):
    return lambda parameters: kind(parameters, **options)


OPTIMIZERS = {
    "none": lambda parameters: None,
    "sgd": many(torch.optim.SGD, lr=0.1),
    "adam": many(torch.optim.Adam, lr=0.01),
    "fused": many(torch.optim.Adam, lr=0.01, fused=True),
    "lbfgs": many(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "closure": many(NeedsClosure, lr=0.1),
    "tensor rate": many(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False),
    "two": lambda parameters: (torch.optim.SGD((p := list(parameters))[:2], 0.1),
                               torch.optim.Adam(p[2:], 0.01)),
    "generator": lambda parameters: (o for o in [torch.optim.SGD(parameters, 0.1)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(kind):
    model = classifier()
    optimizer = OPTIMIZERS[kind](model.parameters())
    report = checkup(model, loss_fn, some_batches(), optimizer)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", ["none", "two"])
def test_its_part_is_left_out_without_an_optimizer(kind):
    model = classifier()
    optimizer = OPTIMIZERS[kind](model.parameters())
    assert ("plain steps" in str(checkup(model, loss_fn, some_batches(), optimizer))) == (
        kind != "none"
    )


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 3))
    optimizers = (kind(model[0].parameters(), 0.1), torch.optim.Adam(model[1].parameters(), 0.01))
    batches = [(torch.randint(50, (6, 4)), torch.randint(3, (6,))) for _ in range(4)]
    loss_fn(model, batches[0]).backward()
    before = picture(model, optimizers, None)
    report = checkup(model, loss_fn, batches, optimizers)
    assert report.ok, str(report)
    assert_same(before, picture(model, optimizers, None))


# Models


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(torch.tanh(self.table(x)))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(5, 5) / 3) for _ in range(2))
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(5, 3) / 3)})

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x @ self.named["last"]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64) / 3)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out((x.to(torch.complex64) @ self.weight).abs())


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.body, self.out = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x):
        h = checkpoint(self.body, torch.relu(self.first(x)), use_reentrant=self.reentrant)
        return self.out(torch.relu(h))


def pictures(memory_format):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 3),
    ).to(memory_format=memory_format)  # fmt: skip
    return model, [
        (torch.randn(6, 3, 8, 8).to(memory_format=memory_format), torch.randint(3, (6,)))
        for _ in range(4)
    ]


def tokens():
    return [(t := torch.randint(9, (12,)), (t * 2 + 1) % 9) for _ in range(4)]


MODELS = {
    "tied": lambda: (Tied(), tokens()),
    "lists": lambda: (Listed(), some_batches()),
    "complex": lambda: (Complex(), some_batches()),
    "checkpoint": lambda: (Checkpointed(False), some_batches()),
    "reentrant": lambda: (Checkpointed(True), some_batches()),
    "channels last": lambda: pictures(torch.channels_last),
    "channels first": lambda: pictures(torch.contiguous_format),
    "double": lambda: (classifier().double(), [(x.double(), y) for x, y in some_batches()]),
    "bfloat16": lambda: (classifier().bfloat16(), [(x.bfloat16(), y) for x, y in some_batches()]),
    "scripted": lambda: (torch.jit.script(classifier()), some_batches()),
    "spectral": lambda: (
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Tanh(),
                      nn.Linear(8, 3)), some_batches()),
    "weight norm": lambda: (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.Tanh(),
                      nn.Linear(8, 3)), some_batches()),
    "data parallel": lambda: (nn.DataParallel(classifier()), some_batches()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_models(kind):
    torch.manual_seed(0)
    model, batches = MODELS[kind]()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loss_fn(model, batches[0]).backward()
    before = picture(model, [optimizer], None)
    report = checkup(model, loss_fn, batches, optimizer)
    assert report.ok, str(report)
    assert "plain steps" in str(report)
    assert_same(before, picture(model, [optimizer], None))


def test_lazy_modules_get_their_shape():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    assert checkup(model, loss_fn, some_batches()).ok
    assert model(torch.randn(2, 5)).shape == (2, 3)


def test_no_parameters():
    report = checkup(nn.Identity(), lambda m, b: m(b[0]).square().mean(), some_batches())
    assert [f.slug for f in report.faults] in ([], ["detached"]), str(report)


def test_gradients_switched_off_stay_off():
    """As when somebody forgot ``torch.set_grad_enabled(False)``: that is for the report to say."""
    model = classifier()
    with torch.no_grad():
        report = checkup(model, loss_fn, some_batches(), torch.optim.Adam(model.parameters(), 0.01))
        assert not torch.is_grad_enabled()
    assert "no-grad-block" in {f.slug for f in report.faults}


@pytest.mark.parametrize("rate", [10.0, 1e2, 1e4, 1e8])
def test_a_rate_however_much_too_high(rate):
    model = classifier()
    report = checkup(model, loss_fn, some_batches(), torch.optim.SGD(model.parameters(), rate))
    assert [f.slug for f in report.faults] == ["lr-too-high"], str(report)


def test_warnings_of_the_program_do_not_reach_the_reader_in_a_flood():
    def noisy(model, batch):
        warnings.warn("again", stacklevel=1)
        return loss_fn(model, batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkup(classifier(), noisy, some_batches())
    assert len(caught) <= 1


@pytest.fixture
def one_process():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("tolerated", [False, True])
def test_unused_parameters_are_a_fault_of_data_parallel_unless_it_looks_for_them(
    one_process, tolerated
):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model.gate = nn.Parameter(torch.ones(2))
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=tolerated)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(2)]
    report = checkup(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, optimizer)
    found = "ddp-unused-parameter" in [finding.slug for finding in report.findings]
    assert found is not tolerated


@pytest.mark.parametrize("features", [32, 64])
def test_rows_that_meet_are_found_when_the_batch_is_as_long_as_the_features(features):
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(features, 4)

        def forward(self, x):
            return self.scores(x).cumsum(0)

    torch.manual_seed(0)
    batch = torch.randn(64, features), torch.randint(4, (64,))
    report = checkup(Summed(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), [batch])
    assert "batch-mixing" in [finding.slug for finding in report.faults]


@pytest.mark.parametrize("drop", [False, True])
def test_a_reparametrised_sample_is_no_dropout(drop):
    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 4), nn.Linear(2, 8)

        def forward(self, x):
            h = F.dropout(self.inner(x), 0.5) if drop else self.inner(x)
            mean, raw = h.chunk(2, 1)
            spread = F.softplus(raw) + 0.01
            z = torch.distributions.Normal(mean, spread).rsample()
            return self.outer(z), (mean.square() + spread.square() - 2 * spread.log()).mean()

    def loss_fn(model, x):
        y, divergence = model(x)
        return (y - x).square().mean() + divergence

    torch.manual_seed(0)
    model, batches = Sampled(), [torch.randn(16, 8) for _ in range(2)]
    report = checkup(model, loss_fn, batches, torch.optim.Adam(model.parameters(), 1e-3))
    assert ("dropout-in-eval" in [finding.slug for finding in report.findings]) is drop


def test_nothing_is_sent_to_other_processes(one_process):
    def refuse(state, bucket):
        raise AssertionError("gradients were sent")

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    model.register_comm_hook(None, refuse)
    optimizer = torch.optim.SGD(model.parameters(), 50.0)
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(2)]
    report = checkup(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, optimizer)
    assert "lr-too-high" in [finding.slug for finding in report.findings]


@pytest.mark.parametrize(("rate", "named"), [(0.5, False), (4.0, True)])
def test_a_rate_that_kills_the_net_without_raising_its_loss_is_too_high(rate, named):
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    model = nn.Sequential(nn.Linear(64, 32, **double), nn.ReLU(), nn.Linear(32, 10, **double))
    data, starts = digits(), range(0, 640, 64)
    batches = [(data.train_images[k : k + 64], data.train_labels[k : k + 64]) for k in starts]
    optimizer = torch.optim.SGD(model.parameters(), rate)
    report = checkup(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, optimizer)
    assert ("lr-too-high" in [finding.slug for finding in report.faults]) is named
