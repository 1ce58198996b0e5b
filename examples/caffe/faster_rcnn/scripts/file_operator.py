"""Makes Python 2 files run in Python 3: what the Python layers of py-faster-rcnn use of it, and nothing else.

``python3 file_operator.py FOLDER`` changes the files of a folder; their first state is kept as ``*.py.orig``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGES = (
    (re.compile(r"^(\s*)print +(?!\()(.+?)\s*$", re.MULTILINE), r"\1print(\2)"),
    (re.compile(r"\bxrange\("), "range("),
    (re.compile(r"\.iter(items|keys|values)\("), r".\1("),
    (re.compile(r"\bimport cPickle(?: as pickle)?\b"), "import pickle as cPickle"),
    (re.compile(r"\b(\w+(?:\.\w+)*)\.has_key\(([^()]*)\)"), r"(\2 in \1)"),
    (re.compile(r"^(\s*except +[\w.()]+) *, *(\w+)\s*:", re.MULTILINE), r"\1 as \2:"),
    (re.compile(r"\byaml\.load\((\w+)\)"), r"yaml.safe_load(\1)"),
    (re.compile(r"\bnp\.(float|int|bool)\b(?!_)"), r"\1"),
)


def converted(text: str) -> str:
    """The text of a file for Python 3."""
    for pattern, replacement in CHANGES:
        text = pattern.sub(replacement, text)
    return text


def change_folder(folder: Path) -> list[Path]:
    """Change all files of a folder; returns those that were changed."""
    changed = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        new = converted(text)
        if new != text:
            kept = path.with_name(f"{path.name}.orig")
            if not kept.exists():
                kept.write_text(text, encoding="utf-8", errors="surrogateescape")
            path.write_text(new, encoding="utf-8", errors="surrogateescape")
            changed.append(path)
    return changed


def main() -> int:
    """Change the files of the folder that is given."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("usage: python3 file_operator.py FOLDER", file=sys.stderr)
        return 2
    print(f"[AMCT][INFO]{len(change_folder(Path(sys.argv[1])))} files changed in {sys.argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
