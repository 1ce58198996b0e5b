"""Where in a model's forward a tensor is made: in which call of which module, by the how-manieth operation there.

A place is found by running a copy of the model and stays valid for other batch sizes and for the folded copy: folding
replaces whole modules, and operations are counted inside each module call apart from the modules it calls.
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
class Place:
    """The ``operation``-th torch function that the ``call``-th call of module ``path`` makes, and which of its results.

    ``function`` is its name, to notice when another batch takes another way through the model.
    """

    path: str
    call: int
    operation: int
    result: int
    function: str


class OperationWatch:
    """Tells of every torch function that a model calls, with its place. Active only inside ``forward()``."""

    def __init__(self, model: nn.Module, seen: Callable[[Place, torch.Tensor], None], wanted: WantedPlaces) -> None:
        self._tracker = _CallTracker(model)
        self._mode = _Mode(self._tracker, seen, wanted)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward pass of the whole model."""
        self._tracker.begin()
        with self._mode:
            yield

    def detach(self) -> None:
        """Take the hooks away."""
        self._tracker.detach()


WantedPlaces = frozenset[tuple[str, int]] | None
"""Modules and positions whose results are of interest; None: all."""


class _CallTracker:
    """Knows, by hooks on every module, which module call is being executed."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[str, int]] = []
        self._operations: Counter[tuple[str, int]] = Counter()
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if module is not model:
                # First in, last out: what other hooks of a layer compute is counted as the layer's own.
                self._handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def begin(self) -> None:
        self._calls.clear()
        self._operations.clear()
        self._open = [("", 0)]

    def next_operation(self) -> tuple[str, int, int]:
        path, call = self._open[-1]
        number = self._operations[path, call]
        self._operations[path, call] += 1
        return path, call, number

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._open.append((name, self._calls[name]))
            self._calls[name] += 1

        return enter

    def _leave(self, *_: object) -> None:
        if len(self._open) > 1:
            self._open.pop()


class _Mode(TorchFunctionMode):
    """Sees every torch function before torch does; those that torch functions call in turn are not seen."""

    def __init__(
        self, tracker: _CallTracker, seen: Callable[[Place, torch.Tensor], None], wanted: WantedPlaces
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
                    self._seen(Place(path, call, number, index, name), leaf)
        return result
