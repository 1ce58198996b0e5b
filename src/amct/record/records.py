"""Records of both dialects: the factors of layers by name, in the order of the file, and the position of each field.

Every field of a layer is optional, because a flow writes a record step by step: weights first, activations when
calibration ends. ``None`` or an empty tuple means that the file does not have the field. Factors are rounded to
float32, as in a file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from amct.errors import Position, Problem, RecordError, RecordValueError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from amct.record.prune import PruneRecord


def float32(value: float) -> float:
    """Return the float32 nearest to a number, as a Python float.

    >>> float32(0.1)
    0.10000000149011612
    """
    return float32s((value,))[0]


def float32s(values: Iterable[float]) -> tuple[float, ...]:
    """Return the float32 nearest to each number; infinity and NaN are unchanged.

    Raises:
        RecordValueError: A finite number is too large for float32, or is not a number.
    """
    numbers = tuple(values)
    layout = f"<{len(numbers)}f"
    try:
        return struct.unpack(layout, struct.pack(layout, *numbers))
    except OverflowError as error:
        largest = max((number for number in numbers if math.isfinite(number)), key=abs)
        raise RecordValueError(f"a factor is too large for float32: {largest:g}") from error
    except struct.error as error:
        raise RecordValueError(f"a factor must be a number, got {numbers!r}") from error


DEFAULT_TYPE = "INT8"
DEFAULT_BITS = 8


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """One layer in the PyTorch dialect; the fields are named as in the file.

    ``dst_type`` is the older field for both types at once. It is preserved if a file has it, written for retraining
    only, and always agrees with ``act_type`` and ``wts_type``.

    Raises:
        RecordError: ``dst_type`` contradicts ``act_type`` or ``wts_type``.
        RecordValueError: A factor is too large for float32.
    """

    scale_d: float | None = None
    offset_d: int | None = None
    scale_w: tuple[float, ...] = ()
    offset_w: tuple[int, ...] = ()
    shift_bit: tuple[int, ...] = ()
    tensor_balance_factor: tuple[float, ...] = ()
    skip_fusion: bool = False
    dst_type: str | None = None
    act_type: str | None = None
    wts_type: str | None = None
    fakequant_precision_mode: str | None = None
    scale_h: float | None = None
    offset_h: int | None = None
    scale_r: tuple[float, ...] = ()
    offset_r: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _convert(self, float32, "scale_d", "scale_h")
        _convert(self, float32s, "scale_w", "tensor_balance_factor", "scale_r")
        _convert(self, tuple, "offset_w", "shift_bit", "offset_r")
        for name in ("act_type", "wts_type"):
            given = getattr(self, name)
            if self.dst_type is not None and given not in (None, self.dst_type):
                raise RecordError(
                    f"dst_type {self.dst_type} means that activations and weights are {self.dst_type}, but {name} is "
                    f"{given}; leave dst_type out"
                )

    @property
    def activation_type(self) -> str:
        """The type of the quantized activations, from ``dst_type`` or ``act_type``."""
        return self.dst_type or self.act_type or DEFAULT_TYPE

    @property
    def weight_type(self) -> str:
        """The type of the quantized weights, from ``dst_type`` or ``wts_type``."""
        return self.dst_type or self.wts_type or DEFAULT_TYPE

    def for_retraining(self) -> LayerRecord:
        """Return this entry as retraining writes it: with ``dst_type`` if activations and weights share one type."""
        equal = self.activation_type == self.weight_type
        return replace(self, dst_type=self.activation_type if equal else None)


@dataclass(frozen=True, kw_only=True)
class KvCacheRecord:
    """The factors of a layer's output in a KV cache: one pair, or one per element of the last dimension."""

    scale: tuple[float, ...] = ()
    offset: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _convert(self, float32s, "scale")
        _convert(self, tuple, "offset")


@dataclass(frozen=True, kw_only=True)
class DataFactors:
    """The factors of one input of a Caffe layer (``record_d``), with the input's shape if the file has it."""

    index: int = 0
    scale: float | None = None
    offset: int | None = None
    channels: int | None = None
    height: int | None = None
    width: int | None = None
    num_bits: int | None = None

    def __post_init__(self) -> None:
        _convert(self, float32, "scale")

    @property
    def bits(self) -> int:
        """The bits of the quantized data, 8 by default."""
        return DEFAULT_BITS if self.num_bits is None else self.num_bits


@dataclass(frozen=True, kw_only=True)
class CaffeLayerRecord:
    """One layer in the Caffe dialect; ``record_d`` has one entry per quantized input.

    Raises:
        RecordError: Two entries of ``record_d`` are for the same input.
    """

    scale_w: tuple[float, ...] = ()
    offset_w: tuple[int, ...] = ()
    shift_bit: tuple[int, ...] = ()
    skip_fusion: bool = False
    object_layer: str | None = None
    num_bits_w: int | None = None
    record_d: tuple[DataFactors, ...] = ()

    def __post_init__(self) -> None:
        _convert(self, float32s, "scale_w")
        _convert(self, tuple, "offset_w", "shift_bit", "record_d")
        indices = [factors.index for factors in self.record_d]
        if len(set(indices)) != len(indices):
            raise RecordError(f"record_d has two entries for one input; the indices are {indices}")

    @property
    def weight_bits(self) -> int:
        """The bits of the quantized weights, 8 by default."""
        return DEFAULT_BITS if self.num_bits_w is None else self.num_bits_w

    @property
    def activation_type(self) -> str:
        """The types of the quantized inputs, such as ``INT8``; several different types are separated by "/"."""
        return "/".join(dict.fromkeys(f"INT{data.bits}" for data in self.record_d)) or DEFAULT_TYPE

    @property
    def weight_type(self) -> str:
        """The type of the quantized weights; "no" for a layer without weights."""
        return f"INT{self.weight_bits}" if self.scale_w else "no"

    def input(self, index: int) -> DataFactors | None:
        """Return the factors of one input, or None."""
        return next((factors for factors in self.record_d if factors.index == index), None)

    def with_input(self, factors: DataFactors) -> CaffeLayerRecord:
        """Return this entry with the factors of one input added or replaced; inputs are sorted by index."""
        others = [known for known in self.record_d if known.index != factors.index]
        return replace(self, record_d=tuple(sorted([*others, factors], key=lambda one: one.index)))


def _convert(instance: object, convert: Callable[[Any], object], *names: str) -> None:
    for name in names:
        value = getattr(instance, name)
        if value is not None:
            object.__setattr__(instance, name, convert(value))


RecordDialect = Literal["pytorch", "caffe"]

_LayerT = TypeVar("_LayerT")


@dataclass(frozen=True)
class LayersByName(Mapping[str, _LayerT]):
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
class Record(LayersByName[LayerRecord]):
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
class CaffeRecord(LayersByName[CaffeLayerRecord]):
    """A record in the Caffe dialect: ``record["conv1"].record_d[0].scale``."""

    def with_layers(self, layers: Mapping[str, CaffeLayerRecord]) -> CaffeRecord:
        """Return this record with layers replaced in place, or added at the end."""
        return replace(self, layers={**self.layers, **layers})


AnyRecord = Record | CaffeRecord
AnyLayer = LayerRecord | KvCacheRecord | CaffeLayerRecord
