"""Merges a user's ``custom.proto`` with Caffe's messages, as a file and at run time.

``reader.py`` parses the .proto language (protoc is not needed), ``merge.py`` merges and checks, ``writer.py`` writes a
.proto file.
"""

from __future__ import annotations

from amct.caffe.proto_merge.merge import CustomSchema, MergeResult, custom_schema, load_custom_schema, merge_files

__all__ = ["CustomSchema", "MergeResult", "custom_schema", "load_custom_schema", "merge_files"]
