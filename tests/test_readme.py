"""The README's example is a program, and what stands below it is its output."""

import contextlib
import io
import linecache
import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def example() -> tuple[str, str]:
    pattern = r"<!-- example -->\n```python\n(.*?)```\n+```text\n(.*?)```"
    program, output = re.search(pattern, README.read_text(encoding="utf-8"), re.S).groups()
    return program, output


def run(program: str) -> str:
    lines = program.splitlines(keepends=True)
    linecache.cache["<example>"] = (len(program), None, lines, "<example>")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng(devices=[]):
        exec(compile(program, "<example>", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_readme_shows_what_the_example_prints():
    program, output = example()
    assert run(program).strip() == output.strip()


def test_a_changed_example_is_noticed():
    program, output = example()
    repaired = program.replace(".softmax(1)", "")
    assert repaired != program
    assert run(repaired).strip() != output.strip()


def test_the_list_of_pages_says_what_the_title_page_says():
    index = (README.parent / "chapters" / "index.md").read_text(encoding="utf-8")
    said = re.search(r"```\{map\}\n(.*?)```", index, re.S)[1].strip().split("\n")
    row = r"^\| \[[^\]]+\]\(chapters/(\w+)\.ipynb\) \| (.+) \|$"
    listed = re.findall(row, README.read_text(encoding="utf-8"), re.M)
    assert [": ".join(pair) for pair in listed] == said


def test_pictures_are_there_in_light_and_dark_and_say_what_they_show():
    text = README.read_text(encoding="utf-8")
    used = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    folder = README.parent / ".github"
    assert sorted(used) == sorted(f".github/{path.name}" for path in folder.glob("*.png"))
    names = [re.fullmatch(r"\.github/(\w+)-(?:light|dark)\.png", name)[1] for name in used]
    assert all(names.count(name) == 2 for name in names)
    alts = re.findall(r'<img [^>]*alt="([^"]*)"', text)
    assert len(alts) == len(set(names))
    assert all(len(alt) > 40 for alt in alts)
