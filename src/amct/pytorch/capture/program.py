"""Captures a model as a program with torch.export; on failure gives the reason and the line of the user's code.

A captured program is rewritten so that its readers and torch.onnx meet plain operations and harmless names. Regions
(autocast, gradient mode) become part of the graph around them. Parameter names that torch's generated code cannot
contain, such as one with a quote, are escaped; ``plain_name`` is the inverse.

LSTM and GRU are one opaque operation each: torch's own tracing unrolls the time steps and so fixes the sequence length;
these operations infer their shapes, keep the length dynamic, and become one ONNX node.
"""

from __future__ import annotations

import functools
import io
import linecache
import logging
import operator
import re
import sys
import sysconfig
import threading
import warnings
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from amct.memory import uncollected
from amct.pytorch.call_sites import mended
from amct.pytorch.capture.layer_types import setting_problem
from amct.pytorch.inputs import return_tensors
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch.export import ExportedProgram

    from amct.pytorch.inputs import ExampleInputs

_LIBRARY_FOLDERS = (
    str(Path(torch.__file__).parent),
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parents[1]),
)

_EXPORTER_WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # torch's exporters copy their own trees
    r"The tensor attributes? .* assigned during export",  # the copy is discarded; nn.RNNBase does it itself
    r"Attempted to insert a get_attr Node with no underlying reference",  # the decomposition of releases before 2.8
    r"Node .* does not reference an nn.Module, nn.Parameter, or buffer",  # the same
)
"""Warnings that torch's exporters cause themselves."""

_INNER_ERROR = re.compile(r"got \w+\((['\"])(.+?)\1\)", re.DOTALL)
"""The error that torch.compile quotes in a message of its own."""

_DATA_DEPENDENT = "GuardOnDataDependentSymNode"  # by name: importing its module takes a second


@dataclass(frozen=True, kw_only=True)
class CaptureFailure:
    """Why a model has no program: ``where`` is ``file:line`` of the user's code, empty if unknown."""

    reason: str
    where: str = ""
    code: str = ""
    detail: str = ""  # torch's full message

    def __str__(self) -> str:
        place = f"{self.where}: {self.code!r}: " if self.where else ""
        return place + self.reason


def capture(
    model: nn.Module, inputs: ExampleInputs, open_axes: Sequence[Mapping[int, str]] | None = None
) -> ExportedProgram | CaptureFailure:
    """Capture ``model`` in eval mode for inputs like these.

    The captured copy shares the model's tensors, which are read but never written. ``open_axes`` lists, for each input
    tensor, the axes with dynamic size and their labels; None fixes every size.
    """
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        reason = f'module "{scripted[0]}" is a ScriptModule; use the nn.Module that it was made from'
        return CaptureFailure(reason=reason)
    duplicate = copy_model(model, share_tensors=True)
    make_opaque(duplicate)
    hide_weight_list(duplicate)
    _hide_empty_buffers(duplicate)
    return_tensors(duplicate)
    args, kwargs, shapes = inputs.args, inputs.kwargs, None
    if open_axes is not None:
        args, kwargs = _grown((args, kwargs), open_axes)
        shapes = _dynamic_shapes(inputs.bound(model), open_axes)
    said = io.StringIO()
    try:
        # On failure torch prints its partial graph to stderr; output of a success is passed through.
        with (
            redirect_stderr(said),
            quiet_exporters(),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            uncollected(),
            _MENDED.entered(),
        ):
            program = torch.export.export(duplicate, args, kwargs, dynamic_shapes=shapes, strict=False)
            rewrite(program)
            _name_modules_once(program, duplicate)
    except Exception as error:  # noqa: BLE001  the user's forward runs here and torch.export raises many types
        return failure_of(error)
    sys.stderr.write(said.getvalue())
    return program


def _name_modules_once(program: ExportedProgram, model: nn.Module) -> None:
    """Give a module that the model has under several names its first one wherever it is called and its tensors read."""
    first: dict[nn.Module, str] = {}
    every = [(name, first.setdefault(each, name)) for name, each in model.named_modules(remove_duplicate=False)]
    names = {name: kept for name, kept in every if name != kept}
    if not names:
        return
    stored = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
    readers = {stored[node.name]: node for node in program.graph.nodes if node.name in stored}
    for target, node in readers.items():
        path, _, leaf = target.rpartition(".")
        if path in names and (kept := readers.get(f"{names[path]}.{leaf}")):
            node.replace_all_uses_with(kept)
    for node in program.graph.nodes:
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {key: (names.get(path, path), kind) for key, (path, kind) in stack.items()}
    program.graph_module.recompile()


def _hide_empty_buffers(model: nn.Module) -> None:
    """Make buffers without a tensor plain attributes of the (copied) model, as releases before 2.8 miscount them."""
    if TorchVersion(torch.__version__) >= "2.8":
        return
    for name in [name for name, buffer in model._buffers.items() if buffer is None]:
        del model._buffers[name]
        setattr(model, name, None)


def _grown(arguments: tuple[Any, Any], open_axes: Sequence[Mapping[int, str]]) -> tuple[Any, Any]:
    """Repeat the example along dynamic axes of size 1, because torch.export treats size 1 as fixed.

    Axes with the same label get the same size, axes with different labels different sizes, so that none seem related.
    """
    labels = list(dict.fromkeys(label for axes in open_axes for label in axes.values()))
    sizes = {label: number for number, label in enumerate(labels, start=2)}
    remaining = iter(open_axes)

    def of_leaf(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()  # torch.export marks its input tensors: do not mark the user's
        for axis, label in next(remaining).items():
            if leaf.shape[axis] == 1:
                leaf = leaf.repeat_interleave(sizes[label], dim=axis)
        return leaf

    grown: tuple[Any, Any] = pytree.tree_map(of_leaf, arguments)
    return grown


def _dynamic_shapes(arguments: dict[str, Any], open_axes: Sequence[Mapping[int, str]]) -> dict[str, Any]:
    remaining = iter(open_axes)

    def of_leaf(leaf: object) -> dict[int, Any] | None:
        return dict.fromkeys(next(remaining), torch.export.Dim.DYNAMIC) if isinstance(leaf, torch.Tensor) else None

    return {name: pytree.tree_map(of_leaf, value) for name, value in arguments.items()}


class _ProcessWide:
    """A context that concerns the whole process: the first of several threads enters it, the last one leaves it."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._entered = ExitStack()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._entered.enter_context(self._make())
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._entered.close()


_EAGER_STANCE = _ProcessWide(lambda: torch.compiler.set_stance("force_eager"))
_MENDED = _ProcessWide(mended)


def uncompiled() -> AbstractContextManager[None]:
    """A context in which ``torch.cond`` and compiled functions run as plain Python, so that hooks see each call."""
    return _EAGER_STANCE.entered()


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """Silence torch's exporters: warnings that the user cannot act on, and errors, which are also raised."""
    torch_names = ("torch.export", "torch._export", "torch.onnx", "torch.fx", "torch._dynamo", "torch._subclasses")
    loggers = [logging.getLogger(name) for name in (*torch_names, "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in _EXPORTER_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def failure_of(error: BaseException) -> CaptureFailure:
    """The failure for an exception: its reason and its line in the user's code."""
    if _DATA_DEPENDENT in {base.__name__ for base in type(error).__mro__}:
        reason = "what is executed depends on values of tensors, which a captured program cannot follow"
    else:
        inner = _INNER_ERROR.search(str(error))
        lines = (inner[2] if inner else str(error)).splitlines()
        reason = next((line.strip().rstrip(".") for line in lines if line.strip()), type(error).__name__)
        if "'NoneType' object" in reason:
            reason += "; while it is captured, the forward needs an argument that it was not given (attention_mask?)"
    if (frame := _users_frame(error)) is None:
        return CaptureFailure(reason=reason, detail=str(error))
    file, line = frame
    code = linecache.getline(file, line).strip()
    return CaptureFailure(reason=reason, where=f"{file}:{line}", code=code, detail=str(error))


def _users_frame(error: BaseException) -> tuple[str, int] | None:
    """The innermost traceback line outside torch, Python's library and this package."""
    found: tuple[str, int] | None = None
    for link in _chain(error):
        traceback: TracebackType | None = link.__traceback__
        while traceback is not None:
            file = traceback.tb_frame.f_code.co_filename
            if not file.startswith(("<", *_LIBRARY_FOLDERS)):
                found = (file, traceback.tb_lineno)
            traceback = traceback.tb_next
        if found:
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


# -- rewriting ---------------------------------------------------------------------------------------------------------

_REGIONS = frozenset({"wrap_with_autocast", "wrap_with_set_grad_enabled"})

_ESCAPE_BASE = 0xE000  # Unicode's private use area
_ESCAPED = {code: _ESCAPE_BASE + code for code in (*range(32), ord('"'), ord("\\"), 127)}
_PLAIN = {escape: code for code, escape in _ESCAPED.items()}


def plain_name(name: str) -> str:
    """The name in the user's model of a parameter or buffer of a rewritten program."""
    return name.translate(_PLAIN)


def rewrite(program: ExportedProgram) -> None:
    """Inline the regions and escape the names, in place."""
    _inline_regions(program)
    _escape_names(program)


# -- regions -----------------------------------------------------------------------------------------------------------


def _inline_regions(program: ExportedProgram) -> None:
    """Replace every region by its operations.

    Gradients do not matter here. In an autocast region the operations then compute in the types of their inputs: a
    disabled region is unchanged, an enabled one becomes more exact.
    """
    renamed = _inline_into(program.graph_module)
    if not renamed:
        return
    for old, new in renamed.items():
        program.graph_signature.replace_all_uses(old, new)
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # states the lower type of a region's result
            program.graph.erase_node(node)
    program.graph.lint()
    program.graph_module.recompile()


def _inline_into(module: fx.GraphModule) -> dict[str, str]:
    """Inline the regions of one graph; returns the new name of each result."""
    renamed: dict[str, str] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in _REGIONS:
            continue
        body = next(argument for argument in node.args if isinstance(argument, fx.Node))  # settings come before it
        inner = module.get_submodule(str(body.target))
        assert isinstance(inner, fx.GraphModule)
        _inline_into(inner)
        results = _copied_operations(module, inner, node, node.args[node.args.index(body) + 1 :])
        for user in list(node.users):
            assert user.target is operator.getitem
            result = results[user.args[1]]
            renamed[user.name] = result.name
            user.replace_all_uses_with(result)
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        if not body.users:
            module.graph.erase_node(body)
    return renamed


def _copied_operations(module: fx.GraphModule, inner: fx.GraphModule, before: fx.Node, arguments: Any) -> Any:  # noqa: ANN401  the nodes of a tuple
    """Copy the operations of an inner graph in front of a node; returns the copies of its results."""
    placeholders = inner.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, arguments, strict=True))
    with module.graph.inserting_before(before):
        for node in inner.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda argument: copies[argument])
            if node in copies:
                continue
            copy = module.graph.node_copy(node, lambda argument: copies[argument])
            copy.meta.pop("from_node", None)  # torch.onnx follows the origin of a node up to this program
            if node.op == "get_attr":
                copy.target = _moved_attribute(module, inner, str(node.target))
            copies[node] = copy
    raise AssertionError("a graph ends with its output")


def _moved_attribute(module: fx.GraphModule, inner: fx.GraphModule, name: str) -> str:
    """Give an attribute of an inner graph to the outer one, under a free name."""
    free = name
    while hasattr(module, free):
        free = f"{free}_inner"
    setattr(module, free, getattr(inner, name))
    return free


# -- names -------------------------------------------------------------------------------------------------------------


def _escape_names(program: ExportedProgram) -> None:
    """Escape the names of parameters, buffers and constants."""
    stored = (program.state_dict, program.constants)
    names = {name for entries in stored for name in entries}
    escapes = {name: name.translate(_ESCAPED) for name in names if name.translate(_ESCAPED) != name}
    if not escapes:
        return
    for entries in stored:
        for name in [name for name in entries if name in escapes]:
            entries[escapes[name]] = entries.pop(name)
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.target in escapes:
            spec.target = escapes[spec.target]


# -- LSTM and GRU as one operation each --------------------------------------------------------------------------------


@torch.library.custom_op("amct::lstm", mutates_args=())
def lstm(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM layer over ``x`` [time, batch, input]; a missing state is zero. Returns output, last h, last c."""
    zeros = x.new_zeros(1, x.shape[1], weight_hh.shape[1])
    state = (zeros if h is None else h.contiguous(), zeros if c is None else c.contiguous())
    output, last_h, last_c = torch.lstm(
        x, state, _weights(weight_ih, weight_hh, bias_ih, bias_hh), bias_ih is not None, 1, 0.0, False, False, False
    )
    return output, last_h, last_c


@lstm.register_fake
def _lstm_shapes(x: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    weight_hh = rest[3]
    assert weight_hh is not None
    output, last = _shapes(x, weight_hh)
    return output, last, torch.empty_like(last)


@torch.library.custom_op("amct::gru", mutates_args=())
def gru(
    x: Tensor, h: Tensor | None, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One GRU layer over ``x`` [time, batch, input]; a missing state is zero. Returns output and last h."""
    state = x.new_zeros(1, x.shape[1], weight_hh.shape[1]) if h is None else h.contiguous()
    output, last_h = torch.gru(
        x, state, _weights(weight_ih, weight_hh, bias_ih, bias_hh), bias_ih is not None, 1, 0.0, False, False, False
    )
    return output, last_h


@gru.register_fake
def _gru_shapes(x: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
    weight_hh = rest[2]
    assert weight_hh is not None
    return _shapes(x, weight_hh)


def _shapes(x: Tensor, weight_hh: Tensor) -> tuple[Tensor, Tensor]:
    steps, batch, hidden = x.shape[0], x.shape[1], weight_hh.shape[1]
    return x.new_empty(steps, batch, hidden), x.new_empty(1, batch, hidden)


def _weights(*parameters: Tensor | None) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter is not None]


def make_opaque(model: nn.Module) -> None:
    """Make every quantizable LSTM and GRU inside a (copied) model call the operations above."""
    for module in model.modules():
        if module is model or not isinstance(module, (nn.LSTM, nn.GRU)) or setting_problem(module):
            continue
        base = nn.LSTM if isinstance(module, nn.LSTM) else nn.GRU
        if type(module).forward is base.forward:
            setattr(module, "forward", functools.partial(_opaque_forward, module, module.forward))  # noqa: B010  for mypy


def hide_weight_list(model: nn.Module) -> None:
    """Let a (copied) model that is itself a recurrent layer have its list of weights only while it runs.

    torch.export exchanges the parameters for its own, and the layer follows in its list; releases before 2.9 refuse a
    model with an attribute that changed.
    """
    if not isinstance(model, nn.RNNBase):
        return
    names, forward = tuple(model._flat_weights_names), model.forward

    def with_weight_list(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  those of the layer
        model._flat_weights = [getattr(model, name, None) for name in names]
        try:
            return forward(*args, **kwargs)
        finally:
            model._flat_weights = []

    model._flat_weights_names, model._flat_weights, model._flat_weight_refs = [], [], []
    setattr(model, "forward", functools.wraps(forward)(with_weight_list))  # noqa: B010  for mypy


_State = Tensor | tuple[Tensor, Tensor]
_Result = tuple[Tensor, _State]


def _opaque_forward(
    module: nn.LSTM | nn.GRU,
    original: Callable[..., _Result],
    input: Tensor,  # noqa: A002  the name that callers of nn.LSTM may use
    hx: _State | None = None,
) -> _Result:
    """Replaces nn.LSTM.forward and nn.GRU.forward; packed or unbatched inputs use torch's own forward."""
    if not isinstance(input, Tensor) or input.dim() != 3:
        return original(input, hx)
    x = input.transpose(0, 1) if module.batch_first else input
    last: _State
    if isinstance(module, nn.LSTM):
        h, c = hx if isinstance(hx, (tuple, list)) else (None, None)
        output, last_h, last_c = lstm(x, h, c, *_parameters(module))
        last = (last_h, last_c)
    else:
        assert not isinstance(hx, (tuple, list))
        output, last = gru(x, hx, *_parameters(module))
    return (output.transpose(0, 1) if module.batch_first else output), last


def _parameters(module: nn.RNNBase) -> list[Tensor | None]:
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    return [getattr(module, name, None) for name in names]
