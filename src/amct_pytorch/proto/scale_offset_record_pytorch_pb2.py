"""The messages of AMCT's ``scale_offset_record_pytorch.proto``."""

from amct.schema.generated import generated_names

__getattr__, __dir__ = generated_names(__name__, "scale_offset_record.proto")
