"""The messages of AMCT's ``basic_info.proto``."""

from amct.schema.generated import generated_names

__getattr__, __dir__ = generated_names(__name__, "basic_info.proto")
