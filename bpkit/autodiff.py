"""How would I build it?  A reverse-mode engine on NumPy arrays.  Introduced in chapter 2.

Running an expression records a graph: each result knows its operands and, for each of them, a
*vjp* (vector-Jacobian product): the function that takes the gradient arriving from above and
multiplies it by the local derivative. ``Tensor.backward`` walks that graph from the result to the
leaves. Whatever a leaf receives over several paths is added up.

    >>> x, w, b = (Tensor(value, requires_grad=True) for value in (2.0, 3.0, 1.0))
    >>> loss = (x * w + b - 4) ** 2
    >>> loss.backward()
    >>> print(loss.item(), x.grad, w.grad, b.grad)
    9.0 18.0 12.0 6.0

Names and behaviour are PyTorch's where it has them (https://docs.pytorch.org/docs/stable/notes/
autograd.html), ``axis`` and broadcasting NumPy's. Left out: second derivatives, hooks, in-place
operations (``t += u`` makes a new tensor).
"""

import math
import zlib

import numpy as np

__all__ = ["Tensor", "cross_entropy", "topological", "unbroadcast"]


def _elementwise(name, function, *vjps):
    """A method of Tensor: a NumPy function and, for each operand, upstream times local."""

    def method(self, *others):
        operands = (self, *map(self._operand, others))
        edges = list(zip(operands, vjps, strict=True))
        return _result(name, function(*(t.data for t in operands)), *edges)

    method.__name__, method.__doc__ = name, f"Elementwise {name}; operands broadcast as in NumPy."
    return method


def _reflected(method):
    """`2 - t` from `t - 2`: Python asks the right operand when the left one does not know how."""
    return lambda self, other: method(self._operand(other), self)


def _sigmoid(a):
    small = np.exp(-np.abs(a))  # at most 1: cannot overflow
    return np.where(a >= 0, 1, small) / (1 + small)


class Tensor:
    """An array of floats that remembers how it was made.

    ``data``: the values, a copy of what was given, so that no two tensors share memory. float64
    unless ``dtype`` names another float (TypeError for what is not a real number); numbers and
    arrays that meet a tensor in an operation take its dtype.

    ``grad``: None, or an array like ``data``. A leaf that requires it adds up what each backward
    brings; set it to None to start afresh.

    ``operation``, ``parents``: what made this tensor; "" and () for a leaf. ``name`` is yours.

    ``saved``: the arrays kept for the backward pass, by name; None once they are freed.

    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    array([2., 4.])
    """

    __array_ufunc__ = None  # np.float64(2) * t and array @ t ask the Tensor, not NumPy

    def __init__(self, data, requires_grad=False, name="", dtype=np.float64):
        array = np.asarray(data)
        if array.dtype.kind not in "fiub" or np.dtype(dtype).kind != "f":
            raise TypeError(f"Tensor holds floats: cannot keep {array.dtype} as {np.dtype(dtype)}")
        self.data = array.astype(dtype)
        self.requires_grad, self.retains_grad, self.grad = requires_grad, False, None
        self.operation, self.name, self.saved = "", name, {}
        self._edges, self._checksums = (), {}

    shape = property(lambda self: self.data.shape)
    ndim = property(lambda self: self.data.ndim)
    parents = property(lambda self: tuple(parent for parent, _ in self._edges))
    is_leaf = property(lambda self: not self._edges)

    def item(self):
        """The value of a one-element tensor as a Python float."""
        return self.data.item()

    def __repr__(self):
        shown = {key: getattr(self, key) for key in ("name", "operation", "requires_grad")}
        label = "".join(f", {key}={value!r}" for key, value in shown.items() if value)
        return f"Tensor({np.array2string(self.data, separator=', ', prefix='Tensor(')}{label})"

    def __iter__(self):
        return (self[row] for row in range(len(self.data)))

    def __array__(self, *args, **kwargs):
        raise TypeError("NumPy would forget how this Tensor was made; give it the .data")

    def retain_grad(self):
        """Ask backward to keep the gradient of this interior tensor in ``grad`` as well."""
        if not self.requires_grad:
            raise RuntimeError("retain_grad() on a tensor that no requires_grad=True leads to")
        self.retains_grad = True

    def backward(self, gradient=None, retain_graph=False, watch=None):
        """Add to the ``grad`` of each leaf the gradient of this tensor with respect to it.

        Args:
            gradient: d(loss)/d(this), of this tensor's shape; not needed for a single number.
            retain_graph: keep the saved values, so that backward can pass here again.
            watch: called after each step as watch(node, gradient, [(parent, contribution)]),
                with the arrays in use: look, and copy what you keep.

        The gradient of an interior tensor lives only until it has been passed on, so a second
        backward starts from zero. All is checked before anything changes.

        Raises:
            RuntimeError: no history, or several elements and no ``gradient``, or saved values
                that were freed, or changed in place since the forward pass (their CRC-32 tells).
            ValueError: the gradient's shape.
        """
        upstream = {self: self._start(gradient)}
        order = topological(self)
        for node in order:
            node._check_saved()
        for node in reversed(order):
            if node not in upstream:  # a constant
                continue
            g = np.asarray(upstream.pop(node))
            if node.is_leaf or node.retains_grad:
                node.grad = g if node.grad is None else np.asarray(node.grad + g)
            contributions = []
            for parent, vjp in node._edges:
                if vjp is not None:
                    needs = {name: node.saved[name] for name in _needs(vjp)}
                    part = np.asarray(vjp(g, **needs), parent.data.dtype)
                    part = unbroadcast(part, parent.shape)
                    upstream[parent] = upstream.get(parent, 0) + part
                    contributions.append((parent, part))
            if node.saved and not retain_graph:
                node.saved = None
            if watch is not None:
                watch(node, g, contributions)

    def _start(self, gradient):
        if not self.requires_grad:
            raise RuntimeError("backward() from a tensor that no requires_grad=True leads to")
        if gradient is None and self.data.size != 1:
            raise RuntimeError(
                f"backward() starts from one number, this tensor has shape {self.shape}: reduce it "
                "with .sum() or .mean(), or pass gradient=, an array of that shape"
            )
        start = np.ones_like(self.data) if gradient is None else self._operand(gradient).data
        if start.shape != self.shape:
            raise ValueError(f"gradient has shape {start.shape}, the tensor has {self.shape}")
        return start

    def _check_saved(self):
        if self.saved is None:
            raise RuntimeError(
                f"backward() reached {self.operation!r} a second time, its saved values are freed: "
                "run the forward pass again, or pass retain_graph=True to the first backward()"
            )
        for name, array in self.saved.items():
            if _checksum(array) != self._checksums[name]:
                raise RuntimeError(
                    f"{self.operation!r} saved {name} {array.shape} for the backward pass, and it "
                    "was changed in place since: change it after backward(), or rebind .data"
                )

    def _operand(self, other):
        return other if isinstance(other, Tensor) else Tensor(other, dtype=self.data.dtype)

    # fmt: off
    __add__ = _elementwise("add", np.add, lambda g: g, lambda g: g)
    __sub__ = _elementwise("sub", np.subtract, lambda g: g, lambda g: -g)
    __mul__ = _elementwise("mul", np.multiply,
                           lambda g, b: g * b, lambda g, a: g * a)
    __truediv__ = _elementwise("div", np.divide,
                               lambda g, b: g / b, lambda g, a, b: -g * a / b**2)
    __pow__ = _elementwise(  # np.where: a ** 0 is flat at a = 0 too, not 0 * inf
        "pow", np.power,
        lambda g, a, b: g * b * a ** np.where(b == 0, 1, b - 1),
        lambda g, a, out: g * out * np.log(np.where(a == 0, 1, a)))
    __neg__ = _elementwise("neg", np.negative, lambda g: -g)
    exp = _elementwise("exp", np.exp, lambda g, out: g * out)
    log = _elementwise("log", np.log, lambda g, a: g / a)
    sqrt = _elementwise("sqrt", np.sqrt, lambda g, out: g / (2 * out))
    tanh = _elementwise("tanh", np.tanh, lambda g, out: g * (1 - out**2))
    sigmoid = _elementwise("sigmoid", _sigmoid, lambda g, out: g * out * (1 - out))
    relu = _elementwise("relu", lambda a: np.maximum(a, 0),
                        lambda g, out: g * (out > 0))
    # fmt: on

    def __matmul__(self, other):
        """Matrix product; stacks of matrices and vectors as in NumPy."""
        a, b = self, self._operand(other)
        if min(a.ndim, b.ndim) == 0 or a.shape[-1] != b.shape[-2:][0]:
            raise ValueError(f"matmul: {a.shape} @ {b.shape}: inner sizes must be equal")
        if b.ndim == 1:  # a vector on the right is a matrix of one column
            return (a @ b.reshape(-1, 1))[..., 0]
        if a.ndim == 1:  # and on the left one of one row
            return (a.reshape(1, -1) @ b)[..., 0, :]
        return _result(
            "matmul",
            a.data @ b.data,
            (a, lambda g, b: g @ b.swapaxes(-1, -2)),  # dA = G Bᵀ
            (b, lambda g, a: a.swapaxes(-1, -2) @ g),  # dB = Aᵀ G
        )

    __radd__, __rsub__, __rmul__ = map(_reflected, (__add__, __sub__, __mul__))
    __rtruediv__, __rpow__, __rmatmul__ = map(_reflected, (__truediv__, __pow__, __matmul__))

    def sum(self, axis=None, keepdims=False):
        """Sum over an axis, a tuple of axes, or all."""
        spread = _spread(self.shape, axis, keepdims)
        return _result("sum", self.data.sum(axis, keepdims=keepdims), (self, spread))

    def mean(self, axis=None, keepdims=False):
        """Mean over an axis, a tuple of axes, or all."""
        spread, out = _spread(self.shape, axis, keepdims), self.data.mean(axis, keepdims=keepdims)
        share = out.size / max(self.data.size, 1)  # 1 / (number of elements in each mean)
        return _result("mean", out, (self, lambda g: spread(g) * share))

    def max(self, axis=None, keepdims=False):
        """The largest value; equal ones share the gradient evenly (torch.amax, not max(dim))."""
        spread, out = _spread(self.shape, axis, keepdims), self.data.max(axis, keepdims=keepdims)
        largest = self.data == spread(out)
        share = largest / largest.sum(axis, keepdims=True)
        return _result("max", out, (self, lambda g, share: spread(g) * share), share=share)

    def log_softmax(self, axis=-1):
        """a - log(sum(exp(a))), shifted by the largest a so that nothing overflows."""
        shifted = self.data - self.data.max(axis, keepdims=True)
        return _result(
            "log_softmax",
            shifted - np.log(np.exp(shifted).sum(axis, keepdims=True)),
            (self, lambda g, out: g - np.exp(out) * g.sum(axis, keepdims=True)),
        )

    def reshape(self, *shape):
        """The same elements in another shape; -1 stands for the size that is left."""
        old = self.shape
        return _result("reshape", self.data.reshape(*shape), (self, lambda g: g.reshape(old)))

    def transpose(self, *axes):
        """The axes in the given order (NumPy's meaning), or reversed."""
        order = [range(self.ndim)[axis] for axis in axes or range(self.ndim)[::-1]]
        back = np.argsort(order).tolist()
        return _result("transpose", self.data.transpose(order), (self, lambda g: g.transpose(back)))

    T = property(transpose)

    def __getitem__(self, index):
        """Any NumPy index; an element taken twice receives two gradients."""
        shape = self.shape
        return _result(
            "index",
            self.data[index],
            (self, lambda g, positions: _scatter(g, positions, shape)),
            positions=np.arange(self.data.size).reshape(shape)[index],
        )


def cross_entropy(logits, targets):
    """Mean of -log softmax(logits)[i, targets[i]]; logits (N, C), targets (N,) integers below C.

    Composed as in PyTorch: log_softmax, then the mean of what is picked at the targets, negated.

    Example:
        >>> logits = Tensor([[1.0, 1.0]], requires_grad=True)
        >>> cross_entropy(logits, [0]).backward()
        >>> print(logits.grad)
        [[-0.5  0.5]]
    """
    targets = np.asarray(targets)
    if logits.ndim != 2 or targets.shape != logits.shape[:1] or targets.dtype.kind not in "iu":
        raise ValueError(
            f"cross_entropy: logits {logits.shape} must be (N, C) and targets N integers, "
            f"got targets {targets.shape} of {targets.dtype}"
        )
    if not np.all((targets >= 0) & (targets < logits.shape[1])):
        raise ValueError(f"cross_entropy: targets must lie in 0..{logits.shape[1] - 1}")
    return -logits.log_softmax(axis=1)[np.arange(len(targets)), targets].mean()


def topological(tensor):
    """All tensors that ``tensor`` was computed from, each after its parents; itself last.

    A depth-first walk with its own stack: a graph of 100,000 operations would overflow Python's.

    >>> x = Tensor(2.0, requires_grad=True)
    >>> [t.operation for t in topological(x * x + 1)]
    ['', 'mul', '', 'add']
    """
    order, seen, stack = [], set(), [(tensor, False)]
    while stack:
        node, parents_done = stack.pop()
        if parents_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((parent, False) for parent in reversed(node.parents))
    return order


def unbroadcast(gradient, shape):
    """Sum a gradient over the axes along which broadcasting repeated an operand of ``shape``.

    >>> unbroadcast(np.ones((5, 3)), (1, 3))
    array([[5., 5., 5.]])
    """
    if gradient.shape == shape:
        return gradient
    added = gradient.ndim - len(shape)
    stretched = [added + axis for axis, size in enumerate(shape) if size == 1]
    return gradient.sum(axis=(*range(added), *stretched)).reshape(shape)


def _result(operation, data, *edges, **extra):
    """The tensor an operation returns; with its history if an operand requires a gradient.

    edges: one (operand, vjp) each. A vjp takes the gradient g arriving from above and whatever
    else its parameters name: a, b (the operands' values), out (the result) or one of `extra`.
    Only these are saved, and only for the operands that require a gradient.
    """
    result = Tensor(data, dtype=data.dtype)
    if any(parent.requires_grad for parent, _ in edges):
        result.requires_grad, result.operation = True, operation
        result._edges = tuple((p, vjp if p.requires_grad else None) for p, vjp in edges)
        values = {"out": result.data, **extra}
        values.update(zip("ab", (parent.data for parent, _ in edges), strict=False))
        needs = dict.fromkeys(name for _, vjp in result._edges if vjp for name in _needs(vjp))
        result.saved = {name: np.asarray(values[name]) for name in needs}
        result._checksums = {name: _checksum(array) for name, array in result.saved.items()}
    return result


def _needs(vjp):
    return vjp.__code__.co_varnames[1 : vjp.__code__.co_argcount]


def _checksum(array):
    return zlib.crc32(np.ascontiguousarray(array))


def _spread(shape, axis, keepdims):
    """The function that repeats g along the axes that a reduction of `shape` summed away."""
    kept = keepdims or axis is None
    return lambda g: np.broadcast_to(g if kept else np.expand_dims(g, axis), shape)


def _scatter(g, positions, shape):
    """Zeros of `shape`, plus each element of g at the flat position it was taken from."""
    total = np.zeros(math.prod(shape), g.dtype)
    np.add.at(total, positions, g)
    return total.reshape(shape)
