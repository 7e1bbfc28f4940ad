"""Does every helper leave everything as it found it, wherever it is interrupted?

A trial draws, from one seed, a model, its optimizers, what they went through before, hooks of the
reader's own, a helper of ``bpkit`` and a fault. The helper runs once undisturbed and once with
the fault; both times everything has to be bit for bit as before. A fault is an exception or a
KeyboardInterrupt out of ``loss_fn``, or a real SIGINT at one of the points where CPython takes a
signal: at the start of a Python function or behind a call of a C function, in ``bpkit``, in
PyTorch or in the reader's code.

    RESTORE_TRIALS=1000 nice pytest tests/test_restore.py -s  # instead of 50; -s for the table
    RESTORE_TRIALS=1000 pytest "tests/test_restore.py::test_trial[617]"    # a single one again
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import bpkit
from bpkit import interrupt as interrupt_module
from bpkit.memory import ledger
from bpkit.nonfinite import find_inplace
from bpkit.preserve import preserve
from bpkit.saved import saved_bytes

TRIALS = int(os.environ.get("RESTORE_TRIALS", "50"))
D = 4
fell: Counter[tuple[str, str, str]] = Counter()  # (helper, fault, where) of all trials


# Models


class Keeper(nn.Module):
    """Keeps things in every way that a module can: all of them change in the forward pass."""

    def __init__(self, rng):
        super().__init__()
        self.calls = 0
        self.numbers = np.zeros(2)
        self.log = {"sizes": [], "last": deque(maxlen=2), "seen": set()}
        self.memory = (torch.zeros(D), [torch.zeros(D)])
        self.generators = [np.random.default_rng(1), random.Random(1)]
        self.loose = [nn.Linear(D, D)]
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unset", None)
        self.register_buffer("average", torch.zeros(D))
        self.register_buffer("wide", torch.ones(1, D).expand(3, D))
        self.noise = torch.Generator().manual_seed(3) if rng.random() < 0.3 else None
        self.leaks = rng.random() < 0.5

    def forward(self, x):
        mean = x.reshape(-1, D).mean(0)
        self.calls += 1
        self.count += 1
        self.numbers += 1
        self.log["sizes"].append(len(x))
        self.log["last"].append(self.calls)
        self.log["seen"].add(self.calls)
        self.memory[0].add_(mean.detach())
        self.memory[1][0] = mean  # with its graph, as a hidden state that nobody detached
        self.generators[0].random()
        self.generators[1].random()
        self.unset = mean.detach()
        if self.leaks and self.average.is_leaf:
            self.average.mul_(0.5).add_(mean)  # nobody detached that either: a graph in a buffer
        if self.noise is not None:
            x = x + torch.randn(D, generator=self.noise)
        return x + self.loose[0](x) * self.wide[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.MultiheadAttention(D, 2, batch_first=True, dropout=0.1)

    def forward(self, x):
        x = x[:, None] if x.ndim == 2 else x
        return self.inside(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.LSTM(D, D, batch_first=True)

    def forward(self, x):
        return self.inside(x[:, None] if x.ndim == 2 else x)[0]


class Along(nn.Module):
    """A layer that wants (batch, features) or (batch, channels, ...)."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        flat = x.reshape(-1, D)
        return self.inside(flat[..., None] if isinstance(self.inside, nn.Conv1d) else flat).reshape(
            x.shape
        )


class Tied(nn.Module):
    """One weight in two layers, and one module in two places."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x):
        return self.second(self.again(self.first(x)).tanh())


BLOCKS = {
    "linear": lambda rng: nn.Linear(D, D),
    "frozen": lambda rng: nn.Linear(D, D).requires_grad_(False),
    "relu": lambda rng: nn.ReLU(),
    "dropout": lambda rng: nn.Dropout(0.3),
    "batchnorm": lambda rng: Along(nn.BatchNorm1d(D)),
    "groupnorm": lambda rng: Along(nn.GroupNorm(2, D)),
    "conv": lambda rng: Along(nn.Conv1d(D, D, 3, padding=1)),
    "lstm": lambda rng: Recurrent(),
    "attention": lambda rng: Attention(),
    "tied": lambda rng: Tied(),
    "keeper": Keeper,
    "weight norm": lambda rng: parametrizations.weight_norm(nn.Linear(D, D)),
    "spectral norm": lambda rng: parametrizations.spectral_norm(nn.Linear(D, D)),
}


class Model(nn.Module):
    def __init__(self, rng, tokens):
        super().__init__()
        self.table = nn.Embedding(7, D, sparse=rng.random() < 0.5) if tokens else None
        self.kinds = rng.sample([*BLOCKS], rng.randint(1, 4))
        self.body = nn.Sequential(*(BLOCKS[kind](rng) for kind in self.kinds))
        self.head = nn.Linear(D, 3)

    def forward(self, x):
        h = x if self.table is None else self.table(x)
        h = self.body(h)
        return self.head(h.mean(1) if h.ndim == 3 else h)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "lbfgs": lambda p: torch.optim.LBFGS([q for g in p for q in g["params"]], 0.1, max_iter=2),
}


class Setting:
    """What the reader has, drawn from one seed."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (the global one is what readers' code uses)
        random.seed(seed)
        tokens, rows = rng.random() < 0.4, rng.choice([3, 5])
        self.model = Model(rng, tokens)
        x = torch.randint(7, (rows, 3)) if tokens else torch.randn(rows, D)
        if not tokens and rng.random() < 0.3:
            x.requires_grad_()  # as an adversarial example has it
        self.batch = {"x": x, "y": torch.randint(3, (rows,))}
        self.bad = rng.random() < 0.2  # a loss that is NaN
        self.optimizers = self._optimizers()
        self.handles, self.heard = [], []
        for _ in range(rng.choice([0, 1, 3])):
            self.step()
        self._leave_gradients()
        self._hooks()
        for module in self.model.modules():
            if rng.random() < 0.2:
                module.training = not module.training
        self.loader = torch.utils.data.DataLoader(
            [{k: v.detach()[i] for k, v in self.batch.items()} for i in range(rows)],
            batch_size=rows - 1, shuffle=True, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip

    def _optimizers(self):
        rng, sparse = self.rng, [m.weight for m in self.model.modules() if getattr(m, "sparse", 0)]
        dense = [p for p in self.model.parameters() if not any(p is s for s in sparse)]
        made = []
        if rng.random() < 0.9:
            cut = rng.randint(0, len(dense) - 1)
            groups = [{"params": g} for g in (dense[:cut], dense[cut:]) if g]
            made.append(OPTIMIZERS[rng.choice([*OPTIMIZERS])](groups))
        if sparse:
            kind = rng.choice([torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
            made.append(kind(sparse, lr=0.05))
        if made and rng.random() < 0.3:  # it replaces the optimizer's step
            self.scheduler = torch.optim.lr_scheduler.StepLR(made[0], 1)
        return made

    def loss_fn(self, model, batch):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        return (loss - loss.detach()).sqrt() if self.bad else loss

    def step(self):
        def closure():
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.loss_fn(self.model, self.batch)
            loss.backward()
            return loss

        closure()
        for optimizer in self.optimizers:
            optimizer.step(closure)

    def _leave_gradients(self):
        rng = self.rng
        way = rng.choice(["kept", "none", "zero", "some", "graph"])
        if way == "graph":
            loss = self.loss_fn(self.model, self.batch)
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss.backward(create_graph=True)
        elif way != "kept":
            self.model.zero_grad(set_to_none=way != "zero")
        if way == "some":
            for p in self.model.parameters():
                p.grad = torch.ones_like(p) if rng.random() < 0.5 else None

    def _hooks(self):
        rng, keep, hear = self.rng, self.handles.append, self.heard.append
        for module in self.model.modules():
            for put in (module.register_forward_pre_hook, module.register_forward_hook):
                if rng.random() < 0.15:
                    keep(put(lambda *_: hear(1)))
        for parameter in self.model.parameters():
            if parameter.requires_grad and rng.random() < 0.2:
                keep(parameter.register_hook(lambda g: hear(2)))
            if parameter.requires_grad and rng.random() < 0.2:
                keep(parameter.register_post_accumulate_grad_hook(lambda p: hear(3)))
        for optimizer in self.optimizers:
            if rng.random() < 0.2:
                keep(optimizer.register_step_pre_hook(lambda *_: hear(4)))


# What there is to compare. Written down apart from bpkit.preserve, so that it sees what that misses


def bits(tensor):
    """The tensor itself, its form and its bits."""
    if tensor is None:
        return None
    with torch._C.DisableTorchFunction(), torch.no_grad():
        plain = tensor.detach()
        parts = [plain]
        if plain.layout == torch.sparse_coo:
            parts = [plain._indices(), plain._values()]
        told = [part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts]
        form = plain.dtype, tuple(plain.shape), plain.layout
        strided = (plain.stride(), plain.data_ptr()) if plain.layout == torch.strided else ()
        return id(tensor), form, strided, tensor.requires_grad, tensor.is_leaf, told


def whole(tensor):
    """With its gradient and its hooks."""
    if tensor is None:
        return None
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")[: 2 if tensor.is_leaf else 1]
    hooks = [[*(getattr(tensor, name) or ())] for name in names]
    gradient = bits(tensor.grad) if tensor.is_leaf else None
    return bits(tensor), gradient, hooks


def plain(value):
    """Any other attribute: the object and what is in it."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, nn.Module):
        return id(value), [whole(p) for p in value.parameters()]
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return id(value), str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return id(value), value.getstate()
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, dict):
        return id(value), [(k if isinstance(k, str | int) else id(k), plain(v))
                           for k, v in value.items()]  # fmt: skip
    if isinstance(value, list | tuple | deque):
        return id(value), [plain(v) for v in value]
    if isinstance(value, set):
        return id(value), sorted(value, key=repr)
    return value if isinstance(value, int | float | str | bool | None) else id(value)


HOLDERS = (
    torch.autograd, nn.Module, torch.optim.Optimizer, torch.optim.LBFGS, torch.amp.GradScaler,
    torch.optim.lr_scheduler.StepLR, torch.utils.data.DataLoader,
)  # fmt: skip


def modes():
    """What holds for the thread and the process."""
    module, optimizer = nn.modules.module, sys.modules["torch.optim.optimizer"]
    tables = [t for t in vars(module) if t.startswith("_global_") and t.endswith("hooks")]
    return {
        "random": (random.getstate(), str(np.random.get_state()),  # noqa: NPY002
                   torch.get_rng_state().tolist()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "default dtype": (torch.get_default_dtype(), torch.get_default_device()),
        "anomaly mode": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(),
                          torch.is_deterministic_algorithms_warn_only_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
                     torch.is_autocast_cache_enabled()),
        "modes": [[*map(id, _get_current_function_mode_stack())],
                  [*map(id, _get_current_dispatch_mode_stack())]],
        "torch function": torch._C._is_torch_function_enabled(),
        "saved tensors hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "global hooks": [[*getattr(module, t)] for t in tables]
        + [[*optimizer._global_optimizer_pre_hooks], [*optimizer._global_optimizer_post_hooks]],
        "wrapped": [{n: id(v) for n, v in vars(h).items() if callable(v)} for h in HOLDERS],
        "warnings": warnings.filters[:],
        "SIGINT": signal.getsignal(signal.SIGINT),
    }  # fmt: skip


def picture(setting, inside=True):
    """Everything that has to be the same afterwards; ``inside``: with what training changes."""
    told = {}
    for name, module in setting.model.named_modules() if inside else ():
        for kind in ("_parameters", "_buffers"):
            table = vars(module)[kind]
            told[f"{name} {kind}"] = id(table), [(n, whole(t)) for n, t in table.items()]
        rest = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
        for key, value in rest.items():
            told[f"{name} {key}"] = plain(value)
        told[f"{name} attributes"] = [*vars(module)]
    for number, optimizer in enumerate(setting.optimizers if inside else ()):
        for key, value in vars(optimizer).items():
            told[f"optimizer {number} {key}"] = plain(value)
        state = {id(p): plain(v) for p, v in optimizer.state.items()}
        told[f"optimizer {number} states"] = list(state.items())
    for key, value in setting.batch.items() if inside else ():
        told[f"batch {key}"] = whole(value)
    told["loader"] = plain(setting.loader.generator) if inside else None
    for name, value in modes().items():
        if inside or name != "random":
            told[name] = value
    return told


def different(before, after):
    return [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]


# Helpers of bpkit, each around the same model and loss


def in_watch(s, loss_fn):
    with bpkit.watch(s.model, *s.optimizers) as log:
        for _ in range(3):
            for optimizer in s.optimizers:
                optimizer.zero_grad()
            loss = loss_fn(s.model, s.batch)
            loss.backward()
            for optimizer in s.optimizers:
                optimizer.step(lambda loss=loss: loss)
    log.report()


def in_record(s, loss_fn):
    with bpkit.record(s.model) as recording:
        loss = loss_fn(s.model, s.batch)
    recording.graph(loss, gradients=True)


def of_one_parameter(s, loss_fn):
    weight = s.model.head.bias

    def loss(moved):
        return torch.func.functional_call(s.model, {"head.bias": moved}, s.batch["x"]).sum()

    bpkit.numerical_gradient(loss, weight)


def in_preserve(s, loss_fn):
    """The reader's own experiment."""
    with preserve(s.model, *s.optimizers, others=s.batch):
        s.handles.append(s.model.head.register_forward_hook(lambda *_: None))
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        torch.set_grad_enabled(False)
        warnings.simplefilter("ignore")
        s.model.double().eval()
        s.model.requires_grad_(False)
        for module in s.model.modules():
            module.extra = module.training
        with torch.enable_grad():
            s.model.float().requires_grad_()
            torch.set_default_dtype(torch.float32)
            loss_fn(s.model, s.batch).backward()
        for optimizer in s.optimizers:
            optimizer.state.clear()
            optimizer.param_groups[0]["lr"] = 3.0


HELPERS = {  # name: (what runs, whether it trains the model, how often it is drawn)
    "checkup": (lambda s, f: bpkit.checkup(s.model, f, [s.batch], s.optimizers), False, 2),
    "checkup, loader": (lambda s, f: bpkit.checkup(s.model, f, s.loader, s.optimizers), False, 1),
    "audit": (lambda s, f: bpkit.audit(s.model, f, s.batch, samples=2, directions=1), False, 3),
    "directional_check": (lambda s, f: bpkit.directional_check(s.model, f, s.batch), False, 2),
    "find_nonfinite": (lambda s, f: bpkit.find_nonfinite(s.model, f, s.batch), False, 4),
    "find_inplace": (lambda s, f: find_inplace(s.model, f, s.batch), False, 2),
    "ledger": (lambda s, f: ledger(s.model, f, s.batch, s.optimizers[0] if s.optimizers else None),
               False, 3),
    "ledger, no data": (lambda s, f: ledger(s.model, f, s.batch, *s.optimizers[:1], device="meta"),
                        False, 1),
    "saved_bytes": (lambda s, f: saved_bytes(s.model, s.batch["x"]), False, 2),
    "preserve": (in_preserve, False, 4),
    "watch": (in_watch, True, 4),
    "record": (in_record, True, 3),
    "trace": (lambda s, f: bpkit.trace(f(s.model, s.batch), s.model).text(), True, 1),
    "numerical_gradient": (of_one_parameter, True, 2),
}  # fmt: skip
FAULTS = ["error in loss_fn", "interrupt in loss_fn", "SIGINT", "SIGINT", "SIGINT at an edge",
          "SIGINT at an edge"]  # fmt: skip


class Points:
    """Counts the points where CPython takes a signal, all of them and those on an edge. Sends
    SIGINT at number ``at`` of them."""

    def __init__(self, at=None, edge=False):
        self.at, self.edge, self.seen, self.where = at, edge, [0, 0], None

    def __call__(self, frame, event, argument):
        if event not in ("call", "c_return"):
            return
        edge = on_an_edge(frame)
        self.seen[0] += 1
        self.seen[1] += edge
        if self.seen[self.edge] == self.at and edge >= self.edge:
            sys.setprofile(None)
            self.where = place(frame)
            signal.raise_signal(signal.SIGINT)


def on_an_edge(frame):
    """Something is being entered, left or restored: here, in the caller or in its caller."""
    for _ in range(3):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name in EDGES or code.co_filename in EDGE_FILES:
            return True
        frame = frame.f_back
    return False


EDGES = {"__enter__", "__exit__", "_enter", "_leave", "restore"}
EDGE_FILES = {contextlib.__file__, interrupt_module.__file__}


def place(frame):
    """The innermost function of bpkit, and the function itself."""
    inner = frame.f_code.co_name
    while frame is not None and "bpkit" not in frame.f_code.co_filename.split(os.sep):
        frame = frame.f_back
    if frame is None:
        return inner
    file = os.path.basename(frame.f_code.co_filename).removesuffix(".py")
    outer = f"{file}.{frame.f_code.co_qualname}"
    return outer if frame.f_code.co_name == inner else f"{outer} > {inner}"


class Injected(Exception):
    pass


# What is raised while Python takes a generator or an object apart goes nowhere.
DROPPED = "dropped by Python"


def run(helper, setting, fault="", share=0.0, points=(0, 0), calls=0):
    """Run a helper, perhaps with a fault at ``share`` of the points or calls that there are.

    Returns how it ended, where the fault fell, the points passed and the calls of ``loss_fn``.
    """
    edge, heard = fault.endswith("edge"), 0
    profile = Points(1 + int(share * points[edge]) if fault.startswith("SIGINT") else None, edge)

    def loss_fn(model, batch):
        nonlocal heard
        heard += 1
        if fault.endswith("in loss_fn") and heard == 1 + int(share * calls):
            profile.where = "loss_fn"
            raise KeyboardInterrupt if fault.startswith("interrupt") else Injected
        return setting.loss_fn(model, batch)

    ended, dropped, hook = "returned", [], sys.unraisablehook
    sys.unraisablehook = lambda unraisable: dropped.append(unraisable.exc_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sys.setprofile(profile)
            helper(setting, loss_fn)
        except (Injected, KeyboardInterrupt, RuntimeError, ValueError, TypeError) as error:
            ended = type(error).__name__
        finally:
            sys.setprofile(None)
            sys.unraisablehook = hook
    if ended == "returned" and dropped == [KeyboardInterrupt]:
        ended = DROPPED
    return ended, profile.where or "(nowhere)", profile.seen, heard


@pytest.fixture(scope="module", autouse=True)
def _table():
    yield
    for (helper, fault, where), count in sorted(fell.items(), key=lambda i: (i[0][:2], -i[1])):
        print(f"{count:5}  {helper:20} {fault:22} {where}")
    sums = Counter()
    for (_, fault, where), count in fell.items():
        sums[fault if "(nowhere)" not in where else "(nowhere)"] += count
    print(dict(sums))


@pytest.fixture(autouse=True)
def _as_before():
    """A trial that fails must not be the reason that the next one does."""
    assert threading.current_thread() is threading.main_thread()
    # A process that a shell has started in the background ignores it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    signal.signal(signal.SIGINT, handler)


def draw(seed):
    rng = random.Random(seed)
    name = rng.choice([n for n, (*_, often) in HELPERS.items() for _ in range(often)])
    return name, rng.choice(FAULTS), rng.random()


@pytest.mark.parametrize("seed", range(TRIALS))
def test_trial(seed):
    name, fault, share = draw(seed)
    helper, trains, _ = HELPERS[name]
    setting = Setting(seed)
    told = f"seed {seed}, {name} on {setting.model.kinds}"
    before = picture(setting, not trains)
    ended, _, points, calls = run(helper, setting)
    lost = different(before, picture(setting, not trains))
    assert not lost, f"{told}, undisturbed, {ended}: not as before"
    ended, where, *_ = run(helper, setting, fault, share, points, calls)
    fell[name, fault, f"{where}, then {ended}"] += 1
    told = f"{told}, {fault} at {where}, then {ended}"
    heard = ended in ("KeyboardInterrupt", DROPPED)
    assert where == "(nowhere)" or "error" in fault or heard, told
    lost = different(before, picture(setting, not trains))
    if trains and "." not in where:  # PyTorch's own code in the reader's block: not our grad mode
        lost = [name for name in lost if name != "grad mode"]
    assert not lost, f"{told}: not as before"


# The edges one by one: what the trials meet by chance


def interrupt():
    signal.raise_signal(signal.SIGINT)


def small():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batch = {"x": torch.randn(3, 2)}
    loader = SimpleNamespace(generator=None)
    return SimpleNamespace(model=model, optimizers=[optimizer], batch=batch, loader=loader)


def a_step(setting, loss_fn):
    with preserve(setting.model, *setting.optimizers):
        setting.model.weight.data.zero_()
        with bpkit.record(setting.model):
            loss_fn(setting.model, setting.batch)
        setting.optimizers[0].state.clear()
        torch.rand(1)


def test_interrupted_at_each_point_of_entering_and_leaving():
    setting = small()
    setting.loss_fn = lambda model, batch: model(batch["x"]).sum()
    before = picture(setting)
    run(a_step, setting)  # the second time, caches are filled
    *_, points, _ = run(a_step, setting)
    assert points[1] > 100
    for point in range(0, points[1] - 1, 1 if TRIALS > 50 else 3):
        ended, where, *_ = run(
            a_step, setting, "SIGINT at an edge", (point + 0.5) / points[1], points
        )
        assert ended == "KeyboardInterrupt", (point, where, ended)
        lost = different(before, picture(setting))
        assert not lost, (point, where, lost)


def test_an_interrupt_in_the_block_is_raised_at_once():
    log = []
    with pytest.raises(KeyboardInterrupt), Slow(log, ""):
        log.append(interrupt())
    assert log == ["entered", "left"]


class Slow(interrupt_module.Unbroken):
    """Interrupted while it enters and while it leaves."""

    def __init__(self, log, when):
        self.log, self.when = log, when

    def _enter(self):
        if self.when == "entering":
            interrupt()
        self.log.append("entered")

    def _leave(self, *_):
        if self.when == "leaving":
            interrupt()
        self.log.append("left")


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_an_interrupt_on_an_edge_waits_for_its_end(when):
    log = []
    with pytest.raises(KeyboardInterrupt), Slow(log, when):
        log.append("inside")
    assert log == {"entering": ["entered", "left"], "leaving": ["entered", "inside", "left"]}[when]


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_it_waits_for_the_outermost_end(when):
    log, outer = [], []
    together = interrupt_module.together
    with pytest.raises(KeyboardInterrupt), together(Slow(log, when), Slow(outer, "")):
        log.append("inside")
    assert log.count("entered") == log.count("left") == len(outer) / 2 == 1
    assert ("inside" in log) == (when == "leaving")


def test_the_handler_is_the_readers_own():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append("mine"))
    with Slow(heard, "leaving"):
        interrupt()
        with Slow([], ""):
            interrupt()
    assert heard == ["entered", "mine", "mine", "left", "mine"]
    interrupt()
    assert heard.count("mine") == 4


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_behind_a_handler_that_only_takes_note_the_block_goes_on(when):
    log = []
    signal.signal(signal.SIGINT, lambda *_: log.append("mine"))
    with Slow(log, when):
        log.append("inside")
    assert (
        log
        == {
            "entering": ["entered", "mine", "inside", "left"],
            "leaving": ["entered", "inside", "left", "mine"],
        }[when]
    )


def test_the_readers_handler_is_shown_the_readers_frame():
    """As a debugger's, which stops there: neither in ``bpkit`` nor further out."""
    frames = []
    signal.signal(signal.SIGINT, lambda _, frame: frames.append(frame.f_code))

    @interrupt_module.unbroken
    def slow():
        interrupt()

    for when in ("entering", "leaving"):
        with Slow([], when):
            pass
    slow()
    here = sys._getframe().f_code
    assert frames == [here, here, here]


def test_at_the_top_of_a_script():
    """Nothing has called it: there is no frame further out to look at."""
    script = """
import signal
from bpkit.interrupt import Unbroken


class Slow(Unbroken):
    def _enter(self):
        signal.raise_signal(signal.SIGINT)
        print("entered")

    def _leave(self, *_):
        print("left")


with Slow():
    print("inside")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["entered", "left"]
    assert done.stderr.strip().endswith("KeyboardInterrupt")


def test_a_handler_set_in_the_block_stays():
    heard = []
    with Slow([], ""):
        signal.signal(signal.SIGINT, lambda *_: heard.append("mine"))
        with Slow([], "leaving"):
            pass
        assert heard == ["mine"]
    interrupt()
    assert heard == ["mine", "mine"]


def test_what_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Slow([], "leaving"):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_have_no_interrupts():
    handlers = []

    def run_there():
        with Slow([], ""):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run_there)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_what_an_interrupt_left_halfway_is_ended_with_the_block():
    """PyTorch takes a mode off its stack for a call; the traceback keeps it from coming back."""
    log = []

    @contextlib.contextmanager
    def off():
        log.append("off")
        yield
        log.append("never, after an error")

    @contextlib.contextmanager
    def back():
        try:
            yield
        finally:
            log.append("back")

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_name == "__exit__":
            sys.setprofile(None)
            interrupt()

    with pytest.raises(KeyboardInterrupt) as kept, interrupt_module.together(), off(), back():
        sys.setprofile(profile)
    assert log == ["off", "back"]
    del kept


class Mine(torch.overrides.TorchFunctionMode):
    """A mode of the reader's own."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


def test_a_recording_whose_mode_was_lost_leaves_the_readers_mode_and_no_hooks():
    before = modes()
    with Mine() as mine:
        with bpkit.record():
            torch.overrides._pop_mode()  # and interrupted before it could put it back
        assert _get_current_function_mode_stack() == [mine]
    assert not different(before, modes())


def test_checkup_leaves_no_gradient_in_the_batch():
    setting = small()
    setting.batch["x"].requires_grad_()
    report = bpkit.checkup(
        setting.model, lambda model, batch: model(batch["x"]).square().mean(), [setting.batch],
        setting.optimizers,
    )  # fmt: skip
    assert report.ok
    assert setting.batch["x"].grad is None
