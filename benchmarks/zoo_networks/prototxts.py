"""Caffe nets: the prototxts of ``benchmarks/zoo_prototxts`` with seeded weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import amct.caffe
from amct.caffe.model import run_net
from amct_caffe import caffe
from zoo_networks.data import images
from zoo_networks.network import CALIBRATION, TEST, Network

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx

    from amct.pipeline.quantized_model import QuantizedModel

FOLDER = Path(__file__).parent.parent / "zoo_prototxts"
PIXEL_SPREAD = 60  # of pixels from 0 to 255: what follows the first layer is of size 1
CAFFE_MEAN = np.array([104, 117, 123], np.float32)[:, None, None]


class CaffeSubject:
    """A prototxt with weights made for it; a batch is a dict of arrays by input name."""

    def __init__(self, prototxt: Path, folder: Path) -> None:
        self.prototxt, self.weights = prototxt, folder / "net.caffemodel"
        net = seeded(prototxt)
        net.save(str(self.weights))
        self.shapes = {name: tuple(net.blobs[name].data.shape) for name in net.inputs}
        self.calibration = [self._batch(100 + index) for index in range(CALIBRATION)]
        self.test = [self._batch(900 + index) for index in range(TEST)]
        self._float = caffe.Net(str(prototxt), str(self.weights), caffe.TEST)
        self._simulation: Any = None

    def _batch(self, seed: int) -> dict[str, np.ndarray]:
        return inputs(self.shapes, seed)

    def quantize(self, config: Any = None, **options: Any) -> QuantizedModel:  # noqa: ANN401
        """Quantize it, with the defaults unless something else is given."""
        return amct.caffe.quantize(self.prototxt, self.weights, self.calibration, config, **options)

    def file_reference(self, batch: Mapping[str, np.ndarray], names: Sequence[str]) -> list[np.ndarray]:
        """The blobs that the file outputs: it ends in front of layers without an ONNX form."""
        outputs = self._float.forward(**batch)
        blobs = self._float.blobs
        return [np.array(outputs[name] if name in outputs else blobs[name].data) for name in names]

    def simulated_outputs(
        self, quantized: QuantizedModel, batch: Mapping[str, np.ndarray], names: Sequence[str]
    ) -> list[np.ndarray]:
        """The same blobs of the simulation."""
        if self._simulation is None or self._simulation[0] is not quantized:  # the remedies make several
            self._simulation = quantized, quantized.prepared.caffe_model(quantized.qparams).build()
        net = self._simulation[1]
        outputs = run_net(net, batch)
        return [np.array(outputs[name] if name in outputs else net.blob(name).data) for name in names]

    def float_onnx(self, quantized: QuantizedModel) -> onnx.ModelProto:
        """The float net as ONNX, batch norms folded."""
        return quantized.prepared.float_model(None)

    def feeds(self, batch: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
        """The batch itself."""
        return {name: batch[name] for name in names}


def inputs(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """A batch for inputs of these shapes."""
    rng = np.random.default_rng(seed)
    batch = {}
    for name, shape in shapes.items():
        if len(shape) == 4 and shape[1] == 3:
            batch[name] = 255 * images(shape[0], shape[2:], seed, normalized=False)[:, ::-1] - CAFFE_MEAN
        elif len(shape) == 4 and shape[1] == 1:
            batch[name] = images(shape[0], shape[2:], seed, normalized=False)[:, :1]
        elif name == "cont":  # a sequence begins with the first word; otherwise a net goes on with the one before
            batch[name] = np.arange(shape[0]).reshape(-1, 1) > np.zeros(shape)
        elif name == "im_info":
            batch[name] = np.tile([*_picture_size(shapes), 1], (shape[0], 1))
        elif name == "rois":
            batch[name] = _boxes(rng, shape[0], _picture_size(shapes)).reshape(shape)
        else:
            batch[name] = rng.normal(size=shape)
    return {name: np.ascontiguousarray(array, np.float32) for name, array in batch.items()}


def _picture_size(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    return next((shape[2], shape[3]) for shape in shapes.values() if len(shape) == 4 and shape[1] == 3)


def _boxes(rng: np.random.Generator, count: int, size: tuple[int, int]) -> np.ndarray:
    height, width = size
    corner = rng.uniform(0, 0.5, (count, 2)) * (width, height)
    other = corner + rng.uniform(0.2, 0.5, (count, 2)) * (width, height)
    return np.concatenate([np.zeros((count, 1)), corner, other], 1)


def seeded(prototxt: Path) -> caffe.Net:
    """The net with He-scaled random weights, and batch norms that know the statistics of the data."""
    rng = np.random.default_rng(0)
    net = caffe.Net(str(prototxt), caffe.TEST)
    kinds = dict(zip(net._layer_names, [layer.type for layer in net.layers], strict=True))
    for name, blobs in net.params.items():
        fill(kinds[name], [blob.data for blob in blobs], rng)
        if set(net.bottom_names[name]) & set(net.inputs):
            blobs[0].data[...] /= PIXEL_SPREAD
    learn_statistics(net, kinds)
    return net


def fill(kind: str, blobs: Sequence[np.ndarray], rng: np.random.Generator) -> None:
    """Random weights for a layer; constants of layers that are not learned by weights stay."""
    if kind in {"BatchNorm", "PReLU", "Normalize"}:
        return
    for index, blob in enumerate(blobs):
        if kind == "BN" and index >= 2:
            blob[...] = index - 2  # mean 0, variance 1
        elif blob.ndim >= 2 and blob[0].size > 1 and kind not in {"Scale", "BN"}:
            blob[...] = rng.normal(size=blob.shape) * (2 / blob[0].size) ** 0.5
        elif kind in {"Scale", "BN"} and index == 0:
            blob[...] = np.exp(0.3 * rng.normal(size=blob.shape))
        else:
            blob[...] = 0.1 * rng.normal(size=blob.shape)


def learn_statistics(net: caffe.Net, kinds: Mapping[str, str]) -> None:
    """Set mean and variance of each BatchNorm, from the first to the last, to those of what enters it."""
    shapes = {name: tuple(net.blobs[name].data.shape) for name in net.inputs}
    norms = [name for name in net._layer_names if kinds[name] == "BatchNorm" and name in net.params]
    for name in norms:  # until its turn a batch norm passes its input on
        for blob, value in zip(net.params[name], (0, 1, 1), strict=True):
            blob.data[...] = value
    at: str | None = None
    for name in norms:
        net.forward(start=at, end=name, **(inputs(shapes, 1) if at is None else {}))
        values = net.blobs[net.top_names[name][0]].data
        axes = tuple(axis for axis in range(values.ndim) if axis != 1)
        mean, variance = values.mean(axes), values.var(axes) + 1e-5
        net.params[name][0].data[...], net.params[name][1].data[...] = mean, variance
        at = name


def networks() -> list[Network]:
    """One per prototxt."""
    return [Network(f"caffe/{path.stem}", partial(CaffeSubject, path)) for path in sorted(FOLDER.glob("*.prototxt"))]
