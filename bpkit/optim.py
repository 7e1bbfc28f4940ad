"""What does an optimizer do to a gradient?  Introduced in chapter 6.

Each class is as short as its derivation: its ``update`` changes a parameter p in place, given the
gradient g and a dictionary with what is remembered from step to step. All but Lion, which PyTorch
lacks, compute what ``torch.optim`` computes. The schedules are functions of the step, from 0.
"""

import math

import torch

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Optimizer", "RMSProp", "cosine", "step_decay",
           "warmup_cosine"]  # fmt: skip


class Optimizer:
    """What all optimizers share: a list of parameters, a rate, and a state for each parameter.

    Args:
        params: tensors that require gradients; changed in place by :meth:`step`.
        lr: the learning rate; you may change it between steps.
        weight_decay: λ. SGD, RMSProp and Adam add λp to the gradient, an L2 penalty λ/2·‖p‖² on
            the loss; AdamW and Lion shrink p itself by the factor 1 - lr·λ (decoupled).

    Raises:
        TypeError: ``params`` is a single tensor.
        ValueError: ``params`` is empty.
    """

    def __init__(self, params, lr, weight_decay=0.0):
        if isinstance(params, torch.Tensor):
            raise TypeError("params is a single tensor, expected several: pass [tensor]")
        self.params = list(params)
        if not self.params:
            raise ValueError("params is empty: an iterator that was used up, or a frozen model?")
        self.lr, self.weight_decay = lr, weight_decay
        self.state = [{} for _ in self.params]

    def zero_grad(self):
        """Forget the gradients, so that the next backward pass does not add to them."""
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        """Change each parameter by its gradient; one whose ``.grad`` is None stays as it is."""
        for p, state in zip(self.params, self.state, strict=True):
            if p.grad is not None:
                self.update(p, p.grad, state)

    def penalised(self, p, g):
        """The gradient of the loss with the L2 penalty added."""
        return g + self.weight_decay * p if self.weight_decay else g


class SGD(Optimizer):
    """v ← βv + g and p ← p - lr·v; with Nesterov's look-ahead p ← p - lr·(g + βv).

    There is no factor 1 - β before g, so under a constant gradient steps grow to lr/(1 - β).

    Sources: Polyak (1964), https://doi.org/10.1016/0041-5553(64)90137-5; Sutskever et al. (2013),
    https://proceedings.mlr.press/v28/sutskever13.html;
    https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html (dampening 0).

    >>> p = torch.tensor([1.0, -2.0], requires_grad=True)
    >>> optimizer = SGD([p], lr=0.25, momentum=0.5)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     (p**2).sum().backward()
    ...     optimizer.step()
    >>> p.tolist()
    [0.0, 0.0]
    """

    def __init__(self, params, lr, momentum=0.0, nesterov=False, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov

    def update(self, p, g, state):
        g = self.penalised(p, g)
        v = state["v"] = self.momentum * state.get("v", 0.0) + g
        p -= self.lr * (g + self.momentum * v if self.nesterov else v)


class RMSProp(Optimizer):
    """s ← αs + (1 - α)g² and p ← p - lr·g/(√s + ε).

    Sources: Tieleman & Hinton (2012), lecture 6e of Neural Networks for Machine Learning;
    https://docs.pytorch.org/docs/stable/generated/torch.optim.RMSprop.html.

    >>> p = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> p.grad = torch.tensor([100.0, -0.01])
    >>> RMSProp([p], lr=0.25, alpha=0.75).step()  # g/√s is ±2 at first, whatever the size of g
    >>> p
    tensor([0.5000, 1.5000], requires_grad=True)
    """

    def __init__(self, params, lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.alpha, self.eps = alpha, eps

    def update(self, p, g, state):
        g = self.penalised(p, g)
        s = state["s"] = self.alpha * state.get("s", 0.0) + (1 - self.alpha) * g**2
        p -= self.lr * g / (s.sqrt() + self.eps)


class Adam(Optimizer):
    """m ← β₁m + (1 - β₁)g, s ← β₂s + (1 - β₂)g², p ← p - lr·m̂/(√ŝ + ε).

    m and s start at 0 and are at first too small, as if 0 had been averaged in with the weight
    β^t; so m̂ = m/(1 - β₁^t) and ŝ = s/(1 - β₂^t). The ε stands outside of the root and is added
    after this correction.

    Sources: Kingma & Ba (2015), algorithm 1, https://arxiv.org/abs/1412.6980;
    https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html.

    >>> p = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> p.grad = torch.tensor([100.0, -0.01])
    >>> Adam([p], lr=0.25).step()  # the first step is the rate, with the gradient's sign
    >>> p
    tensor([0.7500, 1.2500], requires_grad=True)
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.betas, self.eps = betas, eps

    def update(self, p, g, state):
        p -= self.lr * self.direction(self.penalised(p, g), state)

    def direction(self, g, state):
        """m̂/(√ŝ + ε), after g has entered both averages."""
        beta1, beta2 = self.betas
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
        s = state["s"] = beta2 * state.get("s", 0.0) + (1 - beta2) * g**2
        return m / (1 - beta1**t) / ((s / (1 - beta2**t)).sqrt() + self.eps)


class AdamW(Adam):
    """Adam whose weight decay passes the averages by: p ← (1 - lr·λ)p, then Adam's step.

    The paper multiplies λ by the schedule only; PyTorch, and this class, by the whole rate.

    Sources: Loshchilov & Hutter (2019), algorithm 2, https://arxiv.org/abs/1711.05101;
    https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html.

    >>> p = torch.tensor([1.0], requires_grad=True)
    >>> p.grad = torch.tensor([100.0])
    >>> AdamW([p], lr=0.25, weight_decay=0.5).step()  # times 1 - 0.125, then minus the rate
    >>> p
    tensor([0.6250], requires_grad=True)
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, lr, betas, eps, weight_decay)

    def update(self, p, g, state):
        p *= 1 - self.lr * self.weight_decay
        p -= self.lr * self.direction(g, state)


class Lion(Optimizer):
    """p ← (1 - lr·λ)p - lr·sign(β₁m + (1 - β₁)g), then m ← β₂m + (1 - β₂)g.

    Source: Chen et al. (2023), algorithm 2, https://arxiv.org/abs/2302.06675.

    >>> p = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> p.grad = torch.tensor([100.0, -0.01])
    >>> Lion([p], lr=0.25).step()
    >>> p
    tensor([0.7500, 1.2500], requires_grad=True)
    """

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.betas = betas

    def update(self, p, g, state):
        (beta1, beta2), m = self.betas, state.get("m", 0.0)
        p *= 1 - self.lr * self.weight_decay
        p -= self.lr * (beta1 * m + (1 - beta1) * g).sign()
        state["m"] = beta2 * m + (1 - beta2) * g


def step_decay(step, lr, every, factor=0.1):
    """lr, times ``factor`` after each ``every`` steps: torch's StepLR.

    >>> [step_decay(step, lr=8.0, every=2, factor=0.5) for step in range(5)]
    [8.0, 8.0, 4.0, 4.0, 2.0]
    """
    return lr * factor ** (step // every)


def cosine(step, lr, steps, lowest=0.0):
    """From lr at step 0 to ``lowest`` at step ``steps`` along half a cosine, and then no lower.

    Source: Loshchilov & Hutter (2017), equation 5, https://arxiv.org/abs/1608.03983; up to
    ``steps`` as torch's CosineAnnealingLR, which rises again later.

    >>> [round(cosine(step, lr=1.0, steps=4), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return lowest + (lr - lowest) / 2 * (1 + math.cos(math.pi * min(step / steps, 1)))


def warmup_cosine(step, lr, warmup, steps, lowest=0.0):
    """Linear from lr/warmup to lr in ``warmup`` steps, then :func:`cosine` until ``steps``.

    Source: Goyal et al. (2017), section 2.2, https://arxiv.org/abs/1706.02677.

    >>> [round(warmup_cosine(step, 1.0, warmup=2, steps=6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    return cosine(step - warmup, lr, steps - warmup, lowest)
