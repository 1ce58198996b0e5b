"""Quantize PyTorch models.

>>> import amct.pytorch as amct                                     # doctest: +SKIP
>>> quantized = amct.quantize(model, calibration_loader)            # doctest: +SKIP
>>> print(quantized.summary())                                      # doctest: +SKIP
>>> quantized.save("out/resnet")                                    # doctest: +SKIP
>>> quantized.report("out/report.html", data=test_loader, metric=top1)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.lazy import lazy_names

if TYPE_CHECKING:
    from amct.config.python_config import QatConfig, QuantConfig
    from amct.config.simple_config import LayerConfig
    from amct.numerics.settings import AdaRoundSettings, ArqSettings, HfmgSettings, IfmrSettings
    from amct.pipeline.quantized_model import QuantizedModel
    from amct.pytorch.decomposition.door import DecomposedModel, decompose
    from amct.pytorch.door import compare, diagnose, quantize, quantize_to
    from amct.pytorch.inputs import IoOptions
    from amct.pytorch.pruning.door import prune, restore_pruned, sparsify
    from amct.pytorch.pruning.pruned_model import PrunedModel
    from amct.pytorch.qat.door import prepare_qat
    from amct.pytorch.qat.model import QatModel
    from amct.record import Record

__all__ = [
    "AdaRoundSettings",
    "ArqSettings",
    "DecomposedModel",
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
    "decompose",
    "diagnose",
    "prepare_qat",
    "prune",
    "quantize",
    "quantize_to",
    "restore_pruned",
    "sparsify",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AdaRoundSettings": "amct.numerics.settings",
        "ArqSettings": "amct.numerics.settings",
        "HfmgSettings": "amct.numerics.settings",
        "IfmrSettings": "amct.numerics.settings",
        "IoOptions": "amct.pytorch.inputs",
        "LayerConfig": "amct.config.simple_config",
        "PrunedModel": "amct.pytorch.pruning.pruned_model",
        "QatConfig": "amct.config.python_config",
        "QatModel": "amct.pytorch.qat.model",
        "QuantConfig": "amct.config.python_config",
        "QuantizedModel": "amct.pipeline.quantized_model",
        "Record": "amct.record",
        "compare": "amct.pytorch.door",
        "DecomposedModel": "amct.pytorch.decomposition.door",
        "decompose": "amct.pytorch.decomposition.door",
        "prepare_qat": "amct.pytorch.qat.door",
        "prune": "amct.pytorch.pruning.door",
        "diagnose": "amct.pytorch.door",
        "quantize": "amct.pytorch.door",
        "quantize_to": "amct.pytorch.door",
        "restore_pruned": "amct.pytorch.pruning.door",
        "sparsify": "amct.pytorch.pruning.door",
    },
)
