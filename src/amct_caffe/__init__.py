"""AMCT's names for Caffe models: ``import amct_caffe``. Everything is implemented in ``amct.caffe``."""

from __future__ import annotations

from amct.caffe.pycaffe.install import install_as_caffe

__all__ = ["install_as_caffe"]
