"""Channel pruning: half of the channels of a small network are removed, then it is trained again.

python examples/pytorch/prune.py [folder]
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
print(pruned.summary())
train(pruned.model.train(), pruned.model, epochs=2)
print(f"after training: {accuracy(pruned.model):.2f} %")
files = pruned.save(where / "pruned")
pruned.report(where / "pruned.html", files=files)
