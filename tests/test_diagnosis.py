"""The diagnosis on programs with a known fault, on their repaired twins, and on healthy ones.

Expected is what ``bpkit/diagnosis/results.json`` says. When this fails because the diagnosis got
better or the programs are others, write it anew: ``python -m tests.cases.judge --write``.
"""

import ast
import builtins
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bpkit import checkup, find_nonfinite
from bpkit.diagnosis.faults import FAULTS

sys.path.insert(0, str(Path(__file__).parents[1]))

import tests.cases
from tests.cases import judge, ordinary

PROGRAMS = judge.programs()
SICK = sorted(name for name, program in PROGRAMS.items() if program.expect)
HEALTHY = sorted(set(PROGRAMS) - set(SICK))
RESULTS = json.loads(judge.RESULTS.read_text(encoding="utf-8"))

# In the catalogue because of the message that PyTorch gives, or because the book explains them:
# a program alone does not decide them.
UNDECIDED = {
    "batchnorm-statistics", "ddp-unused-parameter", "gradcheck-float32", "gradcheck-step-size",
    "gradcheck-kink", "out-of-memory-activations", "out-of-memory-states", "padding-waste",
}  # fmt: skip


@pytest.mark.parametrize("name", SICK)
def test_sick(name):
    verdict = judge.judge(PROGRAMS[name], True)
    expected = RESULTS["faults"][PROGRAMS[name].expect]
    assert verdict.named == (name not in expected["missed"]), str(verdict)
    assert verdict.beside == expected["beside"].get(name, []), str(verdict)


@pytest.mark.parametrize("name", SICK)
def test_twin(name):
    verdict = judge.judge(PROGRAMS[name], False)
    assert verdict.beside == RESULTS["alarms"].get(name, []), str(verdict)
    assert not verdict.raised, str(verdict)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(name):
    verdict = judge.judge(PROGRAMS[name], 0)
    assert verdict.beside == RESULTS["alarms"].get(name, []), str(verdict)
    assert not verdict.raised, str(verdict)


@pytest.mark.parametrize("name", sorted(ordinary.KINDS))
def test_ordinary_program_learns_and_stays_finite(name):
    """A program that does not learn is no witness against a false alarm."""
    model, loss_fn, optimizer, batches, train = PROGRAMS[f"ordinary.{name}"].make(0)
    first = next(iter(batches))
    assert find_nonfinite(model, loss_fn, first) is None
    measured = []
    for training in (train, None):
        torch.manual_seed(1)  # the same noise before and after
        measured.append(ordinary.KINDS[name].measure(model, loss_fn, batches))
        if training is not None:
            training(model, loss_fn, optimizer, batches)
    before, after = measured
    assert before - after > 0.1 * abs(before), f"{before:.4g} before training, {after:.4g} after"
    assert find_nonfinite(model, loss_fn, first) is None


def test_ordinary_programs_are_fifty_of_different_kinds():
    kinds = ordinary.KINDS.values()
    assert len({(kind.family, kind.loop) for kind in kinds}) == len(ordinary.KINDS) == 50
    assert {f"ordinary.{name}" for name in ordinary.KINDS} <= set(HEALTHY)


def test_results_are_of_these_programs():
    assert (RESULTS["sick"], RESULTS["twins"]) == (len(SICK), len(SICK))
    assert RESULTS["healthy"] == len(HEALTHY)
    assert RESULTS["alarms"].keys() <= PROGRAMS.keys()
    for slug, entry in RESULTS["faults"].items():
        names = {name for name in SICK if PROGRAMS[name].expect == slug}
        assert entry["tried"] == len(names), slug
        assert entry["named"] == len(names) - len(entry["missed"]), slug
        assert names >= {*entry["missed"], *entry["beside"]}, slug


def test_every_fault_is_tried_or_undecided():
    tried = {PROGRAMS[name].expect for name in SICK}
    assert tried | UNDECIDED == set(FAULTS)
    assert not tried & UNDECIDED


@pytest.mark.parametrize("factor", [0.1, 100.0])
def test_labels_are_judged_at_any_size_of_the_loss(factor):
    torch.manual_seed(0)
    model, loss_fn, optimizer, batches = PROGRAMS["data.target_of_the_batch_before"].make(True)
    report = checkup(model, lambda m, b: factor * loss_fn(m, b), batches, optimizer)
    assert "label-misaligned" in [finding.slug for finding in report.faults]


# The same with everything renamed


# What PyTorch, Python and NumPy call something keeps its name.
API = {
    *dir(builtins), *dir(torch), *dir(torch.Tensor), *dir(nn), *dir(F), *dir(nn.Module),
    *dir(torch.autograd.Function), *dir(torch.optim.Adam([torch.ones(1)])), *dir(torch.optim),
    *dir(str),
    *dir(list), *dir(dict), *dir(nn.init), *dir(nn.utils), *dir(nn.Embedding(1, 1)),
    *dir(nn.LSTM(1, 1)), *dir(nn.BatchNorm2d(1)), *dir(nn.MultiheadAttention(1, 1)),
    *dir(nn.Conv2d(1, 1, 1)), *dir(nn.TransformerEncoderLayer(1, 1)), *dir(nn.Dropout()),
    *dir(torch.utils.data.DataLoader([0])), *dir(torch.autograd.function.FunctionCtx),
}  # fmt: skip


# The fault itself goes by a part of a name: renamed, it is another program.
GO_BY_A_NAME = {"backward.matched_by_name"}


class Names(ast.NodeVisitor):
    """Which names does a module make itself, as variables and as attributes?"""

    def __init__(self, tree):
        self.variables, self.attributes, self.kept = set(), set(), set()
        self.inside = []
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        self.kept |= {(a.asname or a.name).split(".")[0] for n in imports for a in n.names}
        self.foreign = API | self.kept | {"dict"}
        for node in imports:  # parts of models that other programs define
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.cases."):
                self.kept |= Names(parsed(node.module.rpartition(".")[2])).attributes
        self.visit(tree)
        self.variables -= self.kept | API
        self.attributes -= self.kept | API

    def define(self, node):
        kind = self.attributes if self.inside[-1:] == ["class"] else self.variables
        kind.add(node.name)
        self.inside.append("class" if isinstance(node, ast.ClassDef) else "function")
        self.generic_visit(node)
        self.inside.pop()

    visit_FunctionDef = visit_ClassDef = define

    def visit_arg(self, node):
        self.variables.add(node.arg)

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Store):
            kind = self.attributes if self.inside[-1:] == ["class"] else self.variables
            kind.add(node.id)

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Store):
            self.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node):
        names = {keyword.arg for keyword in node.keywords}
        if not isinstance(node.func, ast.Name) or node.func.id in self.foreign:
            self.kept |= names
        if isinstance(node.func, ast.Attribute) and node.func.attr in (
            "ModuleDict", "ParameterDict", "register_buffer", "register_parameter", "add_module",
        ):  # fmt: skip
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            self.attributes |= {text for text in texts if isinstance(text, str)}
        self.generic_visit(node)


def parsed(module):
    return ast.parse(Path(judge.__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))


class Rename(ast.NodeTransformer):
    def __init__(self, names):
        self.names = names
        own = sorted(names.variables | names.attributes)
        self.new = {old: f"q{number}" for number, old in enumerate(own)}

    def word(self, old):
        return self.new.get(old, old)

    def visit_Name(self, node):
        node.id = self.word(node.id)
        return node

    def visit_arg(self, node):
        node.arg = self.word(node.arg)
        return self.generic_visit(node)

    def visit_keyword(self, node):
        node.arg = self.word(node.arg)
        return self.generic_visit(node)

    def visit_Attribute(self, node):
        if node.attr in self.names.attributes:
            node.attr = self.word(node.attr)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node):
        node.name = self.word(node.name)
        return self.generic_visit(node)

    visit_ClassDef = visit_FunctionDef

    def visit_Nonlocal(self, node):
        node.names = [self.word(name) for name in node.names]
        return node

    def visit_ExceptHandler(self, node):
        node.name = node.name and self.word(node.name)
        return self.generic_visit(node)

    def visit_Constant(self, node):
        """Names of parameters and parts in text: ``"head.weight"``, ``startswith("head")``."""
        if isinstance(node.value, str) and node.value not in FAULTS:
            node.value = re.sub(
                r"[A-Za-z_]\w*",
                lambda m: self.word(m[0]) if m[0] in self.names.attributes else m[0],
                node.value,
            )
        return node


def renamed(module, folder):
    """``cases/<module>.py`` with other names, in another file: its programs, and old -> new."""
    tree = parsed(module)
    change = Rename(Names(tree))
    source = ast.unparse(change.visit(tree))
    path = folder / f"part_{judge.MODULES.index(module)}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        made = []
        patch.setattr(tests.cases, "PROGRAMS", made)
        patch.setitem(sys.modules, path.stem, loaded)
        spec.loader.exec_module(loaded)
    return {program.make.__name__: program for program in made}, change.word


@pytest.fixture(scope="session", params=judge.MODULES)
def another(request, tmp_path_factory):
    return request.param, *renamed(request.param, tmp_path_factory.mktemp("renamed"))


def test_with_everything_renamed(another):
    module, programs, new = another
    names = [name for name in PROGRAMS if name.startswith(f"{module}.")]
    assert len(programs) == len(names)
    for name in sorted(set(names) - GO_BY_A_NAME)[::12]:
        program = programs[new(name.partition(".")[2])]
        argument = True if program.expect else 0
        first, second = judge.judge(PROGRAMS[name], argument), judge.judge(program, argument)
        assert (first.named, first.beside) == (second.named, second.beside), f"{first}\n{second}"
