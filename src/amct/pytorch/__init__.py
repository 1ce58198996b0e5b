"""Quantize and prune PyTorch models.

>>> import amct.pytorch as amct                                     # doctest: +SKIP
>>> quantized = amct.quantize(model, calibration_loader)            # doctest: +SKIP
>>> print(quantized.summary())                                      # doctest: +SKIP
>>> quantized.save("out/resnet")                                    # doctest: +SKIP
>>> quantized.report("out/report.html", data=test_loader, metric=top1)  # doctest: +SKIP
"""

from __future__ import annotations

from amct.config.ptq.quant_config import QuantConfig
from amct.config.settings import AdaRoundSettings, ArqSettings, HfmgSettings, IfmrSettings, LayerConfig
from amct.ptq.quantized_model import QuantizedModel
from amct.pytorch.comparing import compare
from amct.pytorch.door import IoOptions, quantize
from amct.pytorch.prune.pruned_model import PrunedModel
from amct.pytorch.prune.pruning import prune, restore_pruned, sparsify
from amct.record import Record

__all__ = [
    "AdaRoundSettings",
    "ArqSettings",
    "HfmgSettings",
    "IfmrSettings",
    "IoOptions",
    "LayerConfig",
    "PrunedModel",
    "QuantConfig",
    "QuantizedModel",
    "Record",
    "compare",
    "prune",
    "quantize",
    "restore_pruned",
    "sparsify",
]
