"""AMCT's single modules for quantization-aware training: ``Conv2dQAT``, ``LinearQAT``, ``LSTMQAT`` and the like."""
