"""Traces a model: its quantizable layers, the layers that stay float with reasons, and its graph.

``trace`` captures the model with torch.export. A model that cannot be captured (data-dependent control flow) is
observed by forward hooks instead: its layers are found and can be calibrated, but not exported to ONNX.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from amct.config.layers import LayerInfo, LayerList
from amct.errors import ArgumentTypeError, ExportError, ModelError
from amct.model import Graph, LayerFacts, Skip
from amct.printable import counted
from amct.pytorch.capture.functional_layers import functional_layers, layer_module, named_layers
from amct.pytorch.capture.layer_types import (
    LAYER_TYPES,
    layer_facts,
    own_weight,
    quantizable_type,
    setting_problem,
    type_name,
)
from amct.pytorch.capture.program import CaptureFailure, capture, uncompiled
from amct.pytorch.capture.program_graph import ProgramGraph, program_graph
from amct.pytorch.capture.program_reader import Program, read_program, side_effects, unused_modules
from amct.pytorch.inputs import ExampleInputs, IoNames, IoOptions, argument_tensors, example_inputs
from amct.pytorch.user_model import as_array, copy_model, refuse_operators, unwrap, with_plain_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch.export import ExportedProgram

    from amct.pytorch.layer_hooks import Arguments

logger = logging.getLogger(__name__)

FUNCTION = "function"
"""The type of a functional call in a list of layers."""

_QUANTIZED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")

_FIXED_AXIS = re.compile(r"marked L\['(\w+)'\].*?size\(\)\[(\d+)\] as dynamic but .*? constant \((\d+)\)")
"""torch.export's message for a dynamic axis whose size the model fixes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """The result of tracing a model.

    Attributes:
        model: The user's own model, unwrapped, or the copy that has its functional layers; never changed. If torch
            computes some of its weights in each forward (weight_norm), a copy that has their values.
        inputs: The example input as arguments of a call.
        names: Requested names of inputs and outputs, and the dynamic axes.
        layers: The quantizable layers by name, in execution order.
        skips: Layers of quantizable types, functional calls and other weighted modules that stay float, with reasons.
        module_types: The type name of every module, in the order of ``named_modules``.
        graph: The topology; None when the model could not be captured.
        program: The captured program; None when the model could not be captured.
        failure: Why there is no program.
    """

    model: nn.Module
    inputs: ExampleInputs
    names: IoNames
    layers: Mapping[str, LayerFacts]
    skips: tuple[Skip, ...]
    module_types: Mapping[str, str]
    graph: Graph | None = None
    program: ExportedProgram | None = None
    failure: CaptureFailure | None = None

    def onnx_inputs(self, arguments: Arguments) -> dict[str, NDArray[Any]]:
        """The tensors among the arguments of a forward, by the input names of the ONNX files."""
        return {name: as_array(each) for name, each in zip(self.names.inputs, argument_tensors(arguments), strict=True)}

    def config_layers(self) -> LayerList:
        """The modules in the form that the config package reads."""
        reasons = {**_used_by_functional_layers(self.model), **{skip.layer: skip.reason for skip in self.skips}}
        modules = [_config_layer(name, kind, self, reasons) for name, kind in self.module_types.items() if name]
        others = [name for name in reasons if name not in self.module_types]
        return LayerList([*modules, *(LayerInfo(name=name, type=FUNCTION, refusal=reasons[name]) for name in others)])


@dataclass(frozen=True)
class Call:
    """One call of a layer: the shapes of its input tensors, and any difference from the plain layer."""

    input_shapes: tuple[tuple[int | None, ...], ...] = ()
    problem: str | None = None
    packed: bool = False


def trace(
    model: nn.Module,
    input_data: object,
    *,
    io: IoOptions | None = None,
    repeated_layers: bool = False,
    any_batch: bool = False,
) -> Traced:
    """Find the layers and the topology of a model from one example input; the model is not changed.

    Args:
        model: any nn.Module, in train or eval mode; DistributedDataParallel is unwrapped.
        input_data: a tensor, a tuple of arguments, a dict of keyword arguments, or a tuple that ends in such a dict.
        io: names of the inputs and outputs in an exported file, and dynamic axes.
        repeated_layers: whether a module that is called several times in one forward is a layer.
        any_batch: without dynamic axes in ``io``, whether the first axis is dynamic where the model lets it vary.

    Raises:
        ArgumentTypeError: ``model`` is not an nn.Module.
        ModelError: the model contains AMCT operators, cannot be copied, or fails on the example input.
        ExportError: names or axes are malformed, or the model fixes the size of a dynamic axis.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    model = unwrap(model)
    refuse_operators(model)
    refuse_modules(model)
    model = with_plain_weights(model)
    inputs = example_inputs(model, input_data)
    names = IoNames.checked(io or IoOptions(), inputs.names)
    names, program = _captured(model, inputs, names, any_batch=any_batch and (io is None or io.dynamic_axes is None))
    found: dict[str, Any]
    if isinstance(program, CaptureFailure):
        calls = _watch_calls(model, inputs)
        found = {"failure": _failure(program, calls)}
        logger.warning(
            "%s cannot be captured as a program; its layers are found by forward hooks: %s",
            type(model).__name__,
            found["failure"],
        )
        layers, skips = _quantizable_layers(model, calls, repeated_layers)
    else:
        for effect in side_effects(program):
            logger.warning("%s: %s", type(model).__name__, effect)
        read = read_program(program)
        topology = program_graph(read, model)
        found = {"graph": topology.graph, "program": program}
        layers, skips = _quantizable_layers(
            model, _calls_in(topology, unused_modules(program)), repeated_layers, _in_branches(read)
        )
        skips = (*skips, *_functional_skips(topology, model))
    return Traced(
        model=model,
        inputs=inputs,
        names=names,
        layers=layers,
        skips=(*skips, *_other_skips(model)),
        module_types={name: type_name(module) for name, module in named_layers(model)},
        **found,
    )


def _captured(
    model: nn.Module, inputs: ExampleInputs, names: IoNames, *, any_batch: bool
) -> tuple[IoNames, ExportedProgram | CaptureFailure]:
    """The program, and the names with the axes that are dynamic in it."""
    wished = names.with_open_batch(inputs.tensors()) if any_batch else None
    open_axes = (wished or names).open_axes(inputs.tensors())
    program = capture(model, inputs, open_axes)
    if wished is not None and not isinstance(program, CaptureFailure) and _has_branches(program):
        return names, capture(model, inputs)  # with a fixed size, torch may refuse: the layers inside are then found
    if open_axes is None or not isinstance(program, CaptureFailure):
        return wished or names, program
    with_fixed_sizes = capture(model, inputs)
    if isinstance(with_fixed_sizes, CaptureFailure):
        return names, with_fixed_sizes
    fixed = [f'axis {axis} of "{name}" is {size}' for name, axis, size in _FIXED_AXIS.findall(program.detail)]
    if wished is not None:
        logger.info(
            "%s: the files take batches of %s only, as the model does not let their number vary: %s",
            type(model).__name__,
            counted(inputs.tensors()[0].shape[0], "sample"),
            ", ".join(fixed) or program,
        )
        return names, with_fixed_sizes
    raise ExportError(
        f"dynamic_axes: the model does not let {names.described_axes()} vary: {', '.join(fixed) or program}. "
        "Leave the axis out of dynamic_axes, or write the model so that it does not fix the size"
    )


def _has_branches(program: ExportedProgram) -> bool:
    """Whether one of two graphs runs, depending on values (``torch.cond``)."""
    return any(getattr(node.target, "__name__", "") == "cond" for node in program.graph.nodes)


def _failure(failure: CaptureFailure, calls: Mapping[str, Sequence[Call]]) -> CaptureFailure:
    """Why a model has no program; a PackedSequence is said in plainer words."""
    packed = next((name for name, own in calls.items() if any(call.packed for call in own)), None)
    if packed is None:
        return failure
    reason = f'"{packed}" is given a PackedSequence, whose lengths are values of tensors; give it the padded tensor'
    return CaptureFailure(reason=reason, detail=failure.detail)


def _watch_calls(model: nn.Module, inputs: ExampleInputs) -> dict[str, list[Call]]:
    """Run a copy of the model once in eval mode and record the calls of its quantizable layers, in execution order.

    Raises:
        ModelError: the model fails on the example input.
    """
    duplicate = copy_model(model)
    calls: dict[str, list[Call]] = {}
    for name, module in named_layers(duplicate):
        if quantizable_type(module):
            module.register_forward_pre_hook(_noting(calls, name), with_kwargs=True)
    try:
        with torch.random.fork_rng(), torch.no_grad(), uncompiled():
            duplicate(*inputs.args, **inputs.kwargs)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} fails on the example input: {error}. Check the inputs: shapes "
            f"{[list(tensor.shape) for tensor in inputs.tensors()]}"
        ) from error
    return calls


def _noting(calls: dict[str, list[Call]], name: str) -> Callable[..., None]:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        shapes = tuple(tuple(value.shape) for value in given if isinstance(value, torch.Tensor))
        packed = any(isinstance(value, PackedSequence) for value in given)
        calls.setdefault(name, []).append(Call(input_shapes=shapes, packed=packed))

    return note


def _calls_in(found: ProgramGraph, unused: Collection[str]) -> dict[str, list[Call]]:
    """The calls of the layers in a captured program, by path."""
    reasons = dict.fromkeys(unused, "no output of the model depends on it")
    return {
        path: [Call(tuple(value.shape or () for value in call.inputs), reasons.get(path, call.problem)) for call in own]
        for path, own in found.calls.items()
    }


# -- quantizable layers ------------------------------------------------------------------------------------------------


def _quantizable_layers(
    model: nn.Module,
    calls: Mapping[str, Sequence[Call]],
    repeated_layers: bool,
    branches: Mapping[str, str] | None = None,
) -> tuple[dict[str, LayerFacts], tuple[Skip, ...]]:
    """The quantizable layers in the order of ``calls``, and the skipped ones in model order.

    ``branches`` has the operation that runs a module in one of its graphs, by the module's path.
    """
    layers: dict[str, LayerFacts] = {}
    skips: list[Skip] = []
    sharing = _sharing(model)
    used = _used_by_functional_layers(model)
    modules = {name: module for name, module in named_layers(model) if quantizable_type(module)}
    for name in [path for path in calls if path in modules] + [path for path in modules if path not in calls]:
        module = modules[name]
        if name in used and name not in calls:
            continue
        own = calls.get(name, ())
        reason = _repetition(own, repeated_layers) or _refusal(name, module, own, sharing)
        if name not in calls and branches and name in branches:
            reason = f"it is called inside {branches[name]}; only layers outside of such operations can be quantized"
        if reason:
            skips.append(Skip(name, reason))
        else:
            layers[name] = layer_facts(name, module, own[0].input_shapes, calls=len(own))
    order = {name: position for position, name in enumerate(modules)}
    return layers, tuple(sorted(skips, key=lambda skip: order[skip.layer]))


def _in_branches(program: Program) -> dict[str, str]:
    """The modules whose parameters an operation with graphs of its own (``torch.cond``) reads."""
    operations = [operation for operation in program.operations if operation.has_graphs]
    read = ((value.parameter, operation.kind) for operation in operations for value in operation.operands)
    return {parameter.rpartition(".")[0]: kind for parameter, kind in read if parameter is not None}


def _refusal(name: str, module: nn.Module, calls: Sequence[Call], sharing: Mapping[int, Sequence[str]]) -> str | None:
    if not name:
        return "the model is this one layer; put it into a module (nn.Sequential) so that it can be exchanged"
    if not calls:
        return "it is not called in forward (a functional call may use its weight)"
    weight = own_weight(module)
    partners = [other for other in sharing.get(id(weight), ()) if other != name] if weight is not None else []
    if partners:
        return f'it shares its weight with "{partners[0]}"; a shared weight cannot be quantized'
    problems = (_input_problem(module, call) or call.problem for call in calls)
    return setting_problem(module) or next((problem for problem in problems if problem), None)


def _repetition(calls: Sequence[Call], allowed: bool) -> str | None:
    if allowed or len(calls) < 2:
        return None
    return f"it is called {len(calls)} times in one forward; only a module called once can be quantized"


def _input_problem(module: nn.Module, call: Call) -> str | None:
    kind = quantizable_type(module)
    rank = LAYER_TYPES[kind].input_rank if kind else None
    if call.packed:
        return "it is given a PackedSequence; pass a padded tensor to quantize it"
    found = len(call.input_shapes[0]) if call.input_shapes else rank
    if rank is not None and found != rank:
        return f"its input has {found} dimensions, not {rank}; an input without a batch cannot be quantized"
    return None


def _sharing(model: nn.Module) -> dict[int, list[str]]:
    """Names of the quantizable modules by the identity of their weight."""
    found: dict[int, list[str]] = {}
    for name, module in named_layers(model):
        weight = own_weight(module) if quantizable_type(module) else None
        if weight is not None:
            found.setdefault(id(weight), []).append(name)
    return found


def _functional_skips(found: ProgramGraph, model: nn.Module) -> Iterator[Skip]:
    """Weighted operations in the user's own forward; those in a torch.nn module are reported as that module."""
    reported = {skip.layer.partition("[")[0] for skip in functional_layers(model).problems}
    for operation in found.functional:
        if any(value.parameter in reported for value in operation.operands):
            continue
        owner = operation.callers[-1].path if operation.callers else ""
        if _is_torch_module(layer_module(model, owner)):
            continue
        place = f" at {operation.where}" if operation.where else ""
        weights = ", ".join(value.parameter for value in operation.operands if value.parameter) or "a computed weight"
        yield Skip(
            f"{owner}.{operation.name}" if owner else operation.name,
            f"functional call of {operation.kind}{place} with {weights}; only modules can be quantized, "
            "use the torch.nn module in its place",
        )


def _other_skips(model: nn.Module) -> Iterator[Skip]:
    """Modules of torch.nn with parameters but without a quantized form; folding reports batch norms."""
    yield from functional_layers(model).problems
    used = _used_by_functional_layers(model)
    for name, module in named_layers(model):
        if name in used:
            continue
        has_parameters = next(module.parameters(recurse=False), None) is not None
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        kind = _torch_type(module)
        if kind is not None and has_parameters and not is_norm and not quantizable_type(module):
            yield Skip(name, f"{kind.__name__} is not quantizable")


def _torch_type(module: nn.Module) -> type[nn.Module] | None:
    """The type of torch.nn that a module is or is derived from; None for modules of the user and for containers."""
    if _is_torch_module(module):
        return type(module)
    bases = (base for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules"))
    base = next((base for base in bases if base is not nn.Module), None)
    return None if base is None or base.__module__ == nn.Sequential.__module__ else base


def _is_torch_module(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules")


def _used_by_functional_layers(model: nn.Module) -> dict[str, str]:
    """The modules whose parameters are functional layers, with these layers in the form of a reason."""
    found: dict[str, list[str]] = {}
    for name, source in functional_layers(model).sources.items():
        found.setdefault(source.parameter.rpartition(".")[0], []).append(name)
    return {
        owner: f"functional calls use its parameters; name the layer {' or '.join(names)}"
        for owner, names in found.items()
    }


def _config_layer(name: str, kind: str, traced: Traced, reasons: Mapping[str, str]) -> LayerInfo:
    facts = traced.layers.get(name)
    if facts is None:
        return LayerInfo(name=name, type=kind, refusal=reasons.get(name))
    return LayerInfo(name=name, type=kind, has_bias=facts.bias, can_pack_int4=facts.can_pack)


def _is_exported(module: torch.fx.GraphModule) -> bool:
    """Whether a graph calls operators, as torch.export writes them, instead of modules and torch's functions."""
    operations = (node.target for node in module.graph.nodes if node.op == "call_function")
    return any(isinstance(target, torch._ops.OpOverload) for target in operations)


def refuse_modules(model: nn.Module) -> None:
    """Reject weights without values and names that cannot be looked up."""
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if any(torch.nn.parameter.is_lazy(parameter) for parameter in parameters):
            raise ModelError(f'"{name}" ({type(module).__name__}) has no weights yet; run the model once before')
        kind = type(module)
        if kind.__module__.startswith(_QUANTIZED_MODULES):
            raise ModelError(
                f'"{name}" ({kind.__module__}.{kind.__name__}) is already quantized; start from the float model'
            )
        if isinstance(module, torch.fx.GraphModule) and _is_exported(module):
            raise ModelError(
                "the model is a program of torch.export (ExportedProgram.module()), which has no layers any more; give "
                "the nn.Module that it was exported from"
            )
        if any(parameter.is_meta for parameter in parameters):
            raise ModelError(
                f'"{name}" ({type(module).__name__}) is on the meta device and has no values; load its weights before'
            )
        dotted = next((child for child, _ in module.named_children() if "." in child), None)
        if dotted is not None:
            raise ModelError(f'the name of module "{dotted}" in {type(module).__name__} contains a dot; rename it')
