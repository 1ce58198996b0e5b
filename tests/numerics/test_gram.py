"""The Gram matrix of a layer's input: it must tell the same error as running the layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from amct.numerics.arq import WeightKind, channels_first
from amct.numerics.gram import GramStatistics, Unfolding, improve_rounding
from amct.numerics.integer import ConvolutionGeometry

GEOMETRIES = [
    pytest.param(None, (5, 7), (6, 7), id="linear"),
    pytest.param(None, (5, 7), (2, 3, 7), id="linear-3d"),
    pytest.param(ConvolutionGeometry(), (4, 3, 3, 2), (2, 3, 6, 5), id="conv"),
    pytest.param(ConvolutionGeometry(stride=2, padding=(1, 2), dilation=(2, 1)), (4, 3, 2, 3), (2, 3, 9, 8), id="odd"),
    pytest.param(ConvolutionGeometry(padding=1, groups=2), (6, 2, 3, 3), (2, 4, 5, 5), id="groups"),
    pytest.param(ConvolutionGeometry(padding=(3, 1), stride=(1, 2)), (4, 3, 5, 3), (2, 3, 4, 9), id="tall-kernel"),
    pytest.param(ConvolutionGeometry(padding=0), (4, 3, 5, 3), (2, 3, 6, 5), id="fewer-rows-than-the-kernel"),
    pytest.param(ConvolutionGeometry(groups=4), (4, 1, 3, 3), (1, 4, 5, 5), id="depthwise"),
    pytest.param(ConvolutionGeometry(transposed=True), (3, 4, 2, 3), (2, 3, 4, 5), id="deconv"),
    pytest.param(
        ConvolutionGeometry(transposed=True, stride=(2, 3), padding=1, output_padding=1, dilation=(1, 2), groups=2),
        (4, 3, 3, 2),
        (2, 4, 4, 5),
        id="deconv-odd",
    ),
    pytest.param(ConvolutionGeometry(transposed=True, padding=2), (3, 2, 2, 2), (1, 3, 6, 6), id="deconv-cropped"),
]


def forward(geometry: ConvolutionGeometry | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if geometry is None:
        return functional.linear(x, weight)
    options = {name: getattr(geometry, name) for name in ("stride", "padding", "dilation", "groups")}
    if geometry.transposed:
        return functional.conv_transpose2d(x, weight, output_padding=geometry.output_padding, **options)
    return functional.conv2d(x, weight, **options)


def kind_of(geometry: ConvolutionGeometry | None) -> WeightKind:
    if geometry is None:
        return WeightKind.LINEAR
    return WeightKind.CONV_TRANSPOSE if geometry.transposed else WeightKind.CONV


@pytest.mark.parametrize(("geometry", "weight_shape", "input_shape"), GEOMETRIES)
def test_error_and_gradient_equal_those_of_the_layer(geometry, weight_shape, input_shape):
    generator = torch.Generator().manual_seed(4)
    weight, other = (torch.randn(weight_shape, generator=generator) for _ in range(2))
    groups = geometry.groups if geometry else 1
    rows = channels_first(weight, kind_of(geometry), groups)
    unfolding = Unfolding(geometry, tuple(weight_shape[2:]) or (1, 1))
    statistics = GramStatistics(unfolding, rows.shape[0], rows.shape[1], weight.device)
    error, slope, positions = 0.0, 0.0, 0
    candidate = other.double().requires_grad_()
    for _ in range(3):
        x = torch.randn(input_shape, generator=generator)
        wanted = forward(geometry, x, weight)
        statistics.add(x, wanted)
        loss = (forward(geometry, x.double(), candidate) - wanted.double()).square().sum()
        (gradient,) = torch.autograd.grad(loss, candidate)
        error, slope = error + loss.item(), slope + gradient
        positions += wanted.numel() // rows.shape[0]
    assert statistics.positions == positions
    difference = unfolding.group_rows(channels_first(other - weight, kind_of(geometry), groups)).double()
    found = float((torch.bmm(difference, statistics.gram) * difference).sum())
    assert found == pytest.approx(error, rel=1e-5)
    half = unfolding.ungroup_rows(
        statistics.half_gradient(unfolding.group_rows(channels_first(other, kind_of(geometry), groups)))
    )
    expected = channels_first(slope, kind_of(geometry), groups)
    assert (2 * half).numpy() == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4 * float(expected.abs().max()))


def test_switching_weights_only_ever_lowers_the_error_and_ends_in_a_local_optimum():
    generator = np.random.default_rng(0)
    data = generator.normal(size=(60, 12)) @ generator.normal(size=(12, 12))
    wanted = generator.normal(size=(2, 12))
    gram, cross = data.T @ data, wanted @ (data.T @ data)
    used, unused = np.floor(wanted), np.floor(wanted) + 1
    start = used.copy()

    def error(weight: np.ndarray) -> float:
        return float((data @ (weight - wanted).T).__pow__(2).sum())

    slope = used @ gram - cross
    changes = improve_rounding(gram, slope, used, unused, 50)
    assert changes > 0
    assert error(used) < error(start)
    assert slope == pytest.approx(used @ gram - cross, rel=1e-9, abs=1e-6)
    assert np.array_equal(np.sort(np.stack([used, unused]), axis=0), np.stack([np.floor(wanted), np.floor(wanted) + 1]))
    for row, place in np.ndindex(used.shape):
        flipped = used.copy()
        flipped[row, place] = unused[row, place]
        assert error(flipped) >= error(used) - 1e-9
