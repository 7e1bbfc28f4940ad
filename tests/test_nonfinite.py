"""Programs that go wrong in the line marked ``# here``, and some that only look as if they did."""

import copy
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bpkit import checkup, find_nonfinite, record
from bpkit.nonfinite import explain, find_inplace

INF = float("inf")
SICK, HEALTHY = [], []


def identity(dtype=None):
    """A linear model that hands its input on, so that the batch decides what comes out."""
    model = nn.Linear(3, 3, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
        model.bias.zero_()
    return model


def positive():
    """Six rows; what a program wants to see is put into row 4."""
    return torch.arange(1.0, 19.0).reshape(6, 3) / 10


def zero_row():
    x = positive()
    x[4] = 0
    return x


def with_entry(value, row=4):
    x = positive()
    x[row, 1] = value
    return x


def sick(slug, node, row=None, batch=zero_row, model=identity, **more):
    def add(loss_fn):
        SICK.append(pytest.param(loss_fn, slug, node, row, batch, model, more, id=loss_fn.__name__))
        return loss_fn

    return add


def healthy(batch=zero_row, model=identity):
    def add(loss_fn):
        HEALTHY.append(pytest.param(loss_fn, batch, model, id=loss_fn.__name__))
        return loss_fn

    return add


# Square roots


@sick("nan-backward-sqrt", "SqrtBackward0", 4)
def sqrt_of_squares(model, x):
    return model(x).pow(2).sum(-1).sqrt().mean()  # here


@sick("nan-backward-sqrt", "SqrtBackward0", 4)
def sqrt_as_function(model, x):
    square = (model(x) * model(x)).sum(1)
    return torch.sqrt(square).sum()  # here


@sick("nan-backward-sqrt", "SqrtBackward0", 4)
def sqrt_times_mask(model, x):
    y = model(x).sum(1)
    return ((y > 0) * y.sqrt()).sum()  # here


@sick("nan-backward-sqrt", "SqrtBackward0", 4, batch=lambda: (zero_row(), zero_row()))
def huber_by_root(model, batch):
    error = model(batch[0]) - batch[1] * torch.tensor([[0.5]] * 4 + [[1.0]] + [[0.5]])
    return (error**2).sqrt().mean()  # here


@sick("nan-forward", "SqrtBackward0", 4, batch=lambda: with_entry(-0.5))
def sqrt_of_negative(model, x):
    return model(x).sqrt().sum()  # here


@sick("nan-backward-pow", "PowBackward0", 4)
def half_power(model, x):
    return (model(x).sum(1) ** 0.5).mean()  # here


@sick("nan-backward-pow", "PowBackward0", 4, batch=lambda: with_entry(0.0))
def geometric_mean(model, x):
    return model(x).prod(1).pow(1 / 3).mean()  # here


@sick("nan-backward-pow", "PowBackward1", 4)
def tensor_power(model, x):
    return torch.pow(model(x), torch.tensor([0.5, 0.7, 0.9])).sum()  # here


@sick("nan-forward", "PowBackward0", 4, batch=lambda: with_entry(-0.5))
def root_of_negative(model, x):
    return (model(x) ** 0.5).sum()  # here


@sick("nan-forward", "RsqrtBackward0", 4)
def rsqrt_of_zero(model, x):
    return model(x).rsqrt().sum()  # here


@sick("div-zero-norm", "RsqrtBackward0", 4)
def scaled_by_rsqrt_of_squares(model, x):
    y = model(x)
    scale = y.square().mean(1, keepdim=True).rsqrt()  # here
    return (y * scale).sum()


@healthy()
def sqrt_with_constant_inside(model, x):
    return (model(x).pow(2).sum(-1) + 1e-12).sqrt().mean()


@healthy()
def sqrt_clamped(model, x):
    return model(x).pow(2).sum(-1).clamp_min(1e-12).sqrt().mean()


@healthy()
def norm_of_zero(model, x):
    return model(x).norm(dim=1).sum() + torch.linalg.vector_norm(model(x), dim=1).sum()


@healthy()
def atan2_of_zeros(model, x):
    return torch.atan2(model(x), model(x)).sum()


# Logarithms


@sick("log-zero", "LogBackward0", 4)
def log_of_zero(model, x):
    return model(x).log().mean()  # here


@sick("log-zero", "Log2Backward0", 4)
def log2_as_function(model, x):
    return -torch.log2(model(x)).sum()  # here


@sick("log-negative", "LogBackward0", 4, batch=lambda: with_entry(-0.5))
def log_of_negative(model, x):
    return torch.log(model(x)).sum()  # here


@sick("log-negative", "Log1PBackward0", 4, batch=lambda: with_entry(-1.5))
def log1p_below(model, x):
    return torch.log1p(model(x)).sum()  # here


@sick("log-zero", "LogBackward0", 4, batch=lambda: with_entry(300.0), repair="log_softmax")
def log_of_softmax(model, x):
    p = F.softmax(model(x), dim=1)
    picked = p[torch.arange(6), torch.zeros(6, dtype=torch.long)]
    return -torch.log(picked).mean()  # here


@sick("log-zero", "LogBackward0", 4, batch=lambda: with_entry(50.0), repair="with_logits")
def binary_cross_entropy_by_hand(model, x):
    p = torch.sigmoid(model(x))
    y = torch.zeros(6, 3)
    y[0] = 1
    return -(y * torch.log(p.clamp_min(1e-9)) + (1 - y) * torch.log(1 - p)).mean()  # here


@sick("log-zero", "LogBackward0", 4, batch=lambda: with_entry(300.0))
def focal_loss(model, x):
    p = model(x).softmax(1)[:, 0]
    weight = (1 - p) ** 2
    return -(weight * p.log()).mean()  # here


@sick("nan-forward-zero-times-inf", "MulBackward0", 4, batch=lambda: with_entry(300.0))
def entropy_by_hand(model, x):
    p = model(x).softmax(1)
    logs = p.log()
    return -(p * logs).sum(1).mean()  # here


@sick("log-zero", None, 4, batch=lambda: (positive(), zero_row()))
def divergence_with_zero(model, batch):
    p, q = model(batch[0]), batch[1]
    ratio = p.log() - q.log()  # here
    return (p * ratio).sum()


@sick("log-zero", "LogBackward0", 4)
def likelihood_with_sigma_zero(model, x):
    sigma = model(x)
    error = torch.ones(6, 3)
    density = -sigma.log()  # here
    return (density - error**2 / 2).sum()


@sick("nan-forward", "DivBackward0", 4)
def distribution_with_sigma_zero(model, x):
    normal = torch.distributions.Normal(torch.zeros(6, 3), model(x), validate_args=False)
    return -normal.log_prob(torch.zeros(6, 3)).sum()  # here


@healthy(batch=lambda: with_entry(0.0))
def log1p_of_zero(model, x):
    return torch.log1p(model(x)).sum()


@healthy(batch=lambda: with_entry(300.0))
def log_softmax_far_apart(model, x):
    return F.nll_loss(F.log_softmax(model(x), 1), torch.zeros(6, dtype=torch.long))


@healthy(batch=lambda: (positive(), zero_row()))
def divergence_by_library(model, batch):
    return F.kl_div(F.log_softmax(model(batch[0]), 1), batch[1], reduction="batchmean")


@healthy(batch=lambda: with_entry(-2000.0))
def binary_cross_entropy_by_library(model, x):
    return F.binary_cross_entropy(torch.sigmoid(model(x)), torch.ones(6, 3))


# The branch that is not taken


@sick("nan-backward-where", "LogBackward0", 4)
def where_log(model, x):
    y = model(x)
    logs = torch.log(y)  # here
    return torch.where(y > 0, logs, 0.0).sum()


@sick("nan-backward-where", "SqrtBackward0", 4)
def where_sqrt(model, x):
    y = model(x)
    root = y.sqrt() * 2  # here
    return torch.where(y > 0, root, torch.zeros_like(y)).mean()


@sick("nan-backward-where", "DivBackward0", 4)
def where_division(model, x):
    y = model(x)
    n = y.sum(1, keepdim=True)
    unit = y / n  # here
    return unit.where(n > 0, y).sum()


@sick("nan-backward-where", "PowBackward0", 4, batch=lambda: with_entry(-0.5))
def where_power_of_negative(model, x):
    y = model(x)
    root = y**0.5  # here
    return torch.where(y > 0, root, y).sum()


@sick("nan-backward-where", "LogBackward0", 4, batch=lambda: with_entry(-0.5))
def where_log_of_negative_times(model, x):
    y = model(x)
    logs = y.log()  # here
    return torch.where(y > 0, logs * y, y).sum()


@sick("nan-backward-where", "ExpBackward0", 4, batch=lambda: with_entry(100.0))
def softplus_by_hand(model, x):
    y = model(x)
    grown = y.exp()  # here
    return torch.where(y < 50, torch.log1p(grown), y).sum()


@sick("nan-backward-where", "SqrtBackward0", 4)
def masked_fill_after(model, x):
    y = model(x).sum(1)
    return y.sqrt().masked_fill(y == 0, 0.0).sum()  # here


@sick("nan-backward-where", "LogBackward0", 4)
def selected_after(model, x):
    y = model(x).sum(1)
    logs = y.log()  # here
    return logs[y > 0].mean()


@sick("nan-backward-where", "PowBackward0", 4, batch=lambda: (positive(), with_entry(float("nan"))))
def missing_labels(model, batch):
    error = (model(batch[0]) - batch[1]) ** 2  # here
    return torch.where(batch[1].isnan(), 0.0, error).sum()


@sick("nan-backward-where", "MulBackward0", 0, batch=positive)
def masked_entropy(model, x):
    mask = torch.tensor([False, True, False])
    logs = model(x).masked_fill(mask, -INF).log_softmax(1)
    terms = logs.exp() * logs  # here
    return -terms.masked_fill(mask, 0.0).sum(1).mean()


@sick("nan-backward-sqrt", "SqrtBackward0", 4)
def zero_from_a_mask_not_from_the_where(model, x):
    y = model(x).sum(1)
    return torch.where(y > 1, (y > 0) * y.sqrt(), (y > -1) * y.sqrt()).sum()  # here


@sick("nan-backward-where", "LogBackward0", 4)
def where_scaled_log(model, x):
    y = model(x)
    logs = y.log()  # here
    return torch.where(y > 0, logs * model.bias.exp().sum(), y).sum()


@sick("log-negative", "LogBackward0", 4, batch=lambda: with_entry(-0.5))
def dropped_nan_is_not_the_origin(model, x):
    y = model(x)
    dropped = (y.abs() - 9 * (torch.arange(6) == 2)[:, None]).sqrt()
    y = torch.where(y > 5, dropped, y.log())  # here
    return y.sum()


def two_zero_rows():
    x = zero_row()
    x[1] = 0
    return x


@sick("log-zero", "LogBackward0", 4, batch=two_zero_rows)
def dropped_row_is_not_the_origin(model, x):
    total = model(x).log().sum(1)  # here
    return torch.where(torch.arange(6) == 1, 0.0, total).sum()


@healthy()
def where_made_safe(model, x):
    y = model(x)
    safe = torch.where(y > 0, y, 1.0)
    return torch.where(y > 0, safe.log(), 0.0).sum()


@healthy(batch=lambda: (positive(), with_entry(float("nan"))))
def missing_labels_left_out(model, batch):
    known = ~batch[1].isnan()
    return ((model(batch[0])[known] - batch[1][known]) ** 2).mean()


@healthy()
def infinity_selected_away(model, x):
    logits = model(x).masked_fill(torch.eye(6, 3) > 0, -INF)
    return logits[logits > -INF].sum()


# Angles, norms, spreads


def directions():
    x = F.normalize(positive(), dim=1)
    x[4] = torch.tensor([0.0, 1.0, 0.0])
    return x, torch.cat([x[:4].roll(1, dims=1), x[4:5], x[5:].roll(1, dims=1)])


@sick("nan-backward-acos", "AcosBackward0", 4, batch=directions)
def acos_of_dot(model, batch):
    cosine = (model(batch[0]) * batch[1]).sum(1)
    return cosine.acos().sum()  # here


@sick("nan-backward-acos", "AsinBackward0", 4, batch=lambda: with_entry(-1.0).clamp(-1, 0.9))
def asin_of_bounded(model, x):
    # Not clamp, which has had a derivative of 0 at its bounds since PyTorch 2.14, and of 1 before.
    return torch.asin(model(x).maximum(-torch.ones(()))).sum()  # here


@sick("nan-forward", "AcosBackward0", 4, batch=lambda: with_entry(10.001) / 10)
def acos_beyond(model, x):
    return model(x).acos().sum()  # here


@sick("div-zero-norm", "DivBackward0", 4)
def divided_by_norm(model, x):
    y = model(x)
    return (y / y.norm(dim=1, keepdim=True)).sum()  # here


@sick("div-zero-norm", "DivBackward0", 4)
def divided_by_root_of_squares(model, x):
    y = model(x)
    length = torch.sqrt((y * y).sum(1, keepdim=True))
    return torch.div(y, length).sum()  # here


@sick("div-zero-norm", "DivBackward0", 4)
def standardised(model, x):
    y = model(x)
    y = (y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True)  # here
    return y.square().sum()


@sick("div-zero-norm", "DivBackward0", 4, batch=lambda: zero_row().half(), dtype=torch.float16)
def norm_with_constant_lost_in_half(model, x):
    y = model(x)
    return (y / (y.norm(dim=1, keepdim=True) + 1e-8)).float().sum()  # here


@sick("log-zero", "LogitBackward0", 4, batch=lambda: with_entry(200.0))
def logit_of_sigmoid(model, x):
    return torch.logit(torch.sigmoid(model(x))).sum()  # here


@sick("std-single-element", "StdBackward0", 0, batch=lambda: positive()[:1])
def spread_of_one(model, x):
    return model(x).std(0).sum()  # here


@sick("std-single-element", "VarBackward0", 0, batch=lambda: positive()[:1])
def variance_of_one(model, x):
    return torch.var(model(x), dim=0).mean()  # here


@sick("nan-forward", "VarBackward0", 4, batch=lambda: with_entry(1e30))
def variance_overflow(model, x):
    return model(x).var(1).sum()  # here


@healthy()
def normalised(model, x):
    y = model(x)
    return F.normalize(y, dim=1).sum() + F.cosine_similarity(y, y + 1).sum()


@healthy()
def spread_of_equals(model, x):
    return model(x).std(1).sum()


@healthy(batch=lambda: positive()[:1])
def spread_of_one_uncorrected(model, x):
    return model(x).std(0, correction=0).sum()


@healthy(batch=lambda: with_entry(1.0).clamp(-1, 1))
def acos_kept_inside(model, x):
    return model(x).clamp(-1 + 1e-6, 1 - 1e-6).acos().sum()


@sick("div-zero-norm", "DivBackward0", 4)
def divided_by_own_sum(model, x):
    y = model(x)
    return (y / y.abs().sum(1, keepdim=True)).square().sum()  # here


@sick("div-zero-norm", "DivBackward0", 4, batch=lambda: zero_row().half(), dtype=torch.float16)
def normalised_in_half(model, x):
    return F.normalize(model(x), dim=1).float().sum()  # here


# Sums over nothing, divisions by zero


@sick("all-targets-ignored", "NllLossBackward0", None)
def every_target_ignored(model, x):
    return F.cross_entropy(model(x), torch.full((6,), -1), ignore_index=-1)  # here


@sick("all-targets-ignored", "NllLossBackward0", None)
def every_target_ignored_by_default(model, x):
    return F.cross_entropy(model(x), torch.full((6,), -100))  # here


@sick("all-targets-ignored", "NllLossBackward0", None)
def every_target_ignored_nll(model, x):
    return nn.NLLLoss()(F.log_softmax(model(x), 1), torch.full((6,), -100))  # here


@sick("all-targets-ignored", "DivBackward0", None)
def masked_mean_of_nothing(model, x):
    keep = torch.zeros(6)
    return (model(x).sum(1) * keep).sum() / keep.sum()  # here


@sick("all-targets-ignored", "MeanBackward0", None)
def selected_mean_of_nothing(model, x):
    return model(x)[torch.zeros(6, dtype=torch.bool)].mean()  # here


@sick("all-targets-ignored", "NllLossBackward0", None)
def every_target_of_weight_zero(model, x):
    weight = torch.tensor([0.0, 1.0, 1.0])
    return F.cross_entropy(model(x), torch.zeros(6, dtype=torch.long), weight=weight)  # here


@sick("nan-forward", "MeanBackward0", None, batch=lambda: torch.zeros(0, 3))
def mean_of_empty(model, x):
    return model(x).mean()  # here


@sick("nan-forward", "DivBackward0", 4)
def divided_by_zero(model, x):
    return (torch.ones(6, 3) / model(x)).mean()  # here


@sick("nan-forward", "MulBackward0", 4)  # PyTorch multiplies by the reciprocal
def number_over_zero(model, x):
    return (2 / model(x)).mean()  # here


@sick("nan-forward", "ReciprocalBackward0", 4)
def reciprocal_of_zero(model, x):
    return torch.reciprocal(model(x)).mean()  # here


@healthy()
def some_targets_ignored(model, x):
    return F.cross_entropy(model(x), torch.tensor([0, -100, 1, -100, 2, -100]))


@healthy()
def masked_mean_of_nothing_clamped(model, x):
    keep = torch.zeros(6)
    return (model(x).sum(1) * keep).sum() / keep.sum().clamp(min=1)


# Overflow and infinities


@sick("nan-forward", "ExpBackward0", 4, batch=lambda: with_entry(100.0))
def softmax_by_hand(model, x):
    e = torch.exp(model(x))  # here
    return (e / e.sum(1, keepdim=True)).square().sum()


@sick("nan-forward", "ExpBackward0", 4, batch=lambda: with_entry(100.0))
def exp_then_difference(model, x):
    grown = model(x).exp()  # here
    return (grown - grown.detach()).sum()


@sick("nan-forward", "ExpBackward0", 4, batch=lambda: with_entry(100.0))
def softmax_of_overflow(model, x):
    scores = model(x).exp()  # here
    return F.softmax(scores, dim=1).square().sum()


@sick("fp16-overflow", "MulBackward0", 4, batch=lambda: with_entry(300.0).half(), dtype=torch.half)
def half_square(model, x):
    y = model(x)
    y = y * y  # here
    return (y - y.mean()).float().sum()


@sick("fp16-overflow", "ToCopyBackward0", 4, batch=lambda: with_entry(1e5))
def cast_to_half(model, x):
    y = model(x).half()  # here
    return F.layer_norm(y, (3,)).float().sum()


@sick("fp16-overflow", "MulBackward0", 4, batch=lambda: with_entry(300.0))
def autocast_square(model, x):
    with torch.autocast("cpu", torch.float16):
        y = model(x)
        y = y * y  # here
    return y.float().mean()


@sick(
    "nan-forward",
    "ExpBackward0",
    4,
    batch=lambda: with_entry(100.0).bfloat16(),
    dtype=torch.bfloat16,
)
def bfloat16_exp(model, x):
    return model(x).exp().float().mean()  # here


@sick("nan-forward-zero-times-inf", "MulBackward0", 4)
def mask_times_infinity(model, x):
    penalty = torch.zeros(6, 3)
    penalty[4, 1] = INF
    y = model(x) * penalty  # here
    return y.sum()


@sick("nan-forward-zero-times-inf", "MulBackward0", 4)
def mask_times_log(model, x):
    y = model(x)
    logs = y.log()
    return ((y > 0).float() * logs).sum()  # here


@healthy(batch=lambda: with_entry(30000.0))
def large_but_finite(model, x):
    return model(x).pow(2).sum() * 1e20


@healthy(batch=lambda: with_entry(300.0).bfloat16(), model=lambda: identity(torch.bfloat16))
def bfloat16_square(model, x):
    return (model(x) ** 2).float().sum()


# Attention


class Attention(nn.Module):
    """One block with an additive mask; row 4 of the batch is padded from ``start`` on."""

    def __init__(self):
        super().__init__()
        self.core = nn.ModuleDict({"score": nn.Linear(3, 3), "value": nn.Linear(3, 3)})

    def forward(self, x, pad):
        scores = self.core["score"](x) @ x.transpose(1, 2)
        scores = scores + torch.full((5, 5), -INF).triu(1)
        scores = scores.masked_fill(pad[:, None], -INF)
        weights = torch.softmax(scores, dim=-1)  # here
        return weights @ self.core["value"](x)


def padded(start):
    def batch():
        torch.manual_seed(0)
        pad = torch.zeros(6, 5, dtype=torch.bool)
        pad[4, start:] = True
        return {"x": torch.randn(6, 5, 3), "pad": pad}

    return batch


@sick("nan-forward-masked-softmax", "SoftmaxBackward0", 4, batch=padded(0), model=Attention)
def attention_by_hand(model, batch):
    return model(batch["x"], batch["pad"]).square().mean()


@sick("nan-forward-masked-softmax", "SoftmaxBackward0", 4, batch=padded(0), model=Attention)
def attention_with_padding_left_out_of_loss(model, batch):
    y = model(batch["x"], batch["pad"])
    return y[~batch["pad"]].square().mean()


@healthy(batch=padded(3), model=Attention)
def attention_causal_and_padded(model, batch):
    return model(batch["x"], batch["pad"]).square().mean()


def multihead():
    torch.manual_seed(0)
    return nn.MultiheadAttention(6, 2, batch_first=True)


@sick("nan-forward-masked-softmax", "SoftmaxBackward0", 4, batch=padded(0), model=multihead)
def multihead_fully_padded(model, batch):
    x = torch.cat([batch["x"], batch["x"]], -1)
    return model(x, x, x, key_padding_mask=batch["pad"])[0].square().mean()  # here


@healthy(batch=padded(2), model=multihead)
def multihead_padded(model, batch):
    x = torch.cat([batch["x"], batch["x"]], -1)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    pad = torch.zeros(6, 5).masked_fill(batch["pad"], -INF)
    return model(x, x, x, key_padding_mask=pad, attn_mask=causal)[0].square().mean()


@sick("nan-forward-masked-softmax", "LogsumexpBackward0", 4)
def logsumexp_of_nothing(model, x):
    scores = model(x) + torch.zeros(6, 3).masked_fill(x == 0, -INF)
    return scores.logsumexp(1).exp().sum()  # here


@sick("nan-forward", "NllLossBackward0", None)
def masked_target(model, x):
    scores = model(x).masked_fill(torch.eye(6, 3) > 0, -INF)
    return F.cross_entropy(scores, torch.tensor([0, 2, 1, 0, 0, 0]))  # here


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        scores = x.masked_fill(torch.eye(6, 3) > 0, -INF)
        return (scores * self.scale).softmax(1)  # here


@sick("nan-backward", "MulBackward0", None, model=Temperature)
def temperature_after_mask(model, x):
    return model(x)[:, 1].sum()


# The rest


@sick("nan-backward-svd", "LinalgSvdBackward0", None)
def svd_of_identity(model, x):
    u, _, _ = torch.linalg.svd(model.weight)  # here
    return (u[:, 0] * x.sum(0)).sum()


@sick("nan-backward-svd", "LinalgEighBackward0", None)
def eigenvectors_of_identity(model, x):
    _, vectors = torch.linalg.eigh(model.weight @ model.weight.T)  # here
    return (vectors[:, 0] * x.sum(0)).sum()


@healthy()
def singular_values_of_identity(model, x):
    return torch.linalg.svdvals(model.weight).sum() * x.sum()


@sick("nan-backward", "HypotBackward0", 4)
def hypotenuse(model, x):
    return torch.hypot(model(x), model(x)).sum()  # here


@sick(
    "norm-eps-too-small",
    "NativeLayerNormBackward0",
    4,
    batch=lambda: zero_row().half(),
    dtype=torch.half,
)
def layer_norm_without_eps(model, x):
    return F.layer_norm(model(x), (3,), eps=1e-12).float().square().sum()  # here


class Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # here
        (x,) = ctx.saved_tensors
        return gradient / x


@sick("nan-backward", "InverseBackward", 4)
def custom_backward(model, x):
    return Inverse.apply(model(x)).sum()


class Logarithm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.log()  # here

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@sick("log-zero", None, 4)
def custom_forward(model, x):
    return Logarithm.apply(model(x)).sum()


@sick("nan-backward-sqrt", "SqrtBackward0", 4)
def below_a_custom_function(model, x):
    return Inverse.apply(model(x).sum(1).sqrt() + 1).sum()  # here


@sick("nan-backward", "MulBackward0", 0)
def gradient_overflow(model, x):
    y = model(x) * 1e-30
    z = y * 1e25  # here
    return (z * 1e25).sum()


@sick("nan-forward", "MeanBackward0", None)
def ctc_target_too_long(model, x):
    scores = model(x).log_softmax(1)[:, None]
    return F.ctc_loss(scores, torch.ones(1, 9, dtype=torch.long), [6], [9])  # here


@sick("nan-forward", "RemainderBackward1", 4)
def remainder_of_zero(model, x):
    return (torch.ones(6, 3) % model(x)).sum()  # here


@sick("log-zero", "XlogyBackward0", 4)
def xlogy_of_zero(model, x):
    return torch.xlogy(torch.ones(6, 3), model(x)).sum()  # here


@sick("log-zero", "LogBackward0", None)
def written_in_place(model, x):
    y = model(x)
    z = torch.ones(6, 3)
    z[2:] = y[2:].log()  # here
    return z.view(-1).sum()


@sick("log-zero", "LogBackward0", None)
def written_through_a_view(model, x):
    y, z = model(x), torch.ones(6, 3)
    flat = z.view(-1)
    z.add_(y)
    z[4] = y[4].log()  # here
    return flat.sum()


@sick("nan-backward-sqrt", "SqrtBackward0", 4)
def deep_below(model, x):
    y = model(x).sum(1).sqrt()  # here
    for _ in range(300):
        y = torch.tanh(y + 0.1)
    return y.sum()


@sick("nan-backward-sqrt", "SqrtBackward0", 4)
def checkpointed(model, x):
    def block(x):
        return model(x).sum(1).sqrt()  # here

    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum()


@pytest.mark.parametrize(("loss_fn", "slug", "node", "row", "batch", "model", "more"), SICK)
def test_sick(loss_fn, slug, node, row, batch, model, more):
    model = model(more["dtype"]) if "dtype" in more else model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of std over one value
        origin = find_nonfinite(model, loss_fn, batch())
    assert (origin.slug, origin.node, origin.row) == (slug, node, row), str(origin)
    assert origin.line.text.endswith("# here"), str(origin)
    assert more.get("repair", "") in origin.repair


@pytest.mark.parametrize(("loss_fn", "batch", "model"), HEALTHY)
def test_healthy(loss_fn, batch, model):
    assert find_nonfinite(model(), loss_fn, batch()) is None


def test_report_says_all_that_a_reader_needs():
    origin = find_nonfinite(identity(), sqrt_of_squares, zero_row())
    assert origin.phase == "backward"
    assert (origin.operation, origin.module) == ("sqrt", None)
    assert (origin.index, origin.count) == ((4,), 1)
    assert origin.values["input"] == 0
    assert origin.values["gradient from above"] == pytest.approx(1 / 6)
    assert origin.values["gradient sent back"] == INF
    assert origin.line.text == "return model(x).pow(2).sum(-1).sqrt().mean()  # here"
    for text in (str(origin), origin._repr_html_()):
        assert all(part in text for part in ("SqrtBackward0", "batch row 4", "1/(2√x)", "1e-12"))
    assert "<table>" in origin._repr_html_()


def test_anomaly_mode_names_the_operation_after():
    with pytest.raises(RuntimeError, match="PowBackward0"), torch.autograd.detect_anomaly():
        sqrt_of_squares(identity(), zero_row()).backward()
    assert find_nonfinite(identity(), sqrt_of_squares, zero_row()).node == "SqrtBackward0"


def test_module_and_place_of_a_nested_model():
    model = nn.Sequential(identity(), nn.Sequential(Attention()))
    loss_fn = lambda model, batch: model[1][0](batch["x"], batch["pad"]).mean()  # noqa: E731
    origin = find_nonfinite(model, loss_fn, padded(0)())
    assert origin.module == "1.0"
    assert origin.line.text == "weights = torch.softmax(scores, dim=-1)  # here"
    assert origin.also.startswith("the infinity comes from masked_fill at test_nonfinite.py line")
    assert "module 1.0" in origin.where


@dataclass
class Batch:
    x: torch.Tensor
    rest: object = None


class TestGiven:
    """What is NaN before the first operation."""

    @pytest.mark.parametrize(
        ("wrap", "path"),
        [
            (lambda x: x, "batch"),
            (lambda x: (torch.ones(6), x), "batch[1]"),
            (lambda x: {"a": [torch.ones(6), {"b": x}]}, "batch['a'][1]['b']"),
            (lambda x: Batch(torch.ones(6), x), "batch.rest"),
            (lambda x: SimpleNamespace(x=x), "batch.x"),
            (lambda x: (torch.ones(6), x.numpy()), "batch[1]"),
        ],
    )
    @pytest.mark.parametrize("value", [float("nan"), INF])
    def test_input(self, wrap, path, value):
        batch = wrap(with_entry(value))

        def loss_fn(model, batch):
            while not isinstance(batch, torch.Tensor | np.ndarray):
                parts = batch if isinstance(batch, dict | list | tuple) else vars(batch)
                batch = [*(parts.values() if isinstance(parts, dict) else parts)][-1]
            return model(torch.as_tensor(batch) * 1.0).square().mean()

        origin = find_nonfinite(identity(), loss_fn, batch)
        assert (origin.phase, origin.slug, origin.row) == ("input", "nan-input", 4)
        assert origin.path == f"{path}[4, 1]"
        assert origin.index == (4, 1)
        assert f"{path}[4, 1]" in str(origin)

    def test_parameter(self):
        model = nn.Sequential(identity(), identity())
        with torch.no_grad():
            model[1].weight[2, 0] = float("nan")
        origin = find_nonfinite(model, lambda model, x: model(x).sum(), positive())
        assert (origin.phase, origin.path, origin.row) == ("parameter", "1.weight[2, 0]", None)
        assert "earlier step" in origin.why

    def test_buffer(self):
        model = nn.BatchNorm1d(3).eval()
        model.running_mean[1] = float("nan")
        origin = find_nonfinite(model, lambda model, x: model(x).sum(), positive())
        assert (origin.phase, origin.path) == ("parameter", "running_mean[1]")

    def test_constant_of_the_program(self):
        weight = torch.tensor([1.0, float("nan"), 1.0])
        origin = find_nonfinite(identity(), lambda model, x: (model(x) * weight).sum(), positive())
        assert (origin.phase, origin.path) == ("input", "a tensor from outside the batch[1]")

    @pytest.mark.parametrize("value", [float("nan"), INF])
    def test_unused_is_harmless(self, value):
        model = identity()
        model.register_buffer("spare", torch.full((2,), value))
        batch = {"x": positive(), "spare": with_entry(value)}
        loss_fn = lambda model, batch: model(batch["x"]).sum() + 0 * batch["spare"][0].sum()  # noqa: E731
        assert find_nonfinite(model, loss_fn, batch) is None


def test_finite_loss_nonfinite_gradient_and_the_other_way_round():
    origin = find_nonfinite(identity(), lambda m, x: m(x).sqrt().sum(), zero_row())
    assert origin.phase == "backward"

    def added(model, x):
        return model(x).sum() + torch.zeros(1).log()  # the gradient is finite

    loss = added(identity(), positive())
    assert loss.isinf()
    assert find_nonfinite(identity(), added, positive()).slug == "log-zero"


def test_loss_without_a_graph():
    model = identity().requires_grad_(False)
    assert find_nonfinite(model, sqrt_of_squares, zero_row()) is None
    assert find_nonfinite(model, log_of_zero, zero_row()).slug == "log-zero"
    assert find_nonfinite(model, lambda model, x: model(x).log().sum().detach(), zero_row())


def test_batchnorm_of_one_row():
    model = nn.Sequential(identity(), nn.ModuleDict({"norm": nn.BatchNorm1d(3)})["norm"])
    origin = find_nonfinite(model, lambda model, x: model(x).sum(), positive()[:1])
    assert (origin.slug, origin.module) == ("batchnorm-single-sample", "1")
    assert "(1, 3)" in origin.why
    assert "model(x).sum()" in origin.line.text
    assert find_nonfinite(model.eval(), lambda model, x: model(x).sum(), positive()[:1]) is None


def test_errors_of_the_program_pass_through():
    def loss_fn(model, x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        find_nonfinite(identity(), loss_fn, positive())
    with pytest.raises(TypeError, match="float, expected a scalar tensor"):
        find_nonfinite(identity(), lambda model, x: 1.0, positive())
    with pytest.raises(ValueError, match="sum it"):
        find_nonfinite(identity(), lambda model, x: model(x), positive())


def test_everything_is_left_as_found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model[0].weight.grad = torch.ones(4, 3)
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    x = positive()

    def loss_fn(model, x):
        return model(x).square().sum().sqrt() + (model(x) * 0).sum().sqrt()

    assert find_nonfinite(model, loss_fn, x).slug == "nan-backward-sqrt"
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))
    assert model[0].bias.grad is None
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(x, positive())
    assert not model._forward_hooks
    assert not torch.overrides._get_current_function_mode_stack()


def test_random_numbers_are_those_of_the_call():
    def loss_fn(model, x):
        keep = F.dropout(torch.ones(6), 0.5)
        return (model(x).sum(1) * keep).sqrt().sum()

    model = identity()
    torch.manual_seed(3)
    dropped = (F.dropout(torch.ones(6), 0.5) == 0).nonzero().flatten().tolist()
    torch.manual_seed(3)
    origin = find_nonfinite(model, loss_fn, positive())
    assert (origin.row, origin.count) == (dropped[0], len(dropped))


def test_explain_leaves_the_graph_for_the_readers_own_backward():
    model = identity()
    with record(model) as recording:
        loss = sqrt_of_squares(model, zero_row())
    origin = explain(recording, loss)
    assert (origin.slug, origin.row) == ("nan-backward-sqrt", None)
    assert explain(recording, loss, model, zero_row()).line == origin.line
    assert model.weight.grad is None
    loss.backward()
    assert not model.weight.grad.isfinite().all()


def test_row_in_flattened_and_transposed_batches():
    x = torch.ones(4, 5, 3)
    x[2, 3] = 0

    def flattened(model, x):
        return model(x).flatten(0, 1).sum(1).sqrt().sum()

    def transposed(model, x):
        return model(x).transpose(0, 1).sum(-1).sqrt().sum()

    def features(model, x):
        y = model(x)
        return (torch.cat([y, y], -1).sum((0, 1)) * 0).sqrt().sum()

    assert [find_nonfinite(identity(), f, x).row for f in (flattened, transposed)] == [2, 2]
    assert find_nonfinite(identity(), features, x[:2] + 1).row is None


def test_leaf_in_several_places_and_sparse_gradients():
    model = nn.Embedding(10, 3, sparse=True)
    with torch.no_grad():
        model.weight[7] = 0
    tokens = torch.tensor([1, 2, 7, 3])
    origin = find_nonfinite(model, lambda m, t: m(t).pow(2).sum(1).sqrt().sum(), tokens)
    assert (origin.slug, origin.row) == ("nan-backward-sqrt", 2)
    assert find_nonfinite(model, lambda m, t: m(t).pow(2).sum(), tokens) is None


class TestInplace:
    def find(self, loss_fn, model=None):
        return find_inplace(model or identity(), loss_fn, positive())

    def test_names_the_line_that_changed_the_tensor(self):
        def loss_fn(model, x):
            y = torch.sigmoid(model(x))
            z = y.sum() * 2
            y.mul_(2)
            return z + y.sum()

        with pytest.raises(RuntimeError, match="inplace"):
            loss_fn(identity(), positive()).backward()
        origin = self.find(loss_fn)
        assert (origin.slug, origin.operation) == ("inplace-modified", "mul")
        assert origin.line.text == "y.mul_(2)"
        assert "y = torch.sigmoid(model(x))" in origin.also
        assert "SigmoidBackward0" in origin.why

    def test_what_is_kept_after_a_change_in_place_is_changed_by_a_later_one(self):
        def loss_fn(model, x):
            y = model(x)
            y.exp_()  # keeps its result, so its own change does no harm
            y.add_(1)
            return y.sum()

        origin = self.find(loss_fn)
        assert (origin.slug, origin.operation) == ("inplace-modified", "add")
        assert origin.line.text == "y.add_(1)"

    def test_a_checkup_tells_each_place_once(self):
        def loss_fn(model, x):
            y = torch.sigmoid(model(x))
            y += 1
            return y.square().mean()

        (fault,) = checkup(nn.Linear(3, 2), loss_fn, [torch.randn(8, 3)]).faults
        assert fault.slug == "inplace-modified"
        assert fault.where.count("y += 1") == fault.evidence.count("torch.sigmoid(model(x))") == 1
        assert "forward pass" not in fault.where

    @pytest.mark.parametrize(
        "change",
        [
            lambda y: y.__iadd__(1),
            lambda y: y.__setitem__(0, 0.0),
            lambda y: F.relu(y, inplace=True),
            lambda y: y[1:].zero_(),
            lambda y: y.view(-1).copy_(torch.ones(18)),
            lambda y: torch.exp(torch.ones(6, 3), out=y.detach()),
        ],
    )
    def test_ways_of_changing(self, change):
        def loss_fn(model, x):
            torch.zeros(6, 3).add_(1)
            y = torch.exp(model(x))
            z = y * 2
            torch.zeros(6, 3).add_(1)
            change(y)
            return z.sum()

        assert (
            "change(y)" in str(self.find(loss_fn).where) or "lambda y" in self.find(loss_fn).where
        )

    def test_argument_kept_by_a_later_operation(self):
        def loss_fn(model, x):
            y = model(x) + 0
            y.mul_(1.5)
            z = y.square().sum()
            y += 1
            return z

        assert self.find(loss_fn).line.text == "y += 1"

    def test_parameter_changed_between(self):
        def loss_fn(model, x):
            y = model(model(x))
            with torch.no_grad():
                model.weight.mul_(0.9)
            return y.sum()

        model = identity()
        assert self.find(loss_fn, model).line.text == "model.weight.mul_(0.9)"
        assert torch.equal(model.weight, torch.eye(3))

    def test_harmless_changes(self):
        def loss_fn(model, x):
            y = model(x) * 2
            y += 1
            return F.relu(y, inplace=True).sum()

        assert self.find(loss_fn) is None

    def test_freed_graph(self):
        model = identity()
        state = torch.sigmoid(model(positive())) * 1
        state.sum().backward()
        model.zero_grad()
        origin = self.find(lambda model, x: (model(x) * state).sum(), model)
        assert origin.slug == "second-backward"
        assert "detach" in origin.repair


def test_an_infinite_slope_without_a_rule_of_its_own_is_called_a_slope():
    model = nn.Linear(2, 1, dtype=torch.float64)
    origin = find_nonfinite(
        model, lambda m, x: torch.special.entr(m.weight * 0 + x).sum(), torch.tensor([0.0, 0.5])
    )
    assert (origin.phase, origin.node) == ("backward", "SpecialEntrBackward0")
    assert origin.why.startswith("The slope of special_entr at 0 is infinite")


def test_lines_of_an_origin_fit_into_a_terminal():
    origin = find_nonfinite(
        nn.Linear(2, 1, dtype=torch.float64),
        lambda model, x: (model.weight * 0 + x).sqrt().sum() + 0 * model.bias.sum() + 0 * x.sum(),
        torch.tensor([0.0, 0.5]),
    )
    lines = str(origin).splitlines()
    assert all(len(line) <= 76 for line in lines)
    assert any(line.startswith("        ") for line in lines)
    assert " ".join(" ".join(lines).split()).count(origin.why) == 1


def test_an_infinity_that_was_meant_meets_a_zero_in_the_backward_pass():
    mask = torch.tensor([0.0, -INF, 0.0])
    origin = find_nonfinite(
        identity(), lambda model, x: (model(x) + mask).square().reciprocal().sum(), positive()
    )
    assert (origin.phase, origin.node, origin.index) == ("backward", "PowBackward0", (0, 1))
    assert "0 · ∞" in origin.why


def test_a_whole_exponent_is_not_blamed_for_a_negative_base():
    origin = find_nonfinite(identity(), lambda m, x: ((m(x) - 1e30) ** 2).sum(), positive())
    assert origin.phase == "forward"
    assert "beyond the largest float32" in origin.why


def test_line_of_what_was_given_is_the_first_that_reads_it():
    def loss_fn(model, x):
        doubled = x * 2
        return model(doubled + 1).sum()

    x = positive()
    x[4, 1] = float("nan")
    origin = find_nonfinite(identity(), loss_fn, x)
    assert (origin.slug, origin.path) == ("nan-input", "batch[4, 1]")
    assert origin.line.text == "doubled = x * 2"


def test_an_operation_out_of_sight_is_named_and_not_explained():
    def loss_fn(model, x):
        h = model(x)
        with torch._C.DisableTorchFunction():
            hidden = h.log()
        return hidden.sum()

    origin = find_nonfinite(identity(), loss_fn, zero_row())
    assert (origin.phase, origin.node, origin.line) == ("forward", "LogBackward0", None)
    assert "can't be seen from inside" in origin.why


def test_an_infinity_that_was_meant_is_not_blamed_for_the_gradient_it_spoils():
    powers = torch.tensor([1.0, -INF, 2.0])
    origin = find_nonfinite(identity(), lambda m, x: ((m(x) + 2) ** powers).sum(), positive())
    assert (origin.phase, origin.node, origin.index) == ("backward", "PowBackward1", (0, 1))


class Blind(torch.autograd.Function):
    """Hands its input on, and no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return None


def test_a_reader_that_sends_no_gradient_is_passed_over():
    def loss_fn(model, x):
        root = model(x).sqrt()
        unused = Blind.apply(root) * model.bias.sum()
        return torch.where(x > 0, root, 0.0).sum() + unused.sum()

    origin = find_nonfinite(identity(), loss_fn, zero_row())
    assert (origin.slug, origin.node) == ("nan-backward-where", "SqrtBackward0")
