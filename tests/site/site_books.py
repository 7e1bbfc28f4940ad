"""Build a book; and a small book with one of everything, for tests that break it."""

import base64
import io
import json
import os
import shutil
import subprocess
import sys

import matplotlib.figure
import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from site_checks import ROOT

CODE = '''
import torch

class Layer(torch.nn.Module):  # a comment
    """A docstring."""

    @staticmethod
    def scale(x: float, *, by=2.5e-3) -> float:
        if x is None or not by < 0x1F:
            raise ValueError(f"{x!r:>10} and {by:.3f}\\n")
        return -x @ by[..., 1:] ** 2 % True
'''.strip()


def build(source, output, builder="html"):
    """Build the book in ``source`` with warnings as errors, as a program of its own."""
    main = "from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", main, "build", str(source), "--builder", builder]
    command += ["-W", "--keep-going", "--path-output", str(output)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env)


def write_small_book(folder):
    """A book of one notebook, with the configuration, extensions and style of the real one."""
    chapters = folder / "chapters"
    for name in ("_ext", "_static", "_templates"):
        shutil.copytree(
            ROOT / "chapters" / name, chapters / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "_config.yml", folder)
    entry = "@book{one, title = {One}, author = {Ann One}, year = 2001, publisher = {House}}"
    (chapters / "references.bib").write_text(entry, encoding="utf-8")
    (chapters / "index.md").write_text("# A small book\n\nIt has one chapter.\n", encoding="utf-8")
    (chapters / "claims.md").write_text("# Claims\n\n```{claims}\n```\n", encoding="utf-8")
    (chapters / "more.md").write_text("# More\n\nA page below a chapter.\n", encoding="utf-8")
    one = {"file": "chapters/01_one", "sections": [{"file": "chapters/more"}]}
    toc = {
        "format": "jb-book",
        "root": "chapters/index",
        "parts": [
            {"caption": "Part", "numbered": 1, "chapters": [one]},
            {"caption": "Back", "chapters": [{"file": "chapters/claims"}]},
        ],
    }
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc), encoding="utf-8")
    (folder / "tests").mkdir()
    ledger = [
        {
            "id": "A01",
            "article": "A",
            "section": "§1",
            "kind": "concept",
            "claim": "The graph of $wx + b$ has **three** nodes, says `grad_fn`.",
            "verdict": "wrong",
            "finding": "It has $2$.",
            "number": ["2"],
            "chapters": [1, 9],
        },
        {
            "id": "B02",
            "article": "B",
            "section": "§2",
            "kind": "anecdote",
            "claim": "Nobody likes this.",
            "verdict": "untestable",
            "finding": "",
            "number": [],
            "chapters": [1],
        },
        {
            "id": "C03",
            "article": "C",
            "section": "§3",
            "kind": "concept",
            "claim": "Of a chapter that is not here.",
            "verdict": "holds",
            "finding": "",
            "number": [],
            "chapters": [7],
        },
    ]
    (folder / "tests" / "claims.json").write_text(json.dumps(ledger), encoding="utf-8")
    nbformat.write(_notebook(), chapters / "01_one.ipynb")


def write_stock_book(folder):
    """The small book without our extensions, templates and style."""
    write_small_book(folder)
    config = yaml.safe_load((folder / "_config.yml").read_text(encoding="utf-8"))
    del config["sphinx"]["local_extensions"]
    del config["html"]["favicon"]
    for key in ("html_math_renderer", "html_static_path", "html_css_files", "html_js_files"):
        del config["sphinx"]["config"][key]
    for key in ("templates_path", "html_context"):
        del config["sphinx"]["config"][key]
    (folder / "_config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "chapters" / "claims.md").write_text("# Claims\n", encoding="utf-8")


def _notebook():
    picture = io.BytesIO()
    figure = matplotlib.figure.Figure(figsize=(6, 3))
    figure.add_subplot().plot([0, 1], [1, 0])
    figure.savefig(picture, format="png")
    png = base64.b64encode(picture.getvalue()).decode()
    long = "a line that is much too long for a telephone " * 3
    cells = [
        new_markdown_cell("# One of everything, $x^2$\n\nFor $x \\in \\RR$ see {eq}`eq:sum`."),
        new_markdown_cell(
            "## Formulas\n\n$$\n\\sum_{i=1}^{N} f'(x_i) = \\sqrt{\\frac{a}{b}}\n$$ (eq:sum)\n\n"
            "$$\na &= b \\\\\nc &= d\n$$\n\n"
            "\\begin{align}\na &= b \\\\\nc &= \\left\\lVert g \\right\\rVert\n\\end{align}\n\n"
            "$$\n" + " + ".join(f"x_{{{i}}}" for i in range(40)) + "\n$$ (eq:wide)\n"
        ),
        new_code_cell(
            "print('two')",
            execution_count=1,
            metadata={"claims": ["A01"]},
            outputs=[new_output("stream", name="stdout", text="two\n")],
        ),
        new_markdown_cell(
            "## Boxes\n\nA [link](#formulas) and [another](claims.md).\n\n"
            "| a | b |\n|---|---|\n| " + "wide_" * 30 + " | `code` |\n\n"
            "```{exercise} One\n:label: ex:one\n\nWhat is $1 + 1$?\n```\n\n"
            "```{dropdown} Hint\nNot three.\n```\n\n"
            "As {cite:t}`one` says.\n\n```{bibliography}\n```\n"
        ),
        new_code_cell(
            f"long = '{long}'",
            execution_count=2,
            outputs=[],
            metadata={"tags": ["hide-cell"], "mystnb": {"code_prompt_show": "Show the solution"}},
        ),
        new_code_cell(CODE, execution_count=3, outputs=[]),
        new_code_cell(
            "print(long)",
            execution_count=4,
            outputs=[new_output("stream", name="stdout", text=long)],
        ),
        new_code_cell(
            "plot()",
            execution_count=5,
            outputs=[new_output("display_data", {"image/png": png, "text/plain": "<Figure>"})],
            metadata={
                "mystnb": {
                    "image": {"alt": "A straight line falls from one to zero."},
                    "figure": {"name": "fig:line", "caption": "It falls, $y = 1 - x$."},
                }
            },
        ),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})
