"""Where does a reader of the built pages get ``bpkit``?  From the pages themselves.

A downloaded notebook imports it, and the package of that name on PyPI is another one. So the pages
carry it as a wheel, ``_static/bpkit-VERSION-py3-none-any.whl``, for ``pip install`` without a
network and without a build. A book that does not have the package beside it gets none.
"""

import base64
import hashlib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

WHEEL = "Wheel-Version: 1.0\nGenerator: bpkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
FILES = (".py", ".toml", ".json", ".typed")


def pack(root, folder):
    """Write the wheel of ``root / "bpkit"`` to ``folder``; the same files give the same bytes."""
    installed = distribution("bpkit")
    name = f"bpkit-{installed.version}"
    info = f"{name}.dist-info"
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted((root / "bpkit").rglob("*"))
        if path.suffix in FILES
    }
    # The second name is that in the folder an editable installation leaves in the checkout.
    metadata = installed.read_text("METADATA") or installed.read_text("PKG-INFO")
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    files[f"{info}/licenses/LICENSE"] = (root / "LICENSE").read_bytes()
    record = f"{info}/RECORD"
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
    return wheel


def _build_finished(app, exception):
    root, static = Path(app.srcdir), Path(app.outdir) / "_static"
    if exception or app.builder.format != "html" or not (root / "bpkit").is_dir():
        return
    for old in static.glob("bpkit-*.whl"):
        old.unlink()
    pack(root, static)


def setup(app):
    app.connect("build-finished", _build_finished)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
