"""Observes intermediate tensors (outputs of operations that are not quantized layers) for the fast QDQ placement.

The exporter requests tensors by ONNX name; the float ONNX model maps those names to tensors of the captured program. To
find them in the user's own forward (any batch size, no captured program), program and model are run once on the example
input: the call site of a tensor is the operation of the model whose result has the same bits as the program's tensor.
Inputs and outputs of layers are observed by hooks on the layers.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from amct.errors import ModelError
from amct.numerics.observer import TensorRangeObserver
from amct.pytorch.call_sites import CallSite, OperationWatch, all_values
from amct.pytorch.capture.cached_trace import tensor_fingerprint
from amct.pytorch.capture.functional_layers import layer_module, layer_name, named_tensors
from amct.pytorch.capture.program import plain_name, quiet_exporters
from amct.pytorch.capture.program_graph import call_name
from amct.pytorch.inputs import example_inputs
from amct.pytorch.layer_hooks import hidden_from_modes, on_input, run_in_context
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import nn
    from torch.export import ExportedProgram
    from torch.utils.hooks import RemovableHandle

    from amct.calibration.streams import ObservedTensors
    from amct.numerics.observer import TensorObserver
    from amct.pipeline.preparation import LayerInput
    from amct.pytorch.capture.cached_trace import TensorFingerprint
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.layer_hooks import Arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TensorWatch:
    """Where the requested tensors are computed, each with its ONNX name.

    Attributes:
        inputs: Inputs of the model, by position.
        layers: Outputs of layers, by layer and number of its call in the forward.
        operations: Results of other operations, by call site.
        callees: Modules that the modules of these operations call directly.
        missing: Tensors whose call site was not found; they get no factors.
        given: The layer inputs that are observed per channel.
    """

    inputs: Mapping[int, str] = field(default_factory=dict)
    layers: Mapping[tuple[str, int], str] = field(default_factory=dict)
    operations: Mapping[CallSite, str] = field(default_factory=dict)
    callees: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()
    given: Sequence[LayerInput] = ()

    def observers(self) -> dict[str, TensorObserver]:
        """A new observer of its range for each tensor, which is cheap because there are many tensors."""
        names = (*self.inputs.values(), *self.layers.values(), *self.operations.values())
        channels = {given.tensor: given.observer() for given in self.given}
        return {**channels, **{name: TensorRangeObserver() for name in names}}

    def attach(self, model: nn.Module, observed: ObservedTensors) -> AttachedTensorWatch:
        """Add hooks to the model so that a session, say, observes these tensors in every forward."""
        return AttachedTensorWatch(self, model, observed)


class AttachedTensorWatch:
    """A ``TensorWatch`` hooked into one model."""

    def __init__(self, watch: TensorWatch, model: nn.Module, observed: ObservedTensors) -> None:
        self._watch = watch
        self._model = model
        self._observed = observed
        self._handles: list[RemovableHandle] = []
        self._calls: Counter[str] = Counter()
        for layer in dict.fromkeys(layer for layer, _ in watch.layers):
            self._handles.append(layer_module(model, layer).register_forward_hook(self._output_hook(layer)))
        for each in watch.given:
            seen = partial(observed.observe_tensor, each.tensor)
            self._handles.append(on_input(layer_module(model, each.layer), seen))
        self._operations: OperationWatch | None = None
        if watch.operations:
            wanted = frozenset((site.path, site.operation) for site in watch.operations)
            self._operations = OperationWatch(model, self._observe, wanted, watch.callees)

    @contextmanager
    def forward(self, arguments: Arguments) -> Iterator[None]:
        """The context of one forward pass."""
        self._calls.clear()
        if self._watch.inputs:
            self._observe_inputs(arguments)
        if self._operations is None:
            yield
            return
        with self._operations.forward():
            yield

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._operations is not None:
            self._operations.detach()
            self._operations = None  # it refers to this object: the model would be freed late, with its weights

    def _output_hook(self, layer: str) -> Callable[..., None]:
        def show(_: nn.Module, __: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            name = self._watch.layers.get((layer, self._calls[layer]))
            self._calls[layer] += 1
            if name is not None and isinstance(tensor, torch.Tensor):
                with hidden_from_modes():
                    self._observed.observe_tensor(name, all_values(tensor))

        return show

    def _observe(self, site: CallSite, tensor: Tensor) -> None:
        name = self._watch.operations.get(site)
        if name is not None:
            self._observed.observe_tensor(name, all_values(tensor))
            return
        for other, wanted in self._watch.operations.items():
            same = (site.path, site.call, site.operation) == (other.path, other.call, other.operation)
            if same and site.function != other.function:
                self._observed.give_up_tensor(wanted, "another batch executes other operations")

    def _observe_inputs(self, arguments: Arguments) -> None:
        args, kwargs = arguments
        try:
            tensors = example_inputs(self._model, (*args, kwargs)).tensors()
        except ModelError:  # the forward itself raises the error
            return
        for index, name in self._watch.inputs.items():
            if index < len(tensors):
                self._observed.observe_tensor(name, tensors[index])


# -- finding the call sites --------------------------------------------------------------------------------------------


def find_tensors(
    traced: Traced, fusions: Mapping[str, str], wanted: Collection[str], onnx_names: Mapping[str, str]
) -> TensorWatch:
    """Find where the forward computes the tensors with these ONNX names.

    Args:
        traced: the model, with a program.
        fusions: the batch norm folded into each layer, whose output the layer now computes.
        wanted: ONNX names.
        onnx_names: the ONNX name of each activation of the topology (``TracedOnnx.tensors``).
    """
    assert traced.graph is not None
    hooked: dict[str, tuple[str, int]] = {}
    for head, facts in traced.layers.items():
        norm = fusions.get(head, head)
        # A norm that is not exact still has its activation, so that its own output is observed.
        is_gone = norm != head and traced.graph[norm].attributes["exact"]
        for call in range(facts.calls):
            hooked[call_name(head, call)] = (head, call)
            hooked[call_name(norm, call)] = (head if is_gone else norm, call)
    inputs: dict[int, str] = {}
    layers: dict[tuple[str, int], str] = {}
    others: dict[str, str] = {}  # by the tensor of the topology
    missing: list[str] = []
    named: dict[str, list[str]] = {}
    for tensor, onnx_name in onnx_names.items():
        named.setdefault(onnx_name, []).append(tensor)
    for name in wanted:
        aliases = named.get(name, [])
        producers = [traced.graph.producer(tensor) for tensor in aliases]
        given = next((tensor for tensor in aliases if tensor in traced.graph.inputs), None)
        layer = next((hooked[node.name] for node in producers if node and node.name in hooked), None)
        if given is not None:
            inputs[traced.graph.inputs.index(given)] = name
        elif layer is not None:
            layers[layer] = name
        elif aliases:
            others[aliases[0]] = name
        else:
            missing.append(name)
    operations, callees, lost = _find_operations(traced, others) if others else ({}, frozenset(), [])
    missing += lost
    if missing:
        logger.debug("not observed, because their call sites in the forward were not found: %s", ", ".join(missing))
    return TensorWatch(inputs=inputs, layers=layers, operations=operations, callees=callees, missing=tuple(missing))


def _find_operations(traced: Traced, names: Mapping[str, str]) -> tuple[dict[CallSite, str], frozenset[str], list[str]]:
    """Return the call sites of tensors, the modules that their modules call, and the tensors without a call site."""
    fingerprints = _program_fingerprints(traced, names)
    shapes = {(each[0], each[1]) for each in fingerprints.values()}
    sites: dict[TensorFingerprint, list[CallSite]] = {}

    def note(site: CallSite, tensor: Tensor) -> None:
        if (tuple(tensor.shape), tensor.dtype) in shapes:
            sites.setdefault(tensor_fingerprint(tensor), []).append(site)

    model = copy_model(traced.model)
    watch = OperationWatch(model, note, None)
    run_in_context(model, lambda _: watch.forward())
    args, kwargs = _cloned(traced)
    with torch.random.fork_rng(devices=[]):
        model(*args, **kwargs)
    watch.detach()  # its hooks refer to the copy, which would be freed late
    del model.forward  # this too
    assert traced.graph is not None
    found: dict[CallSite, str] = {}
    lost: list[str] = []
    for tensor, name in names.items():
        producer = traced.graph.producer(tensor)
        module = producer.attributes["module"] if producer is not None else None
        candidates = sites.get(fingerprints[tensor], []) if tensor in fingerprints else []
        free = [site for site in candidates if site not in found]
        # Equal bits at several call sites (an identity, a view): prefer the one in the same module, else the first.
        best = next((site for site in free if site.path == module), free[0] if free else None)
        if best is None:
            lost.append(name)
        else:
            found[best] = name
    return found, frozenset(name for site in found for name in watch.callees(site.path)), lost


def _program_fingerprints(traced: Traced, wanted: Collection[str]) -> dict[str, TensorFingerprint]:
    """Fingerprints of tensors that the captured program computes on the example input."""
    assert traced.program is not None
    fingerprints: dict[str, TensorFingerprint] = {}

    class _FingerprintInterpreter(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401  any value of the program
            value = super().run_node(n)
            if n.name in wanted and isinstance(value, torch.Tensor):
                fingerprints[n.name] = tensor_fingerprint(value)
            return value

    with quiet_exporters(), torch.random.fork_rng(devices=[]), torch.no_grad():
        given = _program_inputs(traced.program, traced.model, pytree.tree_leaves(_cloned(traced)))
        _FingerprintInterpreter(traced.program.graph_module).run(*given, enable_io_processing=False)
    return fingerprints


def _program_inputs(program: ExportedProgram, model: nn.Module, leaves: Sequence[Any]) -> list[Any]:
    """What the graph of a program takes: parameters, copies of the buffers, which it may write to, and the inputs.

    Parameters and buffers are those of the model, whose values may be others than those that were captured.
    """
    remaining = iter(leaves)
    current = named_tensors(model)
    given: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            given.append(next(remaining))
            continue
        name = str(spec.target)
        captured = program.state_dict[name] if name in program.state_dict else program.constants[name]
        stored = current.get(layer_name(plain_name(name)), captured)
        given.append(stored.clone() if spec.kind is not InputKind.PARAMETER and isinstance(stored, Tensor) else stored)
    return given


def _cloned(traced: Traced) -> Arguments:
    """A copy of the example input: the forward may write to its inputs."""
    arguments: Arguments = pytree.tree_map_only(
        torch.Tensor, torch.Tensor.clone, (traced.inputs.args, traced.inputs.kwargs)
    )
    return arguments
