"""Small nets and pictures for the samples: digits for a residual net, squares for a detector made by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from amct.caffe import pycaffe as caffe
from amct.data.lmdb import write_lmdb

if TYPE_CHECKING:
    from pathlib import Path

SIDE, BATCH, TRAINING = 24, 50, 600
MEAN = "mean_value: 104 mean_value: 117 mean_value: 123"


def _convolution(name: str, bottom: str, relu: bool = True, stride: int = 1) -> str:
    text = f"""
layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{ num_output: 8
  kernel_size: 3 pad: 1 stride: {stride} bias_term: false weight_filler {{ type: "msra" }} }} }}
layer {{ name: "bn_{name}" type: "BatchNorm" bottom: "{name}" top: "{name}"
  batch_norm_param {{ moving_average_fraction: 0.9 }} }}
layer {{ name: "scale_{name}" type: "Scale" bottom: "{name}" top: "{name}" scale_param {{ bias_term: true }} }}"""
    return text + (f'\nlayer {{ name: "{name}_relu" type: "ReLU" bottom: "{name}" top: "{name}" }}' if relu else "")


BODY = (
    _convolution("conv1", "data", stride=2)
    + '\nlayer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"'
    + " pooling_param { pool: MAX kernel_size: 3 stride: 2 } }"
    + _convolution("res2a", "pool1")
    + _convolution("res2b", "res2a", relu=False)
    + """
layer { name: "res2" type: "Eltwise" bottom: "pool1" bottom: "res2b" top: "res2" }
layer { name: "res2_relu" type: "ReLU" bottom: "res2" top: "res2" }
layer { name: "fc1000" type: "InnerProduct" bottom: "res2" top: "fc1000"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
"""
)
DEPLOY = f"""name: "small"
layer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ dim: 1 dim: 3 dim: {SIDE} dim: {SIDE} }} }} }}
{BODY}
layer {{ name: "prob" type: "Softmax" bottom: "fc1000" top: "prob" }}
"""


def _data(phase: str, source: Path) -> str:
    return f"""
layer {{ name: "data" type: "Data" top: "data" top: "label" include {{ phase: {phase} }}
  transform_param {{ {MEAN} }} data_param {{ source: "{source}" batch_size: {BATCH} backend: LMDB }} }}"""


def _pictures() -> tuple[np.ndarray, np.ndarray]:
    """Digits as BGR pictures [number, 3, SIDE, SIDE]."""
    data = load_digits()
    gray = np.kron(data.images, np.ones((3, 3))) * (255 / 16)
    return np.repeat(gray[:, None], 3, axis=1).astype(np.uint8), data.target


def make_resnet50(folder: Path) -> None:
    """Fill ``pre_model`` and ``images`` of the sample, and make two LMDBs, ``train`` and ``val``."""
    pictures, labels = _pictures()
    for part, chosen in (("train", slice(TRAINING)), ("val", slice(TRAINING, TRAINING + 200))):
        write_lmdb(folder / part, zip(pictures[chosen], map(int, labels[chosen]), strict=True))
    models = folder / "pre_model"
    (models / "ResNet-50-deploy.prototxt").write_text(DEPLOY)
    loss = """
layer { name: "accuracy" type: "Accuracy" bottom: "fc1000" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc1000" bottom: "label" top: "loss" }
"""
    retrain = models / "ResNet-50_retrain.prototxt"
    retrain.write_text(_data("TRAIN", folder / "train") + _data("TEST", folder / "val") + BODY + loss)
    solver = folder / "float_solver.prototxt"
    solver.write_text(f'net: "{retrain}" base_lr: 0.05 momentum: 0.9 lr_policy: "fixed" random_seed: 2')
    running = caffe.SGDSolver(str(solver))
    running.step(40)
    running.net.save(str(models / "ResNet-50-model.caffemodel"))
    lines = []
    for index in range(TRAINING, TRAINING + 64):
        Image.fromarray(pictures[index].transpose(1, 2, 0)).save(folder / "images" / f"{index}.png")
        lines.append(f"{index}.png {labels[index]}")
    (folder / "images" / "image_label.txt").write_text("\n".join(lines) + "\n")


# ------------------------------------------------------------------ a detector of red and blue squares

CELL, SQUARE = 8, 24
DETECTOR = """name: "squares"
input: "data" input_shape { dim: 1 dim: 3 dim: 96 dim: 128 }
input: "im_info" input_shape { dim: 1 dim: 3 }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 2 kernel_size: 8 stride: 8 } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "rpn_conv" type: "Convolution" bottom: "conv1" top: "rpn"
  convolution_param { num_output: 2 kernel_size: 3 pad: 1 } }
layer { name: "rpn_relu" type: "ReLU" bottom: "rpn" top: "rpn" }
layer { name: "rpn_cls_score" type: "Convolution" bottom: "rpn" top: "rpn_cls_score"
  convolution_param { num_output: 2 kernel_size: 1 } }
layer { name: "rpn_bbox_pred" type: "Convolution" bottom: "rpn" top: "rpn_bbox_pred"
  convolution_param { num_output: 4 kernel_size: 1 } }
layer { name: "rpn_cls_prob" type: "Softmax" bottom: "rpn_cls_score" top: "rpn_cls_prob" }
layer { name: "proposal" type: "Python" bottom: "rpn_cls_prob" bottom: "rpn_bbox_pred" bottom: "im_info" top: "rois"
  python_param { module: "rpn.proposal_layer" layer: "ProposalLayer"
    param_str: "'feat_stride': 8, 'scales': (3,), 'ratios': (1,)" } }
layer { name: "roi_pool" type: "ROIPooling" bottom: "conv1" bottom: "rois" top: "pool5"
  roi_pooling_param { pooled_w: 3 pooled_h: 3 spatial_scale: 0.125 } }
layer { name: "fc6" type: "InnerProduct" bottom: "pool5" top: "fc6" inner_product_param { num_output: 2 } }
layer { name: "relu6" type: "ReLU" bottom: "fc6" top: "fc6" }
layer { name: "cls_score" type: "InnerProduct" bottom: "fc6" top: "cls_score" inner_product_param { num_output: 3 } }
layer { name: "bbox_pred" type: "InnerProduct" bottom: "fc6" top: "bbox_pred" inner_product_param { num_output: 12 } }
layer { name: "cls_prob" type: "Softmax" bottom: "cls_score" top: "cls_prob" }
"""
SQUARES = {"first": [("class_1", 1, 2), ("class_2", 8, 6)], "second": [("class_2", 3, 1), ("class_1", 10, 4)]}
"""By picture: class, column and row of the cell in the corner of a square."""


def make_faster_rcnn(folder: Path) -> None:
    """Fill ``pre_model`` and ``datasets`` in the ``src`` of the sample, in the layout of VOC2007."""
    (folder / "pre_model").mkdir()
    model = folder / "pre_model" / "faster_rcnn_test.pt"
    model.write_text(DETECTOR)
    voc = folder / "datasets" / "VOCdevkit" / "VOC2007"
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (voc / part).mkdir(parents=True)
    (voc / "ImageSets" / "Main" / "test.txt").write_text("".join(f"{name}\n" for name in SQUARES))
    for name, squares in SQUARES.items():
        _draw(voc, name, squares)


def _draw(voc: Path, name: str, squares: list[tuple[str, int, int]]) -> None:
    pixels = np.zeros((96, 128, 3), np.uint8)
    objects = ""
    for kind, column, row in squares:
        x, y = CELL * column, CELL * row
        pixels[y : y + SQUARE, x : x + SQUARE, 0 if kind == "class_1" else 2] = 255
        corners = {"xmin": x, "ymin": y, "xmax": x + SQUARE - 1, "ymax": y + SQUARE - 1}
        box = "".join(f"<{side}>{value}</{side}>" for side, value in corners.items())
        objects += f"<object><name>{kind}</name><bndbox>{box}</bndbox></object>"
    Image.fromarray(pixels).save(voc / "JPEGImages" / f"{name}.png")
    (voc / "Annotations" / f"{name}.xml").write_text(f"<annotation>{objects}</annotation>")


def set_detector(net: caffe.Net) -> None:
    """Weights with which the net finds red squares (class 1) and blue ones (class 2) of three cells."""
    for blobs in net.params.values():
        for blob in blobs:
            blob.data[...] = 0
    weights = {name: blobs[0].data for name, blobs in net.params.items()}
    biases = {name: blobs[1].data for name, blobs in net.params.items()}
    red, blue = 2, 0  # BGR; a cell of a square has 1, the background 0
    weights["conv1"][0, red], weights["conv1"][1, blue] = (1 / 64 / 255,) * 2
    biases["conv1"][...] = [122.7717 / 255, 102.9801 / 255]
    weights["rpn_conv"][0, 0], weights["rpn_conv"][1, 1] = (1 / 9,) * 2
    weights["rpn_cls_score"][1] = 10
    biases["rpn_cls_score"][1] = -5
    weights["rpn_bbox_pred"][...] = 1e-4
    weights["fc6"].reshape(2, 2, 9)[[0, 1], [0, 1]] = 1 / 9
    weights["cls_score"][1:] = [[20, -20], [-20, 20]]
    biases["cls_score"][...] = [0, -16, -16]
    weights["bbox_pred"][...] = 1e-4
