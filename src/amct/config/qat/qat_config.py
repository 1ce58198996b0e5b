"""The config of quantization-aware training as a Python object, and the plan from a config of any form."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from amct.atomic import read_bytes
from amct.config.qat.pytorch import PYTORCH_QAT
from amct.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from amct.config.layers import LayerList
    from amct.config.qat.plan import RetrainPlan

SOURCE = "config"
WeightTraining = Literal["learned", "measured"]
_ALGORITHMS = {"learned": "ulq_retrain", "measured": "arq_retrain"}


@dataclass(frozen=True, kw_only=True)
class QatConfig:
    """What to train quantized, and with how many bits.

    Attributes:
        weight_bits: 4 or 8.
        activation_bits: 4, 8 or 16.
        layers: By layer name: other bits of weights and activations.
        types: By layer type, such as "Linear": other bits.
        skip_layers: Layers that stay float.
        skip_layer_types: Types that stay float.
        weight_scales: "learned" (``ulq_retrain``), or "measured" in every step (``arq_retrain``).
    """

    weight_bits: int = 8
    activation_bits: int = 8
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    types: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    skip_layers: tuple[str, ...] = ()
    skip_layer_types: tuple[str, ...] = ()
    weight_scales: WeightTraining = "learned"

    def text(self) -> str:
        """The same as a simple config.

        Raises:
            ArgumentError: A field has an illegal value.
        """
        if self.weight_scales not in _ALGORITHMS:
            raise ArgumentError(f'weight_scales: expected "learned" or "measured", got {self.weight_scales!r}')
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for name, values in (("skip_layers", self.skip_layers), ("skip_layer_types", self.skip_layer_types)):
            yield from (f"{name}: {json.dumps(value)}" for value in values)
        yield self._blocks(self.weight_bits, self.activation_bits)
        for message, key, entries in (
            ("override_layer_types", "layer_type", self.types),
            ("override_layer_configs", "layer_name", self.layers),
        ):
            for name, (weight, activation) in entries.items():
                yield f"{message} {{ {key}: {json.dumps(name)} {self._blocks(weight, activation)} }}"

    def _blocks(self, weight: int, activation: int) -> str:
        data = f"ulq_quantize {{ dst_type: {_type('activation_bits', activation, (4, 8, 16))} }}"
        weights = f"{_ALGORITHMS[self.weight_scales]} {{ dst_type: {_type('weight_bits', weight, (4, 8))} }}"
        return f"retrain_data_quant_config {{ {data} }} retrain_weight_quant_config {{ {weights} }}"


def _type(name: str, bits: int, legal: tuple[int, ...]) -> str:
    if bits not in legal:
        raise ArgumentError(f"{name}: expected {', '.join(map(str, legal[:-1]))} or {legal[-1]}, got {bits}")
    return f"INT{bits}"


AnyQatConfig = QatConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def retrain_plan_of(config: AnyQatConfig, layers: LayerList) -> RetrainPlan:
    """The plan of a model from a config of any form.

    Args:
        config: A simple config or a JSON file, the content of a JSON config as a dict, a ``QatConfig``, or None.
        layers: The model's layers.

    Raises:
        ArgumentTypeError: The config is of another type.
        ParseError, ConfigError: The config has mistakes; all of them are listed.
        FileError: The file cannot be read.
    """
    dialect = PYTORCH_QAT
    if config is None:
        config = QatConfig()
    if isinstance(config, QatConfig):
        full = dialect.expand_config(config.text(), SOURCE, layers)
    elif isinstance(config, Mapping):
        full = dialect.read_config(json.dumps(config), SOURCE, layers)
    elif isinstance(config, (str, os.PathLike)):
        content, source = read_bytes(config), os.fspath(config)
        reader = dialect.read_config if content.lstrip()[:1] == b"{" else dialect.expand_config
        full = reader(content, source, layers)
    else:
        raise ArgumentTypeError(
            f"config: expected the path of a .cfg or .json, a dict, a QatConfig or None, got {type(config).__name__}"
        )
    return dialect.make_plan(full, layers)
