"""Call sites: which operation of which module call computes a tensor.

Operations are numbered within each module call, without those of the modules it calls. Operations of the module's
hooks have negative numbers, so that a hook that is added or removed later does not shift those of the forward. A call
site is found by running a copy of the model; it stays valid for other batch sizes and for the folded copy, as folding
replaces whole modules.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
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
    """Reports the result of every torch function that a model calls, with its call site, while inside ``forward()``."""

    def __init__(self, model: nn.Module, seen: Callable[[CallSite, torch.Tensor], None], wanted: WantedSites) -> None:
        self._tracker = _ModuleCallTracker(model)
        self._mode = _OperationMode(self._tracker, seen, wanted)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context of one forward pass of the whole model."""
        self._tracker.begin()
        with self._mode:
            yield

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


class _ModuleCallTracker:
    """Tracks, by hooks on every module, which module call is being executed."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[str, int, OpenCall]] = []
        self._is_running = False  # the forward of the whole model
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
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

    def begin(self) -> None:
        """Begin a forward of the whole model: before it is called, or when its hooks have run and its forward runs."""
        self._calls.clear()
        self._open = [("", 0, OpenCall(in_forward=self._is_running))]

    def next_operation(self) -> tuple[str, int, int]:
        path, call, opened = self._open[-1]
        return path, call, opened.next_operation()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._open.append((name, self._calls[name], OpenCall()))
            self._calls[name] += 1

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
        if len(self._open) > 1:
            self._open.pop()


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
