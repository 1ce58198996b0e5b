"""Torch functions inside a forward: how they are intercepted, counted and named, and tensors inside ``torch.vmap``.

A ``FunctionMode`` passes the functions that a forward calls to a listener, which may observe the call, change it, or do
something else in its place.

A call site says which operation of which module call computes a tensor. Operations are numbered within each module
call, without those of the modules it calls. Operations of the module's hooks have negative numbers, so that a hook that
is added or removed later does not shift those of the forward. A call site is found by running a copy of the model; it
stays valid for other batch sizes and for the folded copy, as folding replaces whole modules.

When the call sites are known, only the modules of these operations are followed, and those that they call directly:
what happens deeper belongs to the latter. Hooks on every module, and a mode around the whole forward, would cost 5 % of
the time of a small convolutional network.

Functions mapped by ``torch.vmap``, such as those that make attention masks, are captured as ordinary operations:
releases before 2.9 record an operation before ``vmap`` replaces it by one on whole tensors, and then fail on the tensor
of a single element that it was given.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch.utils.hooks import RemovableHandle

Listener = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called with a torch function and its arguments in place of the function; returns what the caller gets."""


class FunctionMode(TorchFunctionMode):
    """Passes the torch functions that are called inside of it, but not those called inside torch functions, on.

    Args:
        listener: Calls the function, or does something else in its place.
        opens_attention: Whether the functions inside of ``F.multi_head_attention_forward`` are passed on.
    """

    def __init__(self, listener: Listener, *, opens_attention: bool = False) -> None:
        super().__init__()
        self.listener = listener
        self.opens_attention = opens_attention

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  torch's protocol
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if self.opens_attention and func is functional.multi_head_attention_forward:
            with self:
                return _opened_attention(func)(*args, **kwargs)
        return self.listener(func, args, kwargs)


def _opened_attention(func: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of torch's attention function whose inner functions a mode can intercept.

    ``F.multi_head_attention_forward`` is written in Python and, while a mode is active, only ever hands itself over to
    that mode. The copy leaves out this check; it is not torch's own function that is changed.
    """
    assert isinstance(func, FunctionType)
    names = {**func.__globals__, "has_torch_function": _never}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(_: object) -> bool:
    return False


def function_name(func: object) -> str:
    """The name of a torch function in a call site."""
    return getattr(func, "__name__", str(func))


_LAYER_OPERATIONS = frozenset({"linear", *(f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3))})


def has_own_forward(layer: nn.Module) -> bool:
    """Whether a layer's class changes torch's forward, so that its operation may read and return something else."""
    methods = (getattr(type(layer), name, None) for name in ("forward", "_conv_forward"))
    return any(method is not None and not method.__module__.startswith("torch.nn.") for method in methods)


def observe_operation(layer: nn.Module, seen: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[], None]:
    """Call a function with input and result of the convolution or product in a layer's forward; returns the undoing."""
    forward, own = layer.forward, vars(layer).get("forward")

    def listen(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  any result
        result = func(*args, **kwargs)
        if function_name(func) in _LAYER_OPERATIONS:
            seen(args[0] if args else kwargs["input"], result)
        return result

    def observed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  those of the user's forward
        with FunctionMode(listen):
            return forward(*args, **kwargs)

    def undo() -> None:
        del vars(layer)["forward"]
        vars(layer).update({} if own is None else {"forward": own})

    vars(layer)["forward"] = observed
    return undo


@dataclass
class OpenCall:
    """A module call that is being executed: what it has called so far, and whether its forward runs or a hook."""

    in_forward: bool = False
    of_forward: int = 0
    of_hooks: int = 0

    def next_operation(self) -> int:
        """The number of the function that is called now."""
        if self.in_forward:
            self.of_forward += 1
            return self.of_forward - 1
        self.of_hooks += 1
        return -self.of_hooks


@dataclass(frozen=True)
class CallSite:
    """One result of one operation, numbered from 0.

    Attributes:
        path: The module that executes the operation.
        call: The number of the module's call within the forward.
        operation: The number of the torch function within that call; that of a hook's n-th function is -1 - n.
        result: The number of the tensor among the function's results.
        function: The function's name; another name at the same numbers means that a batch executed other operations.
    """

    path: str
    call: int
    operation: int
    result: int
    function: str


WantedSites = frozenset[tuple[str, int]] | None
"""Module paths and operation numbers whose results are reported; None for all."""


class OperationWatch:
    """Reports the result of the torch functions that a model calls, with its call site, while inside ``forward()``.

    Hooks tell which module call is being executed; of modules without hooks it is that of their caller.

    Args:
        model: The model.
        seen: Receives call site and result.
        wanted: Which functions are reported.
        callees: Modules that those of the wanted functions call directly, as far as known, beside their children.
    """

    def __init__(
        self,
        model: nn.Module,
        seen: Callable[[CallSite, torch.Tensor], None],
        wanted: WantedSites,
        callees: Collection[str] = (),
    ) -> None:
        self._seen = seen
        self._wanted = wanted
        paths = None if wanted is None else frozenset(path for path, _ in wanted)
        self._everywhere = paths is None or "" in paths
        self._inside = frozenset() if paths is None or self._everywhere else paths  # the mode is on in their calls only
        self._mode: FunctionMode | None = FunctionMode(self._report)
        self._entered = ExitStack()  # holds the mode while it is on
        self._depth = 0  # of calls of the modules ``inside``
        self._callees: dict[str, set[str]] = {}
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[str, int, OpenCall]] = []
        self._is_watching = False
        self._handles: list[RemovableHandle] = []
        followed = None if paths is None else {*paths, *callees, *_children(model, paths)}
        for name, module in model.named_modules():
            if module is not model and (followed is None or name in followed):
                self._follow(name, module)

    # Of all hooks these are the first and the last ones, around those of the user. They are closures, which a deep copy
    # of the model shares, unlike methods with their object.

    def _follow(self, name: str, module: nn.Module) -> None:
        self._handles += [
            module.register_forward_pre_hook(self._entering(name), prepend=True),
            module.register_forward_pre_hook(self._set_forward(running=True)),
            module.register_forward_hook(self._set_forward(running=False), prepend=True),
            module.register_forward_hook(self._leaving(), always_call=True),
        ]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context of one forward of the whole model, without its hooks."""
        self._is_watching, self._depth = True, 0
        self._calls.clear()
        self._open = [("", 0, OpenCall(in_forward=True))]
        try:
            with self._mode if self._everywhere and self._mode else nullcontext():
                yield
        finally:
            self._is_watching = False
            self._depth = 0
            self._entered.close()  # a call that was interrupted has left the mode on

    def callees(self, path: str) -> frozenset[str]:
        """The modules that a module has called directly."""
        return frozenset(self._callees.get(path, ()))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._mode = None  # it refers to this object: the model would be freed late, with its weights

    def _report(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  any result
        result = func(*args, **kwargs)
        path, call, opened = self._open[-1]
        number = opened.next_operation()
        if self._wanted is None or (path, number) in self._wanted:
            for index, leaf in enumerate(pytree.tree_leaves(result)):
                if isinstance(leaf, torch.Tensor):
                    self._seen(CallSite(path, call, number, index, function_name(func)), leaf)
        return result

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            if self._open:
                self._callees.setdefault(self._open[-1][0], set()).add(name)
            self._open.append((name, self._calls[name], OpenCall()))
            self._calls[name] += 1
            if self._is_watching and self._mode is not None and name in self._inside:
                self._depth += 1
                if self._depth == 1:
                    self._entered.enter_context(self._mode)

        return enter

    def _set_forward(self, *, running: bool) -> Callable[..., None]:
        def switch(*_: object) -> None:
            if self._open:  # else a forward that is not watched
                self._open[-1][2].in_forward = running

        return switch

    def _leaving(self) -> Callable[..., None]:
        def leave(*_: object) -> None:
            if len(self._open) < 2:
                return
            path = self._open.pop()[0]
            if self._depth and path in self._inside:
                self._depth -= 1
                if self._depth == 0:
                    self._entered.close()

        return leave


def _children(model: nn.Module, paths: Collection[str]) -> set[str]:
    """The modules that the given ones are likely to call: their children, and those in lists and dictionaries."""
    names = {module: name for name, module in model.named_modules()}  # of a shared module its first one
    found: set[str] = set()
    waiting = [model.get_submodule(path) for path in paths]
    while waiting:
        for child in waiting.pop().children():
            found.add(names[child])
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # never called itself
                waiting.append(child)
    return found


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
def mended() -> Iterator[None]:
    """A context in which older releases capture what newer ones do.

    It changes torch for all threads, so that only one may enter it at a time.
    """
    with _attributes_assigned(), _vmap_recorded():
        yield


@contextmanager
def _attributes_assigned() -> Iterator[None]:
    """A context in which models whose forward sets attributes can be captured, which releases before 2.8 refuse."""
    if TorchVersion(torch.__version__) >= "2.8":
        yield
        return
    from torch._functorch import aot_autograd
    from torch.export import _trace

    places: tuple[Any, ...] = (aot_autograd, _trace)
    check = places[0]._detect_attribute_assignment

    @contextmanager
    def restored(module: nn.Module) -> Iterator[None]:
        try:
            with check(module):
                yield
        except ValueError as error:
            if "assigned during export" not in str(error):
                raise

    for place in places:
        place._detect_attribute_assignment = restored
    try:
        yield
    finally:
        for place in places:
            place._detect_attribute_assignment = check


@contextmanager
def _vmap_recorded() -> Iterator[None]:
    """A context in which programs with ``torch.vmap`` can be captured; other calls of it are as ever."""
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
