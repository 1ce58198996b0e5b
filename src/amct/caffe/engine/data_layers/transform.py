"""``transform_param``: crop, mirror, subtract the mean, scale, as Caffe's data layers do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amct.data.mean import read_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from amct.caffe.engine.messages import ProtoMessage
    from amct.errors import ModelError

_PICTURE_AXES = 3


class Transformation:
    """Converts (channels, height, width) arrays to one float32 batch.

    Each image is cropped (TRAIN: at a random position, TEST: in the centre), the mean is subtracted (a mean file is
    cropped at the same position), the result is scaled and, with ``mirror``, mirrored with probability 1/2, in both
    phases.

    Args:
        parameter: The TransformationParameter.
        training: Whether the layer runs in the TRAIN phase.
        seed: The random seed; only used if ``needs_random``.
        error: Creates an error that names the layer.

    Raises:
        ModelError: The settings contradict each other.
        FileError, ParseError: The mean file cannot be read.
    """

    def __init__(
        self, parameter: ProtoMessage, *, training: bool, seed: int, error: Callable[[str], ModelError]
    ) -> None:
        if parameter.HasField("mean_file") and parameter.mean_value:
            raise error("Cannot specify mean_file and mean_value at the same time")
        if parameter.force_color and parameter.force_gray:
            raise error("cannot set both force_color and force_gray")
        self.crop_size: int = parameter.crop_size
        self.color = True if parameter.force_color else False if parameter.force_gray else None
        self._mirror: bool = parameter.mirror
        self._scale = np.float32(parameter.scale)
        self._random_crop = training and self.crop_size > 0
        self._mean = read_mean(parameter.mean_file) if parameter.HasField("mean_file") else None
        if self._mean is not None and self._mean.ndim != _PICTURE_AXES:
            raise error(f"mean_file {parameter.mean_file} must hold an image (3 axes), its shape is {self._mean.shape}")
        self._mean_values = np.array(parameter.mean_value, np.float32)
        self._random = np.random.default_rng(seed)
        self._error = error

    @staticmethod
    def needs_random(parameter: ProtoMessage, *, training: bool) -> bool:
        """Whether random numbers are used."""
        return bool(parameter.mirror or (training and parameter.crop_size))

    def output_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The shape of one image after the transformation.

        Raises:
            ModelError: Crop or mean do not fit it.
        """
        channels, height, width = shape
        self._check(channels, height, width)
        return (channels, self.crop_size, self.crop_size) if self.crop_size else (channels, height, width)

    def batch(self, pictures: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        """Transform the images of one batch.

        Raises:
            ModelError: An image has another shape than the first, or crop or mean do not fit.
        """
        shape = self.output_shape(pictures[0].shape)
        result = np.empty((len(pictures), *shape), np.float32)
        for index, picture in enumerate(pictures):
            if self.output_shape(picture.shape) != shape:
                raise self._error(
                    f"picture {index} of a batch has shape {tuple(picture.shape)}, the first one "
                    f"{tuple(pictures[0].shape)}: all pictures of one batch must have one shape. Resize them, set "
                    "crop_size, or use batch_size: 1"
                )
            result[index] = self._one(picture)
        if self._mean_values.size:
            result -= self._mean_values.reshape(1, -1, 1, 1)
        if self._scale != 1:
            result *= self._scale
        return result

    def _one(self, picture: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Crop, subtract the mean image, mirror; mean values and scale are applied to the whole batch."""
        mirrored = self._mirror and bool(self._random.integers(2))
        mean = self._mean
        if self.crop_size:
            top, left = (self._offset(length) for length in picture.shape[1:])
            window = (slice(None), slice(top, top + self.crop_size), slice(left, left + self.crop_size))
            picture = picture[window]
            mean = None if mean is None else mean[window]
        if mean is not None:
            picture = picture.astype(np.float32) - mean
        return picture[:, :, ::-1] if mirrored else picture

    def _offset(self, length: int) -> int:
        spare = length - self.crop_size
        return int(self._random.integers(spare + 1)) if self._random_crop else spare // 2

    def _check(self, channels: int, height: int, width: int) -> None:
        if self.crop_size > min(height, width):
            raise self._error(f"crop_size {self.crop_size} is larger than the picture, {height} x {width}")
        if self._mean is not None and self._mean.shape != (channels, height, width):
            raise self._error(
                f"the mean file has shape {self._mean.shape}, the data {(channels, height, width)}: they must be equal"
            )
        if self._mean_values.size not in (0, 1, channels):
            raise self._error(
                f"Specify either 1 mean_value or as many as channels: {channels}; got {self._mean_values.size}"
            )
