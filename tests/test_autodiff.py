"""bpkit.autodiff against PyTorch and against central differences, in float64."""

import doctest
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import bpkit.autodiff
from bpkit.autodiff import Tensor, cross_entropy, topological, unbroadcast
from bpkit.data import digits

# Each operation on Tensor, its twin in torch, and the shapes of its operands. Operands are positive
# where the function asks for it, and otherwise of both signs and away from the kink of relu.
OPERATIONS = {
    "add": (lambda a, b: a + b, lambda a, b: a + b, [(5, 3), (5, 3)]),
    "sub": (lambda a, b: a - b, lambda a, b: a - b, [(5, 3), (5, 3)]),
    "mul": (lambda a, b: a * b, lambda a, b: a * b, [(5, 3), (5, 3)]),
    "div": (lambda a, b: a / b, lambda a, b: a / b, [(5, 3), (5, 3)]),
    "neg": (lambda a: -a, lambda a: -a, [(5, 3)]),
    "pow 2": (lambda a: a**2, lambda a: a**2, [(5, 3)]),
    "pow -1.5": (lambda a: a**-1.5, lambda a: a**-1.5, [(5, 3), "positive"]),
    "pow tensor": (lambda a, b: a**b, lambda a, b: a**b, [(5, 3), (3,), "positive"]),
    "number - a": (lambda a: 2 - a, lambda a: 2 - a, [(5, 3)]),
    "number / a": (lambda a: 2 / a, lambda a: 2 / a, [(5, 3)]),
    "number ** a": (lambda a: 2**a, lambda a: 2**a, [(5, 3)]),
    "matmul": (lambda a, b: a @ b, lambda a, b: a @ b, [(5, 3), (3, 7)]),
    "matrix @ vector": (lambda a, b: a @ b, lambda a, b: a @ b, [(5, 3), (3,)]),
    "vector @ matrix": (lambda a, b: a @ b, lambda a, b: a @ b, [(3,), (3, 7)]),
    "vector @ vector": (lambda a, b: a @ b, lambda a, b: a @ b, [(3,), (3,)]),
    "batched matmul": (lambda a, b: a @ b, lambda a, b: a @ b, [(2, 5, 3), (2, 3, 7)]),
    "broadcast matmul": (lambda a, b: a @ b, lambda a, b: a @ b, [(2, 1, 5, 3), (4, 3, 7)]),
    "vector @ batch": (lambda a, b: a @ b, lambda a, b: a @ b, [(3,), (2, 3, 7)]),
    "sum": (lambda a: a.sum(), lambda a: a.sum(), [(5, 3)]),
    "sum axis 0": (lambda a: a.sum(axis=0), lambda a: a.sum(0), [(5, 3)]),
    "sum axis -1": (lambda a: a.sum(axis=-1), lambda a: a.sum(-1), [(5, 3)]),
    "sum axes": (lambda a: a.sum(axis=(0, -1)), lambda a: a.sum((0, -1)), [(5, 3, 2)]),
    "sum keepdims": (lambda a: a.sum(1, True), lambda a: a.sum(1, True), [(5, 3)]),
    "mean": (lambda a: a.mean(), lambda a: a.mean(), [(5, 3)]),
    "mean axis": (lambda a: a.mean(axis=1), lambda a: a.mean(1), [(5, 3)]),
    "mean keepdims": (lambda a: a.mean((0, 2), True), lambda a: a.mean((0, 2), True), [(5, 3, 2)]),
    "max": (lambda a: a.max(), lambda a: a.amax(), [(5, 3)]),
    "max axis": (lambda a: a.max(axis=0), lambda a: a.amax(0), [(5, 3)]),
    "max keepdims": (lambda a: a.max((0, 2), True), lambda a: a.amax((0, 2), True), [(5, 3, 2)]),
    "exp": (Tensor.exp, torch.exp, [(5, 3)]),
    "log": (Tensor.log, torch.log, [(5, 3), "positive"]),
    "sqrt": (Tensor.sqrt, torch.sqrt, [(5, 3), "positive"]),
    "tanh": (Tensor.tanh, torch.tanh, [(5, 3)]),
    "sigmoid": (Tensor.sigmoid, torch.sigmoid, [(5, 3)]),
    "relu": (Tensor.relu, torch.relu, [(5, 3)]),
    "reshape": (lambda a: a.reshape(3, -1), lambda a: a.reshape(3, -1), [(5, 3)]),
    "reshape tuple": (lambda a: a.reshape((15,)), lambda a: a.reshape((15,)), [(5, 3)]),
    "T": (lambda a: a.T, lambda a: a.T, [(5, 3)]),
    "transpose": (lambda a: a.transpose(1, 2, 0), lambda a: a.permute(1, 2, 0), [(5, 3, 2)]),
    "transpose -1": (lambda a: a.transpose(-1, 0, 1), lambda a: a.permute(-1, 0, 1), [(5, 3, 2)]),
    "index row": (lambda a: a[1], lambda a: a[1], [(5, 3)]),
    "index slice": (lambda a: a[1:4, ::2], lambda a: a[1:4, ::2], [(5, 3)]),
    "index new axis": (lambda a: a[..., None], lambda a: a[..., None], [(5, 3)]),
    "index repeated": (lambda a: a[[0, 2, 2, 2]], lambda a: a[[0, 2, 2, 2]], [(5, 3)]),
    "index pairs": (lambda a: a[[0, 0], [1, 1]], lambda a: a[[0, 0], [1, 1]], [(5, 3)]),
    "index mask": (lambda a: a[MASK], lambda a: a[MASK], [(5, 3)]),
    "log_softmax": (lambda a: a.log_softmax(), lambda a: a.log_softmax(-1), [(5, 3)]),
    "log_softmax 0": (lambda a: a.log_softmax(axis=0), lambda a: a.log_softmax(0), [(5, 3)]),
    "cross_entropy": (
        lambda a: cross_entropy(a, [2, 0, 1, 1, 0]),
        lambda a: torch.nn.functional.cross_entropy(a, torch.tensor([2, 0, 1, 1, 0])),
        [(5, 3)],
    ),
}
MASK = np.arange(15).reshape(5, 3) % 4 == 0


def values(shapes, seed=0):
    """One array per shape with entries of size 0.3 to 1.8, so no zero hides a wrong factor."""
    rng = np.random.default_rng(seed)
    positive = "positive" in shapes
    arrays = [rng.uniform(0.3, 1.8, shape) for shape in shapes if shape != "positive"]
    return [a if positive else a * rng.choice([-1, 1], a.shape) for a in arrays]


def leaves(arrays):
    ours = [Tensor(a, requires_grad=True) for a in arrays]
    return ours, [torch.tensor(a, requires_grad=True) for a in arrays]


def close(ours, theirs, rtol=1e-12, atol=0.0):
    """Same shape, same type, and equal up to rounding relative to the largest element."""
    theirs = theirs.detach().numpy()
    assert isinstance(ours, np.ndarray)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    scale = np.abs(theirs).max(initial=1e-300, where=np.isfinite(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol + rtol * scale)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_agrees_with_torch(name):
    ours, theirs, shapes = OPERATIONS[name]
    mine, other = leaves(values(shapes))
    out, expected = ours(*mine), theirs(*other)
    close(out.data, expected)
    (upstream,) = values([out.shape], seed=1)
    out.backward(upstream)
    expected.backward(torch.tensor(upstream))
    for a, b in zip(mine, other, strict=True):
        close(a.grad, b.grad)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_agrees_with_central_differences(name):
    operation, _, shapes = OPERATIONS[name]
    arrays = values(shapes)
    mine, _ = leaves(arrays)
    out = operation(*mine)
    (upstream,) = values([out.shape], seed=1)
    out.backward(upstream)

    def loss(position, array):
        changed = [Tensor(a) for a in [*arrays[:position], array, *arrays[position + 1 :]]]
        return (operation(*changed).data * upstream).sum()

    h = 1e-6
    for position, leaf in enumerate(mine):
        for index in np.ndindex(leaf.shape):
            step = np.zeros(leaf.shape)
            step[index] = h
            above, below = (loss(position, leaf.data + sign * step) for sign in (1, -1))
            assert leaf.grad[index] == pytest.approx((above - below) / (2 * h), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_operand_needs_a_gradient_the_other_does_not(name):
    operation, theirs, shapes = OPERATIONS[name]
    arrays = values(shapes)
    for wanted in range(len(arrays)):
        mine = [Tensor(a, requires_grad=i == wanted) for i, a in enumerate(arrays)]
        other = [torch.tensor(a, requires_grad=i == wanted) for i, a in enumerate(arrays)]
        operation(*mine).sum().backward()
        theirs(*other).sum().backward()
        close(mine[wanted].grad, other[wanted].grad)
        assert all(t.grad is None for i, t in enumerate(mine) if i != wanted)


@pytest.mark.parametrize("name", OPERATIONS)
def test_derivatives_hold_no_array_beyond_the_saved_ones(name):
    operation, _, shapes = OPERATIONS[name]
    mine, _ = leaves(values(shapes))
    for node in topological(operation(*mine)):
        for _, vjp in node._edges:
            held = [cell.cell_contents for cell in (vjp and vjp.__closure__) or ()]
            while held:
                value = held.pop()
                assert not isinstance(value, np.ndarray | Tensor)
                if isinstance(value, types.FunctionType):
                    held += [cell.cell_contents for cell in value.__closure__ or ()]


def test_examples():
    assert doctest.testmod(bpkit.autodiff).failed == 0


class TestValues:
    def test_data_is_copied_to_float64(self):
        array = np.ones(3)
        t = Tensor(array)
        array[0] = 7
        assert t.data[0] == 1
        assert Tensor([1, 2]).data.dtype == np.float64
        assert Tensor(True).data.dtype == np.float64
        assert Tensor(torch.ones(2)).shape == (2,)

    def test_results_share_no_memory_with_operands(self):
        t = Tensor(np.ones((2, 3)), requires_grad=True)
        for view in (t.T, t.reshape(6), t[0], t.transpose(0, 1)):
            assert not np.shares_memory(view.data, t.data)

    @pytest.mark.parametrize("data", ["text", None, 1j, [Tensor(1.0)], Tensor(1.0)])
    def test_other_data_is_refused(self, data):
        with pytest.raises(TypeError, match="Tensor"):
            Tensor(data)

    def test_integer_dtype_is_refused(self):
        with pytest.raises(TypeError, match="cannot keep int64 as int64"):
            Tensor([1, 2], requires_grad=True, dtype=np.int64)

    def test_numpy_on_the_left_makes_a_tensor(self):
        t = Tensor([1.0, 2.0, 3.0], requires_grad=True)
        matrix = np.arange(6.0).reshape(2, 3)
        results = [np.float64(2) * t, matrix * t, matrix - t, matrix / t, matrix @ t, matrix**t]
        assert all(isinstance(result, Tensor) and result.requires_grad for result in results)
        np.testing.assert_array_equal((matrix @ t).data, matrix @ t.data)

    def test_operands_keep_their_order(self):
        two_minus_t = 2 - Tensor(5.0, requires_grad=True)
        assert [p.item() for p in two_minus_t.parents] == [2, 5]

    def test_numpy_functions_do_not_swallow_the_history(self):
        t = Tensor([1.0], requires_grad=True)
        for function in (np.exp, np.array, lambda t: np.dot(np.ones(1), t)):
            with pytest.raises(TypeError):
                function(t)

    @pytest.mark.parametrize(
        "operation",
        [
            lambda t: np.float64(2) * t,
            lambda t: t / 3 + 2.0 - t**2,
            lambda t: t.mean() + t.max() + t.sum(),
            lambda t: t.sigmoid() + t.tanh() + t.relu() + t.exp(),
            lambda t: t.log_softmax() @ np.ones(2),
            lambda t: t[[0, 0, 1]] + np.arange(3.0),
        ],
    )
    def test_float32_stays_float32(self, operation):
        t = Tensor([0.5, 1.5], requires_grad=True, dtype=np.float32)
        out = operation(t)
        assert out.data.dtype == np.float32
        out.sum().backward()
        assert t.grad.dtype == np.float32

    def test_each_leaf_gets_a_gradient_of_its_own_dtype(self):
        a = Tensor([0.5, 1.5], requires_grad=True, dtype=np.float32)
        b = Tensor([0.5, 1.5], requires_grad=True)
        (a * b).max().backward()
        assert (a.grad.dtype, b.grad.dtype) == (np.float32, np.float64)

    def test_iteration_and_repr(self):
        t = Tensor([1.0, 2.0], requires_grad=True, name="w")
        assert [row.item() for row in t] == [1, 2]
        assert repr(t) == "Tensor([1., 2.], name='w', requires_grad=True)"
        assert repr(t * 2) == "Tensor([2., 4.], operation='mul', requires_grad=True)"
        assert repr(Tensor(3)) == "Tensor(3.)"
        with pytest.raises(TypeError):
            list(Tensor(3.0))

    def test_extreme_values_neither_overflow_nor_warn(self):
        x = np.array([-1000.0, -40.0, 0.0, 40.0, 1000.0])
        with np.errstate(all="raise", under="ignore"):
            t = Tensor(x, requires_grad=True)
            t.sigmoid().sum().backward()
            close(t.grad, torch.sigmoid(torch.tensor(x)) * torch.sigmoid(-torch.tensor(x)), 1e-10)
            assert t.sigmoid().data[1] == pytest.approx(np.exp(-40), rel=1e-12)
            assert np.isfinite(t.log_softmax().data).all()

    def test_a_result_without_gradient_has_no_history(self):
        out = Tensor([1.0]) * Tensor([2.0])
        assert (out.requires_grad, out.parents, out.saved, out.operation) == (False, (), {}, "")


class TestAwkwardCases:
    def test_double_use(self):
        x = Tensor(3.0, requires_grad=True)
        (x * x).backward()
        assert x.grad == 6

    def test_diamond(self):
        a = Tensor(1.0, requires_grad=True)
        b = a + a
        c = b + b
        c.backward()
        assert a.grad == 4

    def test_reuse_at_several_depths(self):
        (a,), (b,) = leaves(values([(5, 3)]))

        def f(x):
            y = x * 2
            z = (y + x).tanh()
            return (z * y + x / (z * z + 1) + z).sum()

        f(a).backward()
        f(b).backward()
        close(a.grad, b.grad)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ((), (5, 3)),
            ((1,), (5, 3)),
            ((1, 1), (5, 3)),
            ((3,), (5, 3)),
            ((1, 3), (5, 3)),
            ((5, 1), (5, 3)),
            ((5, 1), (1, 3)),
            ((5, 1), (3,)),
            ((2, 1, 3), (5, 1)),
            ((), ()),
            ((1,), ()),
            ((0, 3), (1, 3)),
            ((0,), (1,)),
            ((1, 1), (2, 0)),
        ],
    )
    @pytest.mark.parametrize("operation", ["add", "sub", "mul", "div"])
    def test_broadcasting_on_either_side(self, operation, first, second):
        ours, theirs, _ = OPERATIONS[operation]
        for shapes in ([first, second], [second, first]):
            mine, other = leaves(values(shapes))
            (ours(*mine) * ours(*mine)).sum().backward()
            (theirs(*other) * theirs(*other)).sum().backward()
            for a, b in zip(mine, other, strict=True):
                close(a.grad, b.grad)

    @pytest.mark.parametrize("operation", ["sum", "mean", "exp", "relu", "T", "neg"])
    def test_empty_arrays(self, operation):
        ours, theirs, _ = OPERATIONS[operation]
        a, b = Tensor(np.ones((0, 3)), requires_grad=True), torch.ones(0, 3, dtype=torch.float64)
        b.requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's "Mean of empty slice"
            ours(a).sum().backward()
        theirs(b).sum().backward()
        close(a.grad, b.grad)

    def test_matmul_over_an_empty_inner_axis(self):
        a, b = Tensor(np.ones((2, 0)), requires_grad=True), Tensor(np.ones((0, 3)), True)
        out = a @ b
        out.sum().backward()
        assert (out.data == np.zeros((2, 3))).all()
        assert (a.grad.shape, b.grad.shape) == ((2, 0), (0, 3))

    def test_zero_dim(self):
        (a,), (b,) = leaves([np.array(0.7)])
        (a.sum().mean().max().T.reshape(1)[0].exp()).backward()
        b.exp().backward()
        close(a.grad, b.grad)

    def test_ties_share_evenly(self):
        (a,), (b,) = leaves([np.array([[2.0, 5.0, 5.0], [1.0, 1.0, 1.0]])])
        (a.max(axis=1) * np.array([1.0, 6.0])).sum().backward()
        (b.amax(1) * torch.tensor([1.0, 6.0])).sum().backward()
        close(a.grad, b.grad)
        assert a.grad.tolist() == [[0, 0.5, 0.5], [2, 2, 2]]

    def test_relu_at_zero_is_flat(self):
        (a,), (b,) = leaves([np.array([-1.0, 0.0, 2.0])])
        a.relu().sum().backward()
        b.relu().sum().backward()
        close(a.grad, b.grad)

    @pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 0.5])
    def test_power_at_zero(self, exponent):
        (a, n), (b, m) = leaves([np.array([0.0, 2.0]), np.array(exponent)])
        with np.errstate(divide="ignore"):
            (a**n).sum().backward()
        (b**m).sum().backward()
        close(a.grad, b.grad)
        close(n.grad, m.grad)

    def test_a_constant_on_the_way(self):
        x = Tensor(2.0, requires_grad=True)
        constant = Tensor(3.0) * Tensor(5.0)
        (x * constant + constant).backward()
        assert x.grad == 15
        assert constant.grad is None

    def test_an_unused_leaf_has_no_gradient(self):
        used, unused = Tensor(1.0, requires_grad=True), Tensor(1.0, requires_grad=True)
        (used * 2).backward()
        assert unused.grad is None

    def test_a_leaf_is_its_own_gradient(self):
        x = Tensor(2.0, requires_grad=True)
        x.backward()
        assert x.grad == 1

    @pytest.mark.parametrize("step", [lambda t: t * 1.0001, lambda t: t + t * 0.5, Tensor.tanh])
    def test_deep_chain(self, step):
        x = Tensor(0.5, requires_grad=True)
        y = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        deep, expected = x, y
        for _ in range(10_000):
            deep, expected = step(deep), (torch.tanh if step is Tensor.tanh else step)(expected)
            if deep.item() > 1e100:
                deep, expected = deep * 1e-100, expected * 1e-100
        deep.backward()
        expected.backward()
        close(x.grad, y.grad, 1e-9)

    def test_deep_graph_is_released_without_recursion(self):
        x = Tensor(1.0, requires_grad=True)
        deep = x + 1
        first = weakref.ref(deep)
        for _ in range(100_000):
            deep = deep + 1
        deep.backward()
        assert x.grad == 1
        del deep  # no cycle: the graph goes at once, without the garbage collector
        assert first() is None

    def test_many_paths_are_not_walked_one_by_one(self):
        y = x = Tensor(1.0, requires_grad=True)
        for _ in range(100):
            y = y + y
        y.backward()
        assert x.grad == 2.0**100


class TestRepeatedBackward:
    def test_two_graphs_accumulate_in_the_leaf(self):
        x = Tensor([1.0, 2.0], requires_grad=True)
        for _ in range(3):
            (x * x).sum().backward()
        assert x.grad.tolist() == [6, 12]

    def test_retained_graph_starts_from_zero_inside(self):
        (a,), (b,) = leaves(values([(5, 3)]))
        loss, expected = (a.exp() * a).tanh().sum(), (b.exp() * b).tanh().sum()
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
            expected.backward(retain_graph=retain)
            close(a.grad, b.grad)

    def test_interior_gradients_are_kept_on_request_only(self):
        (a,), (b,) = leaves(values([(5, 3)]))
        hidden, h = a.exp(), b.exp()
        h.retain_grad()
        loss, expected = (hidden * 2).sum(), (h * 2).sum()
        loss.backward(retain_graph=True)
        assert hidden.grad is None
        hidden.retain_grad()
        a.grad = None
        for _ in range(2):  # a retained gradient accumulates, as in torch
            loss.backward(retain_graph=True)
            expected.backward(retain_graph=True)
        close(hidden.grad, h.grad)
        close(a.grad, b.grad)

    def test_saved_values_are_freed(self):
        x = Tensor([1.0, 2.0], requires_grad=True)
        product, total = x * x, (x + 1).sum()
        assert set(product.saved) == {"a", "b"}
        assert product.saved["a"] is x.data
        product.backward(np.ones(2), retain_graph=True)
        assert set(product.saved) == {"a", "b"}
        product.backward(np.ones(2))
        assert product.saved is None
        total.backward()
        total.backward()  # nothing was saved, so nothing is missing; torch agrees

    def test_second_backward_through_freed_values(self):
        x = Tensor([1.0, 2.0], requires_grad=True)
        hidden = x * x
        hidden.sum().backward()
        before = x.grad.copy()
        with pytest.raises(RuntimeError, match=r"'mul' a second time.*retain_graph=True"):
            (hidden.sum() + x.sum()).backward()
        np.testing.assert_array_equal(x.grad, before)

    def test_only_what_a_derivative_needs_is_saved(self):
        x, constant = Tensor([1.0, 2.0], requires_grad=True), Tensor([3.0, 4.0])
        # torch: MulBackward0 keeps `other` if and only if `self` requires a gradient
        assert set((x * constant).saved) == {"b"}
        assert set((constant * x).saved) == {"a"}
        assert set(x.exp().saved) == {"out"}
        assert set(x.log().saved) == {"a"}
        assert set(x[[0, 0]].saved) == {"positions"}
        assert (x + constant).saved == {}
        assert isinstance(x[0].saved["positions"], np.ndarray)
        y = x.tanh()
        assert y.saved["out"] is y.data


class TestAliasing:
    def test_leaves_do_not_share_a_gradient(self):
        a, b = Tensor([1.0, 2.0], requires_grad=True), Tensor([1.0, 2.0], requires_grad=True)
        upstream = np.ones(2)
        (a + b).backward(upstream)
        a.grad += 5
        assert b.grad.tolist() == [1, 1]
        assert upstream.tolist() == [1, 1]

    def test_gradients_are_writable_and_their_own(self):
        leaf = Tensor(np.ones((2, 3)), requires_grad=True)
        hidden = leaf.T
        hidden.retain_grad()
        hidden.sum().backward()
        leaf.grad[0, 0] = 9
        hidden.grad *= 2
        assert hidden.grad.tolist() == [[2, 2]] * 3
        assert leaf.grad.tolist() == [[9, 1, 1], [1, 1, 1]]

    def test_an_earlier_gradient_stays_as_it_was(self):
        x = Tensor([1.0], requires_grad=True)
        (x * 2).sum().backward()
        first = x.grad
        (x * 2).sum().backward()
        assert (first, x.grad) == (np.array([2.0]), np.array([4.0]))


class TestErrors:
    def test_non_scalar_needs_a_gradient(self):
        with pytest.raises(RuntimeError, match=r"shape \(2,\).*gradient="):
            Tensor([1.0, 2.0], requires_grad=True).exp().backward()
        one = Tensor([[1.0]], requires_grad=True)
        one.exp().backward()  # a single number, whatever its shape, as in torch
        assert one.grad.shape == (1, 1)

    @pytest.mark.parametrize("gradient", [1.0, np.ones((1, 3)), np.ones(2), np.ones((3, 1))])
    def test_gradient_of_another_shape(self, gradient):
        with pytest.raises(ValueError, match=r"gradient has shape .*tensor has \(3,\)"):
            Tensor(np.ones(3), requires_grad=True).backward(gradient)

    def test_gradient_may_be_a_list_or_a_tensor(self):
        for gradient in ([1, 2], Tensor([1.0, 2.0])):
            x = Tensor([3.0, 4.0], requires_grad=True)
            (x * 1).backward(gradient)
            assert x.grad.tolist() == [1, 2]

    def test_nothing_requires_a_gradient(self):
        for action in (Tensor.backward, Tensor.retain_grad):
            with pytest.raises(RuntimeError, match="no requires_grad=True leads to"):
                action(Tensor(1.0) * 2)

    @pytest.mark.parametrize(
        "change",
        [
            lambda w: w.data.__setitem__(0, 5.0),
            lambda w: w.data.__isub__(0.1),
            lambda w: w.data.sort(),
            lambda w: np.negative(w.data[1:], out=w.data[1:]),
            lambda w: w.data[::-1].__setitem__(slice(None), w.data.copy()),
        ],
    )
    def test_a_saved_value_changed_in_place(self, change):
        w, x = Tensor([2.0, 1.0], requires_grad=True), Tensor([3.0, 4.0], requires_grad=True)
        loss = (w * x).sum() + x.sum()
        change(w)
        with pytest.raises(RuntimeError, match=r"'mul' saved a \(2,\).*changed in place"):
            loss.backward()
        assert (w.grad, x.grad) == (None, None)

    def test_a_saved_result_changed_in_place(self):
        x = Tensor([2.0, 1.0], requires_grad=True)
        y = x.exp()
        y.data += 1
        with pytest.raises(RuntimeError, match="'exp' saved out"):
            y.sum().backward()

    def test_harmless_changes_pass(self):
        w, x = Tensor([2.0, 1.0], requires_grad=True), Tensor([3.0, 4.0])
        loss = (w * x + w).sum()  # needs x, not w
        w.data -= 1
        loss.backward()
        assert w.grad.tolist() == [4, 5]
        loss = (w * w).sum()
        w.data = w.data - 1  # the saved array is still the old one
        w.grad = None
        loss.backward()
        assert w.grad.tolist() == [2, 0]

    @pytest.mark.parametrize(
        ("first", "second"), [((5, 3), (5, 3)), ((5, 3), (2,)), ((3,), (2, 3)), ((), (3,))]
    )
    def test_matmul_names_both_shapes(self, first, second):
        with pytest.raises(ValueError, match=r"matmul: .* @ .*inner sizes"):
            Tensor(np.ones(first)) @ Tensor(np.ones(second))

    @pytest.mark.parametrize(
        ("targets", "message"),
        [
            ([0, 3], r"0\.\.2"),
            ([0, -1], r"0\.\.2"),
            ([0.0, 1.0], "float64"),
            ([[0], [1]], r"\(2, 1\)"),
            ([0], r"\(1,\)"),
        ],
    )
    def test_cross_entropy_targets(self, targets, message):
        with pytest.raises(ValueError, match=message):
            cross_entropy(Tensor(np.ones((2, 3))), targets)

    def test_a_unary_function_takes_no_second_operand(self):
        other = Tensor([7.0])
        with pytest.raises((TypeError, ValueError)):
            Tensor([1.0]).exp(other)
        assert other.item() == 7


def test_topological_puts_parents_first():
    x = Tensor(1.0, requires_grad=True, name="x")
    y = x * 2
    z = y + x * y
    order = topological(z)
    assert order[-1] is z
    assert len(order) == len(set(order)) == 5
    for position, node in enumerate(order):
        assert all(parent in order[:position] for parent in node.parents)


def test_watch_sees_every_step():
    x, w, b = (Tensor(v, requires_grad=True, name=n) for v, n in ((2, "x"), (3, "w"), (1, "b")))
    loss = (x * w + b - 4) ** 2
    steps = []

    def watch(node, gradient, contributions):
        label = node.name or node.operation
        assert node.saved in ({}, None)  # what the step used is gone after it
        sent = [(p.name or p.operation, float(part)) for p, part in contributions]
        steps.append((label, float(gradient), sent))

    loss.backward(watch=watch)
    assert steps == [
        ("pow", 1, [("sub", 6)]),
        ("sub", 6, [("add", 6)]),
        ("add", 6, [("mul", 6), ("b", 6)]),
        ("b", 6, []),
        ("mul", 6, [("x", 18), ("w", 12)]),
        ("w", 12, []),
        ("x", 18, []),
    ]


@pytest.mark.parametrize(
    ("shape", "axes"), [((), (0, 1)), ((3,), (0,)), ((1, 3), (0,)), ((5, 1), (1,)), ((1,), (0, 1))]
)
def test_unbroadcast(shape, axes):
    gradient = np.arange(15.0).reshape(5, 3)
    expected = gradient.sum(axis=axes).reshape(shape)
    np.testing.assert_array_equal(unbroadcast(gradient, shape), expected)


# The same examples in every run; a failure is shrunk, and shown within a minute.
REPEATABLE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)
# Shapes of which any two broadcast against each other; rows and columns twice as often.
SHAPES = [(), (1,), (3,), (1, 3), (1, 3), (5, 1), (5, 1), (5, 3), (2, 1, 3), (2, 5, 3)]
BINARY = ["add", "sub", "mul", "div", "pow"]
UNARY = ["neg", "exp", "log", "sqrt", "tanh", "sigmoid", "relu", "square"]
REDUCTIONS = ["sum", "mean", "max"]
OTHERS = ["matmul", "reshape", "transpose", "index", "log_softmax", "cross_entropy"]
STEPS = [*BINARY * 4, *UNARY, *REDUCTIONS * 2, *OTHERS, *["matmul"] * 3, "index"]
PATTERNS = {"equal", "zero-dim", "both stretched"} | {
    f"{side} {kind}"
    for side in ("left", "right")
    for kind in ("scalar", "row", "column", "missing axes")
}


def broadcasting_patterns(left, right):
    """What NumPy does to bring two shapes together: a set of names out of PATTERNS."""
    if left == right:
        return {"equal" if left else "zero-dim"}
    found, stretched = set(), set()
    for side, shape, other in (("left", left, right), ("right", right, left)):
        if shape == ():
            found.add(f"{side} scalar")
            continue
        if len(shape) < len(other):
            found.add(f"{side} missing axes")
        for axis in range(1, min(len(shape), len(other)) + 1):
            if shape[-axis] == 1 < other[-axis]:
                stretched.add(side)
                if axis < 3:
                    found.add(f"{side} {'column' if axis == 1 else 'row'}")
    return found | ({"both stretched"} if len(stretched) == 2 else set())


class RandomGraph:
    """The same random computation in both engines; hypothesis chooses, `drawn` keeps account."""

    def __init__(self, draw, drawn):
        self.draw, self.drawn = draw, drawn
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.leaves, self.nodes = [], []
        for shape in draw(st.lists(st.sampled_from(SHAPES), min_size=2, max_size=4)):
            self.leaf(shape, requires_grad=not self.leaves or draw(st.integers(0, 4)) > 0)
        for _ in range(draw(st.integers(2, 8))):
            self.step(draw(st.sampled_from(STEPS)))

    def leaf(self, shape, requires_grad=True):
        array = self.rng.uniform(-2, 2, shape)
        pair = Tensor(array, requires_grad), torch.tensor(array, requires_grad=requires_grad)
        self.leaves.append(pair)
        self.nodes.append(pair)
        return pair

    def root(self):
        """The last node, plus a number to which every other node contributes: none is idle."""
        ours, theirs = self.nodes[-1]
        for a, b in self.nodes[:-1]:
            weights = self.rng.uniform(-1, 1, a.shape)
            ours, theirs = ours + (a * weights).sum(), theirs + (b * torch.tensor(weights)).sum()
        return ours, theirs

    def pick(self, fits=lambda shape: True):
        fitting = [node for node in self.nodes if fits(node[0].shape)]
        # The newest first: hypothesis prefers small numbers, and chains make deeper graphs.
        return fitting[-1 - self.draw(st.integers(0, len(fitting) - 1))] if fitting else None

    def add(self, name, ours, theirs):
        """Keep a result, scaled down where a long chain would overflow."""
        largest = theirs.detach().abs().max().item()
        factor = 4 / largest if largest > 4 else 1.0
        self.nodes.append((ours * factor, theirs * factor) if factor < 1 else (ours, theirs))
        self.drawn.add(name)

    def step(self, name):
        a, b = self.pick()
        if name in BINARY:
            c, d = self.pick(lambda shape: compatible(shape, a.shape))
            self.drawn.update((name, tag) for tag in broadcasting_patterns(a.shape, c.shape))
            self.add(name, binary(name, a, c), binary(name, b, d))
        elif name == "relu":
            # A value within rounding of the kink may fall on either side in either engine.
            shift = next(s for s in np.arange(1, 9) / 7 if (b + s).abs().min() > 1e-6)
            self.add(name, (a + shift).relu(), (b + shift).relu())
        elif name in UNARY:
            self.add(name, unary(name, a), unary(name, b))
        elif name in REDUCTIONS:
            self.reduce(name, a, b)
        elif name == "matmul":
            self.matmul()
        elif name == "reshape":
            shape = self.draw(st.sampled_from([(-1,), (1, -1), (-1, 1), a.shape[::-1]]))
            self.add(name, a.reshape(shape), b.reshape(shape))
        elif name == "transpose":
            order = self.draw(st.permutations(range(a.ndim)))
            self.add(name, a.transpose(*order), b.permute(order))
        elif name == "index":
            index = self.index(a.shape)
            self.add(name, a[index], b[index])
        elif name == "log_softmax" and a.ndim:
            axis = self.draw(st.integers(-a.ndim, a.ndim - 1))
            self.add(name, a.log_softmax(axis), b.log_softmax(axis))
        elif name == "cross_entropy":
            classes = a.shape[-1] if a.ndim else 1
            a, b = a.reshape(-1, classes), b.reshape(-1, classes)
            targets = self.rng.integers(0, classes, len(b))
            theirs = torch.nn.functional.cross_entropy(b, torch.tensor(targets))
            self.add(name, cross_entropy(a, targets), theirs)

    def reduce(self, name, a, b):
        axes = self.draw(st.lists(st.sampled_from(range(a.ndim)), unique=True)) if a.ndim else []
        axis, keepdims = tuple(axes) or None, self.draw(st.booleans())
        dim = axis or tuple(range(a.ndim))
        if name == "max":
            # Ties by accident of rounding would be settled differently: make the largest unique.
            ramp = 0.37 * np.arange(a.data.size).reshape(a.shape)
            a, b = a + ramp, b + torch.tensor(ramp)
            if ((b.amax(dim, True) - b) < 1e-6).sum() > b.amax(dim, True).numel():
                return
        theirs = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[name]
        self.add(name, getattr(a, name)(axis, keepdims), theirs(b, dim, keepdims))
        self.drawn.add((name, "all" if axis is None else "some axes", keepdims))

    def matmul(self):
        """Vectors, matrices and stacks of matrices on either side; old nodes where they fit."""
        left, right = self.draw(st.sampled_from([(m, n) for m in (1, 2, 3) for n in (1, 2, 3)]))
        a, b = self.pick(lambda s: len(s) == left) or self.leaf((2, 5, 3)[-left:])
        inner, stack = a.shape[-1], a.shape[0] if left == 3 else 2
        fits = {1: (inner,), 2: (inner, 2), 3: (stack, inner, 2)}[right]
        fixed = max(right - 1, 1)  # the last axis of a matrix is free
        c, d = self.pick(lambda s: len(s) == right and s[:fixed] == fits[:fixed]) or self.leaf(fits)
        self.add("matmul", a @ c, b @ d)
        self.drawn.add(("matmul", left, right))

    def index(self, shape):
        """Integers and slices, or one list with repeats among slices, for some leading axes.

        Not both: NumPy and torch place the result's axes differently for a[0, :, [1, 1]].
        """
        with_list = self.draw(st.booleans())
        index = []
        for size in shape[: self.draw(st.integers(0, len(shape)))]:
            slices = st.sampled_from([slice(None), slice(None, None, 2)])
            whole = st.integers(-size, size - 1)
            if with_list:
                repeats = whole.map(lambda i: [i, 0, i])
                whole = st.nothing() if list in map(type, index) else repeats
            index.append(self.draw(slices | whole))
        self.drawn.update(("index", type(part).__name__) for part in index)
        return tuple(index)


def compatible(left, right):
    return all(1 in (m, n) or m == n for m, n in zip(left[::-1], right[::-1], strict=False))


def binary(name, a, b):
    if name == "add":
        return a + b
    if name == "sub":
        return a - b
    if name == "mul":
        return a * b
    return a / (b * b + 1) if name == "div" else (a * a + 0.5) ** b.tanh()


def unary(name, a):
    if name in ("log", "sqrt"):
        return getattr(a * a + 0.5, name)()
    return {"neg": lambda: -a, "square": lambda: a**2}.get(name, getattr(a, name, None))()


def test_random_graphs_agree_with_torch():
    drawn = set()

    @settings(REPEATABLE, max_examples=1500, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        graph = RandomGraph(data.draw, drawn)
        out, expected = graph.root()
        # Values of order 1 to 4 may cancel to rounding, so a floor is needed.
        close(out.data, expected, rtol=1e-9, atol=1e-11)
        if not out.requires_grad:
            assert not expected.requires_grad
            return
        kept = [n for n in graph.nodes if n[0].requires_grad and data.draw(st.booleans())]
        for ours, theirs in kept:
            ours.retain_grad()
            theirs.retain_grad()
        upstream = graph.rng.uniform(-2, 2, out.shape)
        for last in (False, True) if data.draw(st.booleans()) else (True,):
            drawn.add("last backward" if last else "retained backward")
            out.backward(upstream, retain_graph=not last)
            expected.backward(torch.tensor(upstream), retain_graph=not last)
        for ours, theirs in graph.leaves + kept:
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11)
        asked = {id(ours) for ours, _ in graph.leaves + kept}
        for node in topological(out):
            assert id(node) in asked or node.grad is None
            assert not node.saved

    check()
    wanted = {*BINARY, *UNARY, *REDUCTIONS, *OTHERS, "last backward", "retained backward"}
    wanted |= {(name, pattern) for name in BINARY for pattern in PATTERNS}
    wanted |= {(name, a, k) for name in REDUCTIONS for a in ("all", "some axes") for k in (0, 1)}
    wanted |= {("matmul", left, right) for left in (1, 2, 3) for right in (1, 2, 3)}
    wanted |= {("index", kind) for kind in ("int", "slice", "list")}
    assert wanted - drawn == set()


def test_random_deep_chains_agree_with_torch():
    @settings(REPEATABLE, max_examples=8)
    @given(st.lists(st.sampled_from(["tanh", "sigmoid", "neg", "shrink", "fork"]), min_size=2))
    def check(steps):
        (x,), (y,) = leaves([np.array([0.3, -0.8])])
        deep, expected = x, y
        for position in range(2_000):
            name = steps[position % len(steps)]
            deep, expected = chain_step(name, deep, x), chain_step(name, expected, y)
        deep.backward(np.ones(2))
        expected.backward(torch.ones(2, dtype=torch.float64))
        close(x.grad, y.grad, 1e-9)

    check()


def chain_step(name, a, leaf):
    if name == "shrink":
        return a * 0.9 + leaf
    return (a - leaf) * a * 0.1 if name == "fork" else unary(name, a)


def test_trains_the_two_layer_network_on_digits():
    data = digits()
    images, labels = data.train_images.numpy(), data.train_labels.numpy()
    rng = np.random.default_rng(0)
    parameters = [
        Tensor(rng.normal(0, np.sqrt(2 / 64), (64, 64)), requires_grad=True),
        Tensor(np.zeros(64), requires_grad=True),
        Tensor(rng.normal(0, np.sqrt(2 / 64), (64, 10)), requires_grad=True),
        Tensor(np.zeros(10), requires_grad=True),
    ]

    def network(x):
        w1, b1, w2, b2 = parameters
        return (x @ w1 + b1).relu() @ w2 + b2

    losses = []
    for _ in range(20):
        order = rng.permutation(len(images))
        for start in range(0, len(images), 64):
            batch = order[start : start + 64]
            loss = cross_entropy(network(Tensor(images[batch])), labels[batch])
            for parameter in parameters:
                parameter.grad = None
            loss.backward()
            for parameter in parameters:
                parameter.data -= 0.5 * parameter.grad
            losses.append(loss.item())
    predicted = network(Tensor(data.test_images)).data.argmax(axis=1)
    assert losses[0] == pytest.approx(np.log(10), rel=0.3)
    assert (predicted == data.test_labels.numpy()).mean() >= 0.95
    assert np.mean(losses[-22:]) < 0.1
