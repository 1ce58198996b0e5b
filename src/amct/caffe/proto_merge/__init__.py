"""A user's ``custom.proto`` joined with Caffe's messages, as a file and at run time.

``reader.py`` reads the .proto language (no protoc needed), ``merge.py`` joins and checks, ``writer.py`` writes a
.proto file.
"""

from __future__ import annotations

from amct.caffe.proto_merge.merge import CustomSchema, MergeResult, load_custom_schema, merge_files

__all__ = ["CustomSchema", "MergeResult", "load_custom_schema", "merge_files"]
