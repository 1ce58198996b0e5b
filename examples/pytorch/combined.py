"""Pruning and quantization-aware training together: half of the channels, 8 bits.

python examples/pytorch/combined.py [folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

from shared import accuracy, calibration_batches, train, trained_network

import amct.pytorch as amct

model, batches = trained_network(), calibration_batches()
where = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
print(f"float: {accuracy(model):.2f} %")

pruned = amct.prune(model, batches[0], ratio=0.5, batches=batches)
train(pruned.model.train(), pruned.model, epochs=2)
print(f"pruned: {accuracy(pruned.model):.2f} %")
qat = amct.prepare_qat(pruned.model, batches)
train(qat.train(), qat, epochs=1, optimizer=qat.recipe(batches).optimizer)
print(f"pruned, 8 bits: {accuracy(qat):.2f} %")
qat.save(where / "combined")
