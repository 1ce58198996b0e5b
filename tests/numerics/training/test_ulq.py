"""The trained activation quantizer: against the spec's formulas in float64, finite differences, and by laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.numerics.affine import SymmetricScale, fake_quantize, scale_and_offset
from amct.numerics.training import kernels
from amct.numerics.training.quantizers import ulq, ulq_factors, valid_clips

BITS = [4, 8, 16]
CLIPS = [(-1.0, 2.0), (0.0, 1.7), (-0.3, 0.2), (-2.5, 0.0)]


def numpy_ulq(x, g, clip_min, clip_max, bits):
    """Section by section what the module's docstring says, in float64."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = float(np.float32((clip_max - clip_min) / (2**bits - 1)))
    offset = np.rint(lowest - clip_min / scale)
    y = (np.clip(np.rint(x / scale) + offset, lowest, highest) - offset) * scale
    above, below = x > scale * (highest - offset), x < scale * (lowest - offset)
    v = np.where(above, clip_max, np.where(below, clip_min, x)) / scale
    e = (np.rint(v) - v) / (2**bits - 1)
    dx = np.where(above | below, 0, g)
    return y, dx, ((below - e) * g).sum(), ((e + above) * g).sum()


def clips_of(clip_min, clip_max):
    return (torch.tensor(value, requires_grad=True) for value in (clip_min, clip_max))


def run(x, g, clip_min, clip_max, bits):
    low, high = clips_of(clip_min, clip_max)
    x = x.clone().requires_grad_()
    y = ulq(x, low, high, bits)
    y.backward(g)
    return y.detach(), x.grad, low.grad, high.grad


def plain(monkeypatch):
    monkeypatch.setattr(kernels, "can_use", lambda _: False)


@pytest.fixture(params=["compiled", "plain"])
def path(request, monkeypatch):
    if request.param == "plain":
        plain(monkeypatch)
    return request.param


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("clip_min", "clip_max"), CLIPS)
def test_forward_and_backward_are_the_formulas(bits, clip_min, clip_max):
    rng = np.random.default_rng(bits)
    x, g = rng.normal(size=(3, 4, 5, 6)).astype(np.float32), rng.normal(size=(3, 4, 5, 6)).astype(np.float32)
    y, dx, low, high = run(torch.from_numpy(x), torch.from_numpy(g), clip_min, clip_max, bits)
    expected = numpy_ulq(x.astype(np.float64), g.astype(np.float64), np.float32(clip_min), np.float32(clip_max), bits)
    step = (clip_max - clip_min) / (2**bits - 1)
    # float32 products may fall on the other side of a half: then one value differs by one step
    assert np.sort(np.abs(y.numpy() - expected[0]).ravel())[-3] <= 4e-7 * max(clip_max, -clip_min)
    assert np.abs(y.numpy() - expected[0]).max() <= 1.001 * step
    np.testing.assert_array_equal(dx.numpy(), expected[1].astype(np.float32))
    # 360 float32 products and sums, each with a relative error of 2^-24; one error e may turn from 1/2 to -1/2
    bound = 360 * 2.0**-23 * np.abs(g).max() + np.abs(g).max() / (2**bits - 1)
    assert abs(low.item() - expected[2]) <= bound
    assert abs(high.item() - expected[3]) <= bound


def test_both_paths_give_the_same_bits_forward(monkeypatch):
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(3)) * 3
    low, high = clips_of(-1.1, 2.3)
    first = ulq(x, low, high, 8)
    plain(monkeypatch)
    assert torch.equal(first, ulq(x, low, high, 8))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("bits", BITS)
def test_gradients_are_finite_differences_of_the_smooth_part(bits):
    """With the rounding errors held fixed, y = cut(x) + scale · error is smooth in the clips."""
    rng = np.random.default_rng(1)
    x, g = rng.normal(size=500), rng.normal(size=500)
    clip_min, clip_max = -0.75, 1.25
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def step(low, high):
        return (high - low) / (2**bits - 1)

    scale = step(clip_min, clip_max)
    offset = np.rint(lowest - clip_min / scale)
    above, below = x > scale * (highest - offset), x < scale * (lowest - offset)
    v = np.where(above, clip_max, np.where(below, clip_min, x)) / scale
    error = np.rint(v) - v

    def smooth(low, high):
        return ((np.where(above, high, np.where(below, low, x)) + step(low, high) * error) * g).sum()

    h = 1e-4  # the function is linear in the clips, so the difference is exact up to rounding
    low, high = clips_of(clip_min, clip_max)
    ulq(torch.from_numpy(x), low, high, bits).backward(torch.from_numpy(g))
    by_low = (smooth(clip_min + h, clip_max) - smooth(clip_min - h, clip_max)) / (2 * h)
    by_high = (smooth(clip_min, clip_max + h) - smooth(clip_min, clip_max - h)) / (2 * h)
    # the scale is a float32: v is off by up to 2^-24 · 2^bits steps, summed over 500 values and divided by 2^bits - 1
    bound = 500 * 2.0**-24 * np.abs(g).max() + 1e-5
    assert abs(low.grad.item() - by_low) <= bound
    assert abs(high.grad.item() - by_high) <= bound


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40),
    clip_min=st.floats(-50, 0, width=32),
    clip_max=st.floats(0.0078125, 50, width=32),
    bits=st.sampled_from(BITS),
)
def test_the_forward_is_that_of_post_training_quantization(values, clip_min, clip_max, bits):
    x, low, high = torch.tensor(values), torch.tensor(clip_min), torch.tensor(clip_max)
    scale, offset = scale_and_offset(low, high, bits, asymmetric=True, symmetric_scale=SymmetricScale.NEGATIVE_SIDE)
    found = ulq_factors(low, high, bits)
    assert torch.equal(found[0], scale)
    assert torch.equal(found[1], offset)
    y = ulq(x, low, high, bits)
    assert torch.equal(y, fake_quantize(x, scale, offset, bits))
    assert torch.equal(ulq(y, low, high, bits), y)


def test_zero_is_exact_whatever_the_clips():
    low, high = clips_of(-0.123, 1.77)
    assert ulq(torch.zeros(3), low, high, 4).abs().max() == 0


def test_a_fixed_lower_clip_has_no_gradient():
    high = torch.tensor(1.0, requires_grad=True)
    low = torch.zeros(())
    ulq(torch.randn(10), low, high, 8).sum().backward()
    assert low.grad is None
    assert high.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_keep_their_type_and_the_clips_theirs(dtype):
    x = torch.linspace(-2, 2, 101).to(dtype).requires_grad_()
    low, high = clips_of(-1.0, 1.0)
    y = ulq(x, low, high, 8)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, low.grad.dtype, high.grad.dtype) == (dtype, dtype, torch.float32, torch.float32)
    assert high.grad.item() == pytest.approx((x.double() > 1.0).sum().item(), abs=1)


@pytest.mark.usefixtures("path")
def test_channels_last_and_other_strides_give_the_same():
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 3, 4, 5, generator=generator), torch.randn(2, 3, 4, 5, generator=generator)
    expected = run(x, g, -1.0, 1.5, 8)
    for other in (
        run(x.to(memory_format=torch.channels_last), g, -1.0, 1.5, 8),
        run(x, g.to(memory_format=torch.channels_last), -1.0, 1.5, 8),
        run(
            x.transpose(2, 3).contiguous().transpose(2, 3), g.transpose(2, 3).contiguous().transpose(2, 3), -1.0, 1.5, 8
        ),
    ):
        assert torch.equal(other[0], expected[0])
        assert torch.equal(other[1], expected[1])
        torch.testing.assert_close(other[2:], expected[2:], rtol=0, atol=120 * 2.0**-22)


def test_the_number_of_threads_does_not_change_a_bit(monkeypatch):
    monkeypatch.setattr(kernels, "_THREADED_SIZE", kernels._BLOCK)
    generator = torch.Generator().manual_seed(0)
    x, g = (
        torch.randn(5 * kernels._BLOCK + 17, generator=generator),
        torch.randn(5 * kernels._BLOCK + 17, generator=generator),
    )
    found = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(run(x, g, -1.0, 1.5, 8))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("path")
def test_not_a_number_stays_visible():
    x = torch.tensor([float("nan"), 1.0, float("inf")], requires_grad=True)
    low, high = clips_of(-1.0, 1.0)
    y = ulq(x, low, high, 8)
    y.sum().backward()
    assert torch.isnan(y).tolist() == [True, False, False]
    assert torch.isnan(high.grad)


@pytest.mark.usefixtures("path")
def test_an_empty_tensor_is_possible():
    x = torch.empty(0, 3, requires_grad=True)
    low, high = clips_of(-1.0, 1.0)
    ulq(x, low, high, 8).sum().backward()
    assert high.grad == 0


def test_the_clips_may_be_corrected_between_forward_and_backward():
    x = torch.tensor([-2.0, -0.3, 0.0, 0.7, 2.0])
    low, high = clips_of(-1.0, 1.0)
    ulq(x, low, high, 8).sum().backward()
    expected = high.grad.clone()
    low, high = clips_of(-1.0, 1.0)
    y = ulq(x, low, high, 8)
    with torch.no_grad():
        high.fill_(2.0)
    y.sum().backward()
    assert high.grad == expected


def test_fp16_scale_rounds_the_scale():
    low, high = torch.tensor(-1.0), torch.tensor(2.0)
    scale, offset = ulq_factors(low, high, 8, fp16_scale=True)
    assert scale == torch.tensor(3 / 255).half().float()
    assert offset == ulq_factors(low, high, 8)[1]
    x = torch.linspace(-2, 3, 100)
    assert torch.equal(ulq(x, low, high, 8, fp16_scale=True), fake_quantize(x, scale, offset, 8))


@pytest.mark.parametrize(
    ("clips", "expected"),
    [
        ((-1.0, 2.0), (-1.0, 2.0)),
        ((1.0, 1.0), (-5.0, 5.0)),
        ((-1.0, -0.5), (-1.0, 5.0)),
        ((0.5, 2.0), (-5.0, 2.0)),
        ((0.5, -0.5), (-5.0, 5.0)),
    ],
)
def test_illegal_clips_become_the_last_legal_ones(clips, expected):
    found = valid_clips(*(torch.tensor(value) for value in (*clips, -5.0, 5.0)))
    assert tuple(value.item() for value in found) == expected


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, while compiling
def test_torch_compiles_the_quantizer():
    low, high = clips_of(-1.0, 1.5)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    expected = run(x, torch.ones(64), -1.0, 1.5, 8)
    compiled = torch.compile(lambda x, low, high: ulq(x, low, high, 8), backend="aot_eager", fullgraph=True)
    y = compiled(x, low, high)
    y.sum().backward()
    assert torch.equal(y, expected[0])
    torch.testing.assert_close(low.grad, expected[2], rtol=0, atol=64 * 2.0**-23)
    torch.testing.assert_close(high.grad, expected[3], rtol=0, atol=64 * 2.0**-23)
