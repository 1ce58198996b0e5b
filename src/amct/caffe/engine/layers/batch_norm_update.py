"""A BatchNorm whose statistics are refreshed by plain forwards, after its neighbours' weights were clustered."""

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
    """Where the refreshed statistics of a layer are written: a caffemodel of this one layer."""
    return Path(folder) / f"{quote(layer, safe='')}.caffemodel"


@register("BatchNorm with refreshed statistics")
class UpdatingBatchNorm(BatchNorm):
    """Runs ``update_iterations`` forwards on the statistics of each batch, collects them, and writes them out."""

    def setup(self, bottoms: list[Shape]) -> None:
        """As any BatchNorm, on the statistics of the batch."""
        super().setup(bottoms)
        options = self.parameter.batch_norm_param
        self.iterations: int = options.update_iterations
        self.use_global = False
        self.done = 0

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Run, count, and write the statistics after the last of these forwards."""
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
