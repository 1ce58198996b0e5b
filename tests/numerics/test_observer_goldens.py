"""Activation factors and AdaRound scales against what AMCT recorded for ResNet-20 and small nets."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from amct.errors import CalibrationError
from amct.numerics.adaround.scale import _divergences, _histogram, initial_scale
from amct.numerics.affine import round_scale_to_fp16
from amct.numerics.arq import WeightKind
from amct.numerics.hfmg import HfmgObserver
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.settings import HfmgSettings, IfmrSettings

GOLDEN = Path(__file__).parents[1] / "golden"
MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)
CONVOLUTIONS = ["conv1"] + [f"layer{s}.{b}.conv{c}" for s in (1, 2, 3) for b in (0, 1, 2) for c in (1, 2)]

# The records print 8 digits, and the activations themselves come from float32 sums in an order of their own.
RELATIVE = 1e-6


@dataclass(frozen=True)
class Recorded:
    scale_d: float | None
    offset_d: int | None
    scale_w: tuple[float, ...]
    bits_w: int
    balance: tuple[float, ...] = ()

    def weights_only(self) -> Recorded:
        return Recorded(None, None, self.scale_w, self.bits_w, self.balance)

    def balance_of(self, dimensions: int) -> torch.Tensor:
        """The balance factors of the input channels, for tensors of so many dimensions; 1 without any."""
        return torch.tensor(self.balance or (1.0,)).reshape(1, -1, *[1] * (dimensions - 2))


def read_record(case: str) -> dict[str, Recorded]:
    text = (GOLDEN / "amct" / case / "record.txt").read_text()
    found = {}
    for entry in re.split(r"(?m)^record \{", text)[1:]:
        scale, offset = re.search(r"scale_d: (\S+)", entry), re.search(r"offset_d: (\S+)", entry)
        bits = re.search(r'wts_type: "INT(\d)"', entry)
        found[re.search(r'key: "(.*?)"', entry)[1]] = Recorded(
            float(scale[1]) if scale else None,
            int(offset[1]) if offset else None,
            tuple(float(value) for value in re.findall(r"scale_w: (\S+)", entry)),
            int(bits[1]) if bits else 8,
            tuple(float(value) for value in re.findall(r"tensor_balance_factor: (\S+)", entry)),
        )
    return found


@dataclass(frozen=True)
class Layer:
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm: tuple[torch.Tensor, ...] = ()
    """Mean, variance, gamma and beta of the batch norm behind it, if that is not folded."""


@functools.cache
def resnet20(*, fused: bool = True) -> tuple[dict[str, Layer], torch.Tensor]:
    """Weights and biases, with folded batch norm or with the norm beside them, and the two calibration batches."""
    with np.load(GOLDEN / "numerics" / "resnet20.npz") as archive:
        arrays = {name: torch.from_numpy(archive[name]) for name in archive.files}
    layers = {}
    for name in CONVOLUTIONS:
        norm = name.replace("conv", "bn")
        mean, variance, gamma, beta = (
            arrays[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        weight = arrays[f"{name}.weight"]
        if fused:
            layers[name] = Layer(*fuse_conv_bn_weights(weight, None, mean, variance, 1e-5, gamma, beta))
        else:
            layers[name] = Layer(weight, None, (mean, variance, gamma, beta))
    layers["linear"] = Layer(arrays["linear.weight"], arrays["linear.bias"])
    return layers, (arrays["images"].float() / 255 - MEAN) / DEVIATION


def as_calibrated(layer: Layer, recorded: Recorded) -> Layer:
    """The weight as calibration sees it: balanced, and rounded to the steps in the record."""
    half = 2 ** (recorded.bits_w - 1)
    scale = torch.tensor(recorded.scale_w).reshape(-1, *[1] * (layer.weight.ndim - 1))
    weight = layer.weight * recorded.balance_of(layer.weight.ndim)
    return Layer((weight / scale).round().clamp(-half, half - 1) * scale, layer.bias, layer.norm)


def layer_inputs(layers: dict[str, Layer], recorded: dict[str, Recorded], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The input of every layer in one forward of ResNet-20."""
    seen = {}

    def balanced(name: str, x: torch.Tensor) -> torch.Tensor:
        seen[name] = x / recorded[name].balance_of(x.ndim) if name in recorded else x
        return seen[name]

    def convolution(name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        layer = layers[name]
        y = functional.conv2d(balanced(name, x), layer.weight, layer.bias, padding=1, stride=stride)
        return functional.batch_norm(y, *layer.norm, eps=1e-5) if layer.norm else y

    x = convolution("conv1", x).relu()
    for stage in (1, 2, 3):
        for block in (0, 1, 2):
            stride = 2 if stage > 1 and block == 0 else 1
            y = convolution(f"layer{stage}.{block}.conv1", x, stride).relu()
            y = convolution(f"layer{stage}.{block}.conv2", y)
            if stride == 2:
                extra = x.shape[1] // 2
                x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, extra, extra))
            x = (x + y).relu()
    balanced("linear", x.mean((2, 3)))
    return seen


@functools.cache
def calibration_inputs(
    factors: tuple[tuple[str, Recorded], ...], *, fused: bool = True
) -> tuple[dict[str, torch.Tensor], ...]:
    """Layer inputs of both batches, with the weights that these factors mean."""
    layers, images = resnet20(fused=fused)
    recorded = dict(factors)
    used = {name: as_calibrated(layer, recorded[name]) if name in recorded else layer for name, layer in layers.items()}
    with torch.no_grad():
        return tuple(layer_inputs(used, recorded, batch) for batch in images.split(32))


def observer_for(settings: dict[str, object], *, channel_axis: int | None = None) -> IfmrObserver | HfmgObserver:
    """The observer that the ``activation_quant_params`` of a config ask for."""
    given = {key: settings[key] for key in settings if key not in ("act_algo", "quant_granularity")}
    if settings["act_algo"] == "hfmg":
        return HfmgObserver(HfmgSettings(**given), channel_axis=channel_axis)
    return IfmrObserver(IfmrSettings(**given), channel_axis=channel_axis)


@pytest.mark.parametrize(
    "case",
    [
        "r20_default", "r20_ifmr_asym", "r20_ifmr_sym", "r20_ifmr_int16", "r20_arq_bits4", "r20_arq_bits6",
        "r20_arq_cw_false", "r20_skip_layers", "r20_force_fp16", "r20_override_types", "r20_hfmg_asym",
        "r20_hfmg_8192", "r20_hfmg_int16", "r20_hfmg_sym_all_cwfalse", "r20_arq_bits6_linear", "r20_no_fusion",
        "r20_dmq",
    ],
)  # fmt: skip
def test_resnet20_activations_get_the_recorded_factors(case):
    record = read_record(case)
    config = json.loads((GOLDEN / "amct" / case / "config.json").read_text())
    # Only what decides the weights is part of the key, so that cases with the same weights share their forwards.
    weights = tuple((name, entry.weights_only()) for name, entry in record.items())
    batches = calibration_inputs(weights, fused=config["do_fusion"])
    assert len(record) >= 18
    for name, entry in record.items():
        observer = observer_for(config[name]["activation_quant_params"])
        for batch in batches:
            observer.observe(batch[name])
        assert observer.exact, "2 x 32 images give at most 2^20 values a layer"
        factors = observer.result()
        scale = round_scale_to_fp16(factors.scale) if case == "r20_force_fp16" else factors.scale
        assert scale.item() == pytest.approx(entry.scale_d, rel=RELATIVE), name
        assert factors.offset.item() == entry.offset_d, name


@pytest.mark.parametrize("case", ["kv_default", "kv_hfmg_pt", "kv_ifmr_pc"])
def test_kv_cache_outputs_get_the_recorded_factors(case):
    text = (GOLDEN / "amct" / case / "record.txt").read_text()
    config = json.loads((GOLDEN / "amct" / case / "config.json").read_text())
    with np.load(GOLDEN / "numerics" / "observed.npz") as archive:
        arrays = {name.removeprefix(f"{case}."): torch.from_numpy(archive[name]) for name in archive.files}
    for name in "kv":
        settings = config[name]["kv_data_quant_config"]
        observer = observer_for(settings, channel_axis=-1 if settings["quant_granularity"] else None)
        for batch in range(config["batch_num"]):
            observer.observe(functional.linear(arrays[f"b{batch}"], arrays[f"{name}.weight"], arrays[f"{name}.bias"]))
        factors = observer.result()
        entry = re.search(rf'key: "{name}"(.*?)\n\}}', text, re.DOTALL)[1]
        scales = [float(value) for value in re.findall(r"scale: (\S+)", entry)]
        assert factors.scale.reshape(-1).tolist() == pytest.approx(scales, rel=RELATIVE)
        assert factors.offset.reshape(-1).tolist() == [int(value) for value in re.findall(r"offset: (\S+)", entry)]


@pytest.mark.parametrize("case", ["small_const", "small_huge", "small_tiny", "small_zeros"])
def test_odd_inputs_get_the_recorded_factors(case):
    with np.load(GOLDEN / "numerics" / "observed.npz") as archive:
        x = torch.from_numpy(archive[f"{case}.b0_0"])
    observer = IfmrObserver()
    observer.observe(x)
    recorded = read_record(case)["c1"]
    assert observer.result().scale.item() == pytest.approx(recorded.scale_d, rel=RELATIVE)
    assert observer.result().offset.item() == recorded.offset_d


@pytest.mark.parametrize("case", ["small_nan", "small_inf"])
def test_what_amct_refuses_is_refused(case):
    with np.load(GOLDEN / "numerics" / "observed.npz") as archive:
        x = torch.from_numpy(archive[f"{case}.b0_0"])
    with pytest.raises(CalibrationError, match=r"holds \d+ NaN and \d+ infinite values among 1800"):
        IfmrObserver().observe(x)


@pytest.mark.parametrize("case", ["r20_ada_20", "r20_ada_20_cwfalse"])
def test_adaround_starts_from_the_recorded_scales(case):
    layers, _ = resnet20()
    for name, entry in read_record(case).items():
        weight = layers[name].weight
        kind = WeightKind.LINEAR if name == "linear" else WeightKind.CONV
        scale = initial_scale(weight, kind=kind, channel_wise=len(entry.scale_w) > 1).scale
        rows = weight.reshape(scale.numel(), -1).numpy()
        for channel in range(scale.numel()):
            if scale[channel].item() == pytest.approx(entry.scale_w[channel], rel=RELATIVE):
                continue
            # Two of 689 channels differ: there AMCT's choice and ours are equally good but for rounding.
            bound = float(np.abs(rows[channel]).max())
            cuts = [round((bound - s * 128) / (bound / 256)) for s in (scale[channel].item(), entry.scale_w[channel])]
            divergences = _divergences(_histogram(rows[channel], bound))
            assert divergences[cuts[0]] == pytest.approx(divergences[cuts[1]], rel=1e-9), (name, channel)
