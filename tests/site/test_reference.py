"""Does every name that a page sets as code of bpkit lead to its entry?"""

import re

NAME = re.compile(r'(<a [^>]*>)?<code class="xref py py-(\w+)[^"]*"><span class="pre">([^<]*)')


def unlinked(html):
    """Names set with {func}, {class}, {meth}, … that lead nowhere.

    A lone backtick in a docstring (py-obj) may also name an argument.
    """
    found = NAME.findall(html)
    return [f"{role} {name}" for link, role, name in found if not link and role != "obj"]


def test_names_lead_to_the_reference(book):
    texts = {path.name: path.read_text(encoding="utf-8") for path in book.glob("chapters/*.html")}
    problems = {page: names for page, text in texts.items() if (names := unlinked(text))}
    assert problems == {}
    entry = 'href="#bpkit.trace" title="bpkit.trace"'
    assert entry in texts["reference.html"], "is the pattern still the one that Sphinx writes?"


def test_a_name_without_an_entry_is_seen():
    code = '<code class="xref py py-func docutils literal notranslate"><span class="pre">f()</span>'
    assert unlinked(code) == ["func f()"]
    assert unlinked(f'<a class="reference internal" href="#f" title="f">{code}') == []
