"""Pages of the documentation site that are not in docs/: README, CHANGELOG, and one page per public package.

mkdocs calls ``on_files`` and ``on_page_markdown`` (see mkdocs.yml). The page of a package lists its public names;
mkdocstrings fills in their docstrings without importing the package.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = ("amct.pytorch", "amct.onnx_model", "amct.caffe", "amct.extend", "amct.errors", "amct_pytorch", "amct_caffe")
OUTSIDE = {"README.md": "index.md", "README.zh-CN.md": "README.zh-CN.md", "CHANGELOG.md": "CHANGELOG.md"}
EXAMPLES = tuple(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").rglob("README.md")))


def public_names(package: str) -> list[str]:
    """The names that a package offers: those of its stub or ``__all__``, or else its public classes and functions."""
    stub = _source(package).with_suffix(".pyi")
    if stub.is_file():
        lines = ast.parse(stub.read_text(encoding="utf-8")).body
        names = (name for line in lines if isinstance(line, ast.ImportFrom) for name in line.names)
        return sorted(name.asname for name in names if name.asname is not None)
    tree = ast.parse(_source(package).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            return list(ast.literal_eval(node.value))
    defined = (node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return [node.name for node in defined if not node.name.startswith("_")]


def _source(package: str) -> Path:
    path = ROOT / "src" / package.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def api_page(package: str) -> str:
    """The page of a package: what it is for, and a section for each public name."""
    about = (ast.get_docstring(ast.parse(_source(package).read_text(encoding="utf-8"))) or "").partition("\n\n>>>")[0]
    sections = [f"::: {package}.{name}\n    options: {{heading_level: 2}}\n" for name in public_names(package)]
    return "\n".join([f"# {package}", "", about.partition("\n\n::")[0], "", *sections])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, target in (OUTSIDE | dict(zip(EXAMPLES, EXAMPLES, strict=True))).items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    for package in PUBLIC:
        files.append(File.generated(config, f"api/{package}.md", content=api_page(package)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links of the repository links of the site: ``docs/x.md`` is ``x.md`` there; files of the code are not."""
    del config, files
    if page.file.src_uri in OUTSIDE.values():
        markdown = markdown.replace("](docs/", "](").replace("](README.md)", "](index.md)")
    if page.file.src_uri in EXAMPLES:
        markdown = re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
        markdown = re.sub(r"\[([^\]]*)\]\((?!https?://|#)[\w./-]+\.(?!md)\w+\)", r"\1", markdown)  # files of the code
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)(README\.md|CHANGELOG\.md|README\.zh-CN\.md)\)", _sibling, markdown)


def _sibling(link: re.Match[str]) -> str:
    return f"[{link[1]}]({OUTSIDE[link[2]]})"
