"""Functions mapped by ``torch.vmap``, such as those that make attention masks, in a captured program.

Releases before 2.9 record an operation before ``vmap`` replaces it by one on whole tensors, and then fail on the tensor
of a single element that it was given. Here they record what ``vmap`` calls instead: ordinary operations.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

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
