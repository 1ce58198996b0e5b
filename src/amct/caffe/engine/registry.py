"""``register`` under the name by which programs import it; layer types are registered in ``layer.py``."""

from __future__ import annotations

from amct.caffe.engine.layer import register

__all__ = ["register"]
