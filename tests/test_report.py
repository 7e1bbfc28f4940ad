"""bpkit.diagnosis.report: what a reader of a report may rely on, whatever the findings are."""

import json
import random
import re
from graphlib import TopologicalSorter
from html.parser import HTMLParser
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpkit.diagnosis.faults import FAULTS, LAYERS
from bpkit.diagnosis.report import Finding, Report

SLUGS = list(FAULTS)
TRICKY = '<b onclick="x">it\'s</b> & model["a"] < 1 > 0'
SEVERITIES = st.sampled_from(["fault", "note"])
GIVEN = st.lists(st.tuples(st.sampled_from(SLUGS), SEVERITIES, st.sampled_from("abc")), max_size=14)


def findings(given):
    return [Finding(slug, where, f"seen of {slug}", severity) for slug, severity, where in given]


def everything(report):
    """Each finding of a report, consequences included."""
    todo = list(report.findings)
    for finding in todo:
        todo += finding.follows
    return todo


# What is given is not lost


@settings(max_examples=300, deadline=None)
@given(GIVEN)
def test_every_finding_is_a_root_or_below_one_once(given):
    report = Report(findings(given))
    assert sorted(f.slug for f in everything(report)) == sorted({slug for slug, *_ in given})


@settings(max_examples=300, deadline=None)
@given(GIVEN)
def test_a_fault_makes_the_report_faulty(given):
    report = Report(findings(given))
    assert report.ok == all(severity == "note" for _, severity, _ in given)
    assert report.faults == [f for f in report.findings if f.severity == "fault"]
    said = {f.slug: f.severity for f in everything(report)}
    for slug, severity in said.items():
        assert severity == ("fault" if (slug, "fault") in {g[:2] for g in given} else "note"), slug


@settings(max_examples=200, deadline=None)
@given(GIVEN)
def test_nothing_is_folded_under_a_note(given):
    for finding in everything(Report(findings(given))):
        assert finding.severity == "fault" or not finding.follows


@settings(max_examples=200, deadline=None)
@given(GIVEN)
def test_places_of_the_same_fault_are_joined(given):
    for finding in everything(Report(findings(given))):
        places = [where for slug, _, where in given if slug == finding.slug]
        assert sorted(finding.where.split("; ")) == sorted(set(places))


@settings(max_examples=200, deadline=None)
@given(GIVEN)
def test_order_faults_before_notes_each_in_the_order_of_the_triage(given):
    keys = [(f.severity == "note", LAYERS.index(f.layer)) for f in Report(findings(given)).findings]
    assert keys == sorted(keys)


@settings(max_examples=200, deadline=None)
@given(GIVEN, st.randoms(use_true_random=False))
def test_roots_do_not_depend_on_the_order_in_which_rules_ran(given, shuffle):
    other = list(given)
    shuffle.shuffle(other)
    roots = [{f.slug for f in Report(findings(g)).findings} for g in (given, other)]
    assert roots[0] == roots[1]


def test_no_circle_of_causes():
    """Else all of them would be consequences, and none would be in the report."""
    causes = {slug: set() for slug in SLUGS}
    for first, second in combinations(SLUGS, 2):
        report = Report(findings([(first, "fault", "a"), (second, "fault", "b")]))
        assert len(everything(report)) == 2, (first, second)
        if len(report.findings) == 1:
            (root,) = report.findings
            causes[root.follows[0].slug].add(root.slug)
    assert any(causes.values())
    TopologicalSorter(causes).prepare()


@settings(max_examples=200, deadline=None)
@given(GIVEN)
def test_every_finding_is_in_the_text_and_on_the_page(given):
    """Also a consequence of a consequence."""
    report = Report(findings(given))
    text = " ".join(str(report).split())
    page = "".join(Page(report._repr_html_()).texts)
    for slug, *_ in given:
        assert FAULTS[slug].title in text
        assert FAULTS[slug].title in page


def test_a_consequence_is_below_its_cause():
    given = [("vanishing-gradient", "fault", "a"), ("unscaled-input", "fault", "batch[0]")]
    (root,) = Report(findings(given)).findings
    assert (root.slug, [f.slug for f in root.follows]) == ("unscaled-input", ["vanishing-gradient"])


def test_a_note_explains_no_fault():
    given = [("vanishing-gradient", "fault", "a"), ("unscaled-input", "note", "batch[0]")]
    report = Report(findings(given))
    assert [f.slug for f in report.findings] == ["vanishing-gradient", "unscaled-input"]
    assert not report.ok


def test_unknown_slug():
    with pytest.raises(KeyError, match="no-such-fault"):
        Finding("no-such-fault", "here", "seen")


@pytest.mark.parametrize("slug", SLUGS)
def test_texts_and_link_are_those_of_the_catalogue(slug):
    finding, fault = Finding(slug, "here", "seen"), FAULTS[slug]
    assert (finding.title, finding.cause, finding.repair) == (
        fault.title,
        fault.cause,
        fault.repair,
    )
    page, anchor = finding.link.split("#")
    assert (page, anchor) == (fault.page, fault.anchor)
    assert Finding(slug, "here", "seen", repair="Do this.").repair == "Do this."


# Text


def sample():
    given = [
        ("weight-decay-on-norm-bias", "note", "norm.weight"),
        ("missing-zero-grad", "fault", "train.py line 3 in train: loss.backward()"),
        ("lr-too-high", "fault", "learning rate 0.3"),
        ("constant-labels", "fault", "batch[1]"),
    ]
    undecided = ["Whether labels were shuffled can't be seen from here. " * 3]
    return Report(findings(given), undecided, "Looked at 2 batches.")


def test_text():
    text = str(sample())
    assert text == repr(sample())
    assert text.startswith("2 faults found. Looked at 2 batches.\n\n")
    assert max(map(len, text.splitlines())) <= 76
    heads = re.findall(r"^(FAULT|NOTE)  .*\[([\w-]+)\]$", text, re.MULTILINE)
    assert heads == [
        ("FAULT", "constant-labels"),
        ("FAULT", "missing-zero-grad"),
        ("NOTE", "weight-decay-on-norm-bias"),
    ]
    fault, note = text.split("\n\n")[2:4]
    assert re.findall(r"^  (\w+) ", fault, re.MULTILINE) == [
        "where", "seen", "why", "do", "then", "read",
    ]  # fmt: skip
    assert re.findall(r"^  (\w+) ", note, re.MULTILINE) == ["where", "seen", "do", "read"]
    assert FAULTS["lr-too-high"].title in fault
    assert text.rpartition("\n\n")[2].startswith("  open   Whether labels")


def test_text_of_one_fault_and_of_none():
    assert str(Report([])) == "No fault found."
    assert str(Report([], checked="Seen.")) == "No fault found. Seen."
    assert str(Report(findings([("nan-input", "fault", "a")]))).startswith("1 fault found.\n\n")
    assert str(Report(findings([("nan-input", "note", "a")]))).startswith("No fault found.\n\nNOTE")


@pytest.mark.parametrize("slug", SLUGS)
@pytest.mark.parametrize("severity", ["fault", "note"])
def test_width_of_every_fault(slug, severity):
    long = "a number of words " * 20
    for line in str(Report([Finding(slug, long, long, severity)])).splitlines():
        assert len(line) <= 76
        assert line == line.rstrip()


def test_summary():
    report = Report([
        Finding("dead-relu", "1", "all zero in " + "every batch " * 9, "note"),
        Finding("missing-step", "line 3", "12 backwards, 0 steps"),
    ])  # fmt: skip
    lines = report.summary().split("\n")
    assert lines[:2] == ["missing-step at line 3", "    12 backwards, 0 steps"]
    assert lines[2] == "note: dead-relu at 1"
    assert len(lines) == 5
    assert all(line.startswith("    ") and len(line) <= 76 for line in lines[3:])
    assert Report([]).summary() == "No fault found."


def test_a_source_line_is_not_torn_apart():
    place = f"train.py line 3 in train: {'x' * 90}(y)"
    assert f"{'x' * 90}(y)" in str(Report([Finding("nan-input", place, "seen")]))


# HTML


class Page(HTMLParser):
    VOID = frozenset(("br", "hr", "img"))

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_holds_what_the_text_holds():
    report = sample()
    page = Page(report._repr_html_())
    words = set(re.findall(r"\w+", " ".join(page.texts)))
    missing = set(re.findall(r"\w+", str(report))) - words - {"FAULT", "NOTE", "open"}
    assert missing == set()
    assert sum(tag == "table" for tag, _ in page.tags) == len(report.findings)


def test_html_shows_code_as_code():
    page = Report([Finding("missing-zero-grad", "a", "b", repair="call `f(x < 1)`, then `g`")])
    assert "call <code>f(x &lt; 1)</code>, then <code>g</code>" in page._repr_html_()


def test_html_names_its_header_cells():
    heads = [attributes for tag, attributes in Page(sample()._repr_html_()).tags if tag == "th"]
    assert heads
    assert {a.get("scope") for a in heads} <= {"row", "col", "rowgroup", "colgroup"}


def test_html_is_escaped_everywhere():
    root = Finding("missing-zero-grad", TRICKY, TRICKY, repair=TRICKY)
    below = Finding("lr-too-high", TRICKY, TRICKY)
    report = Report([root, below], [TRICKY], TRICKY)
    assert report.findings[0].follows
    page = Page(report._repr_html_())
    assert {tag for tag, _ in page.tags} <= {"p", "strong", "table", "thead", "tbody", "tr", "th",
                                             "td", "code", "a", "div"}  # fmt: skip
    assert not any("onclick" in attributes for _, attributes in page.tags)
    # place, number, repair, consequence, open question, what was checked
    assert " ".join(page.texts).count(TRICKY) == 6


# Data


def test_to_dict_survives_json():
    report = sample()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is False
    assert data["undecided"] == report.undecided
    assert [f["slug"] for f in data["findings"]] == [f.slug for f in report.findings]
    first = data["findings"][1]
    assert set(first) == {"slug", "title", "where", "severity", "evidence", "cause", "repair",
                          "link", "follows"}  # fmt: skip
    assert [f["slug"] for f in first["follows"]] == ["lr-too-high"]
    assert first["follows"][0]["follows"] == []


def test_raise_if_faults():
    Report([]).raise_if_faults()
    Report(findings([("nan-input", "note", "a")])).raise_if_faults()
    with pytest.raises(RuntimeError, match=r"(?s)1 fault found.*\[nan-input\]"):
        Report(findings([("nan-input", "fault", "a")])).raise_if_faults()


def test_a_report_can_be_made_twice_from_the_same_findings():
    """The rules' findings are not used up or written into."""
    given = findings([("missing-zero-grad", "fault", "a"), ("lr-too-high", "fault", "b"),
                      ("missing-zero-grad", "fault", "c")])  # fmt: skip
    random.Random(0).shuffle(given)
    assert str(Report(given)) == str(Report(given))
