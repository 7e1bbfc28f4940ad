"""Are the figures still the stored ones?  Compares them after nbval's own check of a cell.

nbval compares text and skips pictures. A wrapper around its test reads the pictures it has just
drawn, so nothing is executed twice. A picture may differ from the stored one by RMS 0.5 over the
whole and 12 in the worst block of 16 x 16 pixels, on a scale of 0 to 255; these limits pass
rounding noise and catch a curve moved by 1 % or one wrong letter. A cell that needs wider ones
says so, with a reason, in its metadata:

    "figure_tolerance": {"rms": 1.5, "block": 30, "reason": "float32 is the subject"}

A failure leaves one picture, stored | fresh | difference, in ``_build/figdiff/``.
"""

import base64
import importlib.util
import io
import os
from pathlib import Path

import numpy as np
import pytest
from nbval.plugin import IPyNbCell, IPyNbFile
from PIL import Image

RMS, BLOCK, SIZE = 0.5, 12.0, 16
PNG = ("image/png", "application/papermill.record/image/png")  # the second: myst_nb.glue
SVG = ("image/svg+xml", "application/papermill.record/image/svg+xml")


def _refresh():
    path = Path(__file__).resolve().parents[1] / "tests" / "tools" / "refresh.py"
    spec = importlib.util.spec_from_file_location("_refresh", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Kernels inherit it: the outputs were stored under the same settings.
os.environ.update(_refresh().ENVIRONMENT)


def pictures(outputs):
    """The pictures among a cell's outputs, as pairs (mime type, base64 text)."""
    data = [output.get("data", {}) for output in outputs or []]
    return [(mime, d[mime]) for d in data for mime in (*PNG, *SVG) if mime in d]


def pixels(encoded):
    """An array (height, width, 3) of a PNG laid on white."""
    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA")
    white = Image.new("RGBA", picture.size, (255,) * 4)
    return np.asarray(Image.alpha_composite(white, picture).convert("RGB"), dtype=float)


def difference(stored, fresh, rms_limit=RMS, block_limit=BLOCK):
    """How two pictures differ beyond the limits: "" if they don't."""
    if stored.shape != fresh.shape:
        (h, w, _), (k, v, _) = stored.shape, fresh.shape
        return f"{w} x {h} pixels are stored, {v} x {k} were drawn"
    squares = ((stored - fresh) ** 2).mean(axis=2)
    padded = np.pad(squares, [(0, -side % SIZE) for side in squares.shape])
    rows, columns = (side // SIZE for side in padded.shape)
    blocks = padded.reshape(rows, SIZE, columns, SIZE).mean(axis=(1, 3))
    rms, worst = np.sqrt(squares.mean()), np.sqrt(blocks.max())
    if rms <= rms_limit and worst <= block_limit:
        return ""
    row, column = np.unravel_index(blocks.argmax(), blocks.shape)
    return (
        f"RMS {rms:.2f} (limit {rms_limit:g}), worst block {worst:.1f} (limit {block_limit:g}) "
        f"at x = {column * SIZE}, y = {row * SIZE}"
    )


def side_by_side(stored, fresh):
    """One picture: stored | fresh | what differs, darker where it differs more."""
    height, width = (max(sides) for sides in zip(stored.shape[:2], fresh.shape[:2], strict=True))

    def grown(picture):
        space = [(0, height - picture.shape[0]), (0, width - picture.shape[1]), (0, 0)]
        return np.pad(picture, space, constant_values=235)

    a, b = grown(stored), grown(fresh)
    marks = np.repeat(255 - np.clip(4 * np.abs(a - b).max(axis=2, keepdims=True), 0, 255), 3, 2)
    bar = np.full((height, 6, 3), 90.0)
    return Image.fromarray(np.hstack([a, bar, b, bar, marks]).astype(np.uint8))


def limits(cell):
    """The RMS and block limit of a cell: wider than usual only with a reason."""
    wider = cell.metadata.get("figure_tolerance")
    if wider is None:
        return RMS, BLOCK
    if not str(wider.get("reason", "")).strip():
        raise ValueError("figure_tolerance in the cell's metadata gives no reason")
    return float(wider.get("rms", RMS)), float(wider.get("block", BLOCK))


def pytest_collection_modifyitems(items):
    """Take glued pictures from nbval, which would compare them byte by byte."""
    for file in {item.parent for item in items if isinstance(item.parent, IPyNbFile)}:
        file.skip_compare = (*file.skip_compare, *PNG, *SVG)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Compare a cell's pictures once nbval has passed its text."""
    result = yield
    if isinstance(item, IPyNbCell) and item.options["check"]:
        _compare_pictures(item)
    return result


def _compare_pictures(item):
    stored, fresh = pictures(item.cell.outputs), pictures(item.test_outputs)
    if any(mime in SVG for mime, _ in stored + fresh):
        item.raise_cell_error("an SVG output: figures of this book are PNG (matplotlib's default)")
    if len(stored) != len(fresh):
        item.raise_cell_error(f"{len(stored)} figure(s) stored, {len(fresh)} drawn")
    if not stored:
        return
    try:
        rms, block = limits(item.cell)
    except ValueError as error:
        item.raise_cell_error(str(error))
    for count, ((_, old), (_, new)) in enumerate(zip(stored, fresh, strict=True)):
        if old == new:
            continue
        before, after = pixels(old), pixels(new)
        why = difference(before, after, rms, block)
        if why:
            folder = item.config.rootpath / "_build" / "figdiff"
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{item.path.stem}-{item.cell_num}-{count}.png"
            side_by_side(before, after).save(folder / name)
            item.raise_cell_error(
                f"figure {count} differs: {why}; look at _build/figdiff/{name} "
                "(stored | fresh | difference), and if the fresh one is right, store it: "
                f"python tests/tools/refresh.py chapters/{item.path.name}"
            )
