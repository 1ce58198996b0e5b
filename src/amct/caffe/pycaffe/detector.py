"""``caffe.Detector``: runs a net on windows of images (R-CNN)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import numpy as np

from amct.caffe.pycaffe import io
from amct.caffe.pycaffe.classifier import make_transformer
from amct.caffe.pycaffe.net import Net
from amct.caffe.pycaffe.runtime import TEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from amct.caffe.pycaffe.classifier import Picture

    Box = Sequence[int]  # ymin, xmin, ymax, xmax


class Detection(TypedDict):
    """The net's prediction for one window."""

    window: Box
    prediction: npt.NDArray[np.float32]
    filename: str


class Detector(Net):
    """Crops windows, warps them to the net's input and runs them.

    Arguments as for ``Classifier``; ``context_pad`` is the number of context pixels around the warped window.
    """

    def __init__(
        self,
        model_file: str,
        pretrained_file: str,
        mean: Picture | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
        context_pad: int | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        self.transformer = make_transformer(self, mean, input_scale, raw_scale, channel_swap)
        self.context_pad = context_pad or 0
        self._crop_mean = self._mean_for_padding(mean, raw_scale, channel_swap)

    def detect_windows(self, images_windows: Iterable[tuple[str, npt.NDArray[np.integer]]]) -> list[Detection]:
        """The net's first output for each window.

        Args:
            images_windows: Pairs of an image file and its windows (ymin, xmin, ymax, xmax), one per row.
        """
        pairs = [(name, np.asarray(windows)) for name, windows in images_windows]
        crops = []
        for name, windows in pairs:
            picture = io.load_image(name).astype(np.float32)
            crops += [self.crop(picture, window) for window in windows]
        blob = self.inputs[0]
        batch = np.stack([self.transformer.preprocess(blob, crop) for crop in crops])
        predictions = self.forward_all(None, **{blob: batch})[self.outputs[0]].reshape(len(crops), -1)
        found: list[Detection] = []
        for name, windows in pairs:
            for window in windows:
                found.append({"window": window, "prediction": predictions[len(found)], "filename": name})
        return found

    def crop(self, picture: Picture, window: Box) -> Picture:
        """The window of the image, with ``context_pad`` pixels of context."""
        ymin, xmin, ymax, xmax = (int(value) for value in window)
        if not self.context_pad:
            return picture[ymin:ymax, xmin:xmax]
        size = self.blobs[self.inputs[0]].width
        scale = size / (size - 2.0 * self.context_pad)
        half_height, half_width = (ymax - ymin + 1) / 2.0, (xmax - xmin + 1) / 2.0
        centre_y, centre_x = ymin + half_height, xmin + half_width
        low_y, high_y = round(centre_y - half_height * scale), round(centre_y + half_height * scale)
        low_x, high_x = round(centre_x - half_width * scale), round(centre_x + half_width * scale)
        ratio_y, ratio_x = size / (high_y - low_y + 1), size / (high_x - low_x + 1)
        pad_y, pad_x = round(max(0, -low_y) * ratio_y), round(max(0, -low_x) * ratio_x)
        inside = picture[max(0, low_y) : min(high_y, picture.shape[0]), max(0, low_x) : min(high_x, picture.shape[1])]
        height = min(round(inside.shape[0] * ratio_y), size - pad_y)
        width = min(round(inside.shape[1] * ratio_x), size - pad_x)
        result = np.broadcast_to(self._crop_mean, (size, size, picture.shape[2])).astype(np.float32)
        result[pad_y : pad_y + height, pad_x : pad_x + width] = io.resize_image(inside, (height, width))
        return result

    def _mean_for_padding(
        self, mean: Picture | None, raw_scale: float | None, channel_swap: Sequence[int] | None
    ) -> npt.NDArray[np.float32]:
        """The mean as a colour of the raw image, so that pixels outside the image become zero for the net."""
        if mean is None:
            return np.zeros(1, np.float32)
        colour = np.asarray(mean, np.float32)
        colour = colour if colour.ndim == 1 else colour.reshape(colour.shape[0], -1).mean(1)
        if channel_swap is not None:
            colour = colour[np.argsort(channel_swap)]
        return colour / np.float32(raw_scale) if raw_scale else colour
