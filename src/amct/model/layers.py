"""Layers as all front doors describe them: the facts of a quantizable layer, and a skipped layer with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, order=True)
class Skip:
    """A layer (in exported files also a tensor) that was left as it is, and the reason in a sentence to act on."""

    layer: str
    reason: str

    def __str__(self) -> str:
        return f'"{self.layer}": {self.reason}'


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What a layer is, independent of the framework it comes from.

    ``in_channels`` counts all channels (or features) that enter the layer, not those of one group; both channel counts
    are None for pooling. ``weight_shape`` is the framework's own layout, None for a layer without weights.
    ``input_shapes`` are those of the example input; a dimension that may vary is None.
    ``attributes`` holds the rest of the layer's settings (kernel_size, stride, batch_first, ...).
    """

    name: str
    type: str  # as AMCT's configs write it: Conv2d, Linear, AvgPool2d, ...; a subclass has its base's name
    class_name: str = ""  # the layer's own class, for messages
    in_channels: int | None = None
    out_channels: int | None = None
    groups: int = 1
    bias: bool = False
    weight_shape: tuple[int, ...] | None = None
    dtype: str = "float32"
    input_shapes: tuple[tuple[int | None, ...], ...] = ()
    attributes: Mapping[str, object] = field(default_factory=dict)
    calls: int = 1  # in one forward

    @property
    def can_pack(self) -> bool:
        """Whether two 4-bit weights can share a byte along the input channels."""
        return self.groups == 1 and self.in_channels is not None and self.in_channels % 2 == 0
