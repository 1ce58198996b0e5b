"""The documentation site: built offline, without a broken link, with a section for every public name."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "report")]
from docs_pages import PUBLIC, public_names  # noqa: E402
from headless_chromium import Chromium  # noqa: E402


class Page(HTMLParser):
    """The anchors, links and files of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """One build; a warning of mkdocs ends it, also that a page is not in the navigation (which ``--quiet`` hides)."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def target(page: Path, link: str) -> Path:
    path = (page.parent / unquote(urlsplit(link).path)).resolve() if urlsplit(link).path else page
    return path / "index.html" if path.is_dir() else path


def test_no_link_is_broken(pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            if "://" in link or link.startswith("mailto:"):
                continue
            place, anchor = target(path, link), unquote(urlsplit(link).fragment)
            if not place.is_file() or (anchor and anchor not in pages[place].ids):
                broken.append(f"{path.parent.name}: {link}")
    assert len(pages) > 20
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(pages):
    for path, page in pages.items():
        assert [name for name in page.loaded if "://" in name or not target(path, name).is_file()] == []


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_a_section(site, pages, package):
    names = public_names(package)
    assert set(names) == {
        name
        for name in getattr(importlib.import_module(package), "__all__", names)
        if name != "amct"  # amct_caffe.amct is amct_caffe itself
    }
    ids = pages[site / "api" / package / "index.html"].ids
    assert [name for name in names if f"{package}.{name}" not in ids] == []


def test_the_search_finds_english_and_chinese_pages(site):
    texts = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"].partition("#")[0] for entry in texts}
    assert {
        "",
        "pytorch/",
        "config-reference/",
        "api/amct.pytorch/",
        "README.zh-CN/",
        "next-converter.zh-CN/",
    } <= places


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def search(site, tmp_path):
    """Searches the built site in a browser, which needs a server for it; returns the pages found, the best first."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Chromium(tmp_path)
    links = "Array.from(document.querySelectorAll('.md-search-result__link'), link => new URL(link.href).pathname)"

    def find(words):
        browser.send("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/?q={quote(words)}")
        deadline = time.monotonic() + 30
        while not (found := browser.run(links)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [path.strip("/") for path in found]

    yield find
    browser.close()
    server.shutdown()
    server.server_close()


@pytest.mark.browser
def test_words_are_found_in_both_languages(search, site):
    """Chinese has no spaces between words: what is searched for stands in the middle of a sentence."""
    texts = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    for words in ("quantize_model", "percentile", "量化", "转换工具", "离群值", "手写数字"):
        found = search(words)
        whole = {entry["location"].partition("#")[0].strip("/") for entry in texts if words in entry["text"].lower()}
        assert whole, words
        assert whole & set(found), (words, found[:5], whole)
        assert words.isascii() or "zh-CN" in found[0], (words, found[:5])
