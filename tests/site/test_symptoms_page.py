"""Is the whole catalogue of faults in the built book, and does each report's link lead to it?"""

import re
from html import unescape

import pytest

from bpkit.diagnosis.faults import FAULTS, LAYERS


def text_of(html):
    return " ".join(unescape(re.sub(r"<[^>]+>", "", html)).split())


def test_the_page_lists_all_faults_in_order(book):
    page = (book / "chapters" / "faults.html").read_text(encoding="utf-8")
    wanted = [f"faults-{layer}" for layer in LAYERS] + list(FAULTS)
    sections = re.findall(r'<section\b[^>]*\bid="([^"]+)"', page)
    assert [anchor for anchor in sections if anchor in FAULTS] == list(FAULTS)
    assert set(wanted) <= set(sections)


@pytest.mark.parametrize("slug", FAULTS)
def test_the_link_of_a_report_leads_to_its_texts(book, slug):
    fault = FAULTS[slug]
    page = (book / "chapters" / f"{fault.page}.html").read_text(encoding="utf-8")
    found = re.search(rf'<section\b[^>]*\bid="{re.escape(fault.anchor)}".*?</section>', page, re.S)
    assert found, f"no section {fault.anchor} on the page {fault.page}"
    if fault.page == "faults":
        shown = text_of(found[0])
        for text in (fault.title, fault.cause, fault.repair, fault.decides, *fault.symptoms):
            assert squeezed(text.replace("`", "")) in squeezed(shown)
        assert len(re.findall(r"<li\b", found[0])) == len(fault.symptoms) + len(fault.errors)


def squeezed(text):
    """Without blanks and typographic quotes, which the builder changes."""
    return re.sub(r"\s", "", text.translate(str.maketrans("“”‘’", "\"\"''")))
