"""2:4 sparsity: two of every four weights of a small network become zero.

python examples/pytorch/sparse.py [folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

from shared import accuracy, calibration_batches, train, trained_network

import amct.pytorch as amct

model, batches = trained_network(), calibration_batches()
where = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
print(f"float: {accuracy(model):.2f} %")

sparse = amct.sparsify(model, batches[0])
print(sparse.summary())
train(sparse.model.train(), sparse.model, epochs=2)
print(f"after training: {accuracy(sparse.model):.2f} %")
sparse.save(where / "sparse")
