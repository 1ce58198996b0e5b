"""Compares a float torch model with its quantized model, layer by layer."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amct.errors import ArgumentTypeError, ModelError
from amct.pipeline.compare import measure
from amct.pipeline.door import ModelOutput
from amct.pipeline.quantized_model import QuantizedModel
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.capture.capturable import all_values, tensors_in
from amct.pytorch.capture.functional_layers import find_functional_layers, layer_module
from amct.pytorch.folding import fuse
from amct.pytorch.inputs import example_inputs, torch_batches
from amct.pytorch.layer_hooks import given_input
from amct.pytorch.onnx.float_onnx import float_onnx
from amct.pytorch.user_model import copy_model, unwrap
from amct.report.filling import input_key
from amct.report.measuring import OUTPUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.numerics.similarity import LayerComparison
    from amct.pipeline.batches import BatchInputs
    from amct.pipeline.door import OnTensor
    from amct.pipeline.weights import LayerWeights
    from amct.pytorch.layer_hooks import Arguments


class TorchRun:
    """One of two compared torch models.

    Args:
        model: The model.
        layers: By layer: the module whose output is compared.
        weights: By layer: its weights, whose balance factors apply to observed inputs.
        shapes_vary: Whether a shape may depend on values, so that it can differ in the other model.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, str],
        weights: Mapping[str, LayerWeights] | None = None,
        *,
        shapes_vary: bool = False,
    ) -> None:
        self.shapes_vary = shapes_vary
        self._model = model
        self._layers = layers
        self._weights = weights or {}

    @contextmanager
    def watch(
        self, *, outputs: OnTensor | None = None, inputs: OnTensor | None = None
    ) -> Iterator[Callable[[Arguments], ModelOutput]]:
        """A context whose value is a function that runs the model on one batch, without gradients."""
        with ExitStack() as stack:
            for layer, place in self._layers.items() if outputs is not None else ():
                assert outputs is not None
                hook = layer_module(self._model, place).register_forward_hook(_output_hook(layer, outputs))
                stack.callback(hook.remove)
            for layer, weights in self._weights.items() if inputs is not None else ():
                assert inputs is not None
                module = layer_module(self._model, layer)
                hook = module.register_forward_pre_hook(_input_hook(layer, weights, inputs), with_kwargs=True)
                stack.callback(hook.remove)
            yield self._run

    def _run(self, arguments: Arguments) -> ModelOutput:
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), arguments)
        with torch.no_grad():
            value = self._model(*args, **kwargs)
        return torch_output(value)


def torch_output(value: object) -> ModelOutput:
    """What a module returned, with the floating-point tensors in it."""
    floats = [(OUTPUT, leaf) for leaf in tensors_in(value) if leaf.is_floating_point()]
    return ModelOutput(value=value, tensors=floats)


def _output_hook(layer: str, outputs: OnTensor) -> Callable[..., None]:
    def hook(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401  a tensor, or a tuple of a recurrent layer
        # A copy, because an in-place ReLU would change the tensor before it is compared.
        outputs(layer, all_values(output[0] if isinstance(output, tuple) else output).clone())

    return hook


def _input_hook(layer: str, weights: LayerWeights, inputs: OnTensor) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = given_input(args, kwargs)
        if x is not None:
            inputs(input_key(layer), weights.balanced_input(all_values(x)))

    return hook


def compare(
    float_model: nn.Module,
    quantized_model: QuantizedModel | nn.Module,
    data: object,
    *,
    inputs: BatchInputs | None = None,
) -> list[LayerComparison]:
    """Run both models on data and compare the outputs of their layers, in execution order.

    A layer with a folded batch norm is compared with the output of the batch norm in the float model.

    Args:
        float_model: the original; it is not changed, and is run in eval mode.
        quantized_model: the result of ``quantize``, whose quantized layers are compared; or a simulated model, in which
            all modules with weights that have the same name in both models are compared.
        data: a tensor, an iterable of batches or a DataLoader, as for ``quantize``.
        inputs: as for ``quantize``.

    Raises:
        ArgumentTypeError: an argument is not a model.
        ArgumentError: the outputs of a layer have different shapes.
        ModelError: the models have no layer in common.
        CalibrationError: there is no data.
    """
    if not isinstance(float_model, nn.Module):
        raise ArgumentTypeError(f"float_model: expected a torch.nn.Module, got {type(float_model).__name__}")
    if not isinstance(quantized_model, (QuantizedModel, nn.Module)):
        raise ArgumentTypeError(
            "quantized_model: expected what quantize() returned or a torch.nn.Module, "
            f"got {type(quantized_model).__name__}"
        )
    reference = copy_model(unwrap(float_model), share_tensors=True)
    batches = torch_batches(reference, data, inputs)
    example = batches.first()
    if isinstance(quantized_model, QuantizedModel):
        reference = find_functional_layers(reference, example_inputs(reference, (*example[0], example[1])))
        other, folded = quantized_model.model, quantized_model.prepared.folded_layers
        layers = {name: [name, *folded.get(name, ())][-1] for name in quantized_model.layers}
    else:
        other = copy_model(unwrap(quantized_model), share_tensors=True)
        layers = _common_layers(reference, other, example)
    missing = [place for place in layers.values() if not _has(reference, place)]
    if missing or not layers:
        lacking = f'; "{missing[0]}" is not in {type(reference).__name__}' if missing else ""
        raise ModelError(f"float_model and quantized_model must have the same layer names{lacking}")
    own = {name: name for name in layers}
    measured = measure(TorchRun(reference, layers), TorchRun(other, own), batches.with_originals())
    return list(measured.layers.values())


def reference_onnx(model: nn.Module, example: NDArray[np.float32]) -> ModelProto:
    """The folded float model as ONNX, for comparison with its quantized files, which have the same tensor names.

    Raises:
        ExportError: the model cannot be captured, or uses an operation that ONNX lacks.
    """
    traced = cached_trace(model, torch.from_numpy(example), all_layers=True, stored_weights=True)
    return float_onnx(traced, fuse(traced)).model


def _has(model: nn.Module, path: str) -> bool:
    try:
        layer_module(model, path)
    except AttributeError:
        return False
    return True


def _common_layers(reference: nn.Module, other: nn.Module, arguments: Arguments) -> dict[str, str]:
    """The modules with their own weights that exist in both models and compute the same output."""
    mine = dict(other.named_modules())
    leaves = {
        name: module
        for name, module in reference.named_modules()
        if name in mine and next(module.parameters(recurse=False), None) is not None
    }
    folded = {name for name in leaves if isinstance(mine[name], nn.Identity)}
    changed = _makers(reference, leaves, folded, arguments) if folded else set()
    return {name: name for name in leaves if name not in changed}


def _makers(model: nn.Module, leaves: dict[str, nn.Module], folded: set[str], arguments: Arguments) -> set[str]:
    """The layers that feed the folded modules: folding changed their weights, so their outputs differ."""
    made: list[tuple[str, object]] = []
    makers: set[str] = set()

    def remember(name: str) -> Any:  # noqa: ANN401  a hook
        return lambda _, __, output: made.append((name, output))

    def look_up(_: nn.Module, args: tuple[Any, ...]) -> None:
        makers.update(name for name, output in made if args and output is args[0])

    handles = [module.register_forward_hook(remember(name)) for name, module in leaves.items()]
    handles += [leaves[name].register_forward_pre_hook(look_up) for name in folded]
    try:
        with torch.no_grad():
            model(*arguments[0], **arguments[1])
    finally:
        for handle in handles:
            handle.remove()
    return makers
