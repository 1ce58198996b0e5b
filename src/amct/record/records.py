"""Records of both dialects: layers by name in the order of the file, and the position of each field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from amct.errors import Position, Problem, did_you_mean
from amct.record.layers import CaffeLayerRecord, KvCacheRecord, LayerRecord

if TYPE_CHECKING:
    from amct.record.prune import PruneRecord

Dialect = Literal["pytorch", "caffe"]

_LayerT = TypeVar("_LayerT")


@dataclass(frozen=True)
class Layers(Mapping[str, _LayerT]):
    """Layers by name, in the order of the file. Comparison ignores ``source``, ``warnings`` and ``positions``."""

    layers: Mapping[str, _LayerT] = field(default_factory=dict)
    source: str = field(default="", kw_only=True, compare=False)
    warnings: Sequence[Problem] = field(default=(), kw_only=True, compare=False)
    """Warnings of the reader, such as a repeated layer."""
    positions: Mapping[tuple[str, str], Position] = field(default_factory=dict, kw_only=True, compare=False, repr=False)
    """Position of each field in the file, by (layer, field); the field "" is the layer itself."""

    def __getitem__(self, name: str) -> _LayerT:
        try:
            return self.layers[name]
        except KeyError:
            raise KeyError(f'the record has no layer "{name}".{did_you_mean(str(name), self.layers)}') from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def is_empty(self) -> bool:
        """Whether the record has no entries, like a file that a flow has just created."""
        return not self.layers

    def where(self, layer: str, name: str = "") -> Position | None:
        """Return the position of a field, or of its layer if the field is missing; None if unknown."""
        return self.positions.get((layer, name)) or self.positions.get((layer, ""))


@dataclass(frozen=True)
class Record(Layers[LayerRecord]):
    """A record in the PyTorch dialect: ``record["conv1"].scale_d``, ``record.kv_cache["attn.k"].scale``.

    Iteration yields the names of the layers with factors; ``names`` also has those of the KV cache.
    """

    kv_cache: Mapping[str, KvCacheRecord] = field(default_factory=dict)
    prune: Sequence[PruneRecord] = ()
    order: Sequence[str] = field(default=(), kw_only=True, compare=False, repr=False)
    """The order of the file, where layers and KV cache entries are mixed."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries, in the order of the file."""
        known = {**self.layers, **self.kv_cache}
        return tuple(dict.fromkeys([*(name for name in self.order if name in known), *known]))

    @property
    def is_empty(self) -> bool:
        """Whether the record has no entries, like a file that a flow has just created."""
        return not (self.layers or self.kv_cache or self.prune)

    def with_layers(self, layers: Mapping[str, LayerRecord]) -> Record:
        """Return this record with layers replaced in place, or added at the end."""
        return replace(self, layers={**self.layers, **layers}, order=self.names)

    def with_kv_cache(self, entries: Mapping[str, KvCacheRecord]) -> Record:
        """Return this record with KV cache entries replaced in place, or added at the end."""
        return replace(self, kv_cache={**self.kv_cache, **entries}, order=self.names)


@dataclass(frozen=True)
class CaffeRecord(Layers[CaffeLayerRecord]):
    """A record in the Caffe dialect: ``record["conv1"].record_d[0].scale``."""

    def with_layers(self, layers: Mapping[str, CaffeLayerRecord]) -> CaffeRecord:
        """Return this record with layers replaced in place, or added at the end."""
        return replace(self, layers={**self.layers, **layers})


AnyRecord = Record | CaffeRecord
AnyLayer = LayerRecord | KvCacheRecord | CaffeLayerRecord
