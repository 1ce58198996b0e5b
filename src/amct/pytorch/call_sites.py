"""Call sites: which operation of which module call computes a tensor.

Operations are numbered within each module call, without those of the modules it calls. Operations of the module's
hooks have negative numbers, so that a hook that is added or removed later does not shift those of the forward. A call
site is found by running a copy of the model; it stays valid for other batch sizes and for the folded copy, as folding
replaces whole modules.

When the call sites are known, only the modules of these operations are followed, and those that they call directly:
what happens deeper belongs to the latter. Hooks on every module, and a mode around the whole forward, would cost 5 % of
the time of a small convolutional network.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch.utils.hooks import RemovableHandle


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


class OperationWatch:
    """Reports the result of the torch functions that a model calls, with its call site, while inside ``forward()``.

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
        paths = None if wanted is None else frozenset(path for path, _ in wanted)
        self._everywhere = paths is None or "" in paths
        self._tracker = _ModuleCallTracker(
            model, None if paths is None else {*paths, *callees, *_children(model, paths)}
        )
        self._mode = _OperationMode(self._tracker, seen, wanted)
        if paths is not None and not self._everywhere:
            self._tracker.run_inside(paths, self._mode)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context of one forward pass of the whole model."""
        self._tracker.begin()
        try:
            with self._mode if self._everywhere else nullcontext():
                yield
        finally:
            self._tracker.end()

    def callees(self, path: str) -> frozenset[str]:
        """The modules that a module has called directly."""
        return frozenset(self._tracker.callees.get(path, ()))

    def detach(self) -> None:
        """Remove the hooks."""
        self._tracker.detach()


WantedSites = frozenset[tuple[str, int]] | None
"""Module paths and operation numbers whose results are reported; None for all."""


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


class _ModuleCallTracker:
    """Tracks by hooks which module call is being executed; of modules without hooks it is that of their caller.

    Args:
        model: The model.
        followed: The modules that get hooks beside the model itself; None: all.
    """

    def __init__(self, model: nn.Module, followed: Collection[str] | None) -> None:
        self.callees: dict[str, set[str]] = {}
        """The modules that each one has called directly."""
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[str, int, OpenCall]] = []
        self._is_running = False  # the forward of the whole model
        self._is_watching = False
        self._inside: Collection[str] = ()
        self._mode: TorchFunctionMode | None = None
        self._entered = ExitStack()  # holds the mode while it is on
        self._depth = 0  # of calls of the modules ``inside``
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if followed is not None and module is not model and name not in followed:
                continue
            # The first and the last of all hooks, around those of the user.
            if module is not model:
                self._handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
            self._handles.append(module.register_forward_pre_hook(self._set_forward(running=True)))
            self._handles.append(module.register_forward_hook(self._set_forward(running=False), prepend=True))
            if module is model:
                self._handles.append(module.register_forward_pre_hook(self._note_running(running=True)))
                ended = self._note_running(running=False)
                self._handles.append(module.register_forward_hook(ended, prepend=True, always_call=True))
            else:
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def run_inside(self, paths: Collection[str], mode: TorchFunctionMode) -> None:
        """Enter a mode for the calls of some modules only."""
        self._inside, self._mode = paths, mode

    def begin(self) -> None:
        """Begin a forward of the whole model: before it is called, or when its hooks have run and its forward runs."""
        self._is_watching, self._depth = True, 0
        self._calls.clear()
        self._open = [("", 0, OpenCall(in_forward=self._is_running))]

    def end(self) -> None:
        """End the forward; a call that was interrupted has left the mode on."""
        self._is_watching = False
        self._depth = 0
        self._entered.close()

    def next_operation(self) -> tuple[str, int, int]:
        path, call, opened = self._open[-1]
        return path, call, opened.next_operation()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._mode = None  # it refers to this object: the model would be freed late, with its weights

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            if self._open:
                self.callees.setdefault(self._open[-1][0], set()).add(name)
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

    def _note_running(self, *, running: bool) -> Callable[..., None]:
        def note(*_: object) -> None:
            self._is_running = running

        return note

    def _leave(self, *_: object) -> None:
        if len(self._open) < 2:
            return
        path = self._open.pop()[0]
        if self._depth and path in self._inside:
            self._depth -= 1
            if self._depth == 0:
                self._entered.close()


class _OperationMode(TorchFunctionMode):
    """Intercepts the torch functions that the model calls, but not those called inside torch functions."""

    def __init__(
        self, tracker: _ModuleCallTracker, seen: Callable[[CallSite, torch.Tensor], None], wanted: WantedSites
    ) -> None:
        super().__init__()
        self._tracker = tracker
        self._seen = seen
        self._wanted = wanted

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  torch's protocol
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        path, call, number = self._tracker.next_operation()
        if self._wanted is None or (path, number) in self._wanted:
            name = getattr(func, "__name__", str(func))
            for index, leaf in enumerate(pytree.tree_leaves(result)):
                if isinstance(leaf, torch.Tensor):
                    self._seen(CallSite(path, call, number, index, name), leaf)
        return result
