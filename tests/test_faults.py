"""The catalogue of faults: complete, well-formed, and its patterns match what PyTorch really says.

Each program below provokes an error or a warning. It runs with two sizes, so that the shapes and
names in the message differ, and `for_error` must give exactly the faults that can be behind it.
"""

import doctest
import math
import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import detect_anomaly, gradcheck
from torch.utils.checkpoint import checkpoint

from bpkit.diagnosis import faults
from bpkit.diagnosis.faults import FAULTS, LAYERS, SYMPTOMS, for_error, load, load_symptoms

SLUGS = {
    "data": """nan-input constant-labels all-zero-input unscaled-input all-targets-ignored
        label-misaligned batchnorm-single-sample batchnorm-statistics""",
    "forward": """nan-forward-masked-softmax nan-forward-zero-times-inf nan-forward log-zero
        log-negative std-single-element div-zero-norm fp16-overflow saturated-activation dead-relu
        symmetric-init initial-loss-off double-softmax double-sigmoid nll-on-logits
        kldiv-on-probabilities flipped-loss-sign sum-reduction shape-broadcast softmax-wrong-dim
        batch-mixing dropout-in-eval shared-module untied-weights norm-eps-too-small""",
    "backward": """detached nondifferentiable-term no-grad-block rewrapped-parameter
        unregistered-parameter unused-parameter ddp-unused-parameter frozen-by-accident
        checkpoint-input-no-grad wrong-backward inplace-modified second-backward
        missing-create-graph vanishing-gradient exploding-gradient zero-init-both
        nan-backward-where nan-backward-sqrt nan-backward-acos nan-backward-pow nan-backward-svd
        nan-backward hook-modifies-parameter leaf-inplace parameter-rebound gradcheck-float32
        gradcheck-step-size gradcheck-kink""",
    "update": """missing-zero-grad zero-grad-before-step missing-step step-before-backward
        optimizer-recreated stale-optimizer optimizer-missing-params clip-after-step clip-noop
        clip-before-unscale accumulation-unscaled accumulation-wiped lr-too-high lr-too-low
        scheduler-per-batch eval-mode-left-on graph-retained weight-decay-on-norm-bias data-shift
        oscillating-loss scaler-collapsed""",
    "memory": "out-of-memory-activations out-of-memory-states padding-waste",
}

# Messages that several faults share, most likely one first.
NO_GRAPH = """detached nondifferentiable-term no-grad-block frozen-by-accident
    checkpoint-input-no-grad missing-create-graph"""
MISMATCH = "wrong-backward gradcheck-float32 gradcheck-step-size gradcheck-kink"
NO_GRADIENTS = "zero-grad-before-step step-before-backward clip-noop"
NO_INF_CHECKS = "zero-grad-before-step step-before-backward stale-optimizer"
OUT_OF_MEMORY = "out-of-memory-activations out-of-memory-states padding-waste graph-retained"

PROGRAMS = []


def says(expected):
    """Registers a program whose message must lead to the `expected` faults, in this order."""

    def register(program):
        name = f"{expected.split()[0]}-{sum(1 for p in PROGRAMS if p.values[0] is not None)}"
        PROGRAMS.append(pytest.param(program, expected.split(), id=name))
        return program

    return register


def message_of(program, size):
    """The error that a program ends with, or else its last warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        torch.set_warn_always(True)  # some warn only once in the life of a process
        try:
            program(size)
        except Exception as error:
            return str(error)
        finally:
            torch.set_warn_always(False)
    assert caught, "neither an error nor a warning"
    return str(caught[-1].message)


def tracked(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def loss_of(n):
    return nn.Linear(n, 2)(torch.randn(4, n)).sum()


def optimized(n, **options):
    layer = nn.Linear(n, 2)
    return layer, torch.optim.SGD(layer.parameters(), 0.1, **options)


def scaled(n):
    layer, optimizer = optimized(n)
    scaler = torch.amp.GradScaler("cpu")
    scaled_loss = scaler.scale(layer(torch.randn(4, n)).sum())
    return scaled_loss, optimizer, scaler


def anomaly(function, *values, dtype=torch.float32):
    """A program that runs backward from the sum of ``function(x)`` in anomaly mode."""

    def program(n):
        x = torch.tensor([*values, *[0.5] * n], dtype=dtype, requires_grad=True)
        with detect_anomaly():
            function(x).sum().backward()

    return program


def operation(name, forward, backward):
    """A custom Function with that name, which stands in the message."""
    methods = {"forward": forward, "backward": backward}
    return type(name, (torch.autograd.Function,), {k: v for k, v in methods.items() if v})


def wrong_cube(n):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] ** 2 * g

    return operation(f"Cube{n}", staticmethod(forward), staticmethod(backward)).apply


def masked(x):
    return (x + torch.tensor(float("-inf"))).softmax(0)


# data

says("nan-input nan-backward")(anomaly(lambda x: x.log_softmax(0)[1], float("nan")))


@says("label-misaligned")
def label_too_large(n):
    F.cross_entropy(torch.randn(4, n), torch.arange(4) + n)


@says("label-misaligned")
def negative_label(n):
    F.nll_loss(torch.randn(4, n), torch.full((4,), -n))


@says("label-misaligned")
def one_hot_too_large(n):
    F.one_hot(torch.tensor([n]), n)


@says("label-misaligned")
def one_hot_negative(n):
    F.one_hot(torch.tensor([-n]), n)


@says("label-misaligned")
def fewer_labels(n):
    F.cross_entropy(torch.randn(n, 3), torch.zeros(n - 1).long())


@says("batchnorm-single-sample")
def batchnorm_of_one(n):
    nn.BatchNorm1d(n)(torch.randn(1, n))


@says("batchnorm-single-sample")
def batchnorm_of_one_pixel(n):
    nn.BatchNorm2d(n)(torch.randn(1, n, 1, 1))


@says("batchnorm-single-sample")
def instancenorm_of_one_pixel(n):
    nn.InstanceNorm2d(n)(torch.randn(2, n, 1, 1))


# forward

says("nan-forward-masked-softmax log-zero nan-backward")(anomaly(masked))
says("nan-forward-masked-softmax log-zero nan-backward")(
    anomaly(lambda x: -x.softmax(0)[0].log(), 0.0, 120.0)
)
says("nan-forward-zero-times-inf nan-backward")(anomaly(lambda x: x.exp() * (x < 1), 100.0))
says("log-zero nan-backward-where nan-backward")(anomaly(lambda x: x.log() * (x > 0), 0.0))
says("log-zero nan-backward-where nan-backward")(
    anomaly(lambda x: torch.where(x > 0, x.log(), 0), 0.0)
)
says("nan-forward div-zero-norm nan-backward-where nan-backward")(
    anomaly(lambda x: x.exp() / x.exp().sum(), 1000.0)
)
says("nan-forward div-zero-norm nan-backward-where nan-backward")(
    anomaly(lambda x: (x * 0) / (x * 0).norm())
)


@says("nan-forward")
def multinomial(n):
    torch.multinomial(torch.full((n,), float("nan")), 1)


@says("nan-forward")
def categorical(n):
    # torch.compile switches these checks off for the rest of the process.
    torch.distributions.Categorical(logits=torch.full((n, 3), math.nan), validate_args=True)


@says("nan-forward")
def normal(n):
    torch.distributions.Normal(torch.full((n,), math.nan), 1.0, validate_args=True)


@says("nan-forward")
def svd_of_nan(n):
    torch.linalg.svd(torch.full((n, n), float("nan")))


@says("nan-forward")
def eigh_of_nan(n):
    torch.linalg.eigh(torch.full((2, n, n), float("nan")))


@says("std-single-element")
def std_of_one(n):
    torch.randn(1, n).std(0)


@says("std-single-element")
def var_mean_of_one(n):
    torch.var_mean(torch.randn(n, 1), dim=1)


says("std-single-element nan-backward")(anomaly(lambda x: x[:1].std(), 1.0))
says("std-single-element nan-backward")(anomaly(lambda x: x[:1].var(), 1.0))


@says("fp16-overflow")
def half_mask(n):
    torch.zeros(n).half().masked_fill(torch.ones(n).bool(), -1e9)


@says("fp16-overflow")
def bfloat_fill(n):
    torch.zeros(n).bfloat16().fill_(10.0 ** (38 + n))


@says("fp16-overflow")
def half_weights(n):
    layer, optimizer = optimized(n)
    layer.half()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(layer(torch.randn(4, n).half()).sum().float()).backward()
    scaler.unscale_(optimizer)


@says("nll-on-logits nan-forward")
def bce_of_scores(n):
    F.binary_cross_entropy(torch.randn(n) * 5, torch.ones(n))


@says("nll-on-logits nan-forward")
def bce_of_nan(n):
    F.binary_cross_entropy(torch.full((n,), float("nan")), torch.ones(n))


@says("kldiv-on-probabilities")
def kl_div_mean(n):
    F.kl_div(torch.randn(4, n).softmax(1), torch.randn(4, n).softmax(1))


@says("sum-reduction")
def unreduced(n):
    F.cross_entropy(
        nn.Linear(n, 3)(torch.randn(4, n)), torch.arange(4) % 3, reduction="none"
    ).backward()


@says("shape-broadcast")
def mse_of_column(n):
    F.mse_loss(torch.randn(n, 1), torch.randn(n))


@says("shape-broadcast")
def huber_of_row(n):
    F.huber_loss(torch.randn(n), torch.randn(n, 1))


@says("shape-broadcast")
def bce_of_column(n):
    F.binary_cross_entropy(torch.rand(n, 1), torch.rand(n))


@says("shape-broadcast")
def bce_with_logits_of_column(n):
    F.binary_cross_entropy_with_logits(torch.randn(n, 1), torch.rand(n))


@says("softmax-wrong-dim")
def softmax_without_dim(n):
    F.softmax(torch.randn(4, n))


@says("softmax-wrong-dim")
def log_softmax_without_dim(n):
    nn.LogSoftmax()(torch.randn(4, n))


@says("shared-module")
def two_groups(n):
    layer = nn.Linear(n, n)
    torch.optim.SGD([{"params": layer.parameters()}, {"params": layer.parameters()}], 0.1)


@says("shared-module")
def one_group(n):
    layer = nn.Linear(n, n)
    torch.optim.SGD([*layer.parameters(), layer.weight], 0.1)


# backward


@says(NO_GRAPH)
def detached_loss(n):
    loss_of(n).detach().backward()


@says(NO_GRAPH)
def argmax_loss(n):
    nn.Linear(n, 3)(torch.randn(4, n)).argmax(1).float().mean().backward()


@says(NO_GRAPH)
def unrecorded_loss(n):
    with torch.no_grad():
        loss = loss_of(n)
    loss.backward()


@says(NO_GRAPH)
def frozen_model(n):
    nn.Linear(n, 2).requires_grad_(False)(torch.randn(4, n)).sum().backward()


@says(NO_GRAPH)
def checkpointed_data(n):
    checkpoint(nn.Linear(n, 2), torch.randn(4, n), use_reentrant=True).sum().backward()


@says(NO_GRAPH)
def unrecorded_gradient(n):
    x = tracked(n)
    (gradient,) = torch.autograd.grad((x**3).sum(), x)
    torch.autograd.grad(gradient.sum(), x)


@says("detached")
def item(n):
    loss_of(n).item().backward()


@says("detached")
def numpy(n):
    np.asarray(nn.Linear(n, 2)(torch.randn(4, n)))


@says("detached")
def as_float(n):
    float(loss_of(n))


@says("detached")
def copied(n):
    torch.tensor(loss_of(n), requires_grad=True)


@says("detached no-grad-block")
def hook_on_constant(n):
    torch.randn(n).register_hook(print)


@says("nondifferentiable-term")
def tracked_indices(n):
    torch.randn(4, n).argmax(1).requires_grad_()


@says("nondifferentiable-term")
def integer_parameter(n):
    nn.Parameter(torch.arange(n))


@says("no-grad-block")
def inference_result(n):
    with torch.inference_mode():
        hidden = torch.randn(4, n)
    nn.Linear(n, 2)(hidden)


@says("no-grad-block")
def inference_tracked(n):
    with torch.inference_mode():
        hidden = torch.randn(4, n)
    hidden.requires_grad_()


@says("no-grad-block")
def inference_changed(n):
    with torch.inference_mode():
        hidden = torch.randn(4, n)
    hidden.add_(1)


@says("rewrapped-parameter parameter-rebound")
def assigned(n):
    layer = nn.Linear(n, 2)
    layer.weight = layer.weight * 2


@says("rewrapped-parameter parameter-rebound")
def assigned_bias(n):
    layer = nn.Conv1d(n, 2, 1).double()
    layer.bias = torch.zeros(2, dtype=torch.float64)


@says("unregistered-parameter optimizer-missing-params")
def listed_layers(n):
    model = nn.Module()
    model.layers = [nn.Linear(n, 2)]
    torch.optim.SGD(model.parameters(), 0.1)


@says("unregistered-parameter parameter-rebound")
def squeezed(n):
    torch.optim.SGD([nn.Parameter(torch.ones(n, 1)).squeeze(1)], 0.1)


@says("unregistered-parameter parameter-rebound")
def squeezed_gradient(n):
    weight = nn.Parameter(torch.ones(n, 1)).squeeze(1)
    weight.sum().backward()
    _ = weight.grad


@says("unregistered-parameter")
def left_behind(n):
    nn.Linear(n, 2, device="meta")(torch.randn(4, n, device="meta")) + torch.ones(2)


@says("unused-parameter")
def not_in_the_graph(n):
    torch.autograd.grad(tracked(n).sum(), [tracked(n) for _ in range(n)])


@says("ddp-unused-parameter")
def data_parallel(n):
    import torch.distributed as dist

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(n, 2), nn.Linear(n, 2)

        def forward(self, x):
            return self.used(x)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Model())
        for _ in range(2):
            model(torch.randn(4, n)).sum().backward()
    finally:
        dist.destroy_process_group()


@says("frozen-by-accident")
def flag_of_result(n):
    nn.Linear(n, 2)(torch.randn(4, n)).requires_grad = False


@says("frozen-by-accident")
def gradient_of_data(n):
    x = torch.randn(4, n)
    torch.autograd.grad(nn.Linear(n, 2)(x).sum(), x)


@says("checkpoint-input-no-grad")
def reentrant(n):
    checkpoint(nn.Linear(n, 2), torch.randn(4, n), use_reentrant=True)


@says("checkpoint-input-no-grad")
def unsaid(n):
    checkpoint(nn.Linear(n, 2), tracked(4, n))


@says(MISMATCH)
def wrong_derivative(n):
    gradcheck(wrong_cube(n), tracked(n, dtype=torch.float64))


@says(MISMATCH)
def single_precision(n):
    x = torch.linspace(0.1, 0.9, n, requires_grad=True)
    warnings.simplefilter("ignore")
    gradcheck(torch.sin, x)


@says("gradcheck-float32")
def single_precision_warning(n):
    gradcheck(torch.sin, torch.linspace(0.1, 0.9, n, requires_grad=True), raise_exception=False)


@says(MISMATCH)
def step_too_large(n):
    gradcheck(lambda x: (100 * x).sin(), tracked(n, dtype=torch.float64), eps=0.01)


@says(MISMATCH)
def kink(n):
    gradcheck(torch.relu, torch.zeros(n, dtype=torch.float64, requires_grad=True))


@says("wrong-backward")
def random_backward(n):
    op = operation(
        f"Twice{n}",
        staticmethod(lambda ctx, x: x * 2),
        staticmethod(lambda ctx, g: g * 2 + 1e-4 * torch.rand_like(g)),
    )
    gradcheck(op.apply, tracked(n, dtype=torch.float64))


@says("wrong-backward")
def gradient_of_wrong_shape(n):
    op = operation(f"Op{n}", staticmethod(lambda ctx, x: x * 1), staticmethod(lambda ctx, g: g[1:]))
    op.apply(tracked(n)).sum().backward()


@says("wrong-backward")
def too_few_gradients(n):
    op = operation(f"Op{n}", staticmethod(lambda ctx, x, w: x * w), staticmethod(lambda ctx, g: g))
    op.apply(tracked(n), tracked(n)).sum().backward()


@says("wrong-backward")
def old_style(n):
    operation(f"Op{n}", lambda self, x: x, lambda self, g: -g)()(tracked(n))


@says("wrong-backward")
def no_backward(n):
    operation(f"Op{n}", staticmethod(lambda ctx, x: x * 1), None).apply(tracked(n)).sum().backward()


@says("wrong-backward")
def assigned_gradient(n):
    tracked(n).grad = torch.ones(n + 1)


@says("inplace-modified step-before-backward")
def overwritten(n):
    y = tracked(n).exp()
    y += 1
    y.sum().backward()


@says("inplace-modified step-before-backward")
def step_between(n):
    model = nn.Sequential(nn.Linear(n, 5), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(4, n)).sum().backward()
    loss = model(torch.randn(4, n)).sum()
    optimizer.step()
    loss.backward()


@says("inplace-modified")
def part_changed(n):
    first, _ = tracked(2 * n).clone().split(n)
    first += 1


@says("inplace-modified")
def relu_under_hook(n):
    layer = nn.Linear(n, 2)
    layer.register_full_backward_hook(lambda *_: None)
    torch.relu_(layer(tracked(4, n)))


@says("second-backward")
def twice(n):
    loss = tracked(n).exp().sum()
    loss.backward()
    loss.backward()


@says("second-backward")
def carried_state(n):
    cell, hidden = nn.GRUCell(n, n), torch.zeros(2, n)
    for _ in range(2):
        hidden = cell(torch.randn(2, n), hidden)
        hidden.sum().backward()


@says("nan-backward exploding-gradient")
def clip_of_nan(n):
    weight = tracked(n)
    weight.grad = torch.full((n,), float("nan"))
    nn.utils.clip_grad_norm_([weight], 1.0, norm_type=float(n), error_if_nonfinite=True)


says("nan-backward-sqrt nan-backward-where nan-backward")(
    anomaly(lambda x: torch.where(x > 0, x.sqrt(), 0), 0.0)
)
says("nan-backward-sqrt nan-backward-where nan-backward")(anomaly(lambda x: x.rsqrt() * 0, 0.0))
says("nan-backward-pow nan-backward-sqrt nan-backward-where nan-backward")(
    anomaly(lambda x: (x**2).sqrt(), 0.0)
)
says("nan-backward-pow nan-backward-sqrt nan-backward-where nan-backward")(
    anomaly(lambda x: x**0.5, -1.0)
)
says("nan-backward-where nan-backward")(anomaly(lambda x: torch.where(x > 0, 1 / x, 0), 0.0))
says("nan-backward-acos nan-backward")(anomaly(torch.acos, 1.1))
says("nan-backward-acos nan-backward")(anomaly(torch.asin, -1.1))
says("nan-backward-svd nan-backward")(
    anomaly(lambda x: torch.linalg.svd(torch.diag(x * 0 + 1)).U[:, :1] * x[0], 1.0)
)
says("nan-backward-svd nan-backward")(
    anomaly(lambda x: torch.linalg.eigh(torch.diag(x * 0 + 1))[1][:, :1] * x[0], 1.0)
)
says("nan-backward")(anomaly(lambda x: (x * x).sqrt(), 0.0))


@says("hook-modifies-parameter")
def hook_returns(n):
    weight = tracked(n)
    weight.register_post_accumulate_grad_hook(lambda p: p.data.clamp_(-0.1, 0.1))
    weight.sum().backward()


@says("hook-modifies-parameter")
def hook_on_result(n):
    tracked(n).exp().register_post_accumulate_grad_hook(print)


@says("leaf-inplace")
def leaf_changed(n):
    weight = tracked(n)
    weight -= 0.1


@says("leaf-inplace")
def leaf_entry_changed(n):
    tracked(n)[0] = 1.0


@says("parameter-rebound unused-parameter")
def rebound(n):
    weight = tracked(n)
    for _ in range(2):
        (weight * 2).sum().backward()
        weight = weight - 0.1 * weight.grad


# update


@says(NO_GRADIENTS)
def clip_of_nothing(n):
    nn.utils.clip_grad_value_(nn.Linear(n, 2).parameters(), 1.0)


@says(NO_INF_CHECKS)
def scaler_without_gradients(n):
    _, optimizer, scaler = scaled(n)
    scaler.step(optimizer)


@says("missing-step")
def update_without_step(n):
    loss, _, scaler = scaled(n)
    loss.backward()
    scaler.update()


@says("missing-step scheduler-per-batch")
def scheduler_without_step(n):
    torch.optim.lr_scheduler.StepLR(optimized(n)[1], n).step()


@says("scheduler-per-batch")
def too_many_steps(n):
    optimizer = optimized(n)[1]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=n)
    for _ in range(n + 2):
        optimizer.step()
        scheduler.step()


@says("optimizer-missing-params")
def another_group(n):
    saved = optimized(n)[1].state_dict()
    layers = nn.ModuleList(nn.Linear(n, 2) for _ in range(n))
    torch.optim.SGD(layers.parameters(), 0.1).load_state_dict(saved)


@says("optimizer-missing-params")
def more_groups(n):
    saved = optimized(n)[1].state_dict()
    groups = [{"params": nn.Linear(n, 2).parameters()} for _ in range(n)]
    torch.optim.SGD(groups, 0.1).load_state_dict(saved)


@says("clip-noop")
def used_up(n):
    parameters = nn.Linear(n, 2).parameters()
    torch.optim.SGD(parameters, 0.1)
    nn.utils.clip_grad_norm_(parameters, 1.0)


@says("clip-before-unscale")
def unscaled_twice(n):
    loss, optimizer, scaler = scaled(n)
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


@says("clip-before-unscale")
def unscaled_late(n):
    loss, optimizer, scaler = scaled(n)
    loss.backward()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


@says("clip-before-unscale")
def stepped_twice(n):
    loss, optimizer, scaler = scaled(n)
    loss.backward()
    scaler.step(optimizer)
    scaler.step(optimizer)


@says("graph-retained")
def reference_cycle(n):
    tracked(n).exp().sum().backward(create_graph=True)


# memory


@says(OUT_OF_MEMORY)
def too_large(n):
    torch.empty(2 ** (46 + n))


# What a CPU can't say: from public reports, with other numbers.
REPORTED = [
    (
        "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacity of 6.00 GiB",
        OUT_OF_MEMORY,
    ),
    (
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0"
        " and cpu! (when checking argument for argument mat2 in method wrapper_CUDA_mm)",
        "unregistered-parameter",
    ),
    (  # before 2.9
        "One of the differentiated Tensors appears to not have been used in the graph. Set"
        " allow_unused=True if this is the desired behavior.",
        "unused-parameter",
    ),
]
HARMLESS = [
    "mat1 and mat2 shapes cannot be multiplied (4x3 and 5x2)",
    "'NoneType' object has no attribute 'shape'",
    "Expected parameter scale (Tensor of shape (1,)) of distribution Normal(loc: tensor([0.]),"
    " scale: tensor([0.])) to satisfy the constraint GreaterThan(lower_bound=0.0), but found"
    " invalid values:\ntensor([0.])",
    "all elements of target should be between 0 and 1",
    "Gradients will be computed",
    "",
]


def slugs(message):
    return [fault.slug for fault in for_error(message)]


@pytest.mark.parametrize(("program", "expected"), PROGRAMS)
def test_message(program, expected):
    first, second = (message_of(program, n) for n in (3, 5))
    assert slugs(first) == expected, first
    assert slugs(second) == expected, second


@pytest.mark.parametrize(("message", "expected"), REPORTED)
def test_reported_message(message, expected):
    assert slugs(message) == expected.split()


@pytest.mark.parametrize("message", HARMLESS)
def test_other_messages_are_not_ours(message):
    assert slugs(message) == []


def test_every_pattern_is_provoked():
    messages = [message for message, _ in REPORTED]
    messages += [message_of(program.values[0], 3) for program in PROGRAMS]
    texts = [" ".join(message.split()) for message in messages]
    idle = {
        fault.slug: pattern.pattern
        for fault in FAULTS.values()
        for pattern in fault.errors
        if not any(pattern.search(text) for text in texts)
    }
    assert idle == {}


def test_a_pasted_message_may_be_wrapped_and_surrounded():
    message = message_of(twice, 3)
    wrapped = "\n    ".join(re.findall(r".{1,40}(?: |$)", message))
    pasted = f"Traceback (most recent call last):\n  ...\nRuntimeError: {wrapped}\nTime: 0.1 s"
    assert slugs(pasted) == ["second-backward"]


def test_all_slugs_in_the_order_of_the_triage():
    assert list(FAULTS) == [slug for layer in LAYERS for slug in SLUGS[layer].split()]
    assert {slug: fault.layer for slug, fault in FAULTS.items()} == {
        slug: layer for layer in LAYERS for slug in SLUGS[layer].split()
    }


@pytest.mark.parametrize("slug", FAULTS)
def test_texts(slug):
    fault = FAULTS[slug]
    texts = [*fault.symptoms, fault.cause, fault.repair, fault.decides]
    for text in texts:
        assert text.count("`") % 2 == 0, text
        outside = re.sub(r"`[^`]*`", "", text)
        assert not re.search(r"[_*\[\]<>$\\]", outside), f"Markdown in plain text: {text}"
        assert text[0].isupper() or text.startswith(("`", "inf ", "float16 ")) or text[0] in "04", (
            text
        )
        assert text[-1] in ".?)", text
    assert 20 <= len(fault.cause.split()) <= 90
    assert fault.title[-1] not in ".?!"
    assert "`" not in fault.title
    assert fault.anchor == slug


@pytest.mark.parametrize("slug", FAULTS)
def test_patterns_are_understood_by_python_and_javascript(slug):
    for pattern in FAULTS[slug].errors:
        plain = re.sub(r"\\d\+|\\w\+|\.[+*]\??|\\[()\[\].]", "", pattern.pattern)
        assert not re.search(r"[\\()\[\]{}|*+?^$.]", plain), pattern.pattern


ENTRY = """
[a-fault]
layer = "data"
title = "A fault"
symptoms = ["You see it."]
errors = ['some \\w+ text']
cause = \"\"\"Because.
  Therefore.\"\"\"
repair = "Don't."
decides = "Look."
page = "faults"
anchor = "a-fault"
"""


def test_load():
    fault = load(ENTRY)["a-fault"]
    assert (fault.slug, fault.layer, fault.cause) == ("a-fault", "data", "Because. Therefore.")
    assert fault.symptoms == ("You see it.",)
    assert fault.errors[0].search("some other text")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('title = "A fault"\n', "", "a-fault: got ["),
        ('title = "A fault"', 'title = "A fault"\ntypo = "x"', "typo"),
        ('title = "A fault"', 'title = ""', "title is ''"),
        ('title = "A fault"', "title = 3", "title is 3"),
        ('["You see it."]', '"You see it."', "symptoms is 'You see it.'"),
        ('["You see it."]', "[]", "a symptom"),
        ('layer = "data"', 'layer = "date"', "one of the layers"),
        ("\\w+", "(", "a-fault: 'some ( text' is no pattern"),
        ("[a-fault]", "a-fault = 1\n[another]", "a-fault: got 1, expected the keys"),
    ],
)
def test_load_refuses(old, new, says):
    assert old in ENTRY
    with pytest.raises(ValueError, match=re.escape(says)):
        load(ENTRY.replace(old, new))


def test_every_fault_is_listed_under_something_that_is_seen():
    listed = {slug for symptom in SYMPTOMS.values() for slug in symptom.faults}
    assert listed == set(FAULTS)


@pytest.mark.parametrize("name", SYMPTOMS)
def test_symptoms_are_sentences(name):
    symptom = SYMPTOMS[name]
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
    assert name not in FAULTS, "both are anchors on one page"
    assert symptom.title[-1] not in ".?!"
    assert symptom.first[-1] == "."
    others = {other.title for other in SYMPTOMS.values()} - {symptom.title}
    assert set(re.findall("“(.+?)”", symptom.first)) <= others, "the page makes links of these"


def test_the_losses_of_guessing_are_named():
    title = SYMPTOMS["stuck-at-chance"].title
    assert title.endswith(", ".join(f"{math.log(classes):.3f}" for classes in (2, 10, 1000)))


def test_no_text_was_copied_from_another_entry():
    """A copied entry whose text was not changed yet is well-formed, and says the wrong thing."""
    faults = [
        (f.title, f.cause, f.repair, f.decides, f"{f.page}#{f.anchor}") for f in FAULTS.values()
    ]
    symptoms = [(symptom.title, symptom.first) for symptom in SYMPTOMS.values()]
    texts = [text for entry in (*faults, *symptoms) for text in entry]
    assert [text for text in texts if texts.count(text) > 1] == []


SYMPTOM = """
[no-news]
title = "Nothing is seen"
first = "Look."
faults = ["missing-step", "dead-relu"]
"""


def test_load_symptoms():
    assert load_symptoms(SYMPTOM)["no-news"].faults == ("missing-step", "dead-relu")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('first = "Look."\n', "", "no-news: got ['faults', 'title']"),
        ("missing-step", "missing-stop", "['missing-stop'] are not in the catalogue"),
        ("missing-step", "dead-relu", "a fault stands twice"),
    ],
)
def test_load_symptoms_refuses(old, new, says):
    assert old in SYMPTOM
    with pytest.raises(ValueError, match=re.escape(says)):
        load_symptoms(SYMPTOM.replace(old, new))


def test_parts_of_a_card():
    fault = FAULTS["second-backward"]
    assert "``Trying to backward through the graph a second time``" in fault.card("seen")
    assert fault.card("decides").endswith(fault.decides)
    assert fault.cause in fault.card("cause")
    assert fault.repair in fault.card("cause")
    with pytest.raises(ValueError, match="seen, decides and cause, got 'why'"):
        fault.card("why")


def test_examples():
    assert doctest.testmod(faults).attempted > 0
    assert doctest.testmod(faults).failed == 0
