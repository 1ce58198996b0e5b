"""Makes the description for a package index from README.md, whose links point into the repository."""

import re
from pathlib import Path

from setuptools import setup

SITE = "https://amct.example.org"  # where the site of `make docs` is served; also in pyproject.toml

text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
text = re.sub(r"\]\(docs/([\w./-]+?)\.md", rf"]({SITE}/\1/", text)
text = re.sub(r"\]\((?!https?://)(?:docs/)?", rf"]({SITE}/", text)
setup(long_description=text, long_description_content_type="text/markdown")
