"""What each PyTorch layer type can do, as a table.

The names are those of ``torch.nn``; a type that is not in the table is never quantized.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from amct.config.layers import Capability, LayerInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

ARQ_BITS = (4, 6, 7, 8)  # of weights, over all types; 6 and 7 need the ability ``odd_bits``
ADA_BITS = range(2, 9)
ACTIVATION_BITS = (4, 8, 16)
MIGRATION_RANGE = (0.2, 0.8)

PTQ_TYPES: Mapping[str, Capability] = MappingProxyType(
    {
        "Conv1d": Capability(fusible=True),
        "Conv2d": Capability(ada=True, odd_bits=True, fusible=True),
        "Conv3d": Capability(asymmetric=False, int16=False, fusible=True),
        "Linear": Capability(channel_wise=False, int16_needs_bias=True, ada=True),
        "ConvTranspose1d": Capability(),
        "ConvTranspose2d": Capability(ada=True),
        "AvgPool2d": Capability(channel_wise=False, int16=False, dmq=False, dmq_by_type=False, weights=False),
        "LSTM": Capability(dmq_by_type=False),
        "GRU": Capability(dmq_by_type=False),
    }
)

KV_CACHE_TYPES = ("Linear",)
QAT_TYPES: Mapping[str, Capability] = MappingProxyType(
    {name: capability for name, capability in PTQ_TYPES.items() if capability.weights}
)
FILTER_PRUNE_TYPES = ("Conv2d", "Linear")  # other types are pruned only together with the layer before them
SELECTIVE_PRUNE_TYPES = ("Conv2d", "Linear", "ConvTranspose2d")


def can_int16(layer: LayerInfo) -> bool:
    """Whether a layer can have 16-bit activations."""
    capability = PTQ_TYPES[layer.type]
    return capability.int16 and (layer.has_bias or not capability.int16_needs_bias)
