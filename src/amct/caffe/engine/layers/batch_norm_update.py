"""A BatchNorm whose moving averages are recomputed by forward passes after the weights before it were clustered."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
import torch

from amct.atomic import open_write
from amct.caffe.engine.layers.batch_norm import BatchNorm
from amct.caffe.engine.messages import new_message
from amct.caffe.engine.registry import register
from amct.caffe.engine.wire import blob_parts, layer_parts
from amct.calibration import all_ranks
from amct.calibration.ranks import Meeting, fingerprint

if TYPE_CHECKING:
    import os

    from amct.caffe.engine.blob import Blob, Shape

logger = logging.getLogger(__name__)


def dump_path(folder: str | os.PathLike[str], layer: str) -> Path:
    """The caffemodel to which the recomputed statistics of one layer are written."""
    return Path(folder) / f"{quote(layer, safe='')}.caffemodel"


@register("BatchNorm with refreshed statistics")
class UpdatingBatchNorm(BatchNorm):
    """Normalizes ``update_iterations`` batches by their own statistics, then writes the moving averages to a file.

    Several processes share the batches: an average is a sum over batches, each with the weight ``fraction`` to the
    power of the number of batches after it. Each process sums up its own batches with these weights.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Set up a BatchNorm that uses batch statistics."""
        super().setup(bottoms)
        options = self.parameter.batch_norm_param
        self.total: int = options.update_iterations
        self.ranks = all_ranks()
        self.ranks.need_a_batch_each(self.total)
        self.iterations = self.ranks.share(self.total)
        self.use_global = False
        self.done = 0
        self._meeting: Meeting | None = None

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Run; write the statistics after the last of the ``update_iterations`` forward passes."""
        if self.done < self.iterations and not self.ranks.is_alone:
            self._weigh_earlier_batches()
        super().run(bottoms, tops)
        if self.done >= self.iterations:
            return
        self.done += 1
        logger.info("layer %s: statistics refreshed by %d/%d batches", self.name, self.done, self.iterations)
        if self._meeting is not None:
            self._meeting.beat(f"{self.done} of its {self.iterations} batches run for batch norms")
        if self.done == self.iterations:
            if self._meeting is not None:
                self._add_other_processes(self._meeting)
            if self.ranks.is_first:
                self._dump()
            self.use_global = True

    def _weigh_earlier_batches(self) -> None:
        """Take into account the batches of other processes between the last batch of this one and the next."""
        if self._meeting is None:
            self._meeting = Meeting(self.ranks, fingerprint(["batch norm", self.name, str(self.total)]))
        if self.done:
            self._multiply(self.fraction ** (self.ranks.size - 1))
        elif not self.ranks.is_first:
            self._multiply(0.0)  # the first process begins with the old statistics

    def _add_other_processes(self, meeting: Meeting) -> None:
        self._multiply(self.fraction ** (self.total - 1 - self.ranks.number(self.iterations - 1)))
        own = {str(index): blob.tensor.detach().cpu().numpy() for index, blob in enumerate(self.blobs)}
        everyone = meeting.exchange(own)
        for index, blob in enumerate(self.blobs):
            total = sum(arrays[str(index)].astype(np.float64) for arrays in everyone)
            blob.set_tensor(torch.as_tensor(total, dtype=blob.tensor.dtype, device=blob.tensor.device))

    def _multiply(self, factor: float) -> None:
        for blob in self.blobs:
            blob.set_tensor(blob.tensor.detach() * factor)

    def _dump(self) -> None:
        options = self.parameter.batch_norm_param
        layer = new_message("LayerParameter", name=self.name, type="BatchNorm")
        blobs = [blob_parts(blob.shape, blob.tensor.detach().cpu().contiguous().numpy()) for blob in self.blobs]
        with open_write(dump_path(options.dump_dir, self.name)) as file:
            for part in layer_parts(layer.SerializeToString(), blobs):
                file.write(part)
