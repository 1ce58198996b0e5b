"""Where releases of torch differ in what they capture and export; all of them are right."""

from __future__ import annotations

import torch

SINCE_2_8 = torch.torch_version.TorchVersion(torch.__version__) >= (2, 8)
