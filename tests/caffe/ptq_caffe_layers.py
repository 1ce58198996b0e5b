"""Compare the two results of quantization layer by layer: each deploy layer gets what the fake-quant layer got."""

from __future__ import annotations

from collections import Counter

import numpy as np
from ptq_caffe_flow import prototxt

WEIGHTED = ("Convolution", "DepthwiseConv", "Deconvolution", "InnerProduct")
ROUNDING = 2.0**-24


def check_every_layer(fake, deploy, model):
    """Check every quantized layer after a forward of the fake-quant net; returns how many of which type.

    Quant: the same integers, so its real numbers agree to the last bit. Layers without weights compute on these same
    numbers: to the last bit, too, once they lie in memory in the same order. Layers with weights: deploy adds exactly;
    fake-quant adds K products in float32, from weights and data that are each rounded once, so it is off by at most
    (K + 3) roundings of Σ|x||w|, and bias and result by one each.

    Args:
        fake: The fake-quant net, after a forward.
        deploy: The deploy net, with inputs of the same shape.
        model: The deploy prototxt.
    """
    checked = Counter()
    waiting = []
    layers = prototxt(model).layer
    for layer in layers:
        behind = [each for each in layers if _belongs(each, layer)]
        if layer.type == "Quant":
            waiting.append(layer)
        elif behind:
            _check_layer(fake, deploy, layer, waiting, behind)
            checked[layer.type] += 1
            waiting = []
    return checked


def _belongs(after, layer):
    options = after.dequant_param if after.type == "DeQuant" else after.antiquant_param
    return after.type in ("DeQuant", "AntiQuant") and options.object_layer == layer.name


def _check_layer(fake, deploy, layer, quants, behind):
    for quant in quants:
        source = fake.blobs[fake.bottom_names[quant.name][0]].data
        target = deploy.blobs[deploy.bottom_names[quant.name][0]]
        target.reshape(*source.shape)
        target.data[...] = source
    deploy.forward(start=quants[0].name, end=behind[-1].name)
    for index, quant in enumerate(quants):
        options = quant.quant_param
        integers = deploy.blobs[deploy.top_names[quant.name][0]].data
        real = (integers - options.offset) * np.float32(options.scale)
        np.testing.assert_array_equal(real, fake.blobs[fake.top_names[quant.name][0]].data, f"input {index}")
    for after, name in zip(behind, fake.top_names[layer.name], strict=True):
        found = deploy.blobs[deploy.top_names[after.name][0]].data
        if layer.type in WEIGHTED:
            assert (np.abs(found - fake.blobs[name].data) <= _allowed(fake, layer, name)).all(), layer.name
        else:
            np.testing.assert_array_equal(found, _again(fake, layer, name), layer.name)


def _again(fake, layer, top):
    """What the layer gives for its bottoms in NumPy's order; the net is left as it was."""
    result = fake.blobs[top].data.copy()
    for name in fake.bottom_names[layer.name]:
        assert fake.blobs[name].data.flags.c_contiguous
    fake.forward(start=layer.name, end=layer.name)
    wanted = fake.blobs[top].data.copy()
    np.testing.assert_allclose(wanted, result, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())
    fake.blobs[top].data[...] = result
    return wanted


def _allowed(fake, layer, top):
    """(K + 5) roundings of Σ|x||w| + |b|, by the layer itself on sizes; the net is left as it was."""
    blobs = [fake.blobs[name] for name in fake.bottom_names[layer.name]]
    changed = [*blobs, *fake.params[layer.name]]
    kept = [blob.data.copy() for blob in changed]
    result = fake.blobs[top].data.copy()
    for blob, values in zip(changed, kept, strict=True):
        blob.data[...] = np.abs(values)
    fake.forward(start=layer.name, end=layer.name)
    sizes = fake.blobs[top].data.copy()
    for blob, values in zip(changed, kept, strict=True):
        blob.data[...] = values
    fake.blobs[top].data[...] = result
    weight = kept[len(blobs)]
    terms = weight[0].size if layer.type != "Deconvolution" else weight.shape[0] * weight[0, 0].size
    return (terms + 5) * ROUNDING * sizes
