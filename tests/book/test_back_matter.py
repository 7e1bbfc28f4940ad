"""Do notation, glossary, claims, bibliography and reference agree with the chapters?"""

import re

import pytest
import yaml
from pybtex.database import parse_string

from tools import refresh

from . import back_matter
from .test_pages import CHAPTERS, LEDGER, NOTEBOOKS, ROOT, in_contents, report

CONTENTS = in_contents(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))
STEMS = [path.stem for path in NOTEBOOKS]
READING_ORDER = [name.rsplit("/")[-1] for name in CONTENTS if name.rsplit("/")[-1] in STEMS]


def page(name):
    return (CHAPTERS / f"{name}.md").read_text(encoding="utf-8")


# Two meanings on one page; the notation page says why.
TWICE = {"07_gradient_flow": {"c", "g"}}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notation(path):
    twice = TWICE.get(path.stem, ())
    report(back_matter.notation(page("notation"), path.stem, refresh.read(path), twice))


def test_notation_numbers_the_chapters_as_the_contents_do():
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))["parts"]
    numbered = [page for part in contents if "numbered" in part for page in part["chapters"]]
    numbers = {}
    for i, chapter in enumerate(numbered, start=1):
        numbers[chapter["file"].rsplit("/")[-1]] = str(i)
        for k, section in enumerate(chapter.get("sections", []), start=1):
            numbers[section["file"].rsplit("/")[-1]] = f"{i}.{k}"
    links = set(re.findall(r"\{doc\}`([\d.]+) <([^>]+)>`", page("notation")))
    assert links
    report([f"{stem} is {numbers[stem]}" for label, stem in links if label != numbers[stem]])


def test_names_in_code():
    notebooks = {path.stem: refresh.read(path) for path in NOTEBOOKS}
    problems = back_matter.names_in_code(page("notation"), notebooks)
    report(problems)


def glossary_entries():
    return back_matter.glossary(page("glossary"))


def test_glossary_is_sorted_and_leads_to_the_pages_that_teach():
    entries = glossary_entries()
    terms = [term.lower() for entry in entries for term in entry]
    assert len(terms) == len(set(terms))
    first = [entry[0].lower() for entry in entries]
    assert first == sorted(first)
    for entry, text in entries.items():
        (target,) = re.findall(r"\{doc\}`([^`<>]+)`$", text)
        assert target in READING_ORDER, entry
        sentences = re.split(r"(?<=[.:;])\s+(?=[A-Z$`])", text.rpartition("→")[0].strip())
        assert len(sentences) <= 3, f"{entry}: one or two sentences"


# Terms that the chapters write in other ways than `back_matter.form` finds.
FORMS = {
    "activation": "activations?",
    "detach": "detach(?:ed)?",
    "gradient checkpointing": "(?:gradient )?checkpointing|checkpointed",
    "gradient clipping": "(?:gradient )?clipping",
    "in-place operation": "in[- ]place operations?",
    "leaf": "lea(?:f|ves)",
    "merging": "merging|merged",
    "packing": "packing|packed",
    "saturation": "saturation|saturated",
    "tied weights": "tied",
}
# Pages on which a word means something else than the entry.
OTHER_SENSE = {
    ("cosine", "01_graphs"): "the function",
    ("cosine", "02_chain_rule"): "the function",
    ("packing", "01_graphs"): "tensors in the hands of hooks",
    ("pipeline", "05_training_loop"): "of data",
    ("pipeline", "08a_data"): "of data",
    ("rank", "06_optimizers"): "a rank correlation",
    ("spread", "06_optimizers"): "of repeated runs",
}


def test_the_first_page_that_uses_a_term_links_it():
    notebooks = {stem: refresh.read(CHAPTERS / f"{stem}.ipynb") for stem in READING_ORDER}
    links = {
        stem: back_matter.linked("\n".join(c.source for c in nb.cells if c.cell_type == "markdown"))
        for stem, nb in notebooks.items()
    }
    prose = {stem: back_matter.prose(nb) for stem, nb in notebooks.items()}
    problems = []
    for terms in glossary_entries():
        forms = [FORMS.get(term, back_matter.form(term)) for term in terms]
        other = {stem for term, stem in OTHER_SENSE if term in terms}
        use = back_matter.first_use(forms, {p: t for p, t in prose.items() if p not in other})
        if use is None:
            problems.append(f"{terms[0]}: no page uses it: remove it, or give its form in FORMS")
        elif not links[use[0]] & {term.lower() for term in terms}:
            problems.append(f"{terms[0]}: {use[0]} uses it first, in {use[1]}, without a link")
    report(problems)


def test_numbers_of_the_claims_page_are_shown():
    report(back_matter.findings(LEDGER, {path.stem: refresh.read(path) for path in NOTEBOOKS}))


def bibliography():
    text = (CHAPTERS / "references.bib").read_text(encoding="utf-8")
    return parse_string(text, "bibtex").entries


def test_bibliography_entries_are_complete():
    venue = {"article": "journal", "inproceedings": "booktitle", "book": "publisher"}
    for key, entry in bibliography().items():
        given = {*entry.fields, *entry.persons}
        missing = {"title", "year"} - given
        if not key.startswith("article"):  # the source articles name no author and no address
            missing |= {"author"} - given
            assert given & {"url", "doi"}, f"{key}: neither address nor DOI"
        missing |= {venue[entry.type]} - given if entry.type in venue else set()
        assert not missing, f"{key}: no {', '.join(missing)}"


def test_every_entry_is_cited_and_every_citation_has_an_entry():
    cited = set()
    for path in [*NOTEBOOKS, *CHAPTERS.glob("*.md")]:
        for keys in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", path.read_text(encoding="utf-8")):
            cited |= {key.strip() for key in keys.split(",")}
    assert cited == set(bibliography())
