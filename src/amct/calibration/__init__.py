"""The calibration session: a plan, observers and a record, fed batch by batch from the user's own loop.

It knows tensors but no framework: PyTorch and Caffe put their activations in, and get factors out. Nothing here is
shared between two sessions, so they can be interleaved.
"""

from amct.calibration.balance import BalanceSession
from amct.calibration.observers import make_observer
from amct.calibration.record_files import RecordFiles, read_progress
from amct.calibration.session import CalibrationResult, CalibrationSession, Stream

__all__ = [
    "BalanceSession",
    "CalibrationResult",
    "CalibrationSession",
    "RecordFiles",
    "Stream",
    "make_observer",
    "read_progress",
]
