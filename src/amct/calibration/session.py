"""One calibration: counts the batches of every layer, feeds its observers, and ends when the last layer has enough.

A layer has one or more streams (its input; each bottom of a Caffe layer; the hidden state of an LSTM), and a stream has
an observer. The tensors between layers, which only some exports need, are observed alongside and never hold up the end.

The front door wraps each forward pass in ``with session.batch():`` and calls ``observe`` whenever a layer is reached.
Activations are given to the observers at once and not kept. Batches beyond the number asked for are ignored.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import finalize

from amct import progress
from amct.calibration.observers import make_observer
from amct.config.plan import OPEN_ENDED
from amct.errors import AmctError, ArgumentError, CalibrationError, did_you_mean
from amct.numerics.affine import SymmetricScale, round_scale_to_fp16

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from amct.config.settings import ActivationSettings
    from amct.numerics.observer import ActivationFactors, Observer, TensorObserver
    from amct.record import Progress

logger = logging.getLogger(__name__)

INPUT = "input"
HIDDEN = "hidden state"


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One thing to observe of a layer.

    Attributes:
        layer: The layer.
        name: What it is, unique in the layer: "input", "hidden state", "input 1".
        settings: How its range is found.
        batch_num: How many batches are needed.
        force_fp16: Whether the scale is rounded to half precision.
        symmetric_scale: What a symmetric range is divided by.
    """

    layer: str
    name: str = INPUT
    settings: ActivationSettings
    batch_num: int = 1
    force_fp16: bool = False
    symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """The factors found: by layer and stream, and of the tensors between layers that were seen."""

    layers: Mapping[str, Mapping[str, ActivationFactors]]
    tensors: Mapping[str, ActivationFactors] = field(default_factory=dict)


class CalibrationSession:
    """Collects the activations of one model until every layer has seen its batches.

    Args:
        streams: what to observe, in the order of the model.
        tensors: observers of the tensors between layers, by name; they see what is seen until the end.
        on_progress: called after each batch that was not the last, with (seen, needed) of every layer.
        on_end: called once, with the result, when the last layer has enough.
    """

    def __init__(
        self,
        streams: Iterable[Stream],
        *,
        tensors: Mapping[str, TensorObserver] | None = None,
        on_progress: Callable[[Mapping[str, Progress]], None] | None = None,
        on_end: Callable[[CalibrationResult], None] | None = None,
    ) -> None:
        self._layers: dict[str, dict[str, _Watched]] = {}
        for stream in streams:
            own = self._layers.setdefault(stream.layer, {})
            if stream.name in own:
                raise ArgumentError(f'layer "{stream.layer}": "{stream.name}" is to be observed twice')
            own[stream.name] = _Watched(stream)
        if not self._layers:
            raise CalibrationError("there is no layer to calibrate: every layer is switched off")
        self._tensors = dict(tensors or {})
        self._on_progress = on_progress
        self._on_end = on_end
        self._depth = 0
        self._result: CalibrationResult | None = None
        most = max(watched.stream.batch_num for own in self._layers.values() for watched in own.values())
        self._bar = _Bar(most if most < OPEN_ENDED else None)

    @property
    def done(self) -> bool:
        """Every layer has seen its batches and the result is there."""
        return self._result is not None

    @property
    def result(self) -> CalibrationResult:
        """The factors.

        Raises:
            CalibrationError: some layers still need batches; the message says which and how many.
        """
        if self._result is None:
            raise CalibrationError(self.missing())
        return self._result

    @property
    def progress(self) -> dict[str, Progress]:
        """For every layer how many batches it has seen and how many it needs."""
        return {layer: _progress(own) for layer, own in self._layers.items()}

    def missing(self) -> str:
        """Which layers still need how many batches, as a sentence; empty when none does."""
        waiting = {layer: needed - seen for layer, (seen, needed) in self.progress.items() if seen < needed}
        if not waiting:
            return ""
        total, most = len(self._layers), max(waiting.values())
        few = [layer for layer, count in waiting.items() if count == most]
        shown = ", ".join(f'"{layer}"' for layer in few[:_SHOWN_LAYERS])
        rest = f" and {len(few) - _SHOWN_LAYERS} more" if len(few) > _SHOWN_LAYERS else ""
        return (
            f"calibrated {total - len(waiting)} of {total} layers; {most} more "
            f"batch{'' if most == 1 else 'es'} needed for {shown}{rest}"
        )

    @contextmanager
    def batch(self) -> Iterator[None]:
        """One forward pass. When the outermost ends without an error, progress is told and the session may end."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._after_batch()

    def observe(self, layer: str, x: Tensor, name: str = INPUT) -> None:
        """Take in one batch of a stream; outside ``batch()`` it is a batch of its own.

        Raises:
            CalibrationError: the data cannot be used (NaN, infinity, empty range); names the layer and the batch.
            ArgumentError: no such layer or stream.
        """
        if self.done:
            return
        watched = self._find(layer, name)
        if watched.seen >= watched.stream.batch_num:
            return
        try:
            watched.observer.observe(x)
        except AmctError as error:
            raise CalibrationError(f"{watched.described}, batch {watched.seen + 1}: {error}") from error
        watched.seen += 1
        if self._depth == 0:
            self._after_batch()

    def observe_tensor(self, name: str, x: Tensor) -> None:
        """Take in one batch of a tensor between layers. One that cannot be used is left out of the result."""
        observer = None if self.done else self._tensors.get(name)
        if observer is None:
            return
        try:
            observer.observe(x)
        except AmctError as error:
            self.give_up_tensor(name, str(error))

    def give_up_tensor(self, name: str, reason: str) -> None:
        """Leave a tensor between layers out of the result."""
        if self._tensors.pop(name, None) is not None:
            logger.info('tensor "%s" is not observed: %s', name, reason)

    def finish(self) -> None:
        """End with what was seen so far, when there is no more data; nothing happens when the session has ended.

        Raises:
            CalibrationError: some layer has seen nothing; names it.
        """
        if self.done:
            return
        unseen = [layer for layer, (seen, _) in self.progress.items() if seen == 0]
        if unseen:
            shown = ", ".join(f'"{layer}"' for layer in unseen[:_SHOWN_LAYERS])
            raise CalibrationError(
                f"{len(unseen)} of {len(self._layers)} layers were reached by no batch: {shown}; "
                "calibrate with data that reaches them, or leave them in float"
            )
        self._end()

    def close(self) -> None:
        """Take the progress bar away before the end, when calibration is given up."""
        self._bar.close()

    def _find(self, layer: str, name: str) -> _Watched:
        own = self._layers.get(layer)
        if own is None:
            raise ArgumentError(f'layer "{layer}" is not being calibrated.{did_you_mean(layer, self._layers)}')
        if name not in own:
            raise ArgumentError(f'layer "{layer}" has no "{name}" to observe; it has {", ".join(own)}')
        return own[name]

    def _after_batch(self) -> None:
        if self.done:
            return
        progress_now = self.progress
        self._bar.move_to(min(seen for seen, _ in progress_now.values()))
        if any(seen < needed for seen, needed in progress_now.values()):
            if self._on_progress is not None:
                self._on_progress(progress_now)
            return
        self._end()

    def _end(self) -> None:
        self._bar.close()
        layers = {}
        for layer, own in self._layers.items():
            layers[layer] = {name: watched.factors() for name, watched in own.items()}
        result = CalibrationResult(layers=layers, tensors=self._tensor_factors())
        if self._on_end is not None:
            self._on_end(result)
        self._result = result
        batches = max(seen for seen, _ in self.progress.values())
        count = len(self._layers)
        logger.info("calibrated %d of %d layers (%d %s)", count, count, batches, "batch" if batches == 1 else "batches")
        for own in self._layers.values():
            for watched in own.values():
                watched.forget()
        self._tensors = {}

    def _tensor_factors(self) -> dict[str, ActivationFactors]:
        seen = {name: observer for name, observer in self._tensors.items() if observer.batches}
        return {name: factors for name, observer in seen.items() if (factors := _tensor_factors(name, observer))}


def _tensor_factors(name: str, observer: TensorObserver) -> ActivationFactors | None:
    try:
        return observer.result()
    except AmctError as error:
        logger.info('tensor "%s" is left out: %s', name, error)
        return None


_SHOWN_LAYERS = 5


@dataclass
class _Watched:
    """A stream with its observer and what it has seen."""

    stream: Stream
    observer: Observer = field(init=False)
    seen: int = 0

    def __post_init__(self) -> None:
        self.observer = make_observer(self.stream.settings, symmetric_scale=self.stream.symmetric_scale)

    @property
    def described(self) -> str:
        what = "" if self.stream.name == INPUT else f" ({self.stream.name})"
        return f'layer "{self.stream.layer}"{what}'

    def factors(self) -> ActivationFactors:
        try:
            found = self.observer.result()
        except AmctError as error:
            raise CalibrationError(f"{self.described}: {error}") from error
        if bool(found.near_zero.any()):
            logger.warning("%s: all values are (as good as) zero, so the scale is 1", self.described)
        if self.stream.force_fp16:
            found = replace(found, scale=round_scale_to_fp16(found.scale))
        return found

    def forget(self) -> None:
        """Let the data go, once the factors are known."""
        self.observer = make_observer(self.stream.settings, symmetric_scale=self.stream.symmetric_scale)


def _progress(own: Mapping[str, _Watched]) -> Progress:
    """Of a layer: its slowest stream."""
    slowest = min(own.values(), key=lambda watched: watched.seen - watched.stream.batch_num)
    return slowest.seen, slowest.stream.batch_num


class _Bar:
    """A progress bar that lives as long as the user's loop: drawn from the first batch on, gone with the last."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._shown = 0
        self._stack = ExitStack()
        self._advance: progress.Advance | None = None
        # A loop that never comes to its end must not leave the terminal without a cursor.
        self._cleanup = finalize(self, self._stack.close)

    def move_to(self, done: int) -> None:
        if self._total == 1:
            return
        if self._advance is None:
            self._advance = self._stack.enter_context(progress.bar("Calibrating", self._total))
        if done > self._shown:
            self._advance(done - self._shown)
            self._shown = done

    def close(self) -> None:
        self._cleanup()
