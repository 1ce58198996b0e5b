"""Two layers in the place of one: how the pair is made, put into a model, and described in AMCT's JSON file."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import torch
from torch import nn

from amct.errors import ConfigError, ParseError
from amct.numerics.low_rank import Separation
from amct.printable import escaped
from amct.pytorch.call_sites import has_own_forward
from amct.pytorch.user_model import is_parametrized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from amct.numerics.low_rank import Factors

SEPARATIONS = {
    "FCFK": Separation(output_rows=True, height_rows=True),
    "FCSK": Separation(output_rows=True, height_rows=False),
    "SCFK": Separation(output_rows=False, height_rows=True),
    "SCSK": Separation(output_rows=False, height_rows=False),
}
"""AMCT's modes: which channels (first: the outputs) and which side of the kernel (first: the height) are smaller."""
RESPONSES = "RESPONSES"
"""Our own mode: the layer with fewer outputs, and a layer of size 1 that makes the outputs of them."""
Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Pairable = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear


def separation_mode(layer: nn.Conv2d) -> str:
    """AMCT's mode for a convolution: the rows of the matrix are the smaller side."""
    outputs = layer.out_channels < layer.in_channels
    height = layer.kernel_size[0] <= layer.kernel_size[1]
    return f"{'F' if outputs else 'S'}C{'F' if height else 'S'}K"


def why_not_replaceable(layer: nn.Module) -> str | None:
    """Why a pair cannot take the place of a convolution or linear layer; None if it can."""
    if has_own_forward(layer) or "forward" in vars(layer):
        return f"{type(layer).__name__} has its own forward"
    if is_parametrized(layer) or layer._parameters.get("weight") is None:
        return "its weight is computed from other parameters"
    if isinstance(layer.weight, nn.parameter.UninitializedParameter):
        return "its weight has no values yet; run the model once"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has hooks"
    if not layer.weight.is_floating_point():  # type: ignore[operator]
        return f"its weight is {str(layer.weight.dtype).removeprefix('torch.')}"
    return None


class PairBuilder:
    """Makes the pairs of one model; layers that share a weight or bias get pairs that share theirs."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, int], nn.Parameter] = {}

    def pair(
        self, layer: Pairable, mode: str, rank: int, factors: Callable[[], Factors] | None = None
    ) -> nn.Sequential:
        """The pair for a layer.

        Args:
            layer: A convolution or a linear layer.
            mode: One of AMCT's, or RESPONSES.
            rank: The outputs of the first layer of the pair.
            factors: The weights; not called for a shared weight that is known. None: torch's initial values.
        """
        pair = _by_responses(layer, rank) if mode == RESPONSES else _separated(layer, SEPARATIONS[mode], rank)
        shared = [self._weights.get((id(layer.weight), place)) for place in (0, 1)]
        found = None if factors is None or None not in shared else factors()
        for place, (own, known) in enumerate(zip(pair, shared, strict=True)):
            if known is not None:
                own.weight = known
            elif found is not None:
                own.weight = _parameter((found.first, found.last)[place], layer.weight)
            weight = own.weight
            assert isinstance(weight, nn.Parameter)
            weight.requires_grad = layer.weight.requires_grad
            self._weights[id(layer.weight), place] = weight
        if layer.bias is not None:
            pair[1].bias = layer.bias
        return pair.train(layer.training)


def _parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    found = values.to(like.dtype).to(like.device)
    channels_last = (
        like.ndim == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last)
    )
    return nn.Parameter(
        found.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    )


def _separated(layer: Pairable, separation: Separation, rank: int) -> nn.Sequential:
    """A convolution along one axis, and one along the other; the rows of the matrix are in one of them."""
    assert isinstance(layer, nn.Conv2d)
    rows = 0 if separation.height_rows else 1
    axes = (1 - rows, rows) if separation.output_rows else (rows, 1 - rows)
    parts = []
    for axis, inputs, outputs, bias in (
        (axes[0], layer.in_channels, rank, False),
        (axes[1], rank, layer.out_channels, layer.bias is not None),
    ):
        padding = layer.padding
        parts.append(
            nn.Conv2d(
                inputs,
                outputs,
                _along(axis, layer.kernel_size, 1),
                stride=_along(axis, layer.stride, 1),
                padding=padding if isinstance(padding, str) else _along(axis, padding, 0),
                bias=bias,
                padding_mode=layer.padding_mode,
                device=layer.weight.device,
                dtype=layer.weight.dtype,
            )
        )
    return nn.Sequential(*parts)


def _along(axis: int, both: Sequence[int], other: int) -> tuple[int, int]:
    """A setting of a convolution along one axis, with a neutral value on the other."""
    return (both[0], other) if axis == 0 else (other, both[1])


def _by_responses(layer: Pairable, rank: int) -> nn.Sequential:
    """The layer with fewer outputs, and one of size 1; its bias makes up for the mean of what is lost."""
    kind: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    if isinstance(layer, nn.Linear):
        return nn.Sequential(
            nn.Linear(layer.in_features, rank, bias=False, **kind),
            nn.Linear(rank, layer.out_features, **kind),
        )
    make = next(each for each in Convolution if isinstance(layer, each))
    return nn.Sequential(
        make(
            layer.in_channels,
            rank,
            layer.kernel_size,  # type: ignore[arg-type]
            stride=layer.stride,  # type: ignore[arg-type]
            padding=layer.padding,  # type: ignore[arg-type]
            dilation=layer.dilation,  # type: ignore[arg-type]
            padding_mode=layer.padding_mode,
            bias=False,
            **kind,
        ),
        make(rank, layer.out_channels, 1, **kind),
    )


def put_pairs(model: nn.Module, pairs: Mapping[str, nn.Module]) -> nn.Module:
    """Put pairs in the places of layers, in place, under every name that a layer has.

    Returns:
        The model; if it was itself such a layer, its pair.
    """
    if "" in pairs:
        return pairs[""]
    names = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    replaced = {model.get_submodule(name): pair for name, pair in pairs.items()}
    for layer, pair in replaced.items():
        for name in names[layer]:
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent)._modules[own] = pair
    return model


def changes_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of layers before and after, as AMCT's functions return them."""
    return {name: [f"{name}.{place}" if name else str(place) for place in (0, 1)] for name in names}


class _Shape(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True)
    weight_shape: list[int]


class _Nodes(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore")
    first: _Shape
    last: _Shape


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore")
    ori_layer_info: dict[str, Any]
    mode: Literal["FCFK", "FCSK", "SCFK", "SCSK", "RESPONSES"]
    decom_nodes: _Nodes


_FILE = pydantic.TypeAdapter(list[_Entry])


@dataclass(frozen=True)
class PairInfo:
    """What a file says of one layer: its name, the mode and the rank of its pair."""

    name: str
    mode: str
    rank: int


def info_text(layers: Mapping[str, tuple[Pairable, str, int]]) -> str:
    """AMCT's file for layers: by name each layer, its mode and its rank."""
    entries = []
    for name, (layer, mode, rank) in layers.items():
        shapes = zip(("first", "last"), _shapes(layer.weight, mode, rank), strict=True)
        entries.append(
            {
                "ori_layer_info": {"name": name, **_settings(layer)},
                "mode": mode,
                "decom_nodes": {place: {"weight_shape": shape} for place, shape in shapes},
            }
        )
    return json.dumps(entries, indent="\t")


def _settings(layer: nn.Module) -> dict[str, Any]:
    """What identifies a layer in the file."""
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features}
    names = ("in_channels", "out_channels", "kernel_size", "stride", "dilation", "groups")
    values = {name: getattr(layer, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_info(content: bytes, source: str, modules: Mapping[str, nn.Module]) -> list[PairInfo]:
    """Read a file and check it against the layers of a model.

    Raises:
        ParseError: It is not such a file.
        ConfigError: It belongs to another model.
    """
    try:
        entries = _FILE.validate_json(content)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ParseError(
            f"{source}: expected the file that auto_decomposition wrote; {place + ': ' if place else ''}"
            f"{escaped(first['msg'])}"
        ) from error
    return [_checked(entry, source, modules) for entry in entries]


def _checked(entry: _Entry, source: str, modules: Mapping[str, nn.Module]) -> PairInfo:
    name = str(entry.ori_layer_info.get("name"))
    layer, shown = modules.get(name), f'{source}: layer "{escaped(name)}"'
    if layer is None:
        raise ConfigError(f"{shown}: the model has no layer of this name")
    expected = Pairable if entry.mode == RESPONSES else nn.Conv2d
    if not isinstance(layer, expected) or (reason := why_not_replaceable(layer)):
        kind = type(layer).__name__ if not isinstance(layer, expected) else reason
        raise ConfigError(f"{shown}: expected a layer that a pair can replace in mode {entry.mode}, got: {kind}")
    for setting, value in _settings(layer).items():
        if entry.ori_layer_info.get(setting) != value:
            given = entry.ori_layer_info.get(setting)
            raise ConfigError(f"{shown}: {setting} is {given!r} in the file and {value!r} in the model")
    shapes = [entry.decom_nodes.first.weight_shape, entry.decom_nodes.last.weight_shape]
    rank = shapes[0][0] if shapes[0] else 0
    if not 0 < rank <= max(layer.weight.numel(), 1):
        raise ConfigError(f"{shown}: a pair with {rank} outputs in between is not possible")
    wanted = _shapes(layer.weight, entry.mode, rank)
    if shapes != wanted:
        raise ConfigError(f"{shown}: expected the shapes {wanted} of weights, got {shapes}")
    return PairInfo(name, entry.mode, rank)


def _shapes(weight: Tensor, mode: str, rank: int) -> list[list[int]]:
    """The shapes of the weights of a pair."""
    outputs, inputs, *kernel = weight.shape
    first, last = kernel, [1] * len(kernel)
    if mode != RESPONSES:
        separation = SEPARATIONS[mode]
        sides = [[kernel[0], 1], [1, kernel[1]]]
        first, last = sides if separation.output_rows != separation.height_rows else sides[::-1]
    return [[rank, inputs, *first], [outputs, rank, *last]]
