"""Modules that stand for protoc's: AMCT's scripts import them to read and write records and configs themselves."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import text_format

from amct.record import read_record
from amct.schema import pool as pools

SEEDED = {
    "basic_info": ["AttrProto", "AutoChannelPruneConfig"],
    "calibration_config_pytorch": ["AMCTConfig", "CalibrationConfig", "FMRQuantize", "DMQBalancer"],
    "distill_config_pytorch": ["AMCTDistillConfig", "DistillGroup", "WtsULQDistill"],
    "quant_calibration_config_pytorch": ["AMCTQuantCaliConfig"],
    "retrain_config_pytorch": ["AMCTRetrainConfig", "PruneConfig", "L1SelectivePruner"],
    "scale_offset_record_pytorch": ["ScaleOffsetRecord", "SingleLayerRecord", "PruneRecord"],
}


@pytest.mark.parametrize("name", SEEDED)
def test_each_module_has_the_messages_of_its_file(name):
    module = importlib.import_module(f"amct_pytorch.proto.{name}_pb2")
    assert set(SEEDED[name]) <= set(dir(module))
    for message in SEEDED[name]:
        assert getattr(module, message).DESCRIPTOR.name == message
    assert getattr(module, "Nope", None) is None


def test_a_script_writes_a_record_that_is_read_and_reads_one_that_was_written(tmp_path):
    from amct_pytorch.proto import basic_info_pb2, scale_offset_record_pytorch_pb2

    record = scale_offset_record_pytorch_pb2.ScaleOffsetRecord()
    entry = record.record.add(key="conv1")
    entry.value.scale_d, entry.value.offset_d = 0.5, -3
    entry.value.scale_w.extend([0.25, 0.125])
    node = record.prune_record.add().producer.add(name="conv1")
    node.attr.add(name="end", type=basic_info_pb2.AttrProto.INT, i=64)
    (tmp_path / "r.txt").write_text(text_format.MessageToString(record))
    found = read_record(tmp_path / "r.txt")
    assert (found["conv1"].scale_d, found["conv1"].offset_d, found["conv1"].scale_w) == (0.5, -3, (0.25, 0.125))
    assert found.prune[0].producers[0].end == 64
    again = text_format.Parse((tmp_path / "r.txt").read_text(), scale_offset_record_pytorch_pb2.ScaleOffsetRecord())
    assert again == record


def test_enums_and_their_values_are_those_of_a_generated_module():
    from amct_caffe.caffe.proto import caffe_pb2
    from amct_pytorch.proto import retrain_config_pytorch_pb2 as retraining

    assert retraining.DataType.Name(retraining.INT16) == "INT16"
    assert retraining.DataType.Value("INT4") == retraining.INT4 == 0
    assert caffe_pb2.Phase.Name(caffe_pb2.TEST) == "TEST"
    assert caffe_pb2.DESCRIPTOR.package == "caffe"


def test_every_file_that_amct_documents_has_a_module():
    files = {name for name, family in pools.FAMILIES.items() if family == "pytorch"}
    modules = Path(__file__).parents[2] / "src" / "amct_pytorch" / "proto"
    standing_for = {re.search(r'"(\w+\.proto)"', path.read_text())[1] for path in modules.glob("*_pb2.py")}
    assert standing_for == files


def test_importing_a_module_builds_nothing():
    code = "import sys, amct_pytorch.proto.basic_info_pb2; sys.exit('google.protobuf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
