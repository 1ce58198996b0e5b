"""Fused nets and records of their ranges, for tests of the QDQ export; and what a record means, computed by torch."""

from __future__ import annotations

import torch

from amct.caffe.engine.layers.weighted import Convolution, Deconvolution, InnerProduct
from amct.caffe.engine.net import Net
from amct.caffe.model import read_model
from amct.caffe.onnx.graph import DEFAULT_OPSET, float_onnx
from amct.caffe.onnx.quant import export_net
from amct.caffe.ptq.folding import fuse
from amct.config.layers import CAFFE_TYPES
from amct.export.request import ExportOptions
from amct.numerics.affine import fake_quantize
from amct.numerics.arq import WeightKind, arq, fake_quantize_weight
from amct.numerics.observer import MinMaxObserver
from amct.numerics.qparams import QParams
from amct.record import CaffeLayerRecord, CaffeRecord, DataFactors
from amct.record.conversion import caffe_layer_qparams


def fused_net(prototxt, caffemodel):
    """The net as the quantization flow has it: nothing in place, BatchNorm and Scale folded."""
    model = read_model(prototxt, caffemodel)
    fuse(model)
    net = Net(model.net, with_gradients=False)
    for layer in net.layers:
        for blob, tensor in zip(layer.blobs, model.weights.get(layer.name, []), strict=True):
            blob.set_tensor(tensor.float().reshape(blob.shape).contiguous())
    return net


def quantized_onnx(net, record, tensors=None, *, opset=DEFAULT_OPSET, **options):
    layers = {name: caffe_layer_qparams(entry) for name, entry in record.items()}
    return export_net("qdq", float_onnx(net, opset=opset), layers, tensors, ExportOptions(**options))


def weight_kind(layer):
    if isinstance(layer, Deconvolution):
        return WeightKind.CONV_TRANSPOSE
    if isinstance(layer, Convolution):
        return WeightKind.CONV
    return WeightKind.LINEAR if isinstance(layer, InnerProduct) else None


def weight_factors(layer):
    """Per channel, but for inner products: what Caffe's configs allow."""
    kind = weight_kind(layer)
    groups = getattr(layer, "group", 1)
    return arq(layer.blobs[0].tensor, kind=kind, groups=groups, channel_wise=kind is not WeightKind.LINEAR)


class Ranges:
    """Observes layer inputs and blobs of a net, by minimum and maximum."""

    def __init__(self, net, blobs=(), types=None):
        wanted = {name for name, capability in CAFFE_TYPES.items() if capability.on_by_default}
        self.net = net
        self.quantized = [
            node
            for node in net.graph.nodes
            if node.layer.type in (wanted if types is None else types) and not node.layer.name.endswith("_split")
        ]
        self.inputs = {(n.layer.name, i): MinMaxObserver() for n in self.quantized for i in range(len(n.bottoms))}
        self.blobs = {name: MinMaxObserver() for name in blobs}

    def observe(self):
        """Look at what the last forward left in the blobs."""
        for node in self.quantized:
            for index, blob in enumerate(node.bottoms):
                self.inputs[node.layer.name, index].observe(self.net.graph.blobs[blob].tensor)
        for name, observer in self.blobs.items():
            observer.observe(self.net.blob(name).tensor)

    def record(self):
        layers = {}
        for node in self.quantized:
            data = []
            for index in range(len(node.bottoms)):
                found = self.inputs[node.layer.name, index].result()
                data.append(DataFactors(index=index, scale=float(found.scale), offset=int(found.offset)))
            has_weights = weight_kind(node.layer) is not None
            scales = tuple(weight_factors(node.layer).scale.tolist()) if has_weights else ()
            layers[node.layer.name] = CaffeLayerRecord(scale_w=scales, record_d=tuple(data))
        return CaffeRecord(layers)

    def tensors(self):
        return {name: observer.result() for name, observer in self.blobs.items()}


def fake_quantized_outputs(net, record):
    """Run a net layer by layer as its record says: inputs, weights and biases rounded, the rest in float."""
    values = {index: net.graph.blobs[index].tensor for index in net.graph.inputs}
    for node in net.graph.nodes:
        layer = node.layer
        if not node.bottoms:
            continue
        bottoms = [values[index] for index in node.bottoms]
        parameters = [blob.tensor for blob in layer.blobs]
        if layer.name in record:
            bottoms, parameters = _rounded(layer, record[layer.name], bottoms, parameters)
        values.update(zip(node.tops, layer.forward(bottoms, parameters), strict=True))
    return {net.graph.blob_names[index]: values[index].numpy() for index in net.graph.outputs}


def _rounded(layer, entry, bottoms, parameters):
    for data in entry.record_d:
        scale, offset = torch.tensor(data.scale), torch.tensor(data.offset)
        bottoms[data.index] = fake_quantize(bottoms[data.index], scale, offset, data.bits)
    if not entry.scale_w:
        return bottoms, parameters
    scales = torch.tensor(entry.scale_w)
    groups = getattr(layer, "group", 1)
    rounded = [fake_quantize_weight(parameters[0], QParams.symmetric(scales), weight_kind(layer), groups)]
    if len(parameters) > 1:
        step = scales * entry.record_d[0].scale
        rounded.append(torch.round(parameters[1] / step) * step)
    return bottoms, rounded
