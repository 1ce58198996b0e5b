"""Convolution and pooling windows against loops in float64, over all kinds of sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from amct.caffe.engine.messages import parse_message
from amct.caffe.engine.net import Net
from amct.caffe.engine.windows import PoolWindow, Window, average_pool, max_pool, max_pool_values

sizes = st.integers(1, 9)


@st.composite
def pool_cases(draw):
    kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    pad = (draw(st.integers(0, kernel[0] - 1)), draw(st.integers(0, kernel[1] - 1)))
    window = PoolWindow(
        kernel=kernel, stride=(draw(st.integers(1, 4)), draw(st.integers(1, 4))), pad=pad, floor=draw(st.booleans())
    )
    height, width = draw(sizes), draw(sizes)
    assume(all(size + 2 * p >= k for size, p, k in zip((height, width), pad, kernel, strict=True)))
    return window, np.random.RandomState(draw(st.integers(0, 99))).randint(-5, 6, (1, 2, height, width)).astype(
        np.float32
    )


def output_size(size, kernel, stride, pad, floor, any_pad):
    """Caffe's rule, written out: round up or down, then drop a window that starts in the padding."""
    result = (math.floor if floor else math.ceil)((size + 2 * pad - kernel) / stride) + 1
    if any_pad and (result - 1) * stride >= size + pad:
        result -= 1
    return result


def windows(window, shape):
    outputs = [
        output_size(
            shape[axis], window.kernel[axis], window.stride[axis], window.pad[axis], window.floor, any(window.pad)
        )
        for axis in (0, 1)
    ]
    for row in range(outputs[0]):
        for column in range(outputs[1]):
            start = (row * window.stride[0] - window.pad[0], column * window.stride[1] - window.pad[1])
            end = tuple(
                min(first + kernel, size + pad)
                for first, kernel, size, pad in zip(start, window.kernel, shape, window.pad, strict=True)
            )
            yield row, column, start, end


@given(case=pool_cases())
def test_average_pooling_is_caffes(case):
    window, picture = case
    shape = picture.shape[2:]
    got = average_pool(torch.from_numpy(picture), window).numpy()
    for row, column, start, end in windows(window, shape):
        area = (end[0] - start[0]) * (end[1] - start[1])
        inside = picture[0, :, max(start[0], 0) : min(end[0], shape[0]), max(start[1], 0) : min(end[1], shape[1])]
        with np.errstate(divide="ignore", invalid="ignore"):
            want = inside.astype(np.float64).sum((1, 2)) / np.float64(area)
        np.testing.assert_allclose(got[0, :, row, column], want, rtol=1e-5, atol=1e-6)
        assert got.shape[2:] == window.output(shape)


@given(case=pool_cases())
def test_max_pooling_is_caffes_first_on_ties(case):
    window, picture = case
    shape = picture.shape[2:]
    for tensor in (torch.from_numpy(picture), torch.from_numpy(picture).contiguous(memory_format=torch.channels_last)):
        values, places = max_pool(tensor, window)
        np.testing.assert_array_equal(max_pool_values(tensor, window).numpy(), values.numpy())
        for row, column, start, end in windows(window, shape):
            inside = picture[0, :, max(start[0], 0) : min(end[0], shape[0]), max(start[1], 0) : min(end[1], shape[1])]
            if inside.size == 0:
                assert (values[0, :, row, column] == torch.finfo(torch.float32).min).all()
                continue
            flat = inside.reshape(2, -1)
            np.testing.assert_array_equal(values[0, :, row, column], flat.max(1))
            first = flat.argmax(1)
            rows, columns = first // inside.shape[2] + max(start[0], 0), first % inside.shape[2] + max(start[1], 0)
            np.testing.assert_array_equal(places[0, :, row, column], rows * shape[1] + columns)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("room", [1, 2 * 3 * 4 * 5])
def test_pictures_pooled_by_turns_are_those_pooled_at_once(monkeypatch, layout, room):
    window = PoolWindow(kernel=(3, 3), stride=(2, 2), pad=(1, 0))
    pictures = torch.randn(5, 3, 7, 10, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=layout)
    want = torch.cat([max_pool(picture[None], window)[0] for picture in pictures])
    monkeypatch.setattr("amct.caffe.engine.windows.INDICES_AT_ONCE", room)
    with torch.no_grad():
        got = max_pool_values(pictures, window)
    assert got.shape == (5, 3, 4, 5)
    assert got.is_contiguous(memory_format=layout)
    assert torch.equal(got, want)


@given(
    size=st.integers(1, 30),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    pad=st.integers(0, 4),
    dilation=st.integers(1, 3),
)
def test_deconvolution_undoes_the_size_of_a_convolution(size, kernel, stride, pad, dilation):
    window = Window(kernel=(kernel,), stride=(stride,), pad=(pad,), dilation=(dilation,))
    (grown,) = window.transposed_output((size,))
    assume(grown > 0)
    assert window.output((grown,)) == (size,)


def convolution_net(shape, options):
    dims = " ".join(f"dim: {size}" for size in shape)
    return Net(
        parse_message(
            f'layer {{ name: "in" type: "Input" top: "x" input_param {{ shape {{ {dims} }} }} }} '
            f'layer {{ name: "c" type: "Convolution" bottom: "x" top: "y" convolution_param {{ {options} }} }}',
            "NetParameter",
        )
    )


def naive_convolution(x, weight, bias, stride, pad, dilation, group):
    axes = x.ndim - 2
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *[(pad, pad)] * axes])
    kernel = weight.shape[2:]
    outputs = [(padded.shape[2 + a] - (dilation * (kernel[a] - 1) + 1)) // stride + 1 for a in range(axes)]
    result = np.zeros((x.shape[0], weight.shape[0], *outputs))
    per_group, out_per_group = weight.shape[1], weight.shape[0] // group
    for place in np.ndindex(*outputs):
        window = tuple(
            slice(place[a] * stride, place[a] * stride + dilation * (kernel[a] - 1) + 1, dilation) for a in range(axes)
        )
        for out in range(weight.shape[0]):
            start = out // out_per_group * per_group
            patch = padded[(slice(None), slice(start, start + per_group), *window)]
            result[(slice(None), out, *place)] = (patch * weight[out]).reshape(x.shape[0], -1).sum(1) + bias[out]
    return result


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(
    ("stride", "pad", "dilation", "group"), [(1, 0, 1, 1), (2, 1, 1, 2), (1, 2, 2, 4), (3, 1, 2, 1)]
)
def test_convolution_over_one_two_and_three_axes(axes, stride, pad, dilation, group):
    shape = (2, 4, *[9, 7, 6][:axes])
    options = f"num_output: 8 kernel_size: 3 stride: {stride} pad: {pad} dilation: {dilation} group: {group}"
    net = convolution_net(shape, options)
    random = np.random.RandomState(0)
    weight, bias = net.layers[1].blobs
    x = random.randn(*shape).astype(np.float32)
    weight.data[...] = random.randn(*weight.shape)
    bias.data[...] = random.randn(8)
    net.blob("x").data[...] = x
    net.forward()
    want = naive_convolution(x, weight.data.astype(np.float64), bias.data, stride, pad, dilation, group)
    # at most 4 * 27 products of size about 1, in float32
    np.testing.assert_allclose(net.blob("y").data, want, rtol=1e-4, atol=1e-4)
