"""A blob: values and gradients of one shape, torch tensors inside and NumPy arrays outside.

In pycaffe ``blob.data`` is a writable, C-contiguous float32 array, and an array taken once shows the results of later
forward passes. The engine keeps results in the memory layout that the kernel wrote. Both are possible:

* a ``Buffer`` owns one tensor in any layout (channels_last after a convolution);
* ``array()`` converts it to C order on first use and returns a view of that memory;
* while such a view is alive, ``write`` copies results into it; otherwise ``write`` keeps the new tensor.

Memory is allocated on first use. It is that of the device on which nets run, a process-wide setting in a context
variable (``set_mode_cpu``, ``set_mode_gpu``, ``set_device``).
"""

from __future__ import annotations

import logging
import math
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

import torch

from amct.errors import ArgumentError, ArgumentTypeError, ModelError
from amct.memory import gibibytes, number_from_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from amct.caffe.engine.messages import ProtoMessage

    FloatArray: TypeAlias = npt.NDArray[np.float32]

logger = logging.getLogger(__name__)


_CPU = torch.device("cpu")
_device: ContextVar[torch.device] = ContextVar("amct_caffe_device", default=_CPU)
_index: ContextVar[int] = ContextVar("amct_caffe_device_index", default=0)


def set_mode_cpu() -> None:
    """Run nets on the CPU."""
    _device.set(_CPU)


def set_mode_gpu() -> None:
    """Run nets on a CUDA device; if there is none, log a warning and stay on the CPU."""
    if torch.cuda.is_available():
        _device.set(torch.device("cuda", _index.get()))
    else:
        logger.warning("set_mode_gpu: this machine has no usable CUDA device, nets keep running on the CPU")
        _device.set(_CPU)


def set_device(index: int) -> None:
    """Choose which CUDA device GPU mode uses.

    Raises:
        ArgumentError: There is no such device.
    """
    count = torch.cuda.device_count()
    if index < 0 or (count and index >= count):
        raise ArgumentError(f"set_device: this machine has {count} CUDA device(s), got index {index}")
    _index.set(index)
    if _device.get().type == "cuda":
        _device.set(torch.device("cuda", index))


def current_device() -> torch.device:
    """The torch device on which nets run."""
    return _device.get()


_GPU = 1


def choose_device(*, gpu: bool, device: int | None, parameter: ProtoMessage | None = None) -> None:
    """Set CPU or GPU mode.

    A missing ``solver_mode`` means GPU in Caffe; here it means a GPU if there is one, without a warning otherwise.

    Args:
        gpu: The user requests a GPU.
        device: The user requests this device.
        parameter: The solver, if there is one.

    Raises:
        ArgumentError: There is no such device.
    """
    asked = gpu or device is not None
    by_solver = parameter is not None and parameter.solver_mode == _GPU
    if by_solver and parameter is not None and not parameter.HasField("solver_mode"):
        by_solver = torch.cuda.is_available()
    if not asked and not by_solver:
        set_mode_cpu()
        return
    if device is None:
        device = 0 if parameter is None else parameter.device_id
    set_device(device)
    set_mode_gpu()


Shape: TypeAlias = tuple[int, ...]
MAX_AXES = 32
MAX_ELEMENTS = 2**31 - 1
LEGACY_AXES = 4
BYTES_PER_VALUE = 4


class Buffer:
    """One array, shared by all blobs that use it (shared parameters, nets that share weights)."""

    __slots__ = ("_initial", "_released", "_tensor", "_views", "epoch")

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None
        self._views: list[weakref.ref[FloatArray]] = []
        self._initial: Callable[[], torch.Tensor] | None = None
        self._released = False
        self.epoch = 0
        """Increased by each write and each array handed out.

        A value derived from the content may be cached while the epoch is unchanged and the buffer is not exposed.
        """

    @property
    def is_exposed(self) -> bool:
        """Whether a NumPy view of the buffer is alive, so that it can be read or written at any time."""
        if not self._views:
            return False
        self._views = [view for view in self._views if view() is not None]
        return bool(self._views)

    @property
    def is_allocated(self) -> bool:
        """Whether memory is allocated."""
        return self._tensor is not None

    def initialize_by(self, initial: Callable[[], torch.Tensor]) -> None:
        """Set the function that computes the content on first read; replaces any content."""
        self._tensor, self._initial = None, initial
        self.epoch += 1

    def read(self, shape: Shape) -> torch.Tensor:
        """The tensor in its current memory layout; zeros (or the initial value) if nothing was written yet.

        Raises:
            ArgumentError: The engine freed the memory (``keep_blobs=False``).
        """
        tensor = self._tensor
        if tensor is not None and tensor.device == current_device() and tensor.shape == shape:
            return tensor
        if tensor is None:
            if self._released:
                raise ArgumentError(
                    "this blob was freed after its last use, because the net was made with keep_blobs=False; name it "
                    "in keep_blobs, or in forward(blobs=[...]), to keep it"
                )
            tensor = self._initial() if self._initial is not None else torch.zeros(shape)
            self._tensor, self._initial = tensor, None
        if tensor.device != (device := current_device()):
            # Memory with live NumPy views stays on the CPU and is copied for the reader.
            tensor = tensor.to(device)
            if not self.is_exposed:
                self._tensor = tensor
        return tensor if tensor.shape == shape else tensor.reshape(shape)

    def write(self, value: torch.Tensor) -> None:
        """Set the content to ``value``, copying it into the memory of live NumPy views if there are any.

        The tensor is kept, not copied: the caller must not change it afterwards.
        """
        current = self._tensor
        if self._views and current is not None and self.is_exposed and _capacity(current) >= value.numel():
            target = _reuse(current, tuple(value.shape))
            if target.data_ptr() != value.data_ptr() or target.stride() != value.stride():
                # .data: autograd graphs of the old content keep using this memory, as Caffe's do.
                target.data.copy_(value)
            self._tensor = target
        else:
            self._tensor = value
        self._initial = None
        self._released = False
        self.epoch += 1

    def array(self, shape: Shape) -> FloatArray:
        """A writable C-contiguous float32 view of the content, valid until the buffer grows."""
        tensor = self._tensor if self._tensor is not None else self.read(shape)
        if tensor.shape != shape:
            tensor = tensor.reshape(shape)
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype != torch.float32:
            tensor = tensor.to("cpu", torch.float32).contiguous()
        self._tensor = tensor
        self.epoch += 1
        alive = [(reference, view) for reference in self._views if (view := reference()) is not None]
        self._views = [reference for reference, _ in alive]
        for _, view in alive:
            if view.shape == shape and view.ctypes.data == tensor.data_ptr():
                return view
        array: FloatArray = tensor.detach().numpy()
        self._views.append(weakref.ref(array))
        return array

    def resize(self, shape: Shape) -> None:
        """Change the shape, keeping memory and content when they suffice, as Caffe does."""
        if self._tensor is None:
            self._initial = None
            return
        count = math.prod(shape)
        if _capacity(self._tensor) >= count:
            self._tensor = _reuse(self._tensor, shape)
        else:
            self._tensor = None

    def release(self, *, readable: bool = False) -> None:
        """Free the memory; until the next write reading is an error, or with ``readable`` gives zeros."""
        if not (self._views and self.is_exposed):
            self._tensor = None
            self._released = not readable


def _capacity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes()) // tensor.element_size() - int(tensor.storage_offset())


def _reuse(tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The memory of ``tensor``, from its start, as a C-contiguous tensor of another shape."""
    if tensor.shape == shape and tensor.is_contiguous():
        return tensor
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    contiguous = tensor.contiguous()
    if _capacity(contiguous) < math.prod(shape):
        contiguous = torch.zeros(math.prod(shape))
    return contiguous.detach().as_strided(shape, tuple(reversed(strides)), contiguous.storage_offset())


class Blob:
    """Values (``data``) and gradients (``diff``) of one shape; the Blob of pycaffe."""

    __slots__ = ("_diff", "_shape", "_values")

    def __init__(self, *shape: int) -> None:
        self._shape: Shape = ()
        self._values = Buffer()
        self._diff: Buffer | None = None
        if shape:
            self.set_shape(shape)

    # ------------------------------------------------------------------ pycaffe's interface

    @property
    def data(self) -> FloatArray:
        """The values: a writable float32 view in C order."""
        return self._values.array(self._shape)

    @property
    def diff(self) -> FloatArray:
        """The gradients: a writable float32 view in C order."""
        return self.gradients.array(self._shape)

    @property
    def shape(self) -> Shape:
        """The size of each axis."""
        return self._shape

    @property
    def count(self) -> int:
        """The number of values."""
        return math.prod(self._shape)

    @property
    def num(self) -> int:
        """Axis 0 of the old four-axis view."""
        return self._legacy_axis(0)

    @property
    def channels(self) -> int:
        """Axis 1 of the old four-axis view."""
        return self._legacy_axis(1)

    @property
    def height(self) -> int:
        """Axis 2 of the old four-axis view."""
        return self._legacy_axis(2)

    @property
    def width(self) -> int:
        """Axis 3 of the old four-axis view."""
        return self._legacy_axis(3)

    def reshape(self, *shape: int, **unexpected: object) -> None:
        """Change the shape; layers that read the blob adapt at the next forward pass (or ``Net.reshape``)."""
        if unexpected:
            raise RuntimeError("Blob.reshape takes no kwargs")
        for size in shape:
            if isinstance(size, bool) or not hasattr(size, "__index__"):
                raise ArgumentTypeError(f"Blob.reshape takes whole numbers, one per axis, got {size!r}")
        self.set_shape(tuple(int(size) for size in shape))

    # ------------------------------------------------------------------ interface for the engine

    @property
    def values(self) -> Buffer:
        """The buffer behind ``data``."""
        return self._values

    @property
    def gradients(self) -> Buffer:
        """The buffer behind ``diff``."""
        if self._diff is None:
            self._diff = Buffer()
        return self._diff

    @property
    def tensor(self) -> torch.Tensor:
        """The values as a tensor, in any memory layout."""
        return self._values.read(self._shape)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradients as a tensor."""
        return self.gradients.read(self._shape)

    def set_tensor(self, value: torch.Tensor) -> None:
        """Set the content and the shape to those of ``value``."""
        shape = value.shape
        if shape != self._shape:
            if self._diff is not None:
                self._diff.resize(tuple(shape))
            self._shape = tuple(shape)
        self._values.write(value)

    def set_gradient(self, value: torch.Tensor) -> None:
        """Set the gradients to ``value``."""
        self.gradients.write(value)

    def set_shape(self, shape: Sequence[int]) -> None:
        """Change the shape, keeping the content if the memory suffices."""
        new = tuple(shape)
        if new == self._shape:
            return
        check_shape(new)
        self._values.resize(new)
        if self._diff is not None:
            self._diff.resize(new)
        self._shape = new

    def share_values(self, owner: Blob) -> None:
        """Share the values of ``owner``."""
        self._values = owner.values

    def share_gradients(self, owner: Blob) -> None:
        """Share the gradients of ``owner``."""
        self._diff = owner.gradients

    def legacy_shape(self) -> Shape:
        """The shape as four axes, padded with ones in front: num, channels, height, width of old files."""
        return (1,) * (LEGACY_AXES - len(self._shape)) + self._shape

    def _legacy_axis(self, index: int) -> int:
        if len(self._shape) > LEGACY_AXES:
            raise ArgumentError(
                f"num, channels, height and width need a blob of at most 4 axes, this one has {len(self._shape)}"
                f" {self._shape}: use shape"
            )
        return (self._shape + (1,) * LEGACY_AXES)[index]

    def __repr__(self) -> str:
        return f"Blob{self._shape}"


def check_shape(shape: Shape) -> None:
    """Check the shape by Caffe's limits: number of axes, no negative sizes, at most 2^31-1 values.

    Raises:
        ArgumentError: The shape exceeds a limit.
    """
    if len(shape) > MAX_AXES:
        raise ArgumentError(f"a blob has at most {MAX_AXES} axes, got {len(shape)}")
    if any(size < 0 for size in shape):
        raise ArgumentError(f"the size of a blob cannot be negative, got {shape}")
    if math.prod(shape) > MAX_ELEMENTS:
        raise ArgumentError(f"blob size exceeds 2^31-1 values: {shape}")


#: Environment variable that raises the limit of one blob, in bytes.
LIMIT_VARIABLE = "AMCT_CAFFE_MAX_BLOB_BYTES"
DEFAULT_LIMIT = 2 * 2**30


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
        if count * BYTES_PER_VALUE > limit:
            raise ModelError(
                f"{what} would have shape {shape}, {gibibytes(count * BYTES_PER_VALUE)}; the limit is "
                f"{gibibytes(limit)}. If this size is intended, set {LIMIT_VARIABLE} to a larger number of bytes."
            )

    return check
