"""How public names are written: once, in the stub of their package, each in a line that ``amct.lazy`` reads."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent.parent / "src"
STUBS = sorted(SOURCES.rglob("__init__.pyi"))
OTHERWISE = {"from types import ModuleType", "amct: ModuleType", "__all__: list[str]"}
"""Lines of amct_caffe's stub, whose attribute ``amct`` is the package itself."""


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.parent.relative_to(SOURCES).as_posix())
def test_every_line_of_a_stub_is_a_name_that_the_package_has(stub):
    package = importlib.import_module(".".join(stub.parent.relative_to(SOURCES).parts))
    lines = [line for line in stub.read_text().splitlines() if line and line not in OTHERWISE]
    found = [re.fullmatch(r"from (\S+) import (\w+) as \2", line) for line in lines]
    assert [line for line, match in zip(lines, found, strict=True) if match is None] == []
    names = [match[2] for match in found if match is not None]
    assert len(set(names)) == len(names)
    assert set(package.__all__) - {"amct"} == set(names)
    for module, name in (match.groups() for match in found if match is not None):
        origin = importlib.import_module(f"{module}.{name}" if module == package.__name__ else module)
        assert getattr(package, name) is (origin if module == package.__name__ else getattr(origin, name))


def test_all_lazy_packages_have_a_stub():
    lazy = {path for path in SOURCES.rglob("__init__.py") if "lazy_names(__name__)" in path.read_text()}
    assert {stub.with_suffix(".py") for stub in STUBS} == lazy
