"""Writes the files that the test of the command line needs: a small ONNX model and an array of images."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from rank_cases import net

folder = Path(sys.argv[1])
axes = {"x": {0: "n"}}
torch.onnx.export(
    net(), (torch.zeros(1, 3, 16, 16),), folder / "net.onnx", dynamo=False, input_names=["x"], dynamic_axes=axes
)
np.save(folder / "images.npy", np.random.default_rng(0).standard_normal((9, 3, 16, 16)).astype(np.float32))
