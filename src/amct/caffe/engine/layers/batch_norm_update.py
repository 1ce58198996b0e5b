"""A BatchNorm whose moving averages are recomputed by forward passes after the weights before it were clustered."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from amct.atomic import open_write
from amct.caffe.engine.layers.batch_norm import BatchNorm
from amct.caffe.engine.messages import new_message
from amct.caffe.engine.registry import register
from amct.caffe.engine.wire import blob_parts, layer_parts

if TYPE_CHECKING:
    import os

    from amct.caffe.engine.blob import Blob, Shape

logger = logging.getLogger(__name__)


def dump_path(folder: str | os.PathLike[str], layer: str) -> Path:
    """The caffemodel to which the recomputed statistics of one layer are written."""
    return Path(folder) / f"{quote(layer, safe='')}.caffemodel"


@register("BatchNorm with refreshed statistics")
class UpdatingBatchNorm(BatchNorm):
    """Normalizes ``update_iterations`` batches by their own statistics, then writes the moving averages to a file."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Set up a BatchNorm that uses batch statistics."""
        super().setup(bottoms)
        options = self.parameter.batch_norm_param
        self.iterations: int = options.update_iterations
        self.use_global = False
        self.done = 0

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Run; write the statistics after the last of the ``update_iterations`` forward passes."""
        super().run(bottoms, tops)
        if self.done >= self.iterations:
            return
        self.done += 1
        logger.info("layer %s: statistics refreshed by %d/%d batches", self.name, self.done, self.iterations)
        if self.done == self.iterations:
            self._dump()
            self.use_global = True

    def _dump(self) -> None:
        options = self.parameter.batch_norm_param
        layer = new_message("LayerParameter", name=self.name, type="BatchNorm")
        blobs = [blob_parts(blob.shape, blob.tensor.detach().cpu().contiguous().numpy()) for blob in self.blobs]
        with open_write(dump_path(options.dump_dir, self.name)) as file:
            for part in layer_parts(layer.SerializeToString(), blobs):
                file.write(part)
