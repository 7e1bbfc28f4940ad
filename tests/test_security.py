"""Can the book or ``bpkit`` run foreign code, or send anything anywhere?

Ruff's rules from Bandit find ``eval``, ``exec``, shells and unpickling, and its list of banned
names what opens a connection or downloads; it resolves imports under other names and reads
notebooks. A ``torch.load`` has to say ``weights_only=True``: without it, a checkpoint may run code,
and the default has changed once.

That a built page asks no other host when it opens is tested in a browser, by ``opened()`` in
``site/site_checks.py``, and that test on a broken page in ``site/test_sabotage_site.py``. Here the
book's own scripts, styles, templates and stored outputs are read, for what a browser would do
later, on a click, or without a request that a test can see.
"""

import ast
import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import nbformat
import pytest
from sklearn import datasets

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["bpkit", "chapters", "tests/tools"]
RULES = "S102,S202,S301,S302,S307,S310,S506,S602,S604,S605,TID251"
NETWORK = [
    *("socket", "ssl", "http.client", "urllib.request", "xmlrpc", "ftplib", "smtplib", "imaplib"),
    *("poplib", "webbrowser", "urllib3", "requests", "httpx", "httpcore", "aiohttp", "websocket"),
    *("torch.hub", "torch.utils.model_zoo", "torch.distributed.rpc"),
    *(f"sklearn.datasets.{name}" for name in datasets.__all__ if name.startswith("fetch_")),
]
UNPICKLES = ["numpy.load", "joblib.load", "shelve.open", "torch.jit.load"]
BANNED = dict.fromkeys(NETWORK, "opens a connection")
BANNED |= dict.fromkeys(UNPICKLES, "may unpickle, and so run code")

TALKS = re.compile(
    r"\b(?:fetch\s*\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|RTCPeerConnection"
    r"|importScripts|serviceWorker|import\()"
)
# Whatever a browser asks for by itself: every element with an address but a link to click on.
ASKS = re.compile(
    r"""<(?!a\b)\w+\b[^>]*\b(?:src|srcset|href|action|data|poster)\s*=\s*["']?(?:\w+:)?//"""
    r"""|url\(\s*["']?(?:https?:)?//|@import\s+["'](?:https?:)?//""",
    re.IGNORECASE,
)


def ruff():
    found = shutil.which("ruff", path=sysconfig.get_path("scripts")) or shutil.which("ruff")
    assert found, "ruff is not installed: pip install -r requirements.txt"
    return found


def found_by_ruff(folder, *paths):
    """What Ruff says of these paths, whatever a ``noqa`` in them says."""
    banned = ", ".join(f'"{name}" = {{ msg = "{why}" }}' for name, why in BANNED.items())
    settings = ["--isolated", "--ignore-noqa", "--no-cache", "--output-format", "json"]
    settings += ["--select", RULES, "--target-version", "py311"]
    settings += ["--config", f"lint.flake8-tidy-imports.banned-api = {{ {banned} }}"]
    command = [ruff(), "check", *settings, *paths]
    result = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    assert result.returncode in (0, 1), result.stderr
    return [
        f"{Path(entry['filename']).name}, line {entry['location']['row']}: {entry['message']}"
        for entry in json.loads(result.stdout)
    ]


def loads_more_than_weights(source):
    """The lines with a ``torch.load`` that does not say ``weights_only=True``."""
    tree = ast.parse(source)
    renamed = [
        f"line {node.lineno}: from torch import load"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization")
        if any(alias.name == "load" for alias in node.names)
    ]
    return renamed + [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        if ast.unparse(node.func) in ("torch.load", "torch.serialization.load")
        if not any(
            keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
            for keyword in node.keywords
        )
    ]


def sources():
    """Name and text of each module and of each notebook's cells of code."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        for path in sorted((ROOT / folder).glob("*.ipynb")):
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                if cell["cell_type"] == "code":
                    yield f"{path.name}, cell {cell['id']}", "".join(cell["source"])


def of_pages():
    """Name and text of what the book puts on its pages: files, HTML in Python, HTML stored."""
    for path in sorted((ROOT / "chapters").glob("_*/*")):
        if path.suffix in (".js", ".css", ".html", ".svg", ".py"):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "bpkit").rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "chapters").glob("*.md")):
        yield path.name, path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            texts = [cell["source"]] if cell["cell_type"] == "markdown" else []
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                texts += [text for kind, text in data.items() if not kind.startswith("image/")]
            for text in texts:
                yield f"{path.name}, cell {cell['id']}", "".join(text)


def sends(text):
    """The first thing in a script, style sheet or piece of HTML that asks another place."""
    found = TALKS.search(text) or ASKS.search(text)
    return found and found.group()


def test_nothing_on_a_page_asks_another_place():
    found = {name: sends(text) for name, text in of_pages()}
    assert len(found) > 500
    assert {name: what for name, what in found.items() if what} == {}


def test_nothing_runs_foreign_code_or_opens_a_connection():
    assert found_by_ruff(ROOT, *FOLDERS) == []


def test_only_weights_are_loaded():
    found = {name: loads_more_than_weights(text) for name, text in sources() if "load" in text}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import socket as s\ns.socket()",
        "from urllib.request import urlopen",
        "import torch\ntorch.hub.load('a', 'b')",
        "from sklearn.datasets import fetch_openml",
        "import pickle\npickle.loads(b'')  # noqa: S301",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "from os import system\nsystem('ls')",
        "eval('1')",
        "exec('1')",
    ],
)
def test_ruff_notices(source, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    (tmp_path / "broken.py").write_text(source, encoding="utf-8")
    places = {line.partition(",")[0] for line in found_by_ruff(tmp_path, ".")}
    assert places == {"broken.py", "broken.ipynb"}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.load(path, weights_only=True)", 0),
        ("torch.load(path)", 1),
        ("torch.load(path, weights_only=False)", 1),
        ("torch.load(path, weights_only=flag)", 1),
        ("from torch import load as read", 1),
        ("json.load(file)", 0),
    ],
)
def test_a_load_of_more_than_weights_is_noticed(source, count):
    assert len(loads_more_than_weights(source)) == count


@pytest.mark.parametrize(
    "text",
    [
        "fetch('data.json')",
        "new WebSocket(address)",
        "navigator.sendBeacon(address, text)",
        '<link rel="preconnect" href="https://fonts.example.org">',
        "<img loading=lazy src=//cdn.example.org/x.png>",
        '<form action="https://example.org/mail">',
        "a { background: url(https://cdn.example.org/x.png) }",
        "@import 'https://cdn.example.org/x.css';",
    ],
)
def test_asking_another_place_is_noticed(text):
    assert sends(text)


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://pytorch.org/docs">the documentation</a>',
        '<svg xmlns="http://www.w3.org/2000/svg"><use href="#mark"/></svg>',
        '<img src="../_images/loss.png" alt="https://example.org in a picture">',
        "import torch\nprint(prefetch(2))",
    ],
)
def test_a_link_to_click_on_asks_nobody(text):
    assert not sends(text)
