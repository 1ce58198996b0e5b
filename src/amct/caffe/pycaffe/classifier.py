"""``caffe.Classifier``: classifies images of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from amct.caffe.pycaffe import io
from amct.caffe.pycaffe.net import Net
from amct.caffe.pycaffe.runtime import TEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Picture: TypeAlias = npt.NDArray[np.floating]  # height, width, channels


class Classifier(Net):
    """Resizes images to ``image_dims``, crops them to the net's input and averages over the crops.

    Args:
        model_file: The prototxt.
        pretrained_file: The caffemodel.
        image_dims: Height and width of images before cropping; the net's input size by default.
        mean: Mean to subtract, per channel or as an image.
        input_scale: Factor applied after the mean is subtracted.
        raw_scale: Factor applied before that (255 for images of 0..1).
        channel_swap: Order of the channels, (2, 1, 0) for nets that expect BGR.
    """

    def __init__(
        self,
        model_file: str,
        pretrained_file: str,
        image_dims: Sequence[int] | None = None,
        mean: Picture | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        name = self.inputs[0]
        self.transformer = make_transformer(self, mean, input_scale, raw_scale, channel_swap)
        self.crop_dims = np.array(self.blobs[name].shape[2:])
        self.image_dims = image_dims if image_dims is not None else self.crop_dims

    def predict(self, inputs: Sequence[Picture], oversample: bool = True) -> npt.NDArray[np.float32]:
        """The net's first output for each image (height, width, channels).

        Args:
            inputs: The images.
            oversample: Average over four corners, the centre and their mirror images; else only the centre.
        """
        height, width = int(self.image_dims[0]), int(self.image_dims[1])
        scaled = np.zeros((len(inputs), height, width, inputs[0].shape[2]), np.float32)
        for index, picture in enumerate(inputs):
            scaled[index] = io.resize_image(picture, (height, width))
        if oversample:
            crops = io.oversample(scaled, self.crop_dims)
        else:
            top, left = ((np.array([height, width]) - self.crop_dims) / 2).astype(int)
            crops = scaled[:, top : top + self.crop_dims[0], left : left + self.crop_dims[1], :]
        name = self.inputs[0]
        batch = np.stack([self.transformer.preprocess(name, crop) for crop in crops])
        predictions = self.forward_all(None, **{name: batch})[self.outputs[0]]
        if oversample:
            predictions = predictions.reshape(len(predictions) // 10, 10, -1).mean(1)
        return predictions


def make_transformer(
    net: Net,
    mean: Picture | None,
    input_scale: float | None,
    raw_scale: float | None,
    channel_swap: Sequence[int] | None,
) -> io.Transformer:
    """A transformer for the net's first input, from images (height, width, channels)."""
    name = net.inputs[0]
    transformer = io.Transformer({name: net.blobs[name].shape})
    transformer.set_transpose(name, (2, 0, 1))
    if mean is not None:
        transformer.set_mean(name, mean)
    if input_scale is not None:
        transformer.set_input_scale(name, input_scale)
    if raw_scale is not None:
        transformer.set_raw_scale(name, raw_scale)
    if channel_swap is not None:
        transformer.set_channel_swap(name, channel_swap)
    return transformer
