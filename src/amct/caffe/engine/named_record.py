"""The record file that a prototxt names: a prototxt from elsewhere must not write to any path that it likes."""

from __future__ import annotations

import re

from amct.atomic import is_file, read_bytes
from amct.errors import FileError
from amct.record import read_caffe_record

#: A record of weights as it is written here. Parsing its thousands of scales takes as long as some forward passes.
_WEIGHTS = re.compile(
    rb'(?:record \{\n  key: "[^"\\\n]+"\n  value \{\n'
    rb'(?:    (?:(?:scale|offset|num_bits)_w: -?[0-9][0-9.e+-]*|object_layer: "[^"\\\n]*")\n)+'
    rb"  \}\n\}\n)+"
)


def check_named_record(path: str) -> None:
    """Check that a record file exists, as AMCT's functions leave it, before a layer writes its factors to it.

    Raises:
        FileError: There is no file.
        RecordParseError: The file is not a record.
    """
    if not is_file(path):
        raise FileError(
            f'record_file_path: the record "{path}" does not exist; a prototxt creates no files. Make the model again '
            "with the functions of amct_caffe"
        )
    if not _WEIGHTS.fullmatch(read_bytes(path)):
        read_caffe_record(path)
