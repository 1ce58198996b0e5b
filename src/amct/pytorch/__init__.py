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
    from amct.pytorch.pruning.budget.door import prune_to
    from amct.pytorch.pruning.budget.result import BudgetedModel
    from amct.pytorch.pruning.door import prune, restore_pruned, sparsify
    from amct.pytorch.pruning.pruned_model import PrunedModel
    from amct.pytorch.qat.door import prepare_qat
    from amct.pytorch.qat.model import QatModel
    from amct.record import Record

__all__ = [
    "AdaRoundSettings",
    "ArqSettings",
    "BudgetedModel",
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
    "prune_to",
    "quantize",
    "quantize_to",
    "restore_pruned",
    "sparsify",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "amct.config.python_config": ("QatConfig", "QuantConfig"),
        "amct.config.simple_config": ("LayerConfig",),
        "amct.numerics.settings": ("AdaRoundSettings", "ArqSettings", "HfmgSettings", "IfmrSettings"),
        "amct.pipeline.quantized_model": ("QuantizedModel",),
        "amct.pytorch.decomposition.door": ("DecomposedModel", "decompose"),
        "amct.pytorch.door": ("compare", "diagnose", "quantize", "quantize_to"),
        "amct.pytorch.inputs": ("IoOptions",),
        "amct.pytorch.pruning.budget.door": ("prune_to",),
        "amct.pytorch.pruning.budget.result": ("BudgetedModel",),
        "amct.pytorch.pruning.door": ("prune", "restore_pruned", "sparsify"),
        "amct.pytorch.pruning.pruned_model": ("PrunedModel",),
        "amct.pytorch.qat.door": ("prepare_qat",),
        "amct.pytorch.qat.model": ("QatModel",),
        "amct.record": ("Record",),
    },
)
