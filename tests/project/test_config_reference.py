"""The config reference is what the schema and the config reader say today: fields, and legal ranges that hold."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from amct.config.layers import LayerInfo
from amct.config.ptq.caffe import CAFFE
from amct.config.ptq.pytorch import PYTORCH
from amct.errors import AmctError
from amct.schema import file_protos

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "config-reference.md").read_text()


def test_the_page_is_built_from_the_schema_of_today(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import build_config_reference

    assert build_config_reference.build() == PAGE, "run: make reference"
    for name in ("build_config_reference", "config_meanings"):
        sys.modules.pop(name)


def test_a_field_nobody_explained_stops_the_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import build_config_reference

    without = {name: text for name, text in build_config_reference.MEANINGS.items() if name != "search_step"}
    monkeypatch.setattr(build_config_reference, "MEANINGS", without)
    with pytest.raises(SystemExit, match=r"FMRQuantize\.search_step"):
        build_config_reference.build()


def test_every_field_of_every_config_has_a_row():
    files = [*file_protos("pytorch"), *file_protos("caffe_config")]
    fields = {
        field.name
        for file in files
        if "config" in file.name
        for message in file.message_type
        for field in message.field
    }
    assert len(fields) > 50
    assert {name for name in fields if f"\n| `{name}` |" not in PAGE} == set()


def ranges(title: str) -> list[tuple[str, str, str, str]]:
    """Block, field, type and range of the fields with a numeric range, of one kind of config."""
    found = []
    for block, table in re.findall(rf"^### `(\w+)`[^\n]* \({title}\)\n(.*?)(?=^#)", PAGE, re.DOTALL | re.MULTILINE):
        cells = re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]* \| ((?:[<>≤≥] [\d.e-]+(?:, )?)+) \|", table, re.MULTILINE)
        found += [(block, field, kind, legal) for field, kind, legal in cells]
    return found


def edges(kind: str, legal: str) -> tuple[list[float], list[float]]:
    """Numbers that a text such as ``> 0.5, ≤ 1`` allows, and the nearest that it forbids."""
    good, bad = [], []
    for part in legal.split(", "):
        sign, _, number = part.partition(" ")
        value = float(number)
        step = 1.0 if kind == "integer" else 0.001 * value or 1e-6
        outward = step if sign in "<≤" else -step
        if sign in "≤≥":
            good.append(value)
            bad.append(value + outward)
        else:
            good.append(value - outward)
            bad.append(value)
    return good, bad


DIALECTS = {
    "PTQ, PyTorch": (PYTORCH.expand_config, LayerInfo(name="layer", type="Conv2d")),
    "PTQ, Caffe": (CAFFE.expand_config, LayerInfo(name="layer", type="Convolution")),
}


@pytest.mark.parametrize(("title", "case"), [(title, case) for title in DIALECTS for case in ranges(title)])
def test_legal_ranges_hold_in_the_reader(title, case):
    expand, layer = DIALECTS[title]
    block, field, kind, legal = case

    def read(value):
        inner = f"{block} {{ {field}: {value:.9g} }}"
        text = f"update_bn: true {inner}" if block == "bn_update_config" else f"common_config {{ {inner} }}"
        expand(text, "quant.cfg", [layer])

    good, bad = edges(kind, legal)
    for value in good:
        read(value)
    for value in bad:
        with pytest.raises(AmctError):  # unsigned fields refuse -1 before anyone looks at the range
            read(value)


def test_there_are_ranges_to_hold():
    assert len(ranges("PTQ, PyTorch")) >= 6
    assert len(ranges("PTQ, Caffe")) >= 6
