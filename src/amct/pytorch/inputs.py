"""What goes into a forward and comes out: example and batches as its arguments, names in files, returned tensors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amct.errors import ArgumentError, ExportError, ModelError, did_you_mean
from amct.numerics.observer import is_dense
from amct.pipeline.batches import Batches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from amct.pipeline.batches import BatchInputs
    from amct.pytorch.layer_hooks import Arguments


_PICTURE_AXES, _CHANNELS = 3, (1, 3, 4)
_CONVERTED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleInputs:
    """Positional and keyword arguments of one forward call; keywords in the order of the forward's signature.

    ``names`` has a name for each tensor among the arguments: its parameter's name, with the keys of nested dicts or
    lists appended (``batch_image``).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]

    def bound(self, model: nn.Module) -> dict[str, Any]:
        """The arguments by the names of the forward's parameters."""
        return dict(inspect.signature(model.forward).bind(*self.args, **self.kwargs).arguments)

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in the order in which an exported model takes them."""
        return argument_tensors((self.args, self.kwargs))


def example_inputs(model: nn.Module, input_data: object, *, name: str = "input_data") -> ExampleInputs:
    """Convert ``input_data`` to the arguments of a call of ``model``; ``name`` is what the user calls it.

    A tensor is the only argument. A dict holds keyword arguments, unless the forward takes one dict as its argument. A
    dict at the end of a tuple holds keyword arguments (an empty one ends a tuple whose last argument is a dict).

    Raises:
        ModelError: it holds no tensor, or the forward does not accept these arguments.
    """
    args, kwargs = _split(model, input_data)
    if not argument_tensors((args, kwargs)):
        raise ModelError(
            f"{name}: expected a tensor, or a tuple or dict of tensors, got {_described(input_data)}; "
            "pass one example input of the model (torch.from_numpy turns an array into a tensor)"
            if name == "input_data"
            else f"{name}: expected batches that are tensors, arrays, or tuples or dicts of them, "
            f"got {_described(input_data)}"
        )
    odd = next((tensor for tensor in argument_tensors((args, kwargs)) if not is_dense(tensor)), None)
    if odd is not None:
        layout = "a nested tensor" if odd.is_nested else f"a tensor of layout {odd.layout}"
        raise ModelError(f"{name}: expected tensors whose values lie in a grid, got {layout}; give a dense tensor")
    problem, signature = _binding_problem(model, args, kwargs), inspect.signature(model.forward)
    if problem:
        raise ModelError(
            f"{name} does not fit {type(model).__name__}.forward{signature}: {problem}; "
            "pass a tensor, a tuple of positional arguments, or a dict of keyword arguments"
        )
    kwargs = {name: kwargs[name] for name in dict.fromkeys([*signature.parameters, *kwargs]) if name in kwargs}
    return ExampleInputs(args=args, kwargs=kwargs, names=_tensor_names(model, args, kwargs))


def argument_tensors(arguments: object) -> list[Tensor]:
    """The tensors in lists, tuples and dicts of arguments."""
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _tensor_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    signature = inspect.signature(model.forward)
    names: list[str] = []
    for parameter, value in signature.bind(*args, **kwargs).arguments.items():
        catches_keywords = signature.parameters[parameter].kind is inspect.Parameter.VAR_KEYWORD
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                keys = [str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path]
                names.append("_".join(keys if catches_keywords else [parameter, *keys]))
    return tuple(names)


def _split(model: nn.Module, data: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(data, dict):
        as_keywords = all(isinstance(key, str) for key in data) and not _binding_problem(model, (), data)
        return ((), dict(data)) if as_keywords else ((data,), {})
    if isinstance(data, (tuple, list)):
        if data and isinstance(data[-1], dict):
            positional, keywords = tuple(data[:-1]), data[-1]
            if _binding_problem(model, positional, keywords) and not _binding_problem(model, tuple(data), {}):
                return tuple(data), {}
            return positional, dict(keywords)
        return tuple(data), {}
    return (data,), {}


def _binding_problem(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[Any, Any]) -> str | None:
    """Why the forward does not accept these arguments; None if it does."""
    if not all(isinstance(key, str) for key in kwargs):
        return "keyword arguments need names that are strings"
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _described(data: object) -> str:
    if isinstance(data, (tuple, list)):
        return f"a {type(data).__name__} of {', '.join(type(item).__name__ for item in data) or 'nothing'}"
    return type(data).__name__


# -- batches of calibration data ---------------------------------------------------------------------------------------


def torch_batches(model: nn.Module, data: object, inputs: BatchInputs | None = None, *, name: str = "data") -> Batches:
    """Convert data to call arguments of one model, on the model's device; copies, since a forward may write to them.

    A tensor is one batch. The items of a tuple or list are the forward's arguments; further items that the forward does
    not take (labels) are ignored. A list of pictures, each a tensor of three axes, is one argument, as for detectors. A
    dict holds keyword arguments. NumPy arrays are taken as tensors, and numbers of another floating type than the
    model's parameters are converted to it.
    """
    if isinstance(data, dict):
        raise ArgumentError(f"{name}: a dict is one batch of keyword arguments; put it into a list: [batch]")

    types = {each.dtype for each in model.parameters() if each.is_floating_point()}
    own = types.pop() if len(types) == 1 else None

    def convert(batch: object) -> Arguments:
        chosen = inputs(batch) if inputs is not None else _without_labels(model, _with_tensors(batch))
        example = example_inputs(model, _of_type(_with_tensors(chosen), own), name=name)
        device = next((tensor.device for tensor in model.parameters()), None)
        if any(tensor.is_meta for tensor in example.tensors()) and device != torch.device("meta"):
            raise ArgumentError(f"{name}: a tensor on the meta device has no values; give tensors with values")
        copied: Arguments = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device or tensor.device, copy=True), (example.args, example.kwargs)
        )
        return copied

    expected = "a tensor, an array, an iterable of batches or a DataLoader"
    return Batches(data, convert, single=(torch.Tensor, np.ndarray), expected=expected, name=name)


def samples_in(batch: object) -> int:
    """The size of the first dimension of the first tensor in a batch."""
    return next((tensor.shape[0] for tensor in argument_tensors(batch) if tensor.ndim > 0), 1)


def _with_tensors(batch: object) -> object:
    """A batch with tensors in place of arrays of numbers."""
    if isinstance(batch, torch.Tensor):
        return batch

    def converted(array: NDArray[Any]) -> object:
        native = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
        return torch.from_numpy(native) if array.dtype.kind in "biuf" else array

    return pytree.tree_map_only(np.ndarray, converted, batch)


def _of_type(batch: object, own: torch.dtype | None) -> object:
    """A batch whose floating tensors have the type of the model's parameters, if all of these have one."""

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to(own) if tensor.is_floating_point() and tensor.dtype in _CONVERTED else tensor

    return batch if own is None else pytree.tree_map_only(torch.Tensor, converted, batch)


def _is_list_of_pictures(model: nn.Module, batch: object) -> bool:
    """Whether a batch is a list of pictures, and the forward needs one argument: ``forward(images, targets=None)``."""
    if not isinstance(batch, list) or not batch:
        return False
    if not all(
        isinstance(each, torch.Tensor) and each.ndim == _PICTURE_AXES and each.is_floating_point() for each in batch
    ):
        return False
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return len(needed) == 1 and len({each.shape[0] for each in batch}) == 1 and batch[0].shape[0] in _CHANNELS


def _without_labels(model: nn.Module, batch: object) -> object:
    """A batch without trailing items that the forward does not take or that look like labels."""
    if _is_list_of_pictures(model, batch):
        return (batch,)
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or isinstance(batch[-1], dict):
        return batch
    signature = inspect.signature(model.forward)
    for count in range(len(batch), 0, -1):
        try:
            bound = signature.bind(*batch[:count])
        except TypeError:
            continue
        last = signature.parameters[list(bound.arguments)[-1]]
        if count > 1 and _is_label(batch[0], batch[count - 1]) and last.default is not inspect.Parameter.empty:
            count -= 1
        return tuple(batch[:count])
    return batch  # the error message lists the forward's parameters


def _is_label(first: object, last: object) -> bool:
    """Whether ``last`` holds integers, one per sample of ``first``."""
    if not isinstance(first, torch.Tensor) or not isinstance(last, torch.Tensor) or first.ndim == 0:
        return False
    return not last.is_floating_point() and last.ndim == 1 and last.shape[0] == first.shape[0]


# -- names -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class IoOptions:
    """Input and output names and dynamic axes of the exported models, as in ``torch.onnx.export``.

    Attributes:
        input_names: Names of the input tensors, in order; further inputs keep the names of the forward.
        output_names: Names of the outputs, in order.
        dynamic_axes: Axes with dynamic size, ``{name: {axis: label}}`` or ``{name: [axis, ...]}``; None: in this
            package's own functions the first axis of all inputs, if they share its size and the model lets it vary,
            else none; ``{}``: none.
    """

    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: Mapping[str, Any] | None = None


BATCH_LABEL = "batch"
"""The dynamic size of the first axis of all inputs."""


@dataclass(frozen=True, kw_only=True)
class IoNames:
    """Names of all inputs and of the outputs that the user named; ``axes`` has the labels of dynamic axes by tensor."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: Mapping[str, Mapping[int, str]]

    @classmethod
    def checked(cls, options: IoOptions, inputs: tuple[str, ...]) -> IoNames:
        """Check the user's options; ``inputs`` are the parameter names of the forward.

        Raises:
            ExportError: wrong types, a repeated name, more names than inputs, or an axis of an unknown tensor.
        """
        given_inputs = _checked_names("input_names", options.input_names)
        given_outputs = _checked_names("output_names", options.output_names)
        if len(given_inputs) > len(inputs):
            raise ExportError(
                f"input_names: the model has {len(inputs)} input tensors ({', '.join(inputs)}), "
                f"got {len(given_inputs)} names ({', '.join(given_inputs)})"
            )
        names = (*given_inputs, *(name for name in inputs[len(given_inputs) :]))
        repeated = sorted({name for name in (*names, *given_outputs) if (*names, *given_outputs).count(name) > 1})
        if repeated:
            raise ExportError(
                f'input_names and output_names: "{repeated[0]}" is the name of two tensors; use different names'
            )
        return cls(inputs=names, outputs=given_outputs, axes=_checked_axes(options.dynamic_axes, names, given_outputs))

    def open_axes(self, tensors: Sequence[Tensor]) -> list[Mapping[int, str]] | None:
        """For each input tensor its dynamic axes with their labels; None if there are none.

        Raises:
            ExportError: a tensor has no such axis.
        """
        found: list[Mapping[int, str]] = []
        for name, tensor in zip(self.inputs, tensors, strict=True):
            axes = self.axes.get(name, {})
            beyond = [axis for axis in axes if axis >= tensor.ndim]
            if beyond:
                raise ExportError(
                    f'dynamic_axes["{name}"]: axis {beyond[0]} does not exist, the example input has {tensor.ndim} axes'
                )
            found.append(axes)
        return found if any(found) else None

    def with_open_batch(self, tensors: Sequence[Tensor]) -> IoNames | None:
        """The same names, with a dynamic first axis of all inputs; None if they do not share its size."""
        sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
        if len(sizes) != 1 or 0 in sizes:
            return None
        return replace(self, axes={name: {0: BATCH_LABEL} for name in self.inputs})

    def described_axes(self) -> str:
        """The dynamic axes as text for a message."""
        return ", ".join(f'"{name}" {sorted(axes)}' for name, axes in self.axes.items() if name in self.inputs)


def check_chosen_names(names: IoNames, outputs: int, stored: Collection[str]) -> None:
    """Check the names of inputs and outputs against the number of outputs and the names of parameters.

    Raises:
        ExportError: more names than outputs, or a name that is already a parameter's.
    """
    if len(names.outputs) > outputs:
        raise ExportError(
            f"output_names: the model has {outputs} outputs, got {len(names.outputs)} names "
            f"({', '.join(names.outputs)})"
        )
    clashes = {*names.inputs, *names.outputs}.intersection(stored)
    if clashes:
        raise ExportError(
            f'"{min(clashes)}" is the name of a parameter of the model; choose another input or output name'
        )


def _checked_names(argument: str, names: object) -> tuple[str, ...]:
    if names is None:
        return ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise ExportError(f"{argument}: expected a list of strings, got {names!r}")
    return tuple(names)


def _checked_axes(dynamic_axes: object, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> dict[str, dict[int, str]]:
    if dynamic_axes is None:
        return {}
    expected = "dynamic_axes: expected {name: {axis: label}} or {name: [axis, ...]}, axes counted from 0"
    if not isinstance(dynamic_axes, Mapping):
        raise ExportError(f"{expected}, got {type(dynamic_axes).__name__}")
    found: dict[str, dict[int, str]] = {}
    for name, axes in dynamic_axes.items():
        if not isinstance(name, str):
            raise ExportError(f"{expected}, got the key {name!r}")
        if name not in inputs and name not in outputs:
            raise ExportError(
                f'dynamic_axes: no input or output is named "{name}".{did_you_mean(name, (*inputs, *outputs))} '
                f"Inputs: {', '.join(inputs)}; outputs are known by output_names"
            )
        found[name] = _checked_labels(name, axes, expected)
    return found


def _checked_labels(name: str, axes: object, expected: str) -> dict[int, str]:
    labels: dict[Any, Any]
    if isinstance(axes, (list, tuple)):
        labels = {axis: f"{name}_dynamic_axes_{number}" for number, axis in enumerate(axes, start=1)}
    elif isinstance(axes, Mapping):
        labels = dict(axes)
    else:
        raise ExportError(f'{expected}; for "{name}" got {axes!r}')
    for axis, label in labels.items():
        is_axis = isinstance(axis, int) and not isinstance(axis, bool) and axis >= 0
        if not is_axis or not isinstance(label, str) or not label:
            raise ExportError(f'{expected}; for "{name}" got {axis!r}: {label!r}')
    return labels


# -- what a forward returns --------------------------------------------------------------------------------------------

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type, torch.SymInt, torch.SymFloat, torch.SymBool,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class UnknownResultError(Exception):
    """The forward returns an object whose tensors are not known."""


def return_tensors(model: nn.Module) -> None:
    """Replace the forward of a copied model by one that returns a list of tensors.

    torch.export knows tensors in tuples, lists and dicts. Data classes are opened here, and numbers and other
    constants, which an exported file cannot return, are left out.

    It raises ``UnknownResultError`` if a result is of another class.
    """
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> list[torch.Tensor]:  # noqa: ANN401  whatever the user's forward takes
        result = original(*args, **kwargs)
        for leaf in _leaves(result):
            if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
                raise UnknownResultError(_message(leaf, model))
        return list(tensors_in(result))

    model.forward = forward


def tensors_in(result: object) -> Iterator[torch.Tensor]:
    """The tensors of what a forward returns, in the order of the outputs of a file."""
    return (leaf for leaf in _leaves(result) if isinstance(leaf, torch.Tensor))


def with_tensors(result: object, tensors: Iterator[torch.Tensor]) -> object:
    """What a forward returns, with other tensors in the order of ``tensors_in``."""

    def replaced(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return next(tensors)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        made = copy.copy(leaf)
        for field in dataclasses.fields(leaf):  # one after the other, also where the class is frozen
            object.__setattr__(made, field.name, with_tensors(getattr(leaf, field.name), tensors))
        return made

    return pytree.tree_map(replaced, result)


def _leaves(result: object) -> Iterator[object]:
    for leaf in pytree.tree_leaves(result):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf


def _message(result: object, model: nn.Module) -> str:
    found = f"the forward returns an object of class {type(result).__name__}"
    if getattr(getattr(model, "config", None), "use_cache", False):
        return f"{found}; set use_cache=False (model.config.use_cache = False), so that it returns no cache"
    return f"{found}; return tensors, or tuples, lists, dicts or data classes of them"
