"""What each PyTorch layer type can do, as a table.

The names are those of ``torch.nn``; a type that is not in the table is never quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ARQ_BITS = frozenset({4, 6, 7, 8})  # of weights, over all types; 6 and 7 need a type that says so
ADA_BITS = frozenset(range(2, 9))
ACTIVATION_BITS = frozenset({4, 8, 16})


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a layer type can do.

    Attributes:
        channel_wise: Weights can have a scale per output channel (and do so by default).
        asymmetric: Activations can have an offset.
        int16: Activations can have 16 bits.
        int16_needs_bias: ... but only in layers with a bias.
        ada: AdaRound can tune the weights.
        odd_bits: Weights can have 6 or 7 bits.
        dmq: DMQ can balance the layer.
        dmq_by_type: ... also when asked for by an override of the type.
        fusible: A BatchNorm that follows can be folded in.
        weights: The layer has weights (average pooling has a formal block for them in the JSON, but none).
    """

    channel_wise: bool = True
    asymmetric: bool = True
    int16: bool = True
    int16_needs_bias: bool = False
    ada: bool = False
    odd_bits: bool = False
    dmq: bool = True
    dmq_by_type: bool = True
    fusible: bool = False
    weights: bool = True


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

FUSIBLE_TYPES = tuple(name for name, capability in PTQ_TYPES.items() if capability.fusible)
KV_CACHE_TYPES = ("Linear",)
QAT_TYPES: Mapping[str, Capability] = MappingProxyType(
    {name: capability for name, capability in PTQ_TYPES.items() if capability.weights}
)
FILTER_PRUNE_TYPES = ("Conv2d", "Linear")  # pruned by themselves; others only follow the layer before them
SELECTIVE_PRUNE_TYPES = ("Conv2d", "Linear", "ConvTranspose2d")
