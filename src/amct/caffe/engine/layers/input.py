"""Input and Parameter: tops that come from the user or from a learnable parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from amct.caffe.engine.blob import Blob, Shape


@register("Input")
class Input(Layer):
    """Tops that the user fills. The shape in the prototxt is only the initial one."""

    bottom_count = (0, 0)
    top_count = (1, None)
    is_filled_by_user = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the shapes: none, one for all tops, or one per top."""
        shapes = [tuple(shape.dim) for shape in self.parameter.input_param.shape]
        tops = len(self.top_blobs)
        if len(shapes) not in (0, 1, tops):
            raise self.error(
                f"Must specify 'shape' once, once per top blob, or not at all: {tops} tops vs. {len(shapes)} shapes"
            )
        for blob, shape in zip(self.top_blobs, shapes * tops if len(shapes) == 1 else shapes, strict=False):
            self.context.check_size(shape, f'a top of layer "{self.name}"')
            blob.set_shape(shape)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes that the user gave the blobs."""
        return [blob.shape for blob in self.top_blobs]

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Do nothing: the user has set the values."""


@register("Parameter")
class Parameter(Layer):
    """A top that holds a learnable parameter."""

    bottom_count = (0, 0)
    returns_views = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the parameter."""
        self.add_parameter(tuple(self.parameter.parameter_param.shape.dim))

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The parameter's shape."""
        return [self.blobs[0].shape]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A view of the parameter."""
        return [parameters[0].view_as(parameters[0])]
