"""Are the displayed equations of chapter 6 what the code computes?"""

import math

import torch
from torch import optim

from formulas import draw, formula, grad, leaf

STEPS = 6


def after(make, gradients, start=0.0):
    """A parameter before and after each step of an optimizer of PyTorch, and that optimizer."""
    theta = torch.full((), start, dtype=torch.float64, requires_grad=True)
    optimizer, path = make([theta]), [theta.item()]
    for g in gradients:
        theta.grad = torch.as_tensor(g, dtype=torch.float64)
        optimizer.step()
        path.append(theta.item())
    return path, optimizer.state[theta]


def descended(curvature, rate, steps, start=1.0, **options):
    """Gradient descent on a parabola by torch.optim: the path."""
    theta = leaf(start)
    optimizer, path = optim.SGD([theta], lr=rate, **options), [theta.item()]
    for _ in range(steps):
        optimizer.zero_grad()
        (curvature / 2 * theta**2).backward()
        optimizer.step()
        path.append(theta.item())
    return path


@formula("eq:quadratic-step")
def _():
    path = descended(10.0, 0.07, 2)
    return {r"\theta_t": path[1], r"\theta_{t+1}": path[2], r"\eta": 0.07, r"\lambda": 10.0}


@formula("eq:quadratic-path")
def _():
    path = descended(10.0, 0.19, 7, start=2.0)
    return {
        r"\theta_t": path[7], r"\theta_0": path[0], "t": 7, r"\eta": 0.19, r"\lambda": 10.0,
    }  # fmt: skip


def highest(beta):
    """The rate up to which v ← βv + λθ, θ ← θ - ηv shrinks everything, for λ = 5; by bisection."""
    low, high = 0.1, 2.0
    for _ in range(50):
        rate = (low + high) / 2
        one_step = torch.tensor([[1 - 5 * rate, -rate * beta], [5, beta]], dtype=torch.float64)
        shrinks = torch.linalg.eigvals(one_step).abs().max() < 1
        low, high = (rate, high) if shrinks else (low, rate)
    return low


@formula("eq:stability")
def _():
    return {r"\eta_{\max}": highest(beta=0.0), r"\lambda": 5.0}


@formula("eq:momentum-limit")
def _():
    for beta in (0.5, 0.9):
        yield {r"\eta_{\max}": highest(beta), r"\lambda": 5.0, r"\beta": beta}


@formula("eq:momentum-recursion")
def _():
    path = descended(5.0, 0.1, 3, momentum=0.9)
    return {
        r"\theta_{t-1}": path[1], r"\theta_t": path[2], r"\theta_{t+1}": path[3],
        r"\eta": 0.1, r"\lambda": 5.0, r"\beta": 0.9,
    }  # fmt: skip


@formula("eq:best-rate")
def _():
    # The rate at which the slower of two coordinates is fastest, by search.
    def slower(rate):
        return max(abs(descended(curvature, rate, 1)[1]) for curvature in (1.5, 9.0))

    low, high = 0.01, 0.3
    for _ in range(200):
        third = (high - low) / 3
        if slower(low + third) < slower(high - third):
            high -= third
        else:
            low += third
    return {r"\eta": low, r"\lambda_1": 1.5, r"\lambda_2": 9.0, r"\kappa": 6.0}


def curved():
    """A loss of three numbers, its Hessian, and a vector."""
    theta, v = draw(3), draw(3).detach()

    def loss(p):
        return torch.sin(p).prod() + (p**4).sum()

    return theta, v, loss, torch.autograd.functional.hessian(loss, theta.detach())


@formula("eq:hvp")
def _():
    theta, v, loss, H = curved()
    (gradient,) = torch.autograd.grad(loss(theta), theta, create_graph=True)
    return {"H": H, "v": v, r"\nabla ( \nabla L \cdot v )": grad(gradient @ v, theta)}


@formula("eq:rayleigh")
def _():
    *_, H = curved()
    values, vectors = torch.linalg.eigh(H)
    return {"H": H, "v": vectors[:, -1], r"\lambda": values[-1]}


GRADIENTS = [0.3, -1.2, 0.7, 2.0, -0.4, 0.9]


def paths(make, *names):
    """θ and what the optimizer remembers, after each step."""
    theta, _ = after(make, GRADIENTS)
    states = [after(make, GRADIENTS[:k])[1] for k in range(1, STEPS + 1)]
    return theta[1:], *([state[name].item() for state in states] for name in names)


@formula("eq:momentum")
def _():
    theta, v = paths(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), "momentum_buffer")
    return {
        r"\theta": theta, "v": v, "g": GRADIENTS, r"\beta": 0.9, r"\eta": 0.1,
        "t": range(2, STEPS + 1),
    }  # fmt: skip


@formula("eq:momentum-sum")
def _():
    _, state = after(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), [0.7] * 8)
    v = state["momentum_buffer"].item()
    return {"v_t": v, "g": 0.7, r"\beta": 0.9, "t": 8}


@formula("eq:momentum-average")
def _():
    # PyTorch's dampening is the factor before g, left out in the first step.
    def make(p):
        return optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9)

    _, m = paths(make, "momentum_buffer")
    return {"m": m, "g": GRADIENTS, r"\beta": 0.9, "t": range(2, STEPS + 1)}


@formula("eq:rmsprop")
def _():
    theta, s = paths(lambda p: optim.RMSprop(p, lr=0.1, alpha=0.9, eps=1e-3), "square_avg")
    return {
        r"\theta": theta, "s": s, "g": GRADIENTS, r"\alpha": 0.9, r"\eta": 0.1, r"\epsilon": 1e-3,
        "t": range(2, STEPS + 1),
    }  # fmt: skip


def adam():
    def make(p):
        return optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3)

    theta, m, s = paths(make, "exp_avg", "exp_avg_sq")
    return {
        r"\theta": theta, "m": m, "s": s, "g": GRADIENTS, r"\beta_1": 0.8, r"\beta_2": 0.95,
        r"\eta": 0.1, r"\epsilon": 1e-3,
        r"\hat m": [value / (1 - 0.8**t) for t, value in enumerate(m, start=1)],
        r"\hat s": [value / (1 - 0.95**t) for t, value in enumerate(s, start=1)],
        "t": range(2, STEPS + 1),
    }  # fmt: skip


formula("eq:adam-averages")(adam)
formula("eq:adam")(adam)


@formula("eq:weights")
def _():
    # The average of a constant gradient 1, which is the sum of its weights.
    _, state = after(lambda p: optim.Adam(p, betas=(0.9, 0.999)), [1.0] * 5)
    weights = state["exp_avg"].item()
    for beta, total in ((0.9, weights), (0.999, state["exp_avg_sq"].item())):
        assert math.isclose(total, 1 - beta**5, rel_tol=1e-9)
        yield {r"\beta": beta, "t": 5}


@formula("eq:lion")
def _():
    # Chen et al. (2023), algorithm 2, in their order and with their names.
    theta, m, mixed, thetas, ms = 0.0, 0.0, [], [], []
    gradients = [1.0, -0.095, 0.3, -2.0]  # the second sign depends on the smaller of the betas
    for g in gradients:
        c = 0.9 * m + (1 - 0.9) * g
        theta = theta - 0.1 * math.copysign(1, c)
        m = 0.99 * m + (1 - 0.99) * g
        mixed.append(c)
        thetas.append(theta)
        ms.append(m)
    return {
        r"\theta": thetas, "v": mixed, "m": ms, "g": gradients, r"\beta_1": 0.9, r"\beta_2": 0.99,
        r"\eta": 0.1, r"\operatorname{sign}": torch.sign, "t": range(2, 5),
    }  # fmt: skip


@formula("eq:scale")
def _():
    return {"c": 30.0, r"\hat m": 0.2, r"\hat s": 0.07, r"\epsilon": 0.01}


@formula("eq:tail")
def _():
    p, W, k = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), draw(3, 4), 1
    rows = -W.log_softmax(1)[:, 2]
    own = draw(4)
    with torch.no_grad():
        own.copy_(W[k])
    return {
        r"\frac{\partial L}{\partial w_k}": grad((p * rows).sum(), W)[k],
        r"\frac{\partial \ell_k}{\partial w_k}": grad(-own.log_softmax(0)[2], own),
        "p_k": p[k],
    }


@formula("eq:decay")
def _():
    theta, g = 1.3, 0.4
    path, _ = after(lambda p: optim.SGD(p, lr=0.1, weight_decay=0.2), [g], start=theta)
    right = path[1]
    assert math.isclose((1 - 0.1 * 0.2) * theta - 0.1 * g, right)
    return {r"\theta": theta, "g": g, r"\eta": 0.1, r"\delta": 0.2}


@formula("eq:cosine")
def _():
    optimizer = optim.SGD([leaf(0.0)], lr=0.3)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.05)
    for t in range(11):
        rate = optimizer.param_groups[0]["lr"]
        yield {r"\eta_t": rate, r"\eta_{\max}": 0.3, r"\eta_{\min}": 0.05, "T": 10, "t": t}
        optimizer.step()
        schedule.step()


@formula("eq:noise-floor")
def _():
    # The variance of a step, iterated until it no longer changes.
    rate, curvature, noise, variance = 0.1, 5.0, 0.7, 3.0
    for _ in range(300):
        variance = (1 - rate * curvature) ** 2 * variance + rate**2 * noise**2
    return {"V": variance, r"\eta": rate, r"\lambda": curvature, r"\sigma": noise}


@formula("eq:interval")
def _():
    from scipy import stats

    d = [0.3, 0.1, 0.25, -0.1, 0.2]
    mean, deviation = sum(d) / 5, torch.tensor(d, dtype=torch.float64).std()
    low, high = stats.t.interval(0.95, 4, loc=mean, scale=deviation / math.sqrt(5))
    return {
        "h": (high - low) / 2, "t_{n-1}": stats.t.ppf(0.975, 4), "s_d": deviation, "n": 5,
    }  # fmt: skip
