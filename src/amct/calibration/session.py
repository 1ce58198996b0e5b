"""A calibration session: passes activations to observers, and ends when every layer has observed its batches.

A layer has one or more streams (its input; each bottom of a Caffe layer; the hidden state of an LSTM). A stream has an
observer, or uses the factors of another stream with the same values. Tensors between layers, which only some exports
need, can be observed too; the session does not wait for them.

The caller wraps each forward pass in ``with session.batch():`` and calls ``observe`` when a layer is executed.
Activations are passed to the observers immediately and not stored. Batches beyond ``batch_num`` are ignored.

Several processes can calibrate together (``ranks``): each has a session of its own that observes its share of the
batches; when it has them, it meets those of the other processes, and all end with the same result.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from amct.calibration.ranks import ALONE, Meeting, Ranks, fingerprint, joined, part_of
from amct.calibration.streams import (
    HIDDEN,
    INPUT,
    OUTPUT,
    ObservedTensors,
    Stream,
    Watched,
    merge_state,
    mergeable,
    need_mergeable,
    progress_of,
)
from amct.config.plan import OPEN_ENDED
from amct.errors import ArgumentError, CalibrationError, did_you_mean
from amct.log import ProgressBar
from amct.numerics.observer import MergeableObserver, is_dense
from amct.numerics.qparams import Observed
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from amct.calibration.ranks import Arrays
    from amct.numerics.observer import TensorObserver
    from amct.record import Progress

__all__ = ["HIDDEN", "INPUT", "OPEN_ENDED", "OUTPUT", "CalibrationResult", "CalibrationSession", "Stream"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """The factors by layer and stream, and those of the observed tensors between layers.

    ``shapes`` has the shape of the last tensor of each stream.
    """

    layers: Mapping[str, Mapping[str, Observed]]
    tensors: Mapping[str, Observed] = field(default_factory=dict)
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)


class CalibrationSession(ObservedTensors):
    """Observes the activations of one model until every layer has observed its batches.

    Args:
        streams: The streams to observe, in the order of the model.
        tensors: Observers of the tensors between layers, by name; they observe until the session ends.
        on_progress: Called after each batch except the last, with (observed, needed) batches of every layer.
        on_ready: Called with the result of the complete layers when one of them is executed again while others still
            need batches, because those may never be executed. Called again only when more layers are complete.
        on_end: Called once, with the result, when the session ends; in every process, first in the one of rank 0.
        show_bar: Whether there is a progress bar.
        ranks: The processes that calibrate together.
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
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._layers: dict[str, dict[str, Watched]] = {}
        for stream in (wanted := list(streams)):
            own = self._layers.setdefault(stream.layer, {})
            if stream.name in own:
                raise ArgumentError(f'layer "{stream.layer}": "{stream.name}" is to be observed twice')
            own[stream.name] = Watched(stream, ranks)
        for stream in wanted:
            if stream.same_as is not None:
                self._find(stream.layer, stream.name).follow(self._find(*stream.same_as))
        if not self._layers:
            raise CalibrationError("there is no layer to calibrate: every layer is switched off")
        super().__init__(tensors or {})
        self._tensor_names = tuple(self._tensors)
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_end = on_end
        self._depth = 0
        self._called_once: Collection[str] = ()
        """The layers of which the present forward pass has one call each."""
        self._batches = 0
        """The number of forward passes that were begun."""
        self._ready = 0
        """The number of layers in the last call of ``on_ready``."""
        self._result: CalibrationResult | None = None
        most = max(watched.stream.batch_num for own in self._layers.values() for watched in own.values())
        self._bar = ProgressBar(
            ranks.share(most) if most < OPEN_ENDED else None, shown=show_bar and most > 1 and ranks.is_first
        )
        if not ranks.is_alone:
            for name, observer in self._tensors.items():
                need_mergeable(observer, f'tensor "{name}"')
        self._what = fingerprint([*map(_described, wanted), *self._tensor_names])
        self._joined: Meeting | None = None

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
        return {layer: progress_of(own) for layer, own in self._layers.items()}

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
            f"calibrated {total - len(waiting)} of {counted(total, 'layer')}; {counted(most, 'more batch')} needed for "
            f"{shown}{rest}"
        )

    @contextmanager
    def batch(self, called_once: Collection[str] = ()) -> Iterator[None]:
        """Enclose one forward pass; after the outermost one without an error, report progress or end the session.

        Args:
            called_once: Layers that are certainly called once in it. In their last batch their factors are computed
                at once, and what was observed of one layer is freed before another keeps its values. Not if several
                processes calibrate together, which merge what they observed first.
        """
        if self._depth == 0:
            self._batches += 1
            self._called_once = called_once if self._ranks.is_alone else ()
        self._depth += 1
        try:
            with nullcontext() if self.done else self._together():
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
        if self._result is not None:
            return
        if x.is_meta or not is_dense(x):
            kind = "on the meta device" if x.is_meta else "in sparse or nested form"
            raise CalibrationError(
                f'layer "{layer}": a tensor {kind} cannot be observed; give dense tensors with values'
            )
        watched = self._find(layer, name)
        watched.shape = x.shape
        if watched.leader is not None:
            return
        again = self._depth > 0 and watched.last_batch == self._batches
        if watched.has_enough and not again:
            self._tell_ready()
            return
        with self._together():
            watched.observe(x, counts=not again)
            if layer in self._called_once and self._depth and watched.has_enough:
                watched.factors()
        watched.last_batch = self._batches
        if self._depth == 0 and (ends_batch or (watched.has_enough and not self._waiting())):
            self._after_batch()

    def finish(self, *, complete: bool = False) -> None:
        """End the session with the batches observed so far; does nothing if it has already ended.

        Args:
            complete: Every layer must have observed all its batches, in all processes together.

        Raises:
            CalibrationError: A layer has not observed any batch, or not all; the message names it.
        """
        if not self.done:
            self._end(self._check_complete if complete else self._check_seen)

    def _check_complete(self) -> None:
        for own in self._layers.values():
            for watched in own.values():
                watched.needed = watched.stream.batch_num
        if missing := self.missing():
            raise CalibrationError(missing)

    def _check_seen(self) -> None:
        unseen = [layer for layer, (seen, _) in self.progress.items() if seen == 0]
        if unseen:
            shown = ", ".join(f'"{layer}"' for layer in unseen[:_SHOWN_LAYERS])
            raise CalibrationError(
                f"no batch reaches {len(unseen)} of {counted(len(self._layers), 'layer')}: {shown}; "
                "calibrate with data that reaches them, or leave them in float"
            )

    def close(self) -> None:
        """Remove the progress bar of a session that is aborted."""
        self._bar.close()

    def _waiting(self) -> bool:
        # From the end: layers are executed in this order, so the last ones wait longest.
        return any(not watched.has_enough for own in reversed(self._layers.values()) for watched in own.values())

    def _tell_ready(self) -> None:
        if self._on_ready is None:
            return
        ready = {layer: own for layer, own in self._layers.items() if all(each.has_enough for each in own.values())}
        if len(ready) > self._ready:
            self._on_ready(_result_of(ready))
            self._ready = len(ready)

    def _find(self, layer: str, name: str) -> Watched:
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
        if self._meeting is not None:
            seen, needed = min(progress_now.values(), key=lambda each: each[0] - each[1])
            self._meeting.beat(f"{seen} batches run" if needed >= OPEN_ENDED else f"{seen} of its {needed} batches run")
        if any(seen < needed for seen, needed in progress_now.values()):
            if self._on_progress is not None:
                self._on_progress(progress_now)
            return
        self._end()

    def _end(self, check: Callable[[], None] | None = None) -> None:
        self._bar.close()
        with self._together():
            result = self._own_result(check) if self._meeting is None else self._common_result(self._meeting, check)
        self._result = result
        batches = max(seen for seen, _ in self.progress.values())
        count = len(self._layers)
        if self._ranks.is_first:
            logger.info("calibrated %d of %s (%s)", count, counted(count, "layer"), counted(batches, "batch"))
        self._tensors = {}

    def _own_result(self, check: Callable[[], None] | None) -> CalibrationResult:
        if check is not None:
            check()
        result = replace(_result_of(self._layers, self._beat), tensors=self.tensor_qparams())
        zero = [each.stream.described for each in self._streams() if each.is_near_zero]
        if zero:
            more = f" and {len(zero) - _SHOWN_LAYERS} more" if len(zero) > _SHOWN_LAYERS else ""
            listed = ", ".join(zero[:_SHOWN_LAYERS])
            logger.warning("%s%s: all values are (as good as) zero, so the scale is 1", listed, more)
        if self._on_end is not None:
            self._on_end(result)
        return result

    # -- several processes ---------------------------------------------------------------------------------------------

    def _common_result(self, meeting: Meeting, check: Callable[[], None] | None) -> CalibrationResult:
        """Meet the other processes: the first one computes and writes, then all have the same result."""
        streams = self._streams()
        observers = [each.observer for each in streams]
        totals = meeting.enter([0 if observer is None else mergeable(observer).count for observer in observers])
        for each, total in zip(streams, totals, strict=True):
            each.settle(total)
        meeting.collect(self.state, self._merge)
        if self._ranks.is_first:
            result = self._own_result(check)
            meeting.publish(_result_as_arrays(result, self._tensor_names))
            return result
        result = _result_from_arrays(meeting.receive(), self._layers, self._tensor_names)
        if self._on_end is not None:
            self._on_end(result)
        return result

    def _together(self) -> AbstractContextManager[None]:
        """The context of work whose failure ends the other processes too."""
        return _NO_CONTEXT if self._ranks.is_alone or self._meeting is None else self._meeting.together()

    def _beat(self) -> None:
        if self._meeting is not None:
            self._meeting.beat("computes the factors")

    def _streams(self) -> list[Watched]:
        return [watched for own in self._layers.values() for watched in own.values()]

    @property
    def _meeting(self) -> Meeting | None:
        """The meeting with the other processes; None if there are none. It begins with the first batch."""
        if self._joined is None and not self._ranks.is_alone:
            self._joined = Meeting(self._ranks, self._what)
        return self._joined

    @property
    def is_observing(self) -> bool:
        """Whether it still takes batches and has all that it observed: of layers with factors nothing is left."""
        return not self.done and not any(each.has_factors for each in self._streams())

    @property
    def without_state(self) -> str:
        """The first stream or tensor whose observer cannot be kept in a file; "" if all can."""
        watched = {each.stream.described: each.observer for each in self._streams() if each.leader is None}
        tensors = {f'tensor "{name}"': observer for name, observer in self._tensors.items()}
        found = (name for name, each in (watched | tensors).items() if not isinstance(each, MergeableObserver))
        return next(found, "")

    def restore(self, state: Arrays, batches: int) -> None:
        """Replace what was observed by the state of a session of the same streams after so many batches.

        Raises:
            CalibrationError: It does not belong to such a session.
        """
        for number, watched in enumerate(self._streams()):
            watched.restore(part_of(state, str(number)))
            if not 0 <= watched.seen <= batches:
                raise CalibrationError(f"{watched.stream.described}: {watched.seen} of {batches} batches observed")
        for number, name in enumerate(self._tensor_names):
            part = part_of(state, f"tensor {number}")
            if part:
                mergeable(self._tensors[name]).restore(part)
            else:
                self.give_up_tensor(name, "it was given up before the calibration was interrupted")
        self._batches = batches
        self._bar.start_at(min(seen for seen, _ in self.progress.values()))

    def state(self) -> Arrays:
        """What was observed so far, as arrays that files hold without pickle."""
        parts = {str(number): watched.state() for number, watched in enumerate(self._streams())}
        for number, name in enumerate(self._tensor_names):
            if name in self._tensors:
                parts[f"tensor {number}"] = dict(mergeable(self._tensors[name]).state())
        return joined(parts)

    def _merge(self, arrays: Arrays) -> None:
        """Add the state of another process; a tensor that one of them has given up is left out."""
        for number, watched in enumerate(self._streams()):
            watched.merge(part_of(arrays, str(number)))
        for number, name in enumerate(self._tensor_names):
            observer = self._tensors.get(name)
            part = part_of(arrays, f"tensor {number}")
            if observer is not None and part:
                merge_state(mergeable(observer), mergeable(_without_data(observer)), part)
            else:
                self.give_up_tensor(name, "another process has given it up")


def _result_of(
    layers: Mapping[str, Mapping[str, Watched]], beat: Callable[[], None] = lambda: None
) -> CalibrationResult:
    def factors(each: Watched) -> Observed:
        beat()
        return each.factors()

    return CalibrationResult(
        layers={layer: {name: factors(each) for name, each in own.items()} for layer, own in layers.items()},
        shapes={layer: {name: each.last_shape for name, each in own.items()} for layer, own in layers.items()},
    )


def _without_data(observer: TensorObserver) -> TensorObserver:
    """A new observer of the same settings."""
    fresh: TensorObserver = replace(observer)  # type: ignore[type-var]  # observers of tensors are dataclasses
    return fresh


def _described(stream: Stream) -> str:
    return repr((stream.layer, stream.name, stream.settings, stream.batch_num))


def _result_as_arrays(result: CalibrationResult, tensors: Sequence[str]) -> Arrays:
    parts: dict[str, Arrays] = {}
    streams = [(layer, name) for layer, own in result.layers.items() for name in own]
    for number, (layer, name) in enumerate(streams):
        shape = np.array(result.shapes[layer][name], np.int64)
        parts[str(number)] = {**result.layers[layer][name].as_arrays(), "shape": shape}
    for number, name in enumerate(tensors):
        if name in result.tensors:
            parts[f"tensor {number}"] = result.tensors[name].as_arrays()
    return joined(parts)


def _result_from_arrays(
    arrays: Arrays, layers: Mapping[str, Mapping[str, Watched]], tensors: Sequence[str]
) -> CalibrationResult:
    streams = [(layer, name) for layer, own in layers.items() for name in own]
    found: dict[str, dict[str, Observed]] = {layer: {} for layer in layers}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {layer: {} for layer in layers}
    for number, (layer, name) in enumerate(streams):
        part = part_of(arrays, str(number))
        shapes[layer][name] = tuple(part.pop("shape").tolist())
        found[layer][name] = Observed.from_arrays(part)
    parts = {name: part_of(arrays, f"tensor {number}") for number, name in enumerate(tensors)}
    between = {name: Observed.from_arrays(part) for name, part in parts.items() if part}
    return CalibrationResult(layers=found, tensors=between, shapes=shapes)


_SHOWN_LAYERS = 5
_NO_CONTEXT = nullcontext()
