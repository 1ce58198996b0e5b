"""The messages and enum values of this package's caffe.proto, under the module name that scripts import."""

from __future__ import annotations

from amct.schema.generated import generated_names

__getattr__, __dir__ = generated_names(__name__, "caffe.proto")
