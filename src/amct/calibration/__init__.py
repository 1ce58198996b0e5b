"""Calibration: observes activations batch by batch in the user's loop, and computes their quantization factors.

The package works on tensors and is independent of the model format: the PyTorch and Caffe packages pass activations in
and get factors back. Sessions share no state, so they can be interleaved.
"""

from amct.calibration.balance import BalanceSession
from amct.calibration.ranks import ALONE, Ranks, all_ranks
from amct.calibration.record_files import RecordFiles, read_progress
from amct.calibration.session import CalibrationResult, CalibrationSession, Stream
from amct.calibration.streams import make_observer

__all__ = [
    "ALONE",
    "BalanceSession",
    "CalibrationResult",
    "CalibrationSession",
    "Ranks",
    "RecordFiles",
    "Stream",
    "all_ranks",
    "make_observer",
    "read_progress",
]
