"""The messages of AMCT's ``retrain_config_pytorch.proto``."""

from amct.schema.generated import generated_names

__getattr__, __dir__ = generated_names(__name__, "retrain_config.proto")
