"""Names of a model's inputs and outputs and their dynamic axes, as AMCT scripts pass them to an export."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct.errors import ExportError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class IoNames:
    """Names of all inputs and of the outputs that the user named; ``axes`` has the labels of dynamic axes by tensor."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: Mapping[str, Mapping[int, str]]

    @classmethod
    def checked(
        cls,
        input_names: Sequence[str] | None,
        output_names: Sequence[str] | None,
        dynamic_axes: Mapping[str, Any] | None,
        *,
        inputs: tuple[str, ...],
    ) -> IoNames:
        """Check the user's arguments; ``inputs`` are the parameter names of the forward.

        Raises:
            ExportError: wrong types, a repeated name, more names than inputs, or an axis of an unknown tensor.
        """
        given_inputs = _checked_names("input_names", input_names)
        given_outputs = _checked_names("output_names", output_names)
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
        return cls(inputs=names, outputs=given_outputs, axes=_checked_axes(dynamic_axes, names, given_outputs))

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
