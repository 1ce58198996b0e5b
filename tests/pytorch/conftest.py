"""What the tests of PyTorch models share: exporting many small models in little time."""

from __future__ import annotations

import functools

import pytest

try:
    from torch.onnx._internal.exporter._registration import ONNXRegistry
except ImportError:  # another torch release: the tests take longer, nothing else
    ONNXRegistry = None


@pytest.fixture(scope="session", autouse=True)
def _torchs_table_of_operators_is_built_once():
    """torch.onnx builds its table of 500 operators for each model, which takes longer than a small one's export."""
    import amct.pytorch.qat.single_op.onnx_operators  # noqa: F401  adds to the table of torch before 2.8

    with pytest.MonkeyPatch.context() as patch:
        if ONNXRegistry is not None:
            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield
