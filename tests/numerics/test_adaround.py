"""AdaRound as a whole: both modes on every kind of layer, what they promise, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from amct.errors import ArgumentError, CalibrationError
from amct.numerics.adaround.learning import AdaRoundLayer, CachedData, adaround
from amct.numerics.adaround.rounding import Learning
from amct.numerics.adaround.scale import initial_scale, least_error_scale
from amct.numerics.arq import WeightKind, channels_first
from amct.numerics.integer import ConvolutionGeometry
from amct.numerics.qparams import QParams

LAYERS = [
    pytest.param(None, (12, 20), (256, 20), id="linear"),
    pytest.param(ConvolutionGeometry(padding=1), (8, 6, 3, 3), (40, 6, 8, 8), id="conv"),
    pytest.param(ConvolutionGeometry(padding=1, stride=2, groups=3), (9, 2, 3, 3), (40, 6, 8, 8), id="conv-groups"),
    pytest.param(ConvolutionGeometry(padding=1, groups=6), (6, 1, 3, 3), (40, 6, 8, 8), id="depthwise"),
    pytest.param(
        ConvolutionGeometry(transposed=True, stride=2, padding=1, groups=2), (6, 4, 3, 3), (40, 6, 5, 5), id="deconv"
    ),
]


def correlated(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Inputs whose channels depend on each other: only then does rounding together pay."""
    generator = torch.Generator().manual_seed(seed)
    channel_axis = -1 if len(shape) == 2 else 1
    channels = shape[channel_axis]
    mix = torch.randn(channels, channels, generator=generator) + 1
    x = torch.randn(shape, generator=generator).movedim(channel_axis, -1) @ mix
    return (x / channels**0.5).relu().movedim(-1, channel_axis)


def problem(geometry, weight_shape, input_shape, activation=None) -> tuple[AdaRoundLayer, CachedData]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(weight_shape, generator=generator) * 0.1
    outputs = weight_shape[1] * geometry.groups if geometry and geometry.transposed else weight_shape[0]
    bias = torch.randn(outputs, generator=generator)
    layer = AdaRoundLayer(weight=weight, bias=bias, geometry=geometry, activation=activation)
    x = correlated(input_shape)
    return layer, CachedData(x, layer.forward(x, weight))


def quick(**settings: object) -> Learning:
    return Learning(**{"num_bits": 4, "num_iteration": 150, "learning_rate": 1e-2, **settings})


def run(layer: AdaRoundLayer, data: CachedData, settings: Learning, **options: object):
    return adaround(layer, data, settings, generator=torch.Generator().manual_seed(1), **options)


def loss_by_hand(layer: AdaRoundLayer, data: CachedData, weight: torch.Tensor) -> float:
    difference = layer.forward(data.inputs, weight).double() - data.outputs.double()
    if layer.activation is not None:
        outputs = [layer.activation(y.double()) for y in (layer.forward(data.inputs, weight), data.outputs)]
        difference = outputs[0] - outputs[1]
    axis = -1 if layer.geometry is None else 1
    return float(torch.linalg.vector_norm(difference, dim=axis).square().mean())


@pytest.mark.parametrize("fast", [False, True], ids=["forwards", "gram"])
@pytest.mark.parametrize(("geometry", "weight_shape", "input_shape"), LAYERS)
def test_the_result_is_on_the_grid_and_better_than_nearest(geometry, weight_shape, input_shape, fast):
    layer, data = problem(geometry, weight_shape, input_shape)
    result = run(layer, data, quick(fast=fast))
    assert result.notes == ()
    rows, integers = (channels_first(t, layer.kind, layer.groups) for t in (layer.weight, result.integers))
    scale = result.qparams.scale[:, None]
    steps = rows * scale.reciprocal()
    assert result.integers.dtype == torch.int8
    assert integers.min() >= -8
    assert integers.max() <= 7
    assert ((integers - steps.clamp(-8, 7)).abs() <= 1).all()
    assert torch.equal(channels_first(result.weight, layer.kind, layer.groups), integers * scale)
    nearest = (steps.round().clamp(-8, 7) * scale).double()
    assert result.initial_loss == pytest.approx(loss_by_hand(layer, data, layer.restore(nearest.float())), rel=1e-4)
    assert result.final_loss == pytest.approx(loss_by_hand(layer, data, result.weight), rel=1e-4)
    assert result.final_loss < 0.95 * result.initial_loss


@pytest.mark.parametrize(("geometry", "weight_shape", "input_shape"), LAYERS[:2])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_any_number_of_bits_and_one_scale_for_all(geometry, weight_shape, input_shape, bits):
    layer, data = problem(geometry, weight_shape, input_shape)
    for fast in (False, True):
        result = run(layer, data, quick(num_bits=bits, fast=fast, channel_wise=False))
        assert result.qparams.scale.shape == (1,)
        assert int(result.integers.min()) >= -(2 ** (bits - 1))
        assert int(result.integers.max()) < 2 ** (bits - 1)
        assert result.final_loss <= result.initial_loss


def test_the_fast_mode_ends_no_worse_than_forwards():
    layer, data = problem(ConvolutionGeometry(padding=1), (16, 16, 3, 3), (64, 16, 8, 8))
    slow, fast = (run(layer, data, quick(num_iteration=300, learning_rate=1e-3, fast=fast)) for fast in (False, True))
    assert fast.final_loss <= slow.final_loss < slow.initial_loss == pytest.approx(fast.initial_loss, rel=1e-6)


def test_the_activation_is_learned_through():
    # Half of the outputs are cut off by the activation, so their errors are free; only a loss behind it can know.
    layer, data = problem(None, (12, 20), (256, 20), activation=lambda y: (y - 1.5).relu())
    plain = AdaRoundLayer(weight=layer.weight, bias=layer.bias)
    fused, unaware = run(layer, data, quick(num_iteration=600)), run(plain, data, quick(num_iteration=600))
    assert fused.final_loss == pytest.approx(loss_by_hand(layer, data, fused.weight), rel=1e-4)
    assert fused.final_loss < loss_by_hand(layer, data, unaware.weight)


def test_the_fast_mode_says_that_it_drops_the_activation():
    layer, data = problem(None, (12, 20), (256, 20), activation=functional.relu)
    result = run(layer, data, quick(fast=True))
    assert result.notes == ("the fast mode learned without the activation that follows the layer",)
    assert result.final_loss == pytest.approx(loss_by_hand(layer, data, result.weight), rel=1e-4)


def test_the_fast_mode_steps_back_where_forwards_are_cheaper():
    layer, data = problem(None, (4, 100), (8, 100))
    result = run(layer, data, quick(fast=True))
    assert len(result.notes) == 1
    assert "fast mode was not used: with 100 inputs per output value, forwards of 32" in result.notes[0]


def test_the_fast_mode_steps_back_from_a_huge_matrix(monkeypatch):
    monkeypatch.setattr("amct.numerics.adaround.learning._LARGEST_GRAM", 100)
    layer, data = problem(None, (12, 20), (256, 20))
    result = run(layer, data, quick(fast=True))
    assert result.notes == ("the fast mode was not used: its Gram matrix would have 400 entries (at most 100)",)


def test_a_worse_rounding_is_not_returned():
    layer, data = problem(None, (12, 20), (256, 20))
    noise = CachedData(data.inputs * 0, data.outputs)  # nothing can be learned, and every rounding is equally good
    result = run(layer, noise, quick(num_iteration=3))
    assert result.final_loss <= result.initial_loss
    # So large a step throws the rounding to random ends.
    wild = run(layer, data, quick(num_iteration=2, learning_rate=100.0))
    assert wild.notes == ("the learned rounding was worse on the data than rounding to nearest, which was kept",)
    assert wild.final_loss == wild.initial_loss


def test_no_iterations_round_to_nearest():
    layer, data = problem(None, (12, 20), (256, 20))
    result = run(layer, data, quick(num_iteration=0))
    steps = (layer.weight / result.qparams.scale[:, None]).clamp(-8, 7)
    assert ((result.integers - steps).abs() <= 0.5 + 1e-5).all()


@pytest.mark.parametrize("fast", [False, True])
def test_the_same_seed_gives_the_same_result(fast):
    layer, data = problem(ConvolutionGeometry(padding=1), (8, 6, 3, 3), (40, 6, 8, 8))
    first, second = run(layer, data, quick(fast=fast)), run(layer, data, quick(fast=fast))
    assert torch.equal(first.integers, second.integers)
    assert first.final_loss == second.final_loss


@pytest.mark.parametrize("fast", [False, True])
def test_progress_is_told(fast):
    layer, data = problem(None, (12, 20), (256, 20))
    calls: list[tuple[int, int, float]] = []
    run(layer, data, quick(fast=fast), progress=lambda *call: calls.append(call))
    assert [done for done, _, _ in calls] == list(range(1, 151))
    assert {total for _, total, _ in calls} == {150}
    assert all(np.isfinite(loss) for _, _, loss in calls)


def test_data_may_come_from_anywhere_in_half_precision():
    layer, data = problem(None, (12, 20), (256, 20))

    class FromDisk:
        def __len__(self):
            return 256

        def batch(self, indices):
            return data.inputs[indices].half(), data.outputs[indices].half()

    half = AdaRoundLayer(weight=layer.weight.half(), bias=layer.bias.half())
    result = run(half, FromDisk(), quick())
    assert result.weight.dtype == torch.float16
    assert result.final_loss < result.initial_loss


def test_given_parameters_are_used():
    layer, data = problem(None, (12, 20), (256, 20))
    given = QParams.of([0.05], bits=4)
    result = run(layer, data, quick(), qparams=given)
    assert result.qparams is given
    assert result.weight.numpy() == pytest.approx((result.integers * 0.05).numpy())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_data_is_reported(bad):
    layer, data = problem(None, (12, 20), (256, 20))
    inputs = data.inputs.clone()
    inputs[3] = bad
    with pytest.raises(CalibrationError, match=r"the AdaRound loss is (nan|inf) over all data; look for NaN"):
        run(layer, CachedData(inputs, data.outputs), quick())


def test_a_loss_that_explodes_while_learning_is_reported():
    layer, data = problem(None, (12, 20), (256, 20))
    calls = 0

    def breaking(y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return y * torch.nan if calls > 40 else y

    broken = AdaRoundLayer(weight=layer.weight, bias=layer.bias, activation=breaking)
    with pytest.raises(CalibrationError, match=r"the AdaRound loss is nan after \d+ iterations"):
        run(broken, data, quick())


def test_no_data_is_reported():
    layer, data = problem(None, (12, 20), (256, 20))
    with pytest.raises(CalibrationError, match="at least one sample"):
        run(layer, CachedData(data.inputs[:0], data.outputs[:0]), quick())


def test_wrong_dimensions_are_reported():
    with pytest.raises(
        ArgumentError, match=r"Linear layer expects a weight with 2 dimensions, got shape \[2, 3, 1, 1\]"
    ):
        AdaRoundLayer(weight=torch.ones(2, 3, 1, 1))
    with pytest.raises(ArgumentError, match=r"Conv2d or ConvTranspose2d layer expects a weight with 4 dimensions"):
        AdaRoundLayer(weight=torch.ones(2, 3), geometry=ConvolutionGeometry())


def rounding_error(rows: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    half = 2 ** (bits - 1)
    return ((np.clip(np.round(rows / scale), -half, half - 1) * scale - rows) ** 2).sum(axis=1)


@pytest.mark.parametrize("bits", [2, 3, 4, 7])
def test_below_8_bits_the_scale_has_the_smallest_squared_error(bits):
    rows = torch.randn(6, 400, generator=torch.Generator().manual_seed(3)).double().numpy()
    rows[1] **= 3
    found = initial_scale(torch.from_numpy(rows).float(), kind=WeightKind.LINEAR, bits=bits).scale.double().numpy()
    full = np.abs(rows).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    best = np.min([rounding_error(rows, full * ratio, bits) for ratio in np.linspace(0.1, 1.2, 2201)], axis=0)
    assert (rounding_error(rows, found[:, None], bits) <= 1.01 * best).all()


def test_scales_of_zero_and_tiny_weights_are_one():
    weight = torch.zeros(3, 4)
    weight[1], weight[2] = 1e-12, 0.5
    for bits in (4, 8):
        scale = initial_scale(weight, kind=WeightKind.LINEAR, bits=bits).scale
        assert scale[:2].tolist() == [1.0, 1.0]
        assert 0 < scale[2].item() < 0.5


def test_impossible_weights_are_refused():
    with pytest.raises(CalibrationError, match=r"its largest magnitude is (nan|inf)"):
        initial_scale(torch.tensor([[1.0, np.inf]]), kind=WeightKind.LINEAR)
    with pytest.raises(CalibrationError, match=r"its largest magnitude is 1e\+20"):
        initial_scale(torch.tensor([[1.0, 1e20]]), kind=WeightKind.LINEAR, bits=4)
    with pytest.raises(ArgumentError, match=r"bits: AdaRound expects 2\.\.8, got 9"):
        initial_scale(torch.ones(2, 2), kind=WeightKind.LINEAR, bits=9)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_scale_of_least_error_is_better_than_any_other(bits):
    weight = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    best = least_error_scale(weight, kind=WeightKind.LINEAR, bits=bits).scale

    def errors(scale):
        rounded = (weight / scale[:, None]).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale[:, None]
        return (rounded - weight).square().sum(dim=1)

    for ratio in (0.5, 0.8, 0.95, 1.05, 1.3):
        assert (errors(best) <= errors(best * ratio) * 1.02).all()  # the search has steps of a thousandth
