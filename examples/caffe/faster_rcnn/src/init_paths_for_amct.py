"""Makes ``import caffe`` and ``import rpn`` work: import this module first.

``caffe`` is the engine of this toolkit. The Python layers are those of the folder ``rpn`` here, or those of a
checkout of py-faster-rcnn in ``src/py-faster-rcnn``, if there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from amct_caffe import install_as_caffe

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "py-faster-rcnn" / "lib"

install_as_caffe(force=True)
for folder in (HERE, LIBRARY):
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
