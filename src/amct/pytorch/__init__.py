"""Quantize and prune PyTorch models.

>>> import amct.pytorch as amct                                     # doctest: +SKIP
>>> quantized = amct.quantize(model, calibration_loader)            # doctest: +SKIP
>>> print(quantized.summary())                                      # doctest: +SKIP
>>> quantized.save("out/resnet")                                    # doctest: +SKIP
>>> quantized.report("out/report.html", data=test_loader, metric=top1)  # doctest: +SKIP
"""

from __future__ import annotations

from amct.config.ptq.quant_config import QuantConfig
from amct.config.qat.qat_config import QatConfig
from amct.config.settings import AdaRoundSettings, ArqSettings, HfmgSettings, IfmrSettings, LayerConfig
from amct.ptq.quantized_model import QuantizedModel
from amct.pytorch.comparing import compare
from amct.pytorch.door import IoOptions, quantize
from amct.pytorch.pruning.door import prune, restore_pruned, sparsify
from amct.pytorch.pruning.pruned_model import PrunedModel
from amct.pytorch.qat.door import prepare_qat
from amct.pytorch.qat.model import QatModel
from amct.record import Record

__all__ = [
    "AdaRoundSettings",
    "ArqSettings",
    "HfmgSettings",
    "IfmrSettings",
    "IoOptions",
    "LayerConfig",
    "PrunedModel",
    "QatConfig",
    "QatModel",
    "QuantConfig",
    "QuantizedModel",
    "Record",
    "compare",
    "prepare_qat",
    "prune",
    "quantize",
    "restore_pruned",
    "sparsify",
]
