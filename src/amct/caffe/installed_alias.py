"""``import caffe`` without another word, for an environment whose user asks for it: ``amct caffe install-alias``.

One file ``caffe.py`` in the environment's site-packages hands over to ``amct.caffe.pycaffe``. A real Caffe wins: Python
itself finds a folder ``caffe`` beside the file or before it in its path first, and the file finds one behind it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from amct.errors import ArgumentError, FileError

if TYPE_CHECKING:
    from types import ModuleType

FILE = "caffe.py"
MARK = "# Written by `amct caffe install-alias`; `amct caffe install-alias --remove` removes it.\n"
CONTENT = f'''{MARK}"""Makes "import caffe" the caffe of amct where no real Caffe can be imported."""

from amct.caffe.installed_alias import replace_alias

replace_alias(__file__)
'''


def install_alias() -> Path:
    """Write the file, unless something else is called caffe in this environment; returns its path.

    Raises:
        ArgumentError: There is a real Caffe, or a file of somebody else.
        FileError: It cannot be written.
    """
    path = _path()
    if is_alias(path):
        return path
    found = importlib.machinery.PathFinder.find_spec("caffe")
    if os.path.lexists(path) or (found is not None and found.origin is not None):
        other = path if os.path.lexists(path) else found.origin  # type: ignore[union-attr]  # one of the two is there
        raise ArgumentError(f'install-alias: "{other}" is called caffe already, and "import caffe" gives it')
    try:
        with path.open("x", encoding="utf-8") as file:  # never on top of another file
            file.write(CONTENT)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def remove_alias() -> Path | None:
    """Remove the file again; returns its path, or None if there is none that ``install_alias`` wrote.

    Raises:
        FileError: It cannot be removed.
    """
    path = _path()
    if not is_alias(path):
        return None
    try:
        path.unlink()
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be removed: {error.strerror or error}") from error
    return path


def replace_alias(file: str) -> None:
    """Called by the file: make ``caffe`` the real Caffe behind it in the Python path, if there is one, or this one."""
    real = _behind(Path(file).resolve().parent)
    if real is None:
        from amct.caffe.pycaffe.runtime import install_as_caffe

        install_as_caffe(force=True)  # what it replaces is the file itself
        return
    spec, module = real
    sys.modules["caffe"] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)


def _behind(folder: Path) -> tuple[importlib.machinery.ModuleSpec, ModuleType] | None:
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    spec = importlib.machinery.PathFinder.find_spec("caffe", others)
    if spec is None or spec.origin is None or spec.loader is None:  # none, or a folder without __init__.py
        return None
    return spec, importlib.util.module_from_spec(spec)


def _path() -> Path:
    return Path(sysconfig.get_path("purelib")) / FILE


def is_alias(path: Path) -> bool:
    """Whether a file is one that ``install_alias`` wrote."""
    try:
        return not path.is_symlink() and path.is_file() and path.read_text(encoding="utf-8").startswith(MARK)
    except (OSError, UnicodeDecodeError):
        return False
