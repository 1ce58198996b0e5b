"""Makes a copied model ready for torch.export.

It returns its tensors only, as one list. LSTM and GRU are one opaque operation each: torch's own tracing unrolls the
time steps and so fixes the sequence length; these operations infer their shapes, keep the length dynamic, and become
one ONNX node. Functions mapped by ``torch.vmap``, such as those that make attention masks, are recorded as ordinary
operations: releases before 2.9 record an operation before ``vmap`` replaces it by one on whole tensors, and then fail
on the tensor of a single element that it was given.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from amct.pytorch.capture.layer_types import setting_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


# -- functions mapped by vmap ------------------------------------------------------------------------------------------


_FUNCTORCH: Any = torch._C._functorch  # torch has no public name for what vmap does to tensors
_RECORDED_BY_TORCH = TorchVersion(torch.__version__) >= "2.9"


def all_values(x: Tensor) -> Tensor:
    """The whole tensor of which a function mapped by ``vmap`` is given one element."""
    while _FUNCTORCH.is_batchedtensor(x):
        x = _FUNCTORCH.get_unwrapped(x)
    return x


def on_all_values(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single values to a tensor, also inside of ``vmap``."""
    levels = []
    while _FUNCTORCH.is_batchedtensor(x):
        levels.append((_FUNCTORCH.maybe_get_bdim(x), _FUNCTORCH.maybe_get_level(x)))
        x = _FUNCTORCH.get_unwrapped(x)
    if not levels:
        return function(x)
    with importlib.import_module("torch._functorch.pyfunctorch").temporarily_clear_interpreter_stack():
        x = function(x)
    for axis, level in reversed(levels):
        x = _FUNCTORCH._add_batch_dim(x, axis, level)
    return x


@contextmanager
def vmap_recorded() -> Iterator[None]:
    """A context in which programs with ``torch.vmap`` can be captured; other calls of it are as ever.

    It changes torch for all threads, so that only one may enter it at a time.
    """
    if _RECORDED_BY_TORCH:
        yield
        return
    apis: Any = importlib.import_module("torch._functorch.apis")
    original = apis.vmap_impl

    def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  those of the user's function
        with _recording_after_vmap():
            return original(*args, **kwargs)

    apis.vmap_impl = replaced
    try:
        yield
    finally:
        apis.vmap_impl = original


@contextmanager
def _recording_after_vmap() -> Iterator[None]:
    """Let this thread's recorder, if there is one, see an operation after ``vmap`` instead of before."""
    from torch._ops import _get_current_dispatch_mode_pre_dispatch
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
    from torch.utils._python_dispatch import _pop_mode_temporarily

    recorder = _get_current_dispatch_mode_pre_dispatch()  # type: ignore[no-untyped-call]
    if not isinstance(recorder, ProxyTorchDispatchMode):  # no capture, or inside of another vmap
        yield
        return
    later = ProxyTorchDispatchMode(
        recorder.tracer,
        recorder.tracing_mode,
        _allow_fake_constant=recorder._allow_fake_constant,
        _error_on_data_dependent_ops=recorder._error_on_data_dependent_ops,
    )
    with _pop_mode_temporarily(torch._C.DispatchKey.PreDispatch), later:
        yield
