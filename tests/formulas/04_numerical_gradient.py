"""Are the displayed equations of chapter 4 what the code computes?"""

import math

import torch

from formulas import draw, formula, grad, leaf

H = 0.3


def derivatives(f, at, order):
    """f and its derivatives at a number, by autograd."""
    x = leaf(at)
    values = [f(x)]
    for _ in range(order):
        values += torch.autograd.grad(values[-1], x, create_graph=True)
    return [value.detach() for value in values]


def between(wanted, low, high, f):
    """Where, from low to high, the rising function f takes this value: Taylor's ξ, if it exists."""
    assert f(low) <= wanted <= f(high)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < wanted else (low, middle)
    return low


def one_sided():
    # exp is its own derivative, so ξ can be solved for.
    x = 0.7
    rest = math.exp(x + H) - math.exp(x) - H * math.exp(x)
    xi = between(rest * 2 / H**2, x, x + H, math.exp)
    return {"f": torch.exp, "f'": torch.exp, "f''": torch.exp, "x": x, "h": H, r"\xi": xi}


formula("eq:taylor")(one_sided)
formula("eq:forward")(one_sided)


@formula("eq:both-sides")
def _():
    x, e = 0.7, math.exp
    ahead = e(x + H) - e(x) - H * e(x) - H**2 / 2 * e(x)
    behind = e(x) - H * e(x) + H**2 / 2 * e(x) - e(x - H)
    return {
        "f": torch.exp, "f'": torch.exp, "f''": torch.exp, "f'''": torch.exp, "x": x, "h": H,
        r"\xi_1": between(ahead * 6 / H**3, x, x + H, e),
        r"\xi_2": between(behind * 6 / H**3, x - H, x, e),
    }  # fmt: skip


@formula("eq:central")
def _():
    x = 0.7
    rest = (math.exp(x + H) - math.exp(x - H)) / (2 * H) - math.exp(x)
    xi = between(rest * 6 / H**2, x - H, x + H, math.exp)
    return {"f": torch.exp, "f'": torch.exp, "f'''": torch.exp, "x": x, "h": H, r"\xi": xi}


def bell(x):
    return 1 / (1 + x * x)


def constant(value):
    return lambda _: torch.as_tensor(value, dtype=torch.float64)


def worst_case(scheme):
    """The model of a quotient's error, and its minimum, searched for where its slope is zero."""
    x, epsilon = 2.0, torch.finfo(torch.float32).eps
    f0, _, f2, f3 = (abs(value.item()) for value in derivatives(bell, x, 3))
    rounding = 2 * (epsilon / 2) * f0  # two values, each off by half an epsilon

    def error(h):
        if scheme == "forward":
            return f2 * h / 2 + rounding / h
        return f3 * h**2 / 6 + rounding / (2 * h)

    def slope(h):
        h = leaf(h)
        return grad(error(h), h).item()

    return {
        "E": error, "h": 0.01, "x": x, r"\epsilon": epsilon,
        rf"h_{{\text{{{scheme}}}}}": between(0.0, 1e-6, 1.0, slope),
        "f": constant(f0), "f''": constant(f2), "f'''": constant(f3),
    }  # fmt: skip


for scheme in ("forward", "central"):
    formula(f"eq:{scheme}-error")(lambda scheme=scheme: worst_case(scheme))
    formula(f"eq:{scheme}-step")(lambda scheme=scheme: worst_case(scheme))


@formula("eq:swish")
def _():
    x = leaf(-0.8)
    return {"x": x, r"\frac{d}{dx} x \, \sigma(x)": grad(x * torch.sigmoid(x), x)}


@formula("eq:relative-error")
def _():
    for a, n in ((0.3, -0.7), (-2.0, -1.5)):
        larger = a if abs(a) > abs(n) else n
        yield {"a": a, "n": n, "r": abs((a - n) / larger)}


@formula("eq:floor")
def _():
    # What one spacing of float64 numbers near f(x), as seen by torch.nextafter, does to a quotient.
    x = torch.tensor(1.0, dtype=torch.float64)  # f(1) = 2: a power of two
    value = 2 * x
    spacing = torch.nextafter(value, value + 1) - value
    return {"f": lambda x: 2 * x, "x": x, "h": 1e-5, r"\epsilon": 2.0**-52, "s": spacing / 1e-5}


@formula("eq:complex")
def _():
    def f(x):
        return x**4 - 2 * x**3 + 0.5 * x**2 - x + 3

    _, first, _, third = map(constant, derivatives(f, 0.7, 3))
    imaginary = f(complex(0.7, H)).imag
    symbols = {"f'": first, "f'''": third, "x": 0.7, "h": H}
    return {r"\operatorname{Im} f(x + ih)": imaginary, **symbols}


@formula("eq:directional")
def _():
    theta, v, h = draw(5), draw(5), leaf(0.0)

    def loss(p):
        return torch.sin(p).prod() + (p**2).sum()

    return {
        r"\phi'(0)": grad(loss(theta.detach() + h * v.detach()), h),
        r"\frac{\partial L}{\partial \theta_i}": grad(loss(theta), theta),
        "v": v,
    }


@formula("eq:block")
def _():
    X, W, b = draw(5, 3), draw(3, 3), draw(3)
    return {"X": X, "W": W, "b": b, "Y": (X @ W + b).clamp(min=0) + X}
