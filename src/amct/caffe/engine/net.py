"""A runnable Caffe net: forward and backward over ranges of layers, loading and saving of weights.

For gradients there is one autograd graph per layer: a layer that needs them (Caffe's rule, ``decide_backward`` in
``graph.py``) runs its forward on leaf tensors and keeps the graph. Backward goes from the last layer to the first: it
reads the tops' ``diff``, asks the layer's graph for gradients and writes the bottoms' ``diff``. As in Caffe this allows
ranges of layers, diffs edited in between, gradients of single blobs and repeated backwards (parameter gradients
accumulate).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine import weights
from amct.caffe.engine.blob import current_device, size_check
from amct.caffe.engine.graph import GraphBuilder, filter_net, insert_splits
from amct.caffe.engine.layer import TEST
from amct.caffe.engine.messages import located_in, read_net_message
from amct.caffe.engine.plan import NetMemory, PassPlan, Step, build_plan, check_net_memory
from amct.caffe.engine.upgrade import upgrade_net
from amct.errors import AmctError, ArgumentError, ModelError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from amct.atomic import AnyPath
    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.graph import LayerNode, LearnableParameter, NetGraph
    from amct.caffe.engine.layer import Layer
    from amct.caffe.engine.messages import ProtoMessage

logger = logging.getLogger(__name__)


class Net:
    """A net built from a NetParameter.

    Args:
        parameter: The net, in any of Caffe's formats; it is not changed.
        phase: TRAIN (0) or TEST (1).
        level: The level for include/exclude rules.
        stages: The stages for include/exclude rules, in addition to those of the prototxt's ``state``.
        keep_blobs: True keeps every blob readable, as Caffe does. False frees each blob after its last reader and fuses
            layers: less memory, more speed; only inputs and outputs stay, until the next forward pass. A list of names
            keeps these blobs too.
        allow_python: Allow Python layers, which execute code that the prototxt names.
        with_gradients: False keeps nothing for backward (a net that is only tested).

    Raises:
        ModelError: The net cannot be built; the message names layer and reason.
    """

    def __init__(
        self,
        parameter: ProtoMessage,
        *,
        phase: int = TEST,
        level: int = 0,
        stages: Sequence[str] = (),
        keep_blobs: bool | Iterable[str] = True,
        allow_python: bool = False,
        with_gradients: bool = True,
    ) -> None:
        self.graph: NetGraph = build_graph(parameter, phase, level, stages, allow_python=allow_python)
        self._blob_index = {name: index for index, name in enumerate(self.graph.blob_names)}
        self._with_gradients = with_gradients and keep_blobs is True
        if not self._with_gradients:
            for node in self.graph.nodes:
                node.needs_backward = False
        self._kept = self._kept_blobs(keep_blobs)
        check_net_memory(self.graph, self._kept)
        self._records: dict[int, RecordedForward] = {}
        self._plans: dict[tuple[int, int, frozenset[int], bool, torch.device], PassPlan] = {}
        self._check_size = size_check()
        self._callbacks: dict[str, list[Callable[[int], object]]] = {
            "before_forward": [], "after_forward": [], "before_backward": [], "after_backward": []
        }  # fmt: skip
        for index in range(len(self.graph.blobs)):
            self._set_loss_gradient(index)

    @classmethod
    def from_file(cls, path: AnyPath, **options: object) -> Net:
        """Read a prototxt and build the net; ``options`` as for the class.

        Raises:
            FileError, ParseError, ModelError: The file cannot be read, is not a prototxt, or the net cannot be built.
        """
        with located_in(path):
            return cls(read_net_message(path), **options)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ contents

    @property
    def name(self) -> str:
        """The net's name."""
        return self.graph.name

    @property
    def phase(self) -> int:
        """TRAIN (0) or TEST (1)."""
        return self.graph.phase

    @property
    def layers(self) -> list[Layer]:
        """All layers, including automatic Split layers."""
        return [node.layer for node in self.graph.nodes]

    @property
    def layer_names(self) -> list[str]:
        """The names of all layers, in order."""
        return [node.layer.name for node in self.graph.nodes]

    @property
    def inputs(self) -> list[str]:
        """The tops of Input layers."""
        return [self.graph.blob_names[index] for index in self.graph.inputs]

    @property
    def outputs(self) -> list[str]:
        """All blobs without a reader, in alphabetical order."""
        return [self.graph.blob_names[index] for index in self.graph.outputs]

    @property
    def learnable(self) -> list[LearnableParameter]:
        """The parameters that a solver updates: each once, with its multipliers."""
        return self.graph.learnable

    def blob(self, name: str) -> Blob:
        """The blob of that name.

        Raises:
            ArgumentError: There is none.
        """
        return self.graph.blobs[self._index_of(name)]

    def named_blobs(self) -> OrderedDict[str, Blob]:
        """All blobs by name, in net order."""
        return OrderedDict(zip(self.graph.blob_names, self.graph.blobs, strict=True))

    # ------------------------------------------------------------------ running

    def forward(self, start: int = 0, end: int | None = None, *, keep: Iterable[str] = ()) -> float:
        """Run layers ``start`` to ``end`` (both included) and return the weighted loss.

        ``keep`` names blobs not to free.
        """
        last = len(self.graph.nodes) - 1 if end is None else end
        watched = self._callbacks["before_forward"] or self._callbacks["after_forward"]
        kept = frozenset() if self._kept is None else frozenset(self._index_of(name) for name in keep)
        plan = self._plan(start, last, kept, literal=bool(watched))
        if plan.repeat is not None and _repeated(plan):
            return 0.0
        if self._kept is not None or not watched:  # a callback may read blobs not written yet
            for blob in plan.stale:
                if blob.values.is_allocated:
                    blob.values.release(readable=self._kept is None)
        loss, memory = 0.0, NetMemory(plan)
        before, after = self._callbacks["before_forward"], self._callbacks["after_forward"]
        with torch.no_grad():
            for step in plan.steps:
                for callback in before:
                    callback(step.node.index)
                self._run_step(step, memory)
                if step.has_loss:
                    loss += _loss_of(step.node)
                for callback in after:
                    callback(step.node.index)
        if not watched:
            self._bind(plan)
        return loss

    def backward(self, start: int | None = None, end: int = 0) -> None:
        """Compute the gradients of layers ``start`` down to ``end`` (both included) from the tops' ``diff``.

        Raises:
            ModelError: The net frees its blobs (``keep_blobs=False``), so gradients cannot be computed.
        """
        if not self._with_gradients:
            raise ModelError(f'net "{self.name}" was created without gradients (keep_blobs or with_gradients is False)')
        first = len(self.graph.nodes) - 1 if start is None else start
        for index in range(first, end - 1, -1):
            node = self.graph.nodes[index]
            for callback in self._callbacks["before_backward"]:
                callback(index)
            if node.needs_backward:
                self._backward_node(node)
            for callback in self._callbacks["after_backward"]:
                callback(index)

    def compute(
        self, node: LayerNode, bottoms: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What one layer makes of tensors, with a gradient where it has one; other layers do not see it."""
        layer = node.layer
        for index, tensor in zip(node.bottoms, bottoms, strict=False):
            self.graph.blobs[index].set_shape(tuple(tensor.shape))
        if len(bottoms) == len(node.bottoms):
            self._reshape_node(node)
        if layer.replaces_tops:
            return list(layer.forward(list(bottoms), list(parameters)))
        blobs, tops = self._blobs(node.bottoms), self._blobs(node.tops)
        with torch.no_grad():
            for blob, tensor in zip(blobs, bottoms, strict=True):
                blob.set_tensor(tensor)
            layer.run(blobs, tops)
            return [blob.tensor.clone() for blob in tops]

    def reshape(self) -> None:
        """Update the shapes of all blobs from those of the inputs, without computing values."""
        for node in self.graph.nodes:
            self._reshape_node(node)

    def clear_parameter_gradients(self) -> None:
        """Set the gradients of all parameters to zero."""
        for parameter in self.graph.learnable:
            parameter.blob.set_gradient(torch.zeros(parameter.blob.shape))

    def on(self, event: str, callback: Callable[[int], object]) -> None:
        """Call ``callback(layer index)`` at before_forward, after_forward, before_backward or after_backward."""
        self._callbacks[event].append(callback)

    # ------------------------------------------------------------------ weights

    def load_weights(self, path: AnyPath) -> None:
        """Copy weights from a caffemodel or HDF5 file by layer name."""
        weights.load(self.graph, path)

    def save_weights(self, path: AnyPath, *, with_diff: bool = False) -> None:
        """Write all layers and weights as a binary caffemodel."""
        weights.save(self.graph, path, with_diff=with_diff)

    def save_weights_hdf5(self, path: AnyPath, *, with_diff: bool = False) -> None:
        """Write the weights as HDF5."""
        weights.save_hdf5(self.graph, path, with_diff=with_diff)

    def share_weights(self, other: Net) -> None:
        """Use the parameter values (not the gradients) of the layers of the same name in ``other``.

        Raises:
            ModelError: A layer has another number of blobs or other shapes.
        """
        targets = {node.layer.name: node.layer for node in reversed(self.graph.nodes)}
        for node in other.graph.nodes:
            layer = targets.get(node.layer.name)
            if layer is None:
                continue
            layer.fit_stored([blob.shape for blob in node.layer.blobs])
            if len(layer.blobs) != len(node.layer.blobs):
                raise ModelError(f"Incompatible number of blobs for layer {layer.name}")
            for index, (ours, theirs) in enumerate(zip(layer.blobs, node.layer.blobs, strict=True)):
                if ours.shape != theirs.shape:
                    raise ModelError(
                        f"Cannot share param {index} weights from layer '{layer.name}'; shape mismatch.  Source param "
                        "shape is "
                        f"{weights.shape_text(theirs.shape)}; target param shape is {weights.shape_text(ours.shape)}"
                    )
                ours.share_values(theirs)

    # ------------------------------------------------------------------ internals

    def _kept_blobs(self, keep_blobs: bool | Iterable[str]) -> frozenset[int] | None:
        if keep_blobs is True:
            return None
        names = [] if keep_blobs is False else list(keep_blobs)
        losses = (index for index, weight in enumerate(self.graph.loss_weights) if weight)  # of a layer without top too
        return frozenset([*self.graph.inputs, *self.graph.outputs, *losses, *map(self._index_of, names)])

    def _index_of(self, name: str) -> int:
        index = self._blob_index.get(name)
        if index is None:
            near = did_you_mean(name, self.graph.blob_names)
            raise ArgumentError(f'net "{self.name}" has no blob "{name}".{near}')
        return index

    def _plan(self, start: int, end: int, keep: frozenset[int], *, literal: bool) -> PassPlan:
        key = (start, end, keep, literal, current_device())
        plan = self._plans.get(key)
        if plan is None:
            kept = None if self._kept is None else self._kept | keep
            plan = self._plans[key] = build_plan(self.graph, start, end, literal=literal, kept=kept)
        return plan

    def _bind(self, plan: PassPlan) -> None:
        """Find a way to repeat the pass that was just run."""
        plan.bind()

    def _blobs(self, indices: list[int]) -> list[Blob]:
        return [self.graph.blobs[index] for index in indices]

    def _run_step(self, step: Step, memory: NetMemory) -> None:
        layer = step.node.layer
        if step.call is None or memory.is_counting or not step.unchanged:
            self._reshape_step(step, memory)
            step.call = None
        try:
            self._compute(step)
        except (RuntimeError, MemoryError, ArithmeticError) as error:  # sizes that do not fit, no memory, empty blobs
            if isinstance(error, AmctError) or layer.type == "Python":  # errors of the user's own code stay as they are
                raise
            raise layer.error(f"cannot run on its bottoms {step.shapes}: {str(error).splitlines()[0]}") from error
        for blob in step.mirrors:
            blob.set_tensor(step.tops[0].tensor.reshape(blob.shape))

    def _reshape_step(self, step: Step, memory: NetMemory) -> None:
        """Check and adapt the layers of a step whose bottoms changed shape."""
        shapes = [blob.shape for blob in step.bottoms]
        is_new = shapes != step.shapes
        if is_new:
            for node in step.nodes:
                self._reshape_node(node)
        if is_new or memory.is_counting:
            memory.count_until(step)
        step.shapes = shapes

    def _compute(self, step: Step) -> None:
        node, layer = step.node, step.node.layer
        if step.call is not None or step.chain is not None:
            step.run()
        elif node.needs_backward and layer.uses_autograd:
            record = record_forward(node, step.bottoms)
            self._records[node.index] = record
            for blob, value in zip(step.tops, record.tops, strict=True):
                blob.set_tensor(value.detach())
        elif layer.replaces_tops:
            step.run()
        else:
            layer.run(step.bottoms, step.tops)
            for blob in step.release:
                blob.values.release()

    def _reshape_node(self, node: LayerNode) -> None:
        layer = node.layer
        shapes = [blob.shape for blob in self._blobs(node.bottoms)]
        with layer.naming_errors(shapes):
            tops = layer.reshape(shapes)
        for index, shape in zip(node.tops, tops, strict=True):
            self._check_size(shape, f'blob "{self.graph.blob_names[index]}" of layer "{layer.name}"')
            if self.graph.blobs[index].shape != shape:
                self.graph.blobs[index].set_shape(shape)
                self._set_loss_gradient(index)

    def _backward_node(self, node: LayerNode) -> None:
        bottoms, tops = self._blobs(node.bottoms), self._blobs(node.tops)
        if node.layer.run_backward is not None:
            node.layer.run_backward(tops, node.bottom_needs_gradient, bottoms)
            return
        if not node.layer.uses_autograd:
            return
        record = self._records.get(node.index)
        if record is None:
            record = self._records[node.index] = record_forward(node, bottoms)
        run_backward(node, record, bottoms, tops)

    def _set_loss_gradient(self, index: int) -> None:
        weight = self.graph.loss_weights[index]
        if weight:
            blob = self.graph.blobs[index]
            blob.set_gradient(torch.full(blob.shape, weight))


def build_graph(
    parameter: ProtoMessage, phase: int, level: int, stages: Sequence[str], *, allow_python: bool = False
) -> NetGraph:
    """Upgrade, filter, insert splits and build a net.

    Raises:
        ModelError: The net cannot be built.
    """
    net = type(parameter)()
    net.CopyFrom(parameter)
    upgrade_net(net, net.name or "net")
    net.state.phase = TEST if phase else 0
    net.state.level = level
    net.state.stage.extend(stages)
    return GraphBuilder(insert_splits(filter_net(net)), allow_python=allow_python).build()


def _repeated(plan: PassPlan) -> bool:
    """Run the whole plan at once, if nothing has changed; else its steps have to be run one by one."""
    assert plan.repeat is not None
    try:
        if plan.unchanged:
            with torch.no_grad():
                plan.repeat()
            return True
    except (RuntimeError, MemoryError, ArithmeticError) as error:  # running the steps names the layer
        logger.debug("a pass could not be repeated: %s", error)
    plan.repeat = None
    return False


def _loss_of(node: LayerNode) -> float:
    total = 0.0
    for weight, blob in zip(node.layer.loss_weights, node.layer.top_blobs, strict=True):
        if weight:
            total += weight * float(blob.tensor.sum())
    return total


# -- gradients ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RecordedForward:
    """The autograd graph of one layer's last forward."""

    bottoms: list[torch.Tensor]
    parameters: list[torch.Tensor]
    tops: Sequence[torch.Tensor]


def record_forward(node: LayerNode, bottoms: list[Blob]) -> RecordedForward:
    """Run a layer's forward and keep its graph."""
    layer = node.layer
    inputs, parameters = (
        [blob.tensor.detach().requires_grad_(needs) for blob, needs in zip(blobs, which, strict=True)]
        for blobs, which in ((bottoms, node.bottom_needs_gradient), (layer.blobs, layer.parameter_needs_gradient))
    )
    with torch.enable_grad():
        tops = layer.forward(inputs, parameters)
        exact = layer.forward_on_integers([each.detach() for each in inputs])
        if exact is not None:
            tops = [_ValueOf.apply(carrier, value) for carrier, value in zip(tops, exact, strict=True)]  # type: ignore[no-untyped-call]
    return RecordedForward(inputs, parameters, tops)


def run_backward(node: LayerNode, record: RecordedForward, bottoms: list[Blob], tops: list[Blob]) -> None:
    """Compute the bottoms' gradients from the tops', and add to the parameters' gradients."""
    wanted = [tensor for tensor in (*record.bottoms, *record.parameters) if tensor.requires_grad]
    remaining = iter(_gradients(record, wanted, tops))
    for tensor, blob in zip(record.bottoms, bottoms, strict=True):
        if tensor.requires_grad:
            gradient = next(remaining)
            blob.set_gradient(torch.zeros_like(tensor) if gradient is None else gradient)
    for tensor, blob in zip(record.parameters, node.layer.blobs, strict=True):
        gradient = next(remaining) if tensor.requires_grad else None
        if gradient is not None:
            blob.set_gradient(blob.gradient.to(gradient.device) + gradient.reshape(blob.shape))


def _gradients(record: RecordedForward, wanted: list[torch.Tensor], tops: list[Blob]) -> Sequence[torch.Tensor | None]:
    pairs = [(value, blob.gradient) for value, blob in zip(record.tops, tops, strict=True) if value.requires_grad]
    if not wanted or not pairs:
        return [None] * len(wanted)
    return torch.autograd.grad(
        [value for value, _ in pairs],
        wanted,
        [gradient.to(value.device) for value, gradient in pairs],
        retain_graph=True,
        allow_unused=True,
    )


class _ValueOf(torch.autograd.Function):
    """The value of the second tensor with the gradient of the first."""

    @staticmethod
    def forward(ctx: object, carrier: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        del ctx, carrier
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        del ctx
        return gradients[0], None
