"""Collects the largest activation of every input channel, batch by batch, for DMQ's balance factors."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.calibration.ranks import ALONE, Meeting, Ranks, fingerprint
from amct.errors import AmctError, CalibrationError
from amct.numerics.balancing import activation_maximum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from amct.calibration.ranks import Arrays


class BalanceSession:
    """Accumulates the maximum of every input channel of some layers over all batches.

    Args:
        layers: The names of the layers.
        on_batch: Called after each batch with the maxima of the layers that have been executed so far; if several
            processes calibrate together, called once, with the maxima of all of them, first in the process of rank 0.
        ranks: The processes that calibrate together.
        batch_num: After how many batches of all processes they meet; None: when ``finish`` is called.
    """

    def __init__(
        self,
        layers: Iterable[str],
        on_batch: Callable[[Mapping[str, Tensor]], None],
        *,
        ranks: Ranks = ALONE,
        batch_num: int | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._on_batch = on_batch
        self._maxima: dict[str, Tensor] = {}
        self._depth = 0
        self._ranks = ranks
        self._share = None if batch_num is None else ranks.share(batch_num)
        self._seen = 0
        self._joined: Meeting | None = None
        self._has_ended = ranks.is_alone

    @property
    def _meeting(self) -> Meeting | None:
        """The meeting with the other processes, which begins with the first batch; None without one."""
        if self._joined is None and not self._has_ended:
            self._joined = Meeting(self._ranks, fingerprint(["balance", *self._layers]))
        return None if self._has_ended else self._joined

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Enclose one forward pass; calls may be nested, and the outermost one ends the batch."""
        self._depth += 1
        try:
            with nullcontext() if self._meeting is None else self._meeting.together():
                yield
        finally:
            self._depth -= 1
        if self._depth > 0:
            return
        self._seen += 1
        if self._meeting is not None:
            self._meeting.beat(f"{self._seen} batches run for balancing")
            if self._seen == self._share:
                self.finish()
        elif self._ranks.is_alone and self._maxima:
            self._on_batch(dict(self._maxima))

    def finish(self) -> None:
        """Meet the other processes, if there are any: all get the maxima of all batches."""
        meeting = self._meeting
        if meeting is None:
            return
        self._has_ended = True
        with meeting.together():
            meeting.enter()
            meeting.collect(self.state, self._merge)
            if not self._ranks.is_first:
                self._merge(meeting.receive())
            if self._maxima:
                self._on_batch(dict(self._maxima))
            if self._ranks.is_first:
                meeting.publish(self.state())

    def observe(self, layer: str, x: Tensor, channel_axis: int) -> None:
        """Add the input of a layer.

        Raises:
            CalibrationError: It is empty, or contains NaN or infinity; the message names the layer.
        """
        assert layer in self._layers
        try:
            found = activation_maximum(x, channel_axis).cpu()
            if not bool(torch.isfinite(found).all()):
                raise CalibrationError(
                    "the activation holds NaN or infinite values; look for a diverged layer or broken input data"
                )
        except AmctError as error:
            raise CalibrationError(f'layer "{layer}": {error}') from error
        self._add(layer, found)

    def _add(self, layer: str, found: Tensor) -> None:
        before = self._maxima.get(layer)
        self._maxima[layer] = found if before is None else torch.maximum(before, found)

    is_observing = True
    without_state = ""

    def restore(self, state: Arrays, batches: int) -> None:
        """Replace what was observed by the state of a session of the same layers after so many batches.

        Raises:
            CalibrationError: It does not belong to such a session.
        """
        numbers = {str(number) for number in range(len(self._layers))}
        if not state.keys() <= numbers or any(each.dtype != np.float32 or each.ndim != 1 for each in state.values()):
            raise CalibrationError("the state of another session does not fit: the largest values of its channels")
        self._maxima = {self._layers[int(number)]: torch.from_numpy(array.copy()) for number, array in state.items()}
        self._seen = batches
        if self._ranks.is_alone and self._maxima:
            self._on_batch(dict(self._maxima))

    def state(self) -> Arrays:
        """What was observed so far, as arrays."""
        return {
            str(number): self._maxima[layer].numpy()
            for number, layer in enumerate(self._layers)
            if layer in self._maxima
        }

    def _merge(self, state: Arrays) -> None:
        for number, array in state.items():
            self._add(self._layers[int(number)], torch.from_numpy(array))
