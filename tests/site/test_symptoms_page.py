"""Does the index say what the catalogue says, and do its links, and the reports', lead there?"""

import re
from html import unescape

import pytest

from bpkit.diagnosis.faults import FAULTS, LAYERS, SYMPTOMS, for_error
from site_checks import opened, serve
from test_faults import PROGRAMS, message_of

PAGE = "chapters/symptoms.html"


def text_of(html):
    return " ".join(unescape(re.sub(r"<[^>]+>", "", html)).split())


def squeezed(text):
    """Without blanks, marks of code, and typographic quotes, which the builder changes."""
    return re.sub(r"[\s`]", "", text.translate(str.maketrans("“”‘’", "\"\"''")))


def section(html, anchor):
    """The section with that id, or with a target of that id at its head, up to the next one."""
    begin = re.search(rf'<(?:section|span)\b[^>]*\bid="{re.escape(anchor)}"', html)
    assert begin, f"no section {anchor}"
    rest = html[begin.start() :]
    sections = [match.start() for match in re.finditer(r"<section\b", rest)]
    after = [place for place in sections if place > rest.index("<h")]
    return rest[: after[0]] if after else rest


@pytest.fixture(scope="module")
def index(book):
    return (book / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_symptom_lists_its_faults_in_order(index, name):
    shown = section(index, name)
    symptom = SYMPTOMS[name]
    first, _, listed = shown.partition("<ol")
    links = re.findall(r'<li>\s*<p><a\b[^>]*href="([^"#]*)#([\w-]+)"', listed)
    expected = [(f"{FAULTS[slug].page}.html", slug) for slug in symptom.faults]
    assert [(page or "symptoms.html", anchor) for page, anchor in links] == expected
    text = squeezed(text_of(shown))
    for said in (symptom.title, symptom.first, *(FAULTS[s].decides for s in symptom.faults)):
        assert squeezed(said) in text
    names = {other.title: other.name for other in SYMPTOMS.values()}
    for title in re.findall("“(.+?)”", symptom.first):
        assert f'href="#{names[title]}"' in first
    for slug in symptom.faults:
        for named in set(re.findall("`([^`]+)`", FAULTS[slug].decides)) & set(FAULTS):
            assert f'href="{FAULTS[named].page}.html#{named}"' in listed


def test_all_faults_stand_below_their_layers(index):
    for layer in LAYERS:
        slugs = re.findall(r"<li>\s*<p><code\b.*?</code>", section(index, f"faults-{layer}"), re.S)
        expected = [slug for slug, fault in FAULTS.items() if fault.layer == layer]
        assert [text_of(slug) for slug in slugs] == expected


@pytest.mark.parametrize("slug", FAULTS)
def test_the_link_of_a_report_leads_to_its_texts(book, slug):
    fault = FAULTS[slug]
    page = (book / "chapters" / f"{fault.page}.html").read_text(encoding="utf-8")
    shown = squeezed(text_of(section(page, fault.anchor)))
    for text in (fault.title, fault.cause, fault.repair, fault.decides, *fault.symptoms):
        assert squeezed(text) in shown


def messages():
    """What PyTorch really said, each with the faults that `for_error` gives for it."""
    for program in PROGRAMS:
        said = message_of(program.values[0], 3) if program.values[0] is not None else ""
        if said:
            yield said, [fault.slug for fault in for_error(said)]


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_a_pasted_message_finds_the_faults_that_bpkit_finds(book, browser, scheme):
    with serve(book) as served:
        base = served if scheme == "http" else f"{book.as_uri()}/"
        with opened(browser, base, PAGE) as (page, problems):
            area = page.get_by_label("Paste an error or a warning")
            found = page.locator(".message-found a")
            for said, slugs in messages():
                area.fill(f'Traceback (most recent call last):\n  File "x.py"\n{said}\n')
                assert found.evaluate_all("a => a.map(each => each.dataset.slug)") == slugs, said
                hrefs = found.evaluate_all("a => a.map(each => each.getAttribute('href'))")
                assert hrefs == [f"{FAULTS[s].page}.html#{FAULTS[s].anchor}" for s in slugs]
            area.fill("RuntimeError: something that no fault of the catalogue says <b>here</b>")
            assert page.locator(".message-found ol").count() == 0
            assert "No fault of the catalogue" in page.locator(".message-found").inner_text()
            page.locator(".message-found a").click()
            assert page.url.endswith("#what-you-see")
            area.fill("")
            assert page.locator(".message-found").inner_text() == ""
            assert problems == []


def test_without_scripts_the_box_is_not_shown(book, browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{book.as_uri()}/{PAGE}")
    assert not page.locator(".message-box").is_visible()
    context.close()
