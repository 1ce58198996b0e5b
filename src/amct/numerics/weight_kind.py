"""The memory layouts of weights. This module imports no torch."""

from __future__ import annotations

from enum import Enum


class WeightKind(Enum):
    """Where a weight keeps its output channels."""

    CONV = "conv"
    """``[Cout, Cin/groups, k...]`` of Conv1d/2d/3d."""
    CONV_TRANSPOSE = "conv_transpose"
    """``[Cin, Cout/groups, k...]``; group g owns rows g·Cin/groups and following."""
    LINEAR = "linear"
    """``[Cout, Cin]``."""
    RNN = "rnn"
    """``[gates · hidden, input]`` of LSTM/GRU; without channel_wise, ``groups`` gates have a scale each."""

    @property
    def channel_axis(self) -> int:
        """The axis of the layer's input that holds its channels (features)."""
        return -1 if self in (WeightKind.LINEAR, WeightKind.RNN) else 1
