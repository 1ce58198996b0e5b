"""Caches outputs of modules whose weights are final, so that repeated forwards do not compute them again.

AdaRound learns layer after layer and runs the model up to each of them, on the same batches. A module is finished when
all layers in it and all layers executed before it are learned (or are not to be learned): its output for a batch is
cached. Of nested modules only the outermost is cached.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from amct.pytorch.functional.layers import named_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BUDGET = 512 << 20


class OutputCache:
    """The outputs of finished modules of a copied model, by batch.

    Args:
        model: a copy; the forwards of its modules with parameters are replaced.
        layers: the layers that will be learned, one after the other; call ``finish`` after each.
        budget: the most bytes to cache.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str], budget: int = _BUDGET) -> None:
        self._unfinished = set(layers)
        self._left = budget
        self._outputs: dict[tuple[str, int], Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._called_often: set[str] = set()
        self._batch = 0
        self._all_finished = True
        for name, module in named_layers(model):
            if module is not model and next(module.parameters(), None) is not None:
                module.forward = _CachedForward(self, name, module.forward)  # only on this instance

    def begin(self, batch: int) -> None:
        """Start batch number ``batch``; call before its forward."""
        self._batch = batch
        self._all_finished = True
        self._calls.clear()

    def finish(self, layer: str) -> None:
        """Mark a layer as finished; call when its weight is final."""
        self._unfinished.discard(layer)

    def lookup(self, name: str) -> Tensor | None:
        """The cached output of a module for this batch, or None; counts the call."""
        self._calls[name] += 1
        if self._calls[name] > 1:
            self._called_often.add(name)
        found = self._outputs.get((name, self._batch)) if name not in self._called_often else None
        return None if found is None else found.clone()  # the next module may write to it

    def store(self, name: str, output: object) -> None:
        """Cache the output of a module that was executed, if it is finished."""
        if name in self._unfinished:
            self._all_finished = False
        if not self._all_finished or name in self._called_often or not isinstance(output, Tensor):
            return
        for inner in [key for key in self._outputs if key[1] == self._batch and key[0].startswith(f"{name}.")]:
            self._left += self._outputs.pop(inner).nbytes
        if output.nbytes <= self._left:
            self._left -= output.nbytes
            self._outputs[name, self._batch] = output.detach().clone()


class _CachedForward:
    """A forward that returns the cached output if there is one."""

    def __init__(self, cache: OutputCache, name: str, forward: Callable[..., Any]) -> None:
        self._cache = cache
        self._name = name
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the module takes and gives
        known = self._cache.lookup(self._name)
        if known is not None:
            return known
        result = self._forward(*args, **kwargs)
        self._cache.store(self._name, result)
        return result
