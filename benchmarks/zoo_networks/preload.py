"""Imports what most networks need, once, in the process from which their processes are forked."""

from __future__ import annotations

import importlib
from contextlib import suppress

import torch

import amct.pytorch
from zoo_networks import measuring, registry
from zoo_networks.vision import torchvision

__all__ = ["measuring", "registry"]

with suppress(ImportError):
    torchvision()
for name in ("timm", "transformers"):
    with suppress(ImportError):
        importlib.import_module(name)

# The first quantization imports the exporter and loads compiled loops. It opens no session of onnxruntime, the
# threads of which a fork would lose.
tiny = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
amct.pytorch.quantize(tiny, [torch.ones(1, 3, 8, 8)])
