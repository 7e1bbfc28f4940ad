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
