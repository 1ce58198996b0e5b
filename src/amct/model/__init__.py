"""What a network is to every front door: layer kinds, facts of layers, one graph, fusion patterns, quant.json.

Each front door (PyTorch, Caffe, ONNX) describes its model as a ``Graph`` of ``Node`` and its quantizable layers as
``LayerFacts``. A layer that is left out is reported as a ``Skip`` with the reason. Nothing here imports torch.
"""

from amct.model.graph import (
    Folded,
    Fusion,
    FusionPattern,
    Graph,
    Node,
    TensorIndex,
    find_fusions,
    find_leading_fusions,
    fold_batch_norms,
)
from amct.model.kinds import LayerFacts, Skip

__all__ = [
    "Folded",
    "Fusion",
    "FusionPattern",
    "Graph",
    "LayerFacts",
    "Node",
    "Skip",
    "TensorIndex",
    "find_fusions",
    "find_leading_fusions",
    "fold_batch_norms",
]
