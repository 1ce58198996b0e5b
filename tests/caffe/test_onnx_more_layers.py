"""The ONNX form of the layer types beyond the recorded ones: onnxruntime and the engine compute the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
import torch
from onnx_running import compare, feed, has_open_batch, run

from amct.caffe.engine.layer import layer_class, layer_types
from amct.caffe.engine.messages import parse_message
from amct.caffe.engine.net import Net
from amct.caffe.engine.onnx_place import onnx_form_of
from amct.caffe.model import INSERTED_TYPES
from amct.caffe.onnx.graph import float_onnx

IMAGE = (2, 6, 8, 8)
PICTURE = (2, 3, 64, 64)
REGIONS = (IMAGE, (7, 5))
BOXES = ((2, 9, 4), (2, 3, 9))
STREAMS = ((4, 2, 3), (4, 2))


@dataclass(frozen=True)
class Layer:
    type: str
    options: str = ""
    shapes: tuple[tuple[int, ...], ...] = (IMAGE,)
    tops: int = 1
    fill: str = "normal"
    opset: int = 18

    def __str__(self):
        return f"{self.type} {self.options}"

    def text(self):
        inputs = "".join(
            f'layer {{ name: "in{i}" type: "Input" top: "x{i}" input_param {{ shape {{ '
            + " ".join(f"dim: {size}" for size in shape)
            + " } } }\n"
            for i, shape in enumerate(self.shapes)
        )
        bottoms = " ".join(f'bottom: "x{i}"' for i in range(len(self.shapes)))
        tops = " ".join(f'top: "y{i}"' for i in range(self.tops))
        return f'{inputs}layer {{ name: "it" type: "{self.type}" {bottoms} {tops} {self.options} }}'

    def feeds(self):
        random = np.random.default_rng(5)
        values = {}
        for index, shape in enumerate(self.shapes):
            value = random.standard_normal(shape)
            if self.fill == "positive":
                value = np.abs(value)
            elif self.fill == "few":
                value = random.integers(0, 3, shape)
            elif self.fill == "mask" and index == 1:
                value = np.arange(np.prod(shape[2:])) * 4 + random.integers(0, 4, np.prod(shape))[: np.prod(shape[2:])]
                value = np.broadcast_to(value.reshape(shape[2:]), shape)
            elif self.fill == "regions" and index == 1:
                corners = np.sort(random.uniform(0, 60, (shape[0], 2, 2)), 1).reshape(shape[0], 4)
                value = np.concatenate([random.integers(0, 2, (shape[0], 1)), corners], 1)
            elif self.fill == "boxes" and index == 0:
                low = random.uniform(0, 1, (*shape[:2], 2))
                value = np.concatenate([low, low + random.uniform(0.1, 0.5, low.shape)], -1)
            elif self.fill == "cont" and index == 1:
                value = random.integers(0, 2, shape)
            values[f"x{index}"] = np.ascontiguousarray(value, np.float32)
        return values


LAYERS = [
    Layer("BN", "bn_param { bn_mode: INFERENCE scale_filler { type: 'gaussian' std: 1 } shift_filler { value: 0.5 } }"),
    Layer("BN", "bn_param { scale_filler { type: 'gaussian' std: 1 } shift_filler { value: 0.5 } }"),
    Layer("BN", "bn_param { slope_filler { type: 'gaussian' std: 1 } bias_filler { value: 0.5 } eps: 0.1 }"),
    Layer("Pooling", "pooling_param { pool: MAX kernel_size: 2 stride: 2 ceil_mode: false }"),
    Layer("ReLU6"),
    Layer("ReLU6", "relu6_param { negative_slope: 0.1 }"),
    Layer("Hswish"),
    Layer("HSigmoid"),
    Layer("Mish"),
    Layer("Eltwise", "eltwise_param { coeff: 0.5 }"),
    Layer("RReLU"),
    Layer("Sqrt", fill="positive"),
    Layer("Ceil"),
    Layer("Sign"),
    Layer("Cos"),
    Layer("Sin"),
    Layer("Erf"),
    Layer("CReLU"),
    Layer("CReLU", "crelu_param { concat_axis: -1 negative_slope: 0.2 }"),
    Layer("DepthwiseConv", "convolution_param { kernel_size: 3 pad: 1 stride: 2 weight_filler { type: 'xavier' } }"),
    Layer("Permute", "permute_param { order: 0 order: 2 order: 3 order: 1 }"),
    Layer("Normalize", "norm_param { across_spatial: false channel_shared: false scale_filler { value: 20 } }"),
    Layer("Normalize", "norm_param { across_spatial: true channel_shared: true scale_filler { value: 3 } }"),
    Layer("PriorBox", "prior_box_param { min_size: 3 max_size: 5 aspect_ratio: 2 variance: 0.1 }", (IMAGE, PICTURE)),
    Layer("Reorg", "reorg_param { stride: 2 }"),
    Layer("Reorg", "reorg_param { stride: 2 reverse: true }", ((2, 8, 3, 5),)),
    Layer("PassThrough", "pass_through_param { block_height: 2 block_width: 4 }"),
    Layer("ShuffleChannel", "shuffle_channel_param { group: 3 }"),
    Layer("Reverse", "reverse_param { axis: 1 axis: -1 }"),
    Layer("Pad", "pad_param { pads: 1 pads: 0 pads: 2 pads: 3 axes: 2 axes: 3 value: 0.5 }"),
    Layer("Pad", "pad_param { pads: 1 pads: 2 pads: 2 pads: 3 axes: 2 axes: 3 mode: REFLECT }"),
    Layer("Pad", "pad_param { pads: 1 pads: 2 pads: 2 pads: 3 axes: 2 axes: 3 mode: EDGE }"),
    Layer("Pad", "pad_param { pads: 1 pads: 2 pads: 2 pads: 3 axes: 2 axes: 3 mode: WRAP }", opset=19),
    Layer("Upsample", "upsample_param { scale: 2 }"),
    Layer("Upsample", "upsample_param { stride_h: 2 stride_w: 3 scale: 0.5 }"),
    Layer("Upsample", "upsample_param { scale: 2 }", ((2, 3, 4, 4), (2, 3, 4, 4)), fill="mask"),
    Layer("Unpooling", "unpooling_param { kernel_size: 2 stride: 2 }", ((2, 3, 4, 4), (2, 3, 4, 4)), fill="mask"),
    Layer("Unpooling", "unpooling_param { kernel_size: 3 stride: 2 pad: 1 }"),
    Layer("Interp", "interp_param { zoom_factor: 2 }"),
    Layer("Interp", "interp_param { height: 5 width: 13 pad_beg: -1 pad_end: -1 }"),
    Layer("Interp", "interp_param { shrink_factor: 2 }", opset=16),
    Layer("MatMul", "", ((2, 3, 4, 5), (2, 3, 5, 6))),
    Layer("MatMul", "matmul_param { transpose_a: true transpose_b: true }", ((2, 5, 4), (2, 6, 5))),
    Layer("Mvm", "", ((3, 4, 5), (3, 5))),
    Layer("Gemm", "gemm_param { alpha: 0.5 beta: 2 trans_b: true }", ((4, 5), (3, 5), (4, 3))),
    Layer("Gemm", "gemm_param { trans_a: true }", ((5, 4), (5, 3))),
    Layer("Equal", "", ((2, 3, 4), (2, 3, 4)), fill="few"),
    Layer("Greater", "", ((2, 3, 4), (2, 3, 4)), fill="few"),
    Layer("Axpy", "", ((2, 6), IMAGE, IMAGE)),
    Layer("ReduceSum", "reduce_param { axes: 1 axes: -1 }"),
    Layer("ReduceMean", "reduce_param { axes: 2 axes: 3 keepdims: false }"),
    Layer("ReduceMax", "reduce_param { axes: 1 }"),
    Layer("ReduceMin", "reduce_param { axes: 1 }", opset=17),
    Layer("ReduceProd", "reduce_param { axes: 1 axes: 2 }"),
    Layer("ArgMin", "argmin_param { axis: 1 }", fill="few"),
    Layer("ArgMin", "argmin_param { axis: 1 select_last_index: true keepdims: false }", fill="few"),
    Layer("Sort", "sort_param { axis: 1 }", fill="few", tops=2),
    Layer("Sort", "sort_param { descending: true }", fill="few", tops=2),
    Layer("TopK", "topk_param { k: 3 axis: 1 largest: false }", fill="few", tops=2),
    Layer("GroupNorm", "group_norm_param { group_num: 3 }"),
    Layer("LayerNormalization", "layer_normalization_param { axis: 2 scale_filler { type: 'gaussian' std: 1 } }"),
    Layer("LayerNormalization", "", ((4, 5), (5,))),
    Layer("ROIPooling", "roi_pooling_param { pooled_h: 3 pooled_w: 2 spatial_scale: 0.125 }", REGIONS, fill="regions"),
    Layer(
        "ROIAlign",
        "roi_align_param { pooled_h: 3 pooled_w: 2 spatial_scale: 0.125 sampling_ratio: 2 roi_end_mode: 1 }",
        REGIONS,
        fill="regions",
    ),
    Layer("ROIAlign", "roi_align_param { pooled_h: 2 pooled_w: 2 spatial_scale: 0.125 }", REGIONS, fill="regions"),
    Layer("Nms", "nms_param { iou_threshold: 0.3 score_threshold: -0.5 }", BOXES, fill="boxes"),
    Layer("Nms", "nms_param { iou_threshold: 0.5 max_output_boxes_per_class: 2 }", BOXES, fill="boxes"),
    Layer("GRU", "recurrent_param { num_output: 5 weight_filler { type: 'xavier' } }", STREAMS, fill="cont"),
    Layer("LSTMUnit", "", ((1, 2, 3), (1, 2, 12), (1, 2)), tops=2),
    Layer("Pooling", "pooling_param { pool: STOCHASTIC kernel_size: 3 stride: 2 }", fill="positive"),
    Layer("SPP", "spp_param { pyramid_height: 1 pool: MAX }"),
]  # fmt: skip

WITHOUT_FORM = {
    "Data", "HDF5Data", "ImageData", "Input", "MemoryData",  # inputs of the file
    "Accuracy", "ContrastiveLoss", "DetectionOutput", "EuclideanLoss", "HDF5Output", "HingeLoss", "InfogainLoss",
    "YoloDetectionOutput", "Yolov3DetectionOutput",
    "MultinomialLogisticLoss", "SigmoidCrossEntropyLoss", "Silence", "SmoothL1Loss", "SoftmaxWithLoss",  # it ends there
    "PSROIPooling", "Proposal", "Python",  # nothing in ONNX
}  # fmt: skip


def built(layer):
    torch.manual_seed(11)
    net = Net(parse_message(layer.text(), "NetParameter", "test"))
    feeds = layer.feeds()
    feed(net, feeds)
    return net, feeds


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_onnxruntime_computes_what_the_engine_computes(layer):
    net, feeds = built(layer)
    exported = float_onnx(net, opset=layer.opset)
    onnx.checker.check_model(exported.model, full_check=True)
    net.forward()
    compare(net, exported, run(exported.model, feeds))
    if not exported.model.graph.input or not has_open_batch(exported.model):
        return
    more = {name: np.concatenate([value, value[:1]]) for name, value in feeds.items()}
    fresh, _ = built(layer)  # recurrent layers would go on from their last state
    feed(fresh, more)
    fresh.forward()
    compare(fresh, exported, run(exported.model, more))


def test_every_type_has_a_form_or_a_reason():
    missing = {name for name in layer_types() if onnx_form_of(layer_class(name)) is None}
    # Names with blanks are what an option turns a type into; quantized nets are exported from their float net.
    internal = {name for name in missing if " " in name or name in INSERTED_TYPES}
    assert missing - internal == WITHOUT_FORM
