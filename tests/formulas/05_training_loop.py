"""Are the displayed equations of chapter 5 what the code computes?"""

import torch
from torch import nn

from formulas import draw, formula, grad, leaf

ETA, BETA, LAMBDA = 0.3, 0.7, 1.9


def steps(momentum, zero):
    """A few steps of PyTorch's SGD: the gradient of each, what the step used, the positions."""
    theta, targets = leaf(0.4), draw(5)
    optimizer = torch.optim.SGD([theta], lr=ETA, momentum=momentum)
    fresh, used, path = [], [], []
    for target in targets:
        if zero:
            optimizer.zero_grad()
        loss = torch.sin(theta - target.detach())
        fresh.append(grad(loss, theta))
        loss.backward()
        optimizer.step()
        state = optimizer.state[theta]
        used.append((state["momentum_buffer"] if momentum else theta.grad).clone())
        path.append(theta.detach().clone())
    return map(torch.stack, (fresh, used, path))


@formula("eq:never-zeroed")
def _():
    g, a, theta = steps(0, zero=False)
    return {"g": g, "a": a, r"\theta": theta, r"\eta": ETA, "t": range(2, 6)}


@formula("eq:momentum-one")
def _():
    for beta in (BETA, 1.0):
        g, v, theta = steps(beta, zero=True)
        symbols = {r"\beta": beta, r"\eta": ETA, "t": range(2, 6)}
        yield {"g": g, "v": v, r"\theta": theta, **symbols}


def map_of_one_step(state):
    """What one step of SGD with momentum makes of (θ, v) on λθ²/2."""
    theta, velocity = leaf(state[0].detach()), state[1].detach()
    optimizer = torch.optim.SGD([theta], lr=ETA, momentum=BETA)
    optimizer.state[theta]["momentum_buffer"] = velocity.clone()
    (0.5 * LAMBDA * theta**2).backward()
    optimizer.step()
    return torch.stack([theta.detach(), optimizer.state[theta]["momentum_buffer"]])


@formula("eq:one-step")
def _():
    before = torch.tensor([0.4, -1.3], dtype=torch.float64)
    after = map_of_one_step(before)
    return {
        r"\theta": before[0], "v": before[1], r"\theta'": after[0], "v'": after[1],
        r"\eta": ETA, r"\beta": BETA, r"\lambda": LAMBDA,
    }  # fmt: skip


@formula("eq:determinant")
def _():
    columns = [map_of_one_step(unit) for unit in torch.eye(2, dtype=torch.float64)]
    determinant = torch.linalg.det(torch.stack(columns, dim=1))
    return {r"\det M": determinant, r"\eta": ETA, r"\beta": BETA, r"\lambda": LAMBDA}


@formula("eq:micro")
def _():
    losses, sizes = draw(7), [4, 2, 1]
    means = torch.stack([part.mean() for part in losses.split(sizes)])
    return {"N": 7, r"\ell": losses, "n": sizes, "L": means}


@formula("eq:through-time")
def _():
    x, W = draw(5, 3), draw(3, 3)

    def loss(copies):
        h = torch.zeros(3, dtype=torch.float64)
        for u, copy in zip(x, copies, strict=True):
            h = torch.tanh(h @ copy + u)
        return (h**2).sum()

    copies = [leaf(W.detach()) for _ in x]
    each = torch.stack(torch.autograd.grad(loss(copies), copies))
    return {
        r"\frac{\partial L}{\partial W}": grad(loss([W] * 5), W),
        r"\frac{\partial L}{\partial W_t}": each,
    }


@formula("eq:cosine-similarity")
def _():
    g, other = draw(5), draw(5)
    return {"g": g, "g'": other, r"\cos(g, g')": torch.cosine_similarity(g, other, dim=0)}


@formula("eq:global-norm")
def _():
    g = draw(3, 5)
    return {"g": g, r"\lVert g \rVert": nn.utils.get_total_norm(list(g.detach()))}


@formula("eq:update-ratio")
def _():
    theta = draw(5)
    before = theta.detach().clone()
    theta.grad = draw(5).detach()
    torch.optim.Adam([theta], lr=0.1).step()
    ratio = (theta.detach() - before).norm() / before.norm()
    return {r"\theta": before, r"\theta'": theta, "r": ratio}


@formula("eq:clip-norm")
def _():
    for c in (0.5, 50.0):
        p = draw(5)
        p.grad = g = draw(5).detach()
        before = g.clone()
        nn.utils.clip_grad_norm_([p], c)
        yield {"g": before, r"\hat g": p.grad, "c": c}


@formula("eq:clip-value")
def _():
    p = draw(7)
    p.grad = torch.linspace(-2, 1.5, 7, dtype=torch.float64)
    before = p.grad.clone()
    nn.utils.clip_grad_value_([p], 0.6)
    return {"g": before, r"\hat g": p.grad, "c": 0.6, "i": range(1, 8)}
