"""One layer's entry changes while others change theirs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_updater import entry_of, work

from amct.errors import ArgumentTypeError, FileError, RecordParseError, RecordValueError
from amct.record import (
    CaffeLayerRecord,
    CaffeRecord,
    DataFactors,
    KvCacheRecord,
    LayerRecord,
    PruneNode,
    PruneRecord,
    Record,
    format_record,
    parse_record,
    read_caffe_record,
    read_record,
    update,
    update_inputs,
    write_record,
)

UPDATER = Path(__file__).with_name("record_updater.py")
CHAIN = PruneRecord(producers=(PruneNode.channels("conv", "Conv", 0, 8),))


def test_8_threads_and_4_processes_lose_nothing(tmp_path):
    file, count = tmp_path / "record.txt", 200
    processes = [
        subprocess.Popen([sys.executable, str(UPDATER), str(file), f"process{index}", str(count)]) for index in range(4)
    ]
    threads = [threading.Thread(target=work, args=(str(file), f"thread{index}", count)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait() for process in processes] == [0] * 4
    record = read_record(file)
    workers = [f"process{index}" for index in range(4)] + [f"thread{index}" for index in range(8)]
    expected = {f"{worker}.{step}": entry_of(worker, step) for worker in workers for step in range(1, count, 2)}
    expected |= {f"{worker}.counter": entry_of(worker, count - 2) for worker in workers}
    assert dict(record) == expected
    assert record.warnings == ()
    assert [path.name for path in tmp_path.iterdir()] == ["record.txt"]


def test_inputs_of_one_caffe_layer_come_from_many_threads(tmp_path):
    file = tmp_path / "record.txt"
    update(file, "eltwise", CaffeLayerRecord(object_layer="eltwise"))

    def add(index: int) -> None:
        factors = DataFactors(index=index, scale=index + 0.5, offset=index)
        update_inputs(file, {"eltwise": [factors]})

    threads = [threading.Thread(target=add, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entry = read_caffe_record(file)["eltwise"]
    assert [factors.index for factors in entry.record_d] == list(range(12))
    assert entry.object_layer == "eltwise"


def test_a_missing_file_and_folder_are_created(tmp_path):
    update(tmp_path / "new" / "record.txt", "c", LayerRecord(scale_d=0.5))
    assert read_record(tmp_path / "new" / "record.txt")["c"].scale_d == 0.5


NAMES = ["b", "new", "prune", "key: x", 'say "hi"', "it's", "back\\slash", "ünï", "new\nline", "#"]


@pytest.mark.parametrize("name", NAMES)
def test_an_update_is_what_reading_changing_and_writing_would_give(tmp_path, name):
    before = Record(
        {layer: LayerRecord(offset_d=index, scale_w=(0.5, 0.25)) for index, layer in enumerate(("a", "b", "c"))},
        {"b": KvCacheRecord(scale=(0.5,), offset=(1,)), "k": KvCacheRecord(scale=(0.25,), offset=(2,))},
        (CHAIN,),
    )
    file = tmp_path / "record.txt"
    write_record(before, file)
    update(file, name, LayerRecord(offset_d=9))
    update(file, name, LayerRecord(offset_d=10))
    expected = before.with_layers({name: LayerRecord(offset_d=10)})
    assert file.read_text() == format_record(expected)
    update(file, name, KvCacheRecord(scale=(2.0,), offset=(3,)))
    expected = expected.with_kv_cache({name: KvCacheRecord(scale=(2.0,), offset=(3,))})
    assert file.read_text() == format_record(expected)


A = 'record {\n  key: "a"\n  value {\n    offset_d: 1\n  }\n}\n'
B = 'record {\n  key: "b"\n  value {\n    offset_d: 2\n  }\n}\n'
OTHER_LAYOUTS = {
    "one line": 'record { key: "a" value { offset_d: 1 } } record { key: "b" value { offset_d: 2 } }',
    "brace at line start": A.replace("  }\n}", "}\n}") + B,
    "two on a line": A.replace("\n}\n", " } ") + B,
    "key last": 'record {\n  value {\n    offset_d: 1\n  }\n  key: "a"\n}\n' + B,
    "comment": "# comment\n" + A + B,
    "comment that looks like a block": A + '# record {\n#  key: "b"\n#}\n' + B,
    "single quotes": A.replace('"', "'") + B,
    "angle brackets": A + 'record: <key: "b" value { offset_d: 2 }>',
    "no newline": A + B.removesuffix("\n"),
    "escape": A.replace('"a"', '"\\x61"') + B,
    "two keys": A.replace('  key: "a"', '  key: "z"\n  key: "a"') + B,
    "carriage returns": (A + B).replace("\n", "\r\n"),
    "list": 'record [ { key: "a" value { offset_d: 1 } }, { key: "b" value { offset_d: 2 } } ]',
    "blank lines": A + "\n" + B,
    "separators": A + ";\n" + B,
}


@pytest.mark.parametrize("text", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
@pytest.mark.parametrize("layer", ["a", "b", "new"])
def test_files_in_another_layout_are_read_completely_and_lose_nothing(tmp_path, text, layer):
    file = tmp_path / "record.txt"
    file.write_bytes(text.encode())
    before = {"a": LayerRecord(offset_d=1), "b": LayerRecord(offset_d=2)}
    update(file, layer, LayerRecord(offset_d=9))
    assert file.read_text() == format_record(Record({**before, layer: LayerRecord(offset_d=9)}))


def test_a_layer_that_is_there_twice_is_there_once_afterwards(tmp_path):
    file = tmp_path / "record.txt"
    file.write_text(A + B + A)
    update(file, "a", LayerRecord(offset_d=9))
    assert file.read_text() == A.replace("1", "9") + B


@given(st.data())
def test_any_series_of_updates_gives_the_record_of_the_last_entries(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("updates") / "record.txt"
    expected: dict[str, LayerRecord] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        name = data.draw(
            st.sampled_from(["a", "b", "record {", 'key: "a"', "ä"]) | st.text("ab\n}{#'\"\\ ", min_size=1)
        )
        expected[name] = LayerRecord(offset_d=data.draw(st.integers(-9, 9)))
        update(file, name, expected[name])
        assert file.read_text() == format_record(Record(expected))


def test_a_broken_file_is_not_touched(tmp_path):
    file = tmp_path / "record.txt"
    for content in (b'record { key: "a" value { nonsense: 1 } }', b"record {\n\xff\n}\n", b"record {"):
        file.write_bytes(content)
        with pytest.raises(RecordParseError, match=r"record.txt:[12]:\d+: "):
            update(file, "b", LayerRecord(offset_d=1))
        assert file.read_bytes() == content


def test_a_broken_neighbour_does_not_stop_an_update_but_stays(tmp_path):
    # Its block is passed through unread; whoever reads the record is told.
    file = tmp_path / "record.txt"
    file.write_text('record {\n  key: "a"\n  value {\n    nonsense: 1\n  }\n}\n')
    update(file, "b", LayerRecord(offset_d=1))
    with pytest.raises(RecordParseError, match=r"record.txt:4:5: .*nonsense"):
        read_record(file)


def test_entries_that_cannot_be_written_leave_the_file(tmp_path):
    file = tmp_path / "record.txt"
    write_record(Record({"a": LayerRecord(offset_d=1)}), file)
    with pytest.raises(RecordValueError, match='layer "a"'):
        update(file, "a", LayerRecord(offset_d=2**40))
    with pytest.raises(ArgumentTypeError, match="expected a LayerRecord, KvCacheRecord or CaffeLayerRecord, got int"):
        update(file, "a", 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="expected a non-empty string"):
        update(file, "", LayerRecord())
    with pytest.raises(ArgumentTypeError, match="expected a non-empty string"):
        update_inputs(file, {"": [DataFactors(scale=1.0, offset=0)]})
    with pytest.raises(FileError, match="it is a folder"):
        update(tmp_path, "a", LayerRecord())
    assert parse_record(file.read_text()) == Record({"a": LayerRecord(offset_d=1)})
    assert [path.name for path in tmp_path.iterdir()] == ["record.txt"]


def test_caffe_entries(tmp_path):
    file = tmp_path / "record.txt"
    entries = {name: CaffeLayerRecord(scale_w=(0.5,), record_d=(DataFactors(scale=0.25),)) for name in "ab"}
    for name, entry in entries.items():
        update(file, name, entry)
    assert file.read_text() == format_record(CaffeRecord(entries))


@pytest.mark.parametrize(
    "before",
    [
        CaffeLayerRecord(scale_w=(0.1, 0.25), offset_w=(0, 0), num_bits_w=8, object_layer="conv_d"),
        CaffeLayerRecord(object_layer="conv").with_input(DataFactors(index=1, scale=0.3, offset=1, num_bits=8)),
        CaffeLayerRecord(object_layer="conv").with_input(DataFactors(index=0, scale=0.3, offset=1, num_bits=8)),
        None,
    ],
)
def test_factors_of_an_input_as_a_whole_reading_would_put_them(before, tmp_path):
    """The lines put into the text are those of the record read, changed and written."""
    file, other = tmp_path / "record.txt", CaffeLayerRecord(scale_w=(0.5,), offset_w=(0,), num_bits_w=8)
    factors = DataFactors(index=0, scale=0.7, offset=-3, num_bits=8, channels=3, height=4, width=5)
    record = CaffeRecord({"first": other, **({"conv": before} if before else {}), "last": other})
    write_record(record, file)
    update_inputs(file, {"conv": [factors]})
    wanted = record.with_layers({"conv": (before or CaffeLayerRecord()).with_input(factors)})
    assert file.read_text() == format_record(wanted)


def test_factors_of_an_input_of_the_older_dialect(tmp_path):
    file = tmp_path / "record.txt"
    file.write_text('record {\n  key: "conv"\n  value {\n    scale_d: 0.5\n    offset_d: 1\n  }\n}\n')
    update_inputs(file, {"conv": [DataFactors(index=1, scale=0.25, offset=2, num_bits=8)]})
    assert [(data.index, data.scale) for data in read_caffe_record(file)["conv"].record_d] == [(0, 0.5), (1, 0.25)]


def test_factors_of_many_inputs_at_once_are_those_of_one_after_another(tmp_path):
    weights = CaffeLayerRecord(scale_w=(0.1, 0.25), offset_w=(0, 0), num_bits_w=8, object_layer="conv")
    known = CaffeLayerRecord().with_input(DataFactors(index=1, scale=0.3, offset=1, num_bits=8))
    once, one_by_one = tmp_path / "once.txt", tmp_path / "one_by_one.txt"
    for file in (once, one_by_one):
        write_record(CaffeRecord({"conv": weights, "known": known, "other": weights}), file)
    found = {
        name: [DataFactors(index=index, scale=0.5 + index, offset=-index, num_bits=8) for index in range(inputs)]
        for name, inputs in (("conv", 1), ("known", 2), ("new", 3), ('odd "name"', 1))
    }
    update_inputs(once, found)
    for name, inputs in found.items():
        for factors in inputs:
            update_inputs(one_by_one, {name: [factors]})
    assert read_caffe_record(once) == read_caffe_record(one_by_one)
    assert [data.index for data in read_caffe_record(once)["known"].record_d] == [0, 1]
