"""A calibration session: passes activations to observers, and ends when every layer has observed its batches.

A layer has one or more streams (its input; each bottom of a Caffe layer; the hidden state of an LSTM). A stream has an
observer, or uses the factors of another stream with the same values. Tensors between layers, which only some exports
need, can be observed too; the session does not wait for them.

The caller wraps each forward pass in ``with session.batch():`` and calls ``observe`` when a layer is executed.
Activations are passed to the observers immediately and not stored. Batches beyond ``batch_num`` are ignored.
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
OUTPUT = "output"
HIDDEN = "hidden state"


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One activation of a layer to observe.

    Attributes:
        layer: The name of the layer.
        name: The name of the stream, unique in the layer: "input", "hidden state", "input 1".
        settings: The settings of the activation algorithm.
        batch_num: The number of batches needed.
        force_fp16: Whether the scale is rounded to half precision.
        symmetric_scale: The divisor of a symmetric range.
        channel_axis: The axis with one scale per channel; None: one scale for the tensor.
        make_observer: Creates the observer; None: it is created from the settings above.
        same_as: Layer and name of a stream with the same values, whose factors are used instead of observing this one.
    """

    layer: str
    name: str = INPUT
    settings: ActivationSettings
    batch_num: int = 1
    force_fp16: bool = False
    symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE
    channel_axis: int | None = None
    make_observer: Callable[[], Observer] | None = None
    same_as: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """The factors by layer and stream, and those of the observed tensors between layers.

    ``shapes`` has the shape of the last tensor of each stream.
    """

    layers: Mapping[str, Mapping[str, ActivationFactors]]
    tensors: Mapping[str, ActivationFactors] = field(default_factory=dict)
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)


class CalibrationSession:
    """Observes the activations of one model until every layer has observed its batches.

    Args:
        streams: The streams to observe, in the order of the model.
        tensors: Observers of the tensors between layers, by name; they observe until the session ends.
        on_progress: Called after each batch except the last, with (observed, needed) batches of every layer.
        on_ready: Called with the result of the complete layers when one of them is executed again while others still
            need batches, because those may never be executed. Called again only when more layers are complete.
        on_end: Called once, with the result, when the session ends.
        show_bar: Whether there is a progress bar.
    """

    def __init__(
        self,
        streams: Iterable[Stream],
        *,
        tensors: Mapping[str, TensorObserver] | None = None,
        on_progress: Callable[[Mapping[str, Progress]], None] | None = None,
        on_ready: Callable[[CalibrationResult], None] | None = None,
        on_end: Callable[[CalibrationResult], None] | None = None,
        show_bar: bool = True,
    ) -> None:
        self._layers: dict[str, dict[str, _Watched]] = {}
        for stream in (wanted := list(streams)):
            own = self._layers.setdefault(stream.layer, {})
            if stream.name in own:
                raise ArgumentError(f'layer "{stream.layer}": "{stream.name}" is to be observed twice')
            own[stream.name] = _Watched(stream)
        for stream in wanted:
            if stream.same_as is not None:
                self._find(stream.layer, stream.name).follow(self._find(*stream.same_as))
        if not self._layers:
            raise CalibrationError("there is no layer to calibrate: every layer is switched off")
        self._tensors = dict(tensors or {})
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_end = on_end
        self._depth = 0
        self._batches = 0
        """The number of forward passes that were begun."""
        self._ready = 0
        """The number of layers in the last call of ``on_ready``."""
        self._result: CalibrationResult | None = None
        most = max(watched.stream.batch_num for own in self._layers.values() for watched in own.values())
        self._bar = _Bar(most if most < OPEN_ENDED else None, shown=show_bar and most > 1)

    @property
    def done(self) -> bool:
        """Whether the session has ended and the result is available."""
        return self._result is not None

    @property
    def result(self) -> CalibrationResult:
        """The result of the calibration.

        Raises:
            CalibrationError: Some layers still need batches; the message names them and the number of batches.
        """
        if self._result is None:
            raise CalibrationError(self.missing())
        return self._result

    @property
    def progress(self) -> dict[str, Progress]:
        """The number of batches observed and needed, for every layer."""
        return {layer: _progress(own) for layer, own in self._layers.items()}

    def missing(self) -> str:
        """Return a sentence that names the layers that still need batches and their number; "" if there are none."""
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
        """Enclose one forward pass; after the outermost one without an error, report progress or end the session."""
        if self._depth == 0:
            self._batches += 1
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._after_batch()

    def observe(self, layer: str, x: Tensor, name: str = INPUT, *, ends_batch: bool = True) -> None:
        """Observe one batch of a stream; several calls within one ``batch()`` are one batch (a layer called twice).

        Args:
            layer: The name of the layer.
            x: The activation.
            name: The name of the stream.
            ends_batch: Outside ``batch()``, whether this is the last call of a forward pass.

        Raises:
            CalibrationError: The data is invalid (NaN, infinity, empty); the message names the layer and the batch.
            ArgumentError: There is no such layer or stream.
        """
        if self.done:
            return
        watched = self._find(layer, name)
        watched.shape = tuple(x.shape)
        if watched.leader is not None:
            return
        again = self._depth > 0 and watched.last_batch == self._batches
        if watched.has_enough and not again:
            self._tell_ready()
            return
        watched.observe(x, counts=not again)
        watched.last_batch = self._batches
        if self._depth == 0 and (ends_batch or (watched.has_enough and not self._waiting())):
            self._after_batch()

    def observe_tensor(self, name: str, x: Tensor) -> None:
        """Observe one batch of a tensor between layers; a tensor with invalid data is left out of the result."""
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
        """End the session with the batches observed so far; does nothing if it has already ended.

        Raises:
            CalibrationError: A layer has not observed any batch; the message names it.
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
        """Remove the progress bar of a session that is aborted."""
        self._bar.close()

    def _waiting(self) -> bool:
        return any(not watched.has_enough for own in self._layers.values() for watched in own.values())

    def _tell_ready(self) -> None:
        if self._on_ready is None:
            return
        ready = {layer: own for layer, own in self._layers.items() if all(each.has_enough for each in own.values())}
        if len(ready) > self._ready:
            self._on_ready(_result_of(ready))
            self._ready = len(ready)

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
        result = replace(_result_of(self._layers), tensors=self._tensor_factors())
        if self._on_end is not None:
            self._on_end(result)
        self._result = result
        batches = max(seen for seen, _ in self.progress.values())
        count = len(self._layers)
        logger.info("calibrated %d of %d layers (%d %s)", count, count, batches, "batch" if batches == 1 else "batches")
        self._tensors = {}

    def _tensor_factors(self) -> dict[str, ActivationFactors]:
        seen = {name: observer for name, observer in self._tensors.items() if observer.batches}
        return {name: factors for name, observer in seen.items() if (factors := _tensor_factors(name, observer))}


def _result_of(layers: Mapping[str, Mapping[str, _Watched]]) -> CalibrationResult:
    return CalibrationResult(
        layers={layer: {name: each.factors() for name, each in own.items()} for layer, own in layers.items()},
        shapes={layer: {name: each.last_shape for name, each in own.items()} for layer, own in layers.items()},
    )


def _tensor_factors(name: str, observer: TensorObserver) -> ActivationFactors | None:
    try:
        return observer.result()
    except AmctError as error:
        logger.info('tensor "%s" is left out: %s', name, error)
        return None


_SHOWN_LAYERS = 5


@dataclass
class _Watched:
    """The state of a stream: its observer and batch count, or the leader stream whose factors it uses."""

    stream: Stream
    leader: _Watched | None = None
    observer: Observer | None = None
    shape: tuple[int, ...] = ()
    last_batch: int = 0
    """The number of the last forward pass in which it was observed."""
    _seen: int = 0
    _found: ActivationFactors | None = None

    def __post_init__(self) -> None:
        stream = self.stream
        if stream.make_observer is not None:
            self.observer = stream.make_observer()
        else:
            self.observer = make_observer(
                stream.settings, channel_axis=stream.channel_axis, symmetric_scale=stream.symmetric_scale
            )

    def follow(self, leader: _Watched) -> None:
        self.leader, self.observer = leader, None

    @property
    def described(self) -> str:
        what = "" if self.stream.name == INPUT else f", {self.stream.name}"
        return f'layer "{self.stream.layer}"{what}'

    @property
    def seen(self) -> int:
        return self._seen if self.leader is None else self.leader.seen

    @property
    def has_enough(self) -> bool:
        return self.seen >= self.stream.batch_num

    @property
    def last_shape(self) -> tuple[int, ...]:
        return self.shape or (self.leader.last_shape if self.leader is not None else ())

    def observe(self, x: Tensor, *, counts: bool) -> None:
        assert self.observer is not None, "the factors of a leader are not searched twice"
        try:
            self.observer.observe(x)
        except AmctError as error:
            raise CalibrationError(f"{self.described}, batch {self.seen + 1}: {error}") from error
        self._seen += counts
        logger.debug("%s: %d/%d batches", self.described, self.seen, self.stream.batch_num)

    def factors(self) -> ActivationFactors:
        """Return the factors; they are computed once, and the observer and its data are then freed."""
        if self._found is None:
            self._found = self._search() if self.leader is None else self.leader.factors()
            self.observer = None
            if bool(self._found.near_zero.any()):
                logger.warning("%s: all values are (as good as) zero, so the scale is 1", self.described)
        return self._found

    def _search(self) -> ActivationFactors:
        assert self.observer is not None, "searched once"
        try:
            found = self.observer.result()
        except AmctError as error:
            raise CalibrationError(f"{self.described}: {error}") from error
        if self.stream.force_fp16:
            found = replace(found, scale=round_scale_to_fp16(found.scale))
        return found


def _progress(own: Mapping[str, _Watched]) -> Progress:
    """Return the progress of a layer, that of its stream with the most missing batches."""
    slowest = min(own.values(), key=lambda each: each.seen - each.stream.batch_num)
    return slowest.seen, slowest.stream.batch_num


class _Bar:
    """The progress bar of a session: shown from the first batch on, removed after the last one."""

    def __init__(self, total: int | None, *, shown: bool) -> None:
        self._total = total
        self._is_shown = shown
        self._moved_to = 0
        self._stack = ExitStack()
        self._advance: progress.Advance | None = None
        # restores the cursor of the terminal if the loop is aborted
        self._cleanup = finalize(self, self._stack.close)

    def move_to(self, done: int) -> None:
        if not self._is_shown:
            return
        if self._advance is None:
            self._advance = self._stack.enter_context(progress.bar("Calibrating", self._total))
        if done > self._moved_to:
            self._advance(done - self._moved_to)
            self._moved_to = done

    def close(self) -> None:
        self._cleanup()
