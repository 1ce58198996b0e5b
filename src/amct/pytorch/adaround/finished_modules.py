"""Lets repeated forwards of a model skip what cannot have changed since the last one.

AdaRound goes through a model layer by layer and runs it up to each layer in turn, on the same batches: without this,
the first layers would be computed again for every later one. A module is finished in a forward when it and everything
executed before it is learned already (or has nothing to learn); what it gave for a batch is then given again. Of
nested modules only the outermost is remembered.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BUDGET = 512 << 20


class FinishedModules:
    """Remembers outputs of finished modules of a copied model, by batch.

    Args:
        model: it is changed: the forwards of its modules with parameters are wrapped.
        layers: the layers that will be learned, one after the other; ``finish`` says when one is.
        budget: bytes to remember at most.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str], budget: int = _BUDGET) -> None:
        self._unfinished = set(layers)
        self._left = budget
        self._outputs: dict[tuple[str, int], Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._several: set[str] = set()
        self._batch = 0
        self._clean = True
        for name, module in model.named_modules():
            if module is not model and next(module.parameters(), None) is not None:
                module.forward = _Remembering(self, name, module.forward)  # of this object only

    def begin(self, batch: int) -> None:
        """A forward of a batch, by its number, begins."""
        self._batch = batch
        self._clean = True
        self._calls.clear()

    def finish(self, layer: str) -> None:
        """A layer has its final weight."""
        self._unfinished.discard(layer)

    def recall(self, name: str) -> Tensor | None:
        """What a module gave for this batch, if it cannot give anything else; counts the call."""
        self._calls[name] += 1
        if self._calls[name] > 1:
            self._several.add(name)
        found = self._outputs.get((name, self._batch)) if name not in self._several else None
        return None if found is None else found.clone()  # what reads it may write to it

    def note(self, name: str, output: object) -> None:
        """A module was executed."""
        if name in self._unfinished:
            self._clean = False
        if not self._clean or name in self._several or not isinstance(output, Tensor):
            return
        for inner in [key for key in self._outputs if key[1] == self._batch and key[0].startswith(f"{name}.")]:
            self._left += self._outputs.pop(inner).nbytes
        if output.nbytes <= self._left:
            self._left -= output.nbytes
            self._outputs[name, self._batch] = output.detach().clone()


class _Remembering:
    """A forward that asks first whether its result is known."""

    def __init__(self, memory: FinishedModules, name: str, forward: Callable[..., Any]) -> None:
        self._memory = memory
        self._name = name
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the module takes and gives
        known = self._memory.recall(self._name)
        if known is not None:
            return known
        result = self._forward(*args, **kwargs)
        self._memory.note(self._name, result)
        return result
