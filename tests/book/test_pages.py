"""Are the notebooks and pages of the book in order as documents?  See checks.py for each rule."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from bpkit.diagnosis.faults import FAULTS
from tools import refresh

from . import checks, markdown

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
NOTEBOOKS = sorted(CHAPTERS.glob("*.ipynb"))
PAGES = sorted(CHAPTERS.glob("*.md"))
LEDGER = json.loads((ROOT / "tests" / "claims.json").read_text(encoding="utf-8"))
# A chapter is there with its main notebook: 08_failure_modes and not yet 08e_diagnosis.
NUMBERED = sorted({int(p.stem[:2]) for p in NOTEBOOKS if p.stem[:2].isdigit() and p.stem[2] == "_"})
VERDICTS = {"holds": 72, "caveat": 104, "wrong": 27, "untestable": 32}  # after the second run


def named(path):
    return path.stem


def report(problems):
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_notebook(path, check):
    report(check(refresh.read(path)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_file_is_as_refresh_stores_it(path):
    report(refresh.differences(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_claims_on_cells_exist_and_show_the_right_number(path):
    report(checks.claims(refresh.read(path), LEDGER))


@pytest.mark.parametrize("chapter", NUMBERED)
def test_chapter_teaches_its_claims(chapter):
    notebooks = [refresh.read(p) for p in NOTEBOOKS if p.stem.startswith(f"{chapter:02d}")]
    report(checks.missing_claims(notebooks, LEDGER, chapter))


def exercise_count(path):
    pages = [page for _, page in checks.markdown_cells(refresh.read(path))]
    return sum(d.name == "exercise" for page in pages for d in page.directives)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_exercises(path):
    chapter = int(path.stem[:2])
    earlier = [p for p in NOTEBOOKS if p.stem[:2] == path.stem[:2] and p < path]
    before = sum(map(exercise_count, earlier))
    report(checks.exercises(refresh.read(path), chapter, before))
    if path.stem[2] == "_":
        count = exercise_count(path)
        assert 4 <= count <= 6, f"{count} exercises; a chapter has four to six"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_failure_cards_are_complete_and_in_the_order_of_the_catalogue(path):
    found = checks.cards(refresh.read(path))
    report([why for slug, cells in found.items() for why in checks.card(slug, cells)])
    assert list(found) == [slug for slug, fault in FAULTS.items() if fault.page == path.stem]


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_numbers_on_page(path):
    report(checks.numbers_on_page(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_pictures_on_page_have_alt_texts(path):
    images = markdown.read(path.read_text(encoding="utf-8")).images
    report([why for _, alt in images if (why := checks.alt_text(alt))])


def in_contents(node):
    """The files that a part of _toc.yml names."""
    if isinstance(node, list):
        return [file for part in node for file in in_contents(part)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("file", "root") if key in node]
    nested = [in_contents(node[key]) for key in ("parts", "chapters", "sections") if key in node]
    return own + [file for part in nested for file in part]


def test_table_of_contents_and_pages_agree():
    files = in_contents(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))
    pages = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in CHAPTERS.rglob("*")
        if path.suffix in (".md", ".ipynb")
        and not any(part.startswith(("_", ".")) for part in path.relative_to(ROOT).parts)
    }
    assert len(files) == len(set(files)), "a page stands twice in _toc.yml"
    assert set(files) - pages == set(), "in _toc.yml without a page"
    assert pages - set(files) == set(), "pages missing from _toc.yml"


def test_ledger_is_complete():
    assert len({entry["id"] for entry in LEDGER}) == len(LEDGER) == 235
    assert Counter(entry["verdict"] for entry in LEDGER) == VERDICTS
    for entry in LEDGER:
        assert entry["article"] == entry["id"][0]
        assert entry["claim"].strip(), entry["id"]
        assert entry["finding"].strip() or entry["verdict"] == "untestable", entry["id"]
        assert entry["chapters"], entry["id"]
        assert not entry["number"] or entry["verdict"] == "wrong", entry["id"]


def test_ledger_texts_are_plain_inline_text():
    # A stray * or _ would be read as emphasis on the claims page.
    for entry in LEDGER:
        for text in (entry["claim"], entry["finding"]):
            page = markdown.read(text)
            assert {kind for kind, _ in page.prose} <= {"text", "code"}, entry["id"]
            assert page.directives == page.images == [], entry["id"]


def test_claims_page_is_made_from_the_ledger():
    text = (CHAPTERS / "claims.md").read_text(encoding="utf-8")
    names = [directive.name for directive in markdown.read(text).directives]
    assert any(name.startswith("claims") for name in names), (
        "claims.md does not use the directive that lists tests/claims.json"
    )
