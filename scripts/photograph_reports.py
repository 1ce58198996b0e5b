"""Photograph the reports of the demo for the documents, and put its table into the READMEs: all of one run.

Run it (``make pictures``) after the look of the report changed. It runs the demo unless its reports are there, opens
them in a headless Chromium, and writes ``docs/images/*.png``. Pillow reduces the colours to keep the pictures small.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
LARGEST = 200 * 1024  # bytes

sys.path.insert(0, str(ROOT / "tests" / "report"))
from headless_chromium import Chromium  # noqa: E402  the tests' own browser

DESK = 1080
PHONE = 390
MARGIN = 12


def small_png(png: bytes) -> bytes:
    """The same image in 256 colours, which these pages hardly exceed."""
    target = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        target, "png", optimize=True
    )
    return target.getvalue()


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One photograph: from the top of one part of the page to the bottom of another (CSS selectors)."""

    name: str
    page: str
    first: str = "html"
    last: str = "html"
    layer: str = ""
    phone: bool = False


PICTURES = (
    Picture(name="report", page="cnn.html", last="#graph"),
    Picture(name="report-page", page="cnn.html"),
    Picture(name="report-layer", page="lenet.html", first="#detail", last="#detail", layer="conv2"),
    Picture(name="report-phone", page="lenet.html", last="#layers", phone=True),
)


def photograph(browser: Chromium, folder: Path, picture: Picture) -> bytes:
    """Open the page and take the photograph."""
    width = PHONE if picture.phone else DESK
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": picture.phone}
    browser.send("Emulation.setDeviceMetricsOverride", **size)
    browser.send("Emulation.setScrollbarsHidden", hidden=True)
    browser.open(folder / picture.page)
    if picture.layer:
        browser.run(
            "Array.from(document.querySelectorAll('#table .choose'))"
            f".find(item => item.textContent === {picture.layer!r}).click()"
        )
    top = browser.run(f"document.querySelector({picture.first!r}).getBoundingClientRect().top + scrollY")
    bottom = browser.run(f"document.querySelector({picture.last!r}).getBoundingClientRect().bottom + scrollY")
    margin = 0 if picture.first == "html" else MARGIN
    bottom += 0 if picture.last == "html" else MARGIN
    clip = {"x": 0, "y": top - margin, "width": width, "height": bottom - top + margin, "scale": 1}
    shot = browser.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(shot["data"])


def put_into_readmes(table: str) -> None:
    """Replace the demo's table in both READMEs, so that it is of the same run as the pictures."""
    lines = [line.rstrip() for line in table.splitlines()[2:]]  # without its title
    block = "```text\n" + "\n".join(lines).strip("\n") + "\n```"
    for page in READMES:
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"```text\n.*?```", lambda _: block, text, count=1, flags=re.DOTALL), encoding="utf-8")


def main() -> int:
    """Write the images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=ROOT / "out" / "demo", help="where the demo left its reports")
    folder = parser.parse_args().demo.resolve()
    if not (folder / "cnn.html").is_file():
        demo = [sys.executable, ROOT / "examples" / "demo.py", "--output", os.path.relpath(folder, ROOT)]
        subprocess.run(demo, cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Chromium(Path(profile))
        try:
            pictures = {picture.name: photograph(browser, folder, picture) for picture in PICTURES}
        finally:
            browser.close()
    put_into_readmes((folder / "table.txt").read_text(encoding="utf-8"))
    for name, png in pictures.items():
        small = small_png(png)
        if len(small) > LARGEST:
            sys.exit(f"{name}.png would have {len(small)} bytes, more than {LARGEST}")
        (IMAGES / f"{name}.png").write_bytes(small)
        sys.stdout.write(f"docs/images/{name}.png: {Image.open(io.BytesIO(small)).size}, {len(small)} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
