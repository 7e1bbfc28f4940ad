"""bpkit.record: values, lines and modules of what ran, joined to the graph."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_hooks

from bpkit import record, trace

DOUBLE = {"dtype": torch.float64, "requires_grad": True}


def example():
    x, w, b = (torch.tensor(v, **DOUBLE) for v in (2.0, 3.0, 1.0))
    with record(names={"x": x, "w": w, "b": b}) as recording:
        y = x * w + b
        loss = (y - 4) ** 2
    return recording, {"x": x, "w": w, "b": b, "y": y, "L": loss}


def test_values_of_every_operation():
    recording, _ = example()
    assert [op.name for op in recording] == ["mul", "add", "sub", "pow"]
    assert [op.outputs[0].data.item() for op in recording] == [6.0, 7.0, 3.0, 9.0]
    assert [v.data.item() for v in recording.operations[0].inputs] == [2.0, 3.0]
    assert recording.operations[2].inputs[1] == 4


def test_lines_are_the_readers():
    recording, _ = example()
    lines = [op.line for op in recording]
    assert [line.text for line in lines] == ["y = x * w + b"] * 2 + ["loss = (y - 4) ** 2"] * 2
    assert lines[0].function == "example"
    assert str(lines[0]) == f"test_record.py line {lines[0].number} in example: y = x * w + b"


def test_graph_joins_values_gradients_and_constants():
    recording, t = example()
    graph = recording.graph(t["L"], {"y": t["y"], "L": t["L"]}, gradients=True)
    seen = {n.name or n.short: (n.value, n.gradient) for n in graph.nodes}
    numbers = {
        name: tuple(None if v is None else float(v) for v in pair) for name, pair in seen.items()
    }
    assert numbers == {
        "x": (2.0, 18.0),
        "w": (3.0, 12.0),
        "b": (1.0, 6.0),
        "mul": (6.0, 6.0),
        "y": (7.0, 6.0),
        "sub": (3.0, 6.0),
        "constant": (4.0, None),
        "L": (9.0, 1.0),
    }
    order = [graph.nodes[k].short for k in graph.backward_order]
    assert order == ["pow", "sub", "add", "mul"]


def test_gradients_leave_grad_alone_and_the_graph_usable():
    recording, t = example()
    recording.graph(t["L"], gradients=True)
    assert t["x"].grad is None
    t["L"].backward()
    assert t["x"].grad.item() == 18.0
    with pytest.raises(RuntimeError, match="second time"):
        recording.graph(t["L"], gradients=True)


def test_contributions_of_several_consumers_add_up():
    f = torch.tensor(1.5, **DOUBLE)
    with record(names={"f": f}) as recording:
        h = f**2
        loss = 3 * h + torch.sin(h)
    graph = recording.graph(loss, {"h": h}, gradients=True)
    node = graph.find("h")
    contributions = [e.gradient.item() for e in graph.consumers(node)]
    assert contributions == pytest.approx([3.0, torch.cos(h).item()])
    assert node.gradient.item() == pytest.approx(sum(contributions))
    (expected,) = torch.autograd.grad(loss, f)
    assert graph.find("f").gradient.item() == expected.item()


def test_every_gradient_of_a_network_is_autograds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    x, target = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    with record(names=model) as recording:
        loss = F.cross_entropy(model(x), target)
    graph = recording.graph(loss, gradients=True)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(graph.find(name).gradient, parameter.grad)
    data = graph.constants[0]
    assert torch.equal(data.value, x)


def test_modules_and_inner_nodes_of_a_call():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    x, target = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
    with record(names=model) as recording:
        loss = F.cross_entropy(model(x), target)
    assert [(op.name, op.module) for op in recording] == [
        ("linear", "0"),
        ("relu", "1.0"),
        ("linear", "1.1"),
        ("cross_entropy", None),
    ]
    graph = recording.graph(loss)
    modules = [(n.short, n.module) for n in graph.operations]
    assert modules == [
        ("t", "0"),
        ("addmm", "0"),
        ("relu", "1.0"),
        ("t", "1.1"),
        ("addmm", "1.1"),
        ("log_softmax", None),
        ("nll_loss", None),
    ]
    inner = graph.operations[-2]
    assert inner.line is not None
    assert inner.value.shape == (5, 2)  # its own saved result


def test_nodes_from_before_the_recording_get_no_line():
    x = torch.tensor(2.0, **DOUBLE)
    before = x.exp()
    with record() as recording:
        after = before.sin()
    graph = recording.graph(after)
    assert [(n.short, n.line is None) for n in graph.operations] == [("exp", True), ("sin", False)]


def test_a_value_is_what_it_was_when_it_was_read():
    x = torch.ones(2, dtype=torch.float64)
    with record() as recording:
        y = x + 1
        x.mul_(10)
        z = x + 1
    first, change, second = recording
    assert first.inputs[0].data.tolist() == [1, 1]
    assert change.name == "mul"
    assert second.inputs[0].data.tolist() == [10, 10]
    assert (y.tolist(), z.tolist()) == ([2, 2], [11, 11])
    assert second.inputs[0].producer == change.index


def test_calls_that_leave_the_tensors_are_seen():
    x = torch.tensor(2.0, **DOUBLE)
    with record() as recording:
        (x * 2).item()
    assert [(op.name, op.result) for op in recording] == [("mul", None), ("item", 4.0)]


def test_attributes_that_compute_are_operations_and_the_others_are_not():
    x = torch.ones(2, 3, **DOUBLE)
    with record() as recording:
        _ = (x.shape, x.grad, x.requires_grad, x.is_leaf, x.ndim, x.layout, x._base)
        _ = (x.T, x.data)
        x.grad = None
    assert [op.name for op in recording] == ["T", "data"]


def test_everything_is_removed_after_an_exception():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("inside")

    hooks = dict(module_hooks._global_forward_hooks), dict(module_hooks._global_forward_pre_hooks)
    model, x = nn.Sequential(nn.Linear(2, 2), Broken()), torch.ones(1, 2)
    with pytest.raises(ValueError, match="inside"), record(names=model) as recording:
        model(x)
    assert hooks == (
        dict(module_hooks._global_forward_hooks),
        dict(module_hooks._global_forward_pre_hooks),
    )
    torch.ones(2) + 1
    assert [op.name for op in recording] == ["linear"]


def test_module_paths_survive_a_caught_exception():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails, self.works = Fails(), nn.ReLU()

        def forward(self, x):
            try:
                return self.fails(x)
            except ValueError:
                return self.works(x) * 2

    model, x = nn.Sequential(Tries()), torch.ones(2)
    with record(names=model) as recording:
        model(x)
    assert [(op.name, op.module) for op in recording] == [("relu", "0.works"), ("mul", "0")]


def test_results_and_random_numbers_are_what_they_are_without_recording():
    def run():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        return model(torch.randn(2, 4)), torch.get_rng_state()

    plain, state = run()
    with record():
        recorded, recorded_state = run()
    assert torch.equal(plain, recorded)
    assert torch.equal(state, recorded_state)


def test_one_recording_is_not_entered_twice_at_once():
    recorder = record()
    with recorder, pytest.raises(RuntimeError, match="already running"):
        recorder.__enter__()


def test_a_dropped_recording_frees_what_it_kept():
    x = torch.ones(1000, **DOUBLE)
    with record() as recording:
        y = x * 2
    alive = weakref.ref(recording.operations[0].outputs[0].data)
    del recording, y
    gc.collect()
    assert alive() is None


def test_inference_mode_and_no_grad():
    x = torch.ones(2, **DOUBLE)
    with record() as recording:
        with torch.no_grad():
            x * 2
        with torch.inference_mode():
            x * 3
    assert [op.outputs[0].data.tolist() for op in recording] == [[2, 2], [3, 3]]
    assert [op.outputs[0].tracked for op in recording] == [False, False]


def test_gradients_need_a_scalar():
    x = torch.ones(2, **DOUBLE)
    with record() as recording:
        y = x * 2
    with pytest.raises(ValueError, match=r"scalar output, got shape \(2,\)"):
        recording.graph(y, gradients=True)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def lines(graph):
    return [(n.short, None if n.line is None else n.line.text) for n in graph.operations]


def test_a_call_that_hands_back_its_argument_does_not_claim_it():
    x = torch.ones(2, **DOUBLE)
    with record() as recording:
        y = x * 5
        same = y.contiguous()
        total = same.sum()
    graph = recording.graph(total)
    assert lines(graph) == [("mul", "y = x * 5"), ("sum", "total = same.sum()")]
    assert graph.constants[0].value == 5


def test_custom_functions_have_a_value_but_not_their_users_line():
    x = torch.tensor(2.0, **DOUBLE)
    with record() as recording:
        y = Cube.apply(x)
        z = Cube.apply(y * 1)
    graph = recording.graph(z)
    assert lines(graph) == [("cube", None), ("mul", "z = Cube.apply(y * 1)"), ("cube", None)]
    assert [node.value.item() for node in graph.operations] == [8.0, 8.0, 512.0]


def test_constants_are_filled_only_where_it_is_certain_which_is_which():
    x, w = torch.ones(1, 1, 5, 5, **DOUBLE), torch.ones(1, 1, 3, 3, **DOUBLE)
    layer = nn.Linear(2, 2).double()
    layer.bias.requires_grad_(False)
    data = torch.ones(3, 2, dtype=torch.float64)
    with record() as recording:
        chosen = torch.where(x > 0, x, 0.0).sum()
        convolved = F.conv2d(x, w, stride=2).sum()
        mapped = layer(data).sum()
        shifted = torch.add(x, data[0, 0], alpha=2).sum()
    assert recording.graph(chosen).constants[0].value is None  # not the condition
    assert recording.graph(convolved).constants[0].value is None  # not the stride
    bias, read = recording.graph(mapped).constants
    assert torch.equal(bias.value, layer.bias)
    assert torch.equal(read.value, data)
    assert recording.graph(shifted).constants[0].value.item() == 1


def test_a_leaf_has_the_value_that_its_graph_read():
    w = torch.tensor(1.0, **DOUBLE)
    with record(names={"w": w}) as recording:
        before = w * 2
        with torch.no_grad():
            w -= 0.5
        after = w * 2
    assert recording.graph(before).find("w").value.item() == 1.0
    assert recording.graph(after).find("w").value.item() == 0.5


def test_what_is_changed_in_place_is_an_output():
    x = torch.ones(3, **DOUBLE)
    with record() as recording:
        y = x * 2
        y[0] = 5.0
        y.view(3).mul_(3)
        total = y.sum()
    assigned, product = recording.operations[1], recording.operations[3]
    assert assigned.outputs[0].data.tolist() == [5, 2, 2]
    assert [v.data.tolist() for v in product.outputs] == [[15, 6, 6]] * 2  # the view, its base
    assert recording.operations[4].inputs[0].producer == product.index
    assert lines(recording.graph(total))[1:3] == [
        ("copy_slices", "y[0] = 5.0"),
        ("copy_slices", "y.view(3).mul_(3)"),
    ]


def test_a_recording_inside_inference_mode():
    x = torch.ones(2)
    with torch.inference_mode(), record() as recording:
        y = x * 2
        y[0] = 7
        y + 1
    assert recording.operations[2].inputs[0].data.tolist() == [7, 2]
    assert recording.operations[2].inputs[0].producer == 0


def test_recordings_do_not_see_each_others_work_nor_that_of_trace():
    x = torch.ones(2, **DOUBLE)
    with record() as outer:
        y = x * 2
        with record() as inner:
            z = y + 1
        trace(z).to_dict()
        inner.graph(z).text()
    assert [op.name for op in outer] == ["mul", "add"]
    assert [op.name for op in inner] == ["add"]


def test_a_tensor_subclass_does_not_see_the_copies():
    calls = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), keywords=None):
            calls.append(function.__name__)
            return super().__torch_function__(function, types, arguments, keywords or {})

    x = torch.ones(2).as_subclass(Logged)
    with record() as recording:
        torch.mul(x, 2)
    assert calls == ["mul"]
    assert recording.operations[0].outputs[0].data.tolist() == [2, 2]


def test_modules_that_run_in_another_thread_are_not_on_the_path():
    def elsewhere():
        module = nn.Identity()
        module.forward = lambda x: started.set() or go_on.wait(10)
        module(None)

    class Waits(nn.Module):
        def forward(self, x):
            thread.start()
            started.wait(10)
            x = x * 2
            go_on.set()
            thread.join()
            return x + 1

    started, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=elsewhere)
    with record(names=nn.Sequential(Waits())) as recording:
        recording.names(torch.ones(1))
    assert [(op.name, op.module) for op in recording][1:] == [("mul", "0"), ("add", "0")]


def test_the_graph_of_another_thread_gets_no_line():
    x = torch.ones(2, **DOUBLE)
    result = []
    thread = threading.Thread(target=lambda: result.append((x * 2).exp()))
    with record() as recording:
        thread.start()
        thread.join()
        total = result[0].sum()
    assert lines(recording.graph(total)) == [
        ("mul", None),
        ("exp", None),
        ("sum", "total = result[0].sum()"),
    ]


def test_a_forked_worker_records_nothing():
    recorder = record()
    with recorder as recording:
        recorder._mode.process = -1
        torch.ones(2) + torch.ones(2)
    assert len(recording) == 0


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with record(names=model) as recording:
        loss = model(torch.ones(2, 3)).sum()
    graph = recording.graph(loss, gradients=True)
    assert graph.find("0.weight").value.shape == (4, 3)


def test_values_inside_vmap_are_those_of_the_whole_batch():
    x = torch.arange(6.0).reshape(3, 2)
    with record() as recording:
        torch.func.vmap(lambda row: row * 2)(x)
    product = next(op for op in recording if op.name == "mul")
    assert product.outputs[0].data.tolist() == (x * 2).tolist()


def test_a_compiled_function_computes_the_same():
    x = torch.ones(2, 3, **DOUBLE)
    compiled = torch.compile(lambda x: (x * 2).sin().sum(), backend="eager", fullgraph=True)
    expected = compiled(x)
    with record(names={"x": x}) as recording:
        result = compiled(x)
        loss = result + 1
    assert result.item() == expected.item()
    graph = recording.graph(loss, gradients=True)
    assert graph.operations[-1].line.text == "loss = result + 1"
    assert torch.allclose(graph.find("x").gradient, 2 * torch.cos(2 * x))


def test_a_gradient_that_is_computed_in_the_block_is_an_operation():
    x = torch.tensor(2.0, **DOUBLE)
    with record() as recording:
        y = x**3
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        loss = slope**2
    assert [op.name for op in recording] == ["pow", "grad", "pow"]
    graph = recording.graph(loss, {"slope": slope}, gradients=True)
    assert (graph.find("slope").value.item(), graph.leaves[0].gradient.item()) == (12.0, 288.0)
    assert graph.find("slope").line.text.startswith("(slope,)")


def test_gradients_of_a_leaf_frozen_since():
    x, w = torch.tensor(2.0, **DOUBLE), torch.tensor(3.0, **DOUBLE)
    with record(names={"x": x, "w": w}) as recording:
        y = x * w
    w.requires_grad_(False)
    assert recording.graph(y, gradients=True).find("w").gradient.item() == 2.0


def test_gradients_leave_no_hook_behind_even_if_a_backward_fails():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("the reader's")

    x = torch.tensor(2.0, **DOUBLE)
    with record() as recording:
        good = x.exp() * 2
        bad = Fails.apply(x.exp())
    graph = recording.graph(good, gradients=True)
    good.backward(retain_graph=True)
    assert len(graph.backward_order) == 2
    with pytest.raises(ValueError, match="the reader's"):
        recording.graph(bad, gradients=True)
    assert bad.grad_fn._register_hook_dict.__self__ is bad.grad_fn
    dropped = weakref.ref(graph.nodes[0])
    del graph
    gc.collect()
    assert dropped() is None


def test_gradients_need_one_real_number():
    x = torch.ones(2, **DOUBLE)
    z = torch.tensor(1j, requires_grad=True)
    with record() as recording:
        y, w = x.sum(), z * z
    with pytest.raises(
        ValueError, match=r"one real scalar output, got shape \(\) of torch.complex64"
    ):
        recording.graph(w, gradients=True)
    with pytest.raises(ValueError, match=r"got shape \(\) of torch.float64, \(\) of torch.float64"):
        recording.graph([y, y], gradients=True)
    assert len(recording.graph([y, w]).outputs) == 2


def test_names_are_checked_before_anything_runs():
    with pytest.raises(TypeError, match="names is a generator, expected a module"):
        record(names=nn.Linear(2, 2).named_parameters())


def test_a_recording_can_go_on_later():
    x = torch.ones(2, **DOUBLE)
    recorder = record()
    before = x.exp()
    with recorder as recording:
        y = before * 2
    between = y.sin()
    with recorder:
        z = between.sum()
    assert lines(recording.graph(z)) == [
        ("exp", None),
        ("mul", "y = before * 2"),
        ("sin", None),
        ("sum", "z = between.sum()"),
    ]


def test_what_was_there_before_a_change_through_a_view_gets_no_line():
    x = torch.ones(3, **DOUBLE)
    view = x.exp()[1:]
    with record() as recording:
        view.add_(1)
        total = view.sum()
    assert lines(recording.graph(total)) == [
        ("exp", None),
        ("copy_slices", "view.add_(1)"),
        ("as_strided", "view.add_(1)"),
        ("sum", "total = view.sum()"),
    ]


def test_an_overload_goes_by_the_name_of_its_operation():
    x = torch.ones(2)
    with record() as recording:
        torch.ops.aten.mul.Tensor(x, x)
    assert recording.operations[-1].name == "mul"


def test_a_node_has_the_value_of_its_first_result_when_it_was_made():
    x = torch.ones(2, **DOUBLE)
    _, second = x.unbind()
    with record() as recording:
        y = x * 2
        with torch.no_grad():
            y.add_(1)
        total = y.sum() + second
    values = {n.short: n.value for n in recording.graph(total).operations}
    assert values["unbind"] is None  # only the second one was seen
    assert values["mul"].tolist() == [2, 2]


def test_a_change_through_an_overlapping_view_is_seen():
    base = torch.zeros(3)
    left, right = base[:2], base[1:]
    with record() as recording:
        left.sum()
        right.add_(1)
        left.sum()
    assert recording.operations[2].inputs[0].data.tolist() == [0, 1]


def test_contributions_are_what_was_sent_whatever_a_hook_makes_of_it():
    x = torch.tensor(2.0, **DOUBLE)
    with record() as recording:
        h = x * 1
        loss = h * 3

    def spoil(gradient):
        gradient.zero_()

    h.register_hook(spoil)
    graph = recording.graph(loss, {"h": h}, gradients=True)
    assert graph.consumers(graph.find("h"))[0].gradient.item() == 3.0
    assert graph.find("h").gradient.item() == 0.0


def test_the_gradient_of_a_node_is_that_of_its_first_result():
    x = torch.ones(2, **DOUBLE)
    with record() as recording:
        left, right = x.unbind()
        loss = left * 2 + right * 3
    graph = recording.graph(loss, gradients=True)
    assert graph.operations[0].gradient.item() == 2.0
