"""Books to look at, each built from nothing once per test run, and a browser without a network."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from site_books import build, write_small_book, write_stock_book
from site_checks import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def built(source, output):
    """The folder with the pages of the book in ``source``; the log, should it not build."""
    run = build(source, output)
    if run.returncode:
        log = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout[-2000:] + run.stderr[-8000:])
        pytest.fail(f"the book does not build:\n{log}", pytrace=False)
    return output / "_build" / "html"


@pytest.fixture(scope="session")
def once(request, tmp_path_factory):
    """``once(name, make)``: call ``make(folder)`` in one worker only, and give all its folder."""
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        shared = shared.parent  # one per run of pytest, for all workers

    def make_once(name, make):
        folder = shared / name
        done = shared / f"{name}.json"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                if folder.exists():  # another worker failed half way
                    shutil.rmtree(folder)
                folder.mkdir()
                done.write_text(json.dumps(str(make(folder))), encoding="utf-8")
        return Path(json.loads(done.read_text(encoding="utf-8")))

    return make_once


@pytest.fixture(scope="session")
def book(once):
    """The pages of the book itself."""
    return once("book", lambda folder: built(ROOT, folder))


@pytest.fixture(scope="session")
def small(once):
    """The pages of a small book with one of everything, built as the book is."""

    def make(folder):
        write_small_book(folder / "source")
        return built(folder / "source", folder)

    return once("small", make)


@pytest.fixture(scope="session")
def stock(once):
    """The same small book without our extensions, templates and style."""

    def make(folder):
        write_stock_book(folder / "source")
        return built(folder / "source", folder)

    return once("stock", make)


@pytest.fixture(scope="session")
def browser():
    """An installed Chromium; nothing is ever downloaded."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        message = f"no browser: none of {', '.join(BROWSERS)} is on the PATH"
        if os.environ.get("CI"):
            pytest.fail(f"{message}, and CI has to have one", pytrace=False)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()
