"""The message types are the documents' (names, numbers, types, defaults), and live apart from everyone else's."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from amct.errors import ArgumentError
from amct.schema import descriptor, file_protos, message_class
from amct.schema._fields import table_of

# The shorthand of the behaviour description: o optional, r repeated, R required; [default].
PYTORCH = """
AMCTPytorchProto.AMCTConfig: o uint32 batch_num=1 [1]; o bool activation_offset=2 [true]; r string skip_layers=10; \
r string skip_layer_types=11; o FakequantPrecisionMode fakequant_precision_mode=21; \
o CalibrationConfig common_config=50; \
r OverrideLayerType override_layer_types=51; r OverrideLayer override_layer_configs=100; o bool do_fusion=200 [true]; \
r string skip_fusion_layers=201
AMCTPytorchProto.OverrideLayerType: R string layer_type=1; R CalibrationConfig calibration_config=2
AMCTPytorchProto.OverrideLayer: R string layer_name=1; R CalibrationConfig calibration_config=2
AMCTPytorchProto.CalibrationConfig: o ARQuantize arq_quantize=13; o ADAquantize ada_quantize=15; \
o FMRQuantize ifmr_quantize=100; o HFMGQuantize hfmg_quantize=101; o DMQBalancer dmq_balancer=200
AMCTPytorchProto.ARQuantize: o bool channel_wise=1; o uint32 quant_bits=10
AMCTPytorchProto.ADAquantize: o uint32 num_iteration=1 [10000]; o float reg_param=2 [0.01]; \
o float beta_range_start=3 [20]; o float beta_range_end=4 [2]; o float warm_start=5 [0.2]; o bool channel_wise=10
AMCTPytorchProto.DMQBalancer: o float migration_strength=1 [0.5]
AMCTPytorchProto.FMRQuantize: o float search_range_start=1 [0.7]; o float search_range_end=2 [1.3]; \
o float search_step=3 [0.01]; o float max_percentile=4 [0.999999]; o float min_percentile=5 [0.999999]; \
o bool asymmetric=6; o CalibrationDataType dst_type=10 [INT8]
AMCTPytorchProto.HFMGQuantize: o uint32 num_of_bins=1 [4096]; o bool asymmetric=2; \
o CalibrationDataType dst_type=10 [INT8]
AMCTPytorchProto.AMCTRetrainConfig: o uint32 batch_num=1 [1]; o RetrainDataQuantConfig retrain_data_quant_config=2; \
o RetrainWeightQuantConfig retrain_weight_quant_config=3; r string skip_layers=4; \
r RetrainOverrideLayer override_layer_configs=5; r string skip_layer_types=6; \
r RetrainOverrideLayerType override_layer_types=7; o PruneConfig prune_config=8; r string regular_prune_skip_layers=9; \
r string regular_prune_skip_types=10; r string quant_skip_layers=11; r string quant_skip_types=12; \
o FakequantPrecisionMode fakequant_precision_mode=21
AMCTPytorchProto.RetrainDataQuantConfig: o ActULQquantize ulq_quantize=13
AMCTPytorchProto.ActULQquantize: o ClipMaxMin clip_max_min=1; o bool fixed_min=2; o DataType dst_type=3 [INT8]
AMCTPytorchProto.ClipMaxMin: R float clip_max=3; R float clip_min=5
AMCTPytorchProto.RetrainWeightQuantConfig: o ARQRetrain arq_retrain=1; o WtsULQRetrain ulq_retrain=2
AMCTPytorchProto.ARQRetrain: o DataType dst_type=1 [INT8]; o bool channel_wise=2
AMCTPytorchProto.WtsULQRetrain: o DataType dst_type=1 [INT8]; o bool channel_wise=2
AMCTPytorchProto.RetrainOverrideLayer: R string layer_name=1; o RetrainDataQuantConfig retrain_data_quant_config=2; \
o RetrainWeightQuantConfig retrain_weight_quant_config=3; o PruneConfig prune_config=4
AMCTPytorchProto.RetrainOverrideLayerType: R string layer_type=1; \
o RetrainDataQuantConfig retrain_data_quant_config=2; \
o RetrainWeightQuantConfig retrain_weight_quant_config=3; o PruneConfig prune_config=4
AMCTPytorchProto.PruneConfig: o FilterPruner filter_pruner=1; o NOutOfMPruner n_out_of_m_pruner=2
AMCTPytorchProto.FilterPruner: o BalancedL2NormFilterPruner balanced_l2_norm_filter_prune=1
AMCTPytorchProto.BalancedL2NormFilterPruner: R float prune_ratio=1; o bool ascend_optimized=2 [true]
AMCTPytorchProto.NOutOfMPruner: o L1SelectivePruner l1_selective_prune=1
AMCTPytorchProto.L1SelectivePruner: o NOutOfMType n_out_of_m_type=1 [M4N2]; o uint32 update_freq=2 [0]
AMCTPytorchProto.SingleLayerRecord: o float scale_d=1; o int32 offset_d=2; r float scale_w=3; r int32 offset_w=4; \
r uint32 shift_bit=5; r float tensor_balance_factor=6; o bool skip_fusion=9 [false]; o string dst_type=10 [INT8]; \
o string act_type=11 [INT8]; o string wts_type=12 [INT8]; o string fakequant_precision_mode=13 [DEFAULT]; \
o float scale_h=21; o int32 offset_h=22; r float scale_r=23; r int32 offset_r=24
AMCTPytorchProto.SingleLayerKVCacheRecord: r float scale=1; r int32 offset=2
AMCTPytorchProto.MapFiledEntry: o string key=1; o SingleLayerRecord value=2; o SingleLayerKVCacheRecord kv_cache_value=3
AMCTPytorchProto.ScaleOffsetRecord: r MapFiledEntry record=1; r PruneRecord prune_record=2
AMCTPytorchProto.PruneRecord: r PruneNode producer=1; r PruneNode consumer=2; o PruneNode selective_prune=3
AMCTPytorchProto.PruneNode: R string name=1; r AttrProto attr=2
AMCTProto.AutoChannelPruneConfig: R float compress_ratio=1; o bool ascend_optimized=2 [true]; \
o float max_prune_ratio=3 [1.0]; o int64 test_iteration=4 [1]; o string override_prune_cfg=10
AMCTProto.AttrProto: o string name=1; o AttrType type=2; o float f=3; o int64 i=4; o bytes s=5; r float floats=6; \
r int64 ints=7; r bytes strings=8
AMCTPytorchDistillProto.AMCTDistillConfig: o uint32 batch_num=1 [1]; o uint32 group_size=2 [1]; \
o bool data_dump=3 [false]; r DistillGroup distill_group=10; o DistillDataQuantConfig distill_data_quant_config=11; \
o DistillWeightQuantConfig distill_weight_quant_config=12; r DistillOverrideLayer distill_override_layers=110; \
r DistillOverrideLayerType distill_override_layer_types=111; r string quant_skip_layers=120; \
r string quant_skip_layer_types=121
AMCTPytorchDistillProto.DistillGroup: R string start_layer_name=1; R string end_layer_name=2
AMCTPytorchDistillProto.DistillDataQuantConfig: o ActULQquantize ulq_quantize=1
AMCTPytorchDistillProto.ActULQquantize: o ClipMaxMin clip_max_min=1; o bool fixed_min=2; o DataType dst_type=3 [INT8]
AMCTPytorchDistillProto.ClipMaxMin: R float clip_max=1; R float clip_min=2
AMCTPytorchDistillProto.DistillWeightQuantConfig: o ARQDistill arq_distill=1; o WtsULQDistill ulq_distill=2
AMCTPytorchDistillProto.ARQDistill: o DataType dst_type=1 [INT8]; o bool channel_wise=2
AMCTPytorchDistillProto.WtsULQDistill: o DataType dst_type=1 [INT8]; o bool channel_wise=2
AMCTPytorchDistillProto.DistillOverrideLayer: R string layer_name=1; \
o DistillDataQuantConfig distill_data_quant_config=10; o DistillWeightQuantConfig distill_weight_quant_config=11
AMCTPytorchDistillProto.DistillOverrideLayerType: R string layer_type=1; \
o DistillDataQuantConfig distill_data_quant_config=10; o DistillWeightQuantConfig distill_weight_quant_config=11
AMCTPytorchQuantCaliProto.AMCTQuantCaliConfig: o uint32 batch_num=1 [1]; o bool activation_offset=2 [true]; \
o CommonCalibrationConfig kv_cache_quant_config=10; r OverrideLayer override_layers_configs=110
AMCTPytorchQuantCaliProto.CommonCalibrationConfig: r string quant_layers=1; o CalibrationConfig calibration_config=2
AMCTPytorchQuantCaliProto.OverrideLayer: R string layer_name=1; o CalibrationConfig kv_data_quant_config=2
AMCTPytorchQuantCaliProto.CalibrationConfig: o FMRQuantize ifmr_quantize=1; o HFMGQuantize hfmg_quantize=2
AMCTPytorchQuantCaliProto.FMRQuantize: o float search_range_start=1 [0.7]; o float search_range_end=2 [1.3]; \
o float search_step=3 [0.01]; o float max_percentile=4 [0.999999]; o float min_percentile=5 [0.999999]; \
o bool asymmetric=6; o QuantGranularity quant_granularity=11 [per_tensor]
AMCTPytorchQuantCaliProto.HFMGQuantize: o uint32 num_of_bins=1 [4096]; o bool asymmetric=2; \
o QuantGranularity quant_granularity=11 [per_tensor]
"""

# Numbers as in the guide's listing; "=?" where the guide names a field of a text format without a number.
CAFFE = """
AMCTCaffeProto.ActivationQuantParam: o float scale_d=1; o int32 offset_d=2; R int32 index=3; o uint32 channels=6; \
o uint32 height=7; o uint32 width=8; o int32 num_bits_d=9
AMCTCaffeProto.SingleLayerRecord: r float scale_w=1; r int32 offset_w=2; r uint32 shift_bit=3; \
o bool skip_fusion=4 [false]; o string object_layer=5; o int32 num_bits_w=6 [8]; r ActivationQuantParam record_d=7; \
o float scale_d=?; o int32 offset_d=?; o uint32 channels=?; o uint32 height=?; o uint32 width=?
AMCTCaffeProto.ScaleOffsetRecord.MapFiledEntry: o string key=1; o SingleLayerRecord value=2
AMCTCaffeProto.ScaleOffsetRecord: r MapFiledEntry record=1
AMCTCaffeProto.AMCTConfig: o uint32 batch_num=?; o bool activation_offset=?; r string skip_layers=?; \
r string skip_layer_types=?; o CalibrationConfig common_config=?; r OverrideLayerType override_layer_types=?; \
r OverrideLayer override_layer_configs=?; o bool do_fusion=? [true]; r string skip_fusion_layers=?; \
o bool update_bn=? [false]; o BnUpdateConfig bn_update_config=?
AMCTCaffeProto.BnUpdateConfig: o uint32 bn_update_iterations=?; o float bn_moving_average_fraction=?; \
o string bn_dump_dir=?
AMCTCaffeProto.CalibrationConfig: o ARQuantize arq_quantize=?; o SNQuantize snq_quantize=?; \
o FMRQuantize ifmr_quantize=?
AMCTCaffeProto.ARQuantize: o bool channel_wise=? [true]; o uint32 num_bits=?
AMCTCaffeProto.FMRQuantize: o float search_range_start=?; o float search_range_end=?; o float search_step=?; \
o float max_percentile=?; o float min_percentile=?; o uint32 num_bits=?
AMCTCaffeProto.SNQuantize: o bool channel_wise=? [true]; o uint32 max_iteration=? [1000]; \
o float min_distance=? [1e-10]; o string init_algo=? [uniform]
"""

FIRST_OWN_NUMBER = 200_000
OWN_FIELDS = dict.fromkeys(
    ("AMCTCaffeProto.AMCTConfig", "AMCTPytorchProto.AMCTConfig"), ("weight_rounding", "bias_correction")
)
"""Fields that the documents do not have: their numbers are out of the way of AMCT's."""
FIELD = re.compile(r"([orR]) (\w+) (\w+)=(\d+|\?)(?: \[(\S+)\])?")
CASES = [
    pytest.param(schema, *line.split(": "), id=line.split(": ")[0])
    for schema, table in (("pytorch", PYTORCH), ("caffe_config", CAFFE))
    for line in table.strip().splitlines()
]


@pytest.mark.parametrize(("schema", "name", "fields"), CASES)
def test_message_has_the_documents_fields(schema, name, fields):
    message = descriptor(name, schema=schema)
    expected = [FIELD.fullmatch(field).groups() for field in fields.split("; ")]
    documented = [field.name for field in message.fields if field.name not in OWN_FIELDS.get(name, ())]
    assert documented == [name for _, _, name, _, _ in expected]
    assert all(message.fields_by_name[own].number >= FIRST_OWN_NUMBER for own in OWN_FIELDS.get(name, ()))
    for label, type_name, field_name, number, default in expected:
        field = message.fields_by_name[field_name]
        info = table_of(message).fields[field_name]
        assert (info.repeated, info.required) == (label == "r", label == "R")
        named = field.message_type or field.enum_type
        assert (named.name if named else _scalar_name(field)) == type_name
        if number != "?":
            assert field.number == int(number)
        if default is not None:
            assert _default(message, field) == default


def _scalar_name(field):
    return next(
        name.removeprefix("TYPE_").lower()
        for name in dir(field)
        if name.startswith("TYPE_") and getattr(field, name) == field.type
    )


def _default(message, field):
    value = getattr(message_class(message.full_name, schema=_schema_of(message))(), field.name)
    if field.enum_type:
        return field.enum_type.values_by_number[value].name
    if isinstance(value, bool):
        return str(value).lower()
    if field.cpp_type == field.CPPTYPE_FLOAT:
        shortest = f"{value:.6g}"
        return shortest + ".0" if field.name == "max_prune_ratio" else shortest
    return str(value)


def _schema_of(message):
    return "caffe_config" if message.full_name.startswith("AMCTCaffeProto") else "pytorch"


@pytest.mark.parametrize(
    ("enum_owner", "field", "values"),
    [
        ("AMCTPytorchProto.AMCTConfig", "fakequant_precision_mode", {"FORCE_FP16_QUANT": 1}),
        ("AMCTPytorchProto.AMCTRetrainConfig", "fakequant_precision_mode", {"FORCE_FP16_QUANT": 1}),
        ("AMCTPytorchProto.FMRQuantize", "dst_type", {"INT8": 1, "INT16": 2}),
        ("AMCTPytorchProto.HFMGQuantize", "dst_type", {"INT8": 1, "INT16": 2}),
        ("AMCTPytorchProto.ARQRetrain", "dst_type", {"INT4": 0, "INT8": 1, "INT16": 2}),
        ("AMCTPytorchProto.L1SelectivePruner", "n_out_of_m_type", {"M4N2": 0}),
        ("AMCTPytorchQuantCaliProto.FMRQuantize", "quant_granularity", {"per_tensor": 0, "per_channel": 1}),
        (
            "AMCTProto.AttrProto",
            "type",
            {"UNDEFINED": 0, "FLOAT": 1, "INT": 2, "STRING": 3, "FLOATS": 4, "INTS": 5, "STRINGS": 6},
        ),
    ],
)
def test_enum_has_the_documents_values(enum_owner, field, values):
    enum = descriptor(enum_owner, schema="pytorch").fields_by_name[field].enum_type
    assert {value.name: value.number for value in enum.values} == values


@pytest.mark.parametrize(
    ("name", "oneofs"),
    [
        (
            "AMCTPytorchProto.CalibrationConfig",
            {
                "wts_quant_algo": {"arq_quantize", "ada_quantize"},
                "acts_quant_algo": {"ifmr_quantize", "hfmg_quantize"},
                "tensor_balancer": {"dmq_balancer"},
            },
        ),
        ("AMCTPytorchProto.PruneConfig", {"pruner": {"filter_pruner", "n_out_of_m_pruner"}}),
        ("AMCTPytorchProto.RetrainWeightQuantConfig", {"RetrainWeightAlgorithm": {"arq_retrain", "ulq_retrain"}}),
    ],
)
def test_oneofs_hold_the_algorithms_that_exclude_each_other(name, oneofs):
    message = descriptor(name, schema="pytorch")
    assert {oneof.name: {field.name for field in oneof.fields} for oneof in message.oneofs} == oneofs


def test_committed_descriptor_set_is_what_the_proto_files_say(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    build_schema = importlib.import_module("build_schema")
    built = {file.name: file for file in build_schema.build().file}
    committed = {file.name: file for schema in ("pytorch", "caffe_config", "caffe") for file in file_protos(schema)}
    assert set(built) == set(committed)
    for name, file in built.items():
        assert file == committed[name], f"{name} changed: run `make schema`"


def test_unknown_message_names_the_nearest():
    with pytest.raises(ArgumentError, match=r"has no message type.*Did you mean \"AMCTPytorchProto.AMCTConfig\""):
        descriptor("AMCTPytorchProto.AMCTConfg", schema="pytorch")


def test_unknown_schema_lists_the_known():
    with pytest.raises(ArgumentError, match="must be one of caffe, caffe_config, pytorch, got 'onnx'"):
        message_class("AMCTPytorchProto.AMCTConfig", schema="onnx")


def test_pools_are_private():
    """A program's own messages of the same names, loaded into protobuf's default pool, do not meet ours."""
    program = """
from google.protobuf import descriptor_pb2, descriptor_pool
from amct.schema import message_class
ours = message_class("AMCTPytorchProto.AMCTConfig", schema="pytorch")
theirs = descriptor_pb2.FileDescriptorProto(name="calibration_config.proto", package="AMCTPytorchProto")
theirs.message_type.add(name="AMCTConfig").field.add(name="other", number=1, type=9, label=1)
descriptor_pool.Default().Add(theirs)
found = descriptor_pool.Default().FindMessageTypeByName("AMCTPytorchProto.AMCTConfig")
assert [field.name for field in found.fields] == ["other"]
assert "batch_num" in ours.DESCRIPTOR.fields_by_name
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_the_package_loads_no_protobuf_and_no_torch():
    program = "import sys, amct.schema; print([m for m in ('google.protobuf', 'torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
