"""The largest allowed size of a blob and of a net: a wrong number in a prototxt is an error, no use of all memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.blob import MAX_ELEMENTS
from amct.caffe.engine.plan import build_plan
from amct.errors import ModelError
from amct.memory import LiveTensors, gibibytes, machine_bytes, number_from_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from amct.caffe.engine.blob import Blob, Shape
    from amct.caffe.engine.graph import Graph
    from amct.caffe.engine.plan import Plan, Step

#: Environment variable that raises the limit of one blob, in bytes.
LIMIT_VARIABLE = "AMCT_CAFFE_MAX_BLOB_BYTES"
DEFAULT_LIMIT = 2 * 2**30
#: Environment variable that raises the limit of all blobs of a net together, in bytes.
NET_LIMIT_VARIABLE = "AMCT_CAFFE_MAX_NET_BYTES"
_BYTES_PER_VALUE = 4
_LARGEST_REUSED_BLOCK = 32 * 2**20 - 2**13  # glibc's upper limit, less the block's header and alignment


def size_check() -> Callable[[Shape, str], None]:
    """Return a function that rejects shapes above the limit: ``check(shape, 'blob "conv1"')`` raises ModelError."""
    limit = number_from_environment(LIMIT_VARIABLE, DEFAULT_LIMIT)

    def check(shape: Shape, what: str) -> None:
        if any(size < 0 for size in shape):
            raise ModelError(
                f"{what} would have shape {shape}: a size cannot be negative. Is a kernel larger than its input?"
            )
        count = math.prod(shape)
        if count > MAX_ELEMENTS:
            raise ModelError(f"{what} would have shape {shape}: blob size exceeds INT_MAX ({MAX_ELEMENTS} values)")
        if count * _BYTES_PER_VALUE > limit:
            raise ModelError(
                f"{what} would have shape {shape}, {gibibytes(count * _BYTES_PER_VALUE)}; the limit is "
                f"{gibibytes(limit)}. If this size is intended, set {LIMIT_VARIABLE} to a larger number of bytes."
            )

    return check


def keep_freed_memory() -> None:
    """Let the C library reuse freed blocks of up to 32 MiB instead of returning them to the system.

    Otherwise every forward pass gets its blobs as new pages, which the system has to clear: up to half of the time of a
    pass. glibc raises its limits to the largest block freed so far (mallopt(3), M_MMAP_THRESHOLD), so one block that is
    never touched is enough; it takes no memory. Other C libraries ignore this.
    """
    torch.empty(_LARGEST_REUSED_BLOCK, dtype=torch.uint8)


class NetMemory:
    """Counts the parameters and blobs that a net holds at the same time during a forward pass; each step must fit.

    The limit is half of the machine's memory: gradients and copies inside of layers need as much again.
    """

    def __init__(self, plan: Plan) -> None:
        self._steps = iter(plan.steps)
        self._last: Step | None = None
        self._tensors: LiveTensors | None = None

    @property
    def is_counting(self) -> bool:
        """Whether a step of this pass was counted: then all later ones must be, too."""
        return self._tensors is not None

    def count_until(self, step: Step) -> None:
        """Count the steps up to and including one; their shapes are known.

        Raises:
            ModelError: There are too many blobs.
        """
        if self._tensors is None:
            self._tensors = LiveTensors(number_from_environment(NET_LIMIT_VARIABLE, machine_bytes() // 2))
            keep_freed_memory()
        while self._last is not step:
            if self._last is not None:
                self._tensors.free(map(id, self._last.release))
            self._last = next(self._steps)
            _add_step(self._tensors, self._last)


def _add_step(tensors: LiveTensors, step: Step) -> None:
    """Add the parameters and the tops of a step."""
    layer = step.node.layer
    for node in (step.node,) if step.chain is None else step.chain.nodes:
        # Shared parameters have one memory, which is counted once.
        tensors.make({id(blob.values): _bytes(blob) for blob in node.layer.blobs})
    is_view = step.chain is None and layer.shares_memory and bool(step.bottoms)
    tensors.make({id(blob): _bytes(blob) for blob in step.tops}, view_of=id(step.bottoms[0]) if is_view else None)
    if tensors.is_too_much:
        raise layer.error(
            f"with this layer the net holds {gibibytes(tensors.bytes)} of parameters and blobs at the same time; the "
            f"limit is {gibibytes(tensors.limit)}. Use a smaller batch; or, if this size is intended, set "
            f"{NET_LIMIT_VARIABLE} to a larger number of bytes"
        )


def check_net_memory(graph: Graph, kept: Collection[int] | None) -> None:
    """Check a forward pass over the whole net before anything is allocated.

    Args:
        graph: The net.
        kept: None if every blob is kept, else the blobs that are not freed after their last reader.

    Raises:
        ModelError: The net needs too much memory; the message names the layer at which the limit is reached.
    """
    plan = build_plan(graph, 0, len(graph.nodes) - 1, literal=True, kept=kept)
    if plan.steps:
        NetMemory(plan).count_until(plan.steps[-1])


def _bytes(blob: Blob) -> int:
    return math.prod(blob.shape) * _BYTES_PER_VALUE
