"""Makes the description for a package index from README.md, whose links point into the repository."""

import re
from pathlib import Path

from setuptools import setup

SITE = "https://amct.example.org"  # where the site of `make docs` is served; also in pyproject.toml

text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
text = re.sub(r"\]\((?!https?://)(?:docs/)?", rf"]({SITE}/", text)
text = re.sub(rf"\]\(({SITE}/[\w./-]*?)(?:/README)?\.md", r"](\1/", text)
setup(long_description=text, long_description_content_type="text/markdown")
