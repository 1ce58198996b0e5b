"""The messages of AMCT's ``quant_calibration_config_pytorch.proto``."""

from amct.schema.generated import generated_names

__getattr__, __dir__ = generated_names(__name__, "quant_calibration_config.proto")
