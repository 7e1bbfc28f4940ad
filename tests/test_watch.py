"""bpkit.watch: what it records, what it finds out about a loop, and that it leaves no trace."""

import copy
import doctest
import gc
import importlib
import json
import pickle
import threading
import weakref
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.overrides import _len_torch_function_stack
from torch.utils.data import DataLoader, TensorDataset

from bpkit import record, watch
from bpkit.data import digits
from bpkit.diagnosis.dashboard import _label
from bpkit.diagnosis.evidence import Fact
from bpkit.diagnosis.recorder import Recorder
from bpkit.diagnosis.rules_loop import _comes_back, _often, _ratios, graph_retained
from bpkit.diagnosis.series import Series
from bpkit.diagnosis.wiring import norms, parameters_of, walk

SEEDS = (0, 1, 2)
LIMIT = 0.6


def setting(seed=0, kind=torch.optim.SGD, rate=0.05, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(12, 8, 5)
    batches = [(a, a[:, :3].argmax(1)) for a in x]
    return model, kind(model.parameters(), rate, **options), batches


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def plain(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def watched(loop, seed=0, every=10, **options):
    model, optimizer, batches = setting(seed, **options)
    with watch(model, optimizer, every=every) as log:
        loop(model, optimizer, batches)
    return log


def counts(log):
    return {name: fact.count for name, fact in log.evidence.facts.items()}


# Loops, and the facts that they leave; each runs 12 batches.


def no_zero(model, optimizer, batches):
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()


def zero_last(model, optimizer, batches):
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def zero_between(model, optimizer, batches):
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.zero_grad()
        optimizer.step()


def zero_by_hand(model, optimizer, batches):
    for number, batch in enumerate(batches):
        for p in model.parameters():
            if number % 2:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
        loss_of(model, batch).backward()
        optimizer.step()


def zero_in_place(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        optimizer.step()


def zero_by_module(model, optimizer, batches):
    for batch in batches:
        model.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def step_first(model, optimizer, batches):
    for batch in batches:
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, batch).backward()


def no_step(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()


def two_steps(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.step()


def accumulated(model, optimizer, batches, each=4, wipe=False):
    for number, batch in enumerate(batches):
        if wipe or number % each == 0:
            optimizer.zero_grad()
        (loss_of(model, batch) / each).backward()
        if number % each == each - 1:
            optimizer.step()


def accumulated_wiped(model, optimizer, batches):
    accumulated(model, optimizer, batches, wipe=True)


def accumulated_wiped_in_place(model, optimizer, batches):
    for number, batch in enumerate(batches):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        loss_of(model, batch).backward()
        if number % 4 == 3:
            optimizer.step()


def clipped(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def clipped_by_value(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()


def clipped_never(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()


def clipped_late(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def divided_later(model, optimizer, batches):
    for number, batch in enumerate(batches):
        loss_of(model, batch).backward()
        if number % 4 == 3:
            for p in model.parameters():
                p.grad /= 4
            optimizer.step()
            optimizer.zero_grad()


def by_autograd_grad(model, optimizer, batches):
    for batch in batches:
        found = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            p.grad = g
        optimizer.step()


def renewed(model, optimizer, batches):
    for batch in batches:
        optimizer = type(optimizer)(model.parameters(), 0.05)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def two_losses(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        out = model(batch[0])
        F.cross_entropy(out, batch[1]).backward(retain_graph=True)
        (1e-3 * out.square().mean()).backward()
        optimizer.step()


def weights_clamped(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-0.01, 0.01)


def hooked(model, optimizer, batches):
    def shrink(parameter):
        parameter.data.mul_(0.9)

    handles = [p.register_post_accumulate_grad_hook(shrink) for p in model.parameters()]
    plain(model, optimizer, batches)
    for handle in handles:
        handle.remove()


def eval_left_on(model, optimizer, batches):
    for number, batch in enumerate(batches):
        plain(model, optimizer, [batch])
        if number == 3:
            model.eval()


def closure(model, optimizer, batches):
    for batch in batches:

        def evaluate(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(evaluate)


def closure_without_zero(model, optimizer, batches):
    for batch in batches:

        def evaluate(batch=batch):
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(evaluate)


def last_without_step(model, optimizer, batches):
    """An epoch whose number of micro-batches is not a multiple."""
    for _ in range(2):
        optimizer.zero_grad()
        for number, batch in enumerate(batches[:10]):
            (loss_of(model, batch) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


LOOPS = [
    (plain, {}),
    (no_zero, {"used_again": 11}),
    (zero_last, {}),
    (zero_between, {"step_after_wipe": 12, "backward_wasted": 12}),
    (zero_by_hand, {}),
    (zero_in_place, {}),
    (zero_by_module, {}),
    (step_first, {"step_before_backward": 1}),
    (no_step, {"backward_wasted": 11}),
    (two_steps, {"gradient_used_twice": 12}),
    (accumulated, {}),
    (accumulated_wiped, {"backward_wasted": 9}),
    (accumulated_wiped_in_place, {"backward_wasted": 9}),
    (clipped, {"touched_scaled": 12}),
    (clipped_by_value, {"touched_uneven": 12}),
    (clipped_never, {"touched_nothing": 12}),
    (clipped_late, {"changed_after_step": 11}),
    (divided_later, {"touched_scaled": 3}),
    (by_autograd_grad, {"gradient_from_elsewhere": 12}),
    (renewed, {"optimizer_replaced": 11}),
    (two_losses, {"retain_graph": 12}),
    (weights_clamped, {"weights_changed": 3}),
    (hooked, {"weights_changed": 4}),
    (eval_left_on, {"backward_in_eval": 8}),
    (closure, {}),
    (closure_without_zero, {"used_again": 11}),
    (last_without_step, {"backward_wasted": 1}),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("loop", "facts"), LOOPS, ids=[loop.__name__ for loop, _ in LOOPS])
def test_facts_of_a_loop(loop, facts, seed):
    assert counts(watched(loop, seed)) == facts


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.NAdam])
@pytest.mark.parametrize(("loop", "facts"), LOOPS[:8], ids=[loop.__name__ for loop, _ in LOOPS[:8]])
def test_facts_do_not_depend_on_the_optimizer(loop, facts, kind):
    assert counts(watched(loop, kind=kind)) == facts


def test_details_say_where():
    fact = watched(no_zero).evidence.facts["used_again"]
    assert (fact.first, fact.last) == (2, 12)
    first = fact.details[0]
    assert first["parameters"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert first["of"] == 4
    assert "optimizer.step()" in first["line"]
    assert "in no_zero" in first["line"]


def test_orders_and_lines():
    log = watched(accumulated)
    evidence = log.evidence
    assert log.backwards.tolist() == [4, 4, 4]
    assert evidence.orders == {"zero backward×4 step": 3}
    (line,) = evidence.lines["backward"]
    assert "(loss_of(model, batch) / each).backward()" in line
    assert list(evidence.lines) == ["zero", "backward", "step"]


def test_what_was_done_between_backward_and_step():
    uneven = watched(clipped_by_value).evidence.facts["touched_uneven"].details[0]
    assert uneven["largest"] == pytest.approx(1e-3)
    assert uneven["at_largest"] == 4
    assert watched(divided_later).evidence.facts["touched_scaled"].details[0]["factor"] == 0.25
    by_hand = watched(weights_clamped).evidence.facts["weights_changed"].details[0]
    assert by_hand["when"] == "before backward"
    by_hook = watched(hooked).evidence.facts["weights_changed"].details[0]
    assert by_hook["when"] == "during backward"
    assert by_hook["number"] == 4
    late = watched(clipped_late).evidence.calls.values()
    assert [(c["function"], c["phase"]) for c in late] == [("clip_grad_norm_", "forward")]


def test_roots_and_forwards_tell_accumulation_from_several_losses():
    sample = watched(accumulated).evidence.samples[0]
    assert sample["forwards"] == 4
    assert sample["roots"] == [("DivBackward0", 0.25)] * 4
    sample = watched(two_losses).evidence.samples[0]
    assert sample["forwards"] == 1
    assert sample["roots"] == [("NllLossBackward0", None), ("MulBackward0", pytest.approx(1e-3))]


@pytest.mark.parametrize(("factor", "clipped"), [(1 - 3e-5, True), (1 - 2e-6, False)])
def test_a_shorter_gradient_is_clipped_a_rounded_one_is_not(factor, clipped):
    def shortened(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            for p in model.parameters():
                p.grad.mul_(factor)
            optimizer.step()

    assert (watched(shortened).clipped == clipped).all()


def test_what_is_counted_in_a_plain_loop():
    evidence = watched(plain).evidence
    assert evidence.modes == {"train": 12}
    assert evidence.backwards == 12
    assert [row["wasted"] for row in evidence.rows] == [0] * 12


def test_a_backward_pass_is_asked_for_what_the_program_asked_for():
    model, optimizer, batches = setting()
    with watch(model, optimizer) as log:
        torch.autograd.backward(loss_of(model, batches[0]))
        assert not any(p.grad.requires_grad for p in model.parameters())
        optimizer.step()
    assert "create_graph" not in counts(log)


def test_loss_of_a_step_is_the_mean_over_its_backward_passes():
    losses = []

    def loop(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            for factor in (1, 3):
                loss = factor * loss_of(model, batch)
                losses.append(loss.item())
                loss.backward()
            optimizer.step()

    log = watched(loop)
    assert np.allclose(log.loss, np.reshape(losses, (12, 2)).mean(axis=1), rtol=1e-5)


def test_no_more_than_300_graphs_are_remembered():
    """To free a longer chain of them than that would overflow the stack."""

    def long(model, optimizer, batches):
        for _ in range(310 // len(batches) + 1):
            plain(model, optimizer, batches)

    graphs = watched(long, every=1).evidence.graphs
    assert max(graph["tagged"] for graph in graphs) == 300 - 2
    assert len(graphs) <= 4 * 64  # and of what was seen in each, the first ones and the last
    assert (graphs[0]["step"], graphs[-1]["step"]) == (1, 312)


def test_backward_passes_without_a_step_fill_no_memory():
    model, optimizer, batches = setting()
    with Recorder(model, optimizer) as recorder:
        for _ in range(300):
            loss_of(model, batches[0]).backward()
        slots = recorder._gradients.slots.values()
        assert [len(slot.fed) for slot in slots] == [300 - 128] * 4
        optimizer.step()
    (row,) = recorder.evidence.rows
    assert row["backwards"] == 300 - 128
    assert recorder.evidence.backwards == 300


def test_backward_passes_that_were_wiped_are_counted():
    def twice(model, optimizer, batches):
        for batch in batches:
            loss_of(model, batch).backward()
            loss_of(model, batch).backward()
            optimizer.zero_grad()
            optimizer.step()

    for loop, count in ((zero_between, 1), (twice, 2)):
        details = watched(loop).evidence.facts["step_after_wipe"].details
        assert {detail["backwards"] for detail in details} == {count}


def test_optimizers_are_numbered_in_the_order_in_which_they_are_met():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in model]
    with watch(model, *optimizers) as log:
        model(torch.ones(4, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [facts["number"] for facts in log.evidence.optimizers] == [0, 1, 2]


def test_result_of_a_clip_thrown_away():
    def noop(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            for p in model.parameters():
                p.grad.clamp(-1e-3, 1e-3)
            optimizer.step()

    def assigned(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            for p in model.parameters():
                p.grad = p.grad.clamp(-1e-3, 1e-3)
            optimizer.step()

    def logged(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            [p.grad.clamp(-1, 1).norm().item() for p in model.parameters()]
            optimizer.step()

    (call,) = watched(noop).evidence.calls.values()
    assert call["function"] == "clamp"
    assert (call["calls"], call["read"], call["alive"], call["in_place"]) == (16, 0, 0, False)
    assert (call["looks"], call["first"], call["last"]) == (4, 1, 10)
    assert "p.grad.clamp(-1e-3, 1e-3)" in call["line"]
    for loop in (assigned, logged):
        (call, *_) = watched(loop).evidence.calls.values()
        assert call["function"] == "clamp"
        assert call["read"] == call["calls"] == 16
    assert counts(watched(assigned)) == {"touched_uneven": 12}


def test_clip_that_sees_no_gradient():
    def exhausted(model, optimizer, batches):
        parameters = model.parameters()
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(parameters, 1e-3)
            optimizer.step()

    with pytest.warns(UserWarning, match="empty generator"):
        log = watched(exhausted)
    calls = list(log.evidence.calls.values())
    assert {c["function"] for c in calls} == {"clip_grad_norm_"}
    assert log.evidence.facts["touched_scaled"].count == 1  # the first time there was something


def test_retained_graph_is_counted():
    def kept(model, optimizer, batches):
        total = 0.0
        for batch in batches * 3:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            total = total + loss
        return total.detach(), total

    model, optimizer, batches = setting()
    with watch(model, optimizer) as log:
        number, held = kept(model, optimizer, batches)
    last = log.evidence.graphs[-1]
    assert last["tagged"] >= 30
    assert last["alive"] == last["tagged"]
    assert number == held
    healthy = watched(lambda m, o, b: plain(m, o, b * 3)).evidence.graphs[-1]
    assert healthy["tagged"] >= 30
    assert healthy["alive"] == 0


def test_kept_outputs_keep_the_graph_too():
    def kept(model, optimizer, batches):
        outputs = []
        for batch in batches:
            optimizer.zero_grad()
            outputs.append(model(batch[0]))
            F.cross_entropy(outputs[-1], batch[1]).backward()
            optimizer.step()
        return outputs

    model, optimizer, batches = setting()
    with watch(model, optimizer) as log:
        outputs = kept(model, optimizer, batches)
    assert log.evidence.graphs[-1]["alive"] == log.evidence.graphs[-1]["tagged"] == 10
    assert len(outputs) == 12


def test_graph_that_grows():
    torch.manual_seed(0)
    cell = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(cell.parameters(), 1e-3)
    state = torch.zeros(3)
    with watch(cell, optimizer) as log:
        for _ in range(3):  # the hidden state is never detached
            state = torch.tanh(cell(state))
            optimizer.zero_grad()
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                state.sum().backward(retain_graph=True)
    assert log.steps == 0
    with watch(cell, optimizer) as log:
        nodes = []
        for _ in range(3):
            state = torch.tanh(cell(state))
            optimizer.zero_grad()
            state.sum().backward(retain_graph=True)
            cell.weight.grad = None
            optimizer.step()
        nodes = [graph["nodes"] for graph in log.evidence.graphs]
    assert nodes[0] < nodes[1] < nodes[2]


def test_a_long_chain_that_was_looked_at_can_be_freed():
    cell = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(cell.parameters(), 0.0)
    with watch(cell, optimizer) as log:
        state = cell(torch.ones(1))
        for _ in range(100_000):
            state = state * 1.0
        state.sum().backward()
        optimizer.step()
    graph = log.evidence.graphs[0]
    assert (graph["nodes"], graph["complete"]) == (20_000, False)
    del state  # with all nodes seen by Python, this would overflow the stack


def test_wiring():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = nn.Linear(5, 5)
            self.hidden = [nn.Linear(5, 5)]
            self.scale = nn.Parameter(torch.ones(5, 1)).squeeze(1)
            self.idle = nn.Linear(2, 2)
            self.frozen = nn.Linear(5, 3).requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.hidden[0](self.seen(x)) * self.scale)

    torch.manual_seed(0)
    model = Odd()
    stranger = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD(
        [*model.seen.parameters(), *model.frozen.parameters(), stranger], 0.1
    )
    batches = setting()[2]
    with watch(model, optimizer) as log:
        plain(model, optimizer, batches)
    evidence = log.evidence
    assert {(leaf["held"], leaf["shape"]) for leaf in evidence.leaves} == {
        ("hidden[0].weight", (5, 5)),
        ("hidden[0].bias", (5,)),
        ("scale", (5, 1)),
    }
    assert [(leaf["first"], leaf["looks"]) for leaf in evidence.leaves] == [(1, 4)] * 3
    assert evidence.parameters["idle.weight"] == {
        "looks": 4, "with_gradient": 0, "nonzero_gradient": 0, "moved": 0,
        "moved_without_gradient": 0, "shape": (2, 2), "module": "Linear", "trainable": True,
        "owner": None, "hooks": 0, "post_hooks": 0,
    }  # fmt: skip
    assert evidence.parameters["seen.weight"]["moved"] == 4
    assert evidence.parameters["seen.weight"]["with_gradient"] == 4
    named = {finding.slug: finding for finding in log.report().findings}
    assert named["unregistered-parameter"].where == evidence.leaves[0]["held"]
    assert evidence.parameters["seen.weight"]["owner"] == 0
    (facts,) = evidence.optimizers
    assert facts["frozen"] == ["frozen.weight", "frozen.bias"]
    assert [one["shape"] for one in facts["outside"]] == [(4,)]
    assert evidence.graphs[0]["unreached"] == [
        "idle.weight",
        "idle.bias",
        facts["outside"][0]["name"],
    ]


def test_parameter_bound_anew():
    def loop(model, optimizer, batches):
        for batch in batches:
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())
            plain(model, optimizer, [batch])

    facts = watched(loop).evidence.facts["rebound"]
    assert facts.count >= 3
    assert facts.details[1] | {"line": ""} == {
        "step": 3, "name": "2.weight", "shape": (3, 16), "owned_before": False,
        "owned_now": False, "line": "",
    }  # fmt: skip


def test_optimizers_made_in_the_loop():
    model, _, batches = setting()
    with watch(model) as log:
        renewed(model, torch.optim.Adam(model.parameters()), batches)
    fact = log.evidence.facts["optimizer_replaced"]
    assert fact.details[0]["state_lost"]
    assert fact.details[0]["after_steps"] == 1
    assert fact.details[0]["same_parameters"]
    assert [one["steps"] for one in log.evidence.optimizers] == [1] * 12
    assert len(log._recorder._owners) <= 1  # the dead ones are let go
    assert log.steps == 12
    unfrozen = watched(
        lambda m, o, b: (plain(m, o, b), plain(m, torch.optim.SGD(m[0].parameters(), 0.1), b))
    )
    assert not unfrozen.evidence.facts["optimizer_replaced"].details[0]["same_parameters"]


def gan(first, second, one, two, batches):
    for x, _ in batches:
        two.zero_grad()
        made = first(torch.randn(8, 5))
        (second(x).mean() - second(made.detach()).mean()).backward()
        two.step()
        one.zero_grad()
        second(first(torch.randn(8, 5))).mean().backward()  # leaves gradients in the critic too
        one.step()


def test_gan_is_clean():
    for seed in SEEDS:
        torch.manual_seed(seed)
        first, second = nn.Linear(5, 5), nn.Linear(5, 1)
        one = torch.optim.Adam(first.parameters(), 1e-3)
        two = torch.optim.Adam(second.parameters(), 1e-3)
        batches = setting(seed)[2]
        both = nn.ModuleList([first, second])
        with watch(both, one, two) as log:
            gan(first, second, one, two, batches)
        assert counts(log) == {}
        assert log.steps == 24
        assert set(log.backwards) == {1}
        orders = {"zero:1 backward step:1": 12, "zero backward step": 12}
        assert log.evidence.orders == orders
        assert {s["optimizer"] for s in log.evidence.samples} == {0, 1}
        with watch(first, one) as log:
            gan(first, second, one, two, batches)
        assert counts(log) == {"backward_reached_nothing": 12}
        assert log.steps == 12


def test_two_optimizers_after_one_backward():
    model, _, batches = setting()
    one, two = (torch.optim.SGD(part.parameters(), 0.1) for part in (model[0], model[2]))
    with watch(model, one, two) as log:
        for batch in batches:
            one.zero_grad()
            two.zero_grad()
            loss_of(model, batch).backward()
            one.step()
            two.step()
    assert counts(log) == {}
    assert log.loss[0] == log.loss[1]
    assert not np.isnan(log.loss).any()


def test_lbfgs():
    model, optimizer, batches = setting(kind=torch.optim.LBFGS, rate=0.5)
    with watch(model, optimizer) as log:
        closure(model, optimizer, batches)
    assert counts(log) == {}
    assert log.steps == 12
    assert log.backwards.max() > 5
    log = watched(closure_without_zero, kind=torch.optim.LBFGS, rate=0.01)
    assert log.evidence.facts["used_again"].count > 12


def test_accumulation_inside_a_closure():
    model, optimizer, batches = setting(kind=torch.optim.LBFGS, rate=0.5)

    def evaluate():
        optimizer.zero_grad()
        losses = [loss_of(model, batch) / 4 for batch in batches[:4]]
        for loss in losses:
            loss.backward()
        return sum(losses)

    with watch(model, optimizer) as log:
        for _ in range(3):
            optimizer.step(evaluate)
    assert counts(log) == {}
    assert log.backwards[0] % 4 == 0


def scaled(model, optimizer, batches, clip=None, explicit=True, spoil=()):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (float("inf") if number in spoil else 1)
        scaler.scale(loss).backward()
        if explicit:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


def test_loss_scaler():
    bare = watched(plain)
    for explicit in (True, False):
        log = watched(lambda *a, e=explicit: scaled(*a, explicit=e))
        assert np.allclose(log.loss, bare.loss, rtol=1e-5)
        assert np.allclose(log.global_norm, bare.global_norm, rtol=1e-5)
        assert np.allclose(log.applied_norm, bare.global_norm, rtol=1e-5)
        assert not log.clipped.any()
        assert set(counts(log)) <= {"touched_nothing"}
        assert log.evidence.scales == [(1, 1024), (6, 2048), (11, 4096)]
        assert np.allclose(log.cosine, bare.cosine, rtol=1e-4, equal_nan=True)
    assert watched(lambda *a: scaled(*a, clip=1e-3)).clipped.all()
    log = watched(lambda *a: scaled(*a, clip=1e-3, explicit=False))
    assert counts(log)["touched_while_scaled"] == 12
    log = watched(lambda *a: scaled(*a, spoil=(4, 7)))
    assert counts(log)["step_skipped"] == 2
    assert "used_again" not in counts(log)
    assert log.steps == 10


def test_a_clip_of_scaled_gradients_is_measured_in_their_scale():
    def never_unscaled(model, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    log = watched(lambda *a: scaled(*a, explicit=False, clip=0.5))
    scales = np.repeat([1024, 2048, 4096], [5, 5, 2])
    assert np.allclose(log.applied_norm, 0.5 / scales, rtol=1e-4)
    assert np.allclose(watched(never_unscaled).applied_norm, 0.5 / 1024, rtol=1e-4)


def test_scaled_and_plain_losses_in_turn():
    def loop(model, optimizer, batches):
        for number in range(0, 12, 2):
            scaled(model, optimizer, batches[number : number + 1])
            plain(model, optimizer, batches[number + 1 : number + 2])

    log, bare = watched(loop), watched(plain)
    assert np.allclose(log.loss, bare.loss, rtol=1e-5)
    assert np.allclose(log.global_norm, bare.global_norm, rtol=1e-5)


class Around(torch.optim.Optimizer):
    """An optimizer that has another one make its step, as SAM and Lookahead do."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure=None):
        self.base.step(closure)


def test_an_optimizer_inside_another_one():
    model, optimizer, batches = setting()
    outer = Around(optimizer)
    with watch(model, outer) as log:
        plain(model, outer, batches)
    assert counts(log) == {}
    assert log.steps == 12
    assert log.evidence.orders == {"zero backward step": 12}


def test_update_ratios_are_those_of_weights_and_not_of_vectors():
    """A bias starts near 0, so that its first changes are many times its size."""
    evidence = watched(plain).evidence
    late = [sample for sample in evidence.samples if sample["step"] > 2]
    weights = [sample["change"][name] / sample["before"][name]
               for sample in late for name in ("0.weight", "2.weight")]  # fmt: skip
    assert sorted(_ratios(evidence)) == sorted(weights) != []


def test_shared_parameters_are_met_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert [name for name, *_ in parameters_of(model)] == ["0.weight", "0.bias", "1.bias"]


def test_a_walk_counts_operations_and_gathers_leaves():
    w = torch.ones(2, requires_grad=True)
    count, leaves, complete = walk([(w * 2 + w).sum().grad_fn], 100)
    assert (count, complete) == (3, True)
    assert leaves == [w]
    assert walk([(w * 2).sum().grad_fn], 1)[2] is False


def test_norms_of_tensors_without_entries():
    tensors = [torch.tensor([3.0, -4.0]), torch.zeros(0)]
    assert [float(norm) for norm in norms(tensors)] == [5, 0]
    assert [float(norm) for norm in norms(tensors, float("inf"))] == [4, 0]


def test_a_closer_look_is_opened_once_and_not_at_all_when_they_are_given_up():
    model, optimizer, _ = setting()
    with Recorder(model, optimizer) as recorder:
        look = recorder._closer
        heard = look._calls
        assert look.open
        look.start()
        assert look._calls is heard
        assert _len_torch_function_stack() == 1
        look.mute()
        look.start()
        assert not look.open
    assert _len_torch_function_stack() == 0


def test_steps_made_during_backward():
    model, _, batches = setting()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with watch(model, *optimizers.values()) as log:
        for batch in batches:
            loss_of(model, batch).backward()
    assert _len_torch_function_stack() == 0
    assert counts(log) == {}
    assert log.steps == 48
    assert (log.global_norm > 0).all()


def test_arrays():
    model, optimizer, batches = setting(rate=0.1)
    norms, losses, ratios, cosines, last = [], [], [], [], None
    with watch(model, optimizer, every=4) as log:
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            before = model[0].weight.detach().clone()
            losses.append(loss.item())
            norms.append(gradient.norm().item())
            cosines.append(
                np.nan if last is None else F.cosine_similarity(gradient, last, 0).item()
            )
            last = gradient
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            ratios.append(((model[0].weight - before).norm() / before.norm()).item())
    assert log.steps == 12
    assert log.step.tolist() == list(range(1, 13))
    assert log.sampled.tolist() == [1, 2, 3, 4, 8, 12]
    chosen = log.sampled - 1
    assert np.allclose(log.loss, losses)
    assert np.allclose(log.global_norm, norms)
    assert np.allclose(log.applied_norm, np.minimum(norms, LIMIT), rtol=1e-4)
    assert log.clipped.tolist() == [norm > LIMIT for norm in norms]
    assert 0 < log.clipped.sum() < 12
    assert np.allclose(log.update_ratio["0.weight"], np.array(ratios)[chosen])
    assert np.allclose(log.cosine, np.array(cosines)[chosen], equal_nan=True, atol=1e-5)
    assert (log.learning_rate == 0.1).all()
    assert set(log.gradient_norm) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(log.dead) == {"1"}


@pytest.mark.parametrize("in_place", [False, True])
def test_cosine_whatever_happens_to_the_gradient(in_place):
    def loop(model, optimizer, batches):
        for _ in batches:
            optimizer.zero_grad(set_to_none=not in_place)
            loss_of(model, batches[0]).backward()
            optimizer.step()

    cosine = watched(loop, every=3, rate=1e-4).cosine
    assert np.isnan(cosine[0])
    assert (cosine[2:] > 0.999).all()


def test_groups_schedulers_and_epochs():
    model, _, batches = setting()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, 0.1)
    scheduler = StepLR(optimizer, 2, 0.5)
    data = DataLoader(TensorDataset(torch.cat([x for x, _ in batches])), batch_size=24)
    with watch(model, optimizer) as log:
        for _ in range(3):
            for (x,) in data:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            scheduler.step()
    assert log.learning_rate.shape == (12, 2)
    assert log.learning_rate[-1].tolist() == [0.05, 0.25]
    assert log.evidence.epochs == [{"step": s, "batches": 4} for s in (1, 5, 9)]
    facts = log.evidence.schedulers["StepLR"]
    assert (facts["steps"], facts["settings"]["step_size"]) == (3, 2)
    assert log.evidence.orders == {"zero backward step": 10, "scheduler zero backward step": 2}


def test_a_part_that_raises_and_is_caught_does_not_move_the_places_after_it():
    class Picky(nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.body, self.head = Picky(), nn.Linear(3, 5), nn.Linear(5, 1)

        def forward(self, x):
            with suppress(ValueError):
                return self.part(x)
            return self.head(F.relu(self.body(x)))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer) as log:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    (place,) = log.dead
    assert "forward: return self.head(F.relu(self.body(x)))" in place
    assert "part" not in place


def test_dead_and_saturated_units_of_functions_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv1d(1, 4, 1), nn.Linear(6, 6), nn.Linear(6, 6)
            self.d = nn.Linear(24, 2)
            with torch.no_grad():
                self.a.bias[:1] = -100.0
                self.b.weight *= 100
                self.c.bias[:3] = -100.0

        def forward(self, x):
            x = F.relu(self.a(x))
            x = torch.tanh(self.b(x) * 1e4)
            x = x * torch.sigmoid(x)
            x = self.c(x).clamp(min=0)
            return self.d(x.flatten(1))

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watch(model, optimizer) as log:
        optimizer.zero_grad()
        model(torch.randn(32, 1, 6)).square().sum().backward()
        optimizer.step()
    dead = {place.split(": ")[1]: values[0] for place, values in log.dead.items()}
    assert dead == {"x = F.relu(self.a(x))": 0.25, "x = self.c(x).clamp(min=0)": 0.5}
    high = {place.split(": ")[1]: values[0] for place, values in log.saturated.items()}
    assert high["x = torch.tanh(self.b(x) * 1e4)"] > 0.9
    assert high["x = x * torch.sigmoid(x)"] == 0
    facts = {place.split(": ")[1]: facts for place, facts in log.evidence.activations.items()}
    assert facts["x = x * torch.sigmoid(x)"]["gate"]
    assert not facts["x = self.c(x).clamp(min=0)"]["gate"]
    assert [one["followers"] for one in facts.values()] == [3, 2, 2, 1]
    assert facts["x = F.relu(self.a(x))"]["samples"] == 32 * 6


def test_one_line_that_runs_several_times():
    """With 0, 1 and 2 of 4 units dead, in turn."""

    def net(x):
        for shift in shifts:
            x = F.relu(layer(x) + shift)
        return x

    layer = nn.Linear(4, 4, bias=False)
    nn.init.eye_(layer.weight)
    shifts = torch.tensor([[5.0, 5, 5, 5], [-1e6, 5, 5, 5], [5, -1e6, -1e6, 5]])
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    with watch(layer, optimizer) as log:
        net(torch.ones(32, 4)).sum().backward()
        optimizer.step()
    dead = {place.split(": ")[1]: values[0] for place, values in log.dead.items()}
    line = "x = F.relu(layer(x) + shift)"
    assert dead == {line: 0, f"{line} (2)": 0.25, f"{line} (3)": 0.5}


def test_not_finite():
    def loop(model, optimizer, batches):
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            (loss_of(model, batch) * (float("nan") if number == 5 else 1)).backward()
            optimizer.step()

    facts = watched(loop).evidence.facts
    assert facts["loss_not_finite"].first == facts["gradient_not_finite"].first == 6
    assert facts["gradient_not_finite"].details[0]["parameters"] == [
        "0.weight", "0.bias", "2.weight", "2.bias",
    ]  # fmt: skip


def test_sparse_half_and_shared_parameters():
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
    with watch(table, optimizer, every=1) as log:
        for _ in range(6):
            optimizer.zero_grad()
            table(torch.tensor([1, 1, 3])).square().sum().backward()
            optimizer.step()
    assert counts(log) == {}
    assert (log.global_norm > 0).all()
    assert (log.cosine[1:] > 0.9).all()
    model = nn.Linear(3, 3).half()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watch(model, optimizer) as log:
        (model(torch.ones(1, 3).half()) * 6e4).sum().backward()
        optimizer.step()
    assert 1e5 < log.global_norm[0] < 1e6
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer) as log:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert counts(log) == {}


def train(seed, every=None, kind=torch.optim.Adam):
    model, optimizer, batches = setting(seed, kind=kind, rate=1e-2)
    model.insert(2, nn.Dropout(0.3))
    loop = closure if kind is torch.optim.LBFGS else plain
    if every is None:
        loop(model, optimizer, batches)
    else:
        with watch(model, optimizer, every=every):
            loop(model, optimizer, batches)
    return [*model.parameters(), *(p.grad for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("seed", SEEDS)
def test_training_is_the_same_to_the_bit(seed, kind):
    bare = train(seed, kind=kind)
    for every in (1, 10):
        assert all(map(torch.equal, bare, train(seed, every, kind)))


def state_of_torch():
    return {
        "backward": torch.autograd.backward,
        "zero": torch.optim.Optimizer.zero_grad,
        "module zero": nn.Module.zero_grad,
        "scheduler": LRScheduler.step,
        "scaler": dict(vars(torch.amp.GradScaler)),
        "loader": DataLoader.__iter__,
        "modes": _len_torch_function_stack(),
        "steps": (
            len(optimizer_hooks._global_optimizer_pre_hooks),
            len(optimizer_hooks._global_optimizer_post_hooks),
        ),
        "modules": (
            len(module_hooks._global_forward_hooks),
            len(module_hooks._global_forward_pre_hooks),
        ),
    }


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["before", "forward", "closure", "after step"])
def test_nothing_is_left_behind(error, when):
    class Interrupt(nn.Module):
        def forward(self, x):
            if error is not None and when in ("forward", "closure"):
                raise error
            return x

    before = state_of_torch()
    model, optimizer, batches = setting()
    model.append(Interrupt())
    attributes = {key: dict(vars(m)) for key, m in model.named_modules()}
    log = watch(model, optimizer)
    with pytest.raises(error) if error else nullcontext(), log:
        if when == "before" and error:
            raise error
        (closure if when == "closure" else plain)(model, optimizer, batches[:1])
        if error:
            raise error
    if error:
        assert log.evidence.facts["raised"].details[0]["error"].startswith(error.__name__)
    assert state_of_torch() == before
    assert {key: dict(vars(m)) for key, m in model.named_modules()} == attributes
    assert all(not p._backward_hooks for p in model.parameters())
    assert all(p._post_accumulate_grad_hooks is None for p in model.parameters())


def test_modes_of_the_reader_may_come_and_go():
    model, optimizer, batches = setting()
    with watch(model, optimizer, every=1) as log:
        for batch in batches:
            with record() as recording, torch.device("cpu"):
                plain(model, optimizer, [batch])
            assert _len_torch_function_stack() == 1  # only the log's own
            assert len(recording) > 3
        torch.set_default_device("cpu")
        plain(model, optimizer, batches)
        torch.set_default_device(None)
    assert _len_torch_function_stack() == 0
    assert len(log.dead["1"]) == 24


def test_logs_inside_logs_and_again():
    model, optimizer, batches = setting()
    before = state_of_torch()
    outer = watch(model, optimizer)
    with outer, watch(model, optimizer) as inner:
        plain(model, optimizer, batches)
    assert outer.steps == inner.steps == 12
    assert np.array_equal(outer.loss, inner.loss)
    assert counts(outer) == counts(inner) == {}
    with outer:  # goes on
        plain(model, optimizer, batches)
        with pytest.raises(RuntimeError, match="already running"), outer:
            pass
        plain(model, optimizer, batches[:1])
    assert (outer.steps, inner.steps) == (25, 12)
    assert counts(outer) == {}
    assert state_of_torch() == before


def test_the_model_can_be_copied_and_saved_meanwhile():
    model, optimizer, batches = setting()
    with watch(model, optimizer):
        plain(model, optimizer, batches[:2])
        twin = copy.deepcopy(model)
        pickle.loads(pickle.dumps(model))
        copy.deepcopy(optimizer.state_dict())
    assert all(map(torch.equal, twin.parameters(), model.parameters())) is True


def test_other_threads_and_other_models_are_ignored():
    model, optimizer, batches = setting()
    other, its_own, _ = setting(1)

    def work():
        plain(other, its_own, batches)

    with watch(model, optimizer) as log:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert log.steps == 0
        plain(other, its_own, batches)
        plain(model, optimizer, batches)
    assert log.steps == 12
    assert counts(log) == {"backward_reached_nothing": 12}


def test_loader_with_workers():
    model, optimizer, batches = setting()
    worker = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    data = DataLoader(torch.cat([x for x, _ in batches]), batch_size=32, **worker)
    with watch(model, optimizer, every=1) as log:
        for x in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert log.steps == 3


def test_compiled_model_is_watched_from_outside():
    model, optimizer, batches = setting()
    compiled = torch.compile(model, backend="eager")
    with watch(compiled, optimizer) as log:
        plain(compiled, optimizer, batches)
    assert log.steps == 12
    assert log.dead == {}
    assert counts(log) == {}
    assert (log.global_norm > 0).all()


def test_no_reference_keeps_a_model_or_a_gradient():
    model, optimizer, batches = setting()
    with watch(model, optimizer):
        plain(model, optimizer, batches)
    gone = weakref.ref(model[0].weight), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_errors_say_what_to_do():
    model, optimizer, _ = setting()
    with pytest.raises(TypeError, match="expected the model first, got SGD"):
        watch(optimizer, model)
    with pytest.raises(
        TypeError, match=r"expected torch\.optim optimizers after the model, got list"
    ):
        watch(model, [optimizer])
    with pytest.raises(ValueError, match="every is 0"):
        watch(model, optimizer, every=0)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        watch(empty)


def test_long_runs_are_thinned():
    series = Series(limit=100, waiting=10)
    for number in range(1, 1001):
        series.add({"step": number, "loss": torch.tensor(float(number))})
    series.settle()
    steps = [row["step"] for row in series.rows]
    assert 50 <= len(steps) <= 100
    assert np.unique(np.diff(steps)).tolist() == [16]
    assert all(row["loss"] == row["step"] for row in series.rows)
    assert len(watched(lambda m, o, b: plain(m, o, b * 50)).step) == 600


def test_a_loss_made_from_a_number_is_detached_and_placed():
    def renewed(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            torch.tensor(loss_of(model, batch).item(), requires_grad=True).backward()
            optimizer.step()

    (finding,) = [f for f in watched(renewed).report().faults if f.slug == "detached"]
    assert "requires_grad=True).backward()" in finding.where
    assert finding.evidence.startswith("12 of 12 backward passes left no gradient")


def test_a_schedule_written_for_single_steps_may_fall_fast():
    def halved(model, optimizer, batches):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()

    report = watched(halved).report()
    assert "scheduler-per-batch" not in [finding.slug for finding in report.findings]


def test_graphs_kept_at_two_looks_are_kept():
    looks = [{"tagged": 20, "alive": 6, "step": 11}, {"tagged": 30, "alive": 9, "step": 21}]
    for count, named in ((1, False), (2, True)):
        evidence = SimpleNamespace(graphs=looks[:count], lines={})
        assert bool([*graph_retained(None, evidence)]) is named


def test_to_dict_is_json_and_plots():
    log = watched(clipped)
    data = json.loads(json.dumps(log.to_dict()))
    assert data["loss"] == log.loss.tolist()
    assert data["cosine"][0] is None
    assert data["weights"] == ["0.weight", "2.weight"]
    figure = log.plot()
    titles = [ax.get_title("left") for ax in figure.axes]
    assert len(titles) == 6
    assert "12 of 12 clipped" in titles[1]
    assert figure.axes[4].get_ylim() == (-0.05, 1.05)  # shares: none, or all
    with_baseline = watched(plain).plot(data)
    assert "baseline" in with_baseline.axes[1].get_title("left")
    assert [t.get_text() for t in with_baseline.axes[0].texts] == ["this run", "baseline"]


@pytest.mark.parametrize("ends", [[0.0, 0.01, 0.02], [1.0, 0.99, 0.98], [0.0, 0.5, 1.0]])
def test_names_of_lines_stay_inside_and_apart(ends):
    ax, step = Figure().subplots(), np.arange(2.0)
    lines = [(step, np.array([0.5, end]), f"line {end}", "k") for end in [*ends, 0.5]]
    ax.plot([0, 0], [0, 1])
    for x, y, *_ in lines:
        ax.plot(x, y)
    _label(ax, lines)
    low, high = ax.get_ylim()
    heights = np.array([text.xy[1] for text in ax.texts])
    assert (np.diff(heights) >= 0.159 * (high - low)).all()
    assert heights[0] >= low + 0.059 * (high - low)
    assert heights[-1] <= high


@pytest.mark.parametrize(("steps", "often"), [(11, True), (12, False)])
def test_often_is_on_half_of_the_steps(steps, often):
    fact = Fact(first=1, count=5)
    evidence = SimpleNamespace(facts={"seen": fact}, optimizers=[{"steps": steps}], steps=steps)
    assert _often(evidence, "seen") is (fact if often else None)
    assert _often(evidence, "not seen") is None


def test_a_loss_counts_as_it_was_weighted():
    model, optimizer, batches = setting()
    with watch(model, optimizer) as log:
        loss = loss_of(model, batches[0])
        torch.autograd.backward(loss, torch.tensor(0.25))
        optimizer.step()
    assert log.loss == pytest.approx([0.25 * loss.item()])


def test_an_optimizer_that_rests_is_not_missed_unless_it_is_zeroed():
    def first_of_two(model, first, second, batches, zeroed):
        for x, _ in batches:
            for optimizer in zeroed:
                optimizer.zero_grad()
            model[0](x).square().mean().backward()
            first.step()

    for both in (False, True):
        model, _, batches = setting()
        first, second = (torch.optim.SGD(model[k].parameters(), 0.05) for k in (0, 2))
        with watch(model, first, second) as log:
            first_of_two(model, first, second, batches, [first, second][: 1 + both])
        found = [finding.slug for finding in log.report().findings]
        assert ("missing-step" in found) is both


def test_a_rate_comes_back_if_it_rises_tenfold():
    assert _comes_back([1.0, 0.01, 0.2])
    assert not _comes_back([1.0, 0.1, 0.9])
    assert not _comes_back([0.01, 0.5, 1.0])


def test_a_line_alone_needs_no_name():
    log = watched(plain)
    alone, compared = ([text.get_text() for ax in log.plot(baseline).axes for text in ax.texts]
                       for baseline in (None, watched(plain, seed=1)))  # fmt: skip
    names = {"this run", "baseline", "as computed", "baseline, 5–95 %"}
    assert not names & {*alone}
    assert names <= {*compared}


@pytest.mark.parametrize("loop", [no_step, step_first, closure, by_autograd_grad])
def test_dashboard_with_parts_missing(loop, tmp_path):
    log = watched(loop)
    if log.steps == 0:
        with pytest.raises(ValueError, match="no optimizer stepped"):
            log.plot()
        return
    log.plot(log).savefig(tmp_path / "a.png")


def test_the_example_in_the_docstring():
    module = importlib.import_module("bpkit.diagnosis.watch")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted == 4
    assert result.failed == 0


def test_an_error_is_placed_where_it_was_raised():
    def update_by_hand(model):
        for p in model.parameters():
            p -= 0.1

    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="leaf Variable"), watch(model) as log:
        update_by_hand(model)
    (finding,) = log.report().findings
    assert finding.slug == "leaf-inplace"
    assert finding.where.endswith("in update_by_hand: p -= 0.1")


def test_a_loss_without_a_graph_while_gradient_mode_is_off_was_not_recorded():
    model = nn.Linear(2, 2)
    with torch.set_grad_enabled(False), pytest.raises(RuntimeError), watch(model) as log:
        model(torch.ones(1, 2)).sum().backward()
    assert [finding.slug for finding in log.report().findings] == ["no-grad-block"]


def test_the_scale_of_a_collapsed_scaler_is_the_lowest():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with watch(model, optimizer) as log:
        for _ in range(30):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 2), float("nan"))).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    (finding,) = [f for f in log.report().findings if f.slug == "scaler-collapsed"]
    assert f"the scale fell to {2.0**-19:.3g}:" in finding.evidence


def test_a_net_that_a_large_step_has_killed_has_no_small_rate():
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    model = nn.Sequential(nn.Linear(64, 32, **double), nn.ReLU(), nn.Linear(32, 10, **double))
    data, optimizer = digits(), torch.optim.SGD(model.parameters(), 8.0)
    with watch(model, optimizer) as log:
        for k in [*range(0, 640, 64)] * 4:
            optimizer.zero_grad()
            x, y = data.train_images[k : k + 64], data.train_labels[k : k + 64]
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert "lr-too-low" not in [finding.slug for finding in log.report().findings]


def test_parts_frozen_in_step_with_the_closer_looks():
    """Each tenth step is looked at closely: at all of these the first layer is trainable."""

    def in_turns(model, optimizer, batches):
        for number, batch in enumerate(batches * 4, 1):
            model[0].requires_grad_(number <= 3 or number % 10 == 0)
            plain(model, optimizer, [batch])
        model.requires_grad_(False)  # the loop is over

    def handed_over(model, optimizer, batches):
        plain(model, optimizer, batches)
        model[0].requires_grad_(False)
        plain(model, optimizer, batches * 3)

    kinds = [watched(loop).evidence.optimizers[0] for loop in (in_turns, handed_over)]
    assert [facts["frozen_at_step"] for facts in kinds] == [[], ["0.weight", "0.bias"]]
    assert "frozen-by-accident" not in [f.slug for f in watched(in_turns).report().faults]
    assert "frozen-by-accident" in [f.slug for f in watched(handed_over).report().faults]


def test_gradients_assigned_are_one_arrival():
    """However many parameters there are; no backward pass through the model was seen."""

    def assigned(model, optimizer, batches):
        for x, y in batches:
            slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter.grad = slope
            optimizer.step()
            optimizer.zero_grad()

    log = watched(assigned)
    assert set(log.backwards) == {1}
    assert log.report().ok


def test_activations_inside_vmap_are_left_out():
    """What is counted of them can't be read once the vmap has ended."""

    def each(model, optimizer, batches):
        def loss(weights, x, y):
            return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

        slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        for x, y in batches:
            found = slopes({n: p.detach() for n, p in model.named_parameters()}, x, y)
            for name, parameter in model.named_parameters():
                parameter.grad = found[name].mean(0)
            optimizer.step()
            optimizer.zero_grad()

    log = watched(each)
    assert not log.evidence.activations
    assert log.report().ok
