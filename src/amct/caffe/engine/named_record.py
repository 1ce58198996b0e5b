"""The record file that a prototxt names: a prototxt from elsewhere must not write to any path that it likes."""

from __future__ import annotations

from amct.atomic import is_file
from amct.errors import FileError
from amct.record import read_caffe_record


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
    read_caffe_record(path)
