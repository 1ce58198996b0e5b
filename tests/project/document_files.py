"""The files that the commands of the documents name: a small Caffe model, a config, a record, pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

DEPLOY = """
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 227 dim: 227 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 4 kernel_size: 7 stride: 7 weight_filler { type: "xavier" } } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1" pooling_param { pool: AVE global_pooling: true } }
layer { name: "fc" type: "InnerProduct" bottom: "pool1" top: "fc"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
"""
CONFIG = """\
batch_num: 2
common_config { ifmr_quantize { search_step: 0.05 } }
override_layer_configs { layer_name: "conv1" calibration_config { arq_quantize { channel_wise: false } } }
"""
RECORD = """\
record {
  key: "fc"
  value { scale_d: 0.02 offset_d: -3 scale_w: 0.01 offset_w: 0 }
}
"""
MINE = """\
message LayerParameter { optional MineParameter mine_param = 3000; }
message MineParameter { optional float slope = 1; }
"""
NETS = """\
from torch import nn


def build():
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), *head).eval()
"""


def make_files(folder: Path) -> None:
    """All of them into a folder."""
    from PIL import Image

    from amct_caffe import caffe
    from caffe_tree import write_bones

    (folder / "deploy.prototxt").write_text(DEPLOY)
    net = caffe.Net(str(folder / "deploy.prototxt"), caffe.TEST)
    for name in ("net.caffemodel", "weights.caffemodel"):
        net.save(str(folder / name))
    (folder / "quant.cfg").write_text(CONFIG)
    (folder / "record.txt").write_text(RECORD)
    (folder / "my_nets.py").write_text(NETS)
    (folder / "custom.proto").write_text(
        "message LayerParameter { optional MineParameter mine_param = 3000; }\n" + MINE
    )
    write_bones(folder / "caffe")
    (folder / "images").mkdir()
    generator = np.random.default_rng(0)
    for number in range(2):
        pixels = generator.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
