"""``<prefix>_quant.json``: what became of each layer in each exported file, for people and for layer-wise comparison.

::

    {
      "version": 1,
      "layers": {                                   one entry per quantized layer, in graph order
        "conv1": {
          "kind": "conv",                           conv, conv_transpose, linear, average_pool, lstm, gru
          "activation_bits": 8,
          "absorbed": ["bn1"],                      layers of the original model folded into this one
          "files": {                                by file: the node that computes the layer, and what was added for it
            "deploy_model": {"node": "conv1", "operator": "Conv", "weight_bits": 8,
                             "inserted": ["conv1.quant", "conv1.dequant"]}
          }
        }
      },
      "skipped": [{"layer": "norm", "reason": "LayerNorm is not quantizable"}],
      "config": "source: quant.cfg …",              the config used, in a few lines; absent when nobody knows it
      "files": {                                    by file: tensors and layers that it leaves float, remarks
        "qdq_model": {"tensors": ["relu_3"], "skipped": [{"name": "conv2d_9", "reason": "…"}], "notes": []}
      }
    }

``tensors``: those that QDQ placement ``fast`` quantizes for all their readers together.
``inserted`` names a node once, under the first layer that needed it; layers that share a quantizer do not repeat it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from amct.export.result import ExportedModel, LayerReport, Skip

VERSION = 1


def quant_json(
    exported: Mapping[str, ExportedModel],
    *,
    absorbed: Mapping[str, Sequence[str]] | None = None,
    skipped: Iterable[Skip] = (),
    config: str = "",
) -> str:
    """The text of the file.

    Args:
        exported: by the file's name without prefix and suffix ("deploy_model").
        absorbed: by layer: layers of the original model that were folded into it.
        skipped: layers of the model that were not quantized, and why.
        config: the config used, as text for people.
    """
    layers: dict[str, dict[str, Any]] = {}
    for file, result in exported.items():
        for report in result.layers:
            entry = layers.setdefault(report.layer, _layer(report, (absorbed or {}).get(report.layer, ())))
            entry["files"][file] = {
                "node": report.layer,
                "operator": report.operator,
                "weight_bits": report.weight_bits,
                "inserted": list(report.inserted),
            }
    document = {
        "version": VERSION,
        "layers": layers,
        "skipped": [{"layer": skip.name, "reason": skip.reason} for skip in skipped],
        **({"config": config} if config else {}),
        "files": {
            file: {
                "tensors": list(result.tensors),
                "skipped": [{"name": skip.name, "reason": skip.reason} for skip in result.skipped],
                "notes": list(result.notes),
            }
            for file, result in exported.items()
        },
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _layer(report: LayerReport, absorbed: Sequence[str]) -> dict[str, Any]:
    return {
        "kind": report.kind,
        "activation_bits": report.activation_bits,
        "absorbed": list(absorbed),
        "files": {},
    }
