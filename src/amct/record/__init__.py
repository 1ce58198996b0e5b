"""Record files: the quantization factors and pruning chains of a model, in AMCT's PyTorch and Caffe dialects.

>>> record = parse_record('record { key: "conv1" value { scale_d: 0.5 offset_d: -3 } }')
>>> record["conv1"].scale_d
0.5
>>> print(format_record(record), end="")
record {
  key: "conv1"
  value {
    scale_d: 0.5
    offset_d: -3
  }
}
"""

from __future__ import annotations

from amct.record.files import (
    encode_record,
    format_record,
    parse_caffe_record,
    parse_record,
    read_any_record,
    read_caffe_record,
    read_record,
    write_record,
)
from amct.record.prune import PruneNode, PruneRecord
from amct.record.records import (
    AnyRecord,
    CaffeLayerRecord,
    CaffeRecord,
    DataFactors,
    KvCacheRecord,
    LayerRecord,
    Record,
    RecordDialect,
)
from amct.record.show import (
    Difference,
    convert_record_file,
    describe_difference,
    describe_record,
    diff_records,
    plain_difference,
    plain_record,
)
from amct.record.update import update, update_inputs
from amct.record.validate import Progress, RecordLayer, normalize_record, validate_record

__all__ = [
    "AnyRecord",
    "CaffeLayerRecord",
    "CaffeRecord",
    "DataFactors",
    "Difference",
    "KvCacheRecord",
    "LayerRecord",
    "Progress",
    "PruneNode",
    "PruneRecord",
    "Record",
    "RecordDialect",
    "RecordLayer",
    "convert_record_file",
    "describe_difference",
    "describe_record",
    "diff_records",
    "encode_record",
    "format_record",
    "normalize_record",
    "parse_caffe_record",
    "parse_record",
    "plain_difference",
    "plain_record",
    "read_any_record",
    "read_caffe_record",
    "read_record",
    "update",
    "update_inputs",
    "validate_record",
    "write_record",
]
