"""The streams of a calibration session: what is observed of a layer, its observer, and how far it is."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.calibration.ranks import ALONE, LOCAL, Ranks
from amct.config.plan import OPEN_ENDED, LayerPlan
from amct.config.registry import activation_of
from amct.errors import AmctError, CalibrationError
from amct.numerics.affine import SymmetricScale, round_scale_to_fp16
from amct.numerics.counts.samples import SamplingObserver
from amct.numerics.observer import MergeableObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torch import Tensor

    from amct.calibration.ranks import Arrays
    from amct.config.plan import LayerPlan
    from amct.numerics.observer import Observer, TensorObserver
    from amct.numerics.qparams import Observed
    from amct.numerics.settings import ActivationSettings
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
        others: Further settings whose ranges are found in the same values.
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
    others: tuple[ActivationSettings, ...] = ()

    @property
    def described(self) -> str:
        """Layer and stream, for messages."""
        what = "" if self.name == INPUT else f", {self.name}"
        return f'layer "{self.layer}"{what}'

    def new_observer(self) -> Observer:
        """An observer that has seen nothing."""
        if self.make_observer is not None:
            return self.make_observer()
        observer = make_observer(self.settings, channel_axis=self.channel_axis, symmetric_scale=self.symmetric_scale)
        if isinstance(observer, SamplingObserver):
            observer.sample_for(self.batch_num if self.batch_num < OPEN_ENDED else None)
        return observer


def plan_streams(layers: Iterable[LayerPlan], recurrent: Collection[str] = ()) -> Iterator[Stream]:
    """Yield the streams to observe: the input of each layer, and the hidden state of the ``recurrent`` layers."""
    for layer in layers:
        for name in (INPUT, HIDDEN) if layer.name in recurrent else (INPUT,):
            yield Stream(
                layer=layer.name,
                name=name,
                settings=layer.activation,
                batch_num=layer.batch_num,
                force_fp16=layer.force_fp16,
                others=layer.other_ranges if name == INPUT else (),
            )


@dataclass
class Watched:
    """The state of a stream: its observer and batch count, or the leader stream whose factors it uses."""

    stream: Stream
    ranks: Ranks = ALONE
    leader: Watched | None = None
    observer: Observer | None = None
    shape: tuple[int, ...] = ()
    last_batch: int = 0
    """The number of the last forward pass in which it was observed."""
    needed: int = 0
    """The batches that this process must observe: all, or its share."""
    _seen: int = 0
    _last: int = -1
    """The number, among the batches of all processes, of the last one observed."""
    _found: Observed | None = None
    _begin_batch: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        stream = self.stream
        self.observer = stream.new_observer()
        if isinstance(self.observer, MergeableObserver):  # asked once: the answer takes longer than a small batch
            self._begin_batch = self.observer.begin_batch
        self.needed = stream.batch_num if stream.batch_num >= OPEN_ENDED else self.ranks.share(stream.batch_num)
        if not self.ranks.is_alone:
            need_mergeable(self.observer, stream.described)

    def follow(self, leader: Watched) -> None:
        """Use the factors of another stream."""
        self.leader, self.observer, self._begin_batch = leader, None, None

    @property
    def seen(self) -> int:
        """The number of batches observed."""
        return self._seen if self.leader is None else self.leader.seen

    @property
    def has_enough(self) -> bool:
        """Whether this process needs no further batch."""
        return (self._seen if self.leader is None else self.leader.seen) >= self.needed

    @property
    def has_factors(self) -> bool:
        """Whether the factors were computed, so that nothing of what was observed is left."""
        return self._found is not None

    @property
    def last(self) -> int:
        """The number, among the batches of all processes, of the last one observed."""
        return self._last if self.leader is None else max(self._last, self.leader._last)

    @property
    def last_shape(self) -> tuple[int, ...]:
        """The shape of the last tensor."""
        return tuple(self.shape) or (self.leader.last_shape if self.leader is not None else ())

    def observe(self, x: Tensor, *, counts: bool) -> None:
        """Pass a tensor to the observer; ``counts`` unless it belongs to the same batch as the one before.

        Raises:
            CalibrationError: The data is invalid; the message names layer and batch.
        """
        if self._found is not None:
            raise CalibrationError(f"{self.stream.described} is called again in a batch in which it was called once")
        assert self.observer is not None, "the factors of a leader are not searched twice"
        number = self.ranks.number(self._seen if counts else max(self._seen - 1, 0))
        if self._begin_batch is not None:
            self._begin_batch(number)
        try:
            self.observer.observe(x)
        except AmctError as error:
            raise CalibrationError(f"{self.stream.described}, batch {number + 1}: {error}") from error
        self._seen += counts
        self._last = number
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s: %d/%d batches", self.stream.described, self.seen, self.needed)

    def factors(self) -> Observed:
        """Return the factors; they are computed once, and the observer and its data are then freed."""
        if self._found is None:
            self._found = self._search() if self.leader is None else self.leader.factors()
            self.observer = self._begin_batch = None
        return self._found

    @property
    def is_near_zero(self) -> bool:
        """Whether the search found nothing but (practically) zeros."""
        return self._found is not None and bool(self._found.near_zero.any())

    def _search(self) -> Observed:
        assert self.observer is not None, "searched once"
        try:
            found = self.observer.result()
        except AmctError as error:
            raise CalibrationError(f"{self.stream.described}: {error}") from error
        if self.stream.others and isinstance(self.observer, SamplingObserver):
            found = replace(found, others=tuple(self._found_by(self.observer, each) for each in self.stream.others))
        if self.stream.force_fp16:
            found = replace(found, scale=round_scale_to_fp16(found.scale))
        return found

    def _found_by(self, seen: SamplingObserver, settings: ActivationSettings) -> tuple[ActivationSettings, Observed]:
        """What other settings find in the values that were observed."""
        observer = make_observer(settings, channel_axis=self.stream.channel_axis, symmetric_scale=seen.symmetric_scale)
        assert isinstance(observer, SamplingObserver)
        observer.look_at(seen)
        return settings, observer.result()

    # -- its data as arrays --------------------------------------------------------------------------------------------

    def state(self) -> Arrays:
        """What was observed so far: the observer's arrays, the number of batches and the last shape."""
        arrays = {
            "batches": np.array([self._seen, self.last], np.int64),
            "shape": np.array(self.shape, np.int64),
        }
        if self.leader is None:
            arrays |= {f"observer {name}": array for name, array in mergeable(self.observer).state().items()}
        return arrays

    def restore(self, state: Arrays) -> None:
        """Replace what was observed by a state of the same stream.

        Raises:
            CalibrationError: It does not belong to such a stream.
        """
        seen, last, shape = _batches_and_shape(state, self.stream)
        if self.leader is None:
            mergeable(self.observer).restore(_of_observer(state))
        self._seen, self._last, self.shape = seen, last, shape

    def merge(self, state: Arrays) -> None:
        """Add what another process has observed of the same stream.

        Raises:
            CalibrationError: It does not belong to such a stream.
        """
        seen, last, shape = _batches_and_shape(state, self.stream)
        if shape and last > self._last:
            self.shape, self._last = shape, last
        if self.leader is None:
            merge_state(mergeable(self.observer), mergeable(self.stream.new_observer()), _of_observer(state))
            self._seen += seen

    def settle(self, total: int) -> None:
        """Prepare for merging: ``total`` is the number of values that all processes have observed."""
        self._last = self.last
        if self.leader is None:
            mergeable(self.observer).expect(total)


def _batches_and_shape(state: Mapping[str, Any], stream: Stream) -> tuple[int, int, tuple[int, ...]]:
    if not {"batches", "shape"} <= state.keys() or state["batches"].shape != (2,) or state["shape"].ndim != 1:
        raise CalibrationError(f"{stream.described}: the state of another calibration does not fit it")
    seen, last = state["batches"].tolist()
    return seen, last, tuple(state["shape"].tolist())


def _of_observer(state: Arrays) -> Arrays:
    return {name.removeprefix("observer "): array for name, array in state.items() if name.startswith("observer ")}


def merge_state(observer: MergeableObserver, fresh: MergeableObserver, state: Arrays) -> None:
    """Add to an observer the state of another one; ``fresh`` is an observer of the same settings without data."""
    fresh.restore(state)
    observer.merge(fresh)


def mergeable(observer: object) -> MergeableObserver:
    """The same observer, which has been checked before."""
    assert isinstance(observer, MergeableObserver)
    return observer


def need_mergeable(observer: TensorObserver | None, described: str) -> None:
    """Refuse an observer whose data cannot be shared out among processes.

    Raises:
        CalibrationError: It lacks the methods for that.
    """
    if observer is not None and not isinstance(observer, MergeableObserver):
        raise CalibrationError(
            f"{described}: its activation algorithm ({type(observer).__name__}) cannot be calibrated by several "
            "processes together: its observer needs begin_batch, state, restore, expect, count and merge; add them, or "
            f"set the environment variable {LOCAL}=1"
        )


def progress_of(own: Mapping[str, Watched]) -> Progress:
    """The progress of a layer, that of its stream with the most missing batches."""
    slowest = min(own.values(), key=lambda each: each.seen - each.needed)
    return slowest.seen, slowest.needed


class ObservedTensors:
    """Tensors between layers that are observed while a model runs; one with invalid data is left out of the result.

    Args:
        tensors: A new observer for each tensor, by name.
    """

    def __init__(self, tensors: Mapping[str, TensorObserver]) -> None:
        self._tensors = dict(tensors)

    def observe_tensor(self, name: str, x: Tensor) -> None:
        """Observe one batch of a tensor."""
        observer = self._tensors.get(name)
        if observer is None:
            return
        try:
            observer.observe(x)
        except AmctError as error:
            self.give_up_tensor(name, str(error))

    def give_up_tensor(self, name: str, reason: str) -> None:
        """Leave a tensor out of the result."""
        if self._tensors.pop(name, None) is not None:
            logger.info('tensor "%s" is not observed: %s', name, reason)

    def tensor_qparams(self) -> dict[str, Observed]:
        """The parameters of the tensors that were seen."""
        seen = {name: observer for name, observer in self._tensors.items() if observer.batches}
        return {name: qparams for name, observer in seen.items() if (qparams := _qparams(name, observer))}


def _qparams(name: str, observer: TensorObserver) -> Observed | None:
    try:
        return observer.result()
    except AmctError as error:
        logger.info('tensor "%s" is left out: %s', name, error)
        return None


# -- Creates observers from the activation settings of a plan ----------------------------------------------------------


def make_observer(
    settings: ActivationSettings,
    *,
    channel_axis: int | None = None,
    symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE,
) -> Observer:
    """Return a new observer.

    Args:
        settings: The settings of a registered activation algorithm.
        channel_axis: The axis with one scale per channel; None: one scale for the tensor.
        symmetric_scale: The divisor of a symmetric range: that of the PyTorch dialect, or Caffe's ``FULL_RANGE``.

    Raises:
        ArgumentTypeError: No algorithm is registered for this class of settings.
    """
    return activation_of(settings).observer(settings, channel_axis=channel_axis, symmetric_scale=symmetric_scale)
