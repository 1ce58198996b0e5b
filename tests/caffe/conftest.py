"""Prototxt files for tests of the Caffe engine."""

from __future__ import annotations

import pytest
from caffe_nets import A


@pytest.fixture
def write(tmp_path):
    def write(text, name="net.prototxt"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def a(write):
    return write(A, "a.prototxt")
