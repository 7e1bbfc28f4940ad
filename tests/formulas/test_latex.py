r"""Does the evaluator compute what a reader reads, and refuse what it can't be sure of?"""

import numpy as np
import pytest
import torch

from formulas import chains, compare, draw, evaluate, grad, leaf
from formulas.latex import LatexError

N, D, H, C = 5, 3, 7, 2
r = np.random.default_rng(0)
X, W1, W2, b = r.normal(size=(N, D)), r.normal(size=(D, H)), r.normal(size=(H, C)), r.normal(size=C)
Z, M, G, Y, T = (r.normal(size=shape) for shape in [(N, H), (N, H), (N, C), (N, C), (N, C)])
u, v = r.normal(size=4), r.normal(size=4)
x, y, t, z = 0.5, 0.3, 1.0, 0.2


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def softmax(a):
    return np.exp(a) / np.exp(a).sum(axis=1, keepdims=True)


ENV = {
    "X": X, "W_1": W1, "W_2": W2, "b": b, "Z": Z, "M": M, "G": G, "Y": Y, "T": T, "u": u, "v": v,
    "x": x, "y": y, "t": t, "z": z, "N": N, r"\mathbf{1}": np.ones(N), r"\eta": 0.1,
    "P": np.ones((5, 1)), "Q": np.ones(5),
    r"\hat{m}": 0.2, r"\hat v_t": 0.04, r"\epsilon": 1e-8, r"\theta": 1.0, "f": torch.sin,
    "f'": torch.cos, r"\frac{\partial L}{\partial Z_2}": G, r"\nabla_x L": 3.5, "h^{(1)}": 7.0,
    r"\frac{\partial L}{\partial o_j}": u, r"\frac{\partial o_j}{\partial h}": v,
    r"w_{\text{new}}": 1.25, r"\beta_1": 0.9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("tex", "value"),
    [
        # Matrices.
        (r"\frac{1}{N}(Y - T)", (Y - T) / N),
        (r"Z^\top G", Z.T @ G),
        (r"Z^{\top} G", Z.T @ G),
        (r"X^{\top} \left(Z \odot M\right)", X.T @ (Z * M)),
        (r"\sum_{n=1}^{N} G", N * G),
        (r"\mathbf{1}^\top G", G.sum(axis=0)[None]),
        (r"G W_2^\top", G @ W2.T),
        (r"\sigma(z)(1-\sigma(z))", sigmoid(z) * (1 - sigmoid(z))),
        (r"-1.4 \cdot 0.21 \cdot 0.5", -0.147),
        (r"\theta - \eta \frac{\hat m}{\sqrt{\hat v_t}+\epsilon}", 1 - 0.1 * 0.2 / (0.2 + 1e-8)),
        (r"2(y-t)\,y(1-y)\,x", 2 * (y - t) * y * (1 - y) * x),
        (r"\mathbb{1}[Z>0]", (Z > 0) * 1.0),
        (r"(G W_2^\top) \odot \mathbb{1}[Z>0]", (G @ W2.T) * (Z > 0)),
        (r"Z^\top \frac{\partial L}{\partial Z_2}", Z.T @ G),
        (
            r"X^\top\left(\left(\frac{1}{N}(\operatorname{softmax}(Y)-T)\, W_2^\top\right)"
            r"\odot \mathbb{1}[Z>0]\right)",
            X.T @ (((softmax(Y) - T) / N @ W2.T) * (Z > 0)),
        ),
        # Sums and products over an index.
        (r"\sum_{i=1}^{4} u_i v_i", u @ v),
        (r"\sum_i u_i v_i", u @ v),
        (r"2 \sum_{i} u_{i} + x", 2 * u.sum() + x),
        (r"\sum_i \sum_j G_{ij}", G.sum()),
        (r"\sum_{i=1}^{3} u_{i+1} u_i", u[1:] @ u[:-1]),
        (r"\sum_j \frac{\partial L}{\partial o_j} \frac{\partial o_j}{\partial h}", u @ v),
        (r"\prod_{i=1}^{4} u_i", u.prod()),
        (r"\prod_{i=1}^{100} 0.9", 0.9**100),
        (r"\prod_i (u_i v_i)", (u * v).prod()),
        (r"\sum_{k=0}^{3} \beta_1^k", 1 + 0.9 + 0.81 + 0.729),
        (r"u_3 G_{2,1}", u[2] * G[1, 0]),
        # Vectors.
        (r"u^\top v", u @ v),
        (r"u v^\top", np.outer(u, v)),
        (r"u \cdot v", u @ v),
        (r"u \odot v", u * v),
        (r"\lVert u \rVert_2", np.sqrt(u @ u)),
        (r"\lVert u \rVert^2", u @ u),
        (r"\lVert u \rVert_1", np.abs(u).sum()),
        (r"\frac{u}{\lVert u \rVert}", u / np.linalg.norm(u)),
        # Precedence, functions, names.
        (r"-x^2", -(x**2)),
        (r"x^2 y^{10}", x**2 * y**10),
        (r"x y / t", x * y / t),
        (r"2^{-x} + 1", 2**-x + 1),
        (r"|y - t|\,x", abs(y - t) * x),
        (r"\lvert \lvert x - t \rvert - t \rvert", abs(abs(x - t) - t)),
        (r"e^{-x^2/2}", np.exp(-(x**2) / 2)),
        (r"-\left(t \log y + (1-t)\log(1-y)\right)", -np.log(y)),
        (r"\cos x \sin y", np.cos(x) * np.sin(y)),
        (r"f'(x) f(y)", np.cos(x) * np.sin(y)),
        (r"\operatorname{relu}(Z)", np.maximum(Z, 0)),
        (r"\max(x, y)", 0.5),
        (r"\nabla_x L + h^{(1)}", 10.5),
        (r"w_{\text{new}} + \underbrace{2 x}_{\text{a name}} y", 1.25 + 2 * x * y),
        (r"\hat m + \hat{m}", 0.4),
        (r"X W_1 W_2 + b", X @ W1 @ W2 + b),
        (r"16^8", 4294967296.0),
        (r"13{,}781", 13781.0),
        (r"1.3 \times 10^{-5}", 1.3e-5),
        (r"\exp(x)", np.exp(x)),
        (r"x - y - t", x - y - t),
        (r"\mathbb{1}[x > x] + \mathbb{1}[x < x] + \mathbb{1}[x = x]", 1.0),
        (r"\mathbb{1}[z < x] y", y),
        (r"\cos x \cdot y", np.cos(x) * y),
        (r"b W_2^\top", b @ W2.T),
        (r"\prod_n X_n", X.prod(axis=0)),
        (r"\min(u, 0) + \max(0, u)", u),
        (r"\operatorname{softmax}(u)", np.exp(u) / np.exp(u).sum()),
        (r"\sum_{i=2}^{4} u_i i", u[1:] @ [2, 3, 4]),
        (r"\prod_i u_i + x", u.prod() + x),
        (r"\sum_i u_i + \sum_i v_i", u.sum() + v.sum()),
    ],
)
def test_value(tex, value):
    found = evaluate(tex, ENV)
    assert np.shape(found) == np.shape(value)
    np.testing.assert_allclose(found, value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("tex", "why"),
    [
        (r"x * y", r"\* has no value"),
        (r"x + q", "q has no value"),
        (r"x \star y", r"\\star has no value"),
        (r"W_3", "W has no value"),
        (r"\hat x", "has no value"),
        (r"y'", "' has no value"),
        (r"x \cdot -y", "- has no value"),
        (r"x +", "the end has no value"),
        (r"\begin{cases} x \end{cases}", r"\\begin has no value"),
        (r"\frac{\partial L}{\partial x}", "partial has no value"),
        (r"\frac{dL}{dx}", "dL has no value"),
        (r"\frac12", "frac has no value"),
        (r"x^10", "has no value"),
        (r"x^2^3", "has no value"),
        (r"x^u_1", "has no value"),
        (r"x^{u}_1", "has no value"),
        (r"x^{(1)}", "has no value"),
        (r"x {-y}", "{ has no value"),
        (r"\lVert u \rVert_3", "_3 has no value"),
        (r"Z^T G", "which power"),
        (r"(Z^\top Z)^2", "which power"),
        (r"x / y t", "ambiguous"),
        (r"x / y / t", "ambiguous"),
        (r"x 2", "needs"),
        (r"W_12", "needs"),
        (r"x_2", "2 gives no position in 0 axes"),
        (r"u_{12}", "12 gives no position in 1 axes"),
        (r"u_z", "z gives no position"),
        (r"u_0", "no entry 0"),
        (r"\sum_{i=1}^{2} G_{i+12}", "gives no position"),
        (r"\lVert G \rVert", "no vector"),
        (r"u v", "use"),
        (r"Z^\top \times M", "use"),
        (r"Z G", "use"),
        (r"Z + X", "do not fit"),
        (r"P - Q", "both ways"),
        (r"\max(P, Q)", "both ways"),
        (r"\mathbb{1}[P > Q]", "both ways"),
        (r"\sum_i x", "how far"),
        (r"\sum_i u_i b_i", "how far"),
        (r"\sum_i u_{i+1}", "no entry 5"),
        (r"\sum_{i=1}^{5} u_i", "no entry 5"),
        (r"\sum_{i=0}^{3} u_i", "no entry 0"),
        (r"\sum_{i=1}^{5/2} u_i", "from 1 to 2.5"),
        (r"\sum_i \sum_i G_{ii}", "no free letter"),
        (r"\sum_{x=1}^{3} x", "no free letter"),
        (r"\sum_i u_i + v_i", "i gives no position"),
        (r"\prod_i u_i v_i", "brackets"),
        (r"\log x y", "bracket"),
        (r"f x", "brackets"),
        (r"(x + y", "expected"),
        (r"(x, y)", "expected"),
        (r"x + y)", "expected the end"),
        (r"\mathbb{1}[z]", "expected"),
        (r"\underbrace{x + y}_{\text{sum}} t", "expected"),
        (r"\underbrace{x y}_{0.15} t", "expected"),
        (r"\underbrace{x y}_{\text{is 3}} t", "expected"),
    ],
)
def test_refused(tex, why):
    with pytest.raises(LatexError, match=why):
        evaluate(tex, ENV)


def test_error_names_the_place():
    with pytest.raises(LatexError, match=r"q has no value, at 4: 'q y'"):
        evaluate("x + q y", ENV)


def two_layers():
    X, W1, W2 = draw(N, D), draw(D, H), draw(H, C)
    Z = X @ W1
    A = torch.relu(Z)
    O = A @ W2  # noqa: E741
    L = (O**2).sum() / N
    return {
        "X": X, "W_1": W1, "W_2": W2, "Z": Z, "A": A, "O": O, "N": N, "L": L,
        r"\frac{\partial L}{\partial O}": grad(L, O),
        r"\frac{\partial L}{\partial W_1}": grad(L, W1),
        r"\frac{\partial L}{\partial W_2}": grad(L, W2),
    }  # fmt: skip


RIGHT = r"""\begin{aligned}
\frac{\partial L}{\partial O} &= \frac{2}{N} O \\
\frac{\partial L}{\partial W_2} &= A^\top \frac{\partial L}{\partial O} = \frac{2}{N} A^\top O \\
\frac{\partial L}{\partial W_1}
  &= X^\top \left( \frac{\partial L}{\partial O} W_2^\top \odot \mathbb{1}[Z > 0] \right)
\end{aligned}"""


def test_derivation_agrees_with_autograd():
    assert compare(RIGHT, two_layers()) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (r"&= \frac{2}{N} O", r"&= -\frac{2}{N} O"),
        (r"&= \frac{2}{N} O", r"&= \frac{1}{N} O"),
        (r"= \frac{2}{N} A^\top O", r"= \frac{2}{N} A O"),
        (r"A^\top \frac", r"\frac"),
        (r"Z > 0", r"Z < 0"),
        (r"W_2^\top", r"W_2"),
        (r"X^\top", r"A^\top"),
        (r"\odot \mathbb{1}[Z > 0]", ""),
    ],
)
def test_each_mistake_is_found(right, wrong):
    assert right in RIGHT
    assert compare(RIGHT.replace(right, wrong, 1), two_layers())


def test_a_row_is_a_vector():
    env = {"g": G.sum(axis=0), "G": G, r"\mathbf{1}": np.ones(N)}
    assert compare(r"g = \mathbf{1}^\top G \label{eq:row}", env) == []
    assert compare(r"g = G", env)


def test_product_and_odot_bind_alike_from_left_to_right():
    # G W ⊙ M is (G W) ⊙ M here; where that does not fit, the shapes refuse it.
    assert evaluate(r"G W_2^\top \odot M", ENV) == pytest.approx((G @ W2.T) * M)


def test_rows_sides_and_relations():
    assert chains(r"a = b + c") == [[("", "a"), ("=", "b + c")]]
    assert chains(r"\begin{aligned} t &= x w \\ y &= t + b \end{aligned}") == [
        [("", "t"), ("=", "x w")],
        [("", "y"), ("=", "t + b")],
    ]
    (chain,) = chains(r"\begin{align} L &= x \\ &= y \\ &\quad + z. \end{align}")
    assert [relation for relation, _ in chain] == ["", "=", "="]
    assert chain[-1][1].split() == ["y", r"\quad", "+", "z"]
    assert [len(c) for c in chains(r"a = b, \qquad c := d")] == [2, 2]
    assert chains(r"a = b\,.") == [[("", "a"), ("=", "b")]]
    assert [len(c) for c in chains(r"p = \mathbb{1}[y = k]")] == [2]


def test_continued_row_is_one_side():
    env = {"L": 6.0, "x": 1.0, "y": 2.0, "z": 3.0}
    assert compare(r"\begin{aligned} L &= x \\ &\quad + y \\ &\quad + z \end{aligned}", env) == []
    assert compare(r"\begin{aligned} L &= x \\ &\quad + y \\ &\quad - z \end{aligned}", env)


def test_approx_allows_half_a_unit_of_the_last_digit():
    env = {"y": 0.574443, "s": 1.31e-5, "n": 13780.6}
    assert compare(r"y \approx 0.5744", env) == []
    assert compare(r"y \approx 0.5745", env)
    assert compare(r"y \approx 0.57444", env) == []
    assert compare(r"s \approx 1.3 \times 10^{-5}", env) == []
    assert compare(r"s \approx 1.4 \cdot 10^{-5}", env)
    assert compare(r"n \approx 13{,}781", env) == []
    assert compare(r"y = 0.5744", env), "= means equal"
    assert "printed number" in compare(r"y \approx s", env)[0]


def test_equal_means_to_nine_digits():
    env = {"x": 1e6, "y": 1e6 * (1 + 1e-10), "z": 1e6 * (1 + 1e-8)}
    assert compare("x = y", env) == []
    assert compare("x = z", env)
    assert compare("x = x = z", env)
    assert "2 and 3" in compare("u = v", {"u": [1, 2], "v": [1, 3]})[0]
    assert compare("0.1 + 0.2 - 0.3 = 0", {}) == []
    assert compare(r"0.1 + 0.2 - 0.3 = 10^{-12}", {})


def test_the_environment_may_name_what_is_known():
    assert compare("e = 3", {"e": 3}) == []


def test_what_compares_nothing_is_refused():
    assert compare(r"x \le y", ENV)
    assert compare(r"x y", ENV)
    assert compare(r"x \in y", ENV)


def test_free_indices_run_over_their_range():
    X, G = draw(N, D), draw(N, C)
    W = leaf(np.zeros((D, C)))
    L = ((X @ W) * G.detach()).sum()
    env = {
        "X": X, "G": G, "N": N, r"\frac{\partial L}{\partial W_{ij}}": grad(L, W),
        "i": range(1, D + 1), "j": range(1, C + 1),
    }  # fmt: skip
    tex = r"\frac{\partial L}{\partial W_{ij}} = \sum_{n=1}^{N} X_{ni} G_{nj}"
    assert compare(tex, env) == []
    assert len(compare(tex.replace("X_{ni}", "X_{nj}"), env)) == 1
    assert compare(tex, {**env, "i": range(1, 1)})
    assert compare(tex.replace("=1}^{N}", "=2}^{N}"), env)


def test_functions_may_be_torch_functions():
    x = leaf(0.7)
    env = {"x": x, "g": torch.sin, "g'": torch.cos, r"\frac{dy}{dx}": grad(torch.sin(x), x)}
    assert compare(r"\frac{dy}{dx} = g'(x)", env) == []
    assert compare(r"\frac{dy}{dx} = g(x)", env)


def test_not_finite_is_no_agreement():
    assert compare("x = y", {"x": np.nan, "y": np.nan})
    assert compare("x = y", {"x": np.inf, "y": np.inf})
