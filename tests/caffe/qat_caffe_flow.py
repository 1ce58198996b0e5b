"""A small net that learns scikit-learn's digits, and the guide's flow of retraining, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import amct_caffe as amct
from amct.caffe import pycaffe as caffe
from amct.data.lmdb import write_lmdb

TRAIN_IMAGES, BATCH = 1200, 100

DATA = """
layer {{ name: "data" type: "Data" top: "data" top: "label" include {{ phase: TRAIN }}
  transform_param {{ scale: 0.0625 }}
  data_param {{ source: "{folder}/train" batch_size: {batch} backend: LMDB }} }}
layer {{ name: "data" type: "Data" top: "data" top: "label" include {{ phase: TEST }}
  transform_param {{ scale: 0.0625 }}
  data_param {{ source: "{folder}/test" batch_size: {batch} backend: LMDB }} }}
"""
LOSS = """
layer { name: "accuracy" type: "Accuracy" bottom: "fc" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""
BODY = """
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "bn1" type: "BatchNorm" bottom: "conv1" top: "conv1" batch_norm_param { moving_average_fraction: 0.9 } }
layer { name: "scale1" type: "Scale" bottom: "conv1" top: "conv1" scale_param { bias_term: true } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
  pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "conv2" type: "Convolution" bottom: "pool1" top: "conv2"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
layer { name: "sum" type: "Eltwise" bottom: "pool1" bottom: "conv2" top: "sum" }
layer { name: "relu2" type: "ReLU" bottom: "sum" top: "sum" }
layer { name: "fc" type: "InnerProduct" bottom: "sum" top: "fc"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
"""
SOLVER = """net: "{net}" base_lr: {rate} momentum: 0.9 weight_decay: 0.0005 lr_policy: "fixed" random_seed: 3
max_iter: {iterations} snapshot: {snapshot} snapshot_prefix: "{prefix}"
test_iter: 2 test_interval: {interval} test_initialization: false
"""


def write_digits(folder: Path) -> None:
    """Two LMDBs of 8x8 digits with values 0 to 16."""
    data = load_digits()
    images = data.images[:, None].astype(np.uint8)
    labels = [int(each) for each in data.target]
    write_lmdb(folder / "train", zip(images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES], strict=True))
    write_lmdb(folder / "test", zip(images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:], strict=True))


@dataclass
class Retraining:
    """The paths of one run; ``data`` is the folder of the LMDBs."""

    folder: Path
    data: Path
    body: str = BODY

    @property
    def model(self) -> Path:
        return self.folder / "net.prototxt"

    @property
    def weights(self) -> Path:
        return self.folder / "net.caffemodel"

    @property
    def config(self) -> Path:
        return self.folder / "config.json"

    @property
    def record(self) -> Path:
        return self.folder / "record.txt"

    @property
    def modified(self) -> tuple[str, str]:
        return str(self.folder / "modified.prototxt"), str(self.folder / "modified.caffemodel")

    @property
    def prefix(self) -> Path:
        return self.folder / "out" / "net"

    def write_net(self, batch: int = BATCH) -> None:
        self.model.write_text(DATA.format(folder=self.data, batch=batch) + self.body + LOSS)

    def solver(self, net: object, iterations: int = 12, rate: float = 0.05, **options: object) -> str:
        """The path of a solver prototxt."""
        path = self.folder / f"solver_{Path(str(net)).stem}.prototxt"
        text = SOLVER.format(
            net=net,
            rate=rate,
            iterations=iterations,
            snapshot=options.get("snapshot", iterations),
            interval=options.get("interval", iterations),
            prefix=self.folder / options.get("prefix", "snap"),
        )
        path.write_text(text)
        return str(path)

    def train_float(self, iterations: int = 40) -> None:
        self.write_net()
        solver = caffe.SGDSolver(self.solver(self.model, iterations))
        solver.step(iterations)
        solver.net.save(str(self.weights))

    def create(self, cfg: str | None = None, change=None) -> None:
        options = ()
        if cfg is not None:
            (self.folder / "retrain.cfg").write_text(cfg)
            options = (str(self.folder / "retrain.cfg"),)
        amct.create_quant_retrain_config(str(self.config), str(self.model), str(self.weights), *options)
        if change is not None:
            self.config.write_text(change(self.config.read_text()))
        amct.create_quant_retrain_model(
            str(self.model), str(self.weights), str(self.config), *self.modified, str(self.record)
        )

    def retrain(self, iterations: int = 12, rate: float = 0.01, **options: object):
        solver = caffe.SGDSolver(self.solver(self.modified[0], iterations, rate, **options))
        solver.net.copy_from(self.modified[1])
        solver.solve()
        return solver

    def snapshot(self, iteration: int = 12, prefix: str = "snap") -> str:
        return str(self.folder / f"{prefix}_iter_{iteration}.caffemodel")

    def save(self, kind: str = "Both", **options: object) -> None:
        amct.save_quant_retrain_model(self.modified[0], self.snapshot(), kind, str(self.prefix), **options)

    def result(self, kind: str) -> caffe.Net:
        prefix = self.prefix
        return caffe.Net(f"{prefix}_{kind}_model.prototxt", f"{prefix}_{kind}_weights.caffemodel", caffe.TEST)
