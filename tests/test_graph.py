"""bpkit.graph: the graph that autograd recorded, read without changing it."""

import json

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from bpkit import trace
from bpkit.graph import plain, show

DOUBLE = {"dtype": torch.float64, "requires_grad": True}


def scalars(*values):
    return [torch.tensor(value, **DOUBLE) for value in values]


def kinds(graph):
    return [(node.kind, node.short) for node in graph.nodes]


def test_two_operations_and_three_leaves():
    x, w, b = scalars(2.0, 3.0, 1.0)
    graph = trace(x * w + b, names={"x": x, "w": w, "b": b})
    assert kinds(graph) == [
        ("leaf", "x"),
        ("leaf", "w"),
        ("operation", "mul"),
        ("leaf", "b"),
        ("operation", "add"),
    ]
    assert [n.operation for n in graph.operations] == ["MulBackward0", "AddBackward0"]
    assert repr(graph) == "Graph(2 operations, 3 leaves, 0 constants, 4 edges)"


def test_edges_carry_the_input_slot():
    x, w = scalars(2.0, 3.0)
    graph = trace(x - w, names={"x": x, "w": w})
    subtraction = graph.operations[0]
    assert [(graph.nodes[e.source].name, e.slot) for e in graph.inputs(subtraction)] == [
        ("x", 0),
        ("w", 1),
    ]
    swapped = trace(w - x, names={"x": x, "w": w})
    assert [swapped.nodes[e.source].name for e in swapped.inputs(swapped.operations[0])] == [
        "w",
        "x",
    ]


def test_constants_are_nodes_with_a_slot():
    (x,) = scalars(2.0)
    graph = trace(torch.tensor(5.0) * x + 1)
    assert len(graph.constants) == 2
    product = graph.operations[0]
    assert [(graph.nodes[e.source].kind, e.slot) for e in graph.inputs(product)] == [
        ("constant", 0),
        ("leaf", 1),
    ]


def test_a_tensor_used_twice_has_two_edges():
    (a,) = scalars(1.0)
    b = a + a
    c = b * b
    graph = trace(c, names={"a": a, "b": b, "c": c})
    assert len(graph.nodes) == 3
    assert [e.target for e in graph.consumers(graph.find("a"))] == [graph.find("b").index] * 2
    assert len(graph.consumers(graph.find("b"))) == 2


def test_topological_order_follows_execution_even_where_depth_first_would_not():
    (x,) = scalars(0.3)
    first = x.exp()
    second = x.sin()
    third = second * first  # depth-first from here would meet sin before exp
    graph = trace(third)
    assert [n.short for n in graph.operations] == ["exp", "sin", "mul"]
    position = {node.index: k for k, node in enumerate(graph.topological())}
    assert all(position[e.source] < position[e.target] for e in graph.edges)


def test_order_does_not_rest_on_creation_numbers():
    """Autograd numbers nodes per thread, so a graph from two threads has unordered numbers."""
    import threading

    (x,) = scalars(0.3)
    for _ in range(50):
        x.sin()  # the main thread's numbers are far ahead
    inner = x.exp()
    result = []
    thread = threading.Thread(target=lambda: result.append(inner.sin()))
    thread.start()
    thread.join()
    assert result[0].grad_fn._sequence_nr() < inner.grad_fn._sequence_nr()
    assert [n.short for n in trace(result[0]).operations] == ["exp", "sin"]
    cosine = inner.cos()
    thread = threading.Thread(target=lambda: result.append(torch.stack([inner, inner, cosine])))
    thread.start()
    thread.join()
    assert [n.short for n in trace(result[1]).operations] == ["exp", "cos", "stack"]


def test_shapes_and_dtypes_are_those_of_the_results():
    x = torch.zeros(5, 3, **DOUBLE)
    w = torch.zeros(3, 7, **DOUBLE)
    graph = trace((x @ w).float().sum())
    assert [(n.short, *n.outputs[0]) for n in graph.operations] == [
        ("mm", (5, 7), torch.float64),
        ("to_copy", (5, 7), torch.float32),
        ("sum", (), torch.float32),
    ]


def test_parameters_are_named_and_told_from_other_leaves():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3, requires_grad=True)
    graph = trace(model(x).sum(), names=model)
    assert {n.name for n in graph.parameters} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert [n.kind for n in graph.leaves if n.name is None] == ["leaf"]
    assert graph.find("0.weight").shape == (4, 3)


def test_a_shared_parameter_is_one_node_with_all_its_names():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    graph = trace(model(torch.ones(1, 3)).sum(), names=model)
    assert [n.name for n in graph.parameters] == ["0.weight = 1.weight"]
    assert graph.find("1.weight") is graph.find("0.weight")
    assert len(graph.consumers(graph.find("0.weight"))) == 2


def test_what_is_saved_and_what_is_not():
    x, w = scalars(0.3, 2.0)
    saved = {n.short: {s.name: s.value.item() for s in n.saved} for n in trace(
        torch.sigmoid(x) * w + (x * 5) + x.exp()
    ).operations}  # fmt: skip
    sigmoid = torch.sigmoid(x).item()
    assert saved["sigmoid"] == {"result": sigmoid}
    assert saved["exp"] == {"result": x.exp().item()}
    assert saved["add"] == {}
    product = trace(x * 5).operations[0]
    assert [(s.name, s.value.item()) for s in product.saved] == [("other", 5.0)]
    both = trace(x * w).operations[0]
    assert {s.name: s.value.item() for s in both.saved} == {"self": 0.3, "other": 2.0}
    assert all(s.nbytes == 8 and s.state == "kept" for s in both.saved)


def test_saved_tensors_are_freed_by_backward():
    (x,) = scalars(0.3)
    y = x.exp()
    before = trace(y).operations[0].saved
    y.backward()
    after = trace(y).operations[0].saved
    assert [s.state for s in before] == ["kept"]
    assert [(s.name, s.state, s.nbytes) for s in after] == [("result", "freed", 0)]


def test_a_saved_tensor_changed_in_place_is_reported_as_changed():
    (x,) = scalars(0.3)
    y = x.sigmoid()
    z = y * y
    with torch.no_grad():
        y.mul_(2)
    states = {n.short: {s.state for s in n.saved} for n in trace(z).operations}
    assert states == {"sigmoid": {"changed"}, "mul": {"changed"}}


def test_in_place_operations_and_views():
    x = torch.ones(4, **DOUBLE)
    y = x * 2
    y[0] = 5.0
    y.view(2, 2).mul_(3)
    graph = trace(y.sum())
    assert graph.operations[-1].short == "sum"
    assert len(graph.leaves) == 1
    x.grad = None
    y.sum().backward()
    assert x.grad.tolist() == [0.0, 6.0, 6.0, 6.0]


def test_several_results_of_one_operation():
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).requires_grad_()
    left, right = x.split([1, 2], dim=1)
    graph = trace({"left": left.sum(), "right": right.sum()})
    split = graph.operations[0]
    assert [shape for shape, _ in split.outputs] == [(2, 1), (2, 2)]
    assert sorted(e.output for e in graph.consumers(split)) == [0, 1]
    assert [graph.nodes[index].name for index, _ in graph.outputs] == ["left", "right"]
    assert trace(right).outputs == [(1, 1)]
    assert trace(right * 1, names={"right": right}).find("right").short == "split_with_sizes"
    both = trace(left.sum() + right.sum(), names={"left": left, "right": right})
    assert both.operations[0].name == "left, right"


def test_custom_functions():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * gradient

    (x,) = scalars(2.0)
    node = trace(Cube.apply(x)).operations[0]
    assert (node.short, node.operation) == ("cube", "CubeBackward")
    assert [(s.name, s.value.item()) for s in node.saved] == [("tensors[0]", 2.0)]


@pytest.mark.parametrize("length", [10_000])
def test_long_chains_need_no_recursion(length):
    (x,) = scalars(1.0)
    y = x
    for _ in range(length):
        y = y.sin()
    graph = trace(y)
    assert len(graph.operations) == length
    assert len(graph.text().splitlines()) == length + 1


def test_many_paths_are_walked_once():
    (x,) = scalars(1.0)
    y = x
    for _ in range(60):
        y = y + y  # 2**60 paths, 60 operations
    assert len(trace(y).operations) == 60


def test_nothing_is_changed_by_tracing():
    x, w = scalars(2.0, 3.0)
    y = (x * w).exp()
    trace(y)
    y.backward()  # would fail had tracing freed or changed anything
    assert (x.grad.item(), w.grad.item()) == (3 * y.item(), 2 * y.item())


def test_a_leaf_alone_is_a_graph():
    (x,) = scalars(2.0)
    assert kinds(trace(x, names={"x": x})) == [("leaf", "x")]


def test_errors_say_what_was_given_and_what_to_do():
    with pytest.raises(ValueError, match=r"shape \(2,\): it has requires_grad=False.*detach"):
        trace(torch.ones(2))
    with pytest.raises(TypeError, match="expected a tensor or several of them, got float"):
        trace(2.0)
    with pytest.raises(TypeError, match="got list"):
        trace([])
    (x,) = scalars(1.0)
    with pytest.raises(TypeError, match=r"names\['x'\] is a float"):
        trace(x * 2, names={"x": 1.0})
    with pytest.raises(KeyError, match=r"no node is named 'y'; named nodes: \['x'\]"):
        trace(x * 2, names={"x": x}).find("y")


def test_text_is_one_line_for_each_node():
    x, w, b = scalars(2.0, 3.0, 1.0)
    y = x * w + b
    loss = (y - 4) ** 2
    assert trace(loss, names={"x": x, "w": w, "b": b, "y": y, "L": loss}).text() == (
        "x   leaf              scalar\n"
        "w   leaf              scalar\n"
        "#1  mul(x, w)         scalar  keeps other, self\n"
        "b   leaf              scalar\n"
        "y   add(#1, b)        scalar\n"
        "#2  sub(y, constant)  scalar\n"
        "L   pow(#2)           scalar  keeps self"
    )


def test_to_dict_is_json_and_complete():
    x, w = scalars(2.0, 3.0)
    data = json.loads(json.dumps(trace(x * w, names={"x": x}).to_dict()))
    assert [node["label"] for node in data["nodes"]] == ["x", "leaf 1", "#1"]
    assert data["nodes"][2]["saved"] == [
        {"name": "other", "state": "kept", "value": 3.0},
        {"name": "self", "state": "kept", "value": 2.0},
    ]
    assert [(e["source"], e["target"], e["slot"]) for e in data["edges"]] == [(0, 2, 0), (1, 2, 1)]
    assert data["outputs"] == [2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (3, "3"),
        (2.0, "2"),
        (1 / 3, "0.3333"),
        (torch.zeros(5, 3), "5×3"),
        (torch.tensor([2.5]), "2.5"),
        (float("nan"), "nan"),
        (torch.tensor(True), "True"),
        (float("inf"), "inf"),
        (2 - 1j, "(2-1j)"),
        (torch.zeros(0, 3), "0×3"),
        (torch.ones(1, device="meta"), "unknown"),
        (torch.tensor([7.0]).to_sparse(), "7"),
    ],
)
def test_show(value, text):
    assert show(value) == text


class Doubled(torch.autograd.Function):
    """A custom function that puts on its context what autograd's own nodes have there."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable, ctx.name = x.detach(), "mine"
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_attributes_of_a_custom_function_do_not_mislead():
    (x,) = scalars(2.0)
    assert kinds(trace(Doubled.apply(x))) == [("leaf", "leaf"), ("operation", "doubled")]


def test_several_constants_of_one_operation():
    x, data = torch.zeros(2, 2, **DOUBLE), torch.ones(2, 2, dtype=torch.float64)
    graph = trace(torch.addmm(data[0], data, x), names={"x": x})
    assert [node.index for node in graph.nodes] == [0, 1, 2, 3]
    assert [(graph.nodes[e.source].short, e.slot) for e in graph.inputs(graph.nodes[-1])] == [
        ("constant", 0),
        ("constant", 1),
        ("x", 2),
    ]


def test_what_hooks_have_packed_is_not_unpacked():
    def unpack(packed):
        raise AssertionError("tracing looked inside")

    (x,) = scalars(0.3)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpack):
        y = x.exp()
    graph = trace(y)
    assert [(s.name, s.state, s.value) for s in graph.operations[0].saved] == [
        ("result", "packed", None)
    ]
    assert "kept result (packed)" in graph.text()


def test_tracing_a_checkpoint_runs_nothing_again():
    calls = []

    def layer(x):
        calls.append(x)
        return x.exp().sin()

    (x,) = scalars(0.3)
    trace(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False))
    assert len(calls) == 1


def test_a_power_keeps_its_symbol_and_a_learned_exponent_can_be_freed():
    x, w = scalars(3.0, 2.0)
    y = x**w
    y.backward()
    assert trace(y).operations[0].symbol == "pow"
    assert trace(x**-2.5).operations[0].symbol == "(·)⁻²˙⁵"


def test_a_leaf_frozen_later_keeps_its_name():
    x, w = scalars(2.0, 3.0)
    y = x * w
    w.requires_grad_(False)
    assert [leaf.name for leaf in trace(y, names={"x": x, "w": w}).leaves] == ["x", "w"]


def test_outputs_and_names_given_twice():
    (x,) = scalars(2.0)
    y = x * x
    assert trace([y, y]).outputs == [(1, 0), (1, 0)]
    assert trace({"y": y, "z": y}, names={"y": y}).nodes[1].name == "y = z"


def test_the_bytes_of_a_sparse_tensor_are_those_of_its_parts():
    x = torch.eye(4, dtype=torch.float64).to_sparse()
    w = torch.ones(4, 2, **DOUBLE)
    (saved,) = trace(torch.sparse.mm(x, w)).operations[0].saved
    assert (saved.shape, saved.nbytes) == ((4, 4), 4 * 8 + 2 * 4 * 8)


def test_a_nested_tensor_has_no_shape():
    parts = [torch.ones(2, 3, **DOUBLE), torch.ones(4, 3, **DOUBLE)]
    graph = trace(torch.nested.as_nested_tensor(parts, layout=torch.jagged) * 2)
    assert graph.operations[-1].shape is None
    assert graph.text().splitlines()[-1].split() == [
        "#3",
        "mul(#2,",
        "constant)",
        "?",
        "keeps",
        "other",
    ]


def test_long_argument_lists_are_cut():
    whole = ", ".join(f"leaf {number}" for number in range(1, 13))
    twelve = trace(torch.stack(scalars(*range(12)))).text().splitlines()[-1]
    assert twelve == f"#1       stack({whole})  12"
    parts = scalars(*range(14))
    assert trace(torch.stack(parts)).text().splitlines()[-1] == (
        "#1       stack(leaf 1, leaf 2, leaf 3, leaf 4, leaf 5, leaf 6, … 8 more)  14"
    )


def test_wide_graphs_take_room_in_proportion_to_their_size():
    graph = trace(torch.stack(scalars(*[1.0] * 3000)))
    assert len(graph.text()) < 3000 * 200


@pytest.mark.parametrize("names", [[("x", 1)], "x", torch.ones(2), iter(())])
def test_names_of_another_kind_are_refused(names):
    (x,) = scalars(1.0)
    with pytest.raises(TypeError, match=r"expected a module or a mapping from names to tensors"):
        trace(x * 2, names=names)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (torch.eye(2).to_sparse(), [[1.0, 0.0], [0.0, 1.0]]),
        (torch.tensor([1 + 2j]).conj(), [[1.0, -2.0]]),
        (1 + 2j, [1.0, 2.0]),
        (torch.ones(2, device="meta"), None),
        ((2, 3), [2, 3]),
        (True, True),
        (torch.float64, "torch.float64"),
    ],
)
def test_plain_is_json_ready(value, data):
    assert plain(value) == data
