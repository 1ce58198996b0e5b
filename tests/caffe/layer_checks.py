"""Nets of one layer, for tests of layers against formulas and finite differences."""

from __future__ import annotations

import numpy as np

from amct.caffe.engine.messages import parse_message
from amct.caffe.pycaffe import TEST, Net


def text_of(kind, parameters, shapes, tops=1):
    lines = ["force_backward: true"]
    for index, shape in enumerate(shapes):
        dims = " ".join(f"dim: {size}" for size in shape)
        lines.append(f'layer {{ name: "i{index}" type: "Input" top: "b{index}" input_param {{ shape {{ {dims} }} }} }}')
    bottoms = " ".join(f'bottom: "b{index}"' for index in range(len(shapes)))
    names = " ".join(f'top: "t{index}"' for index in range(tops))
    lines.append(f'layer {{ name: "layer" type: "{kind}" {bottoms} {names} {parameters} }}')
    return "\n".join(lines)


def net_of(kind, parameters, shapes, tops=1, phase=TEST, **options):
    message = parse_message(text_of(kind, parameters, shapes, tops), "NetParameter")
    return Net.from_parameter(message, phase=phase, **options)


def run(kind, parameters, *inputs, tops=1, blobs=(), phase=TEST, net=None):
    """The tops of a layer for these bottoms and parameter blobs: one array, or a list of them."""
    inputs = [np.asarray(value, np.float32) for value in inputs]
    net = net or net_of(kind, parameters, [value.shape for value in inputs], tops, phase)
    for index, value in enumerate(inputs):
        net.blobs[f"b{index}"].data[...] = value
    for blob, value in zip(net.params.get("layer", []), blobs, strict=bool(blobs)):
        blob.data[...] = value
    net.forward()
    results = [net.blobs[f"t{index}"].data.copy() for index in range(tops)]
    return results[0] if tops == 1 else results


def check_gradients(kind, parameters, *inputs, tops=1, blobs=(), bottoms=None, step=1e-2):
    """Compare gradients of bottoms and parameters with central differences.

    Values are float32: a difference over 2 * step is off by about 1e-7 / step of the values summed up, and by step^2
    times the third derivative; both are below a thousandth for values around 1.
    """
    inputs = [np.asarray(value, np.float32) for value in inputs]
    net = net_of(kind, parameters, [value.shape for value in inputs], tops)
    run(kind, parameters, *inputs, tops=tops, blobs=blobs, net=net)
    random = np.random.RandomState(7)
    weights = [random.uniform(-1, 1, net.blobs[f"t{index}"].shape) for index in range(tops)]
    for index, weight in enumerate(weights):
        net.blobs[f"t{index}"].diff[...] = weight
    net.backward()
    chosen = range(len(inputs)) if bottoms is None else bottoms
    places = [net.blobs[f"b{index}"] for index in chosen] + list(net.params.get("layer", []))
    found = [blob.diff.copy() for blob in places]

    def total():
        net.forward()
        return sum(
            float((net.blobs[f"t{index}"].data.astype(np.float64) * weight).sum())
            for index, weight in enumerate(weights)
        )

    for blob, gradient in zip(places, found, strict=True):
        values = blob.data
        for place in np.ndindex(*values.shape):
            original = values[place]
            values[place] = original + step
            above = total()
            values[place] = original - step
            below = total()
            values[place] = original
            expected = (above - below) / (2 * step)
            assert abs(gradient[place] - expected) <= 2e-3 * max(1.0, abs(expected)), (place, gradient[place], expected)
