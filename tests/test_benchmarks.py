"""Is what the cost page says of the helpers measured, and does it still hold?

Nothing is timed here. What does not depend on the machine is counted again: passes through the
loss function, numbers read. The stored ratios have to be complete, and what the page says of them
in words has to be true of them.
"""

import importlib.util
import json
import re
import sys
from datetime import date
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parent / "benchmarks"
RECORDS = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
NAMES = {"autodiff", "checkup", "graph", "growth", "numeric", "watch"}
# Every ratio that a comparison promises; the page shows all of them, or it does not build.
SIDE_BY_SIDE = {
    "autodiff": {
        "bpkit.autodiff / torch eager",
        "scalar engine, 2 images / bpkit.autodiff, 2 images",
    },
    "numeric": {
        f"{kind} audit / {other}"
        for kind in ("full", "default")
        for other in ("entry by entry", "gradcheck")
    },
    "watch": {
        f"{loop} / bare loop, {network}"
        for loop in ("bpkit.watch", "item by item")
        for network in ("small", "middle", "large")
    },
    "checkup": {f"checkup / step, {m}" for m in ("MLP", "convolutions", "transformer")},
    "growth": {
        f"{helper}, {axis}"
        for axis in ("parameters", "layers")
        for helper in (
            "step", "trace", "record", "watch", "find_nonfinite", "ledger", "audit", "checkup",
        )
    },
    "graph": {"recording_ratio_1", "recording_ratio_1024", "compiled_speedup"},
}  # fmt: skip


def read(name):
    return json.loads(RECORDS[name].read_text(encoding="utf-8"))


@pytest.fixture
def program(monkeypatch):
    """The programs import one another by name, as when their folder is run."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_every_program_has_a_record_and_a_line_in_the_readme():
    assert set(RECORDS) == NAMES
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"| `{name}.py` |" in listed
        assert f"| `{name}.json` |" in listed


@pytest.mark.parametrize("name", sorted(NAMES))
def test_record_is_complete(name):
    record = read(name)
    assert {"processor", "cores", "device", "python", "torch", "numpy"} <= record.keys()
    assert all(record.values())
    assert date.fromisoformat(record["date"]).year >= 2026
    assert record["threads"] == 1
    assert record["rounds"] >= 5, "a rehearsal: run python tests/benchmarks"
    assert SIDE_BY_SIDE[name] <= record["spread"].keys() <= record["results"].keys()
    for key, (low, high) in record["spread"].items():
        assert low <= record["results"][key] <= high, key
    if name != "growth":  # an exponent may be around zero
        assert min(record["results"].values()) > 0


def test_records_are_of_one_machine():
    machines = {tuple(read(n)[key] for key in ("processor", "cores", "torch")) for n in NAMES}
    assert len(machines) == 1, "some were measured elsewhere: run python tests/benchmarks"


def test_times_and_exponents_of_growth_agree(program):
    growth, record = program("growth"), read("growth")
    for axis, series in record["series"].items():
        sizes = series["sizes"]
        assert sizes[-1] >= 9 * sizes[0]
        for name in series.keys() - {"sizes"}:
            slope = growth.exponents(sizes, [[s] for s in series[name]])[0]
            # The median of slopes is not quite the slope of medians.
            assert slope == pytest.approx(record["results"][f"{name}, {axis}"], abs=0.1), name


# What the page says in words


def test_only_the_audit_grows_faster_than_the_model_is_deep():
    slopes = read("growth")["results"]
    assert slopes["audit, layers"] > 1.4
    others = {k: v for k, v in slopes.items() if k.endswith(", layers") and k != "audit, layers"}
    assert max(others.values()) < 1.25, others


def test_trace_costs_the_same_at_any_width_and_the_others_less_than_in_proportion():
    slopes = {k: v for k, v in read("growth")["results"].items() if k.endswith(", parameters")}
    assert abs(slopes["trace, parameters"]) < 0.2
    assert max(slopes.values()) < 1, slopes


def test_what_the_page_says_of_audits_and_of_gradcheck():
    ratios = read("numeric")["results"]
    assert 0.8 < ratios["full audit / entry by entry"] < 1.3  # the same passes
    assert ratios["full audit / gradcheck"] < 1
    assert ratios["default audit / entry by entry"] < 0.05
    assert ratios["default audit / fast gradcheck"] > 1  # "cheaper still"
    assert ratios["mistakes: fast gradcheck"] < ratios["mistakes: default audit"]


def test_watching_weighs_less_the_larger_the_step():
    ratios = read("watch")["results"]
    small, middle, large = (
        ratios[f"bpkit.watch / bare loop, {network}"] for network in ("small", "middle", "large")
    )
    assert small > middle > large
    loop = {n: ratios[f"item by item / bare loop, {n}"] for n in ("small", "middle", "large")}
    assert loop["small"] < small  # "cheaper there", and then "about the same"
    assert max(abs(loop["middle"] - middle), abs(loop["large"] - large)) < 0.15


def test_what_chapters_say_of_the_graph_and_of_the_engine():
    graph, engine = read("graph")["results"], read("autodiff")["results"]
    assert 1.6 > graph["recording_ratio_1"] > graph["recording_ratio_64"] > 1
    assert max(graph["recording_ratio_64"], graph["recording_ratio_1024"]) < 1.15
    assert graph["compiled_speedup"] > 2
    assert graph["compiled_first_call_seconds"] > 1
    assert 1 < engine["bpkit.autodiff / torch eager"] < 2
    assert engine["scalar engine, 2 images / bpkit.autodiff, 2 images"] > 200


def test_a_checkup_costs_steps_and_a_search_a_few():
    ratios = read("checkup")["results"]
    for model in ("MLP", "convolutions", "transformer"):
        assert 20 < ratios[f"checkup / step, {model}"] < 1000
        assert 1 < ratios[f"find_nonfinite / step, {model}"] < 15


def test_figure_of_growth_draws_the_record(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER.parents[1] / "chapters" / "_ext")
    costs, record = importlib.import_module("costs"), read("growth")
    figure = costs.draw_growth(record)
    figure.draw_without_rendering()
    for panel, (axis, series) in zip(figure.axes, record["series"].items(), strict=True):
        drawn = {tuple(line.get_ydata()) for line in panel.lines}
        times = {name: values for name, values in series.items() if name != "sizes"}
        assert drawn == {tuple(1e3 * t for t in values) for values in times.values()}
        assert all(list(line.get_xdata()) == series["sizes"] for line in panel.lines)
        for label in panel.texts:
            name, slope = label.get_text().replace("training step", "step").split()
            measured = record["results"][f"{name}, {axis}"]
            assert float(slope.replace("−", "-")) == pytest.approx(measured, abs=0.051)
            assert label.xy == (series["sizes"][-1], 1e3 * times.pop(name)[-1])
            assert f"{costs.called(name)} {slope}" in costs.growth_in_words(record)
        assert times == {}
        boxes = sorted((label.get_window_extent() for label in panel.texts), key=lambda b: b.y0)
        assert all(low.y1 <= high.y0 + 1 for low, high in pairwise(boxes)), "labels overlap"
        assert max(box.x1 for box in boxes) <= figure.bbox.x1, "a label is cut off"


# Counted again


def test_helpers_call_the_loss_as_often_as_recorded(program):
    growth, counts = program("growth"), read("growth")["counts"]
    # The number of passes does not depend on the width, so the smallest stands for the largest.
    for axis, place, (width, depth) in [("layers", 0, (32, 3)), ("parameters", -1, (50, 4))]:
        helpers, loss_fn, _ = growth.setting(width, depth)
        assert growth.calls(helpers, loss_fn) == counts[axis][place]


def test_passes_of_an_audit_follow_the_parameters_of_a_deep_model(program):
    growth, counts = program("growth"), read("growth")["counts"]["layers"]
    for depth, counted in zip(growth.DEPTHS, counts, strict=True):
        tensors = 2 * (depth + 2)
        if tensors >= 60:  # one entry and one direction of each, two passes for each
            assert counted["audit"] == pytest.approx(4 * tensors, abs=10)
    assert len({counted["checkup"] for counted in counts}) == 1


def test_numbers_read_in_a_step(program):
    watch, counts = program("watch"), read("watch")["counts"]
    for network, sizes in watch.SIZES.items():
        parameters = 2 * (len(sizes) - 1)
        assert counts[network] == {
            "bare loop": 0, "bpkit.watch": 1, "item by item": 3 * parameters,
        }  # fmt: skip
    found = {
        n: watch.reads_per_step(run, watch.SIZES["small"], 20) for n, run in watch.RUNS.items()
    }
    assert found == counts["small"]


def test_the_loop_over_every_entry_finds_a_wrong_gradient(program):
    """What the audit is timed against does the audit's work."""
    numeric, batch = program("numeric"), program("numeric").random_batch(4, 7, 3)
    for mistake, wrong in (("sign", True), (None, False)):
        model = numeric.Network(mistake, 7, 5, 3)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        largest = numeric.entry_by_entry(model, numeric.own_loss, batch)
        assert (largest > 1e-3) == wrong, mistake
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.fixture
def command(program, monkeypatch, tmp_path):
    """``python tests/benchmarks`` with one small program; this process stays as it is."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    spec = importlib.util.spec_from_file_location("benchmarks_main", FOLDER / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for what in ("freeze", "collect"):  # the second takes long where many tests have run
        monkeypatch.setattr(module.gc, what, lambda: None)
    measured = program("measured")
    monkeypatch.setattr(measured, "FOLDER", tmp_path)

    def measure(rounds):
        times = measured.in_turn({"sum": lambda: sum(range(4000)), "one": int}, rounds, {"one": 3})
        return {"sum / one": measured.ratios(times, "sum", "one"), "ms": 1.0, "counts": {"n": 3}}

    monkeypatch.setitem(sys.modules, "small", SimpleNamespace(measure=measure))
    monkeypatch.setattr(module, "ROUNDS", {"small": 5})
    return module


@pytest.mark.parametrize("option", ["--rehearse", None])
def test_command_prints_ratios_and_a_rehearsal_stores_nothing(
    command, option, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("sys.argv", ["benchmarks", *([option] if option else [])])
    command.main()
    assert re.search(r"small +sum / one +[\d.,]+ +[\d.,]+ to [\d.,]+\n", capsys.readouterr().out)
    if option:
        assert not [*tmp_path.iterdir()]
        return
    record = json.loads((tmp_path / "small.json").read_text(encoding="utf-8"))
    low, high = record["spread"]["sum / one"]
    assert 1 < low <= record["results"]["sum / one"] <= high  # adding 4000 numbers takes longer
    assert (record["rounds"], record["results"]["ms"], record["counts"]) == (5, 1.0, {"n": 3})


def test_command_says_which_benchmarks_there_are(command, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks", "large"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no benchmark large; there are small" in capsys.readouterr().err
